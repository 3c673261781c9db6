"""Name the parts of layers that layer.c computes, by family.

A layer mixes tokens, by attention, by a layer with a state or by both side by side, and has a gated product behind;
Nemotron-H has one of these in each. A family that is not named here is decoded module by module.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers.activations import ReLUSquaredActivation, SiLUActivation

from covey.engine.native.models.mixed import mixed_of, own_name

ROLES = ("before", "mixed", "after", "end")
"""Places of norms: before the mixing, of its result, before the products behind, of their result."""
Factors = Mapping[str, tuple[float, Tensor | float]]
"""Numbers that multiply the input of a linear layer, and its outputs, by its name."""


@dataclass(frozen=True, slots=True)
class Family:
    """Names of a base model's parts, and of its layers'."""

    norms: tuple[tuple[str, str, str, str], ...] = (("input_layernorm", "", "post_attention_layernorm", ""),)
    """Names of norms by role, "" for none; a layer has the first of the sets that it has all of."""
    attention: str = "self_attn"
    mixer: str = "linear_attn"
    inner: str = "mlp"
    """One name for all three: each layer has one of them."""
    inner_parts: tuple[str, ...] = ("gate_proj", "up_proj", "down_proj")
    head_norms: tuple[str, ...] = ("q_norm", "k_norm")
    output: str = "o_proj"
    embedding: str = "embed_tokens"
    final_norm: str = "norm"
    rotary: str = "rotary_emb"
    """A model without positions has none."""
    others: tuple[str, ...] = ()
    """Parts of a layer that layer.c does not compute: there must be none."""
    factors: Callable[[Any], Factors] = lambda layer: {}
    """Returns a layer's multipliers."""


@dataclass(frozen=True, slots=True)
class LayerParts:
    """Modules of a layer; empty lists stand for absent parts."""

    norms: Mapping[str, Any]
    """Norms by role."""
    heads: list[Any]
    """Linear layers before attention: queries, keys, values and gates, if any."""
    into_mixer: list[Any]
    """Linear layers before the convolution of a layer with a state."""
    output: list[Any]
    """Linear layers whose outputs are added: that of attention, and that of a layer with a state."""
    inner: list[Any]
    """Linear layers behind: gate, up and down, or without a gate."""
    attention: Any
    mixer: Any
    head_norms: Sequence[Any]
    scale: float
    """Factor on what is added to the hidden states."""
    factors: Mapping[nn.Module, tuple[float, Tensor | float]]
    """Numbers that multiply inputs and outputs of linear layers."""

    @property
    def linear(self) -> list[Any]:
        return [*self.heads, *self.into_mixer, *self.output, *self.inner]


def parts_of(layer: Any, family: Family) -> LayerParts | None:
    """Return the parts of a layer, None where layer.c cannot compute it."""
    held = {name: part for name, part in layer._modules.items() if part is not None}
    attention, mixer = held.get(family.attention), held.get(family.mixer)
    attention = attention if attention is not None and "q_proj" in attention._modules else None
    mixed = mixed_of(mixer)
    inner = _inner_parts(held.get(family.inner), family)
    norms = _norms_of(held, family)
    places = {name for name in (family.attention, family.mixer, family.inner) if name in held}
    num_known = (attention is not None) + (mixed is not None) + bool(inner)
    if num_known < max(len(places), 1) or norms is None or any(name in held for name in family.others):
        return None
    heads, output, of_heads = _attention_parts(attention, family)
    into_mixer = []
    if mixer is not None and mixed is not None:
        into_mixer = [mixer._modules[name] for name in mixed.into]
        output.append(mixer._modules[mixed.output])
    factors = {layer.get_submodule(name): each for name, each in family.factors(layer).items()}
    scale, known = float(vars(layer).get("residual_multiplier", 1.0)), None if mixed is None else mixer
    return LayerParts(norms, heads, into_mixer, output, inner, attention, known, of_heads, scale, factors)


def _norms_of(held: Mapping[str, Any], family: Family) -> dict[str, Any] | None:
    """Return a layer's norms by role, None without one epsilon."""
    names = next((names for names in family.norms if {*names} - {""} <= {*held}), ("",) * len(ROLES))
    norms = {role: held[name] for role, name in zip(ROLES, names, strict=True) if name}
    norms = {role: norm for role, norm in norms.items() if not isinstance(norm, nn.Identity)}
    return norms if len({eps_of(norm) for norm in norms.values()}) == 1 else None


def _attention_parts(attention: Any, family: Family) -> tuple[list[Any], list[Any], list[Any]]:
    """Return linear layers before and behind attention, and norms of heads."""
    if attention is None:
        return [], [], []
    held = {name: part for name, part in attention._modules.items() if part is not None}
    heads = [held[name] for name in ("q_proj", "k_proj", "v_proj", "g_proj") if name in held]
    return heads, [held[family.output]], [held[name] for name in family.head_norms if name in held]


def _inner_parts(inner: Any, family: Family) -> list[Any]:
    """Return the linear layers behind the mixing, if known."""
    if inner is None or not set(family.inner_parts) <= set(inner._modules):
        return []
    parts = [inner._modules[name] for name in family.inner_parts]
    act = inner._modules.get("act_fn", inner._modules.get("activation"))  # LFM2's is a function
    known = (nn.SiLU, SiLUActivation, type(None)) if has_gate(parts) else ReLUSquaredActivation
    return parts if isinstance(act, known) else []


def has_gate(inner: Sequence[Any]) -> bool:
    """Return True for a gate before `up`, or in one layer with it."""
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
    return float(vars(norm)["variance_epsilon" if "variance_epsilon" in vars(norm) else "eps"])


def family_of(model: nn.Module) -> Family | None:
    """Return a base model's family, None where it is not named here."""
    return FAMILIES.get(own_name(model))


def _falcon_factors(layer: Any) -> Factors:
    attention, mixer, inner = layer.self_attn, layer.mamba, layer.feed_forward
    into = float(layer.attention_in_multiplier)
    return {
        **{f"self_attn.{name}": (into, 1.0) for name in ("q_proj", "v_proj")},
        "self_attn.k_proj": (into, float(attention.key_multiplier)),
        "self_attn.o_proj": (1.0, float(layer.attn_out_multiplier)),
        "mamba.in_proj": (float(mixer.ssm_in_multiplier), mixer.mup_vector.flatten()),
        "mamba.out_proj": (1.0, float(layer.ssm_out_multiplier)),
        "feed_forward.gate_proj": (1.0, float(inner.gate_multiplier)),
        "feed_forward.down_proj": (1.0, float(inner.down_multiplier)),
    }


LLAMA = Family()
OF_LLAMA = ("LlamaModel", "MistralModel", "Qwen2Model", "Qwen3Model")
LFM2 = Family(
    norms=(("operator_norm", "", "ffn_norm", ""),),
    mixer="conv",
    inner="feed_forward",
    inner_parts=("w1", "w3", "w2"),
    head_norms=("q_layernorm", "k_layernorm"),
    output="out_proj",
    final_norm="embedding_norm",
)
BAMBA = Family(
    norms=(("input_layernorm", "", "pre_ff_layernorm", ""),),
    mixer="mamba",
    inner="feed_forward",
    final_norm="final_layernorm",
)
FAMILIES: Mapping[str, Family] = {
    **dict.fromkeys((*OF_LLAMA, "Qwen3_5TextModel"), LLAMA),
    "OlmoHybridModel": Family(
        norms=(("", "post_attention_layernorm", "", "post_feedforward_layernorm"), *LLAMA.norms),
    ),
    "Lfm2Model": LFM2,
    "Lfm3Model": replace(
        LFM2,
        norms=(("operator_norm", "post_operator_norm", "ffn_norm", "post_ffn_norm"),),
        head_norms=LLAMA.head_norms,
        output=LLAMA.output,
    ),
    "NemotronHModel": Family(
        norms=(("norm", "", "norm", ""),),
        attention="mixer",
        mixer="mixer",
        inner="mixer",
        inner_parts=("up_proj", "down_proj"),
        embedding="embeddings",
        final_norm="norm_f",
    ),
    "GraniteMoeHybridModel": Family(
        mixer="mamba",
        inner="shared_mlp",
        inner_parts=("input_linear", "output_linear"),
        others=("block_sparse_moe",),
    ),
    "BambaModel": BAMBA,
    "FalconH1Model": replace(BAMBA, factors=_falcon_factors),
}
