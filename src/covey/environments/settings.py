"""Settings that every environment has, and those of the small ones."""

from dataclasses import dataclass, field
from typing import Any

from covey.section import Section


@dataclass
class EnvironmentConfig(Section):
    """What every environment has."""

    name: str = ""
    """Which environment, a key of environments.ENVIRONMENTS."""


@dataclass
class ArithmeticConfig(EnvironmentConfig):
    """Generated sums, with difficulty levels."""

    name: str = "arithmetic"
    levels: list[int] = field(default_factory=lambda: [3])
    """Difficulty levels to draw problems from (environments/arithmetic.py lists them)."""
    num_train: int = 4096
    """Training problems (fewer where a level has not so many)."""
    num_test: int = 512
    """Held-out problems, none of which is in the training set."""
    problem_seed: int = 0
    """Which problems are drawn."""


@dataclass
class CustomConfig(EnvironmentConfig):
    """An environment of your own, a class or function in a module of yours."""

    name: str = "custom"
    factory: str = ""
    """What makes the environment, as module:function; a class is a function too."""
    options: dict[str, Any] = field(default_factory=dict)
    """Its arguments, by name."""


@dataclass
class MixtureConfig(EnvironmentConfig):
    """Several environments whose prompts take turns."""

    name: str = "mixture"
    parts: dict[str, Any] = field(default_factory=dict)
    """Settings of each environment by a name for it; `name` in them says which environment, where that is another."""
    weights: dict[str, float] = field(default_factory=dict)
    """How often a part takes its turn in training, relative to the others; one that is not named weighs 1."""
    data: dict[str, Any] = field(default_factory=dict)
    """Rows of a part of its own, by its name, as in `data`; parts that need rows and are not named share `data`."""
