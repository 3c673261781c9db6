"""The engine seam: how tokens are sampled."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from covey.types import Completion, Sampling


@dataclass(frozen=True, slots=True)
class EngineStats:
    """What was done since the statistics were last taken."""

    prompt_tokens: int = 0
    """Encoded; a prompt counts once for its whole group."""
    sampled_tokens: int = 0
    seconds: float = 0.0
    """Spent sampling."""
    peak_rows: int = 0
    """Most completions sampled at the same time."""
    peak_cache_bytes: int = 0
    """Most memory the cached keys and values took, resizing included."""


class Engine(Protocol):
    """Samples completions. Calls made concurrently are batched together; the result does not depend on it."""

    async def generate(self, prompt_ids: Sequence[int], n: int, sampling: Sampling) -> list[Completion]:
        """Return n completions of one prompt, in sample order.

        ValueError where prompt and completion cannot fit.
        """
        ...

    def load_weights(self, named_tensors: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Take new weights. Completions started afterwards carry `version`. Cached keys and values are dropped."""
        ...

    def take_stats(self) -> EngineStats:
        """Return what was done since the last call."""
        ...
