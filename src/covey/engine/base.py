"""The engine seam: the protocols by which tokens are sampled."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, fields
from typing import Literal, Protocol, runtime_checkable

import torch
import xxhash
from torch import Tensor

from covey.types import Completion, Sampling

UpdateMode = Literal["keep", "wait", "abort"]
"""Effect of new weights on running completions: `keep` continues on the new weights, with the prefix encoded
again; `wait` finishes on the old; `abort` restarts."""
MOST_LOSSES = 5
"""Most losses of an engine in a row before the run ends: their cause would kill the next one too."""


@dataclass(frozen=True, slots=True)
class EngineStats:
    """Counters since the statistics were last taken."""

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
    """Tokens of earlier turns, of `prompt_tokens`, whose keys and values had been given up."""
    drafted_tokens: int = 0
    """Fed on trust, beside the newest token of a row."""
    accepted_tokens: int = 0
    """Tokens sampled in passes that another token of their row had already."""
    saved_seconds: float = 0.0
    """Saved by drafts, as passes without them take at that number of rows."""
    restarts: int = 0
    """Number of times that a lost engine was started again."""

    def __add__(self, other: "EngineStats") -> "EngineStats":
        """Return both, one after the other: sums, and the larger peaks."""
        both = {field.name: (getattr(self, field.name), getattr(other, field.name)) for field in fields(self)}
        return EngineStats(**{name: (max if name.startswith("peak") else sum)(pair) for name, pair in both.items()})

    def metrics(self) -> dict[str, float]:
        """Return metrics of a step, those that had a cause."""
        found = {"engine/restarts": float(self.restarts)} if self.restarts else {}
        if not self.drafted_tokens:
            return found
        return found | {
            "engine/draft_tokens": float(self.drafted_tokens),
            "engine/draft_accepted": self.accepted_tokens / self.drafted_tokens,
            "engine/draft_saved_seconds": self.saved_seconds,
            "engine/tokens_per_pass": self.sampled_tokens / max(1, self.sampled_tokens - self.accepted_tokens),
        }


class Engine(Protocol):
    """Samples completions. Concurrent calls share batches, without an effect on results."""

    @property
    def version(self) -> int:
        """Return the training steps behind the current weights."""

    async def generate(self, prompt_ids: Sequence[int], n: int, sampling: Sampling) -> list[Completion]:
        """Return n completions of one prompt, in sample order.

        ValueError where prompt and completion cannot fit.
        """

    def load_weights(self, version: int) -> None:
        """Take the policy's weights as `version` for later completions; empty all caches."""

    def take_stats(self) -> EngineStats:
        """Return the counters since the last call."""


@dataclass(frozen=True, slots=True)
class Begun:
    """Completions of a call that are not finished."""

    known: Mapping[int, Sequence[int]]
    """Tokens that a former process sampled, by index: they are fed as drafts and drawn again, many in one pass."""
    tell: Callable[[int, Sequence[int]], None]
    """Told of an index and its tokens so far, every second; not by engines whose drafts would change bits."""


@runtime_checkable
class TellingEngine(Engine, Protocol):
    """An engine that reports each completion when it is finished."""

    async def generate_telling(
        self,
        prompt_ids: Sequence[int],
        n: int,
        sampling: Sampling,
        tell: Callable[[int, Completion], None],
        begun: Begun | None = None,
    ) -> list[Completion]:
        """Return n completions as `generate` does, each told before by its index."""


class Session(Protocol):
    """An attempt of several turns, whose tokens stay encoded if possible."""

    @property
    def re_encoded_tokens(self) -> int:
        """Return the tokens of earlier turns encoded again so far."""

    async def first(self) -> Completion: ...

    async def extend(self, token_ids: Sequence[int], sampling: Sampling) -> Completion:
        """Append the environment's reply, and sample the next turn (sample index 0).

        ValueError where it cannot fit.
        """

    def close(self) -> None:
        """Release kept tokens or the running turn; idempotent."""


@runtime_checkable
class SessionEngine(Engine, Protocol):
    """An engine that keeps keys and values between turns."""

    def open(self, prompt_ids: Sequence[int], n: int, sampling: Sampling) -> Sequence[Session]:
        """Begin n attempts at one prompt, encoded once for all.

        ValueError where prompt and completion cannot fit.
        """


@dataclass(frozen=True, slots=True)
class Probe:
    """A fixed text with its log-probs, to prove pushed weights."""

    token_ids: tuple[int, ...]
    logprobs: "tuple[float, ...] | Future[tuple[float, ...]]"
    """Log-probs of token_ids[1:], natural, at temperature 1 and unfiltered. A future where they follow the weights."""
    tolerance: float
    """Most nats by which an engine may differ on a token."""


@dataclass(frozen=True, slots=True)
class WeightSet:
    """Named, versioned, hashed weights, pushed from trainer to engine."""

    version: int
    tensors: Mapping[str, Tensor]
    """Weights by parameter name of the policy's model, on the CPU; the trained ones only. May be read-only memory."""
    digest: str
    """`digest_of(tensors)`; "" where they never leave the process."""
    probe: Probe


class PushRefused(ValueError):
    """Pushed weights were refused; the engine keeps its old version, whole."""


class EngineLost(RuntimeError):
    """The engine is broken or unreachable, and must be replaced."""


@runtime_checkable
class UpdatableEngine(Engine, Protocol):
    """An engine on weights of its own, which change during completions."""

    async def update(self, weights: WeightSet, how: UpdateMode) -> None:
        """Take new weights as a transaction, proved by the probe.

        Names, shapes and digest are checked first, then the probe; the version changes last. Running completions carry
        the version of each token (`Completion.spans`). PushRefused where the old version stays, EngineLost where
        nothing whole is left.
        """


@runtime_checkable
class Closable(Protocol):
    def close(self) -> None:
        """End the engine's processes; idempotent."""


@runtime_checkable
class Resting(Protocol):
    def rest(self) -> None:
        """Release memory until weights come or completions are requested."""


def check_call(prompt_ids: Sequence[int], n: int) -> None:
    """Refuse a call without completions or without a prompt. ValueError."""
    if n < 1:
        raise ValueError(f"n must be >= 1, got {n}")
    if not prompt_ids:
        raise ValueError("a prompt must hold at least one token, got none")


def check_length(num_tokens: int, max_tokens: int, limit: int) -> None:
    """Refuse a completion that may need more positions than there are. ValueError."""
    needed = num_tokens + max_tokens
    if needed > limit:
        raise ValueError(
            f"a prompt of {num_tokens} tokens with max_tokens={max_tokens} needs {needed} positions, "
            f"the policy has {limit}; data.bad_rows=skip leaves such prompts out"
        )


def digest_of(tensors: Mapping[str, Tensor]) -> str:
    """Hash names, types, shapes and bytes, in the order of the names.

    XXH3 of 128 bits finds accidental changes at the speed of memory. The digest travels beside the weights, so a
    cryptographic one would prove no more.
    """
    digest = xxhash.xxh3_128()
    for name, tensor in sorted(tensors.items()):
        plain = tensor.detach().cpu().contiguous()
        digest.update(f"{name}:{tensor.dtype}:{tuple(tensor.shape)};".encode())
        digest.update(plain.flatten().view(torch.uint8).numpy().data)
    return f"xxh3:{digest.hexdigest()}"


def open_sessions(engine: Engine, prompt_ids: Sequence[int], n: int, sampling: Sampling) -> Sequence[Session]:
    """Begin n attempts at one prompt, in a running event loop."""
    if isinstance(engine, SessionEngine):
        return engine.open(prompt_ids, n, sampling)
    first = asyncio.ensure_future(engine.generate(prompt_ids, n, sampling))
    return [PromptSession(engine, prompt_ids, first, index) for index in range(n)]


class PromptSession:
    """A session on an engine without sessions, as growing prompts.

    An engine's prefix cache (vLLM) may save the encoding; tokens that completions report as cached do not count as
    encoded again.
    """

    def __init__(
        self, engine: Engine, prompt_ids: Sequence[int], first: "asyncio.Future[list[Completion]]", sample_index: int
    ) -> None:
        """Set the first turns' shared future, and the place in it."""
        self.re_encoded_tokens = 0
        self._engine = engine
        self._so_far = [*prompt_ids]
        self._first = first
        self._sample_index = sample_index

    async def first(self) -> Completion:
        completion = (await asyncio.shield(self._first))[self._sample_index]
        self._so_far += completion.token_ids
        return completion

    async def extend(self, token_ids: Sequence[int], sampling: Sampling) -> Completion:
        """Append the environment's reply, and sample the next turn."""
        prompt_ids = [*self._so_far, *token_ids]
        (completion,) = await self._engine.generate(prompt_ids, 1, sampling)
        history = len(self._so_far)
        if completion.cached_tokens is not None:
            # The newest token was never fed, so it is not encoded again either
            history = max(0, history - 1 - completion.cached_tokens)
        self.re_encoded_tokens += history
        self._so_far = [*prompt_ids, *completion.token_ids]
        return completion

    def close(self) -> None:
        """Cancel the first turns once no attempt waits for them."""
        if not self._first.done():
            self._first.cancel()
