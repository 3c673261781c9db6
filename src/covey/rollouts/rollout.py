"""One prompt becomes one Group: tokenize once, sample, score. What goes wrong in the system becomes data."""

import logging
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from covey.environments.episode import Episode
from covey.rollouts.attempt import Attempt, Segment, joined, rollout_of, sampled
from covey.rollouts.encoding import encode_prompt
from covey.rollouts.episodes import play_group
from covey.rollouts.sampler import Sampler
from covey.rollouts.turns import decoded, turn_seed
from covey.rollouts.verdicts import judged, tried
from covey.types import Completion, Failure, Group, Prompt, Reward, Rollout, Sampling

LOGGER = logging.getLogger(__name__)


async def roll_out(sampler: Sampler, prompt: Prompt, num_samples: int, sampling: Sampling) -> Group:
    """Sample `num_samples` completions of the prompt and have them scored.

    A completion that the system could not score becomes a Failure of the group: it is no rollout and no reward of 0.
    """
    if sampler.mask_id is None:
        episodes = [_new_episode(sampler, prompt, turn_seed(sampling.seed, i, 0)) for i in range(num_samples)]
        if all(episodes) and episodes:
            return await _roll_out_episodes(sampler, prompt, [e for e in episodes if e], sampling)
    return await _roll_out_answers(sampler, prompt, num_samples, sampling)


def _new_episode(sampler: Sampler, prompt: Prompt, seed: int) -> Episode | Failure | None:
    return tried(prompt, "episode", lambda: sampler.environment.episode(prompt, seed))


async def _roll_out_answers(sampler: Sampler, prompt: Prompt, num_samples: int, sampling: Sampling) -> Group:
    """Roll out a prompt with one answer a sample."""
    prompt_ids = encode_prompt(sampler.tokenizer, prompt)
    try:
        with sampler.stages.sampling():
            completions = await sampler.engine.generate(prompt_ids, num_samples, sampling)
    except ValueError as error:
        raise ValueError(f"prompt {prompt.id}: {error}") from error
    texts = [decoded(sampler.tokenizer, completion.token_ids) for completion in completions]
    ids = [completion.token_ids for completion in completions]
    verdicts = await judged(sampler.environment, sampler.stages, prompt, texts, ids)
    made = [
        verdict
        if isinstance(verdict, Failure)
        else _unless_not_finite(
            finished_rollout(sampler.mask_id, prompt_ids, completion, verdict, text), completion.logprobs
        )
        for completion, text, verdict in zip(completions, texts, verdicts, strict=True)
    ]
    return _group(prompt, made)


async def _roll_out_episodes(
    sampler: Sampler, prompt: Prompt, episodes: Sequence[Episode | Failure], sampling: Sampling
) -> Group:
    """Roll out a prompt with an episode for each sample, or the reason why there is none."""
    try:
        attempts = await play_group(sampler, prompt, episodes, sampling)
    except ValueError as error:
        raise ValueError(f"prompt {prompt.id}: {error}") from error
    # Ask for the verdicts that episodes left to the environment, all at once
    left = [a for a in attempts if isinstance(a, Attempt) and a.verdict is None]
    if left:
        last = [a.completions[-1].token_ids if a.turns else () for a in left]
        texts = [decoded(sampler.tokenizer, ids) for ids in last]
        found = await judged(sampler.environment, sampler.stages, prompt, texts, last)
        for attempt, verdict in zip(left, found, strict=True):
            attempt.verdict = verdict
    made = [attempt if isinstance(attempt, Failure) else _finished(sampler, attempt) for attempt in attempts]
    return _group(prompt, made)


def _finished(sampler: Sampler, attempt: Attempt) -> Rollout | Failure:
    """Build the rollout of an episode. Its text is all that was said since the prompt."""
    verdict = attempt.verdict
    assert verdict is not None, "every attempt is judged"
    if isinstance(verdict, Failure):
        return verdict
    # What its turns earned comes on top of the verdict
    earned = sum(turn.reward for turn in attempt.turns)
    if any(turn.reward for turn in attempt.turns):
        parts = {**(verdict.parts or {"outcome": verdict.value}), "turns": earned}
        verdict = replace(verdict, value=verdict.value + earned, parts=parts)
    after_prompt = [segment.ids for branch in attempt.branches for segment in branch[1:]]
    text = decoded(sampler.tokenizer, [token for ids in after_prompt for token in ids])
    rollout = rollout_of(attempt, verdict, text)
    return _unless_not_finite(rollout, rollout.sampler_logprobs)


def _unless_not_finite(rollout: Rollout, logprobs: Sequence[float]) -> Rollout | Failure:
    if math.isfinite(sum(logprobs)):
        return rollout
    return Failure("the engine sampled with log-probs that are not finite")  # the draw meant nothing


def _group(prompt: Prompt, made: Sequence[Rollout | Failure]) -> Group:
    """Sort what was scored from what was not."""
    failures = tuple(one for one in made if isinstance(one, Failure))
    for reason, count in Counter(failure.reason for failure in failures).items():
        LOGGER.info("prompt %s: %d of %d completions were not scored: %s", prompt.id, count, len(made), reason)
    return Group(prompt, tuple(one for one in made if isinstance(one, Rollout)), failures)


def causal_rollout(prompt_ids: Sequence[int], completion: Completion, reward: Reward, text: str) -> Rollout:
    """Build the rollout of one answer. See `attempt.joined` for the shift."""
    return joined([[Segment(tuple(prompt_ids), "prompt", 0), sampled(completion, turn=1)]], reward, text)


def filled_rollout(
    prompt_ids: Sequence[int], mask_id: int, completion: Completion, reward: Reward, text: str
) -> Rollout:
    """Build a masked policy's rollout: nothing is shifted, a masked position predicts its own token.

    After several passes, what each of them read stands one after the other; a token is learnt where it was filled in.
    """
    # Find what is filled in, and in which pass.
    masked = masked_positions(prompt_ids, mask_id)
    assert len(masked) == len(completion.token_ids), f"{len(masked)} masked, {len(completion.token_ids)} filled in"
    passes = completion.passes or (0,) * len(masked)
    ids: list[int] = []
    targets: list[int] = []
    logprobs: list[float] = []
    mask: list[bool] = []
    # Append what each pass read, what it was to predict, and which tokens it chose.
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


def masked_positions(prompt_ids: Sequence[int], mask_id: int) -> list[int]:
    """Return where a masked policy fills in."""
    return [position for position, token_id in enumerate(prompt_ids) if token_id == mask_id]


def finished_rollout(
    mask_id: int | None, prompt_ids: Sequence[int], completion: Completion, reward: Reward, text: str
) -> Rollout:
    """Build a rollout of one turn for the kind of policy that made it (`Policy.mask_id`)."""
    if mask_id is None:
        return causal_rollout(prompt_ids, completion, reward, text)
    return filled_rollout(prompt_ids, mask_id, completion, reward, text)
