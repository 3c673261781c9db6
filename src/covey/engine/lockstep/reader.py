"""Read tokens by transformers' own forward, and cache where exact.

Shapes: R rows, T tokens, V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from covey.engine.native.cache import CacheShape
from covey.policy.attention.cache_probe import probe_caching
from covey.policy.attention.forked import Held
from covey.policy.models.caches import Caching, join_rows
from covey.policy.policy import Policy, to_device


@dataclass(frozen=True, slots=True)
class StateShape(CacheShape):
    """The cached bytes of a row, in slots of a token's size."""

    caching: Caching = field(default_factory=Caching)

    @property
    def slot_bytes(self) -> int:
        return max(1, self.caching.token_bytes)

    @property
    def state_bytes(self) -> int:
        return self.caching.state_bytes

    def max_slots(self, cache_bytes: int) -> int:
        return cache_bytes // self.slot_bytes


def state_shape(policy: Policy) -> StateShape:
    return StateShape((), policy.precision, policy.device, caching=policy.caching or probe_caching(policy))


class Reader:
    """Reads tokens after a cache, in the ways that are exact."""

    def __init__(self, policy: Policy) -> None:
        self.policy, self.shape = policy, state_shape(policy)
        self.forks, self._reads_on = self.shape.caching.forks, self.shape.caching.reads_on

    def read(self, ids_RT: Sequence[Sequence[int]], held: Held) -> tuple[Tensor, Held]:
        """Read rows of equal length; return last logits (R, V) and cache."""
        if not held and self.policy.attention == "alone" and len(ids_RT) > 1:
            logits, caches = zip(*(self.read([ids], {}) for ids in ids_RT), strict=True)
            return torch.cat(logits), join_rows(caches)
        one_by_one = bool(held) and not self._reads_on
        stretches = [[[ids[place]] for ids in ids_RT] for place in range(len(ids_RT[0]))] if one_by_one else [ids_RT]
        for stretch in stretches:
            ids = to_device([list(ids) for ids in stretch], self.policy.device)
            logits_RTV, held = self.policy.read(ids, held, self.forks, only_last=True)
        return logits_RTV[:, -1], held
