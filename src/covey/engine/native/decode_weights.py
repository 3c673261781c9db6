"""The policy as it is sampled: weights of linear layers in the form that decoding reads fastest, made once, not in
every pass.

In half precision they are cast: autocast keeps casts only within one pass, and a decode step is a pass. Through torch
the numbers are autocast's own, bit for bit; through C only what enters a product is rounded. In float32 on a CPU they
are laid out for oneDNN where that computes the layer anyway. In whole precision adapters are merged into their layers:
two products less, and rounding is all that differs (in half precision the merged weight would be rounded too coarsely).
Where decoding goes through C, base models of a known form are fused (`fused.py`), and the other linear layers are laid
out for it (`panels.py`).
"""

import copy
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace

import torch
from torch import Tensor, nn

from covey.engine.native.models import joined
from covey.engine.native.models.fused import FusedModel, is_fusable, linear_layers
from covey.engine.native.panels import CompiledLinear
from covey.policy.attention.base import Rule
from covey.policy.head import linear_layer, wide_product
from covey.policy.kernels.linear import MergedLinear, OneDnnLinear, PackedLinear
from covey.policy.policy import Policy, head_modules, is_adapted, is_half

LINEAR = (nn.Linear, OneDnnLinear)
"""Layers whose weights are cast or merged; others may treat theirs in ways of their own."""


class FusedAdapter(nn.Module):
    """A layer and its LoRA adapter for half precision on a GPU: scale and sum come with the adapter's second product.

    x @ W + b + (x @ A) @ (scale B): two kernels beside the layer's own, in place of four and the casts of A and B.
    """

    def __init__(self, layer: nn.Module, precision: torch.dtype) -> None:
        super().__init__()
        self.base_layer = layer.base_layer
        self._precision = precision
        self.take(layer)

    def take(self, layer: nn.Module) -> None:
        """Hold the adapter as it is now."""
        (name,) = layer.active_adapters  # type: ignore[misc]
        down, up = layer.lora_A[name].weight, layer.lora_B[name].weight  # type: ignore[index,union-attr]
        self._down_IN = down.detach().t().to(self._precision)
        self._up_NO = (up.detach() * layer.scaling[name]).t().to(self._precision)  # type: ignore[index]

    def forward(self, input: Tensor) -> Tensor:
        out = self.base_layer(input)  # type: ignore[operator]
        flat = input.reshape(-1, input.shape[-1]).to(self._precision)
        return torch.addmm(out.flatten(0, -2), flat @ self._down_IN, self._up_NO).view(out.shape)


class WideHead(nn.Module):
    """An output head without bias for half precision on a GPU: logits in float32, as the trainer's (`policy.head`)."""

    def __init__(self, layer: nn.Module, precision: torch.dtype) -> None:
        super().__init__()
        self._precision = precision
        self.take(layer)

    def take(self, layer: nn.Module) -> None:
        """Hold the weight as it is now, in the type of products."""
        self._weight_VC = layer.get_parameter("weight").detach().to(self._precision)

    def forward(self, input: Tensor) -> Tensor:
        flat = input.reshape(-1, input.shape[-1]).to(self._precision)
        return wide_product(flat, self._weight_VC.t()).view(*input.shape[:-1], -1)


Held = PackedLinear | MergedLinear | CompiledLinear
"""What stands in the decode policy for a layer whose weight is held in another form."""

NOTHING: Mapping[int, Rule] = {}


def is_wanted(policy: Policy, rules: Mapping[int, Rule] = NOTHING) -> bool:
    """Return whether any weight is read in another form than it is trained in. Each rank must hold them all."""
    return not policy.sharded and (own_bytes(policy) > 0 or bool(_fusable(policy, rules)))


def is_fused(decode_policy: Policy) -> bool:
    """Return whether all linear layers of a decode policy are computed in C, where no row sees those beside it."""
    model = decode_policy.causal_lm
    heads = head_modules(model)
    return isinstance(model.base_model, FusedModel) and all(isinstance(head, CompiledLinear) for head in heads)


def own_bytes(policy: Policy) -> int:
    """Return what the decode policy's own weights take where nothing is fused."""
    held = dict(_held_layers(policy))
    cast = [
        parameter
        for name, module in policy.model.named_modules()
        if name not in held and not _is_inside(name, held)
        for parameter in module.parameters(recurse=False)
        if _is_cast(module, parameter, policy.precision)
    ]
    weights = [_linear_of(layer).weight for layer in held.values()]
    return sum(weight.numel() * policy.precision.itemsize for weight in (*cast, *weights))


def build_decode_policy(policy: Policy, rules: Mapping[int, Rule] = NOTHING) -> Policy:
    """The same policy for passes without gradient, all tensors shared but its own weights, which `refresh` renews.

    `rules`, by layer, are given where the base model may be fused.
    """
    shared = [*policy.model.parameters(), *policy.model.buffers()]
    # deepcopy takes what it finds here for copied: modules are new, tensors are the policy's own.
    model = copy.deepcopy(policy.model, {id(tensor): tensor for tensor in shared})
    fused = {name: _fused(model.get_submodule(name), rules, policy) for name in _fusable(policy, rules)}
    through_c = bool(fused) and not joined.is_wanted(policy)
    others = _linear_beside(policy, fused) if through_c else _held_layers(policy)
    held = {name: _held(layer, policy.precision, through_c) for name, layer in others}
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
    """Take the policy's weights as they are now."""
    for name, mine in decode_policy.model.named_modules():
        theirs = policy.model.get_submodule(name)
        if isinstance(mine, FusedModel | joined.JoinedModel | FusedAdapter | WideHead):
            mine.take(theirs)
        elif isinstance(mine, Held):
            mine.take(*_weight_of(theirs))
        else:
            _take_parameters(mine, theirs, policy.precision)


def _take_parameters(mine: nn.Module, theirs: nn.Module, precision: torch.dtype) -> None:
    """Share what is read as it is. Copy what is cast."""
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
    """Return the name of the base model where it is computed as a whole.

    Only with rules, where decoding goes through C or is joined.
    """
    base = policy.causal_lm.base_model
    if not rules or not is_fusable(base) or not all(_is_taken(linear, policy) for linear in linear_layers(base)):
        return []
    return [name for name, module in policy.model.named_modules() if module is base]


def _fused(model: nn.Module, rules: Mapping[int, Rule], policy: Policy) -> FusedModel | joined.JoinedModel:
    if joined.is_wanted(policy):
        return joined.JoinedModel(model, rules, policy.precision)
    return FusedModel(model, rules, _weight_of, is_half(policy.precision))


def _is_taken(linear: nn.Module, policy: Policy) -> bool:
    """Return whether panels can hold it: in half precision inputs lie in pairs. What is joined would be cast anyway."""
    if joined.is_wanted(policy):
        return type(linear) is nn.Linear and _is_cast(linear, linear.weight, policy.precision)
    return _is_plain(linear, policy) and not (is_half(policy.precision) and _linear_of(linear).in_features % 2)


def _is_plain(linear: nn.Module, policy: Policy) -> bool:
    return type(linear) in LINEAR or _is_mergeable(linear, policy)


def _is_inside(name: str, outer: Iterable[str]) -> bool:
    """Return whether a module lies below one of some others, by name."""
    return any(name.startswith(f"{above}.") for above in outer)


def _held_layers(policy: Policy) -> Iterator[tuple[str, nn.Module]]:
    """Layers the decode policy has in a form of its own: those with adapters to merge, and plain ones to lay out."""
    if is_half(policy.precision):
        return
    adapted = tuple(name for name, module in policy.model.named_modules() if _is_mergeable(module, policy))
    for name, module in policy.model.named_modules():
        if name in adapted or (_is_packed(module, policy.precision) and not _is_inside(name, adapted)):
            yield name, module


def _linear_beside(policy: Policy, fused: Mapping[str, nn.Module]) -> Iterator[tuple[str, nn.Module]]:
    """Linear layers outside of what is fused. In half precision only the head: adapters look at the types inside."""
    heads = head_modules(policy.causal_lm)
    adapted = tuple(name for name, module in policy.model.named_modules() if _is_mergeable(module, policy))
    for name, module in policy.model.named_modules():
        is_allowed = any(module is head for head in heads) or not is_half(policy.precision)
        if _is_plain(module, policy) and is_allowed and not _is_inside(name, (*fused, *adapted)):
            yield name, module


@torch.no_grad()
def _held(layer: nn.Module, precision: torch.dtype, compiled: bool) -> Held:
    if compiled:
        return CompiledLinear(*_weight_of(layer), half=is_half(precision))
    linear = _linear_of(layer)
    kind = PackedLinear if _is_packed(linear, precision) else MergedLinear
    return kind(*_weight_of(layer))


def _linear_of(layer: nn.Module) -> nn.Linear:
    """Return the layer itself, or what is below its adapter."""
    linear = layer if type(layer) in LINEAR else layer.base_layer
    assert isinstance(linear, nn.Linear)
    return linear


def _weight_of(layer: nn.Module) -> tuple[Tensor, Tensor | None]:
    """Return the layer's weight, its adapter merged in, and its bias."""
    weight_OI, bias_O = _linear_of(layer).weight, _linear_of(layer).bias
    if type(layer) in LINEAR:
        return weight_OI, bias_O
    (name,) = layer.active_adapters  # type: ignore[misc]
    delta_OI: Tensor = layer.get_delta_weight(name)  # type: ignore[operator]
    return weight_OI + delta_OI.to(weight_OI.dtype), bias_O


def _is_mergeable(module: nn.Module, policy: Policy) -> bool:
    """Return whether this is a plain LoRA layer over a plain linear layer, one adapter at work, in full precision."""
    if not is_adapted(policy.model) or is_half(policy.precision):
        return False
    from peft.tuners.lora import Linear

    return (
        type(module) is Linear
        and type(module.base_layer) in LINEAR
        and module.base_layer.weight.dtype == policy.precision
        and len(module.active_adapters) == 1
        and not (module.fan_in_fan_out or module.disable_adapters or module.merged or module.lora_variant)
    )


def _wide_heads(policy: Policy) -> list[str]:
    """Return the name of the head where the trainer computes its logits in float32 from half precision."""
    layer = linear_layer(policy)
    if layer is None or layer.bias is not None or not is_half(policy.precision) or policy.device.type != "cuda":
        return []
    return [name for name, module in policy.model.named_modules() if module is layer]


def _fused_adapters(policy: Policy) -> list[str]:
    """Return the layers whose plain LoRA adapter is fused: in half precision on a GPU, where launches cost."""
    if not is_adapted(policy.model) or not is_half(policy.precision) or policy.device.type != "cuda":
        return []
    from peft.tuners.lora import LoraLayer

    return [
        name
        for name, module in policy.model.named_modules()
        if isinstance(module, LoraLayer)
        and len(module.active_adapters) == 1
        and type(module.lora_A[module.active_adapters[0]]) is nn.Linear
        and not (
            getattr(module, "fan_in_fan_out", False) or module.disable_adapters or module.merged or module.lora_variant
        )
    ]


def _is_cast(module: nn.Module, parameter: Tensor, precision: torch.dtype) -> bool:
    is_other = parameter.is_floating_point() and parameter.dtype != precision
    return is_half(precision) and type(module) in LINEAR and is_other


def _is_packed(module: nn.Module, precision: torch.dtype) -> bool:
    return (
        type(module) is OneDnnLinear
        and precision == torch.float32
        and module.weight.dtype == torch.float32
        and module.weight.device.type == "cpu"
    )
