"""A decoder layer of Llama's family as two functions of layer.c around its attention, for passes without gradient.

As transformers write it, a layer is some forty operations around its products and its attention. In decoding they take
as long as the products: a step has one token a row. The numbers are the layer's own but for rounding, and what a row
gets does not depend on the rows beside it.

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
from covey.engine.panels import BATCH, SOURCE, Panels, Product
from covey.policy.attention import Layout, Rule

FAMILY = (LlamaDecoderLayer, MistralDecoderLayer, Qwen2DecoderLayer, Qwen3DecoderLayer)
"""Layers of exactly this form; Qwen3's has norms of queries and keys besides."""

WeightOf = Callable[[nn.Module], tuple[Tensor, Tensor | None]]
"""Weight (O, I), adapters merged in, and bias (O,) of a linear layer."""


class Layer(ctypes.Structure):
    """The struct of the same name in layer.c."""

    _fields_ = (
        *((name, Product) for name in ("qkv", "output", "gate", "up", "down")),
        *((name, ctypes.c_void_p) for name in ("norm_before", "norm_after", "query_norm", "key_norm")),
        *((name, ctypes.c_int64) for name in ("hidden_width", "head_width", "num_queries", "num_keys", "half")),
        *((name, ctypes.c_float) for name in ("eps", "head_eps")),
    )


class Pass(ctypes.Structure):
    """The struct of the same name in layer.c."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("hidden", "cosines", "sines", "heads", "attended", "out")),
        *((name, ctypes.c_void_p) for name in ("normed", "gated")),
        *((name, ctypes.c_int64) for name in ("rows", "num_threads")),
    )


class FusedLayer(nn.Module):
    """Stands in for a layer of FAMILY; `take` renews its weights."""

    def __init__(self, layer: Any, rule: Rule, weight_of: WeightOf, half: bool) -> None:
        super().__init__()
        self._rule, self._weight_of = rule, weight_of
        self._index = int(layer.self_attn.layer_idx)
        self._panels = [Panels(*_joined(part, weight_of), half) for part in _parts(layer)]
        self._norms = [torch.empty_like(norm.weight, dtype=torch.float32) for norm in _norms(layer)]
        width = int(layer.self_attn.head_dim)
        num_queries, num_keys = (len(weight_of(linear)[0]) // width for linear in _parts(layer)[0][:2])
        self._call = Layer(*(panels.product for panels in self._panels))
        self._call.hidden_width, self._call.head_width = self._call.qkv.inner, width
        self._call.num_queries, self._call.num_keys = num_queries, num_keys
        self._call.half = half
        pointers = [norm.data_ptr() for norm in self._norms] + [None] * (4 - len(self._norms))
        self._call.norm_before, self._call.norm_after, self._call.query_norm, self._call.key_norm = pointers
        epsilons = [norm.variance_epsilon for norm in _norms(layer)]
        self._call.eps, self._call.head_eps = epsilons[0], epsilons[-1]
        self._room = max(self._call.gate.outer, self._call.output.inner)
        self._c = library(SOURCE)

    @torch.no_grad()
    def take(self, layer: Any) -> None:
        """The layer's weights as they are now."""
        for panels, part in zip(self._panels, _parts(layer), strict=True):
            panels.take(*_joined(part, self._weight_of))
        for mine, theirs in zip(self._norms, _norms(layer), strict=True):
            mine.copy_(theirs.weight)

    def forward(self, hidden_states: Tensor, *, position_embeddings: Any, layout: Layout, **keywords: Any) -> Tensor:
        """(1, T, C) to (1, T, C), as transformers call a layer."""
        # All held until the calls are done: what is made here would be freed before.
        hidden_TC = hidden_states[0].float().contiguous()
        cosines_TD, sines_TD = (angles[0].float().contiguous() for angles in position_embeddings)
        call, num_tokens = self._call, len(hidden_TC)
        heads_THD = hidden_TC.new_empty(num_tokens, call.num_queries + 2 * call.num_keys, call.head_width)
        out_TC = torch.empty_like(hidden_TC)
        normed, gated = hidden_TC.new_empty(BATCH * call.hidden_width), hidden_TC.new_empty(BATCH * self._room)
        given = (hidden_TC, cosines_TD, sines_TD, heads_THD, heads_THD, out_TC, normed, gated)
        tensors = Pass(*(tensor.data_ptr() for tensor in given), num_tokens, torch.get_num_threads())
        self._c.covey_before_attention(ctypes.byref(call), ctypes.byref(tensors))
        attended_THD = self._attend(heads_THD, layout)
        tensors.attended = attended_THD.data_ptr()
        self._c.covey_after_attention(ctypes.byref(call), ctypes.byref(tensors))
        return out_TC[None].to(hidden_states.dtype)

    def _attend(self, heads_THD: Tensor, layout: Layout) -> Tensor:
        sizes = (self._call.num_queries, self._call.num_keys, self._call.num_keys)
        query, key, value = (part.transpose(0, 1)[None] for part in heads_THD.split(sizes, dim=1))
        return layout.attend(self._index, query, key, value, self._rule)[0].transpose(0, 1).contiguous()


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


def _norms(layer: Any) -> list[Any]:
    """Before attention, after it, and of queries and keys where there are any."""
    attention = layer.self_attn
    of_heads = [attention.q_norm, attention.k_norm] if type(layer) is Qwen3DecoderLayer else []
    return [layer.input_layernorm, layer.post_attention_layernorm, *of_heads]


def _joined(part: list[nn.Module], weight_of: WeightOf) -> tuple[Tensor, Tensor | None]:
    weights, biases = zip(*(weight_of(linear) for linear in part), strict=True)
    if len(part) == 1:
        return weights[0], biases[0]
    return torch.cat(weights), None if biases[0] is None else torch.cat(biases)
