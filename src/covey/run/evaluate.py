"""Measure a policy on held-out prompts, with confidence intervals."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean, stdev
from typing import Any

from covey.algorithm.intervals import SHARE, Estimate, bounds_of, mean_interval, pass_of_each, wilson
from covey.config.schema import EvaluationConfig
from covey.environments.registry import known_class
from covey.rollouts.group_checks import FEW_FAILURES, stop_where_only_failures
from covey.rollouts.saved.plain import from_plain
from covey.rollouts.source import GroupSource
from covey.types import UNREWARDED, Group, Prompt, Sampling


@dataclass(frozen=True, slots=True)
class Evaluation:
    """An evaluation's results; tuples have one entry per prompt."""

    accuracy: Estimate | None
    """Share of prompts whose greedy completion is correct, None where rewards do not tell."""
    reward_mean: Estimate
    """Mean reward of sampled completions."""
    pass_at_k: dict[int, Estimate]
    """Chance that at least one of k samples is correct (unbiased, arXiv 2107.03374). Empty as accuracy is None."""
    num_prompts: int
    num_samples: int
    num_unscored: int
    """Completions that the system failed to score."""
    correct_greedy: tuple[float, ...]
    """NaN for a prompt that the judge has nothing to say about, and for all where accuracy is None."""
    mean_reward: tuple[float, ...]
    """NaN for a prompt without any scored sample."""
    parts: "Mapping[str, Evaluation]" = field(default_factory=dict)
    """The same of the prompts of each environment, by its name, where there are several."""
    reward_parts: Mapping[str, Estimate] = field(default_factory=dict)
    """Mean of each part that the rewards of sampled completions have."""
    mean_parts: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    """The same of each prompt; NaN for one without any."""
    num_right: tuple[int, ...] = ()
    """Correct samples of each prompt."""
    num_scored: tuple[int, ...] = ()
    """Samples of each prompt that were scored."""

    @property
    def score(self) -> float:
        """Return the ranking score: accuracy, else mean reward."""
        return (self.accuracy or self.reward_mean).value

    def pass_of_each(self, k: int) -> list[float]:
        """Return each prompt's pass@k, NaN where too few were scored."""
        return pass_of_each(self.num_scored, self.num_right, k)


def evaluation_from(values: Mapping[str, Any]) -> Evaluation:
    """Rebuild the evaluation that `dataclasses.asdict` took apart."""
    return from_plain(Evaluation, dict(values))


@dataclass(frozen=True, slots=True)
class Answers:
    """The answers to the held-out prompts, a group per prompt."""

    greedy: list[Group]
    """Groups of one completion."""
    sampled: list[Group]


def evaluate(
    source: GroupSource, prompts: Sequence[Prompt], sampling: Sampling, settings: EvaluationConfig
) -> Evaluation:
    """Measure the policy on the prompts: `answer`, then `evaluation_of`."""
    return evaluation_of(answer(source, prompts, sampling, settings), settings)


def answer(source: GroupSource, prompts: Sequence[Prompt], sampling: Sampling, settings: EvaluationConfig) -> Answers:
    """Answer every prompt greedily and `num_samples` times, and score.

    The random numbers are the same each time, so that looks can be paired.
    """
    greedy = source.run(prompts, 1, replace(sampling, temperature=0.0, top_k=0, top_p=1.0, min_p=0.0))
    stop_where_only_failures(greedy, FEW_FAILURES)
    sampled = source.run(prompts, settings.num_samples, sampling)
    stop_where_only_failures(sampled, FEW_FAILURES)
    return Answers(greedy, sampled)


NOISY, ERRORS, LEAST_PROMPTS = 2.0, 2.0, 16
"""Samples are noise where greedy answers earn NOISY times as much, by ERRORS standard errors over LEAST_PROMPTS prompts
or more; an error is at least that of one prompt."""


def noise(answers: Answers, temperature: float) -> str | None:
    """Return a warning where sampled answers are noise, else None.

    If both are worth the same it is said in 0.07 % of evaluations (drawn: 16 to 200 prompts, 1 to 8 samples, 2 to
    90 % right), at most in 1.9 % (24 prompts, one sample, 10 % right); where samples earn two thirds, in 0.4 and 4.8 %.

    >>> noise(answers, 1.0)
    'greedy answers earn 0.175, samples at temperature 1 earn 0.016: try sampling.temperature=0.7'
    """
    both = [(group.rewards, others.rewards) for group, others in zip(answers.greedy, answers.sampled, strict=True)]
    pairs = [(greedy[0], fmean(sampled)) for greedy, sampled in both if greedy and sampled]
    if len(pairs) < LEAST_PROMPTS or min(min(pair) for pair in pairs) < 0:  # what costs has no multiples
        return None
    surplus = [greedy - NOISY * sampled for greedy, sampled in pairs]
    most = max(max(pair) for pair in pairs)
    error = max(stdev(surplus) / math.sqrt(len(pairs)), most / len(pairs))
    if fmean(surplus) <= ERRORS * error:
        return None
    greedy, sampled = (fmean(values) for values in zip(*pairs, strict=True))
    return (
        f"greedy answers earn {greedy:.3f}, samples at temperature {temperature:g} earn {sampled:.3f}: "
        f"try sampling.temperature={min(0.7, 0.7 * temperature):.2g}"
    )


def evaluation_of(answers: Answers, settings: EvaluationConfig) -> Evaluation:
    """Measure the answers, over all prompts and per environment.

    Completions that the system failed to score are left out; a prompt without any is not correct greedily, and in no
    mean over samples. One that the judge has nothing to say about is in no figure.
    """
    greedy, sampled = answers.greedy, answers.sampled
    names = list(dict.fromkeys(group.prompt.environment for group in greedy))
    parts = {name: measure(_of(greedy, name), _of(sampled, name), settings) for name in names}
    return replace(measure(greedy, sampled, settings), parts=parts if len(parts) > 1 else {})


def measure(greedy: Sequence[Group], sampled: Sequence[Group], settings: EvaluationConfig) -> Evaluation:
    tells = tells_right(greedy, sampled, settings)
    correct = tuple(_is_correct(group, settings.correct_above) if tells else math.nan for group in greedy)
    judged = [value for value in correct if not math.isnan(value)]
    rewards = tuple(fmean(group.earned) if group.earned else math.nan for group in sampled)
    bounds = bounds_of([reward for group in (*greedy, *sampled) for reward in group.earned])
    mean_parts = _mean_parts(sampled)
    found = Evaluation(
        accuracy=wilson(sum(judged), len(judged), settings.confidence) if tells else None,
        reward_mean=mean_interval(_drop_nan(rewards), settings.confidence, bounds),
        pass_at_k={},
        num_prompts=len(greedy),
        num_samples=settings.num_samples,
        num_unscored=sum(len(group.failures) for group in (*greedy, *sampled)),
        correct_greedy=correct,
        mean_reward=rewards,
        reward_parts={
            name: mean_interval(_drop_nan(part), settings.confidence, bounds_of(_drop_nan(part)))
            for name, part in mean_parts.items()
        },
        mean_parts=mean_parts,
        num_right=tuple(_num_correct(group, settings.correct_above) for group in sampled),
        num_scored=tuple(len(group.rollouts) for group in sampled),
    )
    passes = {k: mean_interval(_drop_nan(found.pass_of_each(k)), settings.confidence, SHARE) for k in settings.k}
    return replace(found, pass_at_k=passes if tells else {})


def numbers_of(found: Evaluation) -> dict[str, float]:
    """Return an evaluation's numbers by their metrics.jsonl names."""
    accuracy = {} if found.accuracy is None else {"accuracy": found.accuracy.value}
    passes = {f"pass_at_{k}": estimate.value for k, estimate in found.pass_at_k.items()}
    return {**accuracy, "reward_mean": found.reward_mean.value, **passes}


def tells_right(greedy: Sequence[Group], sampled: Sequence[Group], settings: EvaluationConfig) -> bool:
    """Return True if rewards tell right answers."""
    groups = (*greedy, *sampled)
    if any(group.rollouts and not group.earned for group in groups):  # a teacher trains alone
        return False
    return any(group.earned for group in groups) and not any(is_graded(group, settings) for group in groups)


def is_graded(group: Group, settings: EvaluationConfig) -> bool:
    """Return True if rewards grade answers instead of judging them."""
    if settings.correct_above != EvaluationConfig.correct_above or {*group.rewards} <= {0.0, 1.0}:
        return False
    return not known_class(group.prompt.environment).knows_right


def _drop_nan(values: Sequence[float]) -> list[float]:
    return [value for value in values if not math.isnan(value)]


def _mean_parts(groups: Sequence[Group]) -> dict[str, tuple[float, ...]]:
    names = dict.fromkeys(
        name for group in groups for r in group.rollouts for name in r.reward.parts if name != UNREWARDED
    )

    def mean(group: Group, name: str) -> float:
        found = [r.parts[name] for r in group.rollouts if name in r.parts]
        return fmean(found) if found else math.nan

    return {name: tuple(mean(group, name) for group in groups) for name in names}


def _of(groups: Sequence[Group], environment: str) -> list[Group]:
    return [group for group in groups if group.prompt.environment == environment]


def _is_correct(group: Group, threshold: float) -> float:
    """Return 1, 0, or NaN without a verdict."""
    if not group.rollouts and not any(failure.is_fault for failure in group.failures):
        return math.nan
    return float(_num_correct(group, threshold) > 0)


def _num_correct(group: Group, threshold: float) -> int:
    return sum(reward >= threshold for reward in group.rewards)
