"""Start vLLM on a copy of a policy, or join a server that has one."""

import shutil
import tempfile
from functools import partial
from pathlib import Path

import torch

from covey.engine.base import WeightSet
from covey.engine.native.runner import cache_shape
from covey.engine.settings import EngineConfig
from covey.engine.vllm.engine import Served, VLLMEngine
from covey.engine.vllm.files import read_shapes, save_adapter, save_policy
from covey.engine.vllm.in_process import Launch, open_in_process
from covey.engine.weights import make_weight_set
from covey.policy.policy import DTYPES, Policy, is_adapted
from covey.policy.sharding import gathered

BLOCK = 128
"""Tokens that vLLM caches together, at most."""


def build(policy: Policy, settings: EngineConfig) -> VLLMEngine:
    """Build the engine of a policy in this process, which pushes its weights with `load_weights`.

    ValueError where vLLM cannot serve it, EngineLost where vLLM does not start.
    """
    if policy.device.type == "cuda" and policy.device.index not in (None, 0):
        raise ValueError(
            f"engine=vllm samples on the first GPU that a process sees, the policy is on {policy.device}; give each "
            "process a CUDA_VISIBLE_DEVICES of its own"
        )
    folder = Path(tempfile.mkdtemp(prefix="covey-vllm-"))
    try:
        launch, served = lay_out(policy, settings, folder)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    return VLLMEngine(
        partial(open_in_process, launch),
        served,
        collect=partial(collect, policy),
        how=settings.update,  # type: ignore[arg-type] # checked with the settings
        on_close=partial(shutil.rmtree, folder, ignore_errors=True),
    )


def lay_out(policy: Policy, settings: EngineConfig, folder: Path) -> tuple[Launch, Served]:
    """Save the policy below `folder`, and return how vLLM is started on it and what the engine knows of it.

    Where the policy trains an adapter, vLLM gets the model under it and the adapter apart.
    """
    with gathered(policy):
        save_policy(policy, folder / "model")
        adapter = folder / "adapter" if is_adapted(policy.model) else None
        if adapter is not None:
            save_adapter(policy, adapter)
    longest = longest_sequence(policy, settings.cache_bytes)
    on_gpu = policy.device.type == "cuda"
    launch = Launch(
        folder=folder / "model",
        dtype=next(name for name, dtype in DTYPES.items() if dtype == policy.precision),
        cache_bytes=settings.cache_bytes,
        max_rows=settings.max_rows,
        max_length=longest,
        adapter=adapter,
        eager=not on_gpu,
    )
    served = Served(
        max_length=longest,
        stop_ids=policy.stop_ids,
        dtype=torch.float32 if adapter is not None else policy.precision,
        max_rows=settings.max_rows,
        adapter=adapter,
        adapter_shapes=None if adapter is None else read_shapes(adapter),
    )
    return launch, served


def longest_sequence(policy: Policy, cache_bytes: int) -> int:
    """Return the longest sequence for which vLLM has positions and room: it must be able to cache one whole.

    ValueError where there is room for none.
    """
    fitting = cache_shape(policy).max_slots(cache_bytes) // BLOCK * BLOCK
    if fitting == 0:
        raise ValueError(f"engine=vllm needs engine.cache_bytes for {BLOCK} tokens at least, got {cache_bytes}")
    return min(policy.max_length, fitting)


def collect(policy: Policy, version: int) -> WeightSet:
    """Return the policy's trained weights as they are now. Collective where they are sharded."""
    with gathered(policy):
        return make_weight_set(policy, version)
