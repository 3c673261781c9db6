"""Where numbers go: JSON lines in the run folder always, TensorBoard and W&B on request.

A logging service that fails or hangs never stops a run: it is reported once, and metrics.jsonl has the rows anyway.
"""

import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from queue import Full, Queue
from typing import Any, Protocol

from covey.config import OutputConfig
from covey.lines import LineFile
from covey.types import Group, Rollout

LOGGER = logging.getLogger(__name__)

Number = float | int

MAX_WAITING_ROWS = 1000
"""Rows kept for a service that is slower than the run."""


class Tracker(Protocol):
    """Takes the numbers of one step; `kind` says what they describe ("train", "evaluate", "cold_start")."""

    def log(self, step: int, metrics: Mapping[str, Number], kind: str = "train") -> None: ...

    def close(self) -> None: ...


class JsonLines:
    """One JSON object a line: {"step": 3, "kind": "train", "reward_mean": 0.5}. Written through at every row.

    Numbers that JSON cannot hold are written as the strings "nan", "inf" and "-inf", so that a row always parses and
    a divergence stays visible.
    """

    def __init__(self, path: Path, *, wait: bool = False) -> None:
        """`wait` is that of LineFile."""
        self._file = LineFile(path, wait=wait)

    def log(self, step: int, metrics: Mapping[str, Number], kind: str = "train") -> None:
        self._file.write({"step": step, "kind": kind} | {name: plain(value) for name, value in metrics.items()})

    def close(self) -> None:
        self._file.close()


class TensorBoard:
    """Event files under `folder`; tags are KIND/NAME."""

    def __init__(self, folder: Path) -> None:
        try:
            from torch.utils.tensorboard.writer import SummaryWriter
        except ImportError as error:
            raise ValueError("output.trackers=[tensorboard] needs: pip install 'covey[tensorboard]'") from error
        self._writer = SummaryWriter(str(folder))

    def log(self, step: int, metrics: Mapping[str, Number], kind: str = "train") -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(f"{kind}/{name}", float(value), step)

    def close(self) -> None:
        self._writer.close()


class WandB:
    """One W&B run, with its local files in the run folder. WANDB_MODE=offline never touches the network."""

    def __init__(self, project: str, folder: Path, run_config: Mapping[str, Any]) -> None:
        try:
            import wandb
        except ImportError as error:
            raise ValueError("output.trackers=[wandb] needs: pip install 'covey[wandb]'") from error
        settings = wandb.Settings(silent=True, console="off")
        self._run = wandb.init(
            project=project, dir=str(folder), name=folder.name, config=dict(run_config), settings=settings
        )

    def log(self, step: int, metrics: Mapping[str, Number], kind: str = "train") -> None:
        # The step is a column, not W&B's own counter: that one refuses rows that come twice for a step.
        row = {f"{kind}/{name}": float(value) for name, value in metrics.items()}
        self._run.log({"step": step, **row})

    def close(self) -> None:
        self._run.finish()


class Aside:
    """Runs a service in a thread of its own, so that neither its errors nor its silence reach the run.

    The first error is reported, or the first call that takes longer than the deadline, and the service gets no further
    rows; one that hangs is not waited for at the end either.
    """

    def __init__(self, name: str, make: Callable[[], Tracker], deadline: float) -> None:
        """`make` is called in the thread too; ValueError where it raises that."""
        self._name = name
        self._deadline = deadline
        self._calls: Queue[Callable[[], None] | None] = Queue(MAX_WAITING_ROWS)
        self._busy_since: float | None = None
        self._failed = False
        self._num_left_out = 0
        self._tracker: Future[Tracker] = Future()
        self._thread = threading.Thread(target=self._serve, args=(make,), name=f"covey-{name}", daemon=True)
        self._thread.start()
        self._wait_for_start()

    def log(self, step: int, metrics: Mapping[str, Number], kind: str = "train") -> None:
        row = {name: plain(value) for name, value in metrics.items()}
        if self._is_silent() or self._failed:
            return
        try:
            self._calls.put_nowait(lambda: self._tracker.result().log(step, row, kind))
        except Full:
            self._num_left_out += 1
            if self._num_left_out == 1:
                LOGGER.warning("%s is slower than the run and misses rows; metrics.jsonl has every row", self._name)

    def close(self) -> None:
        """Waits for the rows that are left, as long as the service takes one after the other."""
        is_asked = False
        while self._thread.is_alive() and not self._is_silent():
            if not is_asked:
                with suppress(Full):
                    self._calls.put_nowait(None)
                    is_asked = True
            self._thread.join(0.05)

    def _wait_for_start(self) -> None:
        try:
            self._tracker.result(self._deadline)
        except ValueError:
            raise
        except (Exception, SystemExit) as error:  # a service that is down must not stop the run
            if not self._tracker.done():
                self._give_up()
            else:
                LOGGER.warning("%s could not start (%s); metrics.jsonl has every row", self._name, error)
            self._failed = True

    def _serve(self, make: Callable[[], Tracker]) -> None:
        self._busy_since = time.monotonic()
        try:
            tracker = make()
        except BaseException as error:
            self._tracker.set_exception(error)
            return
        finally:
            self._busy_since = None
        self._tracker.set_result(tracker)
        while (call := self._calls.get()) is not None:
            if not self._failed:
                self._try(call)
        self._try(tracker.close)

    def _try(self, call: Callable[[], None]) -> None:
        self._busy_since = time.monotonic()
        try:
            call()
        except Exception as error:  # whatever a service throws, the run goes on
            if not self._failed:
                LOGGER.warning("%s stopped logging (%s); metrics.jsonl goes on", self._name, error)
            self._failed = True
        self._busy_since = None

    def _is_silent(self) -> bool:
        """Whether the call under way takes too long: the service is given up, also where it does answer later."""
        since = self._busy_since
        is_silent = since is not None and time.monotonic() - since > self._deadline
        if is_silent and not self._failed:
            self._give_up()
        return is_silent

    def _give_up(self) -> None:
        self._failed = True
        LOGGER.warning(
            "%s has not answered for %g s (deadlines.tracker); metrics.jsonl has every row", self._name, self._deadline
        )


class Many:
    """Sends every row to each of several trackers."""

    def __init__(self, trackers: Iterable[Tracker]) -> None:
        self._trackers = tuple(trackers)

    def log(self, step: int, metrics: Mapping[str, Number], kind: str = "train") -> None:
        for tracker in self._trackers:
            tracker.log(step, metrics, kind)

    def close(self) -> None:
        """All of them, also where one raises."""
        with ExitStack() as closing:
            for tracker in self._trackers:
                closing.callback(tracker.close)


def make_trackers(output: OutputConfig, folder: Path, run_config: Mapping[str, Any], deadline: float) -> Tracker:
    """metrics.jsonl in `folder`, and every service named in output.trackers, which may take `deadline` seconds a call.

    ValueError where a name is unknown or its package is not installed. A service that cannot be reached is a warning.
    """
    trackers: list[Tracker] = [JsonLines(folder / "metrics.jsonl", wait=output.on_write_error == "continue")]
    for name in output.trackers:
        if name not in SERVICES:
            raise ValueError(f'output.trackers: no tracker "{name}"; there are {", ".join(SERVICES)}')
        trackers.append(Aside(name, partial(SERVICES[name], output, folder, run_config), deadline))
    return Many(trackers)


@dataclass(frozen=True, slots=True)
class RolloutRow:
    """One line of rollouts.jsonl: a completion that was trained on, with what it earned.

    >>> RolloutRow(step=3, prompt_id="train-17", prompt="41+7=", completion="48", reward=1.0, parts={"correct": 1.0},
    ...            advantage=0.7, finish_reason="stop", policy_version=2)
    """

    step: int
    prompt_id: str
    prompt: Any
    """Text, or a list of messages."""
    completion: str
    reward: float
    parts: Mapping[str, float]
    advantage: float
    finish_reason: str
    policy_version: int


class RolloutLog:
    """rollouts.jsonl: a few rollouts of each step, for reading. Bounded by rows a step and rows in all.

    Rows are spread evenly over the step's rollouts, so groups of one prompt do not crowd out the others.
    """

    def __init__(self, path: Path, rows_per_step: int, max_rows: int, *, wait: bool = False) -> None:
        """`wait` is that of LineFile."""
        self._file = LineFile(path, wait=wait)
        self._rows_per_step = rows_per_step
        self._left = max_rows - count_lines(path)

    def log(self, step: int, groups: Iterable[Group], advantages: Iterable[float]) -> None:
        """`advantages` has one value for each rollout, in the order of groups and of rollouts within them."""
        rollouts = [(group, rollout) for group in groups for rollout in group.rollouts]
        rows = list(zip(rollouts, advantages, strict=True))
        for index in spread(len(rows), min(self._rows_per_step, self._left)):
            (group, rollout), advantage = rows[index]
            self._file.write(asdict(rollout_row(step, group, rollout, advantage)))
            self._left -= 1

    def close(self) -> None:
        self._file.close()


def rollout_row(step: int, group: Group, rollout: Rollout, advantage: float) -> RolloutRow:
    text = group.prompt.text
    return RolloutRow(
        step=step,
        prompt_id=group.prompt.id,
        prompt=text if isinstance(text, str) else [dict(message) for message in text],
        completion=rollout.text,
        reward=rollout.reward.value,
        parts=dict(rollout.reward.parts),
        advantage=float(advantage),
        finish_reason=rollout.finish_reason,
        policy_version=rollout.policy_version,
    )


def spread(count: int, wanted: int) -> list[int]:
    """At most `wanted` indices below `count`, evenly spaced.

    >>> spread(10, 3)
    [0, 3, 6]
    """
    wanted = max(0, min(count, wanted))
    return [index * count // wanted for index in range(wanted)]


def count_lines(path: Path) -> int:
    with path.open("rb") as file:
        return sum(1 for _ in file)


def plain(value: Number) -> int | float:
    """A Python number of whatever a metric is (a tensor or array of one element included)."""
    return value if isinstance(value, int) else float(value)


SERVICES: dict[str, Callable[[OutputConfig, Path, Mapping[str, Any]], Tracker]] = {
    "tensorboard": lambda output, folder, run_config: TensorBoard(folder / "tensorboard"),
    "wandb": lambda output, folder, run_config: WandB(output.wandb_project, folder, run_config),
}
