"""One prompt becomes one Group: tokenize once, sample, score. What goes wrong in the system becomes data."""

import asyncio
import logging
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from transformers import PreTrainedTokenizerBase

from covey.engine.base import Engine
from covey.environments.base import Environment, adapt, ends_with_assistant
from covey.environments.reward_functions.call import problem_with
from covey.rollouts.turns import MAX_TURNS, Turn, messages_of, messages_so_far, reply_tokens, turn_seed
from covey.system.waits.watchdog import ScoringTimeout, Stages
from covey.types import Completion, Failure, Group, Message, Prompt, Reward, Rollout, RunStopped, Sampling, Span

LOGGER = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Sampler:
    """What it takes to roll a prompt out."""

    engine: Engine
    environment: Environment
    tokenizer: PreTrainedTokenizerBase
    stages: Stages = field(default_factory=Stages)
    """What the prompts under way wait for."""
    mask_id: int | None = None
    """Of a masked policy: the token it replaces (`Policy.mask_id`)."""
    max_turns: int = MAX_TURNS
    """Turns of the policy in one conversation; a masked policy has one."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "environment", adapt(self.environment))


async def roll_out(sampler: Sampler, prompt: Prompt, num_samples: int, sampling: Sampling) -> Group:
    """Sample `num_samples` completions of the prompt and have them scored.

    A completion that the system could not score becomes a Failure of the group: it is no rollout and no reward of 0.
    """
    prompt_ids = encode_prompt(sampler.tokenizer, prompt)
    try:
        with sampler.stages.sampling():
            completions = await sampler.engine.generate(prompt_ids, num_samples, sampling)
    except ValueError as error:
        raise ValueError(f"prompt {prompt.id}: {error}") from error
    # Let the environment reply, where it does, and score the last turn of each attempt.
    opened = [Turn((), completion, _decoded(sampler.tokenizer, completion.token_ids)) for completion in completions]
    attempts: list[tuple[Turn, ...]] = [(turn,) for turn in opened]
    if sampler.mask_id is None and sampler.environment.can_reply:
        conversations = (_converse(sampler, prompt, prompt_ids, turn, sampling, i) for i, turn in enumerate(opened))
        attempts = await asyncio.gather(*conversations)
    final = [turns[-1] for turns in attempts]
    verdicts = await _score(
        sampler, prompt, [turn.text for turn in final], [turn.completion.token_ids for turn in final]
    )
    # Sort what was scored from what was not.
    rollouts, failures = [], []
    for turns, verdict in zip(attempts, verdicts, strict=True):
        if isinstance(verdict, Failure):
            failures.append(verdict)
        elif not math.isfinite(sum(sum(turn.completion.logprobs) for turn in turns)):
            failures.append(Failure("the engine sampled with log-probs that are not finite"))  # the draw meant nothing
        else:
            rollouts.append(_rollout(sampler, prompt_ids, turns, verdict))
    for reason, count in Counter(failure.reason for failure in failures).items():
        LOGGER.info("prompt %s: %d of %d completions were not scored: %s", prompt.id, count, len(final), reason)
    return Group(prompt, tuple(rollouts), tuple(failures))


def encode_prompt(tokenizer: PreTrainedTokenizerBase, prompt: Prompt) -> list[int]:
    """Return the token ids of a prompt: plain text as it is, messages through the chat template.

    A conversation that ends with the assistant is gone on from; else the template opens the assistant's answer.
    """
    if isinstance(prompt.text, str):
        ids = tokenizer(prompt.text)["input_ids"]
    else:
        if tokenizer.chat_template is None:
            raise ValueError(f"prompt {prompt.id} holds messages, but the model's tokenizer has no chat template")
        messages = [dict(message) for message in prompt.text]
        goes_on = ends_with_assistant(prompt.text)
        ids = tokenizer.apply_chat_template(
            messages, add_generation_prompt=not goes_on, continue_final_message=goes_on, return_dict=False
        )
    if not ids:
        raise ValueError(f"prompt {prompt.id} is empty; a policy needs at least one token to continue")
    return list(ids)


def causal_rollout(
    prompt_ids: Sequence[int], completion: Completion, reward: Reward, text: str, later: Sequence[Turn] = ()
) -> Rollout:
    """Build a rollout with the causal shift, in this one place: position t reads token t and predicts token t + 1.

    `later` are the turns after the first: the environment's tokens in them are read, and not learnt.
    """
    # Lay prompt and turns end to end, with a mask of the tokens the policy chose.
    ids, mask, logprobs = [*prompt_ids], [False] * len(prompt_ids), [0.0] * len(prompt_ids)
    turns = (Turn((), completion), *later)
    for turn in turns:
        ids += turn.token_ids
        mask += [False] * len(turn.reply_ids) + [True] * len(turn.completion.token_ids)
        logprobs += [0.0] * len(turn.reply_ids) + [*turn.completion.logprobs]
    # Shift: the mask and the log-probs stand at the targets.
    return Rollout(
        input_ids=tuple(ids[:-1]),
        target_ids=tuple(ids[1:]),
        loss_mask=tuple(mask[1:]),
        sampler_logprobs=tuple(logprobs[1:]),
        reward=reward,
        text=text,
        finish_reason=turns[-1].completion.finish_reason,
        policy_version=min(turn.completion.policy_version for turn in turns),
        spans=_spans([turn.completion for turn in turns]),
    )


def _spans(completions: Sequence[Completion]) -> tuple[Span, ...]:
    """Return the version of each token of all turns together, empty where it is one for all."""
    if not any(completion.spans for completion in completions) and len({c.policy_version for c in completions}) == 1:
        return ()
    spans: list[Span] = []
    for completion in completions:
        before = spans[-1].end if spans else 0
        length = len(completion.token_ids)
        for span in completion.spans or (Span(completion.policy_version, 0, length),):
            spans.append(Span(span.version, before + span.start, before + span.end))
    return tuple(spans)


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


def _rollout(sampler: Sampler, prompt_ids: Sequence[int], turns: Sequence[Turn], reward: Reward) -> Rollout:
    """Build the rollout of an attempt. Its text is all that was said since the prompt."""
    first, *later = turns
    if not later:
        return finished_rollout(sampler.mask_id, prompt_ids, first.completion, reward, first.text)
    text = _decoded(sampler.tokenizer, [token for turn in turns for token in turn.token_ids])
    rollout = causal_rollout(prompt_ids, first.completion, reward, text, later)
    return replace(rollout, messages=messages_of(turns))


def _decoded(tokenizer: PreTrainedTokenizerBase, token_ids: Sequence[int]) -> str:
    return str(tokenizer.decode(list(token_ids), skip_special_tokens=True))


async def _converse(
    sampler: Sampler, prompt: Prompt, prompt_ids: Sequence[int], first: Turn, sampling: Sampling, sample_index: int
) -> tuple[Turn, ...]:
    """Continue an attempt turn by turn, until the environment has no reply or `max_turns` are sampled."""
    turns: tuple[Turn, ...] = (first,)
    while len(turns) < sampler.max_turns:
        seed = turn_seed(sampling.seed, sample_index, len(turns) + 1)
        following = await _next_turn(sampler, prompt, prompt_ids, turns, replace(sampling, seed=seed))
        if following is None:
            break
        turns = (*turns, following)
    return turns


async def _next_turn(
    sampler: Sampler, prompt: Prompt, prompt_ids: Sequence[int], turns: Sequence[Turn], sampling: Sampling
) -> Turn | None:
    """Sample one more turn. None where the environment has no reply, or where there is no room."""
    # Ask the environment
    reply = await _reply(sampler, prompt, turns)
    if reply is None:
        return None
    # Encode the reply after what was said
    said = reply_tokens(sampler.tokenizer, prompt, turns, reply)
    so_far = [*prompt_ids, *(token for turn in turns for token in turn.token_ids), *said]
    # Sample the next answer
    try:
        with sampler.stages.sampling():
            (completion,) = await sampler.engine.generate(so_far, 1, sampling)
    except ValueError as error:  # no room for it: the last answer stands
        LOGGER.warning("prompt %s has no turn %d: %s", prompt.id, len(turns) + 1, error)
        return None
    return Turn(said, completion, _decoded(sampler.tokenizer, completion.token_ids), reply)


async def _reply(sampler: Sampler, prompt: Prompt, turns: Sequence[Turn]) -> Message | None:
    """Return the environment's reply to a whole answer. None where it breaks, it then scores what there is."""
    if turns[-1].completion.finish_reason != "stop":
        return None
    try:
        async with sampler.stages.scoring(prompt.environment):
            return await sampler.environment.reply(prompt, messages_so_far(prompt, turns))
    except RunStopped:
        raise
    except Exception as error:  # the environment is foreign code
        LOGGER.warning("prompt %s: %s.reply: %s: %s", prompt.id, prompt.environment, type(error).__name__, error)
        return None


async def _score(
    sampler: Sampler, prompt: Prompt, texts: Sequence[str], token_ids: Sequence[Sequence[int]]
) -> list[Reward | Failure]:
    """Return the environment's verdicts, gated: one for each completion, every reward a finite number."""
    environment, stages = sampler.environment, sampler.stages
    # Turn what goes wrong in the system into data.
    try:
        async with stages.scoring(prompt.environment):
            verdicts = list(await environment.score_tokens(prompt, texts, token_ids))
    except RunStopped:
        raise
    except ScoringTimeout as error:
        return [Failure(str(error))] * len(texts)
    except Exception as error:  # the environment is foreign code: whatever it raises is the system's failure
        return [Failure(f"{prompt.environment}.score raised {type(error).__name__}: {error}")] * len(texts)
    # Gate the verdicts: one for each completion, all of them finite.
    if len(verdicts) != len(texts):
        reason = f"{prompt.environment}.score returned {len(verdicts)} verdicts for {len(texts)} completions"
        return [Failure(reason)] * len(texts)
    return [_checked(verdict, prompt.environment) for verdict in verdicts]


def _checked(verdict: object, environment: str) -> Reward | Failure:
    """Return the verdict with plain floats, or a Failure where it is none or holds what is not a finite number."""
    # The environment's own failure, or a reward of the right form
    if isinstance(verdict, Failure):
        return verdict
    if not isinstance(verdict, Reward):
        return Failure(f"{environment}.score returned a {type(verdict).__name__} where a Reward or Failure is due")
    if not isinstance(verdict.parts, Mapping):
        return Failure(f"{environment} gave a reward whose parts are no mapping but {verdict.parts!r:.80}")
    # Its numbers must be finite
    if problem_with(verdict.value):
        return Failure(f"{environment} gave the reward {verdict.value}")
    wrong = [name for name, part in verdict.parts.items() if problem_with(part)]
    if wrong:
        return Failure(f"{environment} gave the part {wrong[0]} of the reward {verdict.parts[wrong[0]]}")
    parts = {name: float(part) for name, part in verdict.parts.items()}
    return replace(verdict, value=float(verdict.value), parts=parts)
