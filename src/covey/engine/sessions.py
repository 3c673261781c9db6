"""Episodes on any engine: sessions of its own where it has them, else every turn is a prompt of its own."""

import asyncio
from collections.abc import Sequence

from covey.engine.base import Engine, Session, SessionEngine
from covey.types import Completion, Sampling


def open_sessions(engine: Engine, prompt_ids: Sequence[int], n: int, sampling: Sampling) -> Sequence[Session]:
    """Begin n attempts at one prompt. Must be called while the event loop runs."""
    if isinstance(engine, SessionEngine):
        return engine.open(prompt_ids, n, sampling)
    first = asyncio.ensure_future(engine.generate(prompt_ids, n, sampling))
    return [PromptSession(engine, prompt_ids, first, index) for index in range(n)]


class PromptSession:
    """A session of an engine without sessions: every turn is sampled with all that went before as its prompt.

    A prefix cache of the engine's own (vLLM) may save the encoding. Where completions say what it saved, that is not
    counted as encoded again; elsewhere all of the history is.
    """

    def __init__(
        self, engine: Engine, prompt_ids: Sequence[int], first: "asyncio.Future[list[Completion]]", sample_index: int
    ) -> None:
        """`first` answers all attempts at the prompt, this one in place `sample_index`."""
        self.re_encoded_tokens = 0
        self._engine = engine
        self._so_far = [*prompt_ids]
        self._first = first
        self._sample_index = sample_index

    async def first(self) -> Completion:
        """Return the first turn."""
        completion = (await asyncio.shield(self._first))[self._sample_index]
        self._so_far += completion.token_ids
        return completion

    async def extend(self, token_ids: Sequence[int], sampling: Sampling) -> Completion:
        """Append what the environment said, and sample the next turn."""
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
        """End the first turns, where nobody waits for them any more."""
        if not self._first.done():
            self._first.cancel()
