"""Drafts of rows' next tokens, from earlier texts of their prompts.

A draft is fed together with the token before it, and counts where it is the very token that the row draws. So drafts,
and the timings that decide on them, change how long sampling takes, and no token. The work between two passes is in
drafts.h.

Shapes: R rows, S tokens that each may write, K stop tokens, F positions of a pass.
"""

import ctypes
from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from torch import Tensor

from covey.engine.base import EngineStats
from covey.engine.drafts.contexts import HEADER, ORDERS, SOURCE, Contexts, Memory
from covey.engine.native.rows import DecodeRow, RowDraws
from covey.policy.kernels.compiler import library, struct_of
from covey.policy.sampling import random_uniform

MOST = 7
"""Drafted tokens of a row in a pass, beside its newest one."""
MOST_ROWS = 48
"""Rows beside which no draft is fed: a pass over more positions takes longer in proportion."""
LOOK_AFTER, MAX_PAUSE = 8, 64
"""Calls before the slower kind is tried again, doubled with each try up to the maximum."""
FEW, RECENT = 3, 5
"""Calls of each kind before they are compared, and those whose median is."""
MORE = 24
"""Positions of a pass beside rows: three blocks of a product."""
NEWEST = 64
"""Tokens of a running row that are counted at most at a time: others were written while no draft was wanted."""
Drawn = tuple[Sequence[DecodeRow], list[int], list[float]]
"""Tokens in the order of each row's, their rows and log-probabilities."""
Pace = struct_of(HEADER, "Pace")
DraftsCall = struct_of(HEADER, "Drafts")


@dataclass(frozen=True, slots=True)
class Drafted:
    """Rows that write some tokens each, with drafts."""

    rows: Sequence[DecodeRow]
    call: ctypes.Structure
    tensors: dict[str, Tensor]
    """Tensors of the call, by its fields."""
    held: Any
    """Others that the call points to, alive as long as it."""

    def look(self) -> list[list[int]]:
        """Return each row's newest token and drafts to feed."""
        library(SOURCE).covey_draft(ctypes.byref(self.call))
        fed: list[list[int]] = [[] for _ in self.rows]
        num = self.call.num_fed
        for row, token_id in torch.stack((self.tensors["row_of"][:num], self.tensors["fed"][:num]), 1).tolist():
            fed[row].append(token_id)
        return fed

    def judge(self, token_ids: Sequence[float], logprobs: Sequence[float]) -> None:
        """Take what was drawn at the positions of a pass."""
        drawn = torch.tensor(token_ids, dtype=torch.int64), torch.tensor(logprobs, dtype=torch.float32)
        library(SOURCE).covey_judge(ctypes.byref(self.call), *(ctypes.c_void_p(each.data_ptr()) for each in drawn))

    def tokens(self) -> Drawn:
        """Return the tokens that the rows have written."""
        written, ids = self.tensors["written"].tolist(), self.tensors["ids"][:, ORDERS[0] :].tolist()
        logprobs = self.tensors["logprobs"].tolist()
        for row, number in zip(self.rows, written, strict=True):
            row.counted = len(row.token_ids) + number
        return (
            [row for row, number in zip(self.rows, written, strict=True) for _ in range(number)],
            [token_id for own, number in zip(ids, written, strict=True) for token_id in own[:number]],
            [logprob for own, number in zip(logprobs, written, strict=True) for logprob in own[:number]],
        )


class Drafter:
    """Drafts tokens of rows, as many as make sampling faster."""

    def __init__(self, always: bool = False) -> None:
        """Draft without asking the clock if `always`."""
        self._memory = Memory()
        self._paces = Pace(always=always), Pace(always=always)
        """Paces of passes without and with a filtered draw, which takes long."""
        self._always = always
        self._calls: Counter[int] = Counter()
        self._pauses: defaultdict[int, int] = defaultdict(lambda: LOOK_AFTER)
        self._seconds: defaultdict[tuple[int, bool], deque[float]] = defaultdict(lambda: deque(maxlen=RECENT))
        """Seconds of a token in recent calls, by the number of rows and whether they drafted."""

    def is_wanted(self, num_rows: int) -> bool:
        """Return True where the next call is to draft."""
        if self._always or num_rows > MOST_ROWS:
            return num_rows <= MOST_ROWS
        drafted, plain = (self._seconds[num_rows, kind] for kind in (True, False))
        if min(len(drafted), len(plain)) < FEW:
            return len(drafted) <= len(plain)
        self._calls[num_rows] += 1
        is_look = self._calls[num_rows] == self._pauses[num_rows]
        if is_look:
            self._calls[num_rows], self._pauses[num_rows] = 0, min(2 * self._pauses[num_rows], MAX_PAUSE)
        return (median(drafted) < median(plain)) != is_look

    def note(self, num_rows: int, is_drafted: bool, seconds: float) -> None:
        """Take the seconds of a token in a call."""
        self._seconds[num_rows, is_drafted].append(seconds)

    def keep(self, rows: Iterable[DecodeRow]) -> None:
        """Remember what rows have written when their turns are over."""
        for row in rows:
            if row.request.contexts is not None:
                _count_new(row, row.request.contexts)
            self._memory.keep(row.request.prompt_ids, row.token_ids, row.logprobs)

    def begin(self, rows: Sequence[DecodeRow], draws: RowDraws, most: int) -> Drafted:
        """Return rows that may write up to `most` tokens each."""
        contexts = [self._contexts_of(row) for row in rows]
        num, room = len(rows), len(rows) + MORE
        before = [_before(row, len(row.token_ids)) for row in rows]
        uniform_RS = random_uniform(
            draws.key_R[:, None], torch.tensor([[len(row.token_ids)] for row in rows]) + torch.arange(most)
        )
        uniform_RS[draws.temperature_R == 0] = 0.5  # the likeliest token is in the middle
        whole = {name: torch.empty(size, dtype=torch.int64) for name, size in _rooms(num, room).items()}
        ids = torch.full((num, ORDERS[0] + most), -1, dtype=torch.int32)
        ids[:, : ORDERS[0]] = torch.tensor([[-1] * (ORDERS[0] - len(own)) + own for own in before])
        tensors = whole | {
            "ids": ids,
            "logprobs": torch.empty(num, most),
            "uniforms": uniform_RS,
            "left": torch.tensor([min(most, row.sampling.max_tokens - len(row.token_ids)) for row in rows]),
            "stops": draws.stop_RK,
            "groups": torch.tensor([row.request.slot for row in rows]),
            "lengths": torch.tensor([row.num_own - 1 for row in rows]),
            "temperatures": draws.temperature_R,
            "written": torch.zeros(num, dtype=torch.int64),
            "chances": torch.empty(num, MOST),
        }
        pace = self._paces[any(row.sampling.filters for row in rows)]
        texts = (ctypes.c_void_p * num)(*(ctypes.addressof(each.call) for each in contexts))
        addresses = {name: tensor.data_ptr() for name, tensor in tensors.items()}
        addresses |= {"pace": ctypes.addressof(pace), "texts": ctypes.addressof(texts)}
        addresses["beside"] = ctypes.addressof(self._memory.shared.call)
        sizes = {"rows": num, "span": most, "num_stops": draws.stop_RK.shape[1], "room": room}
        return Drafted(rows, DraftsCall(**addresses, **sizes), tensors, (self, texts, contexts))

    def _contexts_of(self, row: DecodeRow) -> Contexts:
        """Return the counts of its prompt, with those of what it wrote."""
        known = row.request.contexts or self._memory.contexts(row.request.prompt_ids)
        row.request.contexts = known
        _count_new(row, known)
        return known

    def take_stats(self) -> EngineStats:
        stats = EngineStats()
        for pace in self._paces:
            drafted, accepted = int(pace.drafted), int(pace.accepted)
            stats += EngineStats(drafted_tokens=drafted, accepted_tokens=accepted, saved_seconds=pace.saved)
            pace.drafted = pace.accepted = pace.saved = 0.0
        return stats


def _rooms(num_rows: int, room: int) -> dict[str, int]:
    of_rows = {"guesses": num_rows, "chosen": num_rows, "levels": num_rows * MOST}
    return of_rows | dict.fromkeys(("fed", "row_of", "place_of"), room)


def _count_new(row: DecodeRow, contexts: Contexts) -> None:
    """Count what a row has written since this was asked last."""
    first = max(row.counted, len(row.token_ids) - NEWEST)
    if first < len(row.token_ids):
        before = _before(row, first)
        contexts.add([*before, *row.token_ids[first:]], row.logprobs[first:], len(before))
    row.counted = len(row.token_ids)


def _before(row: DecodeRow, place: int) -> list[int]:
    """Return a context: the tokens before a place of a row's turn."""
    order = ORDERS[0]
    own = row.token_ids[max(0, place - order) : place]
    return own if len(own) == order else [*row.request.prompt_ids[-order:], *row.past[-order:], *own][-order:]


def accept(drafts: Sequence[Sequence[int]], token_ids: Sequence[float]) -> list[int]:
    """Return the places of drawn tokens that stand, row by row."""
    first = 0
    stands: list[int] = []
    for draft in drafts:
        num = 1
        while num <= len(draft) and draft[num - 1] == token_ids[first + num - 1]:
            num += 1
        stands += range(first, first + num)
        first += len(draft) + 1
    return stands
