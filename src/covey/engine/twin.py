"""The policy as it is sampled in half precision: the weights of its linear layers cast once, not anew in every pass.

Autocast keeps casts only within one pass, and a decode step is a pass: for 64 rows casting costs as much as computing.
The numbers are autocast's own, bit for bit.
"""

import copy
from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import nn

from covey.policy.linear import OneDnnLinear
from covey.policy.policy import Policy

LINEAR = (nn.Linear, OneDnnLinear)
"""Layers whose weights are cast; others may treat theirs in ways of their own."""


def is_wanted(policy: Policy) -> bool:
    """Whether passes cast weights: half precision over weights of another type, each rank holding them all."""
    if policy.sharded or policy.precision in (torch.float32, torch.float64):
        return False
    return cast_bytes(policy) > 0


def cast_bytes(policy: Policy) -> int:
    """What the casts take."""
    return sum(parameter.numel() * policy.precision.itemsize for parameter in _cast(policy.model, policy.precision))


def twin_of(policy: Policy) -> Policy:
    """The same policy for passes without gradient. It shares every tensor but the casts, which `refresh` renews."""
    shared = [*policy.model.parameters(), *policy.model.buffers()]
    # deepcopy takes what it finds here for copied: modules are new, tensors are the policy's own.
    model = copy.deepcopy(policy.model, {id(tensor): tensor for tensor in shared})
    twin = replace(policy, model=model)
    refresh(twin, policy)
    return twin


@torch.no_grad()
def refresh(twin: Policy, policy: Policy) -> None:
    """Take the policy's weights as they are now."""
    for mine, theirs in zip(twin.model.modules(), policy.model.modules(), strict=True):
        for name, parameter in theirs.named_parameters(recurse=False):
            if not _is_cast(theirs, parameter, policy.precision):
                mine.register_parameter(name, parameter)
                continue
            held = mine.get_parameter(name)
            if held is parameter:
                held = nn.Parameter(torch.empty_like(parameter, dtype=policy.precision), requires_grad=False)
                mine.register_parameter(name, held)
            held.copy_(parameter)


def _cast(model: nn.Module, precision: torch.dtype) -> Iterator[nn.Parameter]:
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            if _is_cast(module, parameter, precision):
                yield parameter


def _is_cast(module: nn.Module, parameter: nn.Parameter, precision: torch.dtype) -> bool:
    return type(module) in LINEAR and parameter.is_floating_point() and parameter.dtype != precision
