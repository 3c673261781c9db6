"""Fork, join and drop the rows of any model's cache.

Keys and values, convolution and recurrent states: every tensor of two dimensions or more has the batch first. Tensors
of fewer count tokens, and are the same for all rows.
"""

import copy
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache as remembered
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig
from transformers.cache_utils import LinearAttentionLayer

KEYWORDS = ("past_key_values", "cache_params", "state")
"""Names of a cache, in an output and as an argument."""
T = TypeVar("T")
Combine = Callable[[Sequence[Tensor]], Tensor]


@dataclass(frozen=True, slots=True)
class Caching:
    """Exact computations of a model's own cache, and its size."""

    forks: bool = False
    """Rows of a cache may be taken, and continue token by token; else texts are read again for each token."""
    reads_on: bool = False
    """Several tokens at once may follow a cache."""
    token_bytes: int = 0
    state_bytes: int = 0
    """Bytes that do not grow with the tokens."""


@remembered
def takes_last(function: Callable[..., object]) -> bool:
    """Return True where a forward pass computes the last logits alone."""
    return "logits_to_keep" in inspect.signature(function).parameters


def cache_keyword(output: Mapping[str, Any]) -> dict[str, object]:
    """Return an output's cache under its keyword of the next pass.

    {} without one. `output` is what a transformers model returns with `use_cache=True`.
    """
    return next(({name: output[name]} for name in KEYWORDS if output.get(name) is not None), {})


def fork_rows(cache: T, index: Tensor) -> T:
    """Return a cache of the rows `index` (R,), through which gradients flow."""
    return _combine([cache], lambda tensors: tensors[0].index_select(0, index.to(tensors[0].device)), {})


def join_rows(caches: Sequence[T]) -> T:
    """Return one cache with all rows; they hold equally many tokens."""
    return _combine(caches, lambda tensors: torch.cat(list(tensors)), {})


def cache_bytes(cache: object) -> int:
    sizes: list[int] = []

    def count(tensors: Sequence[Tensor]) -> Tensor:
        sizes.append(tensors[0].nbytes)
        return tensors[0]

    _combine([cache], count, {})
    return sum(sizes)


def take_rows(cache: object, index: Tensor) -> None:
    """Keep the rows `index` (R,) of a cache, in place."""
    _combine([cache], lambda tensors: tensors[0].index_select(0, index.to(tensors[0].device)), {}, lambda held: held)


def assign_states(cache: object) -> None:
    """Make the layers assign their recurrent states.

    Transformers copies into them, over what an earlier pass saved for its backward pass.
    """
    layers = vars(cache).get("layers", []) if hasattr(cache, "__dict__") else []
    for place, layer in enumerate(layers):
        if isinstance(layer, LinearAttentionLayer) and not isinstance(layer, _Assigns):
            layers[place] = object.__new__(_assigning(type(layer)))
            vars(layers[place]).update(vars(layer))


class _Assigns:
    def update_recurrent_state(self, recurrent_states: Tensor, state_idx: int = 0, **_: object) -> Tensor:
        held = vars(self)
        held["is_recurrent_states_initialized"][state_idx] = True
        held["recurrent_states"][state_idx] = recurrent_states
        return recurrent_states


@remembered
def _assigning(kind: type) -> type:
    return type(kind.__name__, (_Assigns, kind), {"__module__": kind.__module__})


def _combine(
    parts: Sequence[Any], combine: Combine, made: dict[int, Any], begin: Callable[[Any], Any] = copy.copy
) -> Any:
    """Return the first part with tensors combined over all.

    `begin` makes the tensor to fill: a copy, or the part itself. A tensor held twice stays one.
    """
    held = parts[0]
    if isinstance(held, Tensor):
        return combine(parts) if held.dim() > 1 else held
    if isinstance(held, tuple):
        return tuple(_combine(each, combine, made, begin) for each in zip(*parts, strict=True))
    if id(held) in made or not _keeps_tensors(held):
        return made.get(id(held), held)
    made[id(held)] = copied = begin(held)
    if isinstance(held, list):
        copied[:] = [_combine(each, combine, made, begin) for each in zip(*parts, strict=True)]
        return copied
    inner = [part if isinstance(part, dict) else vars(part) for part in parts]
    target = copied if isinstance(copied, dict) else vars(copied)
    target.update({name: _combine([each[name] for each in inner], combine, made, begin) for name in inner[0]})
    return copied


def _keeps_tensors(held: object) -> bool:
    """Return True for containers and parts of caches.

    Their classes stand in models' files, too.
    """
    if isinstance(held, list | dict):
        return True
    is_part = hasattr(held, "__dict__") and type(held).__module__.startswith("transformers")
    return is_part and not isinstance(held, nn.Module | PreTrainedConfig | type)
