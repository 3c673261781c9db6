"""The native engine's tests of calls, sessions and pushed weights, on the lockstep engine."""

from types import ModuleType

import pytest

from covey.engine.lockstep.engine import LockstepEngine, OwnWeightsLockstepEngine

from ..native import test_engine, test_own_weights, test_session_versions, test_sessions

pytestmark = pytest.mark.long
LEFT_OUT = {
    test_engine: ("plain_forward", "cache_budget", "can_never_fit", "cache_nothing"),
    test_sessions: ("whole_history", "compiled", "without_room", "without_sessions"),
    test_own_weights: ("same_bits", "share_a_pass", "companions", "digest", "without_a_copy", "refused", "finite"),
    test_session_versions: ("same_bits",),
}
"""What is of the native cache alone, is tested of other architectures beside this, or needs no engine."""


def taken(module: ModuleType, left_out: tuple[str, ...]) -> dict[str, object]:
    named = {name: test for name, test in vars(module).items() if name.startswith("test_") and callable(test)}
    for part in left_out:
        assert any(part in name for name in named), f"{part} names no test of {module.__name__}"
    return {name: test for name, test in named.items() if not any(part in name for part in left_out)}


for _module, _left_out in LEFT_OUT.items():
    globals().update(taken(_module, _left_out))


@pytest.fixture(autouse=True)
def _on_lockstep(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("covey.engine.native.engine.TURN_SECONDS", 0.0)
    for module in (test_engine, test_sessions):
        monkeypatch.setattr(module, "NativeEngine", LockstepEngine)
    for module in (test_own_weights, test_session_versions):
        monkeypatch.setattr(module, "OwnWeightsEngine", OwnWeightsLockstepEngine)
