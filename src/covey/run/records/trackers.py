"""Trackers: JSON lines always, TensorBoard and W&B on request.

A failing or hanging service never stops a run: it is reported once, and metrics.jsonl has all rows.
"""

import json
import logging
import os
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from textwrap import indent
from typing import TYPE_CHECKING, Any, Protocol

from covey.config.schema import OutputConfig
from covey.run.folder import EVALUATIONS, METRICS, ROLLOUTS
from covey.run.records.answer_text import as_text, join_messages
from covey.run.records.rollout_log import AnswerLog, AnswerRow
from covey.system.jsonl import JsonlWriter
from covey.system.text.escaping import escape
from covey.system.text.format import timestamp
from covey.system.waits.running import running_clock
from covey.system.workers.call_thread import CallThread

if TYPE_CHECKING:
    from torch.utils.tensorboard.writer import SummaryWriter

LOGGER = logging.getLogger(__name__)

Number = float | int | None
"""None: there was nothing to measure."""

Say = Callable[[str], None]

MAX_TEXTS = 16
"""Answers that TensorBoard shows of one step."""
MAX_WAITING_ROWS = 1000
"""Rows kept for a service that is slower than the run."""


class Tracker(Protocol):
    """Takes metrics and answers of one step, of a `kind` ("train", "evaluate")."""

    def log(self, step: int, metrics: Mapping[str, Number], kind: str = "train") -> None: ...

    def answers(self, step: int, rows: Sequence[AnswerRow], kind: str = "train") -> None: ...

    def close(self) -> None: ...


class JsonLines:
    """JSON lines: {"step": 3, "kind": "train", "time": ..., "reward_mean": 0.5}, written through.

    Numbers go to metrics.jsonl, answers to rollouts.jsonl or evaluations.jsonl. Missing values are null; numbers that
    JSON cannot hold are strings (`jsonl.finite`), so a divergence stays visible.
    """

    def __init__(self, folder: Path, max_answers: int, *, wait: bool = False) -> None:
        """Open the files, answers bounded by `max_answers`; `wait` as for JsonlWriter."""
        self._metrics = JsonlWriter(folder / METRICS, wait=wait)
        self._answers = {
            kind: AnswerLog(folder / name, max_answers, wait=wait)
            for kind, name in (("train", ROLLOUTS), ("evaluate", EVALUATIONS))
        }

    def log(self, step: int, metrics: Mapping[str, Number], kind: str = "train") -> None:
        numbers = {name: plain(value) for name, value in metrics.items()}
        self._metrics.write({"step": step, "kind": kind, "time": timestamp()} | numbers)

    def answers(self, step: int, rows: Sequence[AnswerRow], kind: str = "train") -> None:
        self._answers[kind].log(rows)

    def close(self) -> None:
        with ExitStack() as closing:  # all of them, also where one raises
            closing.callback(self._metrics.close)
            for log in self._answers.values():
                closing.callback(log.close)


class TensorBoard:
    """Event files under `folder`, with tags KIND/NAME."""

    def __init__(self, folder: Path) -> None:
        try:
            from torch.utils.tensorboard.writer import SummaryWriter
        except ImportError as error:
            raise ValueError("output.trackers=[tensorboard] needs: pip install 'covey[tensorboard]'") from error
        self._open = partial(SummaryWriter, str(folder))
        self._writer: SummaryWriter | None = None

    def log(self, step: int, metrics: Mapping[str, Number], kind: str = "train") -> None:
        writer = self._writer_from(step, kind)
        for name, value in drop_missing(metrics).items():
            writer.add_scalar(escape(f"{kind}/{name}"), value, step)

    def answers(self, step: int, rows: Sequence[AnswerRow], kind: str = "train") -> None:
        """Log some answers as text that is not read as Markdown."""
        blocks = [indent(as_text(row), "    ") for row in rows[:MAX_TEXTS]]
        if blocks:
            self._writer_from(step, kind).add_text(f"{kind}/answers", "\n\n&nbsp;\n\n".join(blocks), step)

    def _writer_from(self, step: int, kind: str) -> "SummaryWriter":
        """Return the writer; its first row hides steps that a resume repeats."""
        if self._writer is None:
            self._writer = self._open(purge_step=step + (kind == "evaluate"))
        return self._writer

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()


class WandB:
    """One W&B run with its files in the run folder.

    WANDB_MODE=offline never touches the network. A resumed run continues its W&B run. WANDB_NAME and WANDB_RUN_ID
    override covey's names.
    """

    def __init__(self, project: str, folder: Path, run_config: Mapping[str, Any], say: Say) -> None:
        try:
            import wandb
        except ImportError as error:
            raise ValueError("output.trackers=[wandb] needs: pip install 'covey[wandb]'") from error
        self._table = wandb.Table
        self._run = wandb.init(
            project=project,
            dir=str(folder),
            name=os.environ.get("WANDB_NAME") or run_name(run_config, folder),
            id=os.environ.get("WANDB_RUN_ID") or kept_id(folder / "wandb" / "covey_run_id"),
            resume="allow",
            config=dict(run_config),
            settings=wandb.Settings(silent=True, console="off"),
        )
        # Rows are ordered by the run's steps, not by W&B's counter
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")
        if not (self._run.offline or self._run.disabled):
            say(f"W&B: {self._run.url}")

    def log(self, step: int, metrics: Mapping[str, Number], kind: str = "train") -> None:
        # The step is a column, not W&B's own counter: that one refuses rows that come twice for a step.
        row = {escape(f"{kind}/{name}"): value for name, value in drop_missing(metrics).items()}
        self._run.log({"step": step, **row})

    def answers(self, step: int, rows: Sequence[AnswerRow], kind: str = "train") -> None:
        if rows:
            names = dict.fromkeys(name for row in rows for name in row)
            data = [[table_cell(row.get(name)) for name in names] for row in rows]
            table = self._table([*names], data, allow_mixed_types=True)
            self._run.log({"step": step, f"{kind}/answers": table})

    def close(self) -> None:
        self._run.finish()


class BackgroundTracker:
    """Runs a service in a thread, which may fail or hang.

    After the first error or missed deadline, which is reported, the service gets no more rows, and is not waited for.
    """

    def __init__(self, name: str, make: Callable[[], Tracker], deadline: float) -> None:
        """Start the thread, which calls `make`. Raises its ValueError."""
        self._name, self._deadline = name, deadline
        self._failed = False
        self._num_left_out = 0
        self._ended: Future[None] | None = None
        self._thread = CallThread(f"covey-{name}")
        self._tracker: Future[Tracker] = self._thread.submit(make)
        try:
            self._tracker.result(deadline)
        except ValueError:
            raise
        except (Exception, SystemExit) as error:  # a service that is down must not stop the run
            if not self._tracker.done():
                self._give_up()
            else:
                LOGGER.warning("%s could not start (%s); metrics.jsonl has every row", name, error)
            self._failed = True

    def log(self, step: int, metrics: Mapping[str, Number], kind: str = "train") -> None:
        row = {name: plain(value) for name, value in metrics.items()}
        self._call(lambda: self._tracker.result().log(step, row, kind))

    def answers(self, step: int, rows: Sequence[AnswerRow], kind: str = "train") -> None:
        self._call(lambda: self._tracker.result().answers(step, rows, kind))

    def _call(self, call: Callable[[], None]) -> None:
        if self._is_silent() or self._failed:
            return
        if self._thread.num_waiting < MAX_WAITING_ROWS:
            self._thread.submit(lambda: None if self._failed else self._try(call))
            return
        self._num_left_out += 1
        if self._num_left_out == 1:
            LOGGER.warning("%s cannot keep up; some rows were dropped there (metrics.jsonl is complete)", self._name)

    def close(self) -> None:
        """Wait for the remaining rows while the service answers."""
        if self._ended is None:
            self._ended = self._thread.submit(lambda: self._try(self._tracker.result().close))
            self._thread.close()
        while not self._ended.done() and not self._is_silent():
            wait([self._ended], 0.05)

    def _try(self, call: Callable[[], None]) -> None:
        try:
            call()
        except Exception as error:  # whatever a service throws, the run continues
            if not self._failed:
                LOGGER.warning("%s stopped logging (%s); metrics.jsonl continues", self._name, error)
            self._failed = True

    def _is_silent(self) -> bool:
        since = self._thread.busy_since
        is_silent = since is not None and running_clock()() - since > self._deadline
        if is_silent and not self._failed:
            self._give_up()
        return is_silent

    def _give_up(self) -> None:
        self._failed = True
        LOGGER.warning(
            "%s has not answered for %g s (timeouts.tracker); metrics.jsonl has every row", self._name, self._deadline
        )


class CompositeTracker:
    """Sends every row to several trackers."""

    def __init__(self, trackers: Iterable[Tracker]) -> None:
        self._trackers = tuple(trackers)

    def log(self, step: int, metrics: Mapping[str, Number], kind: str = "train") -> None:
        for tracker in self._trackers:
            tracker.log(step, metrics, kind)

    def answers(self, step: int, rows: Sequence[AnswerRow], kind: str = "train") -> None:
        for tracker in self._trackers:
            tracker.answers(step, rows, kind)

    def close(self) -> None:
        """Close all of them, even if one raises."""
        with ExitStack() as closing:
            for tracker in self._trackers:
                closing.callback(tracker.close)


def make_trackers(
    output: OutputConfig, folder: Path, run_config: Mapping[str, Any], deadline: float, say: Say = LOGGER.info
) -> Tracker:
    """Open files and services of output.trackers, with deadlines.

    `say` receives where a service shows the run. ValueError for an unknown name or a missing package. An unreachable
    service is a warning.
    """
    wait = output.on_write_error == "continue"
    trackers: list[Tracker] = [JsonLines(folder, output.max_rollout_rows, wait=wait)]
    for name in output.trackers:
        if name not in SERVICES:
            raise ValueError(f'output.trackers: no tracker "{name}"; there are {", ".join(SERVICES)}')
        trackers.append(BackgroundTracker(name, partial(SERVICES[name], output, folder, run_config, say), deadline))
    return CompositeTracker(trackers)


def plain(value: Number) -> Number:
    """Make a Python number of a scalar, tensor or array."""
    return value if value is None or isinstance(value, int) else float(value)


def drop_missing(metrics: Mapping[str, Number]) -> dict[str, float]:
    """Drop missing values: a curve has no point there."""
    return {name: float(value) for name, value in metrics.items() if value is not None}


def run_name(run_config: Mapping[str, Any], folder: Path) -> str:
    """Name a run for W&B by task, model and folder.

    >>> run_name({"environment": {"name": "gsm8k"}, "model": {"name": "Qwen/Qwen2.5-0.5B"}}, Path("outputs/DATE/TIME"))
    'gsm8k Qwen2.5-0.5B DATE/TIME'
    """
    here, place = Path.cwd(), folder.resolve()
    parts = place.relative_to(here).parts if place.is_relative_to(here) else place.parts[-2:]
    where = "/".join(parts[1:] if len(parts) > 1 and parts[0] == "outputs" else parts)
    return f"{run_config['environment']['name']} {Path(run_config['model']['name']).name} {where}"


def kept_id(path: Path) -> str:
    """Read the id of the W&B run in `path`, or make one."""
    if not path.is_file():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(secrets.token_hex(4), encoding="utf-8")
    return path.read_text(encoding="utf-8").strip()


def table_cell(value: Any) -> float | str | bool | None:
    """Make a table cell: escaped text, structures as text."""
    if value is None or isinstance(value, bool | int | float):
        return value
    is_talk = isinstance(value, list) and all(isinstance(one, Mapping) and "role" in one for one in value)
    text = join_messages(value) if isinstance(value, str) or is_talk else json.dumps(value, ensure_ascii=False)
    return escape(text, keep="\n\t")


SERVICES: dict[str, Callable[[OutputConfig, Path, Mapping[str, Any], Say], Tracker]] = {
    "tensorboard": lambda output, folder, run_config, say: TensorBoard(folder / "tensorboard"),
    "wandb": lambda output, folder, run_config, say: WandB(output.wandb_project, folder, run_config, say),
}
