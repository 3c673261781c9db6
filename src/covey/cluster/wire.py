"""Messages between trainer and samplers: weights as plain arrays, jobs, results."""

import warnings
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from covey.engine.base import EngineStats, Probe, WeightSet
from covey.rollouts.buffer import Ticket
from covey.rollouts.saved.journal import KeptGroup
from covey.rollouts.saved.plain import SavedGroup
from covey.system import collectives
from covey.types import Group, RunStopped

Logprobs = Future[tuple[float, ...]]
"""Log-probs of a probe, on their way."""
Proof = tuple[int, tuple[float, ...]]
"""Version, and log-probs of its probe."""
Array = tuple[str, tuple[int, ...], np.ndarray]
"""Name of the type, shape, bytes: NumPy knows no bfloat16, and maps arrays of other processes without a copy."""


@dataclass(frozen=True, slots=True)
class Jobs:
    """Prompts on their way to a sampler."""

    tickets: tuple[Ticket, ...]
    incarnation: int
    """Incarnation of the receiving sampler. Results of older ones are not believed: a lost node may still work."""
    kept: Mapping[int, KeptGroup] | None = None
    """Known parts of groups by ticket number; None: new ones are not wanted."""


@dataclass(frozen=True, slots=True)
class SampledGroup:
    """A sampler's result for a job, without the prompt."""

    number: int
    attempt: int
    """Attempt of the job's ticket."""
    whole: SavedGroup | None = None
    error: tuple[str, str] | None = None
    """Name of the raised exception's class and its message; None without one."""


@dataclass(frozen=True, slots=True)
class SampledPart:
    """A part of an unfinished group, as `KeptGroup.add` takes it."""

    number: int
    attempt: int
    kind: str
    index: int
    value: Any


@dataclass(frozen=True, slots=True)
class SampledBatch:
    """The groups that a sampler has finished since its last answer."""

    incarnation: int
    sampled: tuple[SampledGroup, ...]
    stats: EngineStats
    """Statistics of its engine meanwhile."""
    parts: tuple[SampledPart, ...] = ()
    """Parts of groups that are not finished."""


@dataclass(frozen=True, slots=True)
class TicketResult:
    """The result of a ticket."""

    ticket: Ticket
    group: Group | None
    """None where it raised."""
    error: tuple[str, str] | None = None
    """Error as in `SampledGroup`."""

    @staticmethod
    def of(ticket: Ticket, sampled: SampledGroup) -> "TicketResult":
        group = None if sampled.whole is None else sampled.whole.group(ticket.prompt)
        return TicketResult(ticket, group, sampled.error)


@dataclass(frozen=True, slots=True)
class WeightArrays:
    """A `WeightSet` as arrays."""

    version: int
    arrays: Mapping[str, Array]
    digest: str
    probe: Probe
    """Its log-probs are empty where they follow."""
    is_proved: bool
    """Whether they are there."""

    @property
    def num_bytes(self) -> int:
        """Return the arrays' approximate bytes in a message."""
        return sum(1000 + data.nbytes for _, _, data in self.arrays.values())


@dataclass(frozen=True, slots=True)
class GroupPart:
    """Groups from rank 0 for the ranks that train them."""

    groups: Mapping[int, tuple[int, Group]]
    """Rank and group by ticket number."""
    is_last: bool


def shares(n: int) -> list[int]:
    """Return the rank that trains each of n groups."""
    world_size = collectives.world_size()
    ends = [n * (rank + 1) // world_size for rank in range(world_size)]
    return [sum(place >= end for end in ends) for place in range(n)]


def ranks_of(groups: Iterable[int], early: Sequence[GroupPart]) -> dict[int, int]:
    """Return the rank of each group by number, early ones unchanged."""
    numbers = list(groups)
    ranks = dict(zip(numbers, shares(len(numbers)), strict=True))
    return ranks | {number: rank for part in early for number, (rank, _) in part.groups.items()}


RAISED = {"ValueError": ValueError, "RunStopped": RunStopped}
"""Errors of a sampler that mean the same in the trainer; any other ends the run by its name."""


def error_of(kind: str, message: str) -> Exception:
    """Restore a sampler's exception by class name and message."""
    return RAISED.get(kind, lambda text: RunStopped(f"a sampler raised {kind}: {text}"))(message)


def pack(weights: WeightSet) -> WeightArrays:
    """Return the weights as arrays, without a copy."""
    arrays: dict[str, Array] = {}
    for name, tensor in weights.tensors.items():
        plain = tensor.detach().contiguous()
        kind, data = str(plain.dtype).removeprefix("torch."), plain.flatten().view(torch.uint8).numpy()
        arrays[name] = (kind, tuple(plain.shape), data)
    is_proved = not isinstance(weights.probe.logprobs, Future)
    probe = weights.probe if is_proved else replace(weights.probe, logprobs=())
    return WeightArrays(weights.version, arrays, weights.digest, probe, is_proved)


def copy_arrays(packed: WeightArrays) -> WeightArrays:
    """Return a copy of the arrays."""
    arrays = {name: (dtype, shape, data.copy()) for name, (dtype, shape, data) in packed.arrays.items()}
    return replace(packed, arrays=arrays)


def unpack(packed: WeightArrays, logprobs: Logprobs | None = None) -> WeightSet:
    """Restore the weights, with log-probs of their probe where these follow.

    Their memory may be another process's and read-only.
    """
    tensors = {name: _tensor(array) for name, array in packed.arrays.items()}
    probe = packed.probe if logprobs is None or packed.is_proved else replace(packed.probe, logprobs=logprobs)
    return WeightSet(packed.version, tensors, packed.digest, probe)


def _tensor(array: Array) -> Tensor:
    dtype, shape, data = array
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # read-only memory, which is never written
        flat = torch.from_numpy(data)
    kind: Any = vars(torch)[dtype]
    return flat.view(kind).reshape(shape)
