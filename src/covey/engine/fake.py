"""A scripted engine: tests and dry runs without a model."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from covey.engine.base import EngineStats, UpdateMode, WeightSet
from covey.policy.sampling import random_uniform, row_key
from covey.types import Completion, Sampling

Script = Callable[[tuple[int, ...], int], Sequence[int]]
"""(prompt_ids, sample_index) -> token ids of the completion."""


@dataclass
class FakeEngine:
    """Answers from a script with log-probs of -log(vocab_size), and records its calls.

    >>> engine = FakeEngine(lambda prompt_ids, sample_index: (sample_index, 2), vocab_size=64)
    >>> asyncio.run(engine.generate((5, 6), 2, Sampling()))[1].token_ids
    (1, 2)
    """

    script: Script
    vocab_size: int
    version: int = 0
    calls: list[tuple[tuple[int, ...], int, Sampling]] = field(default_factory=list)
    """Arguments of generate(), in order."""

    async def generate(self, prompt_ids: Sequence[int], n: int, sampling: Sampling) -> list[Completion]:
        """Return the script's tokens, cut to max_tokens (finish_reason "length"), else "stop"."""
        if n < 1:
            raise ValueError(f"n must be >= 1, got {n}")
        prompt = tuple(prompt_ids)
        self.calls.append((prompt, n, sampling))
        fitting, first = sampling.within(len(prompt)), sampling.first_sample
        return [self._completion(tuple(self.script(prompt, index)), fitting) for index in range(first, first + n)]

    def load_weights(self, version: int) -> None:
        self.version = version

    async def update(self, weights: WeightSet, how: UpdateMode) -> None:
        self.load_weights(weights.version)

    def take_stats(self) -> EngineStats:
        """Return zeros: sampling from a script is not counted."""
        return EngineStats()

    def _completion(self, script: tuple[int, ...], sampling: Sampling) -> Completion:
        token_ids = script[: sampling.max_tokens]
        logprobs = (-math.log(self.vocab_size),) * len(token_ids)
        return Completion(token_ids, logprobs, "length" if len(token_ids) < len(script) else "stop", self.version)


def random_script(vocab_size: int, length: int, seed: int = 0) -> Script:
    """Return a script of uniform tokens, by seed, prompt and sample."""

    def script(prompt_ids: tuple[int, ...], sample_index: int) -> list[int]:
        key = row_key(seed, sample_index)
        for token_id in prompt_ids:
            key = row_key(key, token_id)
        uniform_T = random_uniform(torch.full((length,), key), torch.arange(length))
        return [int(token_id) for token_id in (uniform_T * vocab_size).tolist()]

    return script
