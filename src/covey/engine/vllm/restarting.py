"""vLLM beside the trainer, restarted when it is lost."""

import asyncio
import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace

from covey.engine.base import MOST_LOSSES, EngineLost, EngineStats
from covey.engine.vllm.engine import VLLMEngine
from covey.system.text.format import first_line
from covey.types import Completion, RunStopped, Sampling

LOGGER = logging.getLogger(__name__)


class RestartingEngine:
    """Restarts a lost vLLM and repeats running requests with the same seeds."""

    def __init__(self, make: Callable[[int], VLLMEngine]) -> None:
        """Set `make`, which starts vLLM on the current weights, under a version."""
        self._make = make
        self._engine = make(0)
        self._restarting = threading.Lock()
        self._losses = 0
        """Losses in a row since weights were last taken."""
        self._stats = EngineStats()
        """Statistics of earlier engines."""
        self._is_closed = False

    @property
    def version(self) -> int:
        return self._engine.version

    async def generate(self, prompt_ids: Sequence[int], n: int, sampling: Sampling) -> list[Completion]:
        """Return n completions. RunStopped where vLLM is lost again and again."""
        while True:
            engine = self._engine
            try:
                return await engine.generate(prompt_ids, n, sampling)
            except EngineLost as lost:
                await asyncio.to_thread(self._restart, engine, engine.version, lost)

    def load_weights(self, version: int) -> None:
        """Take the policy's current weights. RunStopped after repeated losses."""
        engine = self._engine
        try:
            engine.load_weights(version)
        except EngineLost as lost:
            self._restart(engine, version, lost)
        else:
            self._losses = 0

    def rest(self) -> None:
        """Release memory to the trainer; a lost engine is restarted when needed."""
        try:
            self._engine.rest()
        except EngineLost as lost:
            LOGGER.warning("%s", lost)

    def take_stats(self) -> EngineStats:
        """Return the counters since the last call, restarts included."""
        gone, self._stats = self._stats, EngineStats()
        return gone + self._engine.take_stats()

    def close(self) -> None:
        self._is_closed = True
        self._engine.close()

    def _restart(self, lost: VLLMEngine, version: int, why: Exception) -> None:
        """Restart vLLM, once for all callers that lost the same engine."""
        with self._restarting:
            while self._engine is lost and not self._is_closed:
                self._losses += 1
                if self._losses >= MOST_LOSSES:
                    raise RunStopped(f"vLLM was lost {self._losses} times in a row: {first_line(why)}")
                LOGGER.warning("vLLM is lost and started again on version %d: %s", version, first_line(why))
                gone = self._end_lost(lost)
                try:
                    self._engine = self._make(version)
                except EngineLost as again:
                    why = again
                self._stats = gone
            if self._is_closed:  # meanwhile: nothing else would end the new engine
                self._engine.close()
                raise why

    def _end_lost(self, lost: VLLMEngine) -> EngineStats:
        """End a lost engine; return its counters and its predecessors'."""
        done = self.take_stats()
        lost.close()
        return replace(done, restarts=done.restarts + 1)
