"""The result of a run: summary.json, and its tables."""

import logging
import math
import resource
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from covey.algorithm.intervals import Estimate, bounds_of, mean_interval
from covey.system.jsonl import map_leaves, write_json

if TYPE_CHECKING:  # covey.run.evaluate imports torch; reading a summary must not
    from covey.run.evaluate import Evaluation

LOGGER = logging.getLogger(__name__)
HELD_OUT, TRAINED, SIDES = "held-out prompt", "training prompt", ("before", "after")
PromptKey = tuple[str, str]
"""A prompt that an evaluation looked at: its environment and its fingerprint (fingerprint.py)."""


@dataclass(frozen=True, slots=True)
class RunFacts:
    """The training loop's facts at its end.

    >>> RunFacts(status="completed", seed=0, steps=100, seconds=61.5, phases={"sampling": 40.1, "backward": 18.0})
    """

    status: str
    """completed, interrupted or failed."""
    seed: int
    steps: int
    """Optimiser phases done, skipped ones included."""
    seconds: float
    """Wall clock of the whole run."""
    phases: Mapping[str, float]
    """Exclusive seconds of each phase (`covey.system.waits.timer.PhaseTimer.seconds`)."""
    skipped_steps: int = 0
    """Steps without an update, because loss or gradient was not finite."""
    dropped_groups: int = 0
    """Groups sampled but not trained on (filtered, failed or too stale)."""
    tokens: int = 0
    """Sampled tokens."""
    step_seconds: float = 0.0
    """Wall clock of the steps alone, from sampling to update: without cold start, evaluations and checkpoints."""
    peak_memory_bytes: int = 0
    versions: Mapping[str, str] = field(default_factory=dict)
    rechecked: int = 0
    """Programs of full score that were run again."""
    recheck_disagreements: int = 0
    """Number of them that then failed a test."""
    environment: Mapping[str, Any] = field(default_factory=dict)
    """Facts that the environment's judgements rest on (`covey.environments.base.Environment.facts`)."""
    looked_at: str = HELD_OUT
    """Name of an evaluation's prompts, singular."""
    sides: tuple[str, str] = SIDES
    """Names of the two evaluations that are compared."""
    samplers: Mapping[str, float] | None = None
    """Ages, waits and speed of samplers in processes of their own (`covey.run.records.samplers`)."""


def summary(
    facts: RunFacts,
    before: "Evaluation | None",
    after: "Evaluation | None",
    confidence: float = 0.95,
    compared: "tuple[Evaluation | None, Evaluation | None] | None" = None,
) -> dict[str, Any]:
    """Build the content of summary.json.

    `before`, `after` and `gain` are null without evaluations. The gain is that of `compared` where the evaluations had
    different prompts (`comparable`).
    """
    rate = facts.tokens / facts.step_seconds if facts.step_seconds > 0 else 0.0
    gain = gains(*(compared or (before, after)), confidence)
    flattered = reward_hacking_note(gain, facts.environment.get("gap_reference"))
    told = asdict(facts)
    told |= {"confidence": confidence, "sides": list(facts.sides), "tokens_per_second": rate, "gain": gain}
    told |= {"before": describe(before), "after": describe(after), "phases": phase_shares(facts.phases, facts.seconds)}
    told["reward_hacking"] = hacking_note(facts.rechecked, facts.recheck_disagreements) or flattered
    return {name: told[name] for name in CONTENT if name != "samplers" or facts.samplers is not None}


CONTENT = (
    *("status", "seed", "steps", "skipped_steps", "dropped_groups", "confidence", "looked_at", "sides"),
    *("before", "after", "gain", "seconds", "phases", "tokens", "tokens_per_second", "peak_memory_bytes"),
    *("samplers", "reward_hacking", "environment", "versions"),
)
"""Names in summary.json, in order; `samplers` only where there were some."""


def hacking_note(rechecked: int, disagreements: int) -> str | None:
    """Return a warning where programs earned undeserved full scores."""
    if not disagreements:
        return None
    return f"{disagreements} of {rechecked} full-score programs failed a re-check: see covey.log"


def reward_hacking_note(gain: Mapping[str, Any] | None, gap_reference: str | None) -> str | None:
    """Return a warning where a judge's score outgrew its monitors'."""
    gap = gain["reward_parts"].get("gap") if gain else None
    if gap is None or not gap["low"] > 0:  # NaN where there is too little to tell
        return None
    interval = f"{gap['value']:.3f} [{gap['low']:.3f}, {gap['high']:.3f}]"
    return f"the judge's score rose {interval} more than {gap_reference}, which is not trained on"


def describe(evaluation: "Evaluation | None") -> dict[str, Any] | None:
    """Describe an evaluation's estimates as {value, low, high}."""
    if evaluation is None:
        return None
    return {
        **({} if evaluation.accuracy is None else {"accuracy": asdict(evaluation.accuracy)}),
        "reward_mean": asdict(evaluation.reward_mean),
        "pass_at_k": {str(k): asdict(estimate) for k, estimate in evaluation.pass_at_k.items()},
        "num_prompts": evaluation.num_prompts,
        "num_samples": evaluation.num_samples,
        "parts": {name: describe(part) for name, part in evaluation.parts.items()},
        "reward_parts": {name: asdict(estimate) for name, estimate in evaluation.reward_parts.items()},
    }


def gains(before: "Evaluation | None", after: "Evaluation | None", confidence: float) -> dict[str, Any] | None:
    """Return the paired differences over common prompts, with their number."""
    if before is None or after is None:
        return None
    rewards = zip(before.mean_reward, after.mean_reward, strict=True)
    both = [name for name in before.mean_parts if name in after.mean_parts]
    found: dict[str, Any] = {
        "num_prompts": sum(not any(map(math.isnan, pair)) for pair in rewards),
        "reward_mean": asdict(paired_gain(before.mean_reward, after.mean_reward, confidence)),
        "parts": {name: gains(part, after.parts.get(name), confidence) for name, part in before.parts.items()},
        "reward_parts": {
            name: asdict(paired_gain(before.mean_parts[name], after.mean_parts[name], confidence)) for name in both
        },
    }
    if before.accuracy is None or after.accuracy is None:
        return found
    found["accuracy"] = asdict(paired_gain(before.correct_greedy, after.correct_greedy, confidence))
    passes = [k for k in before.pass_at_k if k in after.pass_at_k and before.num_scored and after.num_scored]
    of_each = {k: (before.pass_of_each(k), after.pass_of_each(k)) for k in passes}
    return found | {"pass_at_k": {str(k): asdict(paired_gain(*pair, confidence)) for k, pair in of_each.items()}}


def comparable(
    before: "Evaluation", after: "Evaluation", seen: Sequence[Sequence[PromptKey]]
) -> "tuple[Evaluation | None, Evaluation | None]":
    """Return both evaluations on their common prompts, (None, None) without any.

    They differ where a run was resumed with other rows. `seen` has the prompts of each evaluation of the run, `before`
    being the first and `after` the last.
    """
    first, last = seen[0], seen[-1]
    if first == last:
        return before, after
    after_too = set(last)
    shared = [prompt for prompt in first if prompt in after_too]
    if not shared:
        LOGGER.warning("no prompt is in both evaluations, the first and the last: the summary has no gain")
        return None, None
    of = f"{before.num_prompts} and {after.num_prompts}"
    LOGGER.warning("gain computed on the %d prompts common to both evaluations (%s)", len(shared), of)
    return _over(before, first, shared), _over(after, last, shared)


def _over(evaluation: "Evaluation", seen: Sequence[PromptKey], wanted: Sequence[PromptKey]) -> "Evaluation":
    places = {prompt: place for place, prompt in enumerate(seen)}
    chosen = [places[prompt] for prompt in wanted]
    names = {name for name, _ in wanted}
    parts = {
        name: _over(part, [prompt for prompt in seen if prompt[0] == name], [p for p in wanted if p[0] == name])
        for name, part in evaluation.parts.items()
        if name in names
    }
    return replace(
        evaluation,
        correct_greedy=tuple(evaluation.correct_greedy[place] for place in chosen),
        mean_reward=tuple(evaluation.mean_reward[place] for place in chosen),
        mean_parts={name: tuple(of[place] for place in chosen) for name, of in evaluation.mean_parts.items()},
        num_right=tuple(evaluation.num_right[place] for place in chosen if evaluation.num_right),
        num_scored=tuple(evaluation.num_scored[place] for place in chosen if evaluation.num_scored),
        parts=parts,
    )


def paired_gain(before: Sequence[float], after: Sequence[float], confidence: float) -> Estimate:
    """Return the mean of per-prompt differences with its interval (`mean_interval`).

    Prompts are the independent units. Values in [0, 1] differ by -1 to 1. NaN on either side leaves a prompt out.
    """
    pairs = [pair for pair in zip(before, after, strict=True) if not any(map(math.isnan, pair))]
    is_bounded = bounds_of([value for pair in pairs for value in pair]) is not None
    return mean_interval([a - b for b, a in pairs], confidence, (-1.0, 1.0) if is_bounded else None)


def phase_shares(phases: Mapping[str, float], seconds: float) -> dict[str, dict[str, float]]:
    """Return {name: {seconds, share}}, with unclaimed time as "other"."""
    total = max(seconds, sum(phases.values()))
    parts = {**phases, "other": total - sum(phases.values())}
    return {name: {"seconds": spent, "share": spent / total if total > 0 else 0.0} for name, spent in parts.items()}


def peak_memory_bytes(device: str = "cpu") -> int:
    """Return the peak memory: of the GPU `device`, else resident."""
    if device.startswith("cuda"):
        import torch

        return int(torch.cuda.max_memory_allocated(device))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # kilobytes on Linux, bytes on macOS


def write_summary(folder: Path, content: Mapping[str, Any]) -> Path:
    """Write summary.json atomically, missing values as null."""
    path = folder / "summary.json"
    write_json(path, map_leaves(content, lambda one: None if isinstance(one, float) and math.isnan(one) else one))
    return path
