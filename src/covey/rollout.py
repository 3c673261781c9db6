"""One prompt becomes one Group: tokenize once, sample, score; what goes wrong in the system becomes data."""

import asyncio
import logging
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from transformers import PreTrainedTokenizerBase

from covey.deadlines import NoVerdict, Stages
from covey.engine.base import Engine, Sampling
from covey.environments.base import Environment, ReadsTokens, Replies, RunStopped, ends_with_assistant
from covey.environments.reward_call import problem_with
from covey.turns import Turn, messages_so_far, reply_tokens, turn_seed
from covey.types import Completion, Failure, Group, Message, Prompt, Reward, Rollout

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
    attempts: list[tuple[Turn, ...]] = [(Turn((), completion),) for completion in completions]
    if sampler.mask_id is None and isinstance(sampler.environment, Replies):
        attempts = await _second_turns(sampler, prompt, prompt_ids, attempts, sampling)
    final = [turns[-1].completion for turns in attempts]
    texts = [_decoded(sampler.tokenizer, completion.token_ids) for completion in final]
    verdicts = await _score(sampler, prompt, texts, [completion.token_ids for completion in final])
    rollouts, failures = [], []
    for turns, text, verdict in zip(attempts, texts, verdicts, strict=True):
        if isinstance(verdict, Failure):
            failures.append(verdict)
        elif not math.isfinite(sum(sum(turn.completion.logprobs) for turn in turns)):
            failures.append(Failure("the engine sampled with log-probs that are not finite"))  # the draw meant nothing
        else:
            rollouts.append(_rollout(sampler, prompt_ids, turns, verdict, text))
    for reason, count in Counter(failure.reason for failure in failures).items():
        LOGGER.info("prompt %s: %d of %d completions were not scored: %s", prompt.id, count, len(texts), reason)
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
    """The one place of the causal shift: position t reads token t and predicts token t + 1.

    `later` are the turns after the first: the environment's tokens in them are read, and not learnt.
    """
    ids, mask, logprobs = [*prompt_ids], [False] * len(prompt_ids), [0.0] * len(prompt_ids)
    turns = (Turn((), completion), *later)
    for turn in turns:
        ids += [*turn.reply_ids, *turn.completion.token_ids]
        mask += [False] * len(turn.reply_ids) + [True] * len(turn.completion.token_ids)
        logprobs += [0.0] * len(turn.reply_ids) + [*turn.completion.logprobs]
    return Rollout(
        input_ids=tuple(ids[:-1]),
        target_ids=tuple(ids[1:]),
        loss_mask=tuple(mask[1:]),
        sampler_logprobs=tuple(logprobs[1:]),
        reward=reward,
        text=text,
        finish_reason=turns[-1].completion.finish_reason,
        policy_version=min(turn.completion.policy_version for turn in turns),
    )


def filled_rollout(
    prompt_ids: Sequence[int], mask_id: int, completion: Completion, reward: Reward, text: str
) -> Rollout:
    """A masked policy's rollout: nothing is shifted, a masked position predicts its own token.

    After several passes, what each of them read stands one after the other; a token is learnt where it was filled in.
    """
    masked = masked_positions(prompt_ids, mask_id)
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


def masked_positions(prompt_ids: Sequence[int], mask_id: int) -> list[int]:
    """Where a masked policy fills in."""
    return [position for position, token_id in enumerate(prompt_ids) if token_id == mask_id]


def finished_rollout(
    mask_id: int | None, prompt_ids: Sequence[int], completion: Completion, reward: Reward, text: str
) -> Rollout:
    """A completion of one turn as a rollout of the kind of policy that made it (`Policy.mask_id`)."""
    if mask_id is None:
        return causal_rollout(prompt_ids, completion, reward, text)
    return filled_rollout(prompt_ids, mask_id, completion, reward, text)


def _rollout(sampler: Sampler, prompt_ids: Sequence[int], turns: Sequence[Turn], reward: Reward, text: str) -> Rollout:
    """Its text is what was judged; after several turns, everything since the prompt."""
    if len(turns) == 1:
        return finished_rollout(sampler.mask_id, prompt_ids, turns[0].completion, reward, text)
    ids = [token for turn in turns for token in (*turn.reply_ids, *turn.completion.token_ids)]
    rollout = causal_rollout(prompt_ids, turns[0].completion, reward, _decoded(sampler.tokenizer, ids), turns[1:])
    said = [_decoded(sampler.tokenizer, turn.completion.token_ids) for turn in turns]
    messages = [
        message
        for turn, text in zip(turns, said, strict=True)
        for message in (turn.reply, {"role": "assistant", "content": text})
        if message is not None
    ]
    return replace(rollout, messages=tuple(messages))


def _decoded(tokenizer: PreTrainedTokenizerBase, token_ids: Sequence[int]) -> str:
    return str(tokenizer.decode(list(token_ids), skip_special_tokens=True))


async def _second_turns(
    sampler: Sampler,
    prompt: Prompt,
    prompt_ids: Sequence[int],
    attempts: Sequence[tuple[Turn, ...]],
    sampling: Sampling,
) -> list[tuple[Turn, ...]]:
    """The attempts, each with one more turn where the environment has something to say to it."""
    seeds = [turn_seed(sampling.seed, index) for index in range(len(attempts))]
    return list(
        await asyncio.gather(
            *(
                _second_turn(sampler, prompt, prompt_ids, turns[0], replace(sampling, seed=seed))
                for turns, seed in zip(attempts, seeds, strict=True)
            )
        )
    )


async def _second_turn(
    sampler: Sampler, prompt: Prompt, prompt_ids: Sequence[int], first: Turn, sampling: Sampling
) -> tuple[Turn, ...]:
    reply = await _reply(sampler, prompt, first.completion)
    if reply is None:
        return (first,)
    said = reply_tokens(sampler.tokenizer, prompt, first.completion.token_ids, reply)
    try:
        with sampler.stages.sampling():
            (second,) = await sampler.engine.generate([*prompt_ids, *first.completion.token_ids, *said], 1, sampling)
    except ValueError as error:  # no room for it: the first answer stands
        LOGGER.warning("prompt %s has no second turn: %s", prompt.id, error)
        return (first,)
    return first, Turn(said, second, reply)


async def _reply(sampler: Sampler, prompt: Prompt, completion: Completion) -> Message | None:
    """What the environment says to a whole completion. Where it breaks, it will be asked to score what there is."""
    environment = sampler.environment
    if completion.finish_reason != "stop" or not isinstance(environment, Replies):
        return None
    messages = messages_so_far(prompt, _decoded(sampler.tokenizer, completion.token_ids))
    try:
        async with sampler.stages.scoring(prompt.environment):
            return await environment.reply(prompt, messages)
    except RunStopped:
        raise
    except Exception as error:  # the environment is foreign code
        LOGGER.warning("prompt %s: %s.reply: %s: %s", prompt.id, prompt.environment, type(error).__name__, error)
        return None


async def _score(
    sampler: Sampler, prompt: Prompt, texts: Sequence[str], token_ids: Sequence[Sequence[int]]
) -> list[Reward | Failure]:
    """The environment's verdicts, gated: one for each completion, every reward a finite number."""
    environment, stages = sampler.environment, sampler.stages
    try:
        async with stages.scoring(prompt.environment):
            if isinstance(environment, ReadsTokens):
                verdicts = list(await environment.score_tokens(prompt, texts, token_ids))
            else:
                verdicts = list(await environment.score(prompt, texts))
    except RunStopped:
        raise
    except NoVerdict as error:
        return [Failure(str(error))] * len(texts)
    except Exception as error:  # the environment is foreign code: whatever it raises is the system's failure
        return [Failure(f"{prompt.environment}.score raised {type(error).__name__}: {error}")] * len(texts)
    if len(verdicts) != len(texts):
        reason = f"{prompt.environment}.score returned {len(verdicts)} verdicts for {len(texts)} completions"
        return [Failure(reason)] * len(texts)
    return [_checked(verdict, prompt.environment) for verdict in verdicts]


def _checked(verdict: object, environment: str) -> Reward | Failure:
    """Return the verdict with plain floats, or a Failure where it is none or holds what is not a finite number."""
    if isinstance(verdict, Failure):
        return verdict
    if not isinstance(verdict, Reward):
        return Failure(f"{environment}.score returned a {type(verdict).__name__} where a Reward or Failure is due")
    if not isinstance(verdict.parts, Mapping):
        return Failure(f"{environment} gave a reward whose parts are no mapping but {verdict.parts!r:.80}")
    if problem_with(verdict.value):
        return Failure(f"{environment} gave the reward {verdict.value}")
    wrong = [name for name, part in verdict.parts.items() if problem_with(part)]
    if wrong:
        return Failure(f"{environment} gave the part {wrong[0]} of the reward {verdict.parts[wrong[0]]}")
    parts = {name: float(part) for name, part in verdict.parts.items()}
    return replace(verdict, value=float(verdict.value), parts=parts)
