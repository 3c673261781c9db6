"""Requests and their rows, which are running completions.

A row of a session lives on between turns. Its own tokens are all that follow its prompt: sampled ones and the
environment's.
"""

from collections import deque
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from covey.engine.base import Begun
from covey.engine.drafts.contexts import Contexts
from covey.engine.native.stops import Decode, StopText
from covey.policy.sampling import row_key
from covey.types import Completion, FinishReason, Sampling, Span


@dataclass(eq=False, slots=True)
class SamplingRequest:
    """One call of generate() or opening of sessions."""

    prompt_ids: tuple[int, ...]
    n: int
    sampling: Sampling
    stop_ids: frozenset[int]
    decode: Decode
    version: int
    """Version of the weights that rows begin with now."""
    quiet: Container[int] = ()
    """Tokens after which no stop string is looked for (`stops.QuietTokens`)."""
    to_start: deque[int] = field(default_factory=deque)
    """Sample indices of rows that have not begun; all n of them at first."""
    num_running: int = 0
    num_kept: int = 0
    """Rows at rest whose keys and values are kept."""
    slot: int = -1
    """Slot of its prompt in the cache; -1 where it is in none."""
    number: int = -1
    """Place in the order in which requests came."""
    cancelled: bool = False
    completions: dict[int, Completion] = field(default_factory=dict)
    """Completions of a call by sample index."""
    tell: Callable[[int, Completion], None] = lambda index, completion: None
    """Told of each completion of a call when it is finished."""
    begun: Begun | None = None
    """Tokens of a former process, and a listener for those so far; None without one."""
    contexts: Contexts | None = None
    """Counts of its earlier texts, once drafts were looked for (`drafts/`)."""
    sessions: tuple["DecodeRow", ...] = ()
    """Rows that live on between turns, by sample index; empty in a call."""

    def __post_init__(self) -> None:
        self.to_start.extend(range(self.n))

    @property
    def done(self) -> bool:
        """Return True where nothing runs, is kept, or will begin."""
        return self.num_running == 0 and self.num_kept == 0 and (self.cancelled or not self.to_start)

    def keep_rows(self) -> None:
        self.sessions = tuple(self.new_row(index) for index in range(self.n))

    def row(self, sample_index: int) -> "DecodeRow":
        """Return a row that begins its first turn."""
        row = self.sessions[sample_index] if self.sessions else self.new_row(sample_index)
        row.changes = [(self.version, 0)]
        return row

    def new_row(self, sample_index: int) -> "DecodeRow":
        key = row_key(self.sampling.seed, self.sampling.first_sample + sample_index)
        known = () if self.begun is None else self.begun.known.get(sample_index, ())
        return DecodeRow(self, sample_index, self.sampling, key, known)

    def leave(self) -> None:
        """Forget the request's place in the cache."""
        self.num_running, self.num_kept, self.slot = 0, 0, -1
        for row in self.sessions:
            row.kept = 0

    def start_again(self) -> None:
        """Restart the running turns: first ones from the prompt, later ones resumed."""
        self.leave()
        if not self.sessions:
            self.to_start = deque(index for index in range(self.n) if index not in self.completions)
            return
        under_way = [row for row in self.sessions if row.completion is None and not row.closed]
        self.to_start = deque(row.sample_index for row in under_way if not row.past)
        for row in under_way:
            row.forget()
            row.begin_turn(len(row.past) if row.token_ids else row.unread, row.sampling, row.key)


@dataclass(eq=False, slots=True)
class DecodeRow:
    """One running completion, or one attempt of several turns."""

    request: SamplingRequest
    sample_index: int
    sampling: Sampling
    """Sampling settings of this turn."""
    key: int
    known: Sequence[int] = ()
    """Tokens that a former process sampled here."""
    stop_text: StopText | None = field(init=False)
    past: list[int] = field(default_factory=list)
    """Own tokens before this turn's, the reply to the turn before included."""
    token_ids: list[int] = field(default_factory=list)
    """Sampled in this turn."""
    logprobs: list[float] = field(default_factory=list)
    counted: int = 0
    """Tokens of this turn that its request's contexts have seen."""
    changes: list[tuple[int, int]] = field(default_factory=list)
    """(version, number of tokens before it) of each version that tokens were sampled on, the oldest first."""
    left: bool = False
    """Its turn is finished, or it was cancelled."""
    completion: Completion | None = None
    """Completion of the latest finished turn, until the next begins."""
    closed: bool = False
    kept: int = 0
    """Own tokens whose keys and values are kept while it rests."""
    read: int = 0
    """Own tokens that had been read, on the weights of now, when it rested last: kept, or given up since."""
    together: list[tuple[int, int]] = field(default_factory=list)
    """Stretches of own tokens that were read in one pass; the others were fed one by one."""
    unread: int = 0
    """Place of the first own token that was never read when this turn began."""
    re_encoded: int = 0
    """Tokens of earlier turns that were read again so far, on its account."""

    def __post_init__(self) -> None:
        self.stop_text = self._stop_text()

    @property
    def own_ids(self) -> list[int]:
        return [*self.past, *self.token_ids]

    @property
    def num_own(self) -> int:
        return len(self.past) + len(self.token_ids)

    @property
    def most_own(self) -> int:
        return len(self.past) + self.sampling.max_tokens

    @property
    def is_at_rest(self) -> bool:
        """Return True for a session that waits between turns."""
        waits_to_go_on = bool(self.past) and not self.token_ids
        return not self.closed and (self.completion is not None or waits_to_go_on)

    def extend(self, reply_ids: Sequence[int], sampling: Sampling) -> None:
        """Begin another turn after the environment's reply."""
        read = self.num_own - 1  # the newest token was never fed
        self.past += [*self.token_ids, *reply_ids]
        self.begin_turn(read, sampling, row_key(sampling.seed, 0))

    def begin_turn(self, unread: int, sampling: Sampling, key: int) -> None:
        """Forget the previous turn, or this one's samples."""
        self.sampling, self.key, self.unread = sampling, key, unread
        self.token_ids, self.logprobs, self.changes = [], [], [(self.request.version, 0)]
        self.left, self.completion, self.counted = False, None, 0
        self.stop_text = self._stop_text()

    def forget(self) -> None:
        """Mark all read tokens as stale after a change of weights."""
        self.kept, self.read, self.together = 0, 0, []

    def known_next(self, most: int) -> list[int]:
        """Return the next tokens that a former process sampled, while it agrees."""
        start = len(self.token_ids)
        if len(self.known) <= start or list(self.known[:start]) != self.token_ids:
            self.known = ()
            return []
        return list(self.known[start : start + min(most, self.sampling.max_tokens - start - 1)])

    def continue_on(self, version: int) -> None:
        """Label tokens with a new version from now on."""
        if self.changes[-1][1] == len(self.token_ids):
            self.changes.pop()
        self.changes.append((version, len(self.token_ids)))

    def take(self, token_id: int, logprob: float) -> None:
        """Append a sampled token; the last one finishes the row."""
        self.token_ids.append(token_id)
        self.logprobs.append(logprob)
        reason = self._finish_reason(token_id)
        if reason is None:
            return
        self.left = True
        self.request.num_running -= 1
        oldest, spans = self.changes[0][0], self._spans()
        self.completion = Completion(tuple(self.token_ids), tuple(self.logprobs), reason, oldest, spans=spans)
        if not self.request.sessions:
            self.request.completions[self.sample_index] = self.completion
            self.request.tell(self.sample_index, self.completion)

    def _spans(self) -> tuple[Span, ...]:
        """Return the version of each token, empty for a single version."""
        if len(self.changes) == 1:
            return ()
        ends = [start for _, start in self.changes[1:]] + [len(self.token_ids)]
        return tuple(Span(version, start, end) for (version, start), end in zip(self.changes, ends, strict=True))

    def _finish_reason(self, token_id: int) -> FinishReason | None:
        if token_id in self.request.stop_ids:
            return "stop"
        if self.stop_text is not None and self.stop_text.completed_by_last(self.token_ids):
            return "stop"
        return "length" if len(self.token_ids) == self.sampling.max_tokens else None

    def _stop_text(self) -> StopText | None:
        if not self.sampling.stop:
            return None
        return StopText(self.sampling.stop, self.request.decode, self.request.quiet)


NOBODY = -1
"""Stands for a stop token where a row has fewer than others; never drawn."""


@dataclass(frozen=True, slots=True)
class RowDraws:
    """Numbers of rows' draws. Shapes: R rows, K stop tokens."""

    key_R: Tensor
    temperature_R: Tensor
    stop_RK: Tensor
    is_plain: bool
    """Whether C can draw them: none is filtered."""

    @staticmethod
    def of(rows: Sequence[DecodeRow]) -> "RowDraws":
        most = max(len(row.request.stop_ids) for row in rows)
        stops = [sorted(row.request.stop_ids) + [NOBODY] * (most - len(row.request.stop_ids)) for row in rows]
        temperatures = [row.sampling.temperature for row in rows]
        is_plain = not any(row.sampling.filters for row in rows)
        keys = [row.key for row in rows]
        return RowDraws(torch.tensor(keys), torch.tensor(temperatures), torch.tensor(stops), is_plain)
