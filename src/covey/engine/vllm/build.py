"""Start vLLM on a copy of a policy, or join a server."""

import shutil
import tempfile
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from covey.engine.base import Engine, WeightSet
from covey.engine.native.runner import cache_shape
from covey.engine.settings import EngineConfig, cache_budget
from covey.engine.vllm.engine import Served, VLLMEngine
from covey.engine.vllm.files import as_saved, save_adapter, save_policy
from covey.engine.vllm.in_process import Launch, open_in_process
from covey.engine.vllm.restarting import RestartingEngine
from covey.engine.vllm.server import find_model, name_of_server, open_server
from covey.engine.vllm.wire import Wire
from covey.engine.weights import make_probe, make_weight_set, shapes_of, trained_tensors
from covey.policy.models.text_part import is_composite
from covey.policy.policy import DTYPES, Policy, is_adapted
from covey.policy.sharding import gather_weights

BLOCK = 128
"""Tokens that vLLM caches together, at most."""
ROOM_TO_BREATHE = 0.95
"""Share of free memory that vLLM is let have."""


def build(policy: Policy, settings: EngineConfig, version: int = 0, *, sleep_level: int = 0) -> VLLMEngine:
    """Build a policy's engine in this process, on weights `version`.

    `load_weights` pushes newer ones. ValueError where vLLM cannot serve the policy, EngineLost where it does not start.
    """
    folder = Path(tempfile.mkdtemp(prefix="covey-vllm-"))
    try:
        if settings.url is not None:
            return join(policy, settings, settings.url, folder, version)
        return start(policy, settings, folder, version, sleep_level)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise


def build_beside(policy: Policy, settings: EngineConfig) -> Engine:
    """Build the engine beside the trainer: restarted when lost, asleep during updates.

    A remote server is not restarted.
    """
    if settings.url is not None:
        return build(policy, settings)
    return RestartingEngine(partial(build, policy, settings, sleep_level=sleep_level(policy, settings)))


def sleep_level(policy: Policy, settings: EngineConfig) -> int:
    """Return vLLM's sleep level: 1 keeps an adapter's frozen base, 2 nothing."""
    if settings.sleep is not None:
        return settings.sleep
    if policy.device.type != "cuda":
        return 0
    return 1 if is_adapted(policy.model) else 2


def start(policy: Policy, settings: EngineConfig, folder: Path, version: int, sleep_level: int) -> VLLMEngine:
    """Start vLLM on a copy of the policy's weights below `folder`."""
    # vLLM takes the first GPU that its process sees
    on_gpu = policy.device.type == "cuda"
    if on_gpu and policy.device.index not in (None, 0):
        raise ValueError(
            f"engine=vllm samples on the first GPU that a process sees, the policy is on {policy.device}; give each "
            "process a CUDA_VISIBLE_DEVICES of its own"
        )
    with gather_weights(policy):
        save_policy(policy, folder / "model")
    share, cache_bytes = settings.gpu_memory_utilization, cache_budget(settings.cache_bytes, None)
    counts = share is None and policy.path == "fast"  # what vLLM caches of another model, it says itself
    fitting = longest_sequence(policy, cache_bytes) if counts else policy.max_length
    served = replace(describe(policy, settings, folder, fitting), sleep_level=sleep_level)
    launch = Launch(
        folder=folder / "model",
        dtype=next(name for name, dtype in DTYPES.items() if dtype == policy.precision),
        cache_bytes=cache_bytes if share is None else None,
        max_rows=settings.max_rows,
        max_length=served.max_length,
        adapter=served.adapter,
        eager=not on_gpu,
        memory_share=_free_share(policy.device) if on_gpu and share is None else share,
        sleeps=sleep_level > 0,
        is_composite=is_composite(policy.causal_lm),
    )
    engine = _engine(partial(open_in_process, launch), served, policy, settings, folder, version)
    try:
        with gather_weights(policy):
            probe = make_probe(policy)
        engine.prove(probe)
    except BaseException:
        engine.close()
        raise
    return engine


def _free_share(device: torch.device) -> float:
    """Return the free share of a GPU.

    vLLM does not start with less than its configured share, even with a fixed cache size.
    """
    free, total = torch.cuda.mem_get_info(device)
    return int(ROOM_TO_BREATHE * 100 * free / total) / 100


def join(policy: Policy, settings: EngineConfig, url: str, folder: Path, version: int) -> VLLMEngine:
    """Join a server of the policy's shape, and push the policy's weights."""
    model = find_model(url)
    served = describe(policy, settings, folder, min(policy.max_length, model.max_length))
    served = replace(served, name=name_of_server(url), sleep_level=settings.sleep or 0)
    engine = _engine(partial(open_server, url, model.name), served, policy, settings, folder, version)
    try:
        engine.load_weights(version)
    except BaseException:
        engine.close()
        raise
    return engine


def describe(policy: Policy, settings: EngineConfig, folder: Path, max_length: int) -> Served:
    """Describe the policy for the engine; save a trained adapter below `folder`."""
    adapter = folder / "adapter" if is_adapted(policy.model) else None
    with gather_weights(policy):
        shapes = shapes_of(trained_tensors(policy))
        saved = dict if adapter is not None else as_saved(policy)
        if adapter is not None:
            save_adapter(policy, adapter)
    return Served(
        max_length=max_length,
        stop_ids=policy.stop_ids,
        dtype=torch.float32 if adapter is not None else policy.precision,
        max_rows=settings.max_rows,
        deadline=settings.deadline,
        adapter=adapter,
        shapes=shapes,
        as_saved=saved,
    )


def _engine(
    open_wire: Callable[[], Coroutine[Any, Any, Wire]],
    served: Served,
    policy: Policy,
    settings: EngineConfig,
    folder: Path,
    version: int,
) -> VLLMEngine:
    return VLLMEngine(
        open_wire,
        served,
        version=version,
        collect=partial(collect, policy),
        how=settings.update,  # type: ignore[arg-type] # checked with the settings
        on_close=partial(shutil.rmtree, folder, ignore_errors=True),
    )


def longest_sequence(policy: Policy, cache_bytes: int) -> int:
    """Return the longest sequence that vLLM can cache whole. ValueError without room."""
    fitting = cache_bytes // cache_shape(policy).slot_bytes // BLOCK * BLOCK
    if fitting == 0:
        raise ValueError(f"engine=vllm needs engine.cache_bytes for {BLOCK} tokens at least, got {cache_bytes}")
    return min(policy.max_length, fitting)


def collect(policy: Policy, version: int, text: Sequence[int] = ()) -> WeightSet:
    """Return the policy's trained weights, uncopied: not to change until pushed.

    Collective where they are sharded; gathered weights are copied.
    """
    with gather_weights(policy):
        if policy.sharded:
            return make_weight_set(policy, version, text)
        tensors = {name: tensor.detach() for name, tensor in trained_tensors(policy).items()}
        weights = WeightSet(version, tensors, "", make_probe(policy, text))
    if policy.device.type == "cuda":
        torch.cuda.empty_cache()  # what the trainer keeps for itself, vLLM needs now
    return weights
