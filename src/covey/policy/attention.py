"""The one attention function covey gives to transformers' models, and the layouts of the training pass.

A model is loaded with attn_implementation="covey"; the layout travels as a keyword through `model(..., layout=...)`
to every layer, and decides who attends to whom and where keys and values live. No modelling file is patched.

Shapes: B sequences, H query heads, K key/value heads, T tokens, D head width.
"""

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface

ATTENTION = "covey"
UNSUPPORTED = ("softcap", "s_aux", "sinks", "position_bias")
"""Keywords of attention variants that a layout would silently ignore."""


class Layout(Protocol):
    """Who attends to whom in one forward pass."""

    def attend(self, layer: int, query_BHTD: Tensor, key_BKTD: Tensor, value_BKTD: Tensor, rule: "Rule") -> Tensor:
        """Attention output, shape (B, H, T, D)."""
        ...


@dataclass(frozen=True, slots=True)
class Rule:
    """What the architecture adds to plain attention."""

    scaling: float
    """Factor on the scores, usually D ** -0.5."""
    window: int | None
    """A token sees itself and the window - 1 before it; None sees all."""


@dataclass(frozen=True, slots=True)
class Heads:
    """What a layer's heads are like, which decides what can compute them."""

    dtype: torch.dtype
    device_type: str
    key_width: int
    value_width: int


def attention(
    module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **keywords: Any
) -> tuple[Tensor, None]:
    """What transformers calls in every layer: hands over to the layout. Returns (B, T, H, D)."""
    layout = keywords.get("layout")
    if layout is None:
        layout = DENSE
    unsupported = [name for name in UNSUPPORTED if keywords.get(name) is not None]
    if unsupported:
        raise ValueError(f"attention with {unsupported[0]} is not supported, got {type(module).__name__}")
    scaling = keywords.get("scaling")
    rule = Rule(query.shape[-1] ** -0.5 if scaling is None else scaling, keywords.get("sliding_window"))
    # Some encoders do not number their layers; only a cache of keys and values needs the number.
    layer = vars(module).get("layer_idx", id(module))
    return layout.attend(layer, query, key, value, rule).transpose(1, 2), None


def register() -> None:
    """Make attn_implementation="covey" known to transformers; calling it again changes nothing."""
    AttentionInterface.register(ATTENTION, attention)
    AttentionMaskInterface.register(ATTENTION, lambda *args, **keywords: None)


def causal_attention(query_BHTD: Tensor, key_BKSD: Tensor, value_BKSD: Tensor, rule: Rule) -> Tensor:
    """T queries are the last T of S positions; each sees itself and what is before it, within the window."""
    num_queries, num_keys = query_BHTD.shape[-2], key_BKSD.shape[-2]
    grouped = query_BHTD.shape[1] != key_BKSD.shape[1]
    if rule.window is None and num_queries == num_keys:
        return F.scaled_dot_product_attention(
            query_BHTD, key_BKSD, value_BKSD, is_causal=True, scale=rule.scaling, enable_gqa=grouped
        )
    position_T = torch.arange(num_keys - num_queries, num_keys, device=query_BHTD.device)[:, None]
    position_S = torch.arange(num_keys, device=query_BHTD.device)[None, :]
    mask_TS = (position_S <= position_T) & within(position_T - position_S, rule.window)
    return F.scaled_dot_product_attention(
        query_BHTD, key_BKSD, value_BKSD, attn_mask=mask_TS, scale=rule.scaling, enable_gqa=grouped
    )


def within(distance: Tensor, window: int | None) -> Tensor:
    """True where a key this many positions back is still seen."""
    return distance < window if window is not None else torch.ones_like(distance, dtype=torch.bool)


@dataclass(frozen=True, slots=True)
class DenseLayout:
    """Every sequence is causal from its first token. Right padding needs no mask: no real token looks right."""

    def attend(self, layer: int, query_BHTD: Tensor, key_BKTD: Tensor, value_BKTD: Tensor, rule: Rule) -> Tensor:
        return causal_attention(query_BHTD, key_BKTD, value_BKTD, rule)


DENSE = DenseLayout()
