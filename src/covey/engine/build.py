"""How tokens are sampled. `ENGINES` names the engines; each is imported when it is built."""

from collections.abc import Callable
from typing import TYPE_CHECKING

from covey.engine.base import UpdatableEngine

if TYPE_CHECKING:
    from covey.engine.base import Engine
    from covey.policy.policy import Policy


def build_native(policy: "Policy", cache_bytes: int, max_rows: int, kernels: str) -> "Engine":
    """Build the engine in this process, on the policy's own weights."""
    from covey.engine.native.engine import NativeEngine

    return NativeEngine(policy, cache_bytes, max_rows, kernels)


def build_fake(policy: "Policy", cache_bytes: int, max_rows: int, kernels: str) -> "Engine":
    """Sample random tokens of the policy's vocabulary, 8 a completion. The limits have no meaning for it."""
    from covey.engine.fake import FakeEngine, random_script

    vocab_size = len(policy.tokenizer)
    return FakeEngine(random_script(vocab_size, length=8), vocab_size)


def build_fill(policy: "Policy", cache_bytes: int, max_rows: int, kernels: str) -> "Engine":
    """Build the engine in this process, on the weights of a masked policy.

    It caches nothing.
    """
    from covey.engine.fill import FillEngine

    return FillEngine(policy, max_rows)


def sampling_engine(policy: "Policy", cache_bytes: int, max_rows: int, kernels: str) -> "Engine":
    """Return the engine in process for a policy of its kind."""
    return (build_native if policy.mask_id is None else build_fill)(policy, cache_bytes, max_rows, kernels)


def own_native(policy: "Policy", cache_bytes: int, max_rows: int, kernels: str) -> "UpdatableEngine":
    """Build the native engine on weights of its own."""
    from covey.engine.native.own_weights import OwnWeightsEngine

    return OwnWeightsEngine(policy, cache_bytes, max_rows, kernels)


def own_fill(policy: "Policy", cache_bytes: int, max_rows: int, kernels: str) -> "UpdatableEngine":
    """Build the engine of a masked policy on weights of its own."""
    from covey.engine.fill import OwnWeightsFillEngine

    return OwnWeightsFillEngine(policy, max_rows)


def own_fake(policy: "Policy", cache_bytes: int, max_rows: int, kernels: str) -> "UpdatableEngine":
    """Build the scripted engine, which has no weights."""
    engine = build_fake(policy, cache_bytes, max_rows, kernels)
    assert isinstance(engine, UpdatableEngine), "it takes updates"
    return engine


OWN_WEIGHTS: dict[str, Callable[["Policy", int, int, str], "UpdatableEngine"]] = {
    "native": own_native,
    "fill": own_fill,
    "fake": own_fake,
}
"""Engine name -> builder of one whose weights are pushed to it, for samplers in processes of their own."""

ENGINES: dict[str, Callable[["Policy", int, int, str], "Engine"]] = {
    "native": build_native,
    "fill": build_fill,
    "fake": build_fake,
}
"""Engine name -> builder (policy, cache_bytes, max_rows, kernels)."""
