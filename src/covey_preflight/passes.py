"""The memory of micro-batches, measured on synthetic rollouts."""

import sys
import time
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from covey.policy.settings import longest_pass
from covey.rollouts.rollout import finished_rollout
from covey.rollouts.settings import group_sizes
from covey.system import collectives
from covey.trainer.batch import make_batch, make_rows
from covey.trainer.layouts import usable_layout
from covey.trainer.trainer import Trainer
from covey.types import Batch, Completion, Group, Prompt, Reward, Rollout
from covey_preflight.policy import compute_gradient_only
from covey_preflight.subject import PreflightContext

MEASURED_TOKENS = 1024
"""Tokens of the larger of the two small micro-batches, fewer where they would take long."""
MIN_TOKENS = 64
WORK = {"cpu": 5e10, "cuda": 1e14}
"""Most floating-point operations of a small micro-batch, at about 6 a weight and token."""
DIGITS = 8
"""Tokens in which synthetic completions differ."""
OWN_MEMORY: tuple[type[Tensor], ...] = (Tensor, torch.nn.Parameter)
"""Kinds of tensors that are counted; others wrap these."""
MAX_SECONDS = 2.0
"""The largest micro-batch is measured itself if it should take no longer."""


@dataclass(frozen=True, slots=True)
class BatchShape:
    """The largest micro-batch of a step."""

    prompt_ids: tuple[int, ...]
    max_tokens: int
    group_size: int
    packing: str
    attention: str
    num_tokens: int
    several: bool
    """A step has more than one: the gradients of the first are there during the second."""
    mask_id: int | None = None
    """Token that a masked policy replaces."""


@dataclass(frozen=True, slots=True)
class MemorySample:
    """One measured micro-batch."""

    num_tokens: int
    num_bytes: int
    seconds: float
    beside_weights: int = 0
    """The bytes without what has the shape of a weight: few tokens take less than the gradients that a pass ends with,
    and these hide what a token takes."""
    is_largest: bool = False
    """The run has no larger one."""


def largest_shape(subject: PreflightContext, num_groups: int) -> BatchShape:
    """Return the shape with the longest prompt and completions."""
    config, prompt_ids = subject.config, tuple(subject.longest[1])
    mask_id = subject.run.policy.mask_id
    added = config.sampling.max_tokens
    if mask_id is not None:  # what later passes read
        added = 0 if config.sampling.likelihood == "one_step" else (config.sampling.num_passes - 1) * len(prompt_ids)
    rollout = len(prompt_ids) + added
    if mask_id is None:
        rollout = len(prompt_ids) + max(1, subject.run.source.sampling.room(len(prompt_ids)))
    policy = subject.run.policy
    packing = usable_layout(config.packing, policy.attention)
    group_size = max(group_sizes(config.group_size, config.group_size_schedule))
    group = len(prompt_ids) + group_size * added if packing == "shared" else group_size * rollout
    bound = longest_pass(policy.num_weights, group) if policy.device.type == "cpu" else sys.maxsize
    most = min(config.micro_batch_tokens, bound)
    return BatchShape(
        prompt_ids,
        config.sampling.max_tokens,
        group_size,
        packing,
        policy.attention,
        num_tokens=max(rollout, min(most, num_groups * group)),
        several=num_groups * group > most,
        mask_id=mask_id,
    )


def measure(trainer: Trainer, shape: BatchShape, free: int) -> list[MemorySample]:
    """Measure one or two small micro-batches, then the largest if affordable.

    One suffices where half of the memory holds the largest as if all its bytes but gradients grew with the tokens. The
    small ones are there twice: beside the gradients of the first, the second takes more with every token. Alone, a few
    tokens take less than the gradients that they end with, which would say nothing of many.
    """
    work = 6.0 * sum(parameter.numel() for parameter in trainer.policy.model.parameters())
    small = int(min(MEASURED_TOKENS, max(MIN_TOKENS, WORK.get(trainer.policy.device.type, WORK["cpu"]) / work)))
    if shape.num_tokens <= small:
        return [replace(measure_pass(trainer, shape, shape.num_tokens), is_largest=True)]
    short = replace(_cut(shape, small // 2), several=True)
    points = [measure_pass(trainer, short, small)]
    if any(collectives.all_gather(bytes_of(points, shape.num_tokens) > free / 2)):
        points.insert(0, measure_pass(trainer, short, small // 2))
    seconds = points[-1].seconds * shape.num_tokens / points[-1].num_tokens / (1 if shape.several else 2)
    worthwhile = seconds <= MAX_SECONDS and bytes_of(points, shape.num_tokens) <= free / 2
    if all(collectives.all_gather(worthwhile)):  # decided by all ranks together: a pass is collective
        points.append(replace(measure_pass(trainer, shape, shape.num_tokens), is_largest=True))
    return points


def _cut(shape: BatchShape, num_tokens: int) -> BatchShape:
    """Return the shape cut where the prompt alone fills the tokens.

    It would fill both small micro-batches, and two of one size say nothing of a third.
    """
    if shape.mask_id is not None or len(shape.prompt_ids) < num_tokens:
        return shape
    num_prompt = num_tokens * len(shape.prompt_ids) // (len(shape.prompt_ids) + shape.max_tokens)
    return replace(shape, prompt_ids=shape.prompt_ids[: max(1, num_prompt)], max_tokens=max(1, num_tokens - num_prompt))


def measure_pass(trainer: Trainer, shape: BatchShape, num_tokens: int) -> MemorySample:
    """Measure a pass over about `num_tokens` tokens."""
    batch = synthetic(shape, num_tokens, trainer.policy.device)
    started = time.perf_counter()
    shapes = {shape for weight in trainer.policy.model.parameters() for shape in (weight.shape, weight.shape[::-1])}
    with LiveBytes(shapes) as live:
        compute_gradient_only(trainer, batch)
    seconds = time.perf_counter() - started
    for parameter in trainer.policy.model.parameters():
        parameter.grad = None
    return MemorySample(batch.micro_batches[0].input_ids_BT.numel(), live.peak, seconds, live.peak_of_others)


def synthetic(shape: BatchShape, num_tokens: int, device: torch.device) -> Batch:
    """Build the first micro-batch of groups with the longest prompt.

    It is there twice where a step has several. Completions are cut where not even one would fit.
    """
    length = max(1, min(shape.max_tokens, num_tokens - len(shape.prompt_ids)))
    if shape.mask_id is not None:
        length = max(1, shape.prompt_ids.count(shape.mask_id))
    group_size = min(shape.group_size, 1 + num_tokens // length)  # more fill no micro-batch, and are many to make
    # Shared inputs are read once for a group; as many groups as it takes even so.
    num_groups = 1 + num_tokens // (len(shape.prompt_ids) if shape.mask_id is not None else group_size * length)
    rollouts = tuple(_rollout(shape, length, index) for index in range(group_size))
    groups = [Group(Prompt(str(i), "", "", {}), rollouts, ()) for i in range(num_groups)]
    num_rollouts = num_groups * group_size
    batch = make_batch(
        make_rows(groups, [[1.0] * group_size] * num_groups),
        packing=shape.packing,
        micro_batch_tokens=num_tokens,
        totals=(num_rollouts * length, num_rollouts, num_rollouts),
        device=device,
        attention=shape.attention,
    )
    return replace(batch, micro_batches=batch.micro_batches[:1] * (2 if shape.several else 1))


def _rollout(shape: BatchShape, length: int, index: int) -> Rollout:
    """Make a rollout with a unique beginning, so that nothing is shared."""
    tokens = list((shape.prompt_ids * (1 + length // len(shape.prompt_ids)))[:length])
    base = max(shape.prompt_ids) + 1
    if shape.mask_id is None and base > 1:  # the index in that base, so that every token is one of the vocabulary
        for place in range(min(length, DIGITS)):
            tokens[place] = index // base**place % base
    completion = Completion(tuple(tokens), (0.0,) * length, "length", policy_version=0)
    return finished_rollout(shape.mask_id, shape.prompt_ids, completion, Reward(0.0, {}), "")


def bytes_of(points: Sequence[MemorySample], num_tokens: int) -> int:
    """Extrapolate the bytes at `num_tokens` linearly."""
    return round(points[-1].num_bytes + slope(points) * (num_tokens - points[-1].num_tokens))


def fitting_tokens(points: Sequence[MemorySample], free: int) -> int:
    """Return the largest micro-batch within `free` bytes, or 0. It is rounded down to two digits."""
    fits = max(0, int(points[-1].num_tokens + (free - points[-1].num_bytes) / slope(points)))
    unit = 10 ** max(0, len(str(fits)) - 2)
    return fits // unit * unit


def slope(points: Sequence[MemorySample]) -> float:
    """Return the bytes per token.

    From one it is at most that of all but gradients. From two it is that of the faster line: with
    the gradients, or without.
    """
    *before, last = points
    if not before or before[-1].num_tokens == last.num_tokens:
        return max(1.0, (last.beside_weights or last.num_bytes) / last.num_tokens)
    more = max(last.num_bytes - before[-1].num_bytes, last.beside_weights - before[-1].beside_weights)
    return max(1.0, more / (last.num_tokens - before[-1].num_tokens))


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of newly allocated live tensors.

    The same on every device, and unlike the counters of the system and of the CUDA allocator it need not be reset,
    which the run's own record of its peak would not survive. Memory inside kernels is not seen.
    """

    def __init__(self, shapes: Collection[tuple[int, ...]] = ()) -> None:
        super().__init__()
        self.peak = self.peak_of_others = 0
        """Peak bytes of all tensors, and of those that have none of `shapes`."""
        self._shapes = shapes
        self._now = self._now_of_others = 0
        self._alive: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        for storage, shape in _storages(out):
            if storage._cdata not in self._alive:
                held = _storages((*args, *(kwargs or {}).values()))
                if all(storage._cdata != other._cdata for other, _ in held):
                    self._count(storage, shape not in self._shapes)
        return out

    def _count(self, storage: torch.UntypedStorage, is_other: bool) -> None:
        key, size = storage._cdata, storage.nbytes()

        def gone(reference: "weakref.ref[torch.UntypedStorage]") -> None:
            self._now -= size
            self._now_of_others -= size * is_other
            del self._alive[key]

        self._alive[key] = weakref.ref(storage, gone)
        self._now += size
        self._now_of_others += size * is_other
        self.peak, self.peak_of_others = max(self.peak, self._now), max(self.peak_of_others, self._now_of_others)


def _storages(value: object) -> Iterator[tuple[torch.UntypedStorage, torch.Size]]:
    """Yield the memory and shape of each tensor that has its own."""
    if type(value) in OWN_MEMORY:
        yield value.untyped_storage(), value.shape  # type: ignore[attr-defined]
    elif isinstance(value, list | tuple):
        for part in value:
            yield from _storages(part)
