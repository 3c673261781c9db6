"""Sample any causal model of transformers, by its own forward.

One prompt is read once for its group, its cache forked, and rows of equal length are decoded in lockstep by the model's
own forward pass. Requests, sessions, stops and draws are the native engine's.
"""

from covey.engine.lockstep.reader import Reader
from covey.engine.lockstep.runner import LockstepRunner
from covey.engine.native.decode_weights import build_decode_policy, is_wanted
from covey.engine.native.engine import NativeEngine
from covey.engine.native.own_weights import OwnWeightsEngine
from covey.engine.native.replaying import ReplayingEngine
from covey.engine.native.runner import Runner
from covey.engine.native.scheduler import Capacity
from covey.policy.policy import Policy


class LockstepEngine(NativeEngine):
    """Samples through transformers' own forward pass and cache."""

    def _prepare(self, policy: Policy, kernels: str) -> None:
        self._policy = build_decode_policy(policy) if is_wanted(policy) else policy
        self._reader = Reader(self._policy)
        self._shape, self.kernels, self._is_graph = self._reader.shape, "torch", False

    def _capacity(self, max_rows: int, max_slots: int) -> Capacity:
        states = self._reader.shape.state_slots
        return Capacity(max_rows, max_slots, rows_hold_prompts=True, state_slots=states)

    def _new_runner(self) -> Runner:
        return LockstepRunner(self._reader, self._limits.max_slots)


class OwnWeightsLockstepEngine(OwnWeightsEngine, LockstepEngine):
    """The same on weights of its own, set by `update`."""

    def __init__(self, policy: Policy, cache_bytes: int | None, max_rows: int, kernels: str = "auto") -> None:
        super().__init__(policy, cache_bytes, max_rows, kernels)
        # Rows decode together, so that prompts which enter one by one would not repeat their bits either
        self._limits = self._capacity(max_rows, self._limits.max_slots)
        self._reset()


class ReplayingLockstepEngine(ReplayingEngine, LockstepEngine):
    """The same replaying a recorded run, up to rounding."""
