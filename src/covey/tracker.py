"""Where numbers go: JSON lines in the run folder always, TensorBoard and W&B on request.

A logging service that fails never stops a run: its error is reported once, and the rows are in metrics.jsonl anyway.
"""

import json
import logging
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol, TextIO

from covey.config import OutputConfig
from covey.types import Group, Rollout

LOGGER = logging.getLogger(__name__)

Number = float | int


class Tracker(Protocol):
    """Takes the numbers of one step; `kind` says what they describe ("train", "evaluate", "cold_start")."""

    def log(self, step: int, metrics: Mapping[str, Number], kind: str = "train") -> None: ...

    def close(self) -> None: ...


class JsonLines:
    """One JSON object a line: {"step": 3, "kind": "train", "reward_mean": 0.5}. Written through at every row.

    Numbers that JSON cannot hold are written as the strings "nan", "inf" and "-inf", so that a row always parses and
    a divergence stays visible.
    """

    def __init__(self, path: Path) -> None:
        self._file = open_lines(path)

    def log(self, step: int, metrics: Mapping[str, Number], kind: str = "train") -> None:
        row = {"step": step, "kind": kind} | {name: plain(value) for name, value in metrics.items()}
        write_line(self._file, row)

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


class Guarded:
    """Keeps a tracker's errors from stopping the run: the first is reported and the tracker is left alone after it."""

    def __init__(self, tracker: Tracker, name: str) -> None:
        self._tracker = tracker
        self._name = name
        self._failed = False

    def log(self, step: int, metrics: Mapping[str, Number], kind: str = "train") -> None:
        if not self._failed:
            self._try(lambda: self._tracker.log(step, metrics, kind))

    def close(self) -> None:
        self._try(self._tracker.close)

    def _try(self, action: Callable[[], None]) -> None:
        try:
            action()
        except Exception as error:  # whatever a service throws, the run goes on
            if not self._failed:
                LOGGER.warning("%s stopped logging (%s); metrics.jsonl goes on", self._name, error)
            self._failed = True


class Many:
    """Sends every row to each of several trackers."""

    def __init__(self, trackers: Iterable[Tracker]) -> None:
        self._trackers = tuple(trackers)

    def log(self, step: int, metrics: Mapping[str, Number], kind: str = "train") -> None:
        for tracker in self._trackers:
            tracker.log(step, metrics, kind)

    def close(self) -> None:
        for tracker in self._trackers:
            tracker.close()


def make_trackers(output: OutputConfig, folder: Path, run_config: Mapping[str, Any]) -> Tracker:
    """metrics.jsonl in `folder`, and every service named in output.trackers.

    ValueError where a name is unknown or its package is not installed. A service that cannot be reached is a warning.
    """
    trackers: list[Tracker] = [JsonLines(folder / "metrics.jsonl")]
    for name in output.trackers:
        if name not in SERVICES:
            raise ValueError(f'output.trackers: no tracker "{name}"; there are {", ".join(SERVICES)}')
        try:
            trackers.append(Guarded(SERVICES[name](output, folder, run_config), name))
        except ValueError:
            raise
        except Exception as error:  # a service that is down must not stop the run
            LOGGER.warning("%s could not start (%s); metrics.jsonl has every row", name, error)
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

    def __init__(self, path: Path, rows_per_step: int, max_rows: int) -> None:
        self._file = open_lines(path)
        self._rows_per_step = rows_per_step
        self._left = max_rows - count_lines(path)

    def log(self, step: int, groups: Iterable[Group], advantages: Iterable[float]) -> None:
        """`advantages` has one value for each rollout, in the order of groups and of rollouts within them."""
        rollouts = [(group, rollout) for group in groups for rollout in group.rollouts]
        rows = list(zip(rollouts, advantages, strict=True))
        for index in spread(len(rows), min(self._rows_per_step, self._left)):
            (group, rollout), advantage = rows[index]
            write_line(self._file, asdict(rollout_row(step, group, rollout, advantage)))
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


def open_lines(path: Path) -> TextIO:
    path.parent.mkdir(parents=True, exist_ok=True)
    return path.open("a", encoding="utf-8")


def count_lines(path: Path) -> int:
    with path.open("rb") as file:
        return sum(1 for _ in file)


def write_line(file: TextIO, row: Mapping[str, Any]) -> None:
    file.write(json.dumps(_finite(row), ensure_ascii=False, allow_nan=False) + "\n")
    file.flush()


def plain(value: Number) -> int | float:
    """A Python number of whatever a metric is (a tensor or array of one element included)."""
    return value if isinstance(value, int) else float(value)


def _finite(value: Any) -> Any:
    """The same structure with non-finite floats as strings."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    return [_finite(item) for item in value] if isinstance(value, list | tuple) else value


SERVICES: dict[str, Callable[[OutputConfig, Path, Mapping[str, Any]], Tracker]] = {
    "tensorboard": lambda output, folder, run_config: TensorBoard(folder / "tensorboard"),
    "wandb": lambda output, folder, run_config: WandB(output.wandb_project, folder, run_config),
}
