"""Functions over torch.distributed; each is the identity in a single process.

Losses are divided by counts over all ranks, so sums alone cross between ranks.
"""

import os
import re
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from itertools import count
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from covey.system import ranks
from covey.types import RunStopped

T = TypeVar("T")

BUCKET_BYTES = 32 * 1024 * 1024
"""Gradients are summed over ranks in buckets of about this size."""
GROUPS = count()
"""Numbers the groups that this process joins, alike on all ranks."""


class PeerRankFailed(RunStopped):
    """Another rank failed and reported why."""


class RanksLost(RunStopped):
    """The connection to other ranks broke, or they were late."""


@contextmanager
def process_group(seconds: float, device: str = "auto") -> Iterator[None]:
    """Join the processes that a launcher started beside this one, if any.

    No collective waits longer than `seconds`. `device` is model.device: unless it is a CPU, each rank takes a GPU of
    its own. Raises RunStopped where ranks are lost, ValueError where two share a GPU; any other error carries a note
    that names this rank.
    """
    ranks.check_ranks()
    if ranks.world_size() == 1 or is_distributed():
        yield
        return
    os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = ranks.meeting_place()
    ranks.check_address(os.environ["MASTER_ADDR"])
    is_on_gpu = device != "cpu" and torch.cuda.is_available()
    if is_on_gpu:
        torch.cuda.set_device(own_gpu(device, ranks.local_rank(), torch.cuda.device_count()))
    backend = "cpu:gloo,cuda:nccl" if is_on_gpu else "gloo"
    number, timeout = ranks.rank(), timedelta(seconds=seconds)
    try:
        store, size = _own_store(number, timeout), ranks.world_size()
        dist.init_process_group(backend, rank=number, world_size=size, timeout=timeout, store=store)
        if is_on_gpu:
            check_one_rank_a_gpu(all_gather((socket.gethostname(), str(torch.cuda.get_device_properties().uuid))))
        yield
    except Exception as error:
        error.add_note(f"on rank {number}")
        if not _is_of_torch(error):
            raise
        lost = RanksLost(f"lost the other ranks ({_short(error)}); the first to end says why")
        lost.add_note(f"on rank {number}")
        raise lost from error
    finally:
        if is_distributed():
            dist.destroy_process_group()
        # A program that joins again must not find the store that the first rank has not yet closed.
        os.environ["MASTER_PORT"] = str(int(os.environ["MASTER_PORT"]) + (not _has_agent_store()))


def own_gpu(device: str, local_rank: int, num_gpus: int) -> int:
    """Return the number of a rank's GPU.

    Launchers such as SLURM and Ray may show each rank its own GPU only, which then is number 0.

    >>> own_gpu("auto", local_rank=3, num_gpus=8), own_gpu("cuda", local_rank=3, num_gpus=1)
    (3, 0)
    """
    chosen = torch.device(device).index if device != "auto" else None
    return local_rank % num_gpus if chosen is None else chosen


def check_one_rank_a_gpu(places: Sequence[tuple[str, str]]) -> None:
    """Refuse two ranks on one GPU. ValueError. `places` are machine and GPU of each rank, in order."""
    for number, place in enumerate(places):
        first = places.index(place)
        if first != number:
            raise ValueError(
                f"ranks {first} and {number} have one GPU of {place[0]}: start as many processes on a machine as it "
                "has GPUs, or set model.device=cpu"
            )


def _own_store(number: int, timeout: timedelta) -> dist.Store | None:
    """Return torchrun's store with this group's prefix, None without one.

    torchrun's store still holds the previous group's addresses, which an early rank would call.
    """
    if not _has_agent_store():
        return None
    store, _, _ = next(iter(dist.rendezvous("env://", number, ranks.world_size(), timeout=timeout)))
    return dist.PrefixStore(f"group {next(GROUPS)}", store)


def _has_agent_store() -> bool:
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def barrier(what: str) -> None:
    """Wait for all ranks; it takes a round trip to rank 0.

    RunStopped names on rank 0 the ranks that miss the deadline.
    """
    world = dist.group.WORLD if is_distributed() else None
    if world is None:
        return
    started = time.monotonic()
    try:
        # The group's own barrier: torch's function refuses a group that has NCCL beside gloo, whose barrier this is.
        world.monitored_barrier(_deadline(), wait_all_ranks=True)  # type: ignore[attr-defined]
    except RuntimeError as error:
        absent = re.search(r"Ranks? ([0-9, ]+) failed", str(error))
        who = f"rank {absent[1].strip()}" if absent else "another rank"
        seconds = time.monotonic() - started
        raise RunStopped(f"rank {rank()} has waited {seconds:.0f} s for {who} to come to {what}") from error


def is_distributed() -> bool:
    return dist.is_available() and dist.is_initialized()


def rank() -> int:
    return dist.get_rank() if is_distributed() else 0


def world_size() -> int:
    return dist.get_world_size() if is_distributed() else 1


def is_main_process() -> bool:
    return rank() == 0


def local_share(n: int) -> int:
    """Return this rank's share of n things, larger on first ranks."""
    return n // world_size() + (rank() < n % world_size())


def run_on_rank0(make: Callable[[], T]) -> T:
    """Return rank 0's result on every rank; its exception ends every rank."""
    if not is_distributed():
        return make()
    answer: list[Any] = [None, None]
    error: Exception | None = None
    if is_main_process():
        try:
            answer[0] = make()
        except Exception as caught:
            error, answer[1] = caught, f"{type(caught).__name__}: {caught}"
    dist.broadcast_object_list(answer, src=0)
    if error is not None:
        raise error
    if answer[1] is not None:
        raise PeerRankFailed(f"rank 0: {answer[1]}")
    return answer[0]


def run_or_fail_together(make: Callable[[], T], what: str) -> T:
    """Return this rank's result once every rank is done with `what`. An exception on one rank ends all."""
    if not is_distributed():
        return make()
    made, error = None, None
    try:
        made = make()
    except Exception as caught:
        error = caught
    # All tell how it went, so that none waits for a rank that failed
    barrier(what)
    told = all_gather(None if error is None else f"{type(error).__name__}: {error}")
    if error is not None:
        raise error
    for index, text in enumerate(told):
        if text is not None:
            raise PeerRankFailed(f"rank {index}: {text}")
    return made  # type: ignore[return-value]


def all_sum(tensor: Tensor) -> Tensor:
    if not is_distributed():
        return tensor
    total = tensor.clone()
    dist.all_reduce(total)
    return total


def all_sum_ints(*values: int) -> tuple[int, ...]:
    if not is_distributed():
        return values
    return tuple(int(v) for v in all_sum(torch.tensor(values, dtype=torch.int64)).tolist())


def all_gather(value: T) -> list[T]:
    """Gather the picklable `value` of every rank, in rank order."""
    if not is_distributed():
        return [value]
    values: list[Any] = [None] * world_size()
    dist.all_gather_object(values, value)
    return values


def all_max_int(value: int) -> int:
    return max(all_gather(value))


def sum_gradients(parameters: Sequence[torch.nn.Parameter]) -> None:
    """Sum the gradients of all ranks in place, without a mean.

    Losses are already divided by global counts. A rank without rows takes part with zeros. A weight without a gradient
    on any rank keeps none, so that the optimiser leaves it alone as in one process.
    """
    if not is_distributed():
        return
    # A parameter without gradient on one rank may have one on another: send zeros
    num_ranks_with_gradient = all_sum_ints(*(int(parameter.grad is not None) for parameter in parameters))
    for parameter, num_ranks in zip(parameters, num_ranks_with_gradient, strict=True):
        if parameter.grad is None and num_ranks > 0:
            parameter.grad = torch.zeros_like(parameter)
    for bucket in _buckets([p.grad for p in parameters if p.grad is not None]):
        flat = torch.cat([gradient.flatten() for gradient in bucket])
        dist.all_reduce(flat)
        for gradient, total in zip(bucket, flat.split([g.numel() for g in bucket]), strict=True):
            gradient.copy_(total.view_as(gradient))


def all_sum_pairs(sums: Iterable[Mapping[str, tuple[Tensor, Tensor]]]) -> list[dict[str, tuple[Tensor, Tensor]]]:
    """Gather the (numerator, denominator) pairs of all micro-batches on the CPU."""
    given = list(sums)
    numbers = iter(_to_host([number for part in given for pair in part.values() for number in pair]))
    local = [{name: (next(numbers), next(numbers)) for name in part} for part in given]
    return [part for of_rank in all_gather(local) for part in of_rank]


def all_max(values: Mapping[str, float]) -> dict[str, float]:
    merged: dict[str, float] = {}
    for of_rank in all_gather(dict(values)):
        merged = {name: max(value, merged.get(name, value)) for name, value in {**merged, **of_rank}.items()}
    return merged


def _to_host(scalars: Sequence[Tensor]) -> list[Tensor]:
    """Fetch scalars to the CPU as float64, at once."""
    if not scalars:
        return []
    fetched = torch.stack([scalar.double() for scalar in scalars]).cpu()
    return [number.to(scalar.dtype) for number, scalar in zip(fetched.unbind(), scalars, strict=True)]


def _deadline() -> timedelta:
    """Return the process group's timeout; a barrier's default is 30 minutes."""
    world = dist.group.WORLD
    assert world is not None
    return world._get_backend(torch.device("cpu")).options._timeout


def _is_of_torch(error: Exception) -> bool:
    """Return True for errors of torch.distributed; gloo raises plain RuntimeErrors."""
    return isinstance(error, dist.DistError) or (type(error) is RuntimeError and _LOST.search(str(error)) is not None)


def _short(error: Exception) -> str:
    text = " ".join(str(error).split())
    found = _LOST_HOW.search(text)
    return found[0] if found else text[:160]


def _buckets(gradients: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Yield neighbouring gradients of one type, about BUCKET_BYTES together."""
    bucket: list[Tensor] = []
    size = 0
    # A bucket has one dtype, since it becomes one tensor
    for gradient in gradients:
        if bucket and (size + gradient.nbytes > BUCKET_BYTES or gradient.dtype != bucket[0].dtype):
            yield bucket
            bucket, size = [], 0
        bucket.append(gradient)
        size += gradient.nbytes
    if bucket:
        yield bucket


_LOST = re.compile("gloo|Gloo|Connection (closed|reset|refused)|Timed out waiting|Broken pipe")
_LOST_HOW = re.compile(
    r"(Connection (closed|reset|refused)|Timed out waiting|Broken pipe)( by peer)?( \[[^\]]*\](:\d+)?)?"
)
