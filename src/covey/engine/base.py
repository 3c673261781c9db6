"""The engine seam: how tokens are sampled."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from covey.types import Completion

LIKELIHOODS = ("trajectory", "one_step")


@dataclass(frozen=True, slots=True)
class Sampling:
    """How to draw completions. The distribution is softmax(logits / temperature), cut by top-k, then top-p, then
    min-p, and renormalised; log-probabilities are those of that distribution."""

    temperature: float = 1.0
    """0 means greedy (argmax; log-probabilities are then those of temperature 1)."""
    top_k: int = 0
    """Keep the k most likely tokens; 0 keeps all."""
    top_p: float = 1.0
    """Keep the smallest set of most likely tokens with at least this probability mass."""
    min_p: float = 0.0
    """Drop tokens less likely than min_p times the most likely one."""
    max_tokens: int = 256
    """Completion length at which sampling stops with finish_reason "length"."""
    stop: tuple[str, ...] = ()
    """Stop strings; the token that completes one is the last token of the completion."""
    seed: int = 0
    """Random numbers are a pure function of (seed, sample index, position)."""
    num_passes: int = 1
    """Passes in which a masked policy fills an input."""
    likelihood: str = "trajectory"
    """Of a fill in several passes: `trajectory` or `one_step`."""

    def __post_init__(self) -> None:
        if self.temperature < 0:
            raise ValueError(f"temperature must be >= 0, got {self.temperature}")
        if self.top_k < 0:
            raise ValueError(f"top_k must be >= 0, got {self.top_k}")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must be in (0, 1], got {self.top_p}")
        if not 0 <= self.min_p < 1:
            raise ValueError(f"min_p must be in [0, 1), got {self.min_p}")
        if self.max_tokens < 1:
            raise ValueError(f"max_tokens must be >= 1, got {self.max_tokens}")
        if self.num_passes < 1:
            raise ValueError(f"num_passes must be >= 1, got {self.num_passes}")
        if self.likelihood not in LIKELIHOODS:
            raise ValueError(f"likelihood must be one of {', '.join(LIKELIHOODS)}, got {self.likelihood}")
        if "" in self.stop:
            raise ValueError("stop strings must not be empty, got an empty one")

    @property
    def filters(self) -> bool:
        """True where top-k, top-p or min-p cut the distribution."""
        return self.top_k > 0 or self.top_p < 1 or self.min_p > 0


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
        """n completions of one prompt, in sample order. ValueError where prompt and completion cannot fit."""
        ...

    def load_weights(self, named_tensors: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Take new weights; completions started afterwards carry `version`. Cached keys and values are dropped."""
        ...

    def take_stats(self) -> EngineStats:
        """What was done since the last call."""
        ...
