"""A run's memory from the shape of its model.

It counts what is large; `covey check` measures on the machine itself.
"""

import sys
from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise

from covey.config.compose import to_yaml
from covey.config.schema import Config
from covey.engine.settings import cache_budget
from covey.environments.settings import EpisodesConfig
from covey.policy.settings import ModelConfig, chooses_liger
from covey.rollouts.settings import group_sizes
from covey.run.memory.memory_model import Workload, kept_bytes, memory_of, training_bytes
from covey.run.memory.model_shapes import Shape, shape_of
from covey.system import machine, ranks
from covey.system.text.format import memory

ROOM = 0.9
"""Of what is free, before a model is loaded: an allocator does not fill all of it."""


def plan(config: Config, num_ranks: int, *, is_gpu: bool = True) -> dict[str, int]:
    """Estimate a GPU's bytes by purpose, empty for unknown shapes.

    Training and sampling take turns, and so does a cold start with all that follows: the sum is of what is there at
    the same time at most.
    """
    shape = shape_of(config.model)
    if shape is None:
        return {}
    if not is_gpu:  # what a cache may take of a GPU follows from what is free there
        bound = cache_budget(config.engine.cache_bytes, None)
        config = replace(config, engine=replace(config.engine, cache_bytes=bound))
    parts = memory_of(shape, workload(config, num_ranks))
    if config.cold_start.enabled:
        parts["cold_start"] = memory_of(shape, workload(as_cold_start(config), num_ranks))["in_all"]
        parts["in_all"] = max(parts.pop("in_all"), parts["cold_start"])
    return parts


def weights(model: ModelConfig) -> tuple[int, int] | None:
    """Count trained and all weights, adapters included.

    None for an unknown shape.
    """
    shape = shape_of(model)
    if shape is None:
        return None
    adapters = shape.adapter_weights(model.lora_rank, model.lora_targets)
    return adapters if model.lora_rank else shape.weights, shape.weights + adapters


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
    load = workload(kept, num_ranks)
    load = with_fused_layers(load, config.model, shape, is_gpu=True) if is_gpu else load
    needed = sum(kept_bytes(shape, load).values()) + training_bytes(shape, load)
    return replace(config, model=replace(config.model, gradient_checkpointing=needed > ROOM * free))


def with_fused_layers(load: Workload, model: ModelConfig, shape: Shape, *, is_gpu: bool) -> Workload:
    """Mark layers that kernels compute: Liger's on GPUs, C on CPUs."""
    if is_gpu:
        return replace(load, fuses_layers=shape.has_kernels and chooses_liger(model.kernels, is_half=load.is_half))
    is_causal = model.kind == "causal"
    lays_out = is_causal and shape.has_kernels and model.kernels != "torch" and load.precision != "float64"
    return replace(load, fuses_layers=load.precision == "float32" and is_causal, lays_out=lays_out)


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


def as_cold_start(config: Config) -> Config:
    return replace(
        config,
        model=config.warmed_model,
        optimizer=replace(config.optimizer, name="adamw"),
        algorithm=replace(config.algorithm, kl_coef=0.0, ratio_denominator="old", reference_model=None),
    )


def derive_numbers(config: Config, num_ranks: int | None = None) -> dict[str, int]:
    """Compute the derived numbers for display.

    `num_ranks` None reads WORLD_SIZE, else 1.

    Evaluations are smaller where the held-out split has fewer prompts. Micro-batches are counted as if every completion
    had its full length, without prompts.
    """
    num_ranks = num_ranks or ranks.world_size()
    sizes = group_sizes(config.group_size, config.group_size_schedule)
    changes = [0, *(entry.step for entry in config.group_size_schedule), config.num_steps]
    completions = sum(size * (end - start) for size, (start, end) in zip(sizes, pairwise(changes), strict=True))
    rollouts = config.groups_per_step * max(sizes)
    of_rank = -(-config.groups_per_step // num_ranks) * max(sizes)
    if config.groups_per_step < num_ranks:  # samples of a group are shared out
        of_rank = -(-rollouts // num_ranks)
    evaluations = 2 + (max(0, config.num_steps - 1) // config.evaluation.every if config.evaluation.every else 0)
    return {
        "rollouts_per_step": rollouts,
        "rollouts_in_all": config.groups_per_step * completions,
        "groups_per_rank": -(-config.groups_per_step // num_ranks),
        "rollouts_per_rank": of_rank,
        "micro_batches_per_rank": -(-of_rank // max(1, config.micro_batch_tokens // config.sampling.max_tokens)),
        "optimizer_steps": config.num_steps * config.updates_per_batch * config.num_mini_batches,
        "buffer_groups": (config.max_staleness + 1) * config.groups_per_step,
        "most_completion_tokens_per_step": rollouts * config.sampling.max_tokens,
        "tokens_per_micro_batch": config.micro_batch_tokens,
        "evaluations": evaluations,
        "completions_per_evaluation": config.evaluation.num_prompts * (config.evaluation.num_samples + 1),
    }


def report(config: Config) -> str:
    """Return the output of `covey config`.

    It is YAML, and as comments at its end the derived numbers and what memory a GPU needs.
    """
    parts: list[tuple[str, Mapping[str, int | str]]] = [("derived", derive_numbers(config))]
    if counts := weights(config.model):
        trained, total = counts
        share = {"weights": f"{total:,}", "trained": f"{trained:,} ({trained / total:.2%})"}
        parts.append(("weights of the model, adapters included", share))
    is_gpu = config.model.device != "cpu" and machine.has_gpu()
    if planned := plan(config, ranks.world_size(), is_gpu=is_gpu):
        sizes = {name: memory(count) for name, count in planned.items()}
        whose = "memory of each GPU" if is_gpu else "memory of each process"
        parts.append((f"{whose}, estimated from the shape of the model; `covey check` measures", sizes))
    lines = [line for title, found in parts for line in (f"# {title}:", *(f"#   {k}: {v}" for k, v in found.items()))]
    return f"{to_yaml(config)}{chr(10).join(lines)}\n"
