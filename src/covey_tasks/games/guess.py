"""Find a hidden number by guesses answered with lower or higher.

Binary search finds one of 32 numbers within six guesses. Blind play, six different guesses, finds 6 of 32 (0.19): who
does better reads the answers.
"""

import random
import re
from collections.abc import Mapping, Sequence
from typing import Any

from covey.environments.base import SPLITS, Demonstration, Split
from covey.types import Prompt
from covey_tasks.games.game import END, NOT_UNDERSTOOD, Game, MoveResult
from covey_tasks.games.settings import GuessConfig

QUESTION = "?"
LOWER, HIGHER, FOUND = "<", ">", "="
_GUESS = re.compile(r"(\d{1,2})" + END)


class Guess(Game):
    """Environment of hidden numbers, evaluated over all of them.

    >>> Guess(GuessConfig()).outcome({"hidden": 17}, ["15;"], seed=0).reply
    '>'
    """

    def __init__(self, settings: GuessConfig) -> None:
        hidden = range(settings.highest + 1)
        prompts = {s: [Prompt(f"{s}-{n}", "guess", QUESTION, {"hidden": n}) for n in hidden] for s in SPLITS}
        super().__init__(prompts, len(hidden), settings)
        self._settings = settings

    def outcome(self, columns: Mapping[str, Any], moves: Sequence[str], seed: int) -> MoveResult:
        hidden, guess = columns["hidden"], guess_of(moves[-1])
        low, high = self.interval(hidden, moves[:-1])
        if guess is None:
            return MoveResult(NOT_UNDERSTOOD, state=f"{low}-{high}", is_void=True)
        left = self.interval(hidden, moves)
        halves = 2 * (left[1] - left[0] + 1) <= high - low + 1
        reward = self._settings.halving_reward * halves
        if guess == hidden:
            return MoveResult(FOUND, is_done=True, is_won=True, state="found", reward=reward)
        reply = LOWER if hidden < guess else HIGHER
        # The control: replies from which nothing can be learnt
        if self._settings.shuffled:
            reply = random.Random(f"{seed}/{len(moves)}").choice((LOWER, HIGHER))
        return MoveResult(reply, state=f"{left[0]}-{left[1]}", reward=reward)

    def interval(self, hidden: int, moves: Sequence[str]) -> tuple[int, int]:
        """Return the lowest and highest number left by true answers."""
        low, high = 0, self._settings.highest
        for guess in map(guess_of, moves):
            if guess is not None and guess >= hidden:
                high = min(high, guess - (guess != hidden))
            if guess is not None and guess <= hidden:
                low = max(low, guess + (guess != hidden))
        return low, high

    def move(self, columns: Mapping[str, Any], moves: Sequence[str], replies: Sequence[str]) -> str:
        low, high = 0, self._settings.highest
        for guess, reply in zip(map(guess_of, moves), replies, strict=True):
            if guess is not None and reply == LOWER:
                high = min(high, guess - 1)
            if guess is not None and reply == HIGHER:
                low = max(low, guess + 1)
        return written(max(0, (low + high) // 2))

    def wrong_move(self, drawn: random.Random) -> str:
        return written(drawn.randrange(self._settings.highest + 1))

    def demonstrations(self, split: Split) -> list[Demonstration]:
        settings, prompts = self._settings, self.prompts(split)
        return [
            self.demonstrated(prompts[index % len(prompts)], f"guess {settings.problem_seed}/{split}/{index}")
            for index in range(settings.num_demonstrations)
        ]


def guess_of(move: str) -> int | None:
    """Return the number of a move, else None."""
    found = _GUESS.fullmatch(move)
    return None if found is None else int(found[1])


def written(number: int) -> str:
    return f"{number:02d}{END}"
