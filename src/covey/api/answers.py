"""A policy after its run: its answers, and their evaluation."""

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields, replace
from typing import Any

from covey.config.schema import Config
from covey.engine.base import Closable
from covey.engine.build import sampling_engine
from covey.environments.base import Environment, close_environment, is_message
from covey.policy.attention.base import ATTENTION
from covey.policy.policy import Policy, inference
from covey.rollouts.encoding import encode_prompt
from covey.run.build import build_source, held_out_prompts, make_sampler, training_sampling
from covey.run.build_stream import warn_of_text
from covey.run.evaluate import Evaluation, evaluate
from covey.run.given import RunObjects
from covey.system.lookup import near
from covey.system.waits.signals import outside_of_loops
from covey.system.waits.watchdog import PromptWaits
from covey.types import Completion, Message, Prompt, Sampling

Question = str | Sequence[Message]
"""Text, or the messages of a conversation."""


def attention_of(given: RunObjects) -> str | None:
    """Return the model's attention after a run, None for its class's own."""
    return None if given.model is None else str(given.model.config._attn_implementation)  # type: ignore[union-attr]


@contextmanager
def covey_attention(policy: Policy) -> Iterator[None]:
    """Use covey's attention inside, and the model's own afterwards."""
    before = policy.causal_lm.config._attn_implementation
    set_attention(policy, ATTENTION)
    try:
        yield
    finally:
        set_attention(policy, before)


def set_attention(policy: Policy, name: str | None) -> None:
    """Set a model's attention; on the general path it keeps its own."""
    if policy.path == "fast":
        model = policy.causal_lm  # of some classes the own is eager, and sdpa refused
        model.set_attn_implementation(name or model.get_correct_attn_implementation(None))


def is_conversation(given: object) -> bool:
    """Return True for messages, at least one."""
    return isinstance(given, Sequence) and bool(given) and all(map(is_message, given))


def change_sampling(sampling: Sampling, given: Mapping[str, Any]) -> Sampling:
    """Return sampling with the given fields. ValueError for unknown ones."""
    known = [field.name for field in fields(Sampling)]
    for name in given:
        if name not in known:
            raise ValueError(f"unknown setting of sampling {name}{near(name, known)}")
    return replace(sampling, **given)


def sample(
    policy: Policy, config: Config, questions: Sequence[Question], n: int, sampling: Sampling
) -> list[list[str]]:
    """Return n completions of each question, decoded without special tokens.

    Text goes to the model as it is, messages through its chat template. ValueError for anything else.
    """
    unusable = [given for given in questions if not (isinstance(given, str) or is_conversation(given))]
    if isinstance(questions, str | Mapping) or unusable:
        first = unusable[0] if unusable else questions
        raise ValueError(f"prompts must be a list of texts or conversations, got {first!r:.80}")
    if any(isinstance(question, str) for question in questions):
        warn_of_text(config.model.name, policy.tokenizer.chat_template)
    prompts = [
        Prompt(f"sample-{index}", "sample", question if isinstance(question, str) else tuple(question), {})
        for index, question in enumerate(questions)
    ]
    ids = [encode_prompt(policy.tokenizer, prompt) for prompt in prompts]

    def decoded(completion: Completion) -> str:
        return str(policy.tokenizer.decode(list(completion.token_ids), skip_special_tokens=True))

    async def answer_all() -> list[list[str]]:
        answered = await asyncio.gather(*(engine.generate(one, n, sampling) for one in ids))
        return [[decoded(completion) for completion in completions] for completions in answered]

    with covey_attention(policy), inference(policy.model):
        engine = sampling_engine(policy, config.engine, config.model.kernels)
        try:
            return outside_of_loops(lambda: asyncio.run(answer_all()))
        finally:
            if isinstance(engine, Closable):
                engine.close()


def measure(policy: Policy, config: Config, environment: Environment) -> Evaluation:
    """Measure the policy on an environment's held-out prompts, and close it."""
    with covey_attention(policy):
        engine = sampling_engine(policy, config.engine, config.model.kernels)
        waits = PromptWaits(scoring_seconds=config.timeouts.scoring)
        sampler = make_sampler(config, engine, environment, policy, waits)
        prompts = held_out_prompts(config, sampler, policy.max_length)
        source = build_source(config, sampler, prompts)
        try:
            return evaluate(source, prompts, training_sampling(config), config.evaluation)
        finally:
            source.close()
            close_environment(environment)
            if isinstance(engine, Closable):
                engine.close()
