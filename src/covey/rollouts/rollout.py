"""Turn a prompt into a Group: tokenize, sample, score."""

import asyncio
import logging
import math
import pickle
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from covey.engine.base import Begun, Engine, TellingEngine
from covey.rollouts.attempt import Attempt, Segment, build_rollout, rollout_of, to_segment
from covey.rollouts.encoding import encode_prompt
from covey.rollouts.episodes import play_group
from covey.rollouts.sampler import Sampler
from covey.rollouts.saved.journal import NOTHING_KEPT, KeptGroup
from covey.rollouts.turns import decode_tokens, to_judge, turn_seed
from covey.rollouts.verdicts import judge_texts, new_episode
from covey.system import collectives
from covey.types import Completion, Failure, Group, Prompt, Reward, Rollout, Sampling

LOGGER = logging.getLogger(__name__)
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Drawn:
    """Unjudged samples of a prompt, sent between processes."""

    completions: tuple[Completion, ...] = ()
    attempts: tuple[Attempt | Failure, ...] = ()
    prompt_ids: tuple[int, ...] = ()
    """Tokens of the prompt that the completions answer."""

    def __add__(self, other: "Drawn") -> "Drawn":
        attempts = self.attempts + other.attempts
        return Drawn(self.completions + other.completions, attempts, self.prompt_ids or other.prompt_ids)


@dataclass(frozen=True, slots=True)
class GroupJob:
    """A group to sample."""

    prompt: Prompt
    sampling: Sampling
    kept: KeptGroup = NOTHING_KEPT


Ready = Callable[[], Awaitable[None]]


async def no_wait() -> None:
    """Do not wait."""


async def roll_out(
    sampler: Sampler,
    prompt: Prompt,
    num_samples: int,
    sampling: Sampling,
    ready: Callable[[], Awaitable[None]] = no_wait,
    kept: KeptGroup = NOTHING_KEPT,
) -> Group:
    """Sample `num_samples` completions of the prompt and score them.

    An unscorable completion becomes a Failure of the group, no rollout and no reward of 0. Sampling waits for `ready`,
    encoding does not. Known parts (`kept`) are neither sampled nor scored.
    """
    drawn = await draw(sampler, prompt, num_samples, sampling, ready, kept)
    return await judge(sampler, prompt, drawn, kept)


async def draw(
    sampler: Sampler,
    prompt: Prompt,
    num_samples: int,
    sampling: Sampling,
    ready: Callable[[], Awaitable[None]] = no_wait,
    kept: KeptGroup = NOTHING_KEPT,
) -> Drawn:
    """Sample a group, or the part of it that begins with `sampling.first_sample`."""
    numbers = range(sampling.first_sample, sampling.first_sample + num_samples)
    if sampler.mask_id is None:
        attempts = await _attempts(sampler, prompt, numbers, sampling, ready, kept)
        if attempts:
            return Drawn(attempts=attempts)
    prompt_ids = tuple(encode_prompt(sampler.tokenizer, prompt))
    await ready()
    found = dict(kept.completions)
    missing = runs_of([number for number in numbers if number not in found])
    try:
        with sampler.waits.sampling() if missing else nullcontext():
            of_runs = [_sample(sampler.engine, prompt_ids, part, sampling, kept) for part in missing]
            for part, completions in zip(missing, await _together(of_runs), strict=True):
                found |= zip(part, completions, strict=True)
    except ValueError as error:
        raise ValueError(f"prompt {prompt.id}: {error}") from error
    return Drawn(tuple(found[number] for number in numbers), prompt_ids=prompt_ids)


async def _sample(
    engine: Engine, prompt_ids: Sequence[int], part: range, sampling: Sampling, kept: KeptGroup
) -> Sequence[Completion]:
    """Sample some completions of a prompt, and report each."""

    def tell(index: int, completion: Completion) -> None:
        kept.add("completion", part[index], completion)

    own = replace(sampling, first_sample=part.start)
    if kept.tell is not None and isinstance(engine, TellingEngine):
        known = {index: kept.begun[number] for index, number in enumerate(part) if number in kept.begun}

        def tell_begun(index: int, token_ids: Sequence[int]) -> None:
            kept.add_begun(part[index], token_ids)

        return await engine.generate_telling(prompt_ids, len(part), own, tell, Begun(known, tell_begun))
    completions = await engine.generate(prompt_ids, len(part), own)
    for index, completion in enumerate(completions):
        tell(index, completion)
    return completions


async def _attempts(
    sampler: Sampler, prompt: Prompt, numbers: range, sampling: Sampling, ready: Ready, kept: KeptGroup
) -> tuple[Attempt | Failure, ...]:
    """Play the episodes of a prompt, none where it has one answer."""
    found = dict(kept.attempts)
    if found and not all(number in found for number in numbers) and sampler.environment.judges_groups(prompt):
        found = {}  # they are judged while all of them are open
    missing = [number for number in numbers if number not in found]
    seeds = {number: turn_seed(sampling.seed, number, 0) for number in missing}
    episodes = {number: new_episode(sampler.environment, prompt, seed) for number, seed in seeds.items()}
    if not found and all(episode is None for episode in episodes.values()):
        return ()
    lacking = Failure(f"{prompt.environment}.episode returned None, and not so for others of the group")

    def take(number: int, attempt: Attempt | Failure) -> None:
        found[number] = attempt
        kept.add("attempt", number, attempt)

    async def play(part: range) -> None:
        own = [lacking if (episode := episodes[number]) is None else episode for number in part]
        await play_group(sampler, prompt, own, replace(sampling, first_sample=part.start), take)

    if missing:
        await ready()
    try:
        await _together([play(part) for part in runs_of(missing)])
    except ValueError as error:
        raise ValueError(f"prompt {prompt.id}: {error}") from error
    return tuple(found[number] for number in numbers)


async def _together(work: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """Await coroutines, a single one in this task."""
    # In a task of its own a SystemExit would end the loop
    return [await work[0]] if len(work) == 1 else await asyncio.gather(*work)


def runs_of(numbers: Sequence[int]) -> list[range]:
    """Return ascending numbers as ranges.

    >>> runs_of([0, 1, 4])
    [range(0, 2), range(4, 5)]
    """
    found: list[range] = []
    for number in numbers:
        if found and found[-1].stop == number:
            found[-1] = range(found[-1].start, number + 1)
        else:
            found.append(range(number, number + 1))
    return found


async def judge(sampler: Sampler, prompt: Prompt, drawn: Drawn, kept: KeptGroup = NOTHING_KEPT) -> Group:
    """Score the samples of a prompt without verdicts, and build rollouts."""
    if drawn.attempts:
        made = await _judge_episodes(sampler, prompt, drawn.attempts, kept)
    else:
        made = await _judge_answers(sampler, prompt, drawn.prompt_ids, drawn.completions, kept)
    kept.add("end")
    return _group(prompt, made)


async def _verdicts(
    sampler: Sampler, prompt: Prompt, texts: Sequence[str], ids: Sequence[Sequence[int]], kept: KeptGroup
) -> Sequence[Reward | Failure]:
    if len(kept.verdicts) == len(texts):
        return kept.verdicts
    found = await judge_texts(sampler.environment, sampler.waits, prompt, texts, ids)
    kept.add("verdicts", value=found)
    return found


def roll_out_together(
    sampler: Sampler, jobs: Sequence[GroupJob], group_size: int, own: range, run: Callable[..., Any]
) -> list[Group]:
    """Roll out the groups of all ranks, samples shared out. Collective.

    A group's owner (`own`) has the whole of it scored; a group whose episodes are judged together stays whole. `run`
    runs a list of coroutines.
    """
    whole = [sampler.environment.judges_groups(job.prompt) for job in jobs]
    shared = [index for index in range(len(jobs)) if not whole[index]]
    pieces = pieces_of(len(shared), group_size, collectives.rank(), collectives.world_size())

    def drawn() -> bytes:
        parts = [(jobs[shared[place]], first, count) for place, first, count in pieces]
        found = run(
            draw(sampler, job.prompt, count, replace(job.sampling, first_sample=first), kept=job.kept)
            for job, first, count in parts
        )
        try:
            return pickle.dumps([(shared[place], part) for (place, _, _), part in zip(pieces, found, strict=True)])
        except Exception as error:  # what an environment puts into an episode may be anything
            name = jobs[0].prompt.environment
            raise ValueError(
                f"groups_per_step < {collectives.world_size()} processes shares the samples of a group out, and those "
                f"of environment {name} cannot travel ({error}): take more groups or fewer processes"
            ) from error

    of_ranks = collectives.all_gather(collectives.run_or_fail_together(drawn, "the end of sampling"))
    parts = [part for of_rank in of_ranks for part in pickle.loads(of_rank)]
    together = {index: sum((part for place, part in parts if place == index), Drawn()) for index in own}
    judging = [
        roll_out(sampler, job.prompt, group_size, job.sampling, kept=job.kept)
        if whole[index]
        else judge(sampler, job.prompt, together[index], job.kept)
        for index, job in enumerate(jobs)
        if index in own
    ]
    return collectives.run_or_fail_together(lambda: run(judging), "the end of scoring")


def pieces_of(num_groups: int, group_size: int, rank: int, num_ranks: int) -> list[tuple[int, int, int]]:
    """Return this rank's samples as (group, first sample, number).

    >>> pieces_of(2, 8, rank=1, num_ranks=3)
    [(0, 5, 3), (1, 0, 2)]
    """
    total = num_groups * group_size
    start, end = total * rank // num_ranks, total * (rank + 1) // num_ranks
    bounds = [
        (group, max(start, group * group_size), min(end, (group + 1) * group_size)) for group in range(num_groups)
    ]
    return [(group, begin - group * group_size, stop - begin) for group, begin, stop in bounds if stop > begin]


async def _judge_answers(
    sampler: Sampler, prompt: Prompt, prompt_ids: Sequence[int], completions: Sequence[Completion], kept: KeptGroup
) -> list[Rollout | Failure]:
    texts = [to_judge(sampler.tokenizer, completion) for completion in completions]
    ids = [completion.token_ids for completion in completions]
    verdicts = await _verdicts(sampler, prompt, texts, ids, kept)
    return [
        replace(verdict, num_tokens=len(completion.token_ids))
        if isinstance(verdict, Failure)
        else _unless_not_finite(
            finished_rollout(sampler.mask_id, prompt_ids, completion, verdict, str(text)), completion.logprobs
        )
        for completion, text, verdict in zip(completions, texts, verdicts, strict=True)
    ]


async def _judge_episodes(
    sampler: Sampler, prompt: Prompt, attempts: Sequence[Attempt | Failure], kept: KeptGroup
) -> list[Rollout | Failure]:
    """Score the unjudged episodes of a prompt, or return Failures."""
    left = [a for a in attempts if isinstance(a, Attempt) and a.verdict is None]
    if left:
        last = [a.completions[-1].token_ids if a.turns else () for a in left]
        texts = [to_judge(sampler.tokenizer, a.completions[-1]) if a.turns else "" for a in left]
        found = await _verdicts(sampler, prompt, texts, last, kept)
        for attempt, verdict in zip(left, found, strict=True):
            attempt.verdict = verdict
    return [attempt if isinstance(attempt, Failure) else _finish(sampler, attempt) for attempt in attempts]


def _finish(sampler: Sampler, attempt: Attempt) -> Rollout | Failure:
    """Build the rollout of an episode; its text is everything since the prompt."""
    verdict = attempt.verdict
    assert verdict is not None, "every attempt is judged"
    if isinstance(verdict, Failure):
        return replace(verdict, num_tokens=sum(len(completion.token_ids) for completion in attempt.completions))
    # Rewards of its turns come on top of the verdict
    earned = sum(turn.reward for turn in attempt.turns)
    if any(turn.reward for turn in attempt.turns):
        parts = {**(verdict.parts or {"outcome": verdict.value}), "turns": earned}
        verdict = replace(verdict, value=verdict.value + earned, parts=parts)
    after_prompt = [segment.ids for branch in attempt.branches for segment in branch[1:]]
    text = decode_tokens(sampler.tokenizer, [token for ids in after_prompt for token in ids])
    rollout = rollout_of(attempt, verdict, text)
    return _unless_not_finite(rollout, rollout.sampler_logprobs)


def _unless_not_finite(rollout: Rollout, logprobs: Sequence[float]) -> Rollout | Failure:
    if math.isfinite(sum(logprobs)):
        return rollout
    return Failure("the engine sampled with log-probs that are not finite")  # the draw meant nothing


def _group(prompt: Prompt, made: Sequence[Rollout | Failure]) -> Group:
    failures = tuple(one for one in made if isinstance(one, Failure))
    for reason, count in Counter(failure.reason for failure in failures).items():
        LOGGER.info("prompt %s: %d of %d completions were not scored: %s", prompt.id, count, len(made), reason)
    return Group(prompt, tuple(one for one in made if isinstance(one, Rollout)), failures)


def causal_rollout(prompt_ids: Sequence[int], completion: Completion, reward: Reward, text: str) -> Rollout:
    """Build the rollout of one answer. See `build_rollout` for the shift."""
    return build_rollout([[Segment(tuple(prompt_ids), "prompt", 0), to_segment(completion, turn=1)]], reward, text)


def filled_rollout(
    prompt_ids: Sequence[int], mask_id: int, completion: Completion, reward: Reward, text: str
) -> Rollout:
    """Build a masked policy's rollout, in which masked positions predict themselves.

    After several passes, what each of them read stands one after the other; a token is learnt where it was filled in.
    """
    masked = [position for position, token_id in enumerate(prompt_ids) if token_id == mask_id]
    assert len(masked) == len(completion.token_ids), f"{len(masked)} masked, {len(completion.token_ids)} filled in"
    passes = completion.passes or (0,) * len(masked)
    ids: list[int] = []
    targets: list[int] = []
    logprobs: list[float] = []
    mask: list[bool] = []
    for number in range(max(passes, default=0) + 1):
        given, filled = list(prompt_ids), list(prompt_ids)
        chosen, found = [False] * len(given), [0.0] * len(given)
        fills = zip(masked, completion.token_ids, completion.logprobs, passes, strict=True)
        for position, token_id, logprob, filled_in in fills:
            filled[position] = token_id
            if filled_in < number:
                given[position] = token_id
            elif filled_in == number:
                chosen[position], found[position] = True, logprob
        ids, targets, logprobs, mask = ids + given, targets + filled, logprobs + found, mask + chosen
    return Rollout(
        input_ids=tuple(ids),
        target_ids=tuple(targets),
        loss_mask=tuple(mask),
        sampler_logprobs=tuple(logprobs),
        reward=reward,
        text=text,
        finish_reason=completion.finish_reason,
        policy_version=completion.policy_version,
        input_length=len(prompt_ids),
    )


def finished_rollout(
    mask_id: int | None, prompt_ids: Sequence[int], completion: Completion, reward: Reward, text: str
) -> Rollout:
    """Build a rollout of one turn for a causal or masked policy."""
    if mask_id is None:
        return causal_rollout(prompt_ids, completion, reward, text)
    return filled_rollout(prompt_ids, mask_id, completion, reward, text)
