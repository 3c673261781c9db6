"""Orders of prompts: the protocol, and passes over the data."""

import hashlib
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from covey.rollouts.group_checks import Outcome
from covey.types import Prompt


@runtime_checkable
class PromptSampler(Protocol):
    """An endless stream of prompts, determined by seed, position and outcomes."""

    prompts: Sequence[Prompt]
    seed: int

    @property
    def position(self) -> int:
        """Return the number of prompts drawn so far."""

    def draw(self, n: int) -> list[tuple[Prompt, int]]:
        """Return the next n prompts, each with its occurrence number."""

    def state_dict(self) -> dict[str, Any]:
        """Return a copy, of plain containers."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a state. ValueError for another kind of stream."""


@runtime_checkable
class AdaptiveSampler(Protocol):
    """A stream whose order depends on how well its prompts are solved."""

    def learn(self, outcomes: Sequence[Outcome]) -> None:
        """Receive all ranks' outcomes in drawing order, the same on every rank."""

    def take_metrics(self) -> dict[str, float]:
        """Return metrics since the last call."""


@dataclass
class PromptStream:
    """Endless passes over the prompts, each in its own order. Its only state is the position."""

    prompts: Sequence[Prompt]
    seed: int
    shuffle: bool
    position: int = 0
    _orders: dict[int, list[int]] = field(default_factory=dict)

    def draw(self, n: int) -> list[tuple[Prompt, int]]:
        """Return the next n prompts, each with the number of its pass."""
        drawn = [self._at(self.position + offset) for offset in range(n)]
        self.position += n
        return drawn

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        check_state(state, self.state_dict())
        self.position = int(state["position"])

    def _at(self, position: int) -> tuple[Prompt, int]:
        epoch, index = divmod(position, len(self.prompts))
        if epoch not in self._orders:
            order = list(range(len(self.prompts)))
            if self.shuffle:
                random.Random(f"{self.seed}/{epoch}").shuffle(order)
            self._orders = {epoch: order} | {e: o for e, o in self._orders.items() if e == epoch - 1}
        return self.prompts[self._orders[epoch][index]], epoch


def check_state(state: Mapping[str, Any], own: Mapping[str, Any]) -> None:
    """Refuse a saved state of another kind of stream. ValueError."""
    if state.keys() != own.keys():
        raise ValueError(
            f"the checkpoint's prompt stream holds {', '.join(state)}, this run's {', '.join(own)}: "
            "curriculum.name and the kind of environment cannot change within a run"
        )


def rollout_seed(seed: int, prompt_id: str, epoch: int) -> int:
    """Return a prompt's sampling seed from run seed, prompt and pass."""
    digest = hashlib.blake2b(f"{seed}/{epoch}/{prompt_id}".encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1
