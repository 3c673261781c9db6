"""Models of Llama's family in layer.c, without gradient.

As transformers write it, a layer is some forty operations around its products and its attention, which in decoding take
as long as the products. The numbers are the layer's but for rounding, and a row's do not depend on the rows beside it.

Shapes: T tokens of the stream (B = 1), C hidden width, H query heads, K key/value heads, D head width.
"""

import ctypes
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers.activations import SiLUActivation
from transformers.modeling_outputs import BaseModelOutputWithPast
from transformers.models.llama.modeling_llama import LlamaModel
from transformers.models.mistral.modeling_mistral import MistralModel
from transformers.models.qwen2.modeling_qwen2 import Qwen2Model
from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer, Qwen3Model

from covey.engine.native.compiled import Cached, CompiledDecodeLayout
from covey.engine.native.panels import BATCH, SOURCE, PackedWeights, PanelProduct, Weights
from covey.policy.attention.base import Layout, Rule
from covey.policy.kernels.compiler import library
from covey.policy.kernels.layers import LAYERS

FAMILY = (LlamaModel, MistralModel, Qwen2Model, Qwen3Model)
"""Models of such layers, and nothing else."""

Heads = tuple[Tensor, Tensor, Tensor]
"""Queries, keys and values, (1, H or K, T, D)."""
WeightsOf = Callable[[nn.Module], Weights]
"""Those of a linear layer, its adapter merged in or beside it."""


class Layer(ctypes.Structure):
    """The struct of the same name in layer.c."""

    _fields_ = (
        *((name, PanelProduct) for name in ("qkv", "output", "gate", "up", "down")),
        *((name, ctypes.c_void_p) for name in ("norm_before", "norm_after", "query_norm", "key_norm")),
        *((name, ctypes.c_int64) for name in ("hidden_width", "head_width", "num_queries", "num_keys", "half")),
        *((name, ctypes.c_float) for name in ("eps", "head_eps")),
    )


class Pass(ctypes.Structure):
    """The struct of the same name in layer.c."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("hidden", "cosines", "sines", "heads", "attended")),
        *((name, ctypes.c_void_p) for name in ("normed", "gated")),
        ("narrow", ctypes.c_void_p * 2),
        *((name, ctypes.c_int64) for name in ("rows", "num_threads")),
    )


class FusedLayer:
    """The buffers of a layer's weights for layer.c, filled by `take`."""

    def __init__(self, layer: Any, rule: Rule, weights_of: WeightsOf, half: bool) -> None:
        self.index, self.rule = int(layer.self_attn.layer_idx), rule
        self._weights_of = weights_of
        self._panels = [PackedWeights(self._weights(part), half) for part in _parts(layer)]
        self._norms = [torch.empty_like(norm.weight, dtype=torch.float32) for norm in norms_of(layer)]
        width = int(layer.self_attn.head_dim)
        num_queries, num_keys = (linear.out_features // width for linear in _parts(layer)[0][:2])
        # Norms go by pointer; models without some have None there
        pointers = [norm.data_ptr() for norm in self._norms] + [None] * (4 - len(self._norms))
        epsilons = [norm.variance_epsilon for norm in norms_of(layer)]
        products = [panels.product for panels in self._panels]
        sizes = (products[0].inner, width, num_queries, num_keys, half)
        self.call = Layer(*products, *pointers, *sizes, epsilons[0], epsilons[-1])

    def take(self, layer: Any) -> None:
        for panels, part in zip(self._panels, _parts(layer), strict=True):
            panels.take(self._weights(part))
        for mine, theirs in zip(self._norms, norms_of(layer), strict=True):
            mine.copy_(theirs.weight)

    @property
    def narrow_width(self) -> int:
        """Return the most inner numbers per row of adapters' products."""
        return max(panels.narrow_width for panels in self._panels)

    def _weights(self, part: list[nn.Module]) -> list[Weights]:
        return [self._weights_of(linear) for linear in part]


class FusedModel(nn.Module):
    """Replaces a base model of such layers, filled by `take`."""

    def __init__(self, model: Any, rules: Mapping[int, Rule], weights_of: WeightsOf, half: bool) -> None:
        super().__init__()
        self.embed_tokens, self.rotary_emb = model.embed_tokens, model.rotary_emb
        self._layers = [FusedLayer(layer, rules[layer.self_attn.layer_idx], weights_of, half) for layer in model.layers]
        self._calls = (Layer * len(self._layers))(*(layer.call for layer in self._layers))
        self._narrow_width = max(layer.narrow_width for layer in self._layers)
        self._norm = torch.empty_like(model.norm.weight, dtype=torch.float32)
        self._eps = float(model.norm.variance_epsilon)
        self._c = library(SOURCE)

    @torch.no_grad()
    def take(self, model: Any) -> None:
        for mine, theirs in zip(self._layers, model.layers, strict=True):
            mine.take(theirs)
        self._norm.copy_(model.norm.weight)

    def forward(self, input_ids: Tensor, position_ids: Tensor, layout: Any, **keywords: Any) -> Any:
        """Map (1, T) to last hidden states (1, T, C)."""
        embedded_1TC = self.embed_tokens(input_ids)
        # All tensors are held until the last call is done: what is made in passing would be freed before.
        hidden_TC = embedded_1TC[0].float().contiguous()
        angles = [angle[0].float().contiguous() for angle in self.rotary_emb(embedded_1TC, position_ids)]
        first = self._layers[0].call
        heads_THD = hidden_TC.new_empty(len(hidden_TC), first.num_queries + 2 * first.num_keys, first.head_width)
        widths = first.hidden_width, self._widest(), self._narrow_width, self._narrow_width
        rooms = [hidden_TC.new_empty(BATCH * width) for width in widths]
        given = (hidden_TC, *angles, heads_THD, heads_THD, *rooms)
        pointers = [tensor.data_ptr() for tensor in given]
        narrow = (ctypes.c_void_p * 2)(*pointers[-2:])
        tensors = Pass(*pointers[:-2], narrow, len(hidden_TC), torch.get_num_threads())
        sizes = (first.num_queries, first.num_keys, first.num_keys)
        query, key, value = (part.transpose(0, 1)[None] for part in heads_THD.split(sizes, dim=1))
        compute = self._decode if isinstance(layout, CompiledDecodeLayout) else self._attend_between
        compute(tensors, (query, key, value), layout)
        self._normalise(hidden_TC)
        return BaseModelOutputWithPast(last_hidden_state=hidden_TC[None].to(embedded_1TC.dtype))

    def _decode(self, tensors: Pass, heads: Heads, layout: CompiledDecodeLayout) -> None:
        query_1HRD = heads[0]
        attended_RHD = query_1HRD.new_empty(query_1HRD.shape[2], query_1HRD.shape[1], query_1HRD.shape[3])
        tensors.attended = attended_RHD.data_ptr()
        cached = (Cached * len(self._layers))(
            *(layout.make_cache_struct(layer.index, layer.rule) for layer in self._layers)
        )
        how = ctypes.byref(tensors), ctypes.byref(layout.attending(heads, attended_RHD))
        self._c.covey_decode_layers(self._calls, cached, ctypes.c_int64(len(cached)), *how)

    def _attend_between(self, tensors: Pass, heads: Heads, layout: Layout) -> None:
        """Compute the layers around their attention."""
        for layer in self._layers:
            self._c.covey_before_attention(ctypes.byref(layer.call), ctypes.byref(tensors))
            attended_HTD = layout.attend(layer.index, *heads, layer.rule)[0]
            attended_THD = attended_HTD.transpose(0, 1).float().contiguous()
            tensors.attended = attended_THD.data_ptr()
            self._c.covey_after_attention(ctypes.byref(layer.call), ctypes.byref(tensors))

    def _normalise(self, hidden_TC: Tensor) -> None:
        pointers = (ctypes.c_void_p(tensor.data_ptr()) for tensor in (hidden_TC, self._norm))
        sizes = (ctypes.c_int64(size) for size in hidden_TC.shape)
        self._c.covey_norm(*pointers, *sizes, ctypes.c_float(self._eps), ctypes.c_int64(torch.get_num_threads()))

    def _widest(self) -> int:
        """Return the largest width of a product's input after attention."""
        return max(max(layer.call.gate.outer, layer.call.output.inner) for layer in self._layers)


def is_fusable(model: Any) -> bool:
    """Return True if FusedModel computes exactly this model's form."""
    return type(model) in FAMILY and all(
        isinstance(layer, LAYERS) and isinstance(layer.mlp.act_fn, nn.SiLU | SiLUActivation) for layer in model.layers
    )


def linear_layers(model: Any) -> list[nn.Module]:
    return [linear for layer in model.layers for linear in linear_layers_of(layer)]


def linear_layers_of(layer: Any) -> list[Any]:
    """Return a layer's q, k, v, o, gate, up and down."""
    return [linear for part in _parts(layer) for linear in part]


def _parts(layer: Any) -> list[list[Any]]:
    """Return the linear layers that form one product each."""
    attention, mlp = layer.self_attn, layer.mlp
    qkv = [attention.q_proj, attention.k_proj, attention.v_proj]
    return [qkv, [attention.o_proj], [mlp.gate_proj], [mlp.up_proj], [mlp.down_proj]]


def norms_of(layer: Any) -> list[Any]:
    """Return a layer's norms: before and after attention, queries', keys' if any."""
    attention = layer.self_attn
    of_heads = [attention.q_norm, attention.k_norm] if isinstance(layer, Qwen3DecoderLayer) else []
    return [layer.input_layernorm, layer.post_attention_layernorm, *of_heads]
