"""The native engine on weights of its own, which change while completions are under way.

A change is a transaction between two turns of the engine: what is pushed is checked first, the weights are copied,
a probe proves them, and only then the version is theirs. Where the probe fails, the old weights are put back.
"""

import asyncio
from dataclasses import replace

from covey.engine.base import UpdateMode, WeightSet
from covey.engine.native.engine import NativeEngine
from covey.engine.native.runner import Runner
from covey.engine.native.scheduler import Scheduler
from covey.engine.weights import check_pushed, replace_weights, shapes_of, trained_tensors
from covey.policy.policy import Policy, inference

ALONE = 1
"""Padded tokens encoded in one pass: fewer than two prompts have, so each prompt is encoded alone. A prompt's numbers
then do not depend on which others came at the same time, and a replay has the same bits."""


class OwnWeightsEngine(NativeEngine):
    """Samples from a policy that nobody trains, on the weights that `update` gave it last."""

    def __init__(self, policy: Policy, cache_bytes: int | None, max_rows: int, kernels: str = "auto") -> None:
        super().__init__(policy, cache_bytes, max_rows, kernels)
        self._limits = replace(self._limits, max_prefill=ALONE)
        self._reset()
        super()._take_weights()

    async def update(self, weights: WeightSet, how: UpdateMode) -> None:
        """Take new weights, see `UpdatableEngine.update`. PushRefused leaves the old version as it was, whole."""
        check_pushed(weights, shapes_of(trained_tensors(self._trained)), self.version)
        if how == "wait":
            await self._drain()
        try:
            replace_weights(self._trained, weights, self._policy, self.refresh_weights)
        finally:
            self._admits = True
        self.version = weights.version
        # What waits begins on the new weights; what is under way continues on them, or begins again.
        for request in (*self._scheduler.requests, *self._turns.requests):
            request.version = weights.version
        self._forget_kept()
        self._turns.version = weights.version
        if how == "abort":
            self._start_again()
        else:
            self._continue()

    def refresh_weights(self) -> None:
        """Bring what decoding reads up to date, after the policy's weights were replaced."""
        super()._take_weights()

    def _take_weights(self) -> None:
        """Do nothing: weights change in `update` alone."""

    def _continue(self) -> None:
        """Let what is under way continue: cached keys of old weights are of no use to the new ones."""
        with inference(self._policy.model):
            self._runner.encode_again(self._scheduler)
        for row in self._scheduler.rows:
            row.continue_on(self.version)

    def _start_again(self) -> None:
        """Queue every row that is not finished once more, in the order in which the requests came."""
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
        """Return a runner with an empty cache, whose numbers a replay has again wherever kernels allow it."""
        runner = super()._new_runner()
        runner.repeats_bits = self.kernels == "compiled"
        return runner

    async def _drain(self) -> None:
        """Wait until no row is under way, while none may begin."""
        self._admits = False
        try:
            while self._scheduler.rows:
                await asyncio.sleep(0.001)
        except BaseException:
            self._admits = True
            raise
