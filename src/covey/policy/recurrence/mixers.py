"""Lead the layers with a state of transformers' models over covey's streams.

Their classes differ, and call the same few functions of their own files: a causal convolution and a recurrence over
all tokens. A layer's forward pass is bound to functions in their place, which ask the layout for the segments, as its
attention does. No modelling file is patched; with a cache of transformers' they compute what they did.

Shapes: B sequences, T tokens, C channels, W width of a convolution, K and H heads, N and P their widths.
"""

import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from covey.policy.attention.base import DENSE
from covey.policy.recurrence.base import Convolution, Operations, Recurrence, forest_of

MARK = "_covey_mixer"
"""Name among the globals of a bound forward pass."""
SILU = ("silu", "swish")
EPS = 1e-6
"""Added to the squared norm of queries and keys, in transformers as in flash-linear-attention."""


@dataclass(frozen=True, slots=True)
class Mixer:
    """A layer's place among those with a state, and how it computes."""

    place: int
    operations: Operations

    def convolve(
        self,
        hidden_states: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        activation: str | None = None,
        **given: Any,
    ) -> Tensor:
        """Compute causal_conv1d_fn, (B, C, T)."""
        if activation not in (None, *SILU):
            raise ValueError(f"model.name needs convolutions with silu or nothing behind them, got {activation}")
        x_BTC = hidden_states.transpose(1, 2)
        wanted = Convolution(x_BTC.flatten(0, 1), weight, bias, activation is not None)
        forest = forest_of(given.get("layout") or DENSE, *x_BTC.shape[:2])
        out_TC = forest.convolve(self.place, wanted, self.operations)
        return out_TC.view(x_BTC.shape).transpose(1, 2)

    def delta(
        self,
        original: Callable[..., Any],
        query: Tensor,
        key: Tensor,
        value: Tensor,
        g: Tensor,
        beta: Tensor,
        **given: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """Compute chunk_gated_delta_rule and chunk_kda, (B, T, H, P)."""
        if given.get("initial_state") is not None or given.get("output_final_state"):
            return original(query, key, value, g=g, beta=beta, **given)
        query, key = _wide(query), _wide(key)
        if given.get("use_qk_l2norm_in_kernel"):
            query, key = (heads * torch.rsqrt((heads * heads).sum(-1, keepdim=True) + EPS) for heads in (query, key))
        decay = g if g.dim() == value.dim() else g[..., None]
        wanted = Recurrence(query * query.shape[-1] ** -0.5, key, value, decay, beta)
        return self._recur(given, wanted).to(value.dtype), None

    def select(
        self,
        original: Callable[..., Any],
        x_BTHP: Tensor,
        dt_BTH: Tensor,
        decay_H: Tensor,
        key_BTKN: Tensor,
        query_BTKN: Tensor,
        *rest: Any,
        **given: Any,
    ) -> Any:
        """Compute mamba_chunk_scan_combined, (B, T, H, P)."""
        others = ("initial_states", "z", "seq_idx")
        if rest or given.get("return_final_states") or any(given.get(name) is not None for name in others):
            return original(x_BTHP, dt_BTH, decay_H, key_BTKN, query_BTKN, *rest, **given)
        bias, (least, most) = given.get("dt_bias"), given.get("dt_limit", (0.0, math.inf))
        dt_BTH = dt_BTH if bias is None else dt_BTH + bias.to(dt_BTH.dtype)
        dt_BTH = (F.softplus(dt_BTH) if given.get("dt_softplus") else dt_BTH).clamp(least, most)
        dt_BTH, x_BTHP = _wide(dt_BTH), _wide(x_BTHP)
        decay_BTH1 = (_wide(decay_H) * dt_BTH)[..., None]
        out_BTHP = self._recur(given, Recurrence(query_BTKN, key_BTKN, x_BTHP * dt_BTH[..., None], decay_BTH1))
        return out_BTHP if given.get("D") is None else out_BTHP + _wide(given["D"])[:, None] * x_BTHP

    def _recur(self, given: Mapping[str, Any], wanted: Recurrence) -> Tensor:
        """Return (B, T, H, P), given inputs of (B, T) tokens."""
        num_rows, num_tokens = wanted.query_TKN.shape[:2]
        query, key, value, decay = (each.flatten(0, 1) for each in wanted.parts)
        beta = None if wanted.beta_TH is None else wanted.beta_TH.flatten(0, 1)
        forest = forest_of(given.get("layout") or DENSE, num_rows, num_tokens)
        out_THP = forest.recur(self.place, Recurrence(query, key, value, decay, beta), self.operations)
        return out_THP.unflatten(0, (num_rows, num_tokens))


def route(model: nn.Module, operations: Operations) -> int:
    """Bind the layers with a state to covey's functions; return how many."""
    found = 0
    for module in model.modules():
        forward = inspect.unwrap(type(module).forward)
        called = CALLED.intersection(forward.__code__.co_names) if isinstance(forward, FunctionType) else ()
        if called:
            mixer = Mixer(found, operations)
            ours: dict[str, Any] = {MARK: mixer}
            ours |= {name: REPLACED[name](mixer, forward.__globals__[name]) for name in called}
            how = forward.__name__, forward.__defaults__, forward.__closure__
            bound = FunctionType(forward.__code__, forward.__globals__ | ours, *how)
            bound.__kwdefaults__ = forward.__kwdefaults__
            module.forward = MethodType(bound, module)
            found += 1
    return found


def unroute(model: nn.Module) -> None:
    """Give the layers back their own forward pass."""
    for module in filter(mixer_of, model.modules()):
        del module.forward


def is_routed(model: nn.Module) -> bool:
    """Return True for a model with layers that `route` bound."""
    return any(map(mixer_of, model.modules()))


def mixer_of(module: nn.Module) -> Mixer | None:
    """Return the mixer of a layer that `route` bound."""
    forward = vars(module).get("forward")
    return forward.__func__.__globals__.get(MARK) if isinstance(forward, MethodType) else None


def _wide(values: Tensor) -> Tensor:
    return values.to(torch.promote_types(values.dtype, torch.float32))


def _nothing(*given: Any, **keywords: Any) -> None:
    """Return no result: no kernel fuses a whole layer here."""


REPLACED: Mapping[str, Callable[[Mixer, Callable[..., Any]], Callable[..., Any]]] = {
    "causal_conv1d_fn": lambda mixer, original: mixer.convolve,
    "torch_chunk_gated_delta_rule": lambda mixer, original: partial(mixer.delta, original),
    "chunk_kimi_delta_attention": lambda mixer, original: partial(mixer.delta, original),
    "mamba2_chunk_scan": lambda mixer, original: partial(mixer.select, original),
    "mamba2_split_conv1d_scan_combined": lambda mixer, original: _nothing,
}
"""Functions by their names in modelling files."""
CALLED = frozenset(REPLACED)
