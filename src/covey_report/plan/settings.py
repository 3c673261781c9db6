"""Numbers that follow from settings: sizes of a run, weights, memory."""

from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise

from covey.config.compose import to_yaml
from covey.config.schema import Config
from covey.engine.settings import cache_budget
from covey.policy.settings import NANO, ModelConfig
from covey.rollouts.settings import group_sizes
from covey.run.memory.estimate import workload
from covey.run.memory.memory_model import memory_of
from covey.run.memory.model_shapes import Shape, count_shape, shape_of
from covey.system import machine, ranks
from covey.system.text.format import memory


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
    """Count trained and all weights, adapters included. None for an unknown shape."""
    shape = shape_of(model)
    if shape is None:
        return None
    adapters = shape.adapter_weights(model.lora_rank, model.lora_targets)
    return adapters if model.lora_rank else shape.weights, shape.weights + shape.beside + adapters


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


def shape_for(model: ModelConfig) -> Shape:
    """Return a model's shape. ValueError if unknown."""
    found = _embedded_shape(model) if model.name in NANO else shape_of(model)
    if found is None:
        raise ValueError(
            f"the shape of model.name={model.name} is not known here; "
            "name a folder with its config.json (weights are not needed)"
        )
    return found


def _embedded_shape(model: ModelConfig) -> Shape:
    import torch

    from covey.policy.attention.base import register
    from covey.policy.models.nano import NanoShape, nano_masked_model, nano_masked_tokenizer, nano_model, nano_tokenizer

    wanted = NanoShape(model.nano_architecture, model.nano_hidden_size, model.nano_num_layers, model.nano_num_heads)
    make, tokenizer = (
        (nano_model, nano_tokenizer()) if model.kind == "causal" else (nano_masked_model, nano_masked_tokenizer())
    )
    register()
    with torch.device("meta"):
        return count_shape(make(wanted, tokenizer, 0))
