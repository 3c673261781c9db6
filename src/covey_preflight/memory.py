"""The check of memory: does the largest batch fit beside the weights?"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn

from covey.config.schema import Config
from covey.engine.native import graph
from covey.engine.native.runner import cache_shape
from covey.engine.settings import cache_budget
from covey.policy import sharding
from covey.policy.models.saved import num_rows
from covey.run.memory.estimate import workload
from covey.run.memory.memory_model import cache_and_logits, optimizer_bytes
from covey.system import collectives
from covey.system.text.format import memory
from covey_preflight.passes import BatchShape, MemorySample, bytes_of, fitting_tokens, largest_shape, measure
from covey_preflight.policy import local, probe_trainer
from covey_preflight.subject import Check, PreflightContext


@dataclass(frozen=True, slots=True)
class Need:
    """Bytes that training takes beside those held already (weights, reference)."""

    optimizer: int
    """Its state, from the first step on."""
    training: int
    """Gradients and a micro-batch of the largest size."""
    sampling: int
    """Cached keys and values, logits; where groups stream in, gradients too."""

    @property
    def total(self) -> int:
        """Return the optimiser's bytes plus the larger of both phases."""
        return self.optimizer + max(self.training, self.sampling)


def check_memory(subject: PreflightContext) -> Check:
    """Check that optimiser, gradients and largest micro-batch fit.

    A pass is tried only if what is known beforehand fits: on a CPU, too large a one would end the process.
    """
    config, policy = subject.config, subject.run.policy
    sharding.reshard(policy)
    free = min(collectives.all_gather(subject.available(policy.device)))
    optimizer, gradients = state_bytes(policy.model, config.optimizer.name), gradient_bytes(policy.model)
    num_groups = -(-config.groups_per_step // collectives.world_size())
    # Gradients are let go after a step, unless those of the coming one are made while it is sampled.
    held = gradients if config.streaming else 0
    known = Need(optimizer, gradients, held + _sampling_bytes(subject, num_groups, free - optimizer - held))
    if any(collectives.all_gather(known.total > free)):  # decided by all ranks together: a pass is collective
        figure = f"{_parts(known)}, activations not counted"
        return Check(False, figure, _free(free), _remedy_of_known(config, known, free), _values(known, free))
    shape = largest_shape(subject, num_groups)
    try:
        points = measure(probe_trainer(subject), shape, free - optimizer)
    except torch.OutOfMemoryError:
        figure = f"{_parts(known)}; a pass over a small micro-batch then ran out of memory"
        return Check(False, figure, _free(free), _remedy_of_known(config, known, free), _values(known, free))
    need = Need(optimizer, bytes_of(points, shape.num_tokens), known.sampling)
    recomputes = any(getattr(module, "gradient_checkpointing", False) for module in policy.model.modules())
    return _finding(need, free, points, shape, recomputes)


def _finding(need: Need, free: int, points: Sequence[MemorySample], shape: BatchShape, recomputes: bool) -> Check:
    tried = points[-1].is_largest
    how = "measured" if tried else f"scaled up from {' and '.join(f'{point.num_tokens:,}' for point in points)}"
    figure = f"{_parts(need)} with {shape.num_tokens:,} tokens in a micro-batch ({how})"
    values = _values(need, free) | {"num_tokens": float(shape.num_tokens), "measured": float(tried)}
    if need.total <= free:
        return Check(True, figure, _free(free), values=values)
    fits = fitting_tokens(points, free - need.optimizer)
    lower = f"lower micro_batch_tokens to {fits}"
    if fits < shape.max_tokens:
        lower = "lower sampling.max_tokens"
    if not recomputes:
        lower += " or set model.gradient_checkpointing=true"
    return Check(False, figure, _free(free), lower, values)


def _parts(need: Need) -> str:
    return (
        f"{memory(need.total)} needed: {memory(need.optimizer)} for the optimiser, and in turns "
        f"{memory(need.training)} for gradients and backward, {memory(need.sampling)} for sampling"
    )


def _free(free: int) -> str:
    return f"{memory(max(0, free))} free"


def _values(need: Need, free: int) -> dict[str, float]:
    known = {"optimizer": need.optimizer, "training": need.training, "sampling": need.sampling}
    return {name: float(count) for name, count in {"needed": need.total, "free": free, **known}.items()}


def _remedy_of_known(config: Config, known: Need, free: int) -> str:
    """Describe the remedy: a smaller cache, or fewer trained weights."""
    if known.optimizer + known.training <= free < known.total:
        return "lower engine.cache_bytes or engine.max_rows"
    if config.model.lora_rank == 0:
        return "train adapters (model.lora_rank=16) or a smaller model.name"
    return "choose a smaller model.name or a smaller model.lora_rank"


def gradient_bytes(model: nn.Module) -> int:
    """Return this rank's gradient bytes."""
    return sum(local(p).nbytes for p in model.parameters() if p.requires_grad)


def state_bytes(model: nn.Module, name: str) -> int:
    """Return the bytes of an optimiser's state on this rank."""
    num_weights = sum(local(p).numel() for p in model.parameters() if p.requires_grad)
    return optimizer_bytes(name, num_weights, gradient_bytes(model))


def _sampling_bytes(subject: PreflightContext, num_groups: int, free: int) -> int:
    """Return sampling's bytes after the longest prompt."""
    config, policy = subject.config, subject.run.policy
    if config.engine.name not in ("native", "transformers"):  # another may have no cache to ask for
        return 0
    # Bound the cache as the engine does
    given = cache_budget(config.engine.cache_bytes, free if policy.device.type == "cuda" else None)
    # Count the tokens of prompts too, where it decodes as a graph those that each row holds
    load, shape = workload(config, collectives.world_size()), cache_shape(policy)
    holders = num_groups + (load.num_rows if graph.is_wanted(policy) else 0)
    num_cached = load.num_cached + holders * len(subject.longest[1])
    num_cached += (num_groups + load.num_rows) * shape.state_slots
    load = replace(load, cache_bytes=given, num_cached=num_cached)
    return cache_and_logits(load, shape.slot_bytes, num_rows(policy.causal_lm))
