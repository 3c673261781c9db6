"""The native engine run through a past: each token on the version that sampled it.

Nothing of a row depends on the rows beside it: prompts are encoded alone, and so is a prefix whose weights changed. So
a row that is sampled alone, with the same changes after the same tokens, has the same bits.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor

from covey.engine.native.own_weights import OwnWeightsEngine
from covey.engine.weights import trained_tensors
from covey.policy.policy import Policy, inference
from covey.types import Completion, Sampling, Span


class Past(Protocol):
    """What is known of the completions to come."""

    def spans(self, seed: int, sample_index: int) -> Sequence[Span]:
        """Return the versions of the tokens of a completion, by the seed of its call."""
        ...

    def add(self, seed: int, sample_index: int, num_tokens: int) -> None:
        """Note how long the completion came out."""
        ...


class ReplayingEngine(OwnWeightsEngine):
    """Samples what another engine sampled before, on the versions it had then."""

    past: Past
    """Of the group that is sampled now."""

    def __init__(self, policy: Policy, cache_bytes: int | None, max_rows: int, kernels: str = "auto") -> None:
        super().__init__(policy, cache_bytes, max_rows, kernels)
        self._kept: dict[int, Mapping[str, Tensor]] = {}

    def remember(self, trained: Policy, version: int) -> None:
        """Keep the trained policy's weights as they are now, as a version."""
        self._kept[version] = {name: tensor.detach().clone() for name, tensor in trained_tensors(trained).items()}

    def forget_before(self, version: float) -> None:
        """Let go of versions that no token to come was sampled on."""
        self._kept = {kept: weights for kept, weights in self._kept.items() if kept >= version}

    async def generate(self, prompt_ids: Sequence[int], n: int, sampling: Sampling) -> list[Completion]:
        """Return the completions of a call of the past: those of one version together, the others one by one."""
        spans_of = [tuple(self.past.spans(sampling.seed, index)) for index in range(n)]
        whole: dict[int, list[int]] = {}
        found: dict[int, Completion] = {}
        # Completions of one version are sampled together, others alone
        for index, spans in enumerate(spans_of):
            if len(spans) == 1:
                whole.setdefault(spans[0].version, []).append(index)
            else:
                found |= self._sample(prompt_ids, n, sampling, [index], spans)
        for indices in whole.values():
            found |= self._sample(prompt_ids, n, sampling, indices, spans_of[indices[0]])
        # Remember what was sampled, for the next turn
        for index in range(n):
            self.past.add(sampling.seed, index, len(found[index].token_ids))
        return [found[index] for index in range(n)]

    def _sample(
        self, prompt_ids: Sequence[int], n: int, sampling: Sampling, indices: Sequence[int], spans: Sequence[Span]
    ) -> dict[int, Completion]:
        """Sample some completions of a call, changing the weights where the spans say so."""
        self._load(spans[0].version)
        request = self._request(prompt_ids, n, sampling)
        request.to_start = deque(indices)
        self._scheduler.submit(request)
        # Change the weights where the run had changed them
        later = deque(spans[1:])
        with inference(self._policy.model):
            while self._scheduler.has_work:
                if later and self._scheduler.rows and len(self._scheduler.rows[0].token_ids) == later[0].start:
                    self._load(later.popleft().version)
                    self._continue()
                self._step(most=1)
        self._runner.drop()
        return dict(request.completions)

    @torch.no_grad()
    def _load(self, version: int) -> None:
        if version == self.version:
            return
        for name, tensor in trained_tensors(self._trained).items():
            tensor.copy_(self._kept[version][name])
        self.refresh_weights()
        self.version = version
