"""The context and result of a preflight check."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from heapq import nlargest
from itertools import accumulate

import torch

from covey.config.schema import Config
from covey.environments.base import Environment, Split, text_of
from covey.policy import sharding
from covey.policy.plain import plain_model
from covey.rollouts.encoding import encode_prompt
from covey.run.build import Run
from covey.run.memory.room import available_bytes
from covey.system import collectives
from covey.types import Failure, Group, Prompt, Reward

NUM_SAMPLES = 2
"""Completions of each prompt: enough for a group to share its prompt."""
SAMPLING_SECONDS, MIN_PROMPTS = 2.0, 2
"""Seconds of forward passes over completions and prompts, and the least number of prompts sampled from."""
TIMED_TOKENS = 32
"""Tokens of the sequence that a forward pass is timed on."""


@dataclass(frozen=True, slots=True)
class Check:
    """The result of a check: a row of preflight.json.

    >>> Check(True, "relative error 2.1e-07 ...", "1e-05", values={"relative_error": 2.1e-07}, name="gradient")
    """

    passed: bool
    figure: str
    """Measured value, in words."""
    tolerance: str
    """Bound on it, in words; "" where there is nothing to compare."""
    remedy: str = ""
    """Remedy, naming settings; "" where it passed."""
    values: Mapping[str, float] = field(default_factory=dict)
    """The numbers behind the figure."""
    applies: bool = True
    """Whether there was anything to measure; a check that does not apply stops no run."""
    name: str = ""
    seconds: float = 0.0
    """Seconds that it took."""


class Unscored(Environment):
    """An environment that judges nothing, for unjudged completions."""

    def prompts(self, split: Split) -> list[Prompt]:
        return []

    async def score(self, prompt: Prompt, completions: Sequence[str]) -> list[Reward | Failure]:
        return [Reward(0.0, {}) for _ in completions]


@dataclass(frozen=True)
class PreflightContext:
    """The checked run, before its first step."""

    run: Run
    config: Config
    available: Callable[[torch.device], int] = available_bytes
    """Bytes that can still be taken on a device."""
    clock: Callable[[], float] = time.perf_counter
    """Seconds, from any moment on."""

    @cached_property
    def prompts(self) -> list[Prompt]:
        """Return the run's first training prompts, without moving its stream."""
        stream = self.run.local.stream
        before = stream.state_dict()
        drawn = stream.draw(min(self.config.preflight.num_prompts, len(stream.prompts)))
        stream.load_state_dict(before)
        return list({prompt.id: prompt for prompt, _ in drawn}.values())

    @property
    def all_prompts(self) -> list[Prompt]:
        """Return all prompts of training and evaluation."""
        return [*self.run.local.stream.prompts, *self.run.test_prompts]

    @cached_property
    def longest(self) -> tuple[Prompt, list[int]]:
        """Return the longest prompt with its tokens, among the longest texts."""
        large = nlargest(self.config.preflight.num_prompts, self.all_prompts, key=_num_characters)
        chosen = [*self.prompts, *large]
        encoded = [(prompt, encode_prompt(self.run.policy.tokenizer, prompt)) for prompt in chosen]
        return max(encoded, key=lambda found: len(found[1]))

    @cached_property
    def token_seconds(self) -> float:
        """Return transformers' seconds per token on the slowest rank, warmed up."""
        num_tokens = min(TIMED_TOKENS, self.run.policy.max_length)
        token_ids = (self.longest[1] * num_tokens)[:num_tokens]
        with torch.no_grad(), sharding.gather_weights(self.run.policy):
            plain = plain_model(self.run.policy)
            for _ in range(2):
                started = self.clock()
                float(plain.logits(token_ids, range(num_tokens)).sum())  # waits for the device
                seconds = self.clock() - started
        return collectives.all_max_int(max(1, round(1e9 * seconds / num_tokens))) / 1e9

    @cached_property
    def groups(self) -> list[Group]:
        """Sample some completions of each prompt, cut at preflight.max_tokens."""
        source = self.run.local
        looking = replace(source, sampler=replace(source.sampler, environment=Unscored()))
        max_tokens = source.sampling.max_tokens
        if self.run.policy.mask_id is None:  # a fill is as long as its gaps
            max_tokens = min(max_tokens, self.config.preflight.max_tokens)
        num_samples = min(NUM_SAMPLES, self.config.group_size)
        prompts = self._affordable(num_samples * max_tokens)
        with sharding.gather_weights(self.run.policy):  # ranks sample on their own
            return looking.run(prompts, num_samples, replace(source.sampling, max_tokens=max_tokens))

    def _affordable(self, num_sampled: int) -> list[Prompt]:
        """Return affordable prompts, at least one of every environment."""
        firsts = {prompt.environment: prompt for prompt in reversed(self.prompts)}
        ordered = sorted(self.prompts, key=lambda prompt: firsts[prompt.environment] is not prompt)
        needed = accumulate(len(encode_prompt(self.run.policy.tokenizer, prompt)) + num_sampled for prompt in ordered)
        fits = sum(num_tokens * self.token_seconds <= SAMPLING_SECONDS for num_tokens in needed)
        chosen = {prompt.id for prompt in ordered[: max(MIN_PROMPTS, len(firsts), fits)]}
        return [prompt for prompt in self.prompts if prompt.id in chosen]


def _num_characters(prompt: Prompt) -> int:
    return len(prompt.text) if isinstance(prompt.text, str) else sum(len(text_of(m)) for m in prompt.text)
