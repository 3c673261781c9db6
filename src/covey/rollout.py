"""One prompt becomes one Group: tokenize once, sample, score; what goes wrong in the system becomes data."""

import logging
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from numbers import Real

from transformers import PreTrainedTokenizerBase

from covey.deadlines import NoVerdict, Stages
from covey.engine.base import Engine, Sampling
from covey.environments.base import Environment, ReadsTokens, RunStopped
from covey.types import Completion, Failure, Group, Prompt, Reward, Rollout

LOGGER = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Sampler:
    """What it takes to roll a prompt out."""

    engine: Engine
    environment: Environment
    tokenizer: PreTrainedTokenizerBase
    stages: Stages = field(default_factory=Stages)
    """What the prompts under way wait for."""


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
    texts = [str(sampler.tokenizer.decode(list(c.token_ids), skip_special_tokens=True)) for c in completions]
    verdicts = await _score(sampler, prompt, texts, [c.token_ids for c in completions])
    rollouts, failures = [], []
    for completion, text, verdict in zip(completions, texts, verdicts, strict=True):
        if isinstance(verdict, Failure):
            failures.append(verdict)
        elif not math.isfinite(sum(completion.logprobs)):  # the draw meant nothing, so its reward does not either
            failures.append(Failure("the engine sampled with log-probs that are not finite"))
        else:
            rollouts.append(causal_rollout(prompt_ids, completion, verdict, text))
    for reason, count in Counter(failure.reason for failure in failures).items():
        LOGGER.info("prompt %s: %d of %d completions were not scored: %s", prompt.id, count, len(texts), reason)
    return Group(prompt, tuple(rollouts), tuple(failures))


def encode_prompt(tokenizer: PreTrainedTokenizerBase, prompt: Prompt) -> list[int]:
    """Token ids of a prompt: plain text as it is, messages through the chat template."""
    if isinstance(prompt.text, str):
        ids = tokenizer(prompt.text)["input_ids"]
    else:
        if tokenizer.chat_template is None:
            raise ValueError(f"prompt {prompt.id} holds messages, but the model's tokenizer has no chat template")
        messages = [dict(message) for message in prompt.text]
        ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    if not ids:
        raise ValueError(f"prompt {prompt.id} is empty; a policy needs at least one token to continue")
    return list(ids)


def causal_rollout(prompt_ids: Sequence[int], completion: Completion, reward: Reward, text: str) -> Rollout:
    """The one place of the causal shift: position t reads token t and predicts token t + 1."""
    ids = (*prompt_ids, *completion.token_ids)
    context = len(prompt_ids) - 1
    return Rollout(
        input_ids=ids[:-1],
        target_ids=ids[1:],
        loss_mask=(False,) * context + (True,) * len(completion.token_ids),
        sampler_logprobs=(0.0,) * context + completion.logprobs,
        reward=reward,
        text=text,
        finish_reason=completion.finish_reason,
        policy_version=completion.policy_version,
    )


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
    if isinstance(verdict, Failure):
        return verdict
    if not isinstance(verdict, Reward):
        return Failure(f"{environment}.score returned a {type(verdict).__name__} where a Reward or Failure is due")
    if not isinstance(verdict.value, Real) or not math.isfinite(verdict.value):
        return Failure(f"{environment} gave the reward {verdict.value}")
    return verdict
