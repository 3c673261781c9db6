"""Norms, gates and rotary positions through Liger's Triton kernels (arXiv 2410.10989).

The modules that `layers` replaces get classes of their own; weights keep their names. On a host tensor, as when the
model is probed before sharding, they compute as before.
"""

from typing import Any

import torch
from torch import Tensor, nn

from covey.policy.kernels.gpu.residual import add_norm
from covey.policy.kernels.layers import (
    COMPILED,
    LAYERS,
    CastsOnce,
    CompiledAttention,
    CompiledMLP,
    CompiledNorm,
    compiled_class,
)
from covey.policy.kernels.support import product_type
from covey.policy.settings import chooses_liger


class _OnGpu(CastsOnce):
    device_type = "cuda"

    def _computes(self, hidden_states: Tensor) -> bool:
        return hidden_states.is_cuda and hidden_states.dtype != torch.float64  # its kernels add up in float32


class _Norm(_OnGpu):
    weight: nn.Parameter
    variance_epsilon: float

    def _norm_input(self, hidden_states: Tensor) -> Tensor:
        from liger_kernel.ops import LigerRMSNormFunction

        # Not in place: the gradient that comes in may be read by others.
        how = (self.variance_epsilon, 0.0, "llama", False, None)
        return LigerRMSNormFunction.apply(hidden_states, self.weight, *how)


class _Mlp(_OnGpu):
    def _gate(self, gate: Tensor, up: Tensor) -> Tensor:
        from liger_kernel.ops import LigerSiLUMulFunction

        return LigerSiLUMulFunction.apply(gate, up, 1.0, 1.0)


class _Attention(_OnGpu):
    def _rotate(self, query_BTHD: Tensor, key_BTHD: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        from liger_kernel.transformers.rope import liger_rotary_pos_emb

        heads = query_BTHD.transpose(1, 2), key_BTHD.transpose(1, 2)
        query_BHTD, key_BHTD = liger_rotary_pos_emb(*heads, cos, sin)
        return query_BHTD.transpose(1, 2), key_BHTD.transpose(1, 2)


class _Layer:
    input_layernorm: nn.Module
    post_attention_layernorm: nn.Module
    self_attn: nn.Module
    mlp: nn.Module

    def forward(self, hidden_states: Tensor, **keywords: Any) -> Tensor:
        norms, parts = (self.input_layernorm, self.post_attention_layernorm), (self.self_attn, self.mlp)
        if not all(isinstance(norm, _Norm) and norm._computes(hidden_states) for norm in norms):
            return super().forward(hidden_states, **keywords)  # type: ignore[misc]  # of the class beside it
        hidden_states, normed = _add_norm(hidden_states, None, norms[0])
        attended, _ = parts[0](hidden_states=normed, **keywords)
        hidden_states, normed = _add_norm(hidden_states, attended, norms[1])
        return hidden_states + parts[1](normed)


def _add_norm(hidden_BTC: Tensor, delta_BTC: Tensor | None, norm: Any) -> tuple[Tensor, Tensor]:
    """Apply `residual.add_norm` in the type of the products that follow."""
    delta_NC = None if delta_BTC is None else delta_BTC.flatten(0, 1)
    how = norm.weight, norm.variance_epsilon, product_type("cuda", hidden_BTC.dtype)
    sum_NC, normed_NC = add_norm(hidden_BTC.flatten(0, 1), delta_NC, *how)
    return sum_NC.view_as(hidden_BTC), normed_NC.view_as(hidden_BTC)


JOINED: dict[type[nn.Module], type[nn.Module]] = {
    kind: type(f"Liger{kind.__name__}", (_Layer, kind), {}) for kind in LAYERS
}

PARTS: dict[type[nn.Module], type[Any]] = {CompiledNorm: _Norm, CompiledMLP: _Mlp, CompiledAttention: _Attention}
LIGER = {
    compiled: type(f"Liger{kind.__name__}", (PARTS[compiled.__bases__[0]], compiled), {})
    for kind, compiled in COMPILED.items()
}
# pickle and torch.save find a class by its name in this module
globals().update({made.__name__: made for made in (*JOINED.values(), *LIGER.values())})


def is_wanted(kernels: str, precision: torch.dtype, device: torch.device) -> bool:
    """Return True where model.kernels asks for Liger, or `auto` chooses it."""
    return kernels == "liger" or (device.type == "cuda" and chooses_liger(kernels, is_half=precision.itemsize == 2))


def use_liger(model: nn.Module, device: torch.device, compiles: bool = False) -> None:
    """Let modules compute through Liger, in place. ValueError without a GPU.

    `compiles`: layers fuse their sums and norms in functions that torch compiles.
    """
    if device.type != "cuda":
        raise ValueError(f"model.kernels=liger needs a GPU, got model.device={device.type}; take model.kernels=auto")
    for module in model.modules():
        if compiled := compiled_class(module):
            module.__class__ = LIGER[compiled]
        elif compiles and type(module) in JOINED:
            module.__class__ = JOINED[type(module)]
