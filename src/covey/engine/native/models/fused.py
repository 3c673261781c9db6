"""Models of Llama's family and hybrids in layer.c, without gradient.

As transformers write it, a layer is some forty operations around its products and its attention, which in decoding take
as long as the products. The numbers are the layer's but for rounding, and a row's do not depend on the rows beside it.

Shapes: T tokens of the stream (B = 1), R rows of a decode step, C hidden width, O outputs of a product, H query heads,
K key/value heads, D head width.
"""

import ctypes
import weakref
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_outputs import MoeModelOutputWithPast

from covey.engine.native.compiled import Cached, CompiledDecodeLayout, DrawsCall
from covey.engine.native.models.families import LayerParts, eps_of, family_of, has_gate, norm_offset, parts_of
from covey.engine.native.models.mixed import MixedLayer
from covey.engine.native.panels import BATCH, SOURCE, PackedWeights, PanelProduct, Weights
from covey.policy.attention.base import Layout, Rule
from covey.policy.kernels.compiler import library, struct_of

Heads = tuple[Tensor, Tensor, Tensor]
"""Queries, keys and values, (1, H or K, T, D)."""
WeightsOf = Callable[[nn.Module], Weights]
"""Those of a linear layer, its adapter merged in or beside it."""
NO_RULE = Rule(1.0, None)
Layer = struct_of(SOURCE, "Layer", Product=PanelProduct)
Pass = struct_of(SOURCE, "Pass")
StepsCall = struct_of(SOURCE, "Steps", Draws=DrawsCall)


class FusedLayer:
    """The buffers of a layer's weights for layer.c, filled by `take`."""

    def __init__(self, parts: LayerParts, rules: Mapping[int, Rule], weights_of: WeightsOf, dtype: torch.dtype) -> None:
        self._weights_of = weights_of
        self.index = -1 if parts.attention is None else int(parts.attention.layer_idx)
        self.rule = rules.get(self.index, NO_RULE)
        self.kind = None if parts.attention is None else vars(parts.attention).get("layer_type")
        self.mixed = None if parts.mixer is None else MixedLayer(parts.mixer)
        self.panels = {name: PackedWeights(part, dtype) for name, part in self._products(parts).items()}
        norms = self._all_norms(parts)
        self._offsets = {name: norm_offset(norm) for name, norm in norms.items()}
        self._norms = {name: torch.empty_like(norm.weight, dtype=torch.float32) for name, norm in norms.items()}
        self.call = Layer(**{name: panels.product for name, panels in self.panels.items()})
        for name, norm in self._norms.items():
            setattr(self.call, name, norm.data_ptr())
        self.call.half, self.call.scale = dtype == torch.bfloat16, parts.scale
        self.call.eps = eps_of(next(iter(parts.norms.values())))
        self.call.hidden_width = self.panels["into" if "into" in self.panels else "up"].product.inner
        if self.mixed is not None:
            self.call.mixer = ctypes.addressof(self.mixed.call)
        if parts.attention is not None:
            self._describe_attention(parts)

    def _describe_attention(self, parts: LayerParts) -> None:
        call, width = self.call, int(parts.attention.head_dim)
        query, key, _, *gates = (int(linear.out_features) for linear in parts.heads)
        call.head_width, call.num_keys = width, key // width
        call.num_queries = int(parts.output[0].in_features) // width
        call.gates = sum(gates) + query - call.num_queries * width
        if parts.head_norms:
            call.head_eps, call.norms_whole = eps_of(parts.head_norms[-1]), len(self._norms["query_norm"]) > width

    def take(self, parts: LayerParts) -> None:
        for name, part in self._products(parts).items():
            self.panels[name].take(part)
            getattr(self.call, name).panels = self.panels[name].product.panels
        for name, norm in self._all_norms(parts).items():
            self._norms[name].copy_(norm.weight + self._offsets[name])
        if self.mixed is not None:
            self.mixed.take(parts.mixer)

    @property
    def eighths(self) -> int:
        """Return the bytes of a batch of rows in eight bits."""
        return max(panels.eighths for panels in self.panels.values())

    @property
    def narrow_width(self) -> int:
        """Return the most inner numbers per row of adapters' products."""
        return max(panels.narrow_width for panels in self.panels.values())

    def _all_norms(self, parts: LayerParts) -> dict[str, Any]:
        of_heads = dict(zip(("query_norm", "key_norm"), parts.head_norms, strict=False))
        return {f"norm_{role}": norm for role, norm in parts.norms.items()} | of_heads

    def _weights(self, parts: LayerParts, linear: Sequence[Any]) -> list[Weights]:
        """Return the weights of linear layers, with the layer's multipliers."""
        found = [self._weights_of(part) for part in linear]
        factors = [parts.factors.get(part) for part in linear]
        return [part if by is None else part.times(*by) for part, by in zip(found, factors, strict=True)]

    def _products(self, parts: LayerParts) -> dict[str, list[Weights]]:
        """Return the weights of each product; gates go behind heads."""
        inner = self._weights(parts, parts.inner)
        if has_gate(parts.inner) and len(inner) == 2:
            inner = [*(inner[0].rows(half) for half in torch.arange(inner[0].shape[0]).chunk(2)), inner[1]]
        found = {name: [part] for name, part in zip(INNER[len(INNER) - len(inner) :], inner, strict=True)}
        if parts.output:
            heads = self._weights(parts, parts.heads)
            if heads and heads[0].shape[0] == 2 * int(parts.output[0].in_features):  # gates come head by head
                place_HXD = torch.arange(heads[0].shape[0]).view(-1, 2, int(parts.attention.head_dim))
                first, last = (heads[0].rows(place_HXD[:, half].flatten()) for half in (0, 1))
                heads = [first, *heads[1:], last]
            found["into"] = [*heads, *self._weights(parts, parts.into_mixer)]
            found["output"] = [Weights.sum_of(self._weights(parts, parts.output))]
        return found


INNER = ("gate", "up", "down")


class FusedModel(nn.Module):
    """Replaces a base model of such layers, filled by `take`."""

    def __init__(self, model: Any, rules: Mapping[int, Rule], weights_of: WeightsOf, dtype: torch.dtype) -> None:
        super().__init__()
        family, modules = family_of(model), model._modules
        assert family is not None, "chosen for a known family"
        self._family = family
        self.add_module(self._family.embedding, modules[self._family.embedding])  # refreshed by name
        self._has_positions = modules.get(self._family.rotary) is not None
        if self._has_positions:
            self.add_module(self._family.rotary, modules[self._family.rotary])
        self._kinds = list(vars(modules[family.rotary]).get("layer_types", ())) if self._has_positions else []
        # A causal model may read its base model's multipliers
        vars(self).update({name: number for name, number in vars(model).items() if isinstance(number, float)})
        self._factor = float(vars(model).get("embedding_multiplier", 1.0))
        self._layers = [FusedLayer(parts, rules, weights_of, dtype) for parts in _layer_parts(model)]
        self._calls = (Layer * len(self._layers))(*(layer.call for layer in self._layers))
        for layer, call in zip(self._layers, self._calls, strict=True):
            layer.call = call
        products = (product for call in self._calls for product in (call.into, call.output, call.up, call.down))
        for product, following in pairwise(product for product in products if product.outer):
            product.next = ctypes.addressof(following)
        self._widths, self._eighths = self._measure(), max(layer.eighths for layer in self._layers)
        norm = modules[self._family.final_norm]
        self._norm, self._eps, self._offset = (
            torch.empty_like(norm.weight, dtype=torch.float32),
            eps_of(norm),
            norm_offset(norm),
        )
        self._c = library(SOURCE)
        self._cached: Any = None
        """Pointers into the cache, as long as these tensors are in it."""
        self._kept: list[weakref.ref[Tensor]] = []

    def _measure(self) -> tuple[int, ...]:
        """Return the widths of a row in `Pass`, from heads on."""
        calls, narrow = self._calls, max(layer.narrow_width for layer in self._layers)
        widest = max(max(call.up.outer, call.output.inner) for call in calls)
        mixed = max(0 if layer.mixed is None else layer.mixed.call.channels for layer in self._layers)
        before = max(call.into.outer for call in calls), max(call.output.inner for call in calls), mixed
        return *before, calls[0].hidden_width, widest, narrow, narrow

    @torch.no_grad()
    def take(self, model: Any) -> None:
        for mine, theirs in zip(self._layers, _layer_parts(model), strict=True):
            mine.take(theirs)
        self._norm.copy_(model._modules[self._family.final_norm].weight + self._offset)

    def release(self) -> None:
        """Free packed weights that training changes, until `take`."""
        for panels in (panels for layer in self._layers for panels in layer.panels.values()):
            panels.release()

    def get_input_embeddings(self) -> nn.Module:
        return self.get_submodule(self._family.embedding)

    def forward(
        self,
        input_ids: Tensor | None = None,
        *,
        position_ids: Tensor,
        layout: Any,
        inputs_embeds: Tensor | None = None,
        **keywords: Any,
    ) -> Any:
        """Map tokens, or their embeddings, to last hidden states (1, T, C)."""
        embedded_1TC = self.get_input_embeddings()(input_ids) if inputs_embeds is None else inputs_embeds
        embedded_1TC = embedded_1TC if self._factor == 1.0 else embedded_1TC * self._factor
        hidden_TC = embedded_1TC[0].float().contiguous()
        tensors, held = self._describe_pass(hidden_TC, embedded_1TC, position_ids)
        _, _cosines, _sines, heads_TO, *_ = held
        if isinstance(layout, CompiledDecodeLayout):
            how = self._cached_for(layout), ctypes.c_int64(len(self._layers)), ctypes.byref(tensors)
            self._c.covey_decode_layers(self._calls, *how, ctypes.byref(layout.call))
        else:
            self._mix_between(tensors, hidden_TC, heads_TO, layout)
        self._normalise(hidden_TC)
        return MoeModelOutputWithPast(last_hidden_state=hidden_TC[None].to(embedded_1TC.dtype))

    def _angles(self, embedded_1TC: Tensor, position_ids: Tensor) -> list[Tensor]:
        """Return cosines and sines, kind by kind of layers."""
        if not self._has_positions:  # no number of a head is turned
            return [embedded_1TC.new_empty(0)] * 2
        rotary, kinds = self.get_submodule(self._family.rotary), self._kinds
        given = [{"layer_type": kind} for kind in kinds] if kinds else [{}]
        found = [rotary(embedded_1TC, position_ids, **each) for each in given]
        widths = [cosine.shape[-1] for cosine, _ in found]
        for layer, call in zip(self._layers, self._calls, strict=True):
            place = kinds.index(layer.kind) if layer.kind in kinds else 0
            call.turned, call.angles = widths[place], sum(widths[:place])
        return [torch.cat([angle[0].float().flatten() for angle in angles]) for angles in zip(*found, strict=True)]

    def run_steps(
        self, layout: CompiledDecodeLayout, num_rows: int, position_1T: Tensor, steps: ctypes.Structure, narrow: int
    ) -> int:
        """Run steps until one ends a row; return their number.

        `num_rows`: most positions of a step; `narrow`: inner numbers per row of the head's adapter.
        """
        weight_VC = self.get_input_embeddings().get_parameter("weight")
        hidden_RC = torch.empty(num_rows, weight_VC.shape[1])
        tensors, _held = self._describe_pass(hidden_RC, weight_VC, position_1T, narrow)
        steps.layers, steps.cached = (ctypes.addressof(each) for each in (self._calls, self._cached_for(layout)))
        steps.tensors, steps.attention = ctypes.addressof(tensors), ctypes.addressof(layout.call)
        steps.embedding, steps.half_embedding = weight_VC.data_ptr(), weight_VC.dtype == torch.bfloat16
        steps.norm, steps.eps, steps.factor = self._norm.data_ptr(), self._eps, self._factor
        steps.num_layers = len(self._layers)
        self._c.covey_decode_steps.restype = ctypes.c_int64
        return int(self._c.covey_decode_steps(ctypes.byref(steps)))

    def _describe_pass(
        self, hidden_RC: Tensor, embedded: Tensor, position_1T: Tensor, narrow: int = 0
    ) -> tuple[ctypes.Structure, Sequence[Tensor]]:
        """Return a struct and the tensors to hold until it is read."""
        assert self._calls[0].into.panels or self._calls[0].up.panels, "weights are taken before a pass"
        whole = [torch.empty(len(hidden_RC), width) for width in self._widths[:3]]
        rooms = [torch.empty(BATCH * max(width, narrow)) for width in self._widths[3:]]
        eighths = torch.empty(self._eighths, dtype=torch.int8)
        held = [hidden_RC, *self._angles(embedded, position_1T), *whole, *rooms, eighths]
        *pointers, first, second, last = (tensor.data_ptr() for tensor in held)
        narrows = (ctypes.c_void_p * 2)(first, second)
        sizes = len(hidden_RC), position_1T.shape[1], 0, torch.get_num_threads()
        return Pass(*pointers, narrows, last, *sizes), held

    def _cached_for(self, layout: CompiledDecodeLayout) -> Any:
        """Return the pointers into the cache, kept as long as its tensors."""
        kept = layout.kept
        if len(kept) != len(self._kept) or any(known() is not own for known, own in zip(self._kept, kept, strict=True)):
            places = [None if layer.mixed is None else layer.mixed.place for layer in self._layers]
            read = zip(self._layers, places, strict=True)
            each = (layout.make_cache_struct(layer.index, layer.rule, place) for layer, place in read)
            self._cached, self._kept = (Cached * len(self._layers))(*each), [weakref.ref(tensor) for tensor in kept]
        return self._cached

    def _mix_between(self, tensors: ctypes.Structure, hidden_TC: Tensor, heads_TO: Tensor, layout: Layout) -> None:
        """Compute the layers around what mixes their tokens."""
        for layer, own in zip(self._layers, self._calls, strict=True):
            call = ctypes.byref(own)
            if own.into.outer:
                self._c.covey_before_attention(call, ctypes.byref(tensors))
                mixed_TO = self._mix(layer, hidden_TC, heads_TO, layout)
                tensors.attended = mixed_TO.data_ptr()
            self._c.covey_after_attention(call, ctypes.byref(tensors))

    def _mix(self, layer: FusedLayer, hidden_TC: Tensor, heads_TO: Tensor, layout: Layout) -> Tensor:
        """Return the input of the output product (T, I)."""
        call, found = layer.call, []
        columns_TO = heads_TO.view(-1)[: len(heads_TO) * call.into.outer].view(-1, call.into.outer)
        num_before = (call.num_queries + 2 * call.num_keys) * call.head_width + call.gates
        if call.num_queries:
            attended_HTD = layout.attend(layer.index, *_heads_of(call, columns_TO), layer.rule)[0]
            found.append(attended_HTD.transpose(0, 1).float().flatten(1))
        if layer.mixed is not None:
            found.append(layer.mixed.mix(hidden_TC, columns_TO[:, num_before:], layout))
        return torch.cat(found, 1)

    def _normalise(self, hidden_TC: Tensor) -> None:
        pointers = (ctypes.c_void_p(tensor.data_ptr()) for tensor in (hidden_TC, self._norm))
        sizes = (ctypes.c_int64(size) for size in hidden_TC.shape)
        self._c.covey_norm(*pointers, *sizes, ctypes.c_float(self._eps), ctypes.c_int64(torch.get_num_threads()))


def _heads_of(call: ctypes.Structure, columns_TO: Tensor) -> Heads:
    """Return the views of heads that a layer's first product wrote."""
    sizes = call.num_queries, call.num_keys, call.num_keys
    heads_THD = columns_TO[:, : sum(sizes) * call.head_width].unflatten(1, (sum(sizes), -1))
    query, key, value = (part.transpose(0, 1)[None] for part in heads_THD.split(sizes, dim=1))
    return query, key, value


def _layer_parts(model: Any) -> list[LayerParts]:
    family = family_of(model)
    parts = [] if family is None else [parts_of(layer, family) for layer in model.layers]
    return [part for part in parts if part is not None]


def is_fusable(model: Any) -> bool:
    """Return True if FusedModel computes exactly this model's form."""
    return family_of(model) is not None and len(_layer_parts(model)) == len(model.layers)


def linear_layers(model: Any) -> list[nn.Module]:
    return [linear for parts in _layer_parts(model) for linear in parts.linear]
