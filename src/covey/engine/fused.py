"""A decoder layer of Llama's family in nine calls, for passes without gradient: six products and three functions of C.

As transformers write it, a layer is some forty operations around its products and its attention. In decoding they take
as long as the products: a step has one token a row. Here queries, keys and values are one product, norms and rotary
positions are functions of decode.c, and activation, gate and residual are part of the products where oneDNN computes
them. The numbers are the layer's own but for rounding.

Shapes: T tokens of the stream (B = 1), C hidden width, H query heads, K key/value heads, D head width.
"""

import ctypes
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers.activations import SiLUActivation
from transformers.models.llama.modeling_llama import LlamaDecoderLayer
from transformers.models.mistral.modeling_mistral import MistralDecoderLayer
from transformers.models.qwen2.modeling_qwen2 import Qwen2DecoderLayer
from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer

from covey.compiling import library
from covey.engine.compiled import SOURCE
from covey.policy.attention import Layout, Rule
from covey.policy.linear import MergedLinear, OneDnnLinear, PackedLinear

FAMILY = (LlamaDecoderLayer, MistralDecoderLayer, Qwen2DecoderLayer, Qwen3DecoderLayer)
"""Layers of exactly this form; Qwen3's has norms of queries and keys besides."""

WeightOf = Callable[[nn.Module], tuple[Tensor, Tensor | None]]
"""Weight (O, I), adapters merged in, and bias (O,) of a linear layer."""

Product = PackedLinear | MergedLinear


class Rotation(ctypes.Structure):
    """The struct of the same name in decode.c."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("heads", "cosines", "sines", "query_norm", "key_norm")),
        *((name, ctypes.c_int64) for name in ("rows", "num_heads", "num_queries", "num_rotated", "width")),
        ("num_threads", ctypes.c_int64),
        ("eps", ctypes.c_float),
    )


class FusedLayer(nn.Module):
    """Stands in for a layer of FAMILY; `take` renews its weights."""

    def __init__(self, layer: Any, rule: Rule, weight_of: WeightOf) -> None:
        super().__init__()
        self._rule, self._weight_of = rule, weight_of
        self._layer_index, self._width = int(layer.self_attn.layer_idx), int(layer.self_attn.head_dim)
        parts = _parts(layer)
        self._num_queries, self._num_keys = (len(weight_of(linear)[0]) // self._width for linear in parts[0][:2])
        self._products: list[Product] = [_product(part, weight_of) for part in parts]
        self._norms = [layer.input_layernorm, layer.post_attention_layernorm]
        has_norms = type(layer) is Qwen3DecoderLayer
        self._head_norms = [layer.self_attn.q_norm, layer.self_attn.k_norm] if has_norms else []
        self._c = library(SOURCE)

    def take(self, layer: Any) -> None:
        """The layer's weights as they are now; norms are shared."""
        for product, part in zip(self._products, _parts(layer), strict=True):
            product.take(*_joined(part, self._weight_of))

    def forward(self, hidden_states: Tensor, *, position_embeddings: Any, layout: Layout, **keywords: Any) -> Tensor:
        """(1, T, C) to (1, T, C), as transformers call a layer."""
        qkv, output, gate, up, down = self._products
        hidden_TC = hidden_states[0].contiguous()
        attended_TC = self._attend(qkv(self._normed(0, hidden_TC)), position_embeddings, layout)
        hidden_TC = output.plus(attended_TC, hidden_TC)
        normed_TC = self._normed(1, hidden_TC)
        return down.plus(up.times(normed_TC, gate.swish(normed_TC)), hidden_TC)[None]

    def _attend(self, qkv: Tensor, position_embeddings: tuple[Tensor, Tensor], layout: Layout) -> Tensor:
        heads_THD = qkv.view(len(qkv), -1, self._width)
        self._rotate(heads_THD, *(angles[0].contiguous() for angles in position_embeddings))
        sizes = (self._num_queries, self._num_keys, self._num_keys)
        query, key, value = (part.transpose(0, 1)[None] for part in heads_THD.split(sizes, dim=1))
        out_HTD = layout.attend(self._layer_index, query, key, value, self._rule)[0]
        return out_HTD.transpose(0, 1).flatten(1)

    def _rotate(self, heads_THD: Tensor, cosines_TD: Tensor, sines_TD: Tensor) -> None:
        """Norms and rotary positions of queries and keys, in place."""
        norms = [norm.weight.data_ptr() for norm in self._head_norms] or [None, None]
        rows, num_heads, width = heads_THD.shape
        rotation = Rotation(
            *(heads_THD.data_ptr(), cosines_TD.data_ptr(), sines_TD.data_ptr(), *norms),
            *(rows, num_heads, self._num_queries, self._num_queries + self._num_keys, width),
            torch.get_num_threads(),
            self._head_norms[0].variance_epsilon if self._head_norms else 0.0,
        )
        self._c.covey_rotate(ctypes.byref(rotation))

    def _normed(self, which: int, hidden_TC: Tensor) -> Tensor:
        norm, out_TC = self._norms[which], torch.empty_like(hidden_TC)
        pointers = (ctypes.c_void_p(tensor.data_ptr()) for tensor in (hidden_TC, norm.weight, out_TC))
        size = (ctypes.c_int64(length) for length in hidden_TC.shape)
        eps, num_threads = ctypes.c_float(norm.variance_epsilon), ctypes.c_int64(torch.get_num_threads())
        self._c.covey_rms_norm(*pointers, *size, eps, num_threads)
        return out_TC


def is_fusable(layer: Any) -> bool:
    """Whether the layer has exactly the form that a FusedLayer computes."""
    return type(layer) in FAMILY and isinstance(layer.mlp.act_fn, nn.SiLU | SiLUActivation)


def linear_layers(layer: Any) -> list[nn.Module]:
    """In this order: queries, keys, values, output, gate, up, down."""
    return [linear for part in _parts(layer) for linear in part]


def _parts(layer: Any) -> list[list[nn.Module]]:
    """Linear layers that are computed as one product."""
    attention, mlp = layer.self_attn, layer.mlp
    qkv = [attention.q_proj, attention.k_proj, attention.v_proj]
    return [qkv, [attention.o_proj], [mlp.gate_proj], [mlp.up_proj], [mlp.down_proj]]


def _joined(part: list[nn.Module], weight_of: WeightOf) -> tuple[Tensor, Tensor | None]:
    weights, biases = zip(*(weight_of(linear) for linear in part), strict=True)
    if len(part) == 1:
        return weights[0], biases[0]
    return torch.cat(weights), None if biases[0] is None else torch.cat(biases)


@torch.no_grad()
def _product(part: list[nn.Module], weight_of: WeightOf) -> Product:
    linears = [linear if isinstance(linear, nn.Linear) else linear.base_layer for linear in part]
    kind = PackedLinear if all(type(linear) is OneDnnLinear for linear in linears) else MergedLinear
    return kind(*_joined(part, weight_of))
