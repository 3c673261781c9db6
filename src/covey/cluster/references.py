"""The reference policy on its own devices, computed beside the trainer."""

from collections.abc import Callable
from dataclasses import fields, is_dataclass, replace
from typing import Any

import torch
from torch import Tensor

from covey.cluster.serving import Answerers, answers_of
from covey.cluster.start import import_ray, prepare_actor
from covey.policy.logprobs import AllowedTokens, Scoring, reference_logprobs
from covey.policy.reference import Reference
from covey.system import collectives
from covey.types import MicroBatch

HOST = torch.device("cpu")


class ReferenceActor:
    """Holds the reference policy; Ray makes one in each process of devices.reference."""

    def __init__(self, make_reference: Callable[[], Reference]) -> None:
        prepare_actor()
        self._reference = make_reference()

    def ready(self) -> bool:
        return True

    def logprobs(self, batch: MicroBatch, scoring: Scoring, kept: AllowedTokens | None) -> Tensor:
        """Return the log-prob of each loss token, (L,), on the host."""
        device = self._reference.policy.device
        return reference_logprobs(self._reference, move_to(batch, device), scoring, move_to(kept, device)).to(HOST)


class RemoteReference:
    """Asks the processes of devices.reference in turns; each rank begins with another."""

    def __init__(self, answerers: Answerers, check: Callable[[], None] = lambda: None) -> None:
        """Set `check`, which raises to end a wait."""
        self._ray = import_ray()
        self._role, self._actors, self._check = answerers.role, answerers.actors(), check
        self._asked = collectives.rank()

    def logprobs(self, batch: MicroBatch, scoring: Scoring, kept: AllowedTokens | None) -> Callable[[], Tensor]:
        """Request log-probs, (L,); return a function that waits for them."""
        actor = self._actors[self._asked % len(self._actors)]
        self._asked += 1
        bare = replace(batch, rollouts=(), taught=None)
        ref = actor.logprobs.remote(move_to(bare, HOST), scoring, move_to(kept, HOST))
        device = batch.target_L.device
        return lambda: answers_of(self._ray, [ref], self._role, self._check)[0].to(device)


def move_to(value: Any, device: torch.device) -> Any:
    """Move tensors, and frozen dataclasses and tuples of them, to a device."""
    if isinstance(value, Tensor):
        return value.to(device)
    if isinstance(value, tuple):
        return tuple(move_to(item, device) for item in value)
    if is_dataclass(value) and not isinstance(value, type):
        return replace(value, **{own.name: move_to(getattr(value, own.name), device) for own in fields(value)})
    return value
