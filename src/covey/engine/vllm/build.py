"""Start vLLM on a copy of a policy, or join a server that has one."""

import shutil
import tempfile
from collections.abc import Callable, Coroutine
from functools import partial
from pathlib import Path
from typing import Any

import torch

from covey.engine.base import WeightSet
from covey.engine.native.runner import cache_shape
from covey.engine.settings import EngineConfig
from covey.engine.vllm.engine import Served, VLLMEngine
from covey.engine.vllm.files import read_shapes, save_adapter, save_policy
from covey.engine.vllm.in_process import Launch, open_in_process
from covey.engine.vllm.server import find_model, open_server
from covey.engine.vllm.wire import Wire
from covey.engine.weights import make_weight_set
from covey.policy.policy import DTYPES, Policy, is_adapted
from covey.policy.sharding import gathered

BLOCK = 128
"""Tokens that vLLM caches together, at most."""


def build(policy: Policy, settings: EngineConfig) -> VLLMEngine:
    """Build the engine of a policy in this process, which pushes its weights with `load_weights`.

    ValueError where vLLM cannot serve it, EngineLost where vLLM does not start.
    """
    folder = Path(tempfile.mkdtemp(prefix="covey-vllm-"))
    try:
        return start(policy, settings, folder) if settings.url is None else join(policy, settings, settings.url, folder)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise


def start(policy: Policy, settings: EngineConfig, folder: Path) -> VLLMEngine:
    """Start vLLM here, on a copy of the policy's weights below `folder`."""
    on_gpu = policy.device.type == "cuda"
    if on_gpu and policy.device.index not in (None, 0):
        raise ValueError(
            f"engine=vllm samples on the first GPU that a process sees, the policy is on {policy.device}; give each "
            "process a CUDA_VISIBLE_DEVICES of its own"
        )
    with gathered(policy):
        save_policy(policy, folder / "model")
    served = describe(policy, settings, folder, longest_sequence(policy, settings.cache_bytes))
    launch = Launch(
        folder=folder / "model",
        dtype=next(name for name, dtype in DTYPES.items() if dtype == policy.precision),
        cache_bytes=settings.cache_bytes,
        max_rows=settings.max_rows,
        max_length=served.max_length,
        adapter=served.adapter,
        eager=not on_gpu,
    )
    return _engine(partial(open_in_process, launch), served, policy, settings, folder)


def join(policy: Policy, settings: EngineConfig, url: str, folder: Path) -> VLLMEngine:
    """Take over a server that runs on a model of the policy's shape, and push the policy's weights to it."""
    model = find_model(url)
    served = describe(policy, settings, folder, min(policy.max_length, model.max_length))
    engine = _engine(partial(open_server, url, model.name), served, policy, settings, folder)
    try:
        engine.load_weights((), version=0)
    except BaseException:
        engine.close()
        raise
    return engine


def describe(policy: Policy, settings: EngineConfig, folder: Path, max_length: int) -> Served:
    """Return what the engine knows of the policy. An adapter, where one is trained, is saved below `folder`."""
    adapter = folder / "adapter" if is_adapted(policy.model) else None
    if adapter is not None:
        with gathered(policy):
            save_adapter(policy, adapter)
    return Served(
        max_length=max_length,
        stop_ids=policy.stop_ids,
        dtype=torch.float32 if adapter is not None else policy.precision,
        max_rows=settings.max_rows,
        adapter=adapter,
        adapter_shapes=None if adapter is None else read_shapes(adapter),
    )


def _engine(
    open_wire: Callable[[], Coroutine[Any, Any, Wire]],
    served: Served,
    policy: Policy,
    settings: EngineConfig,
    folder: Path,
) -> VLLMEngine:
    return VLLMEngine(
        open_wire,
        served,
        collect=partial(collect, policy),
        how=settings.update,  # type: ignore[arg-type] # checked with the settings
        on_close=partial(shutil.rmtree, folder, ignore_errors=True),
    )


def longest_sequence(policy: Policy, cache_bytes: int) -> int:
    """Return the longest sequence for which vLLM has positions and room: it must be able to cache one whole.

    ValueError where there is room for none.
    """
    fitting = cache_bytes // cache_shape(policy).slot_bytes // BLOCK * BLOCK
    if fitting == 0:
        raise ValueError(f"engine=vllm needs engine.cache_bytes for {BLOCK} tokens at least, got {cache_bytes}")
    return min(policy.max_length, fitting)


def collect(policy: Policy, version: int) -> WeightSet:
    """Return the policy's trained weights as they are now. Collective where they are sharded."""
    with gathered(policy):
        return make_weight_set(policy, version)
