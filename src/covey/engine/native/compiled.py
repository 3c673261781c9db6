"""Prompt attention (attention.c), decode attention (decode.h) and draws (draw.h) in C.

On a CPU, keys and values in float32 or bfloat16; sums are float32. Results equal `layouts.DecodeLayout`'s but for
rounding, and a row's do not depend on the rows beside it.

Shapes: R rows, H query heads, K key/value heads, D head width.
"""

import ctypes
from collections.abc import Iterable, Sequence
from itertools import accumulate

import torch
from torch import Tensor

from covey.engine.native.cache import Cache, CacheBlock, CacheShape
from covey.engine.native.layouts import Grid, PrefillLayout, StretchLayout
from covey.engine.native.panels import SOURCE
from covey.policy import sampling
from covey.policy.attention.base import Rule
from covey.policy.attention.compiled import compiled_layout
from covey.policy.attention.packed import StreamSegment
from covey.policy.kernels.compiler import KERNELS, library, struct_of
from covey.policy.kernels.support import unsupported_reason, with_dense_heads
from covey.policy.sampling import Distribution

NO_WINDOW = 2**40
NO_FILTERS = (0, 1.0, 0.0)
"""top_k, top_p and min_p that keep every token."""
Decode = struct_of(KERNELS / "decode.h", "Decode")
DrawsCall = struct_of(KERNELS / "draw.h", "Draws")


class Cached(ctypes.Structure):
    """The struct of the same name in layer.c."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("prompt_keys", "prompt_values", "row_keys", "row_values")),
        *((name, ctypes.c_void_p) for name in ("inputs", "states")),
        ("window", ctypes.c_int64),
        ("scaling", ctypes.c_float),
    )


class CompiledPrefillLayout(PrefillLayout):
    """`layouts.PrefillLayout` in C, without padding."""

    def __init__(self, block: CacheBlock, first: int, lengths: Sequence[int]) -> None:
        super().__init__(block, first, lengths)
        starts = accumulate(lengths, initial=0)
        segments = [StreamSegment(start, length) for start, length in zip(starts, lengths, strict=False)]
        self._stream = compiled_layout(segments, block.shape.device)

    def attend(self, layer: int, query_BHTD: Tensor, key_BKTD: Tensor, value_BKTD: Tensor, rule: Rule) -> Tensor:
        key_NKPD, _ = self._write(layer, key_BKTD, value_BKTD)
        kept = key_NKPD.dtype  # read what decoding will read: rounded as it is cached
        out_BHTD = self._stream.attend(layer, query_BHTD.to(kept), key_BKTD.to(kept), value_BKTD.to(kept), rule)
        return out_BHTD.to(query_BHTD.dtype)


class CompiledDecodeLayout(StretchLayout):
    """`layouts.DecodeLayout` in C."""

    def __init__(
        self, cache: Cache, grid: Grid, length_R: Tensor, shortest: int, longest: int, holder_R: Tensor | None = None
    ) -> None:
        """Take tokens whose rows in the cache are `holder_R`."""
        self._cache = cache
        self._stretches = cache.rows, 0, [1] * len(length_R), False
        self._own_R, self._holder_R = length_R - 1, holder_R
        self._grid = grid
        self.position_R = grid.length_R + self._own_R
        self._function = library(SOURCE).covey_decode_attention
        self.call = Decode(
            row_of_cell=grid.only_row_C.data_ptr(),
            prompt_lengths=grid.length_G.data_ptr(),
            own_lengths=self._own_R.data_ptr(),
            holders=None if holder_R is None else holder_R.data_ptr(),
            num_rows=len(length_R),
            num_groups=grid.num_groups,
            group_width=grid.width,
            prompt_slots=cache.prompts.length,
            row_slots=cache.rows.length,
            half=cache.shape.dtype == torch.bfloat16,
            num_threads=torch.get_num_threads(),
        )

    def attend(self, layer: int, query_BHTD: Tensor, key_BKTD: Tensor, value_BKTD: Tensor, rule: Rule) -> Tensor:
        _, num_heads, num_rows, width = query_BHTD.shape
        # Held until the call is done: a copy made here would be freed before.
        given = with_dense_heads(*(tensor.float() for tensor in (query_BHTD, key_BKTD, value_BKTD)))
        out_RHD = given[0].new_empty(num_rows, num_heads, width)
        call, cached = self.call, self.make_cache_struct(layer, rule)
        call.query, call.new_key, call.new_value = (tensor.data_ptr() for tensor in given)
        strides = [(tensor.stride(2), tensor.stride(1)) for tensor in given]
        call.query_strides, call.key_strides, call.value_strides = strides
        call.out, call.out_stride, call.width = out_RHD.data_ptr(), num_heads * width, width
        call.num_key_heads = key_BKTD.shape[1]
        call.queries_per_key = num_heads // call.num_key_heads
        call.prompt_keys, call.prompt_values = cached.prompt_keys, cached.prompt_values
        call.row_keys, call.row_values = cached.row_keys, cached.row_values
        call.window, call.scaling = cached.window, cached.scaling
        self._function(ctypes.byref(call))
        return out_RHD.transpose(0, 1)[None].to(query_BHTD.dtype)

    @property
    def kept(self) -> list[Tensor]:
        """Return tensors of the cache that are others when any is another."""
        blocks = self._cache.prompts, self._cache.rows
        return [tensors[-1] for block in blocks for tensors in (block.keys, block.values, block.held) if tensors]

    def make_cache_struct(self, layer: int, rule: Rule, place: int | None = None) -> Cached:
        """Return the struct of what is cached for one layer.

        `layer` is -1 without attention, `place` None without a state.
        """
        held = Cached(window=NO_WINDOW if rule.window is None else rule.window, scaling=rule.scaling)
        blocks = self._cache.prompts, self._cache.rows
        if layer >= 0:
            held.prompt_keys, held.prompt_values, held.row_keys, held.row_values = (
                tensors[layer].data_ptr() for block in blocks for tensors in (block.keys, block.values)
            )
        if place is not None:
            states = self.forest.states
            assert states is not None, "a cache has states"
            found = states.inputs.get(place), states.states.get(place)
            held.inputs, held.states = (None if tensor is None else tensor.data_ptr() for tensor in found)
        return held


def sample_same_params(logits_RV: Tensor, distribution: Distribution, uniform_R: Tensor) -> tuple[Tensor, Tensor]:
    """Sample as `sampler.sample_same_params`, in C where nothing is filtered."""
    # Filtered draws stay in torch
    temperature, *filters = distribution
    if tuple(filters) != NO_FILTERS:
        return sampling.sample_same_params(logits_RV, distribution, uniform_R)
    logits_RV = logits_RV.float().contiguous()
    token_R, temperature_R = (torch.full((len(logits_RV),), each) for each in (0, float(temperature)))
    logprob_R, rooms = torch.empty(len(logits_RV)), draw_rooms(*logits_RV.shape)
    tensors = logits_RV, uniform_R, temperature_R, token_R, logprob_R, *rooms
    draws = DrawsCall(*(tensor.data_ptr() for tensor in tensors), *logits_RV.shape)
    library(SOURCE).covey_draw(ctypes.byref(draws), ctypes.c_int64(torch.get_num_threads()))
    return token_R, logprob_R


def draw_rooms(num_rows: int, num_tokens: int) -> tuple[Tensor, Tensor]:
    num_blocks = -(-num_tokens // sampling.BLOCK)
    return torch.empty(num_rows * num_blocks), torch.empty(num_rows * num_blocks)


def is_compiled(kernels: str, shape: CacheShape, rules: Iterable[Rule] = ()) -> bool:
    """Return True where decoding goes through C; `kernels` = "torch" never does.

    `rules` are the layers'.
    """
    if kernels == "torch":
        return False
    # Heads of every layer must be known to the kernels
    tensors = [(shape.dtype, shape.device.type)]
    widths = [(layer.key_width, layer.value_width) for layer in shape.layers if layer.num_heads]
    is_plain = all(rule.is_plain for rule in rules)
    reasons = [unsupported_reason(kernel, tensors, widths, is_plain=is_plain) for kernel in ("attention", "decode")]
    return len(set(widths)) <= 1 and not any(reasons)
