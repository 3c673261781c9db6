"""The decode policy: weights in the form that decoding reads fastest.

In half precision they are cast once: autocast keeps casts only within a pass, and a decode step is a pass. Through
torch the numbers are autocast's, bit for bit; through C only a product's operands are rounded. In float32 on a CPU they
are packed for oneDNN where that computes the layer. In whole precision adapters are merged, which saves two products
per layer; in half precision merging would lose most updates to rounding, so adapters stay beside their layers. If
decoding goes through C, known base models are fused (`fused.py`), and other linear layers are packed (`panels.py`), 4-
and 8-bit weights dequantised. With engine.weights=int8 the weights in C have eight bits, adapters beside them.
"""

import copy
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn

from covey.engine.native.models import joined
from covey.engine.native.models.families import OF_LLAMA
from covey.engine.native.models.fused import FusedModel, is_fusable, linear_layers
from covey.engine.native.models.mixed import own_name
from covey.engine.native.panels import Adapter, CompiledLinear, Weights
from covey.policy.attention.base import Rule
from covey.policy.head import linear_layer, wide_product
from covey.policy.kernels.linear import PLAIN, MergedLinear, OneDnnLinear, PackedLinear
from covey.policy.models.quantized import dequantize, is_quantized
from covey.policy.models.text_part import beside_text, is_composite
from covey.policy.policy import Policy, head_modules, is_half
from covey.policy.recurrence.mixers import is_routed


class FusedAdapter(nn.Module):
    """A layer and its LoRA adapter in half precision on a GPU.

    x @ W + b + (x @ A) @ (scale B): two kernels beside the layer's own, in place of four and the casts of A and B.
    """

    def __init__(self, layer: nn.Module, precision: torch.dtype) -> None:
        super().__init__()
        self.base_layer = layer.base_layer
        self._precision = precision
        self.take(layer)

    def take(self, layer: nn.Module) -> None:
        adapter = _adapter_of(layer)
        self._down_IN = adapter.down_RI.t().to(self._precision)
        self._up_NO = (adapter.up_OR * adapter.scale).t().to(self._precision)

    def forward(self, input: Tensor) -> Tensor:
        out = self.base_layer(input)  # type: ignore[operator]
        flat = input.reshape(-1, input.shape[-1]).to(self._precision)
        return torch.addmm(out.flatten(0, -2), flat @ self._down_IN, self._up_NO).view(out.shape)


class WideHead(nn.Module):
    """A half-precision output head on a GPU, with float32 logits."""

    def __init__(self, layer: nn.Module, precision: torch.dtype) -> None:
        super().__init__()
        self._precision = precision
        self.take(layer)

    def take(self, layer: nn.Module) -> None:
        """Copy the weight in the type of products."""
        self._weight_VC = layer.get_parameter("weight").detach().to(self._precision)

    def forward(self, input: Tensor) -> Tensor:
        flat = input.reshape(-1, input.shape[-1]).to(self._precision)
        return wide_product(flat, self._weight_VC.t()).view(*input.shape[:-1], -1)


Held = PackedLinear | MergedLinear | CompiledLinear
"""Replacement in the decode policy for a layer whose weight is held in another form."""

NOTHING: Mapping[int, Rule] = {}


def is_wanted(policy: Policy, rules: Mapping[int, Rule] = NOTHING) -> bool:
    """Return True where weights take another form; sharded ones never do."""
    return not policy.sharded and (own_bytes(policy) > 0 or bool(_fusable(policy, rules)))


def is_fused(decode_policy: Policy) -> bool:
    """Return True where all linear layers are computed in C."""
    model = decode_policy.causal_lm
    is_whole = any(isinstance(module, FusedModel) for module in model.modules())
    return is_whole and all(isinstance(head, CompiledLinear) for head in head_modules(model))


def own_bytes(policy: Policy) -> int:
    """Return the bytes of the decode policy's own weights, unfused."""
    held = dict(_held_layers(policy))
    cast = [
        parameter
        for name, module in _text_modules(policy)
        if name not in held and not _is_inside(name, held)
        for parameter in module.parameters(recurse=False)
        if _is_cast(module, parameter, policy.precision)
    ]
    weights = [_linear_of(layer).weight for layer in held.values()]
    return sum(weight.numel() * policy.precision.itemsize for weight in (*cast, *weights))


def build_decode_policy(
    policy: Policy, rules: Mapping[int, Rule] = NOTHING, dtype: torch.dtype | None = None
) -> Policy:
    """Return a decode policy whose own weights `refresh` renews; others are shared.

    `rules`, by layer, are given where the base model may be fused; `dtype`, of products in C, is the policy's or int8.
    """
    dtype = dtype or policy.precision
    shared = [*policy.model.parameters(), *policy.model.buffers()]
    # deepcopy takes what it finds here for copied: modules are new, tensors are the policy's own.
    model = copy.deepcopy(policy.model, {id(tensor): tensor for tensor in shared})
    fused = {name: _fuse(model.get_submodule(name), rules, policy, dtype) for name in _fusable(policy, rules)}
    in_c = bool(fused) or (bool(rules) and is_routed(policy.causal_lm))
    through_c = in_c and not joined.is_wanted(policy)
    others = _linear_beside(policy, fused) if through_c else _held_layers(policy)
    held = {name: _hold(layer, dtype, through_c) for name, layer in others}
    adapters = {name: FusedAdapter(model.get_submodule(name), policy.precision) for name in _fused_adapters(policy)}
    heads = {name: WideHead(model.get_submodule(name), policy.precision) for name in _wide_heads(policy)}
    for name, module in (held | fused | adapters | heads).items():
        parent, _, own_name = name.rpartition(".")
        setattr(model.get_submodule(parent), own_name, module)
    decode_policy = replace(policy, model=model)
    refresh(decode_policy, policy)
    return decode_policy


@torch.no_grad()
def refresh(decode_policy: Policy, policy: Policy) -> None:
    read = dict(_text_modules(policy))
    for name, mine in decode_policy.model.named_modules():
        if name not in read:
            continue
        theirs = read[name]
        if isinstance(mine, FusedModel | joined.JoinedModel | FusedAdapter | WideHead):
            mine.take(theirs)
        elif isinstance(mine, CompiledLinear):
            mine.take(weights_of(theirs, mine.dtype))
        elif isinstance(mine, PackedLinear | MergedLinear):
            mine.take(*_merge_adapter(theirs, policy.precision))
        else:
            _take_parameters(mine, theirs, policy.precision)


def release(decode_policy: Policy) -> None:
    """Free packed weights that training changes, until `refresh`."""
    for module in decode_policy.model.modules():
        if isinstance(module, FusedModel | CompiledLinear):
            module.release()


def _take_parameters(mine: nn.Module, theirs: nn.Module, precision: torch.dtype) -> None:
    """Share the unchanged parameters and copy the cast ones."""
    for name, parameter in theirs.named_parameters(recurse=False):
        if not _is_cast(theirs, parameter, precision):
            mine.register_parameter(name, parameter)
            continue
        held = mine.get_parameter(name)
        if held is parameter:
            held = nn.Parameter(torch.empty_like(parameter, dtype=precision), requires_grad=False)
            mine.register_parameter(name, held)
        held.copy_(parameter)


def _fusable(policy: Policy, rules: Mapping[int, Rule]) -> list[str]:
    """Return the text model's name where it is computed as a whole.

    Only with rules, where decoding goes through C or is joined.
    """
    model = policy.causal_lm
    base = model.get_decoder() if is_composite(model) else model.base_model
    is_known = is_fusable(base) and (own_name(base) in OF_LLAMA or not joined.is_wanted(policy))
    if not rules or not is_known or not all(_is_taken(linear, policy) for linear in linear_layers(base)):
        return []
    return [name for name, module in policy.model.named_modules() if module is base]


def _fuse(
    model: nn.Module, rules: Mapping[int, Rule], policy: Policy, dtype: torch.dtype
) -> FusedModel | joined.JoinedModel:
    if joined.is_wanted(policy):
        return joined.JoinedModel(model, rules, policy.precision)
    return FusedModel(model, rules, partial(weights_of, precision=dtype), dtype)


def _is_taken(linear: nn.Module, policy: Policy) -> bool:
    """Return True if panels can hold the layer."""
    if joined.is_wanted(policy):
        return type(linear) is nn.Linear and _is_cast(linear, linear.weight, policy.precision)
    return _is_plain(linear, policy) and not (is_half(policy.precision) and _linear_of(linear).in_features % 2)


def _is_plain(layer: nn.Module, policy: Policy) -> bool:
    """Return True for a plain product with at most one plain adapter."""
    if not (isinstance(layer, nn.Linear) or _is_adapted(layer)):
        return False
    linear = _linear_of(layer)
    if is_quantized(linear):
        return True
    return type(linear) in PLAIN and (layer is linear or is_half(policy.precision) or _is_mergeable(layer, policy))


def _is_inside(name: str, outer: Iterable[str]) -> bool:
    return any(name.startswith(f"{above}.") for above in outer)


def _text_modules(policy: Policy) -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules, by name, without those that text never meets."""
    beside = {id(policy.causal_lm.get_parameter(name)) for name in beside_text(policy.causal_lm)}
    for name, module in policy.model.named_modules():
        own = [id(weight) for weight in module._parameters.values() if weight is not None]
        if not own or not beside.issuperset(own):
            yield name, module


def _held_layers(policy: Policy) -> Iterator[tuple[str, nn.Module]]:
    """Yield the layers with adapters to merge, and plain ones to pack."""
    if is_half(policy.precision):
        return
    adapted = tuple(name for name, module in policy.model.named_modules() if _is_mergeable(module, policy))
    for name, module in _text_modules(policy):
        if name in adapted or (_is_packed(module, policy.precision) and not _is_inside(name, adapted)):
            yield name, module


def _linear_beside(policy: Policy, fused: Mapping[str, nn.Module]) -> Iterator[tuple[str, nn.Module]]:
    """Yield linear layers outside fused models; in half precision the head alone."""
    heads = head_modules(policy.causal_lm)
    adapted = tuple(name for name, module in policy.model.named_modules() if "lora_A" in module._modules)
    for name, module in _text_modules(policy):
        is_allowed = any(module is head for head in heads) or not is_half(policy.precision)
        if _is_plain(module, policy) and is_allowed and not _is_inside(name, (*fused, *adapted)):
            yield name, module


@torch.no_grad()
def _hold(layer: nn.Module, precision: torch.dtype, compiled: bool) -> Held:
    if compiled:
        return CompiledLinear(weights_of(layer, precision), precision)
    linear = _linear_of(layer)
    kind = PackedLinear if _is_packed(linear, precision) else MergedLinear
    return kind(*_merge_adapter(layer, precision))


def _linear_of(layer: nn.Module) -> nn.Linear:
    """Return the layer itself, or the one below its adapter."""
    linear = layer if isinstance(layer, nn.Linear) else layer.base_layer
    assert isinstance(linear, nn.Linear), "an adapter of a linear layer"
    return linear


def weights_of(layer: nn.Module, precision: torch.dtype) -> Weights:
    """Return the layer's weights, with its adapter merged in whole precision.

    In fewer bits most of what an adapter adds would be lost to rounding.
    """
    linear, adapter = _linear_of(layer), None if isinstance(layer, nn.Linear) else _adapter_of(layer)
    weight, merged = linear.weight, None if is_half(precision) or precision == torch.int8 else adapter
    stamp = None if weight.requires_grad or merged else (id(weight), weight.data_ptr(), weight._version)
    make = partial(_plain_numbers, linear, merged)
    shape = linear.out_features, linear.in_features
    return Weights(shape, make, stamp, linear.bias, None if merged else adapter)


def _plain_numbers(linear: nn.Linear, adapter: Adapter | None) -> Tensor:
    weight_OI = dequantize(linear.weight, linear)
    if adapter is None:
        return weight_OI
    return weight_OI + ((adapter.up_OR @ adapter.down_RI) * adapter.scale).to(weight_OI.dtype)


def _merge_adapter(layer: nn.Module, precision: torch.dtype) -> tuple[Tensor, Tensor | None]:
    """Return the layer's weight with its adapter merged, and its bias."""
    weights = weights_of(layer, precision)
    return weights.make(), weights.bias_O


def _adapter_of(layer: nn.Module) -> Adapter:
    (name,) = layer.active_adapters  # type: ignore[misc]
    down, up = layer.lora_A[name], layer.lora_B[name]  # type: ignore[index]
    return Adapter(down.weight.detach(), up.weight.detach(), float(layer.scaling[name]))  # type: ignore[index,union-attr]


def _is_adapted(module: nn.Module) -> bool:
    """Return True for a layer with one active plain LoRA adapter."""
    if "lora_A" not in module._modules:
        return False
    from peft.tuners.lora import LoraLayer

    if not isinstance(module, LoraLayer) or len(module.active_adapters) != 1:
        return False
    if not isinstance(module.base_layer, nn.Linear):  # of experts
        return False
    (name,) = module.active_adapters
    down, up = module.lora_A[name], module.lora_B[name]
    is_other = getattr(module, "fan_in_fan_out", False) or module.disable_adapters or module.merged
    is_plain = type(down) in PLAIN and type(up) in PLAIN and up.bias is None
    return is_plain and not (is_other or module.lora_variant)


def _is_mergeable(module: nn.Module, policy: Policy) -> bool:
    """Return True for a mergeable adapter: linear, in whole precision."""
    if is_half(policy.precision) or not _is_adapted(module):
        return False
    linear = module.base_layer
    return type(linear) in PLAIN and linear.weight.dtype == policy.precision  # type: ignore[union-attr]


def _wide_heads(policy: Policy) -> list[str]:
    """Return the head's name where its logits are float32 from half precision."""
    layer = linear_layer(policy)
    if layer is None or layer.bias is not None or not is_half(policy.precision) or policy.device.type != "cuda":
        return []
    return [name for name, module in policy.model.named_modules() if module is layer]


def _fused_adapters(policy: Policy) -> list[str]:
    """Return the layers whose plain adapter is fused."""
    if not is_half(policy.precision) or policy.device.type != "cuda":
        return []
    return [name for name, module in policy.model.named_modules() if _is_adapted(module)]


def _is_cast(module: nn.Module, parameter: Tensor, precision: torch.dtype) -> bool:
    is_other = parameter.is_floating_point() and parameter.dtype != precision
    return is_half(precision) and type(module) in PLAIN and is_other


def _is_packed(module: nn.Module, precision: torch.dtype) -> bool:
    return (
        type(module) is OneDnnLinear
        and precision == torch.float32
        and module.weight.dtype == torch.float32
        and module.weight.device.type == "cpu"
    )
