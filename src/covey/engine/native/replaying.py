"""The native engine replaying a recorded run, token versions included.

A row does not depend on the rows beside it: prompts are encoded alone or with the same bits, and so are replies and
prefixes after a change of weights. So a row that is sampled alone, with the same changes after the same tokens, has the
same bits. A session that waited over a change of weights was read again in one pass, as the version of its next turn
shows; an evicted one was read again with its original passes (`Runner.repeats_bits`).
"""

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from covey.engine.base import Begun
from covey.engine.native.own_weights import OwnWeightsEngine
from covey.engine.native.rows import DecodeRow
from covey.engine.native.runner import Runner
from covey.engine.native.scheduler import Scheduler
from covey.engine.weights import trained_tensors
from covey.policy.policy import Policy, inference
from covey.types import Completion, Sampling, Span


class Past(Protocol):
    """The recorded completions to come."""

    def spans(self, seed: int, sample_index: int) -> Sequence[Span]:
        """Return a completion's token versions, by its call's seed."""

    def add(self, seed: int, sample_index: int, num_tokens: int) -> None:
        """Record the completion's length."""


@dataclass(eq=False)
class Place:
    """The engine state of rows with one version history."""

    scheduler: Scheduler
    runner: Runner
    version: int
    """Version of the weights that the kept tokens were encoded with."""
    has_begun: bool = False


class ReplayingEngine(OwnWeightsEngine):
    """Samples another engine's tokens again, on the original versions."""

    past: Past
    """Recorded past of the group that is sampled now."""

    def _set_up(self) -> None:
        super()._set_up()
        self._kept: dict[int, Mapping[str, Tensor]] = {}

    def remember(self, trained: Policy, version: int) -> Mapping[str, Tensor]:
        """Keep a copy of the trained weights as a version; return it."""
        self._kept[version] = {name: tensor.detach().clone() for name, tensor in trained_tensors(trained).items()}
        return self._kept[version]

    def forget_before(self, version: float) -> None:
        """Drop the versions that no token to come needs."""
        self._kept = {kept: weights for kept, weights in self._kept.items() if kept >= version}

    async def generate_telling(
        self,
        prompt_ids: Sequence[int],
        n: int,
        sampling: Sampling,
        tell: Callable[[int, Completion], None],
        begun: Begun | None = None,
    ) -> list[Completion]:
        sessions = self.open(prompt_ids, n, sampling)
        completions = [await session.first() for session in sessions]
        for index, session in enumerate(sessions):
            session.close()
            tell(index, completions[index])
        return completions

    def open(self, prompt_ids: Sequence[int], n: int, sampling: Sampling) -> "list[ReplayedSession]":  # type: ignore[override] # neither kind is the other
        """Begin a recorded call's attempts: those of one version together, others alone."""
        sessions: dict[int, ReplayedSession] = {}
        together: dict[object, list[int]] = {}
        first = sampling.first_sample
        spans_of = [tuple(self.past.spans(sampling.seed, index)) for index in range(first, first + n)]
        for index, spans in enumerate(spans_of):
            together.setdefault(spans[0].version if len(spans) == 1 else (index,), []).append(index)
        for indices in together.values():
            request = self._request(prompt_ids, n, sampling)
            request.keep_rows()
            request.to_start = deque(indices)
            version = spans_of[indices[0]][0].version
            place = Place(Scheduler(self._limits), self._new_runner(), version)
            place.scheduler.submit(request)
            sessions |= {index: ReplayedSession(self, request.sessions[index], place) for index in indices}
        return [sessions[index] for index in range(n)]

    def sample_first(self, place: Place, row: DecodeRow) -> Completion:
        """Return the first turn of an attempt, sampled with its place."""
        index = row.sampling.first_sample + row.sample_index
        if not place.has_begun:
            place.has_begun = True
            self._sample(place, row, self.past.spans(row.sampling.seed, index))
        return self._record_turn(row, index)

    def sample_next(self, place: Place, row: DecodeRow, token_ids: Sequence[int], sampling: Sampling) -> Completion:
        """Return the next turn of an attempt. ValueError where it cannot fit."""
        self._go_on(place.scheduler, row, token_ids, sampling)
        self._sample(place, row, self.past.spans(sampling.seed, 0))
        return self._record_turn(row, 0)

    def leave(self, place: Place, row: DecodeRow) -> None:
        with self._at(place), inference(self._policy.model):
            self._scheduler.close(row)
            self._depart()
            if not self._scheduler.groups:
                self._runner.drop()

    def _record_turn(self, row: DecodeRow, sample_index: int) -> Completion:
        """Return the finished turn, recording its length."""
        assert row.completion is not None, "its turn is over"
        self.past.add(row.sampling.seed, sample_index, len(row.completion.token_ids))
        return row.completion

    def _sample(self, place: Place, row: DecodeRow, spans: Sequence[Span]) -> None:
        """Sample a place's turns, changing weights as the spans say."""
        with self._at(place), inference(self._policy.model):
            self._load(spans[0].version)
            row.request.version = self.version
            # Tokens encoded with other weights are of no use
            if place.version != self.version:
                self._scheduler.give_up(row)
                row.forget()
                self._depart()
            later = deque(spans[1:])
            while self._scheduler.has_work:
                if later and self._scheduler.rows and len(self._scheduler.rows[0].token_ids) == later[0].start:
                    self._load(later.popleft().version)
                    self._continue()
                self._step(most=1)
            place.version = self.version

    @contextmanager
    def _at(self, place: Place) -> Iterator[None]:
        """Work with the cache of a place inside."""
        usual = self._scheduler, self._runner
        self._scheduler, self._runner = place.scheduler, place.runner
        try:
            yield
        finally:
            self._scheduler, self._runner = usual

    @torch.no_grad()
    def _load(self, version: int) -> None:
        if version == self.version:
            return
        for name, tensor in trained_tensors(self._trained).items():
            tensor.copy_(self._kept[version][name])
        self.refresh_weights()
        self.version = version


class ReplayedSession:
    """One replayed attempt of several turns. See `Session`."""

    def __init__(self, engine: ReplayingEngine, row: DecodeRow, place: Place) -> None:
        self._engine = engine
        self._row = row
        self._place = place

    @property
    def re_encoded_tokens(self) -> int:
        return self._row.re_encoded

    async def first(self) -> Completion:
        return self._engine.sample_first(self._place, self._row)

    async def extend(self, token_ids: Sequence[int], sampling: Sampling) -> Completion:
        """Append the environment's reply, and sample the next turn."""
        return self._engine.sample_next(self._place, self._row, token_ids, sampling)

    def close(self) -> None:
        if not self._row.closed:
            self._engine.leave(self._place, self._row)
