"""Layers of Llama's family in C (elementwise.c), with and without gradient.

A module of a known class takes a subclass of it; weights keep their names. Types other than float32 and bfloat16 on a
CPU are computed as before. Under autocast, norms have the type of the products they enter.

Shapes: B sequences, T tokens, H heads, D head width.
"""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.activations import SiLUActivation
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaDecoderLayer, LlamaMLP, LlamaRMSNorm
from transformers.models.mistral.modeling_mistral import (
    MistralAttention,
    MistralDecoderLayer,
    MistralMLP,
    MistralRMSNorm,
)
from transformers.models.qwen2.modeling_qwen2 import Qwen2Attention, Qwen2DecoderLayer, Qwen2MLP, Qwen2RMSNorm
from transformers.models.qwen3.modeling_qwen3 import Qwen3Attention, Qwen3DecoderLayer, Qwen3MLP, Qwen3RMSNorm

from covey.policy.attention.base import ATTENTION, attention
from covey.policy.kernels.blocks import Projection, add_gated, layers_of, project
from covey.policy.kernels.elementwise import add_norm, apply_gate, rms_norm, rotate
from covey.policy.kernels.linear import OneDnnLinear
from covey.policy.kernels.support import product_type, unsupported_reason


class CastsOnce:
    device_type = "cpu"

    def _cast_once(self, x: Tensor) -> Tensor:
        """Cast once for all the products that x enters."""
        return x.to(product_type(self.device_type, x.dtype))


class CompiledNorm(nn.Module):
    weight: nn.Parameter
    variance_epsilon: float

    def forward(self, hidden_states: Tensor) -> Tensor:
        if self._computes(hidden_states):
            return self._norm_input(hidden_states)
        return super().forward(hidden_states)  # of the class beside it

    def _computes(self, hidden_states: Tensor) -> bool:
        return _is_known(hidden_states, self.weight)

    def _norm_input(self, hidden_states: Tensor) -> Tensor:
        return rms_norm(hidden_states, self.weight, self.variance_epsilon, self._out_type(hidden_states))

    def _out_type(self, hidden_states: Tensor) -> torch.dtype:
        return product_type("cpu", torch.promote_types(hidden_states.dtype, self.weight.dtype))


class CompiledLayer(nn.Module):
    """Adds attention's output in the pass of the norm that follows."""

    def forward(self: Any, hidden_states: Tensor, **keywords: Any) -> Any:
        norm = self.post_attention_layernorm
        if not (isinstance(norm, CompiledNorm) and norm._computes(hidden_states)):
            return super().forward(hidden_states, **keywords)  # of the class beside it
        attended, _ = self.self_attn(hidden_states=self.input_layernorm(hidden_states), **keywords)
        how = norm.weight, norm.variance_epsilon, norm._out_type(hidden_states)
        hidden_states, normed = add_norm(hidden_states, attended, *how)
        return _add_mlp(hidden_states, self.mlp, normed)


class CompiledMLP(CastsOnce, nn.Module):
    gate_proj: nn.Linear
    up_proj: nn.Linear
    down_proj: nn.Linear

    def forward(self, x: Tensor) -> Tensor:
        if not self._computes(x):
            return super().forward(x)  # of the class beside it
        x = self._cast_once(x)
        gate, up = self.gate_proj(x), self.up_proj(x)
        return self.down_proj(self._gate(gate, up))

    def layers(self, x: Tensor) -> list[Projection]:
        """Return gate, up and down if C computes all, else none."""
        return layers_of(x, self.gate_proj, self.up_proj, self.down_proj) if self._computes(x) else []

    def _computes(self, x: Tensor) -> bool:
        return _is_known(x)

    def _gate(self, gate: Tensor, up: Tensor) -> Tensor:
        return apply_gate(gate, up)


class CompiledAttention(CastsOnce, nn.Module):
    config: Any
    head_dim: int
    scaling: float
    q_proj: nn.Linear
    k_proj: nn.Linear
    v_proj: nn.Linear
    o_proj: nn.Linear
    q_norm: nn.Module
    k_norm: nn.Module
    """Qwen3's; the others have none."""

    def forward(self, hidden_states: Tensor, *given: Any, position_embeddings: Any = None, **keywords: Any) -> Any:
        """Map (B, T, C) to (B, T, C), without attention weights."""
        is_known = not given and position_embeddings is not None and keywords.get("past_key_values") is None
        if not is_known or self.config._attn_implementation != ATTENTION or not self._computes(hidden_states):
            return super().forward(hidden_states, *given, position_embeddings=position_embeddings, **keywords)
        hidden_states = self._cast_once(hidden_states)
        heads = self._heads(hidden_states)
        query, key = self._rotate(*self._norm_input(*heads[:2]), *position_embeddings)
        turned = (part.transpose(1, 2) for part in (query, key, heads[2]))
        rule = {"scaling": self.scaling, "sliding_window": self._window(), "attention_mask": None}
        out_BTHD, _ = attention(self, *turned, **(keywords | rule))
        return self.o_proj(out_BTHD.flatten(2)), None

    def _computes(self, hidden_states: Tensor) -> bool:
        return _is_known(hidden_states)

    def _rotate(self, query_BTHD: Tensor, key_BTHD: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        query_BTHD, key_BTHD = rotate(cos, sin, query_BTHD, key_BTHD)
        return query_BTHD, key_BTHD

    def _heads(self, hidden_BTC: Tensor) -> list[Tensor]:
        """Return queries, keys and values, (B, T, H, D) each."""
        parts = self.q_proj, self.k_proj, self.v_proj
        layers = layers_of(hidden_BTC, *parts)
        made = project(hidden_BTC, layers) if layers else [part(hidden_BTC) for part in parts]
        return [heads.unflatten(-1, (-1, self.head_dim)) for heads in made]

    def _norm_input(self, query_BTHD: Tensor, key_BTHD: Tensor) -> tuple[Tensor, Tensor]:
        return (self.q_norm(query_BTHD), self.k_norm(key_BTHD)) if hasattr(self, "q_norm") else (query_BTHD, key_BTHD)

    def _window(self) -> int | None:
        """Return the layer's window, or the model's for Mistral; Llama has none."""
        holder = self.config if isinstance(self, MistralAttention) else self
        return getattr(holder, "sliding_window", None)


def _add_mlp(hidden: Tensor, mlp: nn.Module, normed: Tensor) -> Tensor:
    layers = mlp.layers(normed) if type(mlp) in COMPILED.values() and isinstance(mlp, CompiledMLP) else []
    return add_gated(hidden, normed, layers) if layers else hidden + mlp(normed)


def choose_kernels(model: PreTrainedModel, kernels: str, precision: torch.dtype, device: torch.device) -> None:
    """Use the C kernels where they apply on `device`, never with "torch".

    Never by a timing: a resumed run could choose differently, and lose bit-for-bit equality.
    """
    is_known = any(type(module) in COMPILED for module in model.modules())
    if kernels == "auto" and is_known and not unsupported_reason("layers", [(precision, device.type)]):
        use_compiled(model)


def use_compiled(model: nn.Module) -> None:
    """Replace norms, gates, rotary positions and weight gradients by C, in place."""
    for module in model.modules():
        if type(module) is OneDnnLinear:
            module.through_c = True
        if compiled := compiled_class(module) or ADDING.get(type(module)):
            module.__class__ = compiled


def compiled_class(module: nn.Module) -> type[nn.Module] | None:
    """Return the compiled class of a known module, None for others."""
    kind = type(module)
    if kind in GATED and not isinstance(module.act_fn, nn.SiLU | SiLUActivation):
        return None
    return COMPILED.get(kind)


def _is_known(*tensors: Tensor) -> bool:
    types = {product_type("cpu", torch.float32), *(tensor.dtype for tensor in tensors)}
    on_cpu = all(tensor.device.type == "cpu" for tensor in tensors)
    return on_cpu and types <= {torch.float32, torch.bfloat16} and tensors[0].numel() > 0


LAYERS = (LlamaDecoderLayer, MistralDecoderLayer, Qwen2DecoderLayer, Qwen3DecoderLayer)
"""Layers of exactly this form; Qwen3's have norms of queries and keys besides."""
GATED = (LlamaMLP, MistralMLP, Qwen2MLP, Qwen3MLP)
"""Taken only where the gate is a silu."""
PARTS: dict[type[nn.Module], tuple[type[nn.Module], ...]] = {
    CompiledNorm: (LlamaRMSNorm, MistralRMSNorm, Qwen2RMSNorm, Qwen3RMSNorm),
    CompiledMLP: GATED,
    CompiledAttention: (LlamaAttention, MistralAttention, Qwen2Attention, Qwen3Attention),
}
COMPILED: dict[type[nn.Module], type[nn.Module]] = {
    kind: type(f"Compiled{kind.__name__}", (part, kind), {}) for part, kinds in PARTS.items() for kind in kinds
}
ADDING: dict[type[nn.Module], type[nn.Module]] = {
    kind: type(f"Compiled{kind.__name__}", (CompiledLayer, kind), {}) for kind in LAYERS
}
# pickle and torch.save find a class by its name in this module
globals().update({made.__name__: made for made in (*COMPILED.values(), *ADDING.values())})
