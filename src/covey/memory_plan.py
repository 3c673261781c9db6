"""How much memory of each GPU a run will take, from the shape of its model alone: what `covey config` says beforehand.

It counts what is large; `covey check` measures on the machine itself.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from covey.config import Config, ModelConfig
from covey.curriculum_config import group_sizes

VALUE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "float64": 8}
FOUR_BIT_BYTES = 0.55
"""NF4 with doubly quantised scales, for a weight of a linear layer."""
STATE_BYTES = {"adamw": 8, "adamw8bit": 2, "sgd": 0}
"""Moments of one trained weight."""
LOGIT_COPIES = 3
"""Logits, log-probabilities and their gradient, or probabilities."""
LAYER_COPIES = 2
"""The activations of a layer and their gradients, while it is run again in the backward pass."""


@dataclass(frozen=True, slots=True)
class Shape:
    """What the size of a decoder-only transformer follows from."""

    hidden: int
    layers: int
    heads: int
    key_value_heads: int
    intermediate: int
    vocabulary: int
    tied: bool = False
    """The output head is the embedding."""

    @property
    def key_value_width(self) -> int:
        return self.hidden // self.heads * self.key_value_heads

    @property
    def linear(self) -> tuple[tuple[int, int], ...]:
        """(inputs, outputs) of the linear layers of a layer."""
        hidden, narrow, wide = self.hidden, self.key_value_width, self.intermediate
        attention = ((hidden, hidden), (hidden, narrow), (hidden, narrow), (hidden, hidden))
        return (*attention, (hidden, wide), (hidden, wide), (wide, hidden))

    @property
    def linear_weights(self) -> int:
        return self.layers * sum(inputs * outputs for inputs, outputs in self.linear)

    @property
    def embedding_weights(self) -> int:
        return self.vocabulary * self.hidden * (1 if self.tied else 2)

    def adapter_weights(self, rank: int) -> int:
        """Of adapters on every linear layer but the head."""
        return self.layers * rank * sum(inputs + outputs for inputs, outputs in self.linear)


def shape_of(model: ModelConfig) -> Shape | None:
    """Of a model that is known by name, or a folder; None for others."""
    known = SHAPES.get(model.name.rpartition("/")[2].removesuffix("-Instruct"))
    file = Path(model.name) / "config.json"
    if known is not None or not file.is_file():
        return known
    found = json.loads(file.read_text())
    try:
        heads = int(found["num_attention_heads"])
        return Shape(
            hidden=int(found["hidden_size"]),
            layers=int(found["num_hidden_layers"]),
            heads=heads,
            key_value_heads=int(found.get("num_key_value_heads", heads)),
            intermediate=int(found["intermediate_size"]),
            vocabulary=int(found["vocab_size"]),
            tied=bool(found.get("tie_word_embeddings", False)),
        )
    except KeyError:  # another architecture names them otherwise
        return None


def plan(config: Config, num_ranks: int) -> dict[str, int]:
    """Bytes of one GPU by what they are for; empty where the model's shape is not known. Training and sampling take
    turns, so the sum is of the larger of the two."""
    shape = shape_of(config.model)
    if shape is None:
        return {}
    trained = _trained(config.model, shape)
    parts = {
        "weights": _frozen_bytes(config.model, shape) + 4 * trained,
        "gradients": 4 * trained,
        "optimizer": STATE_BYTES[config.optimizer.name] * trained,
    }
    if config.distribution.strategy == "fsdp":
        parts = {name: count // num_ranks for name, count in parts.items()}
    parts |= {"training": _training_bytes(config, shape), "sampling": _sampling_bytes(config, shape, num_ranks)}
    kept = parts["weights"] + parts["gradients"] + parts["optimizer"]
    return parts | {"in_all": kept + max(parts["training"], parts["sampling"])}


def _trained(model: ModelConfig, shape: Shape) -> int:
    if model.lora_rank:
        return shape.adapter_weights(model.lora_rank)
    return shape.linear_weights + shape.embedding_weights


def _frozen_bytes(model: ModelConfig, shape: Shape) -> int:
    """Of the base weights under adapters; a model that trains whole has none."""
    if not model.lora_rank:
        return 0
    each = VALUE_BYTES[model.precision]
    linear = FOUR_BIT_BYTES if model.load_in_4bit else each
    return int(linear * shape.linear_weights) + each * shape.embedding_weights


def _training_bytes(config: Config, shape: Shape) -> int:
    """Activations of a full micro-batch, and logits of a chunk of it."""
    tokens, each = config.micro_batch_tokens, VALUE_BYTES[config.model.precision]
    per_layer = each * (6 * shape.hidden + 2 * shape.key_value_width + 4 * shape.intermediate)
    if config.model.gradient_checkpointing:
        activations = tokens * (shape.layers * each * shape.hidden + LAYER_COPIES * per_layer)
    else:
        activations = tokens * shape.layers * per_layer
    chunk = min(config.logprob_chunk or tokens, tokens)
    return activations + LOGIT_COPIES * 4 * chunk * shape.vocabulary


def _sampling_bytes(config: Config, shape: Shape, num_ranks: int) -> int:
    """Keys and values within the engine's budget, and logits of a token of every row. Prompts are not counted."""
    group_size = max(group_sizes(config.group_size, config.group_size_schedule))
    rows = min(config.engine.max_rows, -(-config.groups_per_step // num_ranks) * group_size)
    slot = 2 * shape.layers * shape.key_value_width * VALUE_BYTES[config.model.precision]
    cache = min(config.engine.cache_bytes, rows * config.sampling.max_tokens * slot)
    return cache + LOGIT_COPIES * 4 * rows * shape.vocabulary


SHAPES: Mapping[str, Shape] = {
    "Qwen2.5-0.5B": Shape(896, 24, 14, 2, 4864, 151936, tied=True),
    "Qwen2.5-1.5B": Shape(1536, 28, 12, 2, 8960, 151936, tied=True),
    "Qwen2.5-3B": Shape(2048, 36, 16, 2, 11008, 151936, tied=True),
    "Qwen2.5-7B": Shape(3584, 28, 28, 4, 18944, 152064),
    "Qwen2.5-14B": Shape(5120, 48, 40, 8, 13824, 152064),
}
"""By the end of the name, without "-Instruct"."""
