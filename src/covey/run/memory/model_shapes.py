"""Shapes of models, counted without storage for weights."""

import json
import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from covey.policy.settings import NANO, ModelConfig
from covey.system.lookup import read_table

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

LOGGER = logging.getLogger(__name__)

ALL_LINEAR = ("all-linear",)


@dataclass(frozen=True, slots=True)
class Layer:
    """A linear layer or an embedding."""

    name: str
    inputs: int
    outputs: int
    biases: int
    is_linear: bool
    is_head: bool
    """It is the output head, which adapters and quantisation leave out."""


@dataclass(frozen=True, slots=True)
class Shape:
    """The size of a model.

    >>> shape_of(ModelConfig(name="Qwen/Qwen3-0.6B")).weights
    596049920
    """

    weights: int
    """All that text meets, those of a tied head once."""
    layers: tuple[Layer, ...]
    depth: int
    hidden: int
    vocabulary: int
    key_value_width: int
    """Numbers that are cached of a token in all layers, keys and values."""
    expert_width: int = 0
    """Width of a mixture of experts: numbers between the two products of those experts that a token goes through."""
    num_heads: int = 1
    """Query heads of a layer."""
    has_head_norms: bool = False
    """Queries and keys are normalised head by head."""
    beside: int = 0
    """Weights that text never meets, as a tower for pictures has them: frozen."""
    has_kernels: bool = False
    """Norms and gates are of classes that kernels of covey's or Liger's compute."""

    @property
    def body(self) -> tuple[Layer, ...]:
        return tuple(layer for layer in self.layers if layer.is_linear and not layer.is_head)

    @property
    def linear_weights(self) -> int:
        return sum(layer.inputs * layer.outputs for layer in self.body)

    @property
    def cast_weights(self) -> int:
        """Count the weights that half precision casts."""
        return sum(layer.inputs * layer.outputs + layer.biases for layer in self.layers if layer.is_linear)

    def adapted(self, targets: Sequence[str]) -> tuple[Layer, ...]:
        if tuple(targets) == ALL_LINEAR:
            return self.body
        return tuple(x for x in self.layers if any(x.name == t or x.name.endswith(f".{t}") for t in targets))

    def adapter_weights(self, rank: int, targets: Sequence[str] = ALL_LINEAR) -> int:
        return sum(rank * (layer.inputs + layer.outputs) for layer in self.adapted(targets))


def shape_of(model: ModelConfig) -> Shape | None:
    """Return a model's shape from disk or by name. None for others."""
    config = _config_of(model.name, model.revision)
    if config is None:
        return None
    import torch

    from covey.policy.models.text_part import auto_class

    # On the meta device no weight is allocated
    make = auto_class(model.kind, config)
    try:
        with torch.device("meta"):
            return count_shape(make.from_config(config))
    except Exception as error:  # a configuration that its own class cannot build
        LOGGER.info("the memory of %s is not known: %s", model.name, error)
        return None


def count_shape(model: "PreTrainedModel") -> Shape:
    """Count a model's layers and widths, with or without storage."""
    from covey.policy.kernels.layers import compiled_class
    from covey.policy.models.text_part import beside_text

    text = model.config.get_text_config()
    values: Mapping[str, Any] = text.to_dict()
    # Widths of attention: from the projections where they have the usual names, else from the configuration
    beside = beside_text(model)
    layers = tuple(layer for layer in _layers(model) if f"{layer.name}.weight" not in beside)
    heads = text.num_attention_heads
    head_width = values.get("head_dim") or text.hidden_size // heads
    keys_and_values = [x.outputs for x in layers if x.name.rpartition(".")[2] in ("k_proj", "v_proj")]
    of_config = 2 * text.num_hidden_layers * head_width * (values.get("num_key_value_heads") or heads)
    expert_width = values.get("moe_intermediate_size") or values.get("intermediate_size") or 0
    return Shape(
        weights=sum(weight.numel() for name, weight in model.named_parameters() if name not in beside),
        beside=sum(model.get_parameter(name).numel() for name in beside),
        layers=layers,
        depth=text.num_hidden_layers,
        hidden=text.hidden_size,
        vocabulary=next(x.inputs for x in layers if not x.is_linear),
        key_value_width=sum(keys_and_values) or of_config,
        expert_width=expert_width * (values.get("num_experts_per_tok") or 0),
        num_heads=heads,
        has_kernels=any(compiled_class(module) is not None for module in model.modules()),
        has_head_norms=any(name.endswith((".q_norm", ".k_norm")) for name, _ in model.named_modules()),
    )


def _layers(model: "PreTrainedModel") -> Iterator[Layer]:
    from torch import nn
    from transformers.pytorch_utils import Conv1D

    head = model.get_output_embeddings()
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):
            biases = 0 if module.bias is None else module.out_features
            yield Layer(name, module.in_features, module.out_features, biases, True, module is head)
        elif isinstance(module, Conv1D):
            yield Layer(name, module.nx, module.nf, module.nf, True, module is head)
        elif isinstance(module, nn.Embedding):
            yield Layer(name, module.num_embeddings, module.embedding_dim, 0, False, False)


def _config_of(name: str, revision: str | None) -> "PreTrainedConfig | None":
    """Return the configuration of a folder, cached or public model."""
    if name in NANO:  # too small to plan for
        return None
    from transformers import AutoConfig

    base = name
    try:
        base = _base_of(name)
        found: PreTrainedConfig = AutoConfig.from_pretrained(
            base, revision=revision, local_files_only=True, trust_remote_code=False
        )
    except Exception:  # whatever the files hold: loading says what is wrong with them
        dimensions = dict(PUBLIC.get(_family_name(base), {}))
        return AutoConfig.for_model(dimensions.pop("kind"), **dimensions) if dimensions else None
    return found


def _base_of(name: str) -> str:
    """Return the model below saved adapters, else the model itself."""
    file = Path(name) / "adapter_config.json"
    if not file.is_file():
        return name
    from covey.policy.models.adapters import base_of

    return str(base_of(Path(name), json.loads(file.read_text()).get("base_model_name_or_path")) or name)


def _family_name(name: str) -> str:
    """Return the name without owner and irrelevant parts.

    >>> _family_name("Qwen/Qwen2.5-Coder-0.5B-Instruct")
    'qwen2.5-0.5b'
    """
    own = name.rpartition("/")[2].lower().removeprefix("meta-")
    return re.sub(r"-(instruct|base|coder|math|thinking|\d{4}|bnb|unsloth|4bit)(?=-|$)", "", own)


PUBLIC: Mapping[str, dict[str, Any]] = read_table(Path(__file__).with_name("shapes.yaml"))
"""Shapes of models by `_family_name`: those of others are read from a configuration on disk."""
