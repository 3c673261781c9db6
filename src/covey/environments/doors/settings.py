"""Settings of environment=steps and reasoning_gym."""

from dataclasses import dataclass, field
from typing import Any

from covey.environments.settings import EnvironmentConfig, EpisodesConfig
from covey.system.setting import Requires, setting

MADE_OF_SEEDS = Requires(
    "environment.protocol other than skyrl", ("environment.protocol",), lambda protocol: protocol != "skyrl"
)


@dataclass
class StepsConfig(EpisodesConfig):
    """Environments of `reset` and `step` that others wrote: Gymnasium, GEM, TextArena, SkyRL-Gym."""

    name: str = "steps"
    max_turns: int | None = setting(16, ge=1)
    """Steps of an episode at most."""
    factory: str = ""
    """What makes the object of an attempt, as module:function, such as textarena:make; a class is a function too."""
    options: dict[str, Any] = field(default_factory=dict)
    """Its arguments, by name."""
    protocol: str = setting("gymnasium", choices=("gymnasium", "textarena", "skyrl"))
    """How it is spoken to: gymnasium (GEM too), textarena (one player) or skyrl (`data` brings prompts and extras)."""
    instruction: str = setting("Play.", needs=MADE_OF_SEEDS)
    """What the user says before the first observation."""
    num_train: int = setting(4096, ge=1, needs=MADE_OF_SEEDS)
    """Training prompts, each a seed."""
    num_test: int = setting(512, ge=1, needs=MADE_OF_SEEDS)
    """Held-out prompts, none with a seed of a training prompt."""
    problem_seed: int = setting(0, ge=0, needs=MADE_OF_SEEDS)
    """The first of the seeds."""


@dataclass
class ReasoningGymConfig(EnvironmentConfig):
    """A data set of reasoning_gym by name: generated questions with one answer each."""

    name: str = "reasoning_gym"
    dataset: str = "chain_sum"
    """Its name in reasoning_gym."""
    options: dict[str, Any] = field(default_factory=dict)
    """Its own settings, by name."""
    instruction: str = "Give the answer between <answer> and </answer>."
    """The system message; empty says none."""
    num_train: int = setting(4096, ge=1)
    """Training problems."""
    num_test: int = setting(512, ge=1)
    """Held-out problems, fewer where a question is among the training problems."""
    problem_seed: int = 0
    """Which problems are drawn."""
