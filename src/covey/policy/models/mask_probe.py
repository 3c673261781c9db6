"""Compare the masks that a model makes with those of covey's attention.

Covey's layouts decide the mask, so a model is run without one. Here it runs once under the attention `PROBE`, which
receives transformers' masks, and each layer's is checked: at the tokens of the pass and, where transformers made it, on
either side of the window and at the last position.

Shapes: H query heads, T tokens.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedConfig, PreTrainedModel
from transformers.masking_utils import AttentionMaskInterface, eager_mask, sdpa_mask

from covey.policy.attention.base import attention, within

PROBE = "covey_probe"
Made = tuple[Tensor, Callable[..., Any]]
"""A mask, and the function of positions that it was made from."""


@dataclass(slots=True)
class _Masks:
    """The masks of the current pass, and the longest possible sequence."""

    made: list[Made] = field(default_factory=list)
    max_length: int = 0


_MASKS = _Masks()


@contextmanager
def seeing_masks(model: PreTrainedModel) -> Iterator[None]:
    """Check the model's masks inside. ValueError at the first difference."""
    AttentionInterface.register(PROBE, _attention)
    AttentionMaskInterface.register(PROBE, _mask)
    configs = {id(config): config for config in configs_of(model)}
    before = {key: config._attn_implementation_internal for key, config in configs.items()}
    _MASKS.max_length = getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None) or 0
    try:
        for config in configs.values():
            config._attn_implementation_internal = PROBE
        yield
    finally:
        for key, config in configs.items():
            config._attn_implementation_internal = before[key]
        _MASKS.made.clear()


def configs_of(model: PreTrainedModel) -> Iterator[PreTrainedConfig]:
    """Yield the configurations of all modules, nested ones included."""
    found = (getattr(module, "config", None) for module in model.modules())
    held = [config for config in found if isinstance(config, PreTrainedConfig)]
    while held:
        config = held.pop()
        yield config
        parts = (getattr(config, name, None) for name in config.sub_configs)
        held += [part for part in parts if isinstance(part, PreTrainedConfig)]


def _mask(**keywords: Any) -> Tensor | None:
    mask: Tensor | None = eager_mask(**keywords)
    if mask is not None:
        _MASKS.made.append((mask, keywords["mask_function"]))
    return mask


def _attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **keywords: Any
) -> tuple[Tensor, None]:
    if attention_mask is not None:
        window = keywords.get("sliding_window")
        if not _is_expected(attention_mask, query.shape[-2], window):
            raise ValueError(
                f"model.name needs attention to all before a token or a window of it, {type(module).__name__} "
                f"has another mask (where sliding_window={window} is said)"
            )
    return attention(module, query, key, value, None, **keywords)


def _is_expected(mask: Tensor, num_tokens: int, window: int | None) -> bool:
    seen = mask if mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min / 2
    adds = mask.dtype != torch.bool and bool((mask[seen] != 0).any())
    position_T = torch.arange(num_tokens, device=mask.device)
    distance_TT = position_T[:, None] - position_T
    expected_TT = (distance_TT >= 0) & within(distance_TT, window)
    if adds or mask.shape[-2:] != expected_TT.shape or not bool((seen == expected_TT).all()):
        return False
    makers = [maker for made, maker in _MASKS.made if made.data_ptr() == mask.data_ptr()]
    return all(_is_expected_far(maker, window, mask.device) for maker in makers)


def _is_expected_far(maker: Callable[..., Any], window: int | None, device: torch.device) -> bool:
    """Check the mask at the last position, and at the window's edge."""
    near = [] if window is None else [window - 1, window, window + 1]
    for position in {place for place in (*near, _MASKS.max_length - 1) if 0 <= place < _MASKS.max_length}:
        sizes: dict[str, Any] = {"q_length": 1, "kv_length": position + 1, "q_offset": position, "kv_offset": 0}
        try:
            row = sdpa_mask(batch_size=1, mask_function=maker, allow_is_causal_skip=False, device=device, **sizes)
        except IndexError:  # made of this pass's very tokens
            return False
        distance = position - torch.arange(position + 1, device=device)
        if row is not None and not torch.equal(row[0, 0, 0], within(distance, window)):
            return False
    return True
