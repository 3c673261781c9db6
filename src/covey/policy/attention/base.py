"""The attention function that covey gives to transformers' models.

A model is loaded with attn_implementation="covey"; the layout travels as a keyword through `model(..., layout=...)`
to every layer, and decides who attends to whom and where keys and values live. No modelling file is patched.

Shapes: B sequences, H query heads, K key/value heads, T tokens, D head width.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import AttentionInterface

ATTENTION = "covey"
UNDERSTOOD = frozenset({"layout", "scaling", "sliding_window", "softcap", "s_aux"})
"""Keywords that change the result."""
IRRELEVANT = frozenset({"dropout", "position_ids", "cache_position", "logits_to_keep", "num_items_in_batch"})
"""Keywords that do not: dropout is off, and positions are in queries and keys already."""


class Layout(Protocol):
    """Mask of attention in one forward pass."""

    def attend(self, layer: int, query_BHTD: Tensor, key_BKTD: Tensor, value_BKTD: Tensor, rule: "Rule") -> Tensor:
        """Return the attention output, shape (B, H, T, D)."""


@dataclass(frozen=True, slots=True)
class Rule:
    """The architecture's additions to plain attention."""

    scaling: float
    """Factor on the scores, usually D ** -0.5."""
    window: int | None
    """A token sees itself and the window - 1 before it; None sees all."""
    softcap: float | None = None
    """Scores s become softcap * tanh(s / softcap) (Gemma 2, arXiv 2408.00118); None leaves them."""
    sink_H: Tensor | None = None
    """Score, for each query head, of a key that is always seen and has no value (gpt-oss); None without one."""

    @property
    def is_plain(self) -> bool:
        return self.softcap is None and self.sink_H is None


@dataclass(frozen=True, slots=True)
class Heads:
    """The properties of a layer's heads that decide which implementations apply."""

    dtype: torch.dtype
    device_type: str
    key_width: int
    value_width: int
    is_plain: bool = True
    """Whether there are no soft caps and sinks."""


def attention(
    module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **keywords: Any
) -> tuple[Tensor, None]:
    """Hand attention over to the layout; return (B, T, H, D)."""
    layout = keywords.get("layout")
    if layout is None:
        layout = DENSE
    _refuse_what_is_not_understood(module, attention_mask, keywords)
    scaling = keywords.get("scaling")
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    rule = Rule(scaling, keywords.get("sliding_window"), keywords.get("softcap"), keywords.get("s_aux"))
    # Some encoders do not number their layers; only a cache of keys and values needs the number.
    layer = vars(module).get("layer_idx", id(module))
    # Some architectures view what they get as (B, T, H * D); the others would make it dense themselves.
    return layout.attend(layer, query, key, value, rule).transpose(1, 2).contiguous(), None


def _refuse_what_is_not_understood(
    module: torch.nn.Module, attention_mask: Tensor | None, keywords: Mapping[str, Any]
) -> None:
    """Refuse a mask or a number that the layout would drop silently."""
    kind = type(module).__name__
    if attention_mask is not None:
        raise ValueError(f"model.name needs attention to all before a token or a window of it, {kind} has another mask")
    for name, value in keywords.items():
        is_number = isinstance(value, Tensor | int | float) and not isinstance(value, bool)
        if is_number and name not in UNDERSTOOD | IRRELEVANT:
            raise ValueError(f"model.name needs attention that covey knows, {kind} wants {name} to be regarded")


def register() -> None:
    """Register attn_implementation="covey" with transformers; idempotent."""
    # No masks are registered beside it: transformers then makes none, and asks the device nothing about positions.
    AttentionInterface.register(ATTENTION, attention)


def causal_attention(query_BHTD: Tensor, key_BKSD: Tensor, value_BKSD: Tensor, rule: Rule) -> Tensor:
    """Attend causally within the window: T queries, last of S positions."""
    num_queries, num_keys = query_BHTD.shape[-2], key_BKSD.shape[-2]
    if rule.window is None and num_queries == num_keys and rule.is_plain:
        return _attend_fused(query_BHTD, key_BKSD, value_BKSD, rule, is_causal=True)
    position_T = torch.arange(num_keys - num_queries, num_keys, device=query_BHTD.device)[:, None]
    position_S = torch.arange(num_keys, device=query_BHTD.device)[None, :]
    mask_TS = (position_S <= position_T) & within(position_T - position_S, rule.window)
    return masked_attention(query_BHTD, key_BKSD, value_BKSD, rule, mask_TS)


def masked_attention(
    query_BHTD: Tensor, key_BKSD: Tensor, value_BKSD: Tensor, rule: Rule, mask: Tensor | None
) -> Tensor:
    """Attend where `mask` (broadcast to B, H, T, S) is True; None: everywhere."""
    num_heads, num_keys = query_BHTD.shape[1], key_BKSD.shape[1]
    if rule.is_plain:
        return _attend_fused(query_BHTD, key_BKSD, value_BKSD, rule, mask)
    # Queries of one key head are multiplied together: no key is repeated.
    query_BKQD = query_BHTD.unflatten(1, (num_keys, -1)).flatten(2, 3)
    score_BHTS = _per_head(query_BKQD @ key_BKSD.mT, num_heads) * rule.scaling
    score_BHTS = apply_softcap(score_BHTS.to(torch.promote_types(score_BHTS.dtype, torch.float32)), rule.softcap)
    if mask is not None:
        score_BHTS = score_BHTS.masked_fill(~mask, -torch.inf)
    weight_BHTS = _softmax(score_BHTS, rule.sink_H).to(value_BKSD.dtype)
    weight_BKQS = weight_BHTS.unflatten(1, (num_keys, -1)).flatten(2, 3)
    return _per_head(weight_BKQS @ value_BKSD, num_heads)


def _attend_fused(
    query_BHTD: Tensor,
    key_BKSD: Tensor,
    value_BKSD: Tensor,
    rule: Rule,
    mask: Tensor | None = None,
    is_causal: bool = False,
) -> Tensor:
    group = query_BHTD.shape[1] // key_BKSD.shape[1]
    is_masked_or_whole = mask is not None or query_BHTD.dtype == torch.float32
    if group > 1 and query_BHTD.device.type == "cuda" and is_masked_or_whole:
        # Kernels of CUDA for masks and for float32 know no grouped heads, and plain operations would keep all scores.
        key_BKSD, value_BKSD = (heads.repeat_interleave(group, dim=1) for heads in (key_BKSD, value_BKSD))
        group = 1
    heads = (query_BHTD, key_BKSD, value_BKSD)
    return F.scaled_dot_product_attention(
        *heads, attn_mask=mask, is_causal=is_causal, scale=rule.scaling, enable_gqa=group > 1
    )


def apply_softcap(score: Tensor, softcap: float | None) -> Tensor:
    """Cap scores within +-softcap."""
    return score if softcap is None else softcap * (score / softcap).tanh()


def without_sink(logsum: Tensor, sink: Tensor) -> Tensor:
    """Return the attention weight that a sink leaves to the keys."""
    return (logsum - sink).sigmoid()


def _softmax(score_BHTS: Tensor, sink_H: Tensor | None) -> Tensor:
    if sink_H is None:
        return score_BHTS.softmax(dim=-1)
    sink_H11 = sink_H.to(score_BHTS.dtype)[:, None, None]
    with_sink = torch.cat([score_BHTS, sink_H11.expand(*score_BHTS.shape[:-1], 1)], dim=-1)
    return with_sink.softmax(dim=-1)[..., :-1]


def _per_head(values_BKQX: Tensor, num_heads: int) -> Tensor:
    """Map (B, K, Q*T, X) to (B, H, T, X)."""
    num_queries = num_heads // values_BKQX.shape[1]
    return values_BKQX.unflatten(2, (num_queries, -1)).flatten(1, 2)


def within(distance: Tensor, window: int | None) -> Tensor:
    """Return True for keys this many positions back that the window includes."""
    return distance < window if window is not None else torch.ones_like(distance, dtype=torch.bool)


@dataclass(frozen=True, slots=True)
class DenseLayout:
    """Causal attention within each sequence; right padding needs no mask."""

    def attend(self, layer: int, query_BHTD: Tensor, key_BKTD: Tensor, value_BKTD: Tensor, rule: Rule) -> Tensor:
        return causal_attention(query_BHTD, key_BKTD, value_BKTD, rule)


DENSE = DenseLayout()
