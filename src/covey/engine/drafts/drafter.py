"""Drafts of rows' next tokens, from earlier texts of their prompts.

A draft is fed together with the token before it, and counts where it is the very token that the row draws. So drafts,
and the timings that decide on them, change how long sampling takes, and no token.
"""

import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from covey.engine.base import EngineStats
from covey.engine.drafts.contexts import ORDERS, Contexts, Memory
from covey.engine.native.rows import DecodeRow
from covey.policy.sampling import uniform

MOST = 7
"""Drafted tokens of a row in a pass, beside its newest one."""
Drawn = tuple[Sequence[DecodeRow], list[int], list[float]]
"""Tokens in the order of each row's, their rows and log-probabilities."""
NEWEST = 64
"""Tokens of a running row that are counted at most at a time: others were written while no draft was wanted."""
LONGEST_PAUSE = 32
"""Calls of several steps between two looks for drafts where none pays."""
NEGLIGIBLE = 0.005
"""Share of a pass's time that a look may always take."""
LEAST = 0.02
"""Least chance of a draft that can pay, for each row that is sampled: a pass over one more position takes longer."""
LATELY = 0.95
"""Factor of what was saved before, call by call."""
LOST = 0.2
"""Share of a pass's time that drafts may have lost lately: a hundredth of each call's."""
PROBED = 2
"""Rows that are looked at where none paid last time."""
FORGETS = 0.998
"""Factor of times of passes that were not measured again: what seemed slow long ago is tried again."""
RISE = 0.02
"""Share of a pass's time that one more position is thought to take before it was measured."""
GAIN = 1.1
"""Least gain in speed that is believed: times of passes vary."""
LEVELS = 10
"""Steps of a guess's probability, each of which has its own share of right guesses."""


class Pace:
    """Seconds of passes by the positions fed, as they were measured."""

    def __init__(self) -> None:
        self._seconds: dict[int, float] = {}
        self.looking = 0.0
        """Seconds of a look for drafts, of one row."""

    def note(self, num_fed: int, seconds: float) -> None:
        """Take a measurement; one that is much too long counts little."""
        size = _size(num_fed)
        before = self._seconds.get(size, seconds)
        self._seconds = {known: FORGETS * each for known, each in self._seconds.items()}
        self._seconds[size] = before + 0.2 * (min(seconds, 1.5 * before) - before)

    def seconds(self, num_fed: int) -> float | None:
        """Return the expected seconds of a pass, None without a shorter one."""
        size = _size(num_fed)
        below = max((known for known in self._seconds if known <= size), default=None)
        if below is None:
            return None
        above = min((known for known in self._seconds if known >= size), default=None)
        if above is None:
            return self._seconds[below] * (1.0 + RISE * (size - below))
        share = (size - below) / (above - below) if above > below else 0.0
        return self._seconds[below] + share * (self._seconds[above] - self._seconds[below])

    def best(self, num_rows: int, chances: Sequence[float]) -> int:
        """Return the number of drafts to feed, by their falling chances."""
        plain = self.seconds(num_rows)
        if plain is None or _size(num_rows) not in self._seconds:
            return 0
        best, fastest, expected = 0, GAIN * num_rows / plain, float(num_rows)
        for num, chance in enumerate(chances, 1):
            expected += chance
            seconds = self.seconds(num_rows + num)
            speed = 0.0 if seconds is None else expected / (seconds + self.looking * num_rows)
            if speed > fastest:
                best, fastest = num, speed
        return best


def _size(num_fed: int) -> int:
    """Round a number of positions up to a size of pass."""
    step = 1 if num_fed <= 8 else 4 if num_fed <= 32 else 16
    return -(-num_fed // step) * step


@dataclass(frozen=True, slots=True)
class DraftToken:
    """A token that may come next, if those before it are right."""

    token_id: int
    level: int
    chance: float
    """Chance that it and those before it are right."""


class Drafter:
    """Drafts tokens of rows, as many as make sampling faster."""

    def __init__(self, always: bool = False) -> None:
        """Draft without asking the clock if `always`."""
        self._stats = EngineStats()
        self._always = always
        self._memory = Memory()
        self._paces = Pace(), Pace()
        """Paces of passes without and with a filtered draw, which takes long."""
        # A guess's own probability is believed at first, as if it had been seen four times
        self._tried = [4.0] * LEVELS
        self._right = [4.0 * (level + 0.5) / LEVELS for level in range(LEVELS)]
        self._guesses: list[list[DraftToken]] = []
        """Drafts of each row of the pass that begins."""
        self._pause = self._wait = 0
        self._saved = 0.0
        """Seconds that looks have saved lately, less what they took."""
        self._pace = self._paces[0]

    @property
    def plain_steps(self) -> int:
        """Return the steps of a call without drafts."""
        return 2 + 2 * self._pause

    def keep(self, rows: Iterable[DecodeRow]) -> None:
        """Remember what rows have written when their turns are over."""
        for row in rows:
            if row.request.contexts is not None:
                _count_new(row, row.request.contexts)
            self._memory.keep(row.request.prompt_ids, row.token_ids, row.logprobs)

    def draft(self, rows: Sequence[DecodeRow], most: int) -> list[list[int]]:
        """Return fewer than `most` tokens to feed beside each row's newest."""
        self._guesses, started = [[] for _ in rows], time.perf_counter()
        self._pace = self._paces[any(row.sampling.filters for row in rows)]
        self._saved *= LATELY
        if self._wait:
            self._wait -= 1
            return [[] for _ in rows]
        num_looked = min(len(rows), PROBED) if self._pause else len(rows)
        least = 0.0 if self._always else LEAST * len(rows)
        for row in rows[:num_looked]:
            if row.request.contexts is None:
                row.request.contexts = self._memory.contexts(row.request.prompt_ids)
        ready = time.perf_counter()
        for slot in range(num_looked):
            self._guesses[slot] = self._guess(rows[slot], min(MOST, most - 1), least)
        ranked = sorted(((guess.chance, slot) for slot, own in enumerate(self._guesses) for guess in own), reverse=True)
        seconds = time.perf_counter() - ready
        self._pace.looking += 0.2 * (seconds / num_looked - self._pace.looking)
        number = len(ranked) if self._always else self._pace.best(len(rows), [chance for chance, _ in ranked])
        plain = self._pace.seconds(len(rows)) or 0.0
        pays = self._saved >= -LOST * plain and (number > 0 or seconds < NEGLIGIBLE * plain)
        self._pause = 0 if pays or self._always else min(LONGEST_PAUSE, 2 * self._pause + 1)
        self._wait = self._pause
        self._save(started - ready - seconds)
        of_slot = Counter(slot for _, slot in ranked[:number])
        return [[guess.token_id for guess in own[: of_slot[slot]]] for slot, own in enumerate(self._guesses)]

    def note(self, rows: Sequence[DecodeRow], num_drafted: int, drawn: Drawn, seconds: float) -> None:
        """Learn from a pass, or several without drafts: tokens and seconds."""
        drawn_rows, token_ids, _ = drawn
        passes = 1 if num_drafted else len(token_ids) // len(rows)
        plain = self._pace.seconds(len(rows))
        if num_drafted and plain is not None:
            self._save(plain * len(token_ids) / len(rows) - seconds)
        num_accepted = len(token_ids) - passes * len(rows)
        self._stats += EngineStats(drafted_tokens=num_drafted, accepted_tokens=num_accepted)
        self._pace.note(len(rows) + num_drafted, seconds / passes)
        if not any(self._guesses):
            return
        guesses_of = dict(zip(rows, map(iter, self._guesses), strict=True))
        for row, token_id in zip(drawn_rows, token_ids, strict=True):
            # Those behind a wrong one were made for another text
            guess = next(guesses_of[row], None)
            if guess is None:
                continue
            self._learn(guess.level, guess.token_id == token_id)
            if guess.token_id != token_id:
                guesses_of[row] = iter(())

    def _save(self, seconds: float) -> None:
        self._saved += seconds
        self._stats += EngineStats(saved_seconds=seconds)

    def take_stats(self) -> EngineStats:
        stats, self._stats = self._stats, EngineStats()
        return stats

    def _guess(self, row: DecodeRow, most: int, least: float) -> list[DraftToken]:
        """Return likely next tokens of a row, at most to its end."""
        request = row.request
        assert request.contexts is not None, "made before"
        _count_new(row, request.contexts)
        context = _before(row, len(row.token_ids))
        guesses: list[DraftToken] = []
        chance = 1.0
        for place in range(len(row.token_ids), min(len(row.token_ids) + most, row.sampling.max_tokens - 1)):
            # The likeliest token is in the middle
            number = uniform(row.key, place) if row.sampling.temperature else 0.5
            found = request.contexts.guess(context, number)
            if found is None or found[0] in request.stop_ids:
                break
            level = min(LEVELS - 1, int(LEVELS * found[1]))
            chance *= self._right[level] / self._tried[level]
            if chance < least:
                break
            guesses.append(DraftToken(found[0], level, chance))
            context = [*context[1:], found[0]]
        return guesses

    def _learn(self, level: int, is_right: bool) -> None:
        self._tried[level] += 1.0
        self._right[level] += is_right
        if self._tried[level] > 1000.0:
            self._tried[level] /= 2.0
            self._right[level] /= 2.0


def _count_new(row: DecodeRow, contexts: Contexts) -> None:
    """Count what a row has written since this was asked last."""
    first = max(row.counted, len(row.token_ids) - NEWEST)
    before = _before(row, first)
    contexts.add([*before, *row.token_ids[first:]], row.logprobs[first:], len(before))
    row.counted = len(row.token_ids)


def _before(row: DecodeRow, place: int) -> list[int]:
    """Return a context: the tokens before a place of a row's turn."""
    order = ORDERS[0]
    own = row.token_ids[max(0, place - order) : place]
    return own if len(own) == order else [*row.request.prompt_ids[-order:], *row.past[-order:], *own][-order:]


def accept(drafts: Sequence[Sequence[int]], token_ids: Sequence[float]) -> Iterator[range]:
    """Yield the places of each row's drawn tokens that stand."""
    first = 0
    for draft in drafts:
        num = 1
        while num <= len(draft) and draft[num - 1] == token_ids[first + num - 1]:
            num += 1
        yield range(first, first + num)
        first += len(draft) + 1
