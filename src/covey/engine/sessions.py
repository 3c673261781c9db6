"""Open sessions on any engine: its own, or one prompt per turn."""

import asyncio
from collections.abc import Sequence

from covey.engine.base import Engine, Session, SessionEngine
from covey.types import Completion, Sampling


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
