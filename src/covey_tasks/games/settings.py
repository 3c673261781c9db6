"""Settings of environment=guess, lookup and calculator."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from covey.environments.settings import BuildSettings, EpisodesConfig, Say
from covey.system.setting import setting

if TYPE_CHECKING:
    from covey.environments.base import EnvironmentLike


@dataclass
class GameConfig(EpisodesConfig):
    """Settings that all games share."""

    shuffled: bool = False
    """Answer at random: the control, in which nothing can be learnt from the answers."""
    demonstration_errors: float = setting(0.3, ge=0, le=1)
    """Share of the demonstrated turns that err, in the cold start."""
    problem_seed: int = 0
    """Seed of the drawn problems and demonstrations."""

    knows_right: ClassVar[bool] = True


@dataclass
class GuessConfig(GameConfig):
    """A hidden number to guess, with answers lower or higher."""

    name: str = "guess"
    max_turns: int | None = setting(6, ge=1)
    """Guesses in an episode."""
    highest: int = setting(31, ge=1, le=99)
    """Numbers are hidden from 0 to this."""
    halving_reward: float = setting(0.0, ge=0)
    """Reward of a turn that leaves at most half of the numbers; 0 rewards only a number that is found."""
    num_demonstrations: int = setting(2048, ge=1)
    """Episodes of a player who errs, for the cold start."""
    demonstration_errors: float = setting(0.5, ge=0, le=1)
    """Share of that player's guesses that ignore all answers."""

    def build(self, run: BuildSettings, say: Say) -> "EnvironmentLike":
        from covey_tasks.games.guess import Guess

        return Guess(self)


@dataclass
class LookupConfig(GameConfig):
    """A key-value store that only a tool can read."""

    name: str = "lookup"
    max_turns: int | None = setting(4, ge=1)
    """Queries and answers in an episode."""
    num_keys: int = setting(10, ge=2, le=26)
    """Letters that are keys, and values."""
    num_train: int = setting(4096, ge=1)
    """Training problems, each with a store of its own."""
    num_test: int = setting(512, ge=1)
    """Held-out problems."""

    def build(self, run: BuildSettings, say: Say) -> "EnvironmentLike":
        from covey_tasks.games.lookup import Lookup

        return Lookup(self)


@dataclass
class CalculatorConfig(GameConfig):
    """Long arithmetic, with a calculator that takes one operation at a time."""

    name: str = "calculator"
    max_turns: int | None = setting(4, ge=1)
    """Uses of the calculator and answers in an episode."""
    digits: int = setting(3, ge=1, le=9)
    """Digits of each of the three numbers in a problem."""
    num_train: int = setting(4096, ge=1)
    """Training problems."""
    num_test: int = setting(512, ge=1)
    """Held-out problems, none of which is in the training set."""

    def build(self, run: BuildSettings, say: Say) -> "EnvironmentLike":
        from covey_tasks.games.calculator import Calculator

        return Calculator(self)
