"""Look up the value of a key's value, by queries alone.

The second query depends on the answer to the first, so that no guess and no parallel call replaces it: a constant
answer is right once in as many problems as there are letters.
"""

import random
import re
import string
from collections.abc import Mapping, Sequence
from typing import Any

from covey.environments.base import Demonstration, Split
from covey.types import Prompt
from covey_tasks.games.game import END, NOT_UNDERSTOOD, Game, MoveResult
from covey_tasks.games.settings import LookupConfig

_MOVE = re.compile(r"([QA])([a-z])" + END)


class Lookup(Game):
    """Environment of stores: `Qe;` queries e, `Ah;` answers; `e?` asks for KV[KV[e]].

    >>> game = Lookup(LookupConfig(num_train=1, num_test=1))
    >>> game.outcome({"key": "e", "store": {"e": "h", "h": "b"}}, ["Qe;"], seed=0).reply
    'h'
    """

    def __init__(self, settings: LookupConfig) -> None:
        self._letters = string.ascii_lowercase[: settings.num_keys]
        self._settings = settings
        counts: dict[Split, int] = {"train": settings.num_train, "test": settings.num_test}
        prompts = {split: [self._problem(split, index) for index in range(n)] for split, n in counts.items()}
        super().__init__(prompts, 4, settings)

    def outcome(self, columns: Mapping[str, Any], moves: Sequence[str], seed: int) -> MoveResult:
        kind, letter = parsed(moves[-1])
        known = "".join(letter for kind, letter in map(parsed, moves) if kind == "Q")
        if kind == "Q" and letter in columns["store"]:
            value = columns["store"][letter]
            if self._settings.shuffled:
                value = random.Random(f"{seed}/{len(moves)}").choice(self._letters)
            return MoveResult(value, state=f"asked {known}")
        if kind == "A":
            store = columns["store"]
            return MoveResult("", is_done=True, is_won=letter == store[store[columns["key"]]], state="answered")
        return MoveResult(NOT_UNDERSTOOD, state=f"asked {known}", is_void=True)

    def move(self, columns: Mapping[str, Any], moves: Sequence[str], replies: Sequence[str]) -> str:
        known = {parsed(move)[1]: reply for move, reply in zip(moves, replies, strict=True) if move[:1] == "Q"}
        first = known.get(columns["key"])
        if first is None:
            return f"Q{columns['key']}{END}"
        return f"Q{first}{END}" if first not in known else f"A{known[first]}{END}"

    def wrong_move(self, drawn: random.Random) -> str:
        return f"{drawn.choice('QA')}{drawn.choice(self._letters)}{END}"

    def demonstrations(self, split: Split) -> list[Demonstration]:
        seed = self._settings.problem_seed
        return [self.demonstrated(prompt, f"lookup {seed}/{prompt.id}") for prompt in self.prompts(split)]

    def _problem(self, split: Split, index: int) -> Prompt:
        drawn = random.Random(f"lookup {self._settings.problem_seed}/{split}/{index}")
        store = {letter: drawn.choice(self._letters) for letter in self._letters}
        key = drawn.choice(self._letters)
        return Prompt(f"{split}-{index}", "lookup", f"{key}?", {"key": key, "store": store})


def parsed(move: str) -> tuple[str, str]:
    """Split a move into kind (Q or A) and letter, empty otherwise."""
    found = _MOVE.fullmatch(move)
    return ("", "") if found is None else (found[1], found[2])
