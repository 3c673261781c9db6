"""What is measured on the user's own model and settings before the first step, and as `covey check`.

A run whose engine does not sample what its trainer trains, or whose gradient depends on the layout, learns something
else than its metrics say. So it is refused before it begins, with the figure and the remedy.

The checks leave no trace: weights, gradients, generators, the prompt stream and what is logged are as before.
"""

import json
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from rich import box
from rich.table import Table

from covey.build import Run
from covey.config import Config
from covey.disk import writing
from covey.environments.base import Logs, Tries
from covey.policy import distribution
from covey.preflight_custom import check_custom, has_custom
from covey.preflight_fill import check_frozen, check_kl, check_rewards
from covey.preflight_memory import check_memory
from covey.preflight_plain import check_plain
from covey.preflight_policy import check_gradient, check_logprobs
from covey.preflight_slope import check_slope
from covey.preflight_text import check_completions, check_functions, check_gold, check_lengths, check_tokenizer
from covey.preflight_types import Check, Finding, Subject
from covey.record import Record
from covey.state import generators, restore_generators
from covey.units import duration

REPORT = "preflight.json"


@dataclass(frozen=True, slots=True)
class Stage:
    """One of the checks, in the order they are made."""

    name: str
    look: Callable[[Subject], Finding]
    needs: tuple[str, ...] = ()
    """Checks without which this one cannot be made."""


def before_training(run: Run, config: Config, record: Record) -> None:
    """Check a new run before its first step. ValueError where one fails, with the figure and the remedy."""
    if not config.preflight.enabled:
        return
    with record.timer.phase("preflight"):
        checks = examine(Subject(run, config))
    write(checks, record.folder)
    refuse(checks)
    num_passed, seconds = sum(check.applies for check in checks), sum(check.seconds for check in checks)
    record.say(f"preflight: {num_passed} checks passed in {duration(seconds)}")


def examine(subject: Subject) -> list[Check]:
    """Make all checks that can be made. All ranks make the same ones and agree on what they came to."""
    checks: dict[str, Check] = {}
    watchdog = subject.run.trainer.timer.watchdog
    with leaving_no_trace(subject.run):
        for stage in stages_of(subject):
            missing = [name for name in stage.needs if not checks[name].passed]
            with watchdog.waiting(f"the preflight check of {stage.name}", "deadlines.update"):
                check = _unmade(stage, missing[0]) if missing else _made(stage, subject)
                checks[stage.name] = _agreed(distribution.all_gather(check))
    return list(checks.values())


def stages_of(subject: Subject) -> tuple[Stage, ...]:
    """Those of a policy and an environment of this kind."""
    stages = (*CUSTOM_STAGES, *STAGES) if has_custom(subject.config) else STAGES
    if subject.run.policy.mask_id is not None:
        return (*stages, *FILL_STAGES)
    return (*stages, *TRIED_STAGES) if isinstance(subject.run.environment, Tries) else stages


def refuse(checks: Sequence[Check]) -> None:
    """ValueError that names the first check that failed, its figure and what to do."""
    failed = next((check for check in checks if not check.passed), None)
    if failed is not None:
        allowed = f", allowed: {failed.tolerance}" if failed.tolerance else ""
        raise ValueError(
            f"preflight: {failed.name}: {failed.figure}{allowed}; {failed.remedy} "
            "(preflight.enabled=false trains unchecked)"
        )


def write(checks: Sequence[Check], folder: Path) -> None:
    """The checks with all their numbers, beside the run's other results."""
    rows = [{**asdict(check), "values": _finite(check.values)} for check in checks]
    with writing(folder / REPORT):
        distribution.from_first(lambda: (folder / REPORT).write_text(json.dumps(rows, indent=2) + "\n"))


def table(checks: Sequence[Check]) -> Table:
    """A row a check, for the terminal."""
    shown = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
    for heading in ("check", "", "found", "allowed"):
        shown.add_column(heading)
    shown.add_column("time", justify="right")
    for check in checks:
        verdict = ("passed" if check.applies else "not applicable") if check.passed else "FAILED"
        shown.add_row(check.name, verdict, check.figure, check.tolerance, duration(check.seconds))
    return shown


@contextmanager
def leaving_no_trace(run: Run) -> Iterator[None]:
    """Put back whatever the checks may have moved. There are no gradients before the first step."""
    before, was_training = generators(), run.policy.model.training
    try:
        yield
    finally:
        for parameter in run.policy.model.parameters():
            parameter.grad = None
        run.policy.model.train(was_training)
        run.source.sampler.engine.take_stats()
        if isinstance(run.environment, Logs):
            run.environment.metrics()
        restore_generators(before)


def _finite(values: Mapping[str, float]) -> dict[str, float | None]:
    """JSON has no NaN."""
    return {name: value if math.isfinite(value) else None for name, value in values.items()}


def _made(stage: Stage, subject: Subject) -> Check:
    started = time.perf_counter()
    found = stage.look(subject)
    seconds = time.perf_counter() - started
    words = (found.figure, found.tolerance, found.remedy)
    return Check(stage.name, found.passed, *words, found.values, seconds, found.applies)


def _unmade(stage: Stage, missing: str) -> Check:
    return Check(stage.name, False, f"not measured before {missing} passes", "", "", {}, 0.0)


def _agreed(of_ranks: Sequence[Check]) -> Check:
    """That of the first rank on which it failed, else of the first."""
    return next((check for check in of_ranks if not check.passed), of_ranks[0])


STAGES: tuple[Stage, ...] = (
    Stage("tokenizer", check_tokenizer),
    Stage("lengths", check_lengths, ("tokenizer",)),
    Stage("gold answers", check_gold, ("tokenizer",)),
    Stage("memory", check_memory, ("lengths",)),
    Stage("completions", check_completions, ("lengths", "memory")),
    Stage("log-probs", check_logprobs, ("lengths", "memory")),
    Stage("transformers", check_plain, ("lengths", "memory")),
    Stage("gradient", check_gradient, ("lengths", "memory")),
    Stage("true gradient", check_slope, ("lengths", "memory")),
)
"""In this order: what others build on comes first, and no pass is made that memory has no room for."""

CUSTOM_STAGES: tuple[Stage, ...] = (Stage("custom functions", check_custom),)
"""Before all others, where settings name functions as module:function: it makes no pass through the policy."""

TRIED_STAGES: tuple[Stage, ...] = (Stage("reward functions", check_functions, ("lengths", "memory")),)
"""Besides, where the user's own code judges."""

FILL_STAGES: tuple[Stage, ...] = (
    Stage("frozen models", check_frozen),
    Stage("KL at the start", check_kl, ("lengths", "memory")),
    Stage("rewards vary", check_rewards, ("lengths", "memory")),
)
"""Besides, of a masked policy."""
