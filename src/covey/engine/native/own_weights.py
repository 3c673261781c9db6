"""The native engine on its own weights, which change during completions.

A change is a transaction between two turns: the push is checked, weights are copied, a probe proves them, and only then
the version changes. If the probe fails, the old weights are restored.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from covey.engine.base import UpdateMode, WeightSet
from covey.engine.native.cache import CacheBlock, CacheShape
from covey.engine.native.compiled import CompiledPrefillLayout
from covey.engine.native.decode_weights import is_fused
from covey.engine.native.engine import NativeEngine
from covey.engine.native.runner import Runner, encode
from covey.engine.native.scheduler import Scheduler
from covey.engine.weights import EIGHT_BITS, check_pushed, replace_weights, shapes_of, trained_tensors
from covey.policy.policy import Policy, inference

ALONE = 1
"""Padded tokens per prefill pass: fewer than two prompts have, so each is encoded alone and a replay has the same bits.
"""
TRIED_LENGTHS = (3, 1, 40, 2, 17, 3, 70)
"""Tokens of the prompts that are encoded together and alone, to see whether prompts may share a pass."""


class OwnWeightsEngine(NativeEngine):
    """Samples from its own copy of the policy, set by `update`."""

    def _set_up(self) -> None:
        super()._take_weights()
        is_shared = is_fused(self._policy) and encodes_alike(self._policy, self._shape)
        max_prefill = self._limits.max_prefill if is_shared else ALONE
        self._limits = replace(self._limits, max_prefill=max_prefill, max_resume=ALONE)
        self._is_settled = asyncio.Event()
        """Not set while weights are in place that the probe has not proved."""
        self._is_settled.set()
        self._reset()

    async def update(self, weights: WeightSet, how: UpdateMode) -> None:
        """Take new weights (`UpdatableEngine.update`). PushRefused leaves the old version whole."""
        check_pushed(weights, shapes_of(trained_tensors(self._trained)), self.version)
        try:
            if how == "wait":
                await self._drain()
            self._is_settled.clear()
            given = in_eight_bits(weights) if self._is_rounded else weights
            await replace_weights(self._trained, given, self._policy, self.refresh_weights)
        finally:
            self._admits = True
            self._is_settled.set()
        self.version = weights.version
        # Waiting rows begin on the new weights; running ones continue on them, or begin again.
        for request in (*self._scheduler.requests, *self._turns.requests):
            request.version = weights.version
        self._forget_kept()
        self._turns.version = weights.version
        if how == "abort":
            self._start_again()
        else:
            self._continue()

    def refresh_weights(self) -> None:
        """Refresh the decode weights after a change."""
        super()._take_weights()

    async def _await_weights(self) -> None:
        await self._is_settled.wait()

    def _take_weights(self) -> None:
        """Do nothing: weights change in `update` alone."""

    def _release_weights(self) -> None:
        """Do nothing: no other weights are here to pack again."""

    def _continue(self) -> None:
        """Continue running rows: their prefixes are encoded again."""
        with inference(self._policy.model):
            self._runner.encode_again(self._scheduler)
        for row in self._scheduler.rows:
            row.continue_on(self.version)

    def _start_again(self) -> None:
        """Restart every unfinished row, in the order of requests."""
        old = self._scheduler
        later_turns = [row for row in old.rows if row.past and not row.left]
        requests = old.requests
        self._scheduler = Scheduler(self._limits)
        self._runner = self._new_runner()
        for request in requests:
            request.start_again()
            if request.to_start:
                self._scheduler.submit(request)
        for row in (*later_turns, *old.resuming):
            self._scheduler.resume(row)

    def _new_runner(self) -> Runner:
        """Return an empty runner with repeatable results, if possible."""
        runner = super()._new_runner()
        runner.repeats_bits = self.kernels == "compiled"
        return runner

    async def _drain(self) -> None:
        """Wait for running rows while none may begin."""
        self._admits = False
        while self._scheduler.rows:
            await asyncio.sleep(0.001)


def in_eight_bits(weights: WeightSet) -> WeightSet:
    """Return weights whose probe allows for rounding to eight bits."""
    probe = weights.probe
    return replace(weights, probe=replace(probe, tolerance=max(probe.tolerance, EIGHT_BITS)))


def encodes_alike(policy: Policy, shape: CacheShape) -> bool:
    """Return True if prompts in one pass keep their bits.

    `policy` is a decode policy, computed in C.
    """
    size, longest = len(policy.tokenizer), policy.max_length - 1
    lengths = [min(length, longest) for length in TRIED_LENGTHS]
    prompts = [[(7919 * place + 11 * length) % size for place in range(length)] for length in lengths]
    with inference(policy.model):
        together = _encode_prompts(policy, shape, prompts)
        alone = [_encode_prompts(policy, shape, [prompt])[0] for prompt in prompts]
    return all(
        torch.equal(mine, own)
        for of_many, of_one in zip(together, alone, strict=True)
        for mine, own in zip(of_many, of_one, strict=True)
    )


def _encode_prompts(policy: Policy, shape: CacheShape, prompts: Sequence[Sequence[int]]) -> list[list[Tensor]]:
    """Return the logits, keys, values and states of prompts."""
    block = CacheBlock(shape)
    block.resize(len(prompts), max(map(len, prompts)))
    logits_NV = encode(policy, CompiledPrefillLayout, block, 0, prompts)
    cached = [*block.keys, *block.values]
    return [
        [
            logits_NV[index],
            *(tensor[index, :, : len(prompt)] for tensor in cached),
            *(held[index] for held in block.held),
        ]
        for index, prompt in enumerate(prompts)
    ]
