"""Schedule rows: admission, finishing and slots, without tensors.

Rows (running completions) and groups (prompts with cached keys and values) each fill slots 0 .. n-1 without a gap:
where one leaves, the last takes its slot. The cache is two rectangles, groups x longest prompt and rows x largest
number of own tokens, and the kept tokens of idle sessions. A row is admitted only if all of it fits at its worst.

Continuing sessions enter before new calls. Idle sessions are evicted, longest idle first, where nothing else runs or
where they hold more than half of the room.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, count
from typing import Any

from covey.engine.native.rows import DecodeRow, SamplingRequest

Move = tuple[int, int]
"""Slots (from, to) of a move; the second is free."""


@dataclass(frozen=True, slots=True)
class Capacity:
    """The capacity of the engine."""

    max_rows: int
    max_slots: int
    """Cached tokens, prompts and completions together, padding included."""
    max_prefill: int = 16384
    """Padded prompt tokens encoded in one pass (one prompt may be longer)."""
    max_resume: int = 16384
    """The same of sessions that read on."""
    rows_hold_prompts: bool = False
    """Whether each row has its prompt in its own slots, besides its group's."""
    state_slots: int = 0
    """Slots of a state beside the tokens' of each prompt and row."""
    sessions_hold_prompts: bool = False
    """Whether idle sessions keep their prompts, too."""

    def prompt_slots(self, request: SamplingRequest) -> int:
        """Count the slots of a prompt with its state."""
        return len(request.prompt_ids) + self.state_slots

    def kept_slots(self, row: DecodeRow) -> int:
        """Count the slots of an idle session."""
        return row.kept + self.state_slots + len(row.request.prompt_ids) * self.sessions_hold_prompts

    def beside(self, prompt_slots: int) -> int:
        """Count the slots of a row beside its own tokens."""
        return prompt_slots if self.rows_hold_prompts else self.state_slots


@dataclass(frozen=True, slots=True)
class Admission:
    """Prompts to encode and rows to start; they hold the last slots."""

    prompts: tuple[SamplingRequest, ...]
    rows: tuple[DecodeRow, ...]
    num_resumed: int = 0
    """First rows that continue a session: they draw after tokens not yet read."""

    def charge(self) -> int:
        """Count earlier turns' tokens to encode again, and charge them to rows."""
        prompts = set(self.prompts)
        total = 0
        for row in self.rows[: self.num_resumed]:
            again = row.unread - row.kept
            if row.request in prompts:
                prompts.discard(row.request)
                again += len(row.request.prompt_ids)
            row.re_encoded += again
            total += again
        return total


@dataclass(frozen=True, slots=True)
class Departure:
    """Complete requests, and the moves into freed slots."""

    requests: tuple[SamplingRequest, ...]
    row_moves: tuple[Move, ...]
    group_moves: tuple[Move, ...]


class Scheduler:
    """First come, first served; large groups enter in waves."""

    def __init__(self, limits: Capacity) -> None:
        self.limits = limits
        self.rows: list[DecodeRow] = []
        """Row slot -> row."""
        self.groups: list[SamplingRequest] = []
        """Group slot -> request."""
        self.longest_prompt = 0
        self.longest_row = 0
        """Length in tokens of the longest row admitted, each counted with its turn's maximum."""
        self.changes = 0
        """Grows whenever rows or groups enter, leave or move."""
        self.kept: dict[DecodeRow, None] = {}
        """Idle rows with kept keys and values, longest idle first."""
        self.kept_slots = 0
        self.resuming: deque[DecodeRow] = deque()
        """Rows of sessions that wait to continue."""
        self._waiting: deque[SamplingRequest] = deque()
        self._numbers = count()

    @property
    def has_work(self) -> bool:
        return bool(self._waiting or self.resuming or self.rows) or any(request.done for request in self.groups)

    @property
    def requests(self) -> list[SamplingRequest]:
        """Return unfinished requests in the order of arrival."""
        inside = sorted(self.groups, key=lambda request: request.number)
        return [*inside, *(request for request in self._waiting if request.slot < 0)]

    @property
    def row_slots(self) -> int:
        """Return the slots that the longest row may need."""
        return self.longest_row + self.limits.beside(self.longest_prompt)

    @property
    def most_needed(self) -> int:
        """Return the most slots that a waiting request needs alone."""
        calls = [self._alone(request, request.sampling.max_tokens) for request in self.requests]
        return max([*calls, *(self._alone(row.request, row.most_own) for row in self.resuming)], default=0)

    def submit(self, request: SamplingRequest) -> None:
        """Queue a request. ValueError if no row could be held."""
        self._refuse(request, request.sampling.max_tokens, request.sampling.max_tokens)
        request.number = next(self._numbers)
        self._waiting.append(request)

    def check_extension(self, row: DecodeRow, num_own: int, max_tokens: int) -> None:
        """Refuse a next turn that could never be held. ValueError."""
        self._refuse(row.request, num_own + max_tokens, max_tokens)

    def resume(self, row: DecodeRow) -> None:
        self.resuming.append(row)

    def cancel(self, request: SamplingRequest) -> None:
        """Cancel a request; its slots are freed at the next `depart`."""
        request.cancelled = True
        if request in self._waiting:
            self._waiting.remove(request)
        for row in self.rows:
            if row.request is request and not row.left:
                row.left = True
                request.num_running -= 1

    def close(self, row: DecodeRow) -> None:
        """Close a session; its slots are freed at the next `depart`."""
        row.closed = True
        request = row.request
        # It runs, waits to go on, or waits to begin; what it keeps goes in any case
        if row in self.rows:
            if not row.left:
                row.left = True
                request.num_running -= 1
        elif row in self.resuming:
            self.resuming.remove(row)
        elif row.sample_index in request.to_start:
            request.to_start.remove(row.sample_index)
            if not request.to_start and request in self._waiting:
                self._waiting.remove(request)
        self.give_up(row)

    def turns_over(self) -> list[tuple[int, DecodeRow]]:
        """Return sessions that finished a turn, with slots, before `depart` removes them."""
        over = [(slot, row) for slot, row in enumerate(self.rows) if row.left and row.request.sessions]
        return [(slot, row) for slot, row in over if not row.closed]

    def rest(self, row: DecodeRow) -> None:
        """Mark a session's tokens as kept after its turn."""
        row.kept = row.read
        self.kept[row] = None
        self.kept_slots += self.limits.kept_slots(row)
        row.request.num_kept += 1

    def give_up(self, row: DecodeRow) -> None:
        """Evict an idle session's kept tokens."""
        if row in self.kept:
            self._unkeep(row)
            row.kept = 0

    def give_way(self) -> bool:
        """Evict one session if the next request needs room; True if so."""
        if len(self.rows) >= self.limits.max_rows or not self.kept or not self._is_blocked():
            return False
        # While rows run, idle sessions are evicted only if they hold most of the room
        resting = self.kept.keys() - set(self.resuming)
        if self.rows and 2 * sum(map(self.limits.kept_slots, resting)) <= self.limits.max_slots:
            return False
        self.give_up_one()
        return True

    def give_up_one(self) -> None:
        """Evict the session that has been idle longest, waiting ones last."""
        waiting = set(self.resuming)
        resting = (row for row in self.kept if row not in waiting)
        last_to_go_on = (row for row in reversed(self.resuming) if row in self.kept)
        self.give_up(next(chain(resting, last_to_go_on)))

    def admit(self) -> Admission:
        """Admit as many waiting rows as there is room for."""
        first_row, first_group = len(self.rows), len(self.groups)
        self._resume(first_group)
        num_resumed = len(self.rows) - first_row
        # Sessions go before calls; where one finds no room though nothing runs, a call half in has it
        if not self.resuming or not self.rows:
            self._start(first_group)
        # Kept tokens of resumed rows count until here: they are copied while they are still there
        for row in self.rows[first_row : first_row + num_resumed]:
            self._unkeep(row)
        self.changes += len(self.rows) > first_row
        return Admission(tuple(self.groups[first_group:]), tuple(self.rows[first_row:]), num_resumed)

    def advance(self, rows: Sequence[DecodeRow], token_ids: Sequence[int], logprobs: Sequence[float]) -> int:
        """Give sampled tokens to unfinished rows, and count them."""
        num_taken = 0
        for row, token_id, logprob in zip(rows, token_ids, logprobs, strict=True):
            if not row.left:
                row.take(token_id, logprob)
                num_taken += 1
        return num_taken

    def tell_begun(self) -> None:
        """Report the tokens so far of unfinished rows with a listener."""
        for row in self.rows:
            if row.request.begun is not None and not row.left:
                row.request.begun.tell(row.sample_index, row.token_ids)

    def depart(self) -> Departure:
        """Free the slots of finished rows and requests."""
        leaving = [request for request in self.groups if request.done or self._is_stranded(request)]
        if not leaving and not any(row.left for row in self.rows):
            return Departure((), (), ())
        row_moves = _fill_gaps(self.rows, [slot for slot, row in enumerate(self.rows) if row.left])
        group_moves = _fill_gaps(self.groups, [request.slot for request in leaving])
        for request in leaving:
            request.slot = -1
        for slot, request in enumerate(self.groups):
            request.slot = slot
        self.longest_prompt = max(map(self.limits.prompt_slots, self.groups), default=0)
        self.longest_row = max((row.most_own for row in self.rows), default=0)
        self.changes += 1
        done = tuple(request for request in leaving if request.done)
        return Departure(done, tuple(row_moves), tuple(group_moves))

    def _resume(self, first_group: int) -> None:
        """Admit continuing sessions, in order."""
        while self.resuming:
            row = self.resuming[0]
            if self._room(row.request, row.most_own) < 1 or not self._enter(row.request, first_group):
                break
            row.changes = [(row.request.version, 0)]
            self._add(self.resuming.popleft())

    def _start(self, first_group: int) -> None:
        """Admit rows of calls, in order, while there is room."""
        while self._waiting:
            request = self._waiting[0]
            room = self._room(request, request.sampling.max_tokens)
            if room < 1 or not self._enter(request, first_group):
                break
            for _ in range(min(room, len(request.to_start))):
                self._add(request.row(request.to_start.popleft()))
            # A group that does not fit enters in waves, and blocks those behind it
            if request.to_start:
                break
            self._waiting.popleft()

    def _enter(self, request: SamplingRequest, first_group: int) -> bool:
        """Assign a prompt's slot; False if padding would grow too large."""
        if request.slot >= 0:
            return True
        new = [*self.groups[first_group:], request]
        if len(new) > 1 and len(new) * max(len(each.prompt_ids) for each in new) > self.limits.max_prefill:
            return False
        request.slot = len(self.groups)
        self.groups.append(request)
        return True

    def _add(self, row: DecodeRow) -> None:
        self.rows.append(row)
        row.request.num_running += 1
        self.longest_prompt = max(self.longest_prompt, self.limits.prompt_slots(row.request))
        self.longest_row = max(self.longest_row, row.most_own)

    def _is_stranded(self, request: SamplingRequest) -> bool:
        """Return True if a prompt holds a slot that others need."""
        return request.num_running == 0 and request.num_kept == 0 and request not in list(self._waiting)[:1]

    def _is_blocked(self) -> bool:
        if self.resuming:
            row = self.resuming[0]
            return self._room(row.request, row.most_own) < 1
        if self._waiting:
            return self._room(self._waiting[0], self._waiting[0].sampling.max_tokens) < 1
        return False

    def _room(self, request: SamplingRequest, row_length: int) -> int:
        """Count the rows of a request that can enter now."""
        longest_prompt = max(self.longest_prompt, self.limits.prompt_slots(request))
        longest_row = max(self.longest_row, row_length) + self.limits.beside(longest_prompt)
        num_groups = len(self.groups) + (request.slot < 0)
        num_rows = (self.limits.max_slots - self.kept_slots - num_groups * longest_prompt) // longest_row
        return min(self.limits.max_rows, num_rows) - len(self.rows)

    def _alone(self, request: SamplingRequest, row_length: int) -> int:
        """Return the slots that one row needs alone."""
        prompt_slots = self.limits.prompt_slots(request)
        return prompt_slots + self.limits.beside(prompt_slots) + row_length

    def _refuse(self, request: SamplingRequest, row_length: int, max_tokens: int) -> None:
        needed = self._alone(request, row_length)
        if needed > self.limits.max_slots:
            so_far = len(request.prompt_ids) + row_length - max_tokens
            raise ValueError(
                f"a prompt of {so_far} tokens with max_tokens={max_tokens} needs {needed} cached tokens, cache_bytes "
                f"has room for {self.limits.max_slots}"
            )

    def _unkeep(self, row: DecodeRow) -> None:
        """Remove a row from the kept ones."""
        if row in self.kept:
            del self.kept[row]
            self.kept_slots -= self.limits.kept_slots(row)
            row.request.num_kept -= 1


def _fill_gaps(items: list[Any], gaps: Sequence[int]) -> list[Move]:
    """Remove the items at `gaps` (rising) in place; return the moves."""
    num_left = len(items) - len(gaps)
    gone = set(gaps)
    movers = [slot for slot in range(num_left, len(items)) if slot not in gone]
    moves = list(zip(movers, [slot for slot in gaps if slot < num_left], strict=True))
    for source, target in moves:
        items[target] = items[source]
    del items[num_left:]
    return moves
