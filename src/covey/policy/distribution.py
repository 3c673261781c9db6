"""Functions over torch.distributed; each is the identity where the run is one process."""

import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def is_distributed() -> bool:
    return dist.is_available() and dist.is_initialized()


def refuse_to_run_beside_others() -> None:
    """ValueError under a launcher of several processes: each would train a policy of its own without a word."""
    launched = int(os.environ.get("WORLD_SIZE", "1"))
    if launched > 1 and not is_distributed():
        raise ValueError(f"covey trains in one process as yet, got WORLD_SIZE={launched}; start it without a launcher")


def rank() -> int:
    return dist.get_rank() if is_distributed() else 0


def world_size() -> int:
    return dist.get_world_size() if is_distributed() else 1


def all_sum(tensor: Tensor) -> Tensor:
    """The sum of `tensor` over all ranks, on each of them."""
    if not is_distributed():
        return tensor
    total = tensor.clone()
    dist.all_reduce(total)
    return total


def all_sum_ints(*values: int) -> tuple[int, ...]:
    """Sums of integers over all ranks."""
    if not is_distributed():
        return values
    return tuple(int(v) for v in all_sum(torch.tensor(values, dtype=torch.int64)).tolist())


def all_gather(value: Any) -> list[Any]:
    """The picklable `value` of every rank, in rank order."""
    if not is_distributed():
        return [value]
    values: list[Any] = [None] * world_size()
    dist.all_gather_object(values, value)
    return values


def sum_gradients(parameters: Sequence[torch.nn.Parameter]) -> None:
    """Add up the gradients of all ranks, in place: losses are already divided by global counts."""
    if not is_distributed():
        return
    for parameter in parameters:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        dist.all_reduce(parameter.grad)


def all_sum_pairs(sums: Iterable[Mapping[str, tuple[Tensor, Tensor]]]) -> list[dict[str, tuple[Tensor, Tensor]]]:
    """The (numerator, denominator) pairs of all micro-batches of all ranks."""
    local = [{name: (n.cpu(), d.cpu()) for name, (n, d) in part.items()} for part in sums]
    return [part for of_rank in all_gather(local) for part in of_rank]


def all_max(values: Mapping[str, float]) -> dict[str, float]:
    """The largest of each value over all ranks."""
    merged: dict[str, float] = {}
    for of_rank in all_gather(dict(values)):
        merged = {name: max(value, merged.get(name, value)) for name, value in {**merged, **of_rank}.items()}
    return merged
