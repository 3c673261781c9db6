"""How much memory of each GPU a run will take, from the shape of its model alone: what `covey config` says beforehand.

It counts what is large; `covey check` measures on the machine itself.
"""

from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise

from covey.config.compose import to_yaml
from covey.config.schema import Config
from covey.policy.settings import ModelConfig
from covey.rollouts.settings import group_sizes
from covey.run.model_shapes import Shape, shape_of
from covey.system import ranks
from covey.system.text.format import memory

VALUE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "float64": 8}
FOUR_BIT_BYTES = 0.55
"""NF4 with doubly quantised scales, for a weight of a linear layer."""
MOMENTS = {"adamw": 2, "adamw8bit": 2, "sgd": 0}
"""Numbers that an optimiser keeps of each trained weight: as long as the weight is, of adamw8bit a byte."""
LOGIT_COPIES = 3
"""Logits, log-probabilities and, of training, their gradient, of sampling, probabilities live at the same time."""
LAYER_COPIES = 2
"""The activations of a layer and their gradients, while it is run again in the backward pass."""


def plan(config: Config, num_ranks: int) -> dict[str, int]:
    """Return the bytes of one GPU by what they are for, none for an unknown model shape.

    Training and sampling take turns, and so does a cold start with all that follows: the sum is of what is there at
    the same time at most.
    """
    shape = shape_of(config.model)
    if shape is None:
        return {}
    parts = _run_parts(config, shape, num_ranks)
    if config.cold_start.enabled:
        parts["cold_start"] = _run_parts(_as_cold_start(config), shape, num_ranks)["in_all"]
        parts["in_all"] = max(parts.pop("in_all"), parts["cold_start"])
    return parts


def weights(model: ModelConfig) -> tuple[int, int] | None:
    """Return how many weights are trained and how many there are, adapters included.

    None for an unknown shape.
    """
    shape = shape_of(model)
    if shape is None:
        return None
    return _trained(model, shape), shape.weights + shape.adapter_weights(model.lora_rank, model.lora_targets)


def _run_parts(config: Config, shape: Shape, num_ranks: int) -> dict[str, int]:
    """Return what one kind of training takes, and its sum."""
    model = config.model
    trained, each = _trained(model, shape), 8 if model.precision == "float64" else 4
    kept = {
        "weights": _frozen_bytes(model, shape) + each * trained,
        "reference": _reference_bytes(config, shape),
        "gradients": each * trained,
        "optimizer": optimizer_bytes(config.optimizer.name, trained, each * trained),
    }
    if config.parallel.strategy == "fsdp":
        kept = {name: count // num_ranks for name, count in kept.items()}
    else:
        kept["decode_copy"] = _decode_copy_bytes(model, shape)
    kept = {name: count for name, count in kept.items() if count or name not in ("reference", "decode_copy")}
    slot = shape.key_value_width * VALUE_BYTES[model.precision]
    # Prompts are not counted: nobody has read them.
    sampling = sampling_bytes(config, -(-config.groups_per_step // num_ranks), 0, slot, shape.vocabulary)
    if config.parallel.strategy == "fsdp" and num_ranks > 1:  # weights are gathered while a rank samples
        sampling += VALUE_BYTES[model.precision] * shape.weights
    turns = {"training": _training_bytes(config, shape), "sampling": sampling}
    # Gradients are let go before sampling, unless those of the coming step are made while it is sampled.
    idle = 0 if config.streaming else kept["gradients"]
    return kept | turns | {"in_all": sum(kept.values()) + max(turns["training"], turns["sampling"] - idle)}


def _as_cold_start(config: Config) -> Config:
    """Return the configuration as the cold start trains: all weights, unquantised, AdamW, no reference."""
    return replace(
        config,
        model=replace(config.model, lora_rank=0, load_in_4bit=False),
        optimizer=replace(config.optimizer, name="adamw"),
        algorithm=replace(config.algorithm, kl_coef=0.0, ratio_denominator="old"),
    )


def _trained(model: ModelConfig, shape: Shape) -> int:
    return shape.adapter_weights(model.lora_rank, model.lora_targets) if model.lora_rank else shape.weights


def _frozen_bytes(model: ModelConfig, shape: Shape) -> int:
    """Return the bytes of base weights under adapters, 0 where the model trains whole."""
    if not model.lora_rank:
        return 0
    each = VALUE_BYTES[model.precision]
    linear = FOUR_BIT_BYTES if model.load_in_4bit else each
    return int(linear * shape.linear_weights) + each * (shape.weights - shape.linear_weights)


def _reference_bytes(config: Config, shape: Shape) -> int:
    """Return the bytes of the frozen copy that a KL penalty needs.

    With adapters the base model is the reference.
    """
    needed = config.algorithm.kl_coef > 0 or config.algorithm.ratio_denominator == "reference"
    each = 8 if config.model.precision == "float64" else 4
    return each * shape.weights if needed and not config.model.lora_rank else 0


def _decode_copy_bytes(model: ModelConfig, shape: Shape) -> int:
    """Return those of weights that sampling reads in another form: cast, or with adapters merged (decode_weights)."""
    each = VALUE_BYTES[model.precision]
    if model.precision in ("bfloat16", "float16"):
        return each * (shape.adapter_weights(model.lora_rank, model.lora_targets) or shape.cast_weights)
    adapted = shape.adapted(model.lora_targets) if model.lora_rank else ()
    return each * sum(layer.inputs * layer.outputs for layer in adapted)


def _training_bytes(config: Config, shape: Shape) -> int:
    """Return those of activations of a full micro-batch, and of logits of a chunk of it.

    Each linear layer's result is kept, and about as much again in norms, gates and products.
    """
    tokens, each = config.micro_batch_tokens, VALUE_BYTES[config.model.precision]
    results = sum(layer.outputs for layer in shape.body if ".experts." not in layer.name)
    everything = each * 2 * (results + shape.depth * 2 * shape.expert_width)
    if config.model.gradient_checkpointing:
        activations = tokens * (shape.depth * each * shape.hidden + LAYER_COPIES * everything // shape.depth)
    else:
        activations = tokens * everything
    chunk = min(config.logprob_chunk or tokens, tokens)
    return activations + LOGIT_COPIES * 4 * chunk * shape.vocabulary


def optimizer_bytes(name: str, num_weights: int, num_bytes: int) -> int:
    """Return the bytes of an optimiser's state, of so many trained weights of so many bytes."""
    return MOMENTS[name] * (num_weights if name == "adamw8bit" else num_bytes)


def sampling_bytes(config: Config, num_groups: int, prompt_tokens: int, slot_bytes: int, vocabulary: int) -> int:
    """Return the bytes of the fullest cache within its budget and of one token's logits per row, of the native engine.

    `num_groups` are sampled by one process, and `slot_bytes` holds keys and values of a token.
    """
    if config.engine.name != "native":
        return 0
    group_size = max(group_sizes(config.group_size, config.group_size_schedule))
    num_rows = min(config.engine.max_rows, num_groups * group_size)
    num_slots = num_groups * prompt_tokens + num_rows * config.sampling.max_tokens
    cached = num_slots * slot_bytes
    if config.engine.cache_bytes is not None:
        cached = min(config.engine.cache_bytes, cached)
    return cached + LOGIT_COPIES * 4 * num_rows * vocabulary


def derived(config: Config, num_ranks: int | None = None) -> dict[str, int]:
    """Compute the numbers that follow from the settings and are only shown, never set.

    `num_ranks` None reads WORLD_SIZE, else 1.

    Evaluations are smaller where the held-out split has fewer prompts. Micro-batches are counted as if every completion
    had its full length, without prompts.
    """
    num_ranks = num_ranks or ranks.world_size()
    # Count over the schedule of group sizes
    sizes = group_sizes(config.group_size, config.group_size_schedule)
    changes = [0, *(entry.step for entry in config.group_size_schedule), config.num_steps]
    completions = sum(size * (end - start) for size, (start, end) in zip(sizes, pairwise(changes), strict=True))
    # Count for the largest step
    rollouts = config.groups_per_step * max(sizes)
    of_rank = -(-config.groups_per_step // num_ranks) * max(sizes)
    evaluations = 2 + (max(0, config.num_steps - 1) // config.evaluation.every if config.evaluation.every else 0)
    return {
        "rollouts_per_step": rollouts,
        "rollouts_in_all": config.groups_per_step * completions,
        "groups_per_rank": -(-config.groups_per_step // num_ranks),
        "rollouts_per_rank": of_rank,
        "micro_batches_per_rank": -(-of_rank // max(1, config.micro_batch_tokens // config.sampling.max_tokens)),
        "optimizer_steps": config.num_steps * config.updates_per_batch,
        "buffer_groups": (config.max_staleness + 1) * config.groups_per_step,
        "most_completion_tokens_per_step": rollouts * config.sampling.max_tokens,
        "tokens_per_micro_batch": config.micro_batch_tokens,
        "evaluations": evaluations,
        "completions_per_evaluation": config.evaluation.num_prompts * (config.evaluation.num_samples + 1),
    }


def report(config: Config) -> str:
    """Return what `covey config` prints.

    It is YAML, and as comments at its end the derived numbers and what memory a GPU needs.
    """
    parts: list[tuple[str, Mapping[str, int | str]]] = [("derived", derived(config))]
    # Count weights, adapters included
    if counts := weights(config.model):
        trained, total = counts
        share = {"weights": f"{total:,}", "trained": f"{trained:,} ({trained / total:.2%})"}
        parts.append(("weights of the model, adapters included", share))
    # Add the memory of each GPU where the model's shape is known
    if planned := plan(config, ranks.world_size()):
        sizes = {name: memory(count) for name, count in planned.items()}
        parts.append(("memory of each GPU, estimated from the shape of the model; `covey check` measures", sizes))
    lines = [line for title, found in parts for line in (f"# {title}:", *(f"#   {k}: {v}" for k, v in found.items()))]
    return f"{to_yaml(config)}{chr(10).join(lines)}\n"
