"""Sample any causal model of transformers, by its own forward.

One prompt is read once for its group, its cache forked, and rows of equal length are decoded in lockstep by the model's
own forward pass. Requests, sessions, stops and draws are the native engine's.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import Tensor

from covey.engine.drafts.drafter import Drawn
from covey.engine.lockstep.reader import Reader
from covey.engine.native.cache import Cache
from covey.engine.native.decode_weights import build_decode_policy, is_wanted
from covey.engine.native.engine import NativeEngine, not_in_eight_bits
from covey.engine.native.own_weights import OwnWeightsEngine
from covey.engine.native.replaying import ReplayingEngine
from covey.engine.native.rows import DecodeRow, SamplingRequest
from covey.engine.native.runner import Draws, Runner
from covey.engine.native.scheduler import Admission, Capacity, Departure, Scheduler
from covey.engine.native.steps import Sampled
from covey.policy.attention.forked import Held
from covey.policy.models.caches import fork_rows, join_rows, take_rows
from covey.policy.policy import Policy, to_device


@dataclass(eq=False, slots=True)
class Cohort:
    """Rows of equal length, and the cache without newest tokens."""

    rows: list[DecodeRow]
    length: int
    """Tokens that each has read."""
    held: Held
    draws: Draws | None = None

    def texts(self) -> list[list[int]]:
        """Return the tokens that each row has, the newest included."""
        return [[*row.request.prompt_ids, *row.own_ids] for row in self.rows]


class Caches(Cache):
    """The caches of cohorts, prompts and idle sessions, sized by length."""

    def __init__(self, reader: Reader, max_slots: int) -> None:
        super().__init__(reader.shape, max_slots)
        self.cohorts: list[Cohort] = []
        self.begun: dict[SamplingRequest, tuple[Held, Tensor]] = {}
        """Prompt's cache and logits (V,) after it, of requests whose rows may yet begin."""
        self.resting: dict[DecodeRow, Held] = {}
        self._state_slots = reader.shape.state_slots

    @property
    def num_slots(self) -> int:
        """Count the slots of all tokens and states."""
        lengths = [cohort.length for cohort in self.cohorts for _ in cohort.rows]
        lengths += [len(request.prompt_ids) for request in self.begun]
        lengths += [len(row.request.prompt_ids) + row.read for row in self.resting]
        return sum(lengths) + self._state_slots * len(lengths)

    def note_peak(self) -> None:
        self.peak_bytes = max(self.peak_bytes, self.num_bytes)

    def drop(self) -> None:
        """Release everything."""
        self.cohorts.clear()
        self.begun.clear()
        self.resting.clear()


class LockstepRunner(Runner):
    """Runs the scheduler's decisions on caches of transformers."""

    holds_prompts = True
    cache: Caches

    def __init__(self, reader: Reader, max_slots: int) -> None:
        super().__init__(reader.policy, Caches(reader, max_slots), is_compiled=False)
        self._reader = reader

    def start(self, scheduler: Scheduler, admission: Admission) -> Sampled:
        """Read admitted prompts and unread tokens, and draw first tokens."""
        starting = admission.rows[admission.num_resumed :]
        half_in = [each for each in dict.fromkeys(row.request for row in starting) if each in self.cache.begun]
        drawn: dict[DecodeRow, tuple[int, float]] = {}
        for requests in [*_by_length(admission.prompts), *([request] for request in half_in)]:
            held, logits_NV = self.cache.begun.get(requests[0]) or self._begin(requests)
            place = {request: index for index, request in enumerate(requests)}
            rows = [row for row in starting if row.request in place]
            if rows:
                source_R = to_device([place[row.request] for row in rows], self._policy.device)
                cohort = Cohort(rows, len(requests[0].prompt_ids), fork_rows(held, source_R))
                drawn |= self._enter(cohort, logits_NV.view(-1, logits_NV.shape[-1])[source_R])
        for row in admission.rows[: admission.num_resumed]:
            drawn |= self._resume_row(row)
        self.cache.note_peak()
        return _in_order(drawn, admission.rows)

    def decode(self, scheduler: Scheduler, most: int, seconds: float = 0.0) -> Drawn:
        """Feed every row its newest token and draw the next."""
        drawn: dict[DecodeRow, tuple[int, float]] = {}
        for cohort in self.cache.cohorts:
            texts = cohort.texts()
            feed = [ids[-1:] for ids in texts] if self._reader.forks else texts
            logits_RV, cohort.held = self._reader.read(feed, cohort.held)
            cohort.length += 1
            drawn |= self._draw_next(cohort, logits_RV)
        self.cache.note_peak()
        return scheduler.rows, *_in_order(drawn, scheduler.rows)

    def encode_again(self, scheduler: Scheduler) -> None:
        """Read all that is cached on the current weights."""
        for request in self.cache.begun:
            logits_NV, held = self._reader.read([request.prompt_ids], {})
            self.cache.begun[request] = (held, logits_NV[0])
        for cohort in self.cache.cohorts if self._reader.forks else ():
            _, cohort.held = self._reader.read([ids[: cohort.length] for ids in cohort.texts()], {})

    def keep(self, over: Sequence[tuple[int, DecodeRow]], scheduler: Scheduler) -> None:
        """Keep the caches of waiting sessions, if there is room."""
        for _, row in over:
            row.kept, row.read = 0, row.num_own - 1
            needed = row.read + scheduler.limits.prompt_slots(row.request)
            while self.cache.num_slots + needed > self.cache.max_slots and scheduler.kept:
                scheduler.give_up_one()
                self._forget_given_up(scheduler)
            if self._reader.forks and self.cache.num_slots + needed <= self.cache.max_slots:
                cohort = next(cohort for cohort in self.cache.cohorts if row in cohort.rows)
                self.cache.resting[row] = fork_rows(cohort.held, torch.tensor([cohort.rows.index(row)]))
                scheduler.rest(row)

    def apply(self, departure: Departure, scheduler: Scheduler) -> None:
        """Drop the caches of rows, prompts and sessions that have left."""
        inside = set(scheduler.rows)
        for cohort in self.cache.cohorts:
            places = [place for place, row in enumerate(cohort.rows) if row in inside]
            if len(places) < len(cohort.rows):
                cohort.rows, cohort.draws = [cohort.rows[place] for place in places], None
                take_rows(cohort.held, torch.tensor(places, dtype=torch.int64))
        self.cache.cohorts[:] = [cohort for cohort in self.cache.cohorts if cohort.rows]
        gone = [each for each in self.cache.begun if each.slot < 0 or not (each.to_start or each.sessions)]
        for request in gone:
            del self.cache.begun[request]
        self._forget_given_up(scheduler)

    def _begin(self, requests: Sequence[SamplingRequest]) -> tuple[Held, Tensor]:
        prompts = [request.prompt_ids for request in requests]
        self.num_encoded += sum(map(len, prompts))
        logits_NV, held = self._reader.read(prompts, {})
        for place, request in enumerate(requests):
            if request.to_start or request.sessions:
                self.cache.begun[request] = (fork_rows(held, torch.tensor([place])), logits_NV[place].clone())
        return held, logits_NV

    def _resume_row(self, row: DecodeRow) -> dict[DecodeRow, tuple[int, float]]:
        """Read a session's unread tokens, and draw."""
        ids = [*row.request.prompt_ids, *row.past]
        known = len(row.request.prompt_ids) + row.read
        held = self.cache.resting.pop(row, {})
        if not held and self._reader.forks:
            held = fork_rows(self.cache.begun[row.request][0], torch.tensor([0]))
            known = len(row.request.prompt_ids)
        self.num_encoded += len(ids) - known if held else len(row.past)
        logits_RV, held = self._reader.read([ids[known:] if held else ids], held)
        return self._enter(Cohort([row], len(ids), held), logits_RV)

    def _enter(self, cohort: Cohort, logits_RV: Tensor) -> dict[DecodeRow, tuple[int, float]]:
        """Draw rows' first tokens, and join those of their length."""
        drawn = self._draw_next(cohort, logits_RV)
        same = [each for each in self.cache.cohorts if each.length == cohort.length]
        for other in same:
            self.cache.cohorts.remove(other)
            cohort = Cohort([*other.rows, *cohort.rows], cohort.length, join_rows([other.held, cohort.held]))
        self.cache.cohorts.append(cohort)
        return drawn

    def _draw_next(self, cohort: Cohort, logits_RV: Tensor) -> dict[DecodeRow, tuple[int, float]]:
        rows, device = cohort.rows, self._policy.device
        cohort.draws = cohort.draws or Draws.of(rows, device)
        turn_R = to_device([len(row.token_ids) for row in rows], device)
        return dict(zip(rows, zip(*self._draw(logits_RV, cohort.draws, turn_R), strict=True), strict=True))

    def _forget_given_up(self, scheduler: Scheduler) -> None:
        for row in [row for row in self.cache.resting if row not in scheduler.kept]:
            del self.cache.resting[row]


def _by_length(requests: Iterable[SamplingRequest]) -> list[list[SamplingRequest]]:

    def length(request: SamplingRequest) -> int:
        return len(request.prompt_ids)

    return [list(alike) for _, alike in groupby(sorted(requests, key=length), key=length)]


def _in_order(drawn: dict[DecodeRow, tuple[int, float]], rows: Sequence[DecodeRow]) -> Sampled:
    token_ids, logprobs = zip(*(drawn[row] for row in rows), strict=True)
    return list(token_ids), list(logprobs)


class LockstepEngine(NativeEngine):
    """Samples through transformers' own forward pass and cache."""

    def _prepare(self, policy: Policy, kernels: str) -> None:
        if self._is_rounded:
            raise not_in_eight_bits(policy)
        self._policy = build_decode_policy(policy) if is_wanted(policy) else policy
        self._reader = Reader(self._policy)
        self._shape, self.kernels, self._is_graph = self._reader.shape, "torch", False

    def _capacity(self, max_rows: int, max_slots: int) -> Capacity:
        states = self._reader.shape.state_slots
        return Capacity(max_rows, max_slots, rows_hold_prompts=True, state_slots=states, sessions_hold_prompts=True)

    def _new_runner(self) -> Runner:
        return LockstepRunner(self._reader, self._limits.max_slots)


class OwnWeightsLockstepEngine(OwnWeightsEngine, LockstepEngine):
    """The same on weights of its own, set by `update`."""

    def _set_up(self) -> None:
        super()._set_up()
        # Rows decode together, so that prompts which enter one by one would not repeat their bits either
        self._limits = self._capacity(self._limits.max_rows, self._limits.max_slots)
        self._reset()


class ReplayingLockstepEngine(ReplayingEngine, LockstepEngine):
    """The same replaying a recorded run, up to rounding."""
