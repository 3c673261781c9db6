"""Compute a policy in float32, its weights widened layer by layer.

Half precision rounds away the difference between a layout and single texts.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from covey.policy import sharding
from covey.policy.policy import Policy, is_half


def can_widen(policy: Policy) -> bool:
    """Return True where float32 is exact: shards and quantised weights stay."""
    return policy.computes_whole or not (policy.sharded or getattr(policy.causal_lm, "is_quantized", False))


@contextmanager
def in_float32(policy: Policy) -> Iterator[Policy]:
    """Yield the policy in float32, or unchanged where it cannot be widened.

    Passes have no gradient. One layer is wide at a time, and what lies outside of layers.
    """
    if policy.computes_whole or not can_widen(policy):
        yield policy
        return
    model, layers = policy.causal_lm, sharding.layers_of(policy.causal_lm)
    inside = {module for layer in layers for module in layer.modules()}
    with ExitStack() as held, torch.no_grad():
        held.enter_context(_wide([module for module in model.modules() if module not in inside]))
        for layer in layers:
            _widen_at_calls(layer, held)
        yield replace(policy, precision=torch.float32)


def _widen_at_calls(layer: nn.Module, held: ExitStack) -> None:
    own = ExitStack()

    def begin(module: nn.Module, given: Any) -> None:
        own.enter_context(_wide(list(layer.modules())))

    def end(module: nn.Module, given: Any, out: Any) -> None:
        own.close()

    held.callback(layer.register_forward_pre_hook(begin).remove)
    held.callback(layer.register_forward_hook(end, always_call=True).remove)
    held.callback(own.close)


@contextmanager
def _wide(modules: list[nn.Module]) -> Iterator[None]:
    """Hold wide copies of weights in half precision inside."""
    places = [
        (module._parameters, name, weight)
        for module in modules
        for name, weight in module._parameters.items()
        if weight is not None and is_half(weight.dtype)
    ]
    made = {id(weight): nn.Parameter(weight.detach().float(), requires_grad=False) for _, _, weight in places}
    for table, name, weight in places:
        table[name] = made[id(weight)]  # tied weights stay one
    try:
        yield
    finally:
        for table, name, weight in places:
            table[name] = weight
