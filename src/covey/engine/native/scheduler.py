"""Who is sampled when: admission, finishing and slots. No tensors, so every decision can be tested without a model.

Rows (completions in the making) and groups (prompts whose keys and values are held) each fill slots 0 .. n-1 without a
gap: where one leaves, the last takes its slot. The cache is two rectangles, groups x longest prompt and rows x largest
max_tokens, and a row is admitted only if both fit at their worst.
"""

from collections import deque
from collections.abc import Container, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from covey.engine.native.stops import Decode, StopText
from covey.policy.sampling import row_key
from covey.types import Completion, FinishReason, Sampling, Span

Move = tuple[int, int]
"""What lies in the first slot goes to the second, which is free."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What may be held at once."""

    max_rows: int
    max_slots: int
    """Cached tokens, prompts and completions together, padding included."""
    max_prefill: int = 16384
    """Padded prompt tokens encoded in one pass (one prompt may be longer)."""
    rows_hold_prompts: bool = False
    """Whether each row has its prompt in its own slots, besides its group's."""


@dataclass(eq=False, slots=True)
class Request:
    """One call of generate(): a prompt and its n rows."""

    prompt_ids: tuple[int, ...]
    n: int
    sampling: Sampling
    stop_ids: frozenset[int]
    decode: Decode
    version: int
    """Of the weights that rows begin with now."""
    quiet: Container[int] = ()
    """Tokens after which no stop string is looked for (`stops.QuietTokens`)."""
    to_start: deque[int] = field(default_factory=deque)
    """Sample indices of rows that have not begun; all n of them at first."""
    num_running: int = 0
    slot: int = -1
    """Of its prompt in the cache; -1 before."""
    number: int = -1
    """Place in the order in which requests came."""
    cancelled: bool = False
    completions: dict[int, Completion] = field(default_factory=dict)
    """By sample index."""

    def __post_init__(self) -> None:
        self.to_start.extend(range(self.n))

    @property
    def done(self) -> bool:
        """Nothing of it runs and nothing more will."""
        return self.num_running == 0 and (self.cancelled or not self.to_start)

    def start_again(self) -> None:
        """Forget the rows under way: all that are not finished are still to start."""
        self.to_start = deque(index for index in range(self.n) if index not in self.completions)
        self.num_running, self.slot = 0, -1


@dataclass(eq=False, slots=True)
class Row:
    """One completion in the making."""

    request: Request
    sample_index: int
    key: int
    stop_text: StopText | None
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    changes: list[tuple[int, int]] = field(default_factory=list)
    """(version, number of tokens before it) of each version that tokens were sampled on, the oldest first."""
    left: bool = False
    """Finished or cancelled."""

    def __post_init__(self) -> None:
        self.changes.append((self.request.version, 0))

    def continue_on(self, version: int) -> None:
        """Label the tokens from here on with a new version."""
        if self.changes[-1][1] == len(self.token_ids):
            self.changes.pop()
        self.changes.append((version, len(self.token_ids)))

    def take(self, token_id: int, logprob: float) -> None:
        """Append a sampled token. The row leaves if it was the last."""
        self.token_ids.append(token_id)
        self.logprobs.append(logprob)
        # Rows that are not finished go on
        reason = self._finish_reason(token_id)
        if reason is None:
            return
        # Complete the row
        self.left = True
        self.request.num_running -= 1
        oldest, spans = self.changes[0][0], self._spans()
        self.request.completions[self.sample_index] = Completion(
            tuple(self.token_ids), tuple(self.logprobs), reason, oldest, spans=spans
        )

    def _spans(self) -> tuple[Span, ...]:
        """Return the version of each token, empty where it is one for all."""
        if len(self.changes) == 1:
            return ()
        ends = [start for _, start in self.changes[1:]] + [len(self.token_ids)]
        return tuple(Span(version, start, end) for (version, start), end in zip(self.changes, ends, strict=True))

    def _finish_reason(self, token_id: int) -> FinishReason | None:
        if token_id in self.request.stop_ids:
            return "stop"
        if self.stop_text is not None and self.stop_text.completed_by_last(self.token_ids):
            return "stop"
        return "length" if len(self.token_ids) == self.request.sampling.max_tokens else None


@dataclass(frozen=True, slots=True)
class Admission:
    """What enters now: prompts to encode (they took the last group slots) and rows (they took the last row slots)."""

    prompts: tuple[Request, ...]
    rows: tuple[Row, ...]


@dataclass(frozen=True, slots=True)
class Departure:
    """What left: requests that are complete, and who moves into the slots that fell free."""

    requests: tuple[Request, ...]
    row_moves: tuple[Move, ...]
    group_moves: tuple[Move, ...]


class Scheduler:
    """First come, first served. A group larger than the room enters in waves. Its prompt stays until its last row."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.rows: list[Row] = []
        """Row slot -> row."""
        self.groups: list[Request] = []
        """Group slot -> request."""
        self.longest_prompt = 0
        self.longest_row = 0
        """Of what is in, in tokens; a row counts with its max_tokens."""
        self.changes = 0
        """Grows whenever rows or groups enter, leave or move."""
        self._waiting: deque[Request] = deque()
        self._numbers = count()

    @property
    def has_work(self) -> bool:
        return bool(self._waiting or self.rows or self.groups)

    @property
    def requests(self) -> list[Request]:
        """Return what is not done, in the order in which it came."""
        inside = sorted(self.groups, key=lambda request: request.number)
        return [*inside, *(request for request in self._waiting if request.slot < 0)]

    @property
    def reserved_slots(self) -> int:
        """Cached tokens that what is in may come to, padding included."""
        return len(self.groups) * self.longest_prompt + len(self.rows) * self.row_slots

    @property
    def row_slots(self) -> int:
        """Slots that the longest row may come to."""
        return self.longest_row + self.longest_prompt * self.limits.rows_hold_prompts

    def submit(self, request: Request) -> None:
        """Queue a request. ValueError if not even one of its rows could ever be held."""
        own_prompt = len(request.prompt_ids) * self.limits.rows_hold_prompts
        needed = len(request.prompt_ids) + own_prompt + request.sampling.max_tokens
        if needed > self.limits.max_slots:
            raise ValueError(
                f"a prompt of {len(request.prompt_ids)} tokens with max_tokens={request.sampling.max_tokens} needs "
                f"{needed} cached tokens, cache_bytes has room for {self.limits.max_slots}"
            )
        request.number = next(self._numbers)
        self._waiting.append(request)

    def cancel(self, request: Request) -> None:
        """Take a request out. Its slots fall free at the next `depart`."""
        request.cancelled = True
        if request in self._waiting:
            self._waiting.remove(request)
        for row in self.rows:
            if row.request is request and not row.left:
                row.left = True
                request.num_running -= 1

    def admit(self) -> Admission:
        """Let in as many waiting rows as there is room for."""
        first_row, first_group = len(self.rows), len(self.groups)
        widest = 0
        # Admit requests in order, as many rows as there is room for
        while self._waiting:
            request = self._waiting[0]
            is_new = request.slot < 0
            widest = max(widest, len(request.prompt_ids))
            # Bound the padding of one prefill
            num_prompts = len(self.groups) - first_group + is_new
            if num_prompts > 1 and num_prompts * widest > self.limits.max_prefill:
                break
            room = self._room(request)
            if room < 1:
                break
            if is_new:
                request.slot = len(self.groups)
                self.groups.append(request)
            self._start_rows(request, min(room, len(request.to_start)))
            # A group that does not fit enters in waves, and blocks those behind it
            if request.to_start:
                break
            self._waiting.popleft()
        self.changes += len(self.rows) > first_row
        return Admission(tuple(self.groups[first_group:]), tuple(self.rows[first_row:]))

    def advance(self, rows: Sequence[Row], token_ids: Sequence[int], logprobs: Sequence[float]) -> None:
        """Hand the sampled tokens to their rows, but those that left: they keep their slots until `depart`."""
        for row, token_id, logprob in zip(rows, token_ids, logprobs, strict=True):
            if not row.left:
                row.take(token_id, logprob)

    def depart(self) -> Departure:
        """Free the slots of rows that left and of requests that are done."""
        if not any(row.left for row in self.rows) and not any(request.done for request in self.groups):
            return Departure((), (), ())
        # Move the last rows and groups into the gaps, so that slots stay dense
        row_moves = _fill_gaps(self.rows, [slot for slot, row in enumerate(self.rows) if row.left])
        done = [request for request in self.groups if request.done]
        group_moves = _fill_gaps(self.groups, [request.slot for request in done])
        for slot, request in enumerate(self.groups):
            request.slot = slot
        # Measure what is left
        self.longest_prompt = max((len(request.prompt_ids) for request in self.groups), default=0)
        self.longest_row = max((row.request.sampling.max_tokens for row in self.rows), default=0)
        self.changes += 1
        return Departure(tuple(done), tuple(row_moves), tuple(group_moves))

    def _room(self, request: Request) -> int:
        """Return how many rows of a request can enter now."""
        longest_prompt = max(self.longest_prompt, len(request.prompt_ids))
        longest_row = max(self.longest_row, request.sampling.max_tokens)
        longest_row += longest_prompt * self.limits.rows_hold_prompts
        num_groups = len(self.groups) + (request.slot < 0)
        num_rows = (self.limits.max_slots - num_groups * longest_prompt) // longest_row
        return min(self.limits.max_rows, num_rows) - len(self.rows)

    def _start_rows(self, request: Request, num_rows: int) -> None:
        sampling = request.sampling
        for _ in range(num_rows):
            sample_index = request.to_start.popleft()
            stop_text = StopText(sampling.stop, request.decode, request.quiet) if sampling.stop else None
            self.rows.append(Row(request, sample_index, row_key(sampling.seed, sample_index), stop_text))
        request.num_running += num_rows
        self.longest_prompt = max(self.longest_prompt, len(request.prompt_ids))
        self.longest_row = max(self.longest_row, sampling.max_tokens)


def _fill_gaps(items: list[Any], gaps: Sequence[int]) -> list[Move]:
    """Remove the items at `gaps` (rising) in place: items from the end move into the gaps. Says which."""
    num_left = len(items) - len(gaps)
    gone = set(gaps)
    movers = [slot for slot in range(num_left, len(items)) if slot not in gone]
    moves = list(zip(movers, [slot for slot in gaps if slot < num_left], strict=True))
    for source, target in moves:
        items[target] = items[source]
    del items[num_left:]
    return moves
