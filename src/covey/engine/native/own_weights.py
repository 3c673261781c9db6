"""The native engine on weights of its own, which change while completions are under way.

A change is a transaction between two turns of the engine: what is pushed is checked first, the weights are copied,
a probe proves them, and only then the version is theirs. Where the probe fails, the old weights are put back.
"""

import asyncio
from collections.abc import Mapping

import torch
from torch import Tensor

from covey.engine.base import PushRefused, UpdateMode, WeightSet
from covey.engine.native.decode_weights import refresh
from covey.engine.native.engine import NativeEngine
from covey.engine.native.scheduler import Limits, Scheduler
from covey.engine.weights import check_pushed, probe_gap, trained_tensors
from covey.policy.policy import Policy, inference

ALONE = 1
"""Padded tokens encoded in one pass: fewer than two prompts have, so each prompt is encoded alone. A prompt's numbers
then do not depend on which others came at the same time, and a replay has the same bits."""


class OwnWeightsEngine(NativeEngine):
    """Samples from a policy that nobody trains, on the weights that `update` gave it last."""

    def __init__(self, policy: Policy, cache_bytes: int, max_rows: int, kernels: str = "auto") -> None:
        super().__init__(policy, cache_bytes, max_rows, kernels)
        self._limits = Limits(self._limits.max_rows, self._limits.max_slots, max_prefill=ALONE)
        self._reset()
        super()._take_weights()

    async def update(self, weights: WeightSet, how: UpdateMode) -> None:
        """Take new weights, see `UpdatableEngine.update`. PushRefused leaves the old version as it was, whole."""
        own = trained_tensors(self._trained)
        check_pushed(weights, own)
        if how == "wait":
            await self._drain()
        try:
            self._replace(weights, own)
        finally:
            self._admits = True
        # What waits begins on the new weights; what is under way continues on them, or begins again.
        for request in self._scheduler.requests:
            request.version = weights.version
        if how == "abort":
            self._start_again()
        else:
            self._continue()

    def _take_weights(self) -> None:
        """Do nothing: weights change in `update` alone."""

    def _replace(self, weights: WeightSet, own: Mapping[str, Tensor]) -> None:
        """Copy the weights and prove them. PushRefused, with the old ones in place, where the probe says otherwise."""
        old = {name: tensor.detach().clone() for name, tensor in own.items()}
        self._copy(weights.tensors, own)
        gap = probe_gap(self._policy, weights.probe)
        if not gap <= weights.probe.tolerance:  # NaN is refused too
            self._copy(old, own)
            raise PushRefused(
                f"version {weights.version} gives the probe other log-probs than the trainer, {gap:.2g} nats apart "
                f"where {weights.probe.tolerance:.2g} is rounding; sampling stays on version {self.version}"
            )
        self.version = weights.version

    @torch.no_grad()
    def _copy(self, tensors: Mapping[str, Tensor], own: Mapping[str, Tensor]) -> None:
        for name, tensor in own.items():
            tensor.copy_(tensors[name])
        if self._policy is not self._trained:
            refresh(self._policy, self._trained)

    def _continue(self) -> None:
        """Let what is under way continue: cached keys of old weights are of no use to the new ones."""
        with inference(self._policy.model):
            self._runner.encode_again(self._scheduler)
        for row in self._scheduler.rows:
            row.continue_on(self.version)

    def _start_again(self) -> None:
        """Queue every row that is not finished once more, in the order in which the requests came."""
        old = self._scheduler.requests
        self._scheduler = Scheduler(self._limits)
        self._runner = self._new_runner()
        for request in old:
            request.start_again()
            self._scheduler.submit(request)

    async def _drain(self) -> None:
        """Wait until no row is under way, while none may begin."""
        self._admits = False
        try:
            while self._scheduler.rows:
                await asyncio.sleep(0.001)
        except BaseException:
            self._admits = True
            raise
