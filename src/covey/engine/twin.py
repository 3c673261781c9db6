"""The policy as it is sampled: weights of linear layers in the form that decoding reads fastest, made once, not in
every pass.

In half precision they are cast: autocast keeps casts only within one pass, and a decode step is a pass. The numbers are
autocast's own, bit for bit. In float32 on a CPU they are laid out for oneDNN where that computes the layer anyway.
"""

import copy
from dataclasses import replace

import torch
from torch import nn

from covey.policy.linear import OneDnnLinear, PackedLinear
from covey.policy.policy import Policy

LINEAR = (nn.Linear, OneDnnLinear)
"""Layers whose weights are cast; others may treat theirs in ways of their own."""


def is_wanted(policy: Policy) -> bool:
    """Whether any weight is read in another form than it is trained in; each rank must hold them all."""
    return not policy.sharded and own_bytes(policy) > 0


def own_bytes(policy: Policy) -> int:
    """What the twin's own weights take."""
    layers = [
        (module, name, p) for module in policy.model.modules() for name, p in module.named_parameters(recurse=False)
    ]
    return sum(
        parameter.numel() * policy.precision.itemsize
        for module, name, parameter in layers
        if _is_cast(module, parameter, policy.precision) or (_is_packed(module, policy.precision) and name == "weight")
    )


def twin_of(policy: Policy) -> Policy:
    """The same policy for passes without gradient, all tensors shared but its own weights, which `refresh` renews."""
    shared = [*policy.model.parameters(), *policy.model.buffers()]
    # deepcopy takes what it finds here for copied: modules are new, tensors are the policy's own.
    model = copy.deepcopy(policy.model, {id(tensor): tensor for tensor in shared})
    for name, module in list(model.named_modules()):
        if isinstance(module, OneDnnLinear) and _is_packed(module, policy.precision):
            parent, _, own_name = name.rpartition(".")
            setattr(model.get_submodule(parent), own_name, PackedLinear(module))
    twin = replace(policy, model=model)
    refresh(twin, policy)
    return twin


@torch.no_grad()
def refresh(twin: Policy, policy: Policy) -> None:
    """Take the policy's weights as they are now."""
    for mine, theirs in zip(twin.model.modules(), policy.model.modules(), strict=True):
        if isinstance(mine, PackedLinear):
            assert isinstance(theirs, OneDnnLinear)
            mine.take(theirs)
            continue
        for name, parameter in theirs.named_parameters(recurse=False):
            if not _is_cast(theirs, parameter, policy.precision):
                mine.register_parameter(name, parameter)
                continue
            held = mine.get_parameter(name)
            if held is parameter:
                held = nn.Parameter(torch.empty_like(parameter, dtype=policy.precision), requires_grad=False)
                mine.register_parameter(name, held)
            held.copy_(parameter)


def _is_cast(module: nn.Module, parameter: nn.Parameter, precision: torch.dtype) -> bool:
    half = precision not in (torch.float32, torch.float64)
    return half and type(module) in LINEAR and parameter.is_floating_point() and parameter.dtype != precision


def _is_packed(module: nn.Module, precision: torch.dtype) -> bool:
    return (
        type(module) is OneDnnLinear
        and precision == torch.float32
        and module.weight.dtype == torch.float32
        and module.weight.device.type == "cpu"
    )
