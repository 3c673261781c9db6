"""Name the parts of layers that layer.c computes, by family.

A layer mixes tokens, by attention or by a layer with a state, and has a gated product behind; Nemotron-H has one of
both in each. A family that is not named here is decoded module by module.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers.activations import ReLUSquaredActivation, SiLUActivation
from transformers.models.granitemoehybrid.modeling_granitemoehybrid import GraniteMoeHybridModel
from transformers.models.lfm2.modeling_lfm2 import Lfm2Model
from transformers.models.llama.modeling_llama import LlamaModel
from transformers.models.mistral.modeling_mistral import MistralModel
from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHModel
from transformers.models.qwen2.modeling_qwen2 import Qwen2Model
from transformers.models.qwen3.modeling_qwen3 import Qwen3Model
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5TextModel

from covey.engine.native.models.mixed import mixed_of


@dataclass(frozen=True, slots=True)
class Family:
    """Names of a base model's parts, and of its layers'."""

    norms: tuple[str, ...] = ("input_layernorm", "post_attention_layernorm")
    """Before the mixing, and before what is behind it; one where a layer has one of both."""
    attention: str = "self_attn"
    mixer: str = "linear_attn"
    inner: str = "mlp"
    inner_parts: tuple[str, ...] = ("gate_proj", "up_proj", "down_proj")
    head_norms: tuple[str, ...] = ("q_norm", "k_norm")
    output: str = "o_proj"
    embedding: str = "embed_tokens"
    final_norm: str = "norm"
    rotary: str = "rotary_emb"
    """A model without positions has none."""
    others: tuple[str, ...] = ()
    """Parts of a layer that layer.c does not compute: there must be none."""


LLAMA = Family()
OF_LLAMA = (LlamaModel, MistralModel, Qwen2Model, Qwen3Model)
FAMILIES: Mapping[type[nn.Module], Family] = {
    **dict.fromkeys((*OF_LLAMA, Qwen3_5TextModel), LLAMA),
    Lfm2Model: Family(
        norms=("operator_norm", "ffn_norm"),
        mixer="conv",
        inner="feed_forward",
        inner_parts=("w1", "w3", "w2"),
        head_norms=("q_layernorm", "k_layernorm"),
        output="out_proj",
        final_norm="embedding_norm",
    ),
    NemotronHModel: Family(
        norms=("norm",),
        attention="mixer",
        mixer="mixer",
        inner="mixer",
        inner_parts=("up_proj", "down_proj"),
        embedding="embeddings",
        final_norm="norm_f",
    ),
    GraniteMoeHybridModel: Family(
        mixer="mamba",
        inner="shared_mlp",
        inner_parts=("input_linear", "output_linear"),
        others=("block_sparse_moe",),
    ),
}


@dataclass(frozen=True, slots=True)
class LayerParts:
    """Modules of a layer; empty lists stand for absent parts."""

    norms: list[Any]
    into: list[Any]
    """Linear layers of one input that begin the mixing."""
    output: list[Any]
    inner: list[Any]
    """Linear layers behind: gate, up and down, or without a gate."""
    attention: Any = None
    mixer: Any = None
    head_norms: Sequence[Any] = ()
    scale: float = 1.0
    """Factor on what is added to the hidden states."""

    @property
    def linear(self) -> list[Any]:
        return [*self.into, *self.output, *self.inner]


def parts_of(layer: Any, family: Family) -> LayerParts | None:
    """Return the parts of a layer, None where layer.c cannot compute it."""
    held, scale = layer._modules, float(vars(layer).get("residual_multiplier", 1.0))
    if any(held.get(name) is not None for name in family.others):
        return None
    attention, mixer = held.get(family.attention), held.get(family.mixer)
    norms = [held[name] for name in family.norms]
    inner = _inner_parts(held.get(family.inner), family)
    if len(norms) == 2 and not inner:
        return None
    if attention is not None and "q_proj" in attention._modules:
        into = [attention.q_proj, attention.k_proj, attention.v_proj]
        of_heads = [attention._modules[name] for name in family.head_norms if name in attention._modules]
        output = [attention._modules[family.output]]
        return LayerParts(norms, into, output, inner, attention, head_norms=of_heads, scale=scale)
    if mixed := mixed_of(mixer):
        into = [mixer._modules[name] for name in mixed.into]
        return LayerParts(norms, into, [mixer.out_proj], inner, mixer=mixer, scale=scale)
    return LayerParts(norms, [], [], inner) if inner and len(norms) == 1 else None


def _inner_parts(inner: Any, family: Family) -> list[Any]:
    """Return the linear layers behind the mixing, if known."""
    if inner is None or not set(family.inner_parts) <= set(inner._modules):
        return []
    parts = [inner._modules[name] for name in family.inner_parts]
    act = inner._modules.get("act_fn", inner._modules.get("activation"))  # LFM2's is a function
    known = (nn.SiLU, SiLUActivation, type(None)) if has_gate(parts) else ReLUSquaredActivation
    return parts if isinstance(act, known) else []


def has_gate(inner: Sequence[Any]) -> bool:
    """Return True where a gate stands before `up`, or in one layer with it."""
    return len(inner) == 3 or (len(inner) == 2 and int(inner[0].out_features) == 2 * int(inner[1].in_features))


def norm_offset(norm: Any) -> float:
    """Return a norm's offset of its weight: 0, or 1 in Qwen3.5.

    ValueError for a norm of another form.
    """
    weight_C = norm.weight.detach().float()
    probe_C = torch.where(torch.arange(len(weight_C)) % 2 == 0, 2.0, -2.0)
    with torch.no_grad():
        found_C = norm(probe_C[None]).float()[0] * probe_C.sign()
    for offset in (0.0, 1.0):
        if torch.allclose(found_C, weight_C + offset, rtol=1e-2, atol=1e-2):
            return offset
    raise ValueError(f"norms must be of a root of mean squares, got {type(norm).__name__}")


def eps_of(norm: Any) -> float:
    """Return a norm's epsilon."""
    return float(vars(norm)["variance_epsilon" if "variance_epsilon" in vars(norm) else "eps"])
