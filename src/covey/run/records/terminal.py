"""The display of a run: a live panel, or lines."""

import math
import re
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from covey.run.records.samplers import samplers_line
from covey.system.disk import ignore_stdout_errors
from covey.system.text.console import CleanConsole
from covey.system.text.escaping import escape
from covey.system.text.format import duration, percent

SPARK = "▁▂▃▄▅▆▇█"
TREND_BLOCKS = 16
"""Blocks of the reward's spark line, which shows the whole run."""
REWARD = "sampled_reward_mean"
"""Mean reward of all scored groups: of the trained ones alone it is middling by construction where a filter chose."""
GAP = "teacher/kl"
PART = "reward/"
ROOMY = 16
"""Lines of a terminal that has room for one more line of the panel."""
RATE_STEPS = 20
"""Steps whose pace predicts the time left."""
QUIET_SECONDS = 9.0
"""Seconds without a line before one names the pending wait; checked once a second."""
QUIET_STEPS = 2.0
"""The same within steps, in steps of the pace that is known by then, where that is longer."""


class Progress:
    """The display of a run: nothing, on other ranks. `close` is idempotent."""

    def expect(self, num_steps: int) -> None:
        """Set the number of steps, once known."""

    def update(self, step: int, metrics: Mapping[str, float | None]) -> None:
        """Show that `step` steps (from 1) are done, with their numbers."""

    def evaluation(self, step: int, metrics: Mapping[str, float]) -> None:
        """Show an evaluation after `step` steps, until the next one."""

    def message(self, text: str) -> None: ...

    def waiting(self, what: str, *, in_step: bool) -> None:
        """Show the current wait, if nothing else was shown."""

    def close(self) -> None: ...

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()


def make_progress(num_steps: int, enabled: bool, console: Console | None = None) -> Progress:
    """Make a live panel, lines, or only messages where not `enabled`."""
    console = console or CleanConsole()
    if not enabled:
        return PlainProgress(num_steps, console, steps=False)
    return LiveProgress(num_steps, console) if console.is_interactive else PlainProgress(num_steps, console)


@dataclass
class EtaEstimator:
    """Predicts the remaining time from the last steps' pace."""

    num_steps: int
    clock: Callable[[], float] = time.monotonic
    _marks: deque[tuple[int, float]] = field(default_factory=lambda: deque(maxlen=RATE_STEPS + 1))

    def mark(self, step: int) -> None:
        self._marks.append((step, self.clock()))

    @property
    def seconds_per_step(self) -> float | None:
        """Return the pace, None before two marks."""
        if len(self._marks) < 2:
            return None
        (first, then), (last, now) = self._marks[0], self._marks[-1]
        return (now - then) / max(1, last - first)

    @property
    def seconds_left(self) -> float | None:
        """Estimate the seconds left, None without a pace."""
        pace = self.seconds_per_step
        return None if pace is None else (self.num_steps - self._marks[-1][0]) * pace


class _Paced(Progress):
    """Knows the number of steps, their pace, and the last news."""

    def __init__(self, num_steps: int) -> None:
        self._pace = EtaEstimator(num_steps)
        self._clock = time.monotonic
        self._new_at = self._clock()

    def expect(self, num_steps: int) -> None:
        self._pace.num_steps = num_steps

    def _wait_line(self, what: str) -> str:
        return f"{what}, {_whole(self._clock() - self._new_at)}"


class Panel(_Paced, ABC):
    """Keeps the last news and redraws them."""

    def __init__(self, num_steps: int) -> None:
        super().__init__(num_steps)
        self._step = 0
        self._metrics: Mapping[str, float | None] = {}
        self._rewards: list[float] = []
        """Rewards of all steps, NaN where there was nothing to measure."""
        self._evaluation = ""
        self._waiting = ""

    def update(self, step: int, metrics: Mapping[str, float | None]) -> None:
        self._new_at = self._clock()
        self._pace.mark(step)
        self._step, self._metrics = step, dict(metrics)
        reward = metrics.get(REWARD)
        self._rewards.append(math.nan if reward is None else reward)
        self._draw()

    def evaluation(self, step: int, metrics: Mapping[str, float]) -> None:
        self._new_at = self._clock()
        self._evaluation = evaluation_line(step, metrics)
        self._draw()

    def waiting(self, what: str, *, in_step: bool) -> None:
        self._waiting = self._wait_line(what)
        self._draw()

    def close(self) -> None:
        if self._waiting:  # what stays in view is of a run that is over
            self._waiting = ""
            self._draw()

    @abstractmethod
    def _draw(self) -> None: ...


class PlainProgress(_Paced):
    """One line a step, for logs and pipes."""

    def __init__(self, num_steps: int, console: Console, *, steps: bool = True) -> None:
        super().__init__(num_steps)
        self._console = console
        self._steps = steps
        self._told_at = self._new_at
        """Time of the last line, be it news or not."""

    def update(self, step: int, metrics: Mapping[str, float | None]) -> None:
        self._pace.mark(step)
        if not self._steps:
            return
        samplers = [line] if (line := samplers_line(metrics)) else []
        cells = [*number_cells(metrics), *samplers, time_left(self._pace.seconds_left)]
        line = "  ".join([f"step {step}/{self._pace.num_steps}", *cells])
        self.message(line.rstrip())

    def evaluation(self, step: int, metrics: Mapping[str, float]) -> None:
        if self._steps:
            self.message(evaluation_line(step, metrics))

    def message(self, text: str) -> None:
        self._new_at = self._clock()
        self._print(text)

    def waiting(self, what: str, *, in_step: bool) -> None:
        pace = self._pace.seconds_per_step if in_step else None
        patience = max(QUIET_SECONDS, QUIET_STEPS * (pace or 0.0))
        if self._steps and self._clock() - self._told_at >= patience:
            self._print(self._wait_line(what))

    def _print(self, text: str) -> None:
        self._told_at = self._clock()
        with ignore_stdout_errors():
            self._console.print(Text(text), soft_wrap=True)


class LiveProgress(Panel):
    """A few fixed lines at the terminal's foot, below messages."""

    def __init__(self, num_steps: int, console: Console) -> None:
        super().__init__(num_steps)
        self._console = console
        self._live = Live(self.render(), console=console, auto_refresh=False)

    def message(self, text: str) -> None:
        self._new_at = self._clock()
        # Escaped text is longer: a line that grew after it was broken would be cut at the edge
        with ignore_stdout_errors():
            self._console.print(Text(escape(text, keep="\n")))

    def close(self) -> None:
        super().close()
        with ignore_stdout_errors():
            self._live.stop()

    def __enter__(self) -> Self:
        with ignore_stdout_errors():
            self._live.start(refresh=True)
        return self

    def render(self) -> RenderableType:
        """Build the panel: bar, reward and trend, numbers, samplers, last evaluation, wait."""
        lines: list[RenderableType] = [self._bar()] if self._step else []
        if self._metrics:
            lines.append(self._numbers())
        if samplers := samplers_line(self._metrics):
            lines.append(Text(samplers, "cyan", no_wrap=True, overflow="ellipsis"))
        if self._console.size.height >= ROOMY and (details := details_of(self._metrics)):
            lines.append(Text(fitting(details, self._console.width), "dim", no_wrap=True, overflow="ellipsis"))
        if self._evaluation:
            lines.append(Text(self._evaluation, "green"))
        if self._waiting:
            lines.append(Text(escape(self._waiting), "dim", no_wrap=True, overflow="ellipsis"))
        return Group(*lines)

    def _bar(self) -> Table:
        bar = Table.grid(padding=(0, 1), expand=True)
        bar.add_column()
        bar.add_column(ratio=1)
        bar.add_column(justify="right", no_wrap=True)
        left = time_left(self._pace.seconds_left)
        bar.add_row(
            Text(f"step {self._step}/{self._pace.num_steps}", "bold"),
            ProgressBar(total=self._pace.num_steps, completed=self._step),
            Text(left, "dim"),
        )
        return bar

    def _numbers(self) -> Text:
        shown = Text(no_wrap=True, overflow="ellipsis")
        for label, key, form in columns_of(self._metrics):
            shown.append(f"{label} ", "dim").append(cell(form, self._metrics[key]), "cyan")
            if key == REWARD:
                shown.append(" " + sparkline(average_bins(self._rewards, TREND_BLOCKS)), "cyan")
            shown.append("  ")
        shown.right_crop(len(shown) - len(fitting(shown.plain.rstrip(), self._console.width)))
        return shown

    def _draw(self) -> None:
        with ignore_stdout_errors():
            self._live.update(self.render(), refresh=True)


def fitting(line: str, width: int) -> str:
    """Leave out the last numbers of a line that is too long.

    >>> fitting("reward 0.5  loss 0.125  tokens/s 1,024", 30)
    'reward 0.5  loss 0.125'
    """
    while len(line) > width and "  " in line:
        line = line.rpartition("  ")[0].rstrip()
    return line


def average_bins(values: Sequence[float], count: int) -> list[float]:
    """Average the values in `count` spans, NaN for an empty one.

    >>> average_bins([1.0, 3.0, 5.0, 7.0], 2)
    [2.0, 6.0]
    """
    count = min(count, len(values))
    edges = [place * len(values) // count for place in range(count)] + [len(values)]
    spans = [[v for v in values[start:end] if math.isfinite(v)] for start, end in pairwise(edges)]
    return [sum(span) / len(span) if span else math.nan for span in spans]


def sparkline(values: Collection[float]) -> str:
    """Draw one block per value, a space for infinite ones.

    >>> sparkline([0.0, 0.5, 1.0])
    '▁▅█'
    """
    finite = [value for value in values if math.isfinite(value)]
    if not finite:
        return ""
    low, high = min(finite), max(finite)
    scale = (len(SPARK) - 1) / (high - low) if high > low else 0.0
    return "".join(SPARK[round((v - low) * scale + 1e-9)] if math.isfinite(v) else " " for v in values)


def details_of(metrics: Mapping[str, float | None]) -> str:
    """Describe the parts of the reward and the answers' length.

    >>> details_of({"reward/correct": 0.25, "reward/form": 1.0, "completion_length_mean": 7.2, "truncated_fraction": 0})
    'correct 0.250  form 1.000  length 7'
    """
    parts = {name.removeprefix(PART): value for name, value in metrics.items() if name.startswith(PART)}
    shown = parts if len(parts) > 1 else {}
    cells = [f"{escape(name)} {cell('{:.3f}'.format, value)}" for name, value in shown.items()]
    if (length := metrics.get("completion_length_mean")) is not None:
        cells.append(f"length {length:.0f}")
    if cut := metrics.get("truncated_fraction"):
        cells.append(f"cut off {percent(cut, 0)}")
    return "  ".join([*cells, *_episode_cells(metrics)])


def _episode_cells(metrics: Mapping[str, float | None]) -> list[str]:
    if (turns := metrics.get("turns_mean")) is None:
        return []
    ended = {name.removeprefix("stop/"): value for name, value in metrics.items() if name.startswith("stop/") and value}
    ends = [f"{reason.replace('_', ' ')} {percent(share or 0, 0)}" for reason, share in ended.items()]
    cells = [f"turns {turns:.1f}", *(end for end in ends if not end.startswith("completed"))]
    calls = {name.removesuffix("/calls"): value or 0.0 for name, value in metrics.items() if _CALLS.fullmatch(name)}
    if total := sum(calls.values()):
        errors = sum(metrics.get(f"{tool}/errors") or 0.0 for tool in calls)
        seconds = sum(number * (metrics.get(f"{tool}/seconds") or 0.0) for tool, number in calls.items()) / total
        cells.append(f"tool calls {total:,.0f} ({errors:,.0f} errors, {duration(seconds)} each)")
    return cells


def evaluation_line(step: int, metrics: Mapping[str, float]) -> str:
    """Describe an evaluation in a line, as in metrics.jsonl.

    >>> evaluation_line(10, {"accuracy": 0.41, "pass_at_8": 0.72})
    'step 10 evaluated: accuracy 0.410  pass@8 0.720'
    """
    known = {name: value for name, value in metrics.items() if not math.isnan(value)}
    if len(found := set(known.values())) == 1 and found <= {0.0, 1.0} and "reward_mean" in known:
        known = {"reward_mean": known["reward_mean"]}  # nothing says yet that rewards tell right from wrong
    names = {name: name.replace("pass_at_", "pass@").replace("_", " ") for name in known}
    cells = [f"{names[name]} {value:.3f}" for name, value in known.items()]
    return f"step {step} evaluated: " + ("  ".join(cells) or "no rewards")


def time_left(seconds: float | None) -> str:
    return "" if seconds is None else f"{_whole(seconds)} left"


def _whole(seconds: float) -> str:
    return duration(seconds) if seconds >= 10 else f"{seconds:.0f} s"


def number_cells(metrics: Mapping[str, float | None]) -> list[str]:
    return [f"{label} {cell(form, metrics[key])}" for label, key, form in columns_of(metrics)]


def columns_of(metrics: Mapping[str, float | None]) -> list[tuple[str, str, Callable[[float], str]]]:
    """Return the columns that a step has: no reward where a teacher trains alone."""
    is_taught_alone = GAP in metrics and metrics.get(REWARD) is None
    return [one for one in COLUMNS if one[1] in metrics and not (is_taught_alone and one[1] == REWARD)]


def cell(form: Callable[[float], str], value: float | None) -> str:
    """Format a number, a dash for None."""
    return "-" if value is None else form(value)


def _small(value: float) -> str:
    return f"{value:.4f}" if value == 0 or abs(value) >= 1e-3 else f"{value:.1e}"


_CALLS = re.compile(r"environment/(?:.*/)?tool/.+/calls")
COLUMNS: tuple[tuple[str, str, Callable[[float], str]], ...] = (
    ("reward", REWARD, "{:.3f}".format),
    ("level", "curriculum/level", "{:g}".format),
    ("loss", "loss", "{:.3g}".format),
    ("kl", "kl", _small),
    (GAP, GAP, _small),
    ("entropy", "entropy", "{:.3f}".format),
    ("tokens/s", "tokens_per_second", "{:,.0f}".format),
)
"""Label, name of the metric, how it is written."""
