"""Models of Llama's family for decoding on a GPU.

Queries, keys and values are one product, gate and up another, and the rest is compiled by torch
(`policy.kernels.gpu.inductor`): sum with norm, norms and positions of heads, the gate. Numbers are rounded where the
trained model rounds them.

Shapes: T tokens of the stream (B = 1), C hidden width, H query heads, K key/value heads, D head width, I inner width.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.modeling_outputs import BaseModelOutputWithPast

from covey.engine.native.models.families import LLAMA, LayerParts, parts_of
from covey.policy.attention.base import Layout, Rule
from covey.policy.kernels.gpu.inductor import compile_once
from covey.policy.kernels.gpu.residual import norm, sum_and_norm
from covey.policy.policy import Policy


def is_wanted(policy: Policy) -> bool:
    """Return True for a half-precision model of the family."""
    return policy.compiles and not policy.computes_whole


@runtime_checkable
class StoringLayout(Protocol):
    """A decode layout whose cache can be written from outside."""

    def stores(self, layer: int, num_heads: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return cached keys and values (.., D), and new tokens' lines (T*K,)."""

    def attend_stored(self, layer: int, query_BHTD: Tensor, rule: Rule) -> Tensor:
        """Return the attention output (B, H, T, D), new tokens stored."""


class JoinedLinear:
    """Linear layers of one input as one product, in half precision."""

    def __init__(self, layers: Sequence[Any], precision: torch.dtype) -> None:
        weight_OI, bias_O = layers[0].weight, layers[0].bias
        size = sum(layer.out_features for layer in layers)
        self._weight_OI = weight_OI.new_empty((size, weight_OI.shape[1]), dtype=precision)
        self._bias_O = None if bias_O is None else weight_OI.new_empty(size, dtype=precision)

    def take(self, layers: Sequence[Any]) -> None:
        """Copy the weights into place: graphs read them there."""
        for held, names in ((self._weight_OI, "weight"), (self._bias_O, "bias")):
            if held is not None:
                parts = held.split([layer.out_features for layer in layers])
                for part, layer in zip(parts, layers, strict=True):
                    part.copy_(getattr(layer, names))

    def __call__(self, x_TI: Tensor) -> Tensor:
        return F.linear(x_TI, self._weight_OI, self._bias_O)


class JoinedLayer:
    """A layer's weights, filled by `take`."""

    def __init__(self, layer: Any, rule: Rule, precision: torch.dtype) -> None:
        self.index, self.rule = int(layer.self_attn.layer_idx), rule
        self.qkv, self.output, self.gates, self.down = (JoinedLinear(part, precision) for part in _parts(layer))
        width = int(layer.self_attn.head_dim)
        query, key, _ = _parts(layer)[0]
        self.num_heads = query.out_features // width, key.out_features // width
        self.norms = _norms_of(layer)
        self.eps = [part.variance_epsilon for part in self.norms]

    def take(self, layer: Any) -> None:
        """Copy the layer's weights; norms are shared."""
        self.norms = _norms_of(layer)
        for mine, theirs in zip((self.qkv, self.output, self.gates, self.down), _parts(layer), strict=True):
            mine.take(theirs)

    def attend(self, layout: Layout, normed_TC: Tensor, cos_TD: Tensor, sin_TD: Tensor) -> Tensor:
        """Return the attention output, (T, H*D), storing rotated keys."""
        of_heads = [part.weight for part in self.norms[2:]]
        how = cos_TD, sin_TD, self.num_heads, self.eps[-1]
        if isinstance(layout, StoringLayout):
            stores = layout.stores(self.index, self.num_heads[1])
            query_THD = compile_once(rotate_and_store)(self.qkv(normed_TC), *how, *stores, *of_heads)
            attended = layout.attend_stored(self.index, query_THD.transpose(0, 1)[None], self.rule)
        else:
            parts = compile_once(rotate)(self.qkv(normed_TC), *how, *of_heads)
            query, key, value = (heads_THD.transpose(0, 1)[None] for heads_THD in parts)
            attended = layout.attend(self.index, query, key, value, self.rule)
        return attended[0].transpose(0, 1).flatten(1)


class JoinedModel(nn.Module):
    """Replaces a base model of such layers, filled by `take`."""

    def __init__(self, model: Any, rules: Mapping[int, Rule], precision: torch.dtype) -> None:
        super().__init__()
        self.embed_tokens, self.rotary_emb, self.norm = model.embed_tokens, model.rotary_emb, model.norm
        self._precision = precision
        self._layers = [JoinedLayer(layer, rules[layer.self_attn.layer_idx], precision) for layer in model.layers]

    @torch.no_grad()
    def take(self, model: Any) -> None:
        for mine, theirs in zip(self._layers, model.layers, strict=True):
            mine.take(theirs)

    def get_input_embeddings(self) -> nn.Module:
        return self.embed_tokens

    def forward(
        self,
        input_ids: Tensor | None = None,
        *,
        position_ids: Tensor,
        layout: Layout,
        inputs_embeds: Tensor | None = None,
        **keywords: Any,
    ) -> Any:
        """Map tokens, or their embeddings, to last hidden states (1, T, C)."""
        embedded_1TC = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        cos_TD, sin_TD = (angle[0] for angle in self.rotary_emb(embedded_1TC, position_ids))
        hidden_TC, delta_TC = embedded_1TC[0], None
        for layer in self._layers:
            hidden_TC, normed_TC = self._add_residual(hidden_TC, delta_TC, layer.norms[0])
            attended_TC = layer.attend(layout, normed_TC, cos_TD, sin_TD)
            delta_TC = layer.output(attended_TC)
            hidden_TC, normed_TC = self._add_residual(hidden_TC, delta_TC, layer.norms[1])
            delta_TC = layer.down(compile_once(apply_gate)(layer.gates(normed_TC)))
        _, normed_TC = self._add_residual(hidden_TC, delta_TC, self.norm)
        return BaseModelOutputWithPast(last_hidden_state=normed_TC[None])

    def _add_residual(self, hidden_TC: Tensor, delta_TC: Tensor | None, of_sum: Any) -> tuple[Tensor, Tensor]:
        """Return the residual sum, and its norm in the type of products."""
        rest = of_sum.weight, of_sum.variance_epsilon, self._precision
        if delta_TC is None:
            return hidden_TC, compile_once(norm)(hidden_TC, *rest)[0]
        sum_TC, normed_TC, _ = compile_once(sum_and_norm)(hidden_TC, delta_TC, *rest)
        return sum_TC, normed_TC


def rotate(
    qkv_TO: Tensor, cos_TD: Tensor, sin_TD: Tensor, num_heads: tuple[int, int], eps: float, *norms_D: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return rotated, normed queries and keys, (T, heads, D), and values.

    Halves of a head are rotated against each other (arXiv 2104.09864).
    """
    num_queries, num_keys = num_heads
    heads_THD = qkv_TO.unflatten(1, (num_queries + 2 * num_keys, -1))
    query_THD, key_TKD, value_TKD = heads_THD.split((num_queries, num_keys, num_keys), dim=1)
    if norms_D:
        query_THD, _ = norm(query_THD, norms_D[0], eps, qkv_TO.dtype)
        key_TKD, _ = norm(key_TKD, norms_D[1], eps, qkv_TO.dtype)
    angles = cos_TD[:, None].float(), sin_TD[:, None].float()
    return _rotate_heads(query_THD, *angles), _rotate_heads(key_TKD, *angles), value_TKD.contiguous()


def rotate_and_store(
    qkv_TO: Tensor,
    cos_TD: Tensor,
    sin_TD: Tensor,
    num_heads: tuple[int, int],
    eps: float,
    keys: Tensor,
    values: Tensor,
    place: Tensor,
    *norms_D: Tensor,
) -> Tensor:
    """Store the keys and values of `rotate`, and return the queries."""
    query_THD, key_TKD, value_TKD = rotate(qkv_TO, cos_TD, sin_TD, num_heads, eps, *norms_D)
    keys.index_copy_(0, place, key_TKD.flatten(0, 1))
    values.index_copy_(0, place, value_TKD.flatten(0, 1))
    return query_THD


def _rotate_heads(heads_THD: Tensor, cos_T1D: Tensor, sin_T1D: Tensor) -> Tensor:
    low, high = heads_THD.float().chunk(2, dim=-1)
    whole, opposite = torch.cat((low, high), dim=-1), torch.cat((-high, low), dim=-1)
    return (whole * cos_T1D + opposite * sin_T1D).to(heads_THD.dtype)


def apply_gate(gates_TI: Tensor) -> Tensor:
    """Compute silu(gate) * up (SwiGLU, arXiv 2002.05202) of adjacent halves."""
    gate, up = gates_TI.chunk(2, dim=1)
    return F.silu(gate.float()).to(gates_TI.dtype) * up


def _llama_parts(layer: Any) -> LayerParts:
    parts = parts_of(layer, LLAMA)
    assert parts is not None, "chosen for Llama's family"
    return parts


def _norms_of(layer: Any) -> list[Any]:
    """Return a layer's norms: before and after attention, queries', keys' if any."""
    return [*_llama_parts(layer).norms.values(), *_llama_parts(layer).head_norms]


def _parts(layer: Any) -> list[Sequence[Any]]:
    """Return the linear layers that form one product each."""
    query, key, value, output, gate, up, down = _llama_parts(layer).linear
    return [(query, key, value), (output,), (gate, up), (down,)]
