"""The checks before the first step, also as `covey check`.

A run whose engine does not sample what its trainer trains, or whose gradient depends on the layout, learns something
else than its metrics say. So it is refused, with the figure and the remedy. The checks leave no trace in weights,
gradients, generators, prompt stream or logs.
"""

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.text import Text

from covey.environments.base import metrics_of
from covey.run.build import Run
from covey.run.records.record import RunRecorder
from covey.run.state import generators, restore_generators
from covey.system import collectives
from covey.system.jsonl import write_json
from covey.system.machine import release_memory, small_pages
from covey.system.text.format import duration
from covey_preflight.custom import check_custom, has_custom
from covey_preflight.episodes import check_episodes, has_episodes
from covey_preflight.fill import check_frozen, check_kl, check_rewards
from covey_preflight.grader import check_grader
from covey_preflight.memory import check_memory
from covey_preflight.plain import check_plain
from covey_preflight.policy import check_gradient, check_logprobs
from covey_preflight.slope import check_slope
from covey_preflight.subject import Check, PreflightContext
from covey_preflight.text import (
    check_completions,
    check_functions,
    check_gold,
    check_lengths,
    check_tokenizer,
    trial_of,
)

REPORT = "preflight.json"


@dataclass(frozen=True, slots=True)
class PreflightCheck:
    """One of the checks, in order."""

    name: str
    look: Callable[[PreflightContext], Check]
    needs: tuple[str, ...] = ()
    """Checks without which this one cannot be made."""
    concerns: Callable[[PreflightContext], bool] = lambda subject: True
    """Tells whether it is made of a policy and an environment of this kind."""


def before_training(run: Run, record: RunRecorder) -> None:
    """Check a new run before its first step. ValueError for a failure."""
    with record.timer.phase("preflight"):
        checks = run_checks(PreflightContext(run, run.config), record.say, after_failure=False)
    write(checks, record.folder)
    raise_on_failure(checks)
    num_passed, seconds = sum(check.applies for check in checks), sum(check.seconds for check in checks)
    others = f", {len(checks) - num_passed} not applicable," if num_passed < len(checks) else ""
    record.say(f"preflight: {num_passed} checks passed{others} in {duration(seconds)}{_describe_compared(checks)}")


def run_checks(
    subject: PreflightContext, say: Callable[[str], None] = lambda line: None, *, after_failure: bool = True
) -> list[Check]:
    """Run the applicable checks, announcing each; ranks agree on the results."""
    subject = _as_computed(subject)
    checks: dict[str, Check] = {}
    watchdog = subject.run.trainer.timer.watchdog
    with small_pages(), leaving_no_trace(subject.run):
        stages = [stage for stage in STAGES if stage.concerns(subject)]
        for number, stage in enumerate(stages, start=1):
            missing = [name for name in stage.needs if not checks[name].passed]
            if not missing:
                say(f"preflight {number} of {len(stages)}: {stage.name}")
            with watchdog.deadline(f"the preflight check of {stage.name}", "timeouts.update"):
                said = f"not measured before {missing[0]} passes" if missing else ""
                check = Check(False, said, "", name=stage.name) if missing else _run_check(stage, subject)
                checks[stage.name] = _agree(collectives.all_gather(check))
            if not (after_failure or checks[stage.name].passed):
                break
    return list(checks.values())


def _as_computed(subject: PreflightContext) -> PreflightContext:
    """Name the policy's actual precision: float16 is replaced on a CPU."""
    precision = str(subject.run.policy.precision).removeprefix("torch.")
    model = replace(subject.config.model, precision=precision)
    return replace(subject, config=replace(subject.config, model=model))


def raise_on_failure(checks: Sequence[Check]) -> None:
    """Raise ValueError with the first failure, its figure and remedy."""
    failed = next((check for check in checks if not check.passed), None)
    if failed is not None:
        allowed = f", allowed: {failed.tolerance}" if failed.tolerance else ""
        raise ValueError(
            f"preflight: {failed.name}: {failed.figure}{allowed}; {failed.remedy} "
            "(preflight.enabled=false trains unchecked)"
        )


def write(checks: Sequence[Check], folder: Path) -> None:
    rows = [{"name": check.name, **asdict(check), "values": _finite(check.values)} for check in checks]
    collectives.run_on_rank0(lambda: write_json(folder / REPORT, rows))


def table(checks: Sequence[Check]) -> Group:
    """Draw each check, its figure below it."""
    lines: list[RenderableType] = []
    for check in checks:
        verdict = ("passed" if check.applies else "not applicable") if check.passed else "FAILED"
        lines.append(Text(f"{check.name:<16}  {verdict:<14}  {duration(check.seconds):>7}", "bold"))
        allowed = f" (allowed: {check.tolerance})" if check.tolerance else ""
        lines.append(Padding(Text(f"{check.figure}{allowed}"), (0, 0, 0, 4)))
    return Group(*lines)


@contextmanager
def leaving_no_trace(run: Run) -> Iterator[None]:
    """Restore everything that the checks may have changed."""
    before, was_training = generators(), run.policy.model.training
    try:
        yield
    finally:
        for parameter in run.policy.model.parameters():
            parameter.grad = None
        run.policy.model.train(was_training)
        run.local.sampler.engine.take_stats()
        metrics_of(run.environment)
        restore_generators(before)
        release_memory()


def _describe_compared(checks: Sequence[Check]) -> str:
    """Describe how many tokens were compared with transformers."""
    values = {check.name: check.values for check in checks}
    lengths = [number for name, number in values["transformers"].items() if name.startswith("tokens/")]
    total = values["true gradient"].get("tokens", 0)
    return f" (with transformers: up to {max(lengths):,.0f} tokens, gradient over {total:,.0f})"


def _finite(values: Mapping[str, float]) -> dict[str, float | None]:
    """Replace infinite numbers by None."""
    return {name: value if math.isfinite(value) else None for name, value in values.items()}


def _run_check(stage: PreflightCheck, subject: PreflightContext) -> Check:
    started = time.perf_counter()
    found = stage.look(subject)
    seconds = time.perf_counter() - started
    return replace(found, name=stage.name, seconds=seconds)


def _agree(of_ranks: Sequence[Check]) -> Check:
    return next((check for check in of_ranks if not check.passed), of_ranks[0])


def _is_masked(subject: PreflightContext) -> bool:
    return subject.run.policy.mask_id is not None


def _is_tried(subject: PreflightContext) -> bool:
    return not _is_masked(subject) and any(trial_of(subject, prompt) for prompt in subject.prompts)


PASSES = ("lengths", "memory")
"""Requirements of a check that makes passes through the policy."""
STAGES: tuple[PreflightCheck, ...] = (
    PreflightCheck("custom functions", check_custom, concerns=lambda subject: has_custom(subject.config)),
    PreflightCheck("tokenizer", check_tokenizer),
    PreflightCheck("lengths", check_lengths, ("tokenizer",)),
    PreflightCheck("gold answers", check_gold, ("tokenizer",)),
    PreflightCheck("wrong answers", check_grader, ("tokenizer",), lambda subject: not _is_masked(subject)),
    PreflightCheck("memory", check_memory, ("lengths",)),
    PreflightCheck("completions", check_completions, PASSES),
    PreflightCheck("reward functions", check_functions, PASSES, _is_tried),
    PreflightCheck("log-probs", check_logprobs, PASSES),
    PreflightCheck("transformers", check_plain, PASSES),
    PreflightCheck("gradient", check_gradient, PASSES),
    PreflightCheck("true gradient", check_slope, PASSES),
    PreflightCheck("episodes", check_episodes, ("tokenizer",), has_episodes),
    PreflightCheck("frozen models", check_frozen, concerns=_is_masked),
    PreflightCheck("KL at the start", check_kl, PASSES, _is_masked),
    PreflightCheck("rewards vary", check_rewards, PASSES, _is_masked),
)
"""Checks in this order: foundations of others first, long ones last, and no pass that memory has no room for."""
