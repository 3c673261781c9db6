"""The engine seam: how tokens are sampled."""

from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Literal, Protocol, runtime_checkable

import torch
import xxhash
from torch import Tensor

from covey.types import Completion, Sampling

UpdateMode = Literal["keep", "wait", "abort"]
"""What happens to completions under way when weights change: `keep` continues each on the new weights, its prefix
encoded again; `wait` finishes them on the old weights first; `abort` starts them again."""
MOST_LOSSES = 5
"""So often in a row an engine may be lost before the run ends: what kills it would kill the next one too."""


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
    re_encoded_tokens: int = 0
    """Of `prompt_tokens`, those of earlier turns whose keys and values had been given up."""
    restarts: int = 0
    """How often an engine that was lost was started again."""


class Engine(Protocol):
    """Samples completions. Calls made concurrently are batched together. The result does not depend on it."""

    @property
    def version(self) -> int:
        """Return the optimiser steps behind the weights that it samples on."""
        ...

    async def generate(self, prompt_ids: Sequence[int], n: int, sampling: Sampling) -> list[Completion]:
        """Return n completions of one prompt, in sample order.

        ValueError where prompt and completion cannot fit.
        """
        ...

    def load_weights(self, version: int) -> None:
        """Take the policy's weights. Completions started afterwards carry `version`. Caches are emptied."""
        ...

    def take_stats(self) -> EngineStats:
        """Return what was done since the last call."""
        ...


class Session(Protocol):
    """One attempt of several turns. What it has read stays encoded between them, where there is room."""

    @property
    def re_encoded_tokens(self) -> int:
        """Return how many tokens of earlier turns had to be encoded again so far."""
        ...

    async def first(self) -> Completion:
        """Return the first turn."""
        ...

    async def extend(self, token_ids: Sequence[int], sampling: Sampling) -> Completion:
        """Append what the environment said, and sample the next turn with sample index 0.

        ValueError where it cannot fit.
        """
        ...

    def close(self) -> None:
        """Give back what is kept, or what is still being sampled. Closing again does nothing."""
        ...


@runtime_checkable
class SessionEngine(Engine, Protocol):
    """An engine that keeps keys and values between turns."""

    def open(self, prompt_ids: Sequence[int], n: int, sampling: Sampling) -> Sequence[Session]:
        """Begin n attempts at one prompt, which is encoded once for all of them.

        ValueError where prompt and completion cannot fit.
        """
        ...


@dataclass(frozen=True, slots=True)
class Probe:
    """A fixed text and the log-probs that the pushed weights give it: the proof that an engine runs on them."""

    token_ids: tuple[int, ...]
    logprobs: "tuple[float, ...] | Future[tuple[float, ...]]"
    """Of token_ids[1:], natural, at temperature 1 and unfiltered. A future where they follow the weights."""
    tolerance: float
    """Most nats by which an engine may differ on a token."""


@dataclass(frozen=True, slots=True)
class WeightSet:
    """Weights on their way from the trainer to an engine: one named, versioned, hashed set."""

    version: int
    tensors: Mapping[str, Tensor]
    """By parameter name of the policy's model, on the CPU; the trained ones only. May be read-only memory."""
    digest: str
    """`digest_of(tensors)`; "" where they never leave the process."""
    probe: Probe


class PushRefused(ValueError):
    """Raised where pushed weights are not taken: the engine samples on the version it had, whole."""


class EngineLost(RuntimeError):
    """Raised where an engine can no longer be trusted or reached and must be made anew."""


@runtime_checkable
class UpdatableEngine(Engine, Protocol):
    """An engine on weights of its own, which change while completions are under way."""

    async def update(self, weights: WeightSet, how: UpdateMode) -> None:
        """Take new weights as one transaction: names, shapes and digest first, the probe after, then the version.

        Completions under way carry the version of each token (`Completion.spans`). PushRefused where the old version
        stays, EngineLost where nothing whole is left.
        """
        ...


@runtime_checkable
class Closable(Protocol):
    """An engine that holds processes of its own."""

    def close(self) -> None:
        """End them. Closing again does nothing."""
        ...


@runtime_checkable
class Resting(Protocol):
    """An engine that can leave its device to the trainer."""

    def rest(self) -> None:
        """Give memory back until weights come, or until it is asked to sample."""
        ...


def check_call(prompt_ids: Sequence[int], n: int) -> None:
    """Refuse (ValueError) a call for no completion, or with nothing to read."""
    if n < 1:
        raise ValueError(f"n must be >= 1, got {n}")
    if not prompt_ids:
        raise ValueError("a prompt must hold at least one token, got none")


def check_length(num_tokens: int, max_tokens: int, limit: int) -> None:
    """Refuse (ValueError) a completion that may come to need more positions than there are."""
    needed = num_tokens + max_tokens
    if needed > limit:
        raise ValueError(
            f"a prompt of {num_tokens} tokens with max_tokens={max_tokens} needs {needed} positions, "
            f"the policy has {limit}"
        )


def digest_of(tensors: Mapping[str, Tensor]) -> str:
    """Return a hash over names, types, shapes and bytes, in the order of the names.

    XXH3 of 128 bits: it finds what changed on the way at the speed of memory. A digest that travels beside the weights
    guards against nobody who could change both, so a cryptographic one would prove no more.
    """
    digest = xxhash.xxh3_128()
    for name, tensor in sorted(tensors.items()):
        plain = tensor.detach().cpu().contiguous()
        digest.update(f"{name}:{tensor.dtype}:{tuple(tensor.shape)};".encode())
        digest.update(plain.flatten().view(torch.uint8).numpy().data)
    return f"xxh3:{digest.hexdigest()}"
