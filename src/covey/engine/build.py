"""Build engines by name; each is imported when it is built."""

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from covey.engine.base import Engine, UpdatableEngine
    from covey.engine.fake import FakeEngine
    from covey.engine.settings import EngineConfig
    from covey.policy.policy import Policy


def build_native(policy: "Policy", settings: "EngineConfig", kernels: str, *, own_weights: bool = False) -> Any:
    """Build the engine in this process, on shared or own weights.

    A policy on the general path is sampled by engine=transformers.
    """
    if policy.path == "general":
        return build_transformers(policy, settings, kernels, own_weights=own_weights)
    from covey.engine.native.engine import NativeEngine
    from covey.engine.native.own_weights import OwnWeightsEngine

    kind = OwnWeightsEngine if own_weights else NativeEngine
    return kind(policy, settings.cache_bytes, settings.max_rows, kernels, settings.speculation, settings.weights)


def build_transformers(policy: "Policy", settings: "EngineConfig", kernels: str, *, own_weights: bool = False) -> Any:
    """Build the engine through the model's own cache, in this process."""
    from covey.engine.lockstep.engine import LockstepEngine, OwnWeightsLockstepEngine

    kind = OwnWeightsLockstepEngine if own_weights else LockstepEngine
    return kind(policy, settings.cache_bytes, settings.max_rows, kernels, weights=settings.weights)


def build_fake(policy: "Policy", settings: "EngineConfig", kernels: str) -> "FakeEngine":
    """Build an engine of random tokens, 8 per completion, without limits."""
    from covey.engine.fake import FakeEngine, random_script

    vocab_size = len(policy.tokenizer)
    return FakeEngine(random_script(vocab_size, length=8), vocab_size)


def build_fill(policy: "Policy", settings: "EngineConfig", kernels: str, *, own_weights: bool = False) -> Any:
    """Build the uncached engine of a masked policy in this process."""
    from covey.engine.fill import FillEngine, OwnWeightsFillEngine

    return (OwnWeightsFillEngine if own_weights else FillEngine)(policy, settings.max_rows)


def build_vllm(policy: "Policy", settings: "EngineConfig", kernels: str) -> "UpdatableEngine":
    """Start vLLM on a copy of the policy's weights, or join engine.url."""
    from covey.engine.vllm.build import build

    return build(policy, settings)


def build_vllm_beside(policy: "Policy", settings: "EngineConfig", kernels: str) -> "Engine":
    """Start vLLM beside the trainer, restarted when lost, asleep on shared GPUs."""
    from covey.engine.vllm.build import build_beside

    return build_beside(policy, settings)


def sampling_engine(policy: "Policy", settings: "EngineConfig", kernels: str) -> "Engine":
    """Return the in-process engine of a causal or masked policy."""
    return (build_native if policy.mask_id is None else build_fill)(policy, settings, kernels)


OWN_WEIGHTS: dict[str, Callable[["Policy", "EngineConfig", str], "UpdatableEngine"]] = {
    "native": partial(build_native, own_weights=True),
    "transformers": partial(build_transformers, own_weights=True),
    "fill": partial(build_fill, own_weights=True),
    "fake": build_fake,
    "vllm": build_vllm,
}
"""Engine name -> builder of one whose weights are pushed to it, for samplers in processes of their own."""

ENGINES: dict[str, Callable[["Policy", "EngineConfig", str], "Engine"]] = {
    "native": build_native,
    "transformers": build_transformers,
    "fill": build_fill,
    "fake": build_fake,
    "vllm": build_vllm_beside,
}
"""Engine name -> builder (policy, settings, kernels)."""
