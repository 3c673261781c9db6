"""A run's memory from the shape of its model. It counts what is large; `covey check` measures on the machine itself."""

import sys
from dataclasses import replace

from covey.config.schema import Config
from covey.environments.settings import EpisodesConfig
from covey.policy.settings import ModelConfig, chooses_liger, longest_pass
from covey.rollouts.settings import group_sizes
from covey.run.memory.memory_model import Workload, kept_bytes, training_bytes
from covey.run.memory.model_shapes import Shape, shape_of
from covey.system.machine import is_intel

ROOM = 0.9
"""Usable share of free memory, before a model is loaded: an allocator does not fill all of it."""


def with_checkpointing(config: Config, num_ranks: int, free: int, *, is_gpu: bool) -> Config:
    """Return settings with gradient checkpointing decided for `free` bytes.

    Activations are kept where what stays and training fit, and where the shape of the model is not known.
    """
    if config.model.gradient_checkpointing is not None:
        return config
    kept = replace(config, model=replace(config.model, gradient_checkpointing=False))
    shape = shape_of(config.model)
    if shape is None:
        return kept
    load = with_fused_layers(workload(kept, num_ranks), config.model, shape, is_gpu=is_gpu)
    needed = sum(kept_bytes(shape, load).values()) + training_bytes(shape, load)
    return replace(config, model=replace(config.model, gradient_checkpointing=needed > ROOM * free))


def with_fused_layers(load: Workload, model: ModelConfig, shape: Shape, *, is_gpu: bool) -> Workload:
    """Mark layers that kernels compute; bound a CPU's passes."""
    if is_gpu:
        return replace(load, fuses_layers=shape.has_kernels and chooses_liger(model.kernels, is_half=load.is_half))
    is_causal = model.kind == "causal"
    lays_out = is_causal and shape.has_kernels and model.kernels != "torch" and load.precision != "float64"
    in_c = lays_out and not is_intel()
    longest = longest_pass(shape.weights, load.group_tokens) if load.group_tokens else sys.maxsize
    if longest < load.micro_batch_tokens:
        load = replace(load, micro_batch_tokens=longest, single_pass=False)
    fuses = is_causal and (load.precision == "float32" or in_c)
    return replace(load, fuses_layers=fuses, lays_out=lays_out, computes_in_c=in_c)


def workload(config: Config, num_ranks: int) -> Workload:
    """Return the workload of each rank.

    Prompts are not counted, as none is read yet. Activations count as recomputed unless settings keep them, which is
    the least that a run takes.
    """
    model = config.model
    num_groups = -(-config.groups_per_step // num_ranks)
    group_size = max(group_sizes(config.group_size, config.group_size_schedule))
    num_rows = min(config.engine.max_rows, num_groups * group_size)
    return Workload(
        precision=model.precision,
        lora_rank=model.lora_rank,
        lora_targets=tuple(model.lora_targets),
        load_in_4bit=model.load_in_4bit,
        load_in_8bit=model.load_in_8bit,
        gradient_checkpointing=model.gradient_checkpointing is not False,
        activation_offload=model.activation_offload,
        optimizer=config.optimizer.name,
        micro_batch_tokens=config.micro_batch_tokens,
        group_tokens=group_size * answer_bound(config),
        logprob_chunk=config.logprob_chunk,
        num_shards=num_ranks if config.parallel.strategy == "fsdp" else 1,
        has_reference=holds_reference(config),
        reference=reference_shape(config),
        keeps_gradients=config.streaming,
        engine=config.engine.name,
        num_rows=num_rows,
        num_cached=num_rows * answer_bound(config),
        cache_bytes=config.engine.cache_bytes,
    )


def answer_bound(config: Config) -> int:
    """Return the most tokens the policy writes per prompt."""
    environment, length = config.environment, config.sampling.max_tokens
    if not isinstance(environment, EpisodesConfig):
        return length
    return min(length * (environment.max_turns or 1), environment.max_context or sys.maxsize)


def holds_reference(config: Config) -> bool:
    """Return True if a trainer rank holds the reference."""
    compares = config.algorithm.kl_coef > 0 or config.algorithm.ratio_denominator == "reference"
    return compares and not (config.source == "ray" and config.devices.reference > 0)


def reference_shape(config: Config) -> Shape | None:
    """Return the reference's shape, None without one."""
    name, revision = config.algorithm.reference_model, config.algorithm.reference_revision
    if name is None:
        return None
    return shape_of(replace(config.model, name=name, revision=revision)) or shape_of(config.model)
