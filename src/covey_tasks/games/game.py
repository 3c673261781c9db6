"""A conversation in plain text with rules, as a pure function."""

import random
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from covey.environments.base import Demonstration, Environment, Split
from covey.environments.episode import Answer, Episode, Observation
from covey.types import Failure, Message, Prompt, Reward, StopReason
from covey_tasks.games.settings import GameConfig

END = ";"
"""Ends each turn of the policy: `sampling.stop` of the recipes."""
NOT_UNDERSTOOD = "!"
"""Answers a turn that is none of the rules' moves."""


@dataclass(frozen=True, slots=True)
class MoveResult:
    """The result of a turn.

    >>> MoveResult(">", state="16-31")
    MoveResult(reply='>', is_done=False, is_won=False, state='16-31', reward=0.0, is_void=False)
    """

    reply: str
    is_done: bool = False
    is_won: bool = False
    state: str = ""
    """Names the facts known after the turn."""
    reward: float = 0.0
    """Reward of this turn."""
    is_void: bool = False


class Game(Environment):
    """Environment of a game: reward 1 for winning, and turn rewards."""

    def __init__(self, prompts: Mapping[Split, Sequence[Prompt]], max_turns: int, settings: GameConfig) -> None:
        """Set the prompts, and the default of `max_turns`."""
        self._common = settings
        self._prompts = {split: tuple(found) for split, found in prompts.items()}
        self._max_turns = settings.max_turns or max_turns

    @abstractmethod
    def outcome(self, columns: Mapping[str, Any], moves: Sequence[str], seed: int) -> MoveResult:
        """Return the result of the policy's last move, by the attempt's seed."""

    @abstractmethod
    def move(self, columns: Mapping[str, Any], moves: Sequence[str], replies: Sequence[str]) -> str:
        """Return the best next move by the rules and the conversation."""

    @abstractmethod
    def wrong_move(self, drawn: random.Random) -> str:
        """Return an erroneous move for demonstrations."""

    def prompts(self, split: Split) -> list[Prompt]:
        return list(self._prompts[split])

    def max_turns(self, prompt: Prompt) -> int:
        return self._max_turns

    def episode(self, prompt: Prompt, seed: int) -> Episode:
        return GameEpisode(self, prompt.columns, seed)

    async def score(self, prompt: Prompt, completions: Sequence[str]) -> list[Reward | Failure]:
        """Judge answers given at once."""
        return [_verdict(self.outcome(prompt.columns, [text], 0).is_won) for text in completions]

    def gold_turn(self, prompt: Prompt, conversation: Sequence[Message]) -> str | None:
        """Return the best move, None where answers are shuffled."""
        return None if self._common.shuffled else self.move_after(prompt, conversation)

    def move_after(self, prompt: Prompt, conversation: Sequence[Message]) -> str:
        """Return the best move after a conversation with true answers."""
        said = conversation[1:]
        moves = [str(message["content"]) for message in said if message["role"] == "assistant"]
        replies = [str(message["content"]) for message in said if message["role"] != "assistant"]
        return self.move(prompt.columns, moves, replies)

    def demonstrated(self, prompt: Prompt, name: str) -> Demonstration:
        """Play an episode in which a share of the moves errs.

        `name` tells it from others of the same game.
        """
        drawn = random.Random(name)
        moves: list[str] = []
        replies: list[str] = []
        said: list[Message] = []
        while len(moves) < self._max_turns:
            wrong = drawn.random() < self._common.demonstration_errors
            moves.append(self.wrong_move(drawn) if wrong else self.move(prompt.columns, moves, replies))
            outcome = self.outcome(prompt.columns, moves, 0)
            replies.append(outcome.reply)
            said += [{"role": "assistant", "content": moves[-1]}, {"role": "user", "content": outcome.reply}]
            if outcome.is_done:
                break
        return prompt, tuple(said[:-1])  # the reply to the last move is read by nobody


class GameEpisode(Episode):
    """One game."""

    def __init__(self, game: Game, columns: Mapping[str, Any], seed: int) -> None:
        self._game, self._columns, self._seed = game, columns, seed
        self._moves: list[str] = []
        self._is_won = False

    async def reply(self, answer: Answer) -> Observation:
        self._moves.append(answer.text)
        found = self._game.outcome(self._columns, self._moves, self._seed)
        self._is_won = found.is_won
        reason: StopReason | None = "completed" if found.is_done else None
        return Observation(found.reply, found.reward or None, found.is_done, {}, reason, found.state, found.is_void)

    async def score(self, conversation: Sequence[Message]) -> Reward:
        return _verdict(self._is_won)


def _verdict(is_won: bool) -> Reward:
    return Reward(float(is_won), {"won": float(is_won)})
