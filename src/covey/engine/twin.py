"""The policy as it is sampled: weights of linear layers in the form that decoding reads fastest, made once, not in
every pass.

In half precision they are cast: autocast keeps casts only within one pass, and a decode step is a pass. The numbers are
autocast's own, bit for bit. In float32 on a CPU they are laid out for oneDNN where that computes the layer anyway. In
whole precision adapters are merged into their layers: two products less, and rounding is all that differs (in half
precision the merged weight would be rounded too coarsely).
"""

import copy
from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor, nn

from covey.policy.linear import MergedLinear, OneDnnLinear, PackedLinear
from covey.policy.policy import Policy, is_adapted

LINEAR = (nn.Linear, OneDnnLinear)
"""Layers whose weights are cast or merged; others may treat theirs in ways of their own."""

Held = PackedLinear | MergedLinear
"""What stands in the twin for a layer whose weight is held in another form."""


def is_wanted(policy: Policy) -> bool:
    """Whether any weight is read in another form than it is trained in; each rank must hold them all."""
    return not policy.sharded and own_bytes(policy) > 0


def own_bytes(policy: Policy) -> int:
    """What the twin's own weights take."""
    held = dict(_held_layers(policy))
    inside = tuple(f"{name}." for name in held)
    cast = [
        parameter
        for name, module in policy.model.named_modules()
        if name not in held and not name.startswith(inside)
        for parameter in module.parameters(recurse=False)
        if _is_cast(module, parameter, policy.precision)
    ]
    weights = [_linear_of(layer).weight for layer in held.values()]
    return sum(weight.numel() * policy.precision.itemsize for weight in (*cast, *weights))


def twin_of(policy: Policy) -> Policy:
    """The same policy for passes without gradient, all tensors shared but its own weights, which `refresh` renews."""
    shared = [*policy.model.parameters(), *policy.model.buffers()]
    # deepcopy takes what it finds here for copied: modules are new, tensors are the policy's own.
    model = copy.deepcopy(policy.model, {id(tensor): tensor for tensor in shared})
    for name, layer in _held_layers(policy):
        parent, _, own_name = name.rpartition(".")
        setattr(model.get_submodule(parent), own_name, _held(layer, policy.precision))
    twin = replace(policy, model=model)
    refresh(twin, policy)
    return twin


@torch.no_grad()
def refresh(twin: Policy, policy: Policy) -> None:
    """Take the policy's weights as they are now."""
    for name, mine in twin.model.named_modules():
        theirs = policy.model.get_submodule(name)
        if isinstance(mine, Held):
            mine.take(_weight_of(theirs), _linear_of(theirs).bias)
            continue
        for parameter_name, parameter in theirs.named_parameters(recurse=False):
            if not _is_cast(theirs, parameter, policy.precision):
                mine.register_parameter(parameter_name, parameter)
                continue
            held = mine.get_parameter(parameter_name)
            if held is parameter:
                held = nn.Parameter(torch.empty_like(parameter, dtype=policy.precision), requires_grad=False)
                mine.register_parameter(parameter_name, held)
            held.copy_(parameter)


def _held_layers(policy: Policy) -> Iterator[tuple[str, nn.Module]]:
    """Layers the twin has in a form of its own: those with adapters to merge, and plain ones to lay out."""
    if _is_half(policy.precision):
        return
    adapted = tuple(name for name, module in policy.model.named_modules() if _is_mergeable(module, policy))
    inside = tuple(f"{name}." for name in adapted)
    for name, module in policy.model.named_modules():
        if name in adapted or (_is_packed(module, policy.precision) and not name.startswith(inside)):
            yield name, module


@torch.no_grad()
def _held(layer: nn.Module, precision: torch.dtype) -> Held:
    linear = _linear_of(layer)
    kind = PackedLinear if _is_packed(linear, precision) else MergedLinear
    return kind(_weight_of(layer), linear.bias)


def _linear_of(layer: nn.Module) -> nn.Linear:
    """The layer itself, or what is below its adapter."""
    linear = layer if type(layer) in LINEAR else layer.base_layer
    assert isinstance(linear, nn.Linear)
    return linear


def _weight_of(layer: nn.Module) -> Tensor:
    """The layer's weight, its adapter merged in."""
    weight_OI = _linear_of(layer).weight
    if type(layer) in LINEAR:
        return weight_OI
    (name,) = layer.active_adapters  # type: ignore[misc]
    delta_OI: Tensor = layer.get_delta_weight(name)  # type: ignore[operator]
    return weight_OI + delta_OI.to(weight_OI.dtype)


def _is_mergeable(module: nn.Module, policy: Policy) -> bool:
    """A plain LoRA layer over a plain linear layer, with one adapter at work."""
    if not is_adapted(policy.model):
        return False
    from peft.tuners.lora import Linear

    return (
        type(module) is Linear
        and type(module.base_layer) in LINEAR
        and module.base_layer.weight.dtype == policy.precision
        and len(module.active_adapters) == 1
        and not (module.fan_in_fan_out or module.disable_adapters or module.merged or module.lora_variant)
    )


def _is_half(precision: torch.dtype) -> bool:
    return precision not in (torch.float32, torch.float64)


def _is_cast(module: nn.Module, parameter: nn.Parameter, precision: torch.dtype) -> bool:
    is_other = parameter.is_floating_point() and parameter.dtype != precision
    return _is_half(precision) and type(module) in LINEAR and is_other


def _is_packed(module: nn.Module, precision: torch.dtype) -> bool:
    return (
        type(module) is OneDnnLinear
        and precision == torch.float32
        and module.weight.dtype == torch.float32
        and module.weight.device.type == "cpu"
    )
