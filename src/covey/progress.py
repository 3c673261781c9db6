"""What a person sees while a run goes on: a live panel in a terminal, one line a step elsewhere."""

import math
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from types import TracebackType
from typing import Protocol, Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from covey.disk import unheard
from covey.units import duration

SPARK = "▁▂▃▄▅▆▇█"
TREND_STEPS = 16
"""Steps the reward's spark line shows."""
RATE_STEPS = 20
"""Steps whose pace predicts the time left."""


class Progress(Protocol):
    """Shows how a run goes. A context manager; `close` may be called more than once."""

    def update(self, step: int, metrics: Mapping[str, float]) -> None:
        """`step` steps are done, counted from 1; `metrics` are the numbers of the last one."""
        ...

    def evaluation(self, step: int, metrics: Mapping[str, float]) -> None:
        """Numbers of an evaluation after `step` steps; they stay in view until the next one."""
        ...

    def message(self, text: str) -> None:
        """Something to tell, on lines of its own."""
        ...

    def close(self) -> None: ...

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


def make_progress(num_steps: int, enabled: bool, console: Console | None = None) -> Progress:
    """A live panel where stdout is a terminal, lines where it is not, messages alone where not `enabled`."""
    console = console or Console()
    if not enabled:
        return Lines(num_steps, console, steps=False)
    return Panel(num_steps, console) if console.is_terminal else Lines(num_steps, console)


@dataclass
class Pace:
    """Predicts the time left from the pace of the last steps; what came before the first step does not count."""

    num_steps: int
    clock: Callable[[], float] = time.monotonic
    _marks: deque[tuple[int, float]] = field(default_factory=lambda: deque(maxlen=RATE_STEPS + 1))

    def mark(self, step: int) -> None:
        """`step` steps are done now."""
        self._marks.append((step, self.clock()))

    @property
    def seconds_left(self) -> float | None:
        """None until two marks allow a guess."""
        if len(self._marks) < 2:
            return None
        (first, then), (last, now) = self._marks[0], self._marks[-1]
        return (self.num_steps - last) * (now - then) / max(1, last - first)


class Lines:
    """One line a step, for logs and pipes."""

    def __init__(self, num_steps: int, console: Console, *, steps: bool = True) -> None:
        self._num_steps = num_steps
        self._console = console
        self._steps = steps
        self._pace = Pace(num_steps)

    def update(self, step: int, metrics: Mapping[str, float]) -> None:
        self._pace.mark(step)
        if not self._steps:
            return
        cells = [f"{label} {form(metrics[key])}" for label, key, form in COLUMNS if key in metrics]
        line = [f"step {step}/{self._num_steps}", *cells, time_left(self._pace.seconds_left)]
        self.message("  ".join(line).rstrip())

    def evaluation(self, step: int, metrics: Mapping[str, float]) -> None:
        if self._steps:
            self.message(evaluation_line(step, metrics))

    def message(self, text: str) -> None:
        with unheard():
            self._console.print(text, soft_wrap=True, highlight=False, markup=False)

    def close(self) -> None:
        return

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class Silent:
    """Says nothing: the other ranks of a run."""

    def update(self, step: int, metrics: Mapping[str, float]) -> None:
        return

    def evaluation(self, step: int, metrics: Mapping[str, float]) -> None:
        return

    def message(self, text: str) -> None:
        return

    def close(self) -> None:
        return

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        return


class Panel:
    """A few lines at the foot of the terminal that stay in place; messages and warnings scroll above them."""

    def __init__(self, num_steps: int, console: Console) -> None:
        self._num_steps = num_steps
        self._console = console
        self._pace = Pace(num_steps)
        self._step = 0
        self._metrics: dict[str, float] = {}
        self._rewards: deque[float] = deque(maxlen=TREND_STEPS)
        self._evaluation = ""
        self._live = Live(self.render(), console=console, auto_refresh=False)

    def update(self, step: int, metrics: Mapping[str, float]) -> None:
        self._pace.mark(step)
        self._step = step
        self._metrics = dict(metrics)
        self._rewards.append(metrics.get("reward_mean", math.nan))
        self._refresh()

    def evaluation(self, step: int, metrics: Mapping[str, float]) -> None:
        self._evaluation = evaluation_line(step, metrics)
        self._refresh()

    def message(self, text: str) -> None:
        self._console.print(text, highlight=False, markup=False)

    def close(self) -> None:
        self._live.stop()

    def __enter__(self) -> Self:
        self._live.start(refresh=True)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def render(self) -> RenderableType:
        """Bar and time left; the reward and its trend; the other numbers; the last evaluation."""
        bar = Table.grid(padding=(0, 1), expand=True)
        bar.add_column()
        bar.add_column(ratio=1)
        bar.add_column(justify="right", no_wrap=True)
        left = time_left(self._pace.seconds_left)
        bar.add_row(
            Text(f"step {self._step}/{self._num_steps}", "bold"),
            ProgressBar(total=self._num_steps, completed=self._step),
            Text(left, "dim"),
        )
        lines: list[RenderableType] = [bar]
        if self._metrics:
            lines.append(self._numbers())
        if self._evaluation:
            lines.append(Text(self._evaluation, "green"))
        return Group(*lines)

    def _numbers(self) -> Text:
        shown = Text(no_wrap=True, overflow="ellipsis")
        for label, key, form in COLUMNS:
            if key not in self._metrics:
                continue
            shown.append(f"{label} ", "dim").append(form(self._metrics[key]), "cyan")
            if key == "reward_mean":
                shown.append(" " + sparkline(self._rewards), "cyan")
            shown.append("  ")
        return shown

    def _refresh(self) -> None:
        self._live.update(self.render(), refresh=True)


def sparkline(values: Collection[float]) -> str:
    """One block a value between the smallest and the largest; a space where a value is not finite.

    >>> sparkline([0.0, 0.5, 1.0])
    '▁▅█'
    """
    finite = [value for value in values if math.isfinite(value)]
    if not finite:
        return ""
    low, high = min(finite), max(finite)
    scale = (len(SPARK) - 1) / (high - low) if high > low else 0.0
    return "".join(SPARK[round((v - low) * scale + 1e-9)] if math.isfinite(v) else " " for v in values)


def evaluation_line(step: int, metrics: Mapping[str, float]) -> str:
    """The evaluation in one line; shares as numbers between 0 and 1, as in metrics.jsonl.

    >>> evaluation_line(10, {"accuracy": 0.41, "pass_at_8": 0.72})
    'step 10 evaluated: accuracy 0.410  pass@8 0.720'
    """
    cells = [f"{name.replace('pass_at_', 'pass@').replace('_', ' ')} {value:.3f}" for name, value in metrics.items()]
    return f"step {step} evaluated: " + "  ".join(cells)


def time_left(seconds: float | None) -> str:
    if seconds is None:
        return ""
    return f"{duration(seconds) if seconds >= 10 else f'{seconds:.0f} s'} left"


def _small(value: float) -> str:
    """Four digits after the point, or powers of ten where those would be 0.0000."""
    return f"{value:.4f}" if value == 0 or abs(value) >= 1e-3 else f"{value:.1e}"


def _thousands(value: float) -> str:
    return f"{value:,.0f}"


COLUMNS: tuple[tuple[str, str, Callable[[float], str]], ...] = (
    ("reward", "reward_mean", "{:.3f}".format),
    ("level", "curriculum/level", "{:g}".format),
    ("kl", "kl", _small),
    ("entropy", "entropy", "{:.3f}".format),
    ("tokens/s", "tokens_per_second", _thousands),
)
"""Label, name of the metric, how it is written."""
