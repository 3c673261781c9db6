"""Settings that every environment has, and those of the small ones."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, TypeVar, cast

from covey.environments.data.settings import DataConfig
from covey.policy.settings import ModelConfig
from covey.system.lookup import is_function_path
from covey.system.section import Section
from covey.system.setting import Requires, setting

if TYPE_CHECKING:
    from covey.environments.base import EnvironmentLike

Say = Callable[[str], None]
WITHOUT_ROWS = Requires("data.path = null", ("data.path",), lambda path: path is None)


class BuildSettings(Protocol):
    """Settings of a run that builders and checks of environments read."""

    environment: Any
    data: DataConfig
    model: ModelConfig
    rewards: list[Any]
    reward_weights: list[float]
    seed: int
    num_steps: int
    group_size: int
    sampling: Any
    timeouts: Any
    algorithm: Any


@dataclass
class EnvironmentConfig(Section):
    """Settings of an environment, which build and check it."""

    name: str = ""
    """Name of the environment; `covey train --help` lists them."""

    reads_rows: ClassVar[str] = "never"
    """Whether it reads the rows of `data`: never, maybe or always."""
    takes_rewards: ClassVar[bool] = False
    """Whether the functions of `rewards` judge its rows."""
    knows_right: ClassVar[bool] = False
    """Whether a full reward says that an answer is right, though part of it may be had for less."""
    masked_prompts: ClassVar[str] = "never"
    """Whether prompts have masked tokens, which masked policies fill in: never, maybe or always."""
    learned_judge: ClassVar[str] = "none"
    """Learned judge: none, maybe (known once it is built) or trained (its builder trains one)."""
    slow_to_build: ClassVar[bool] = False
    """Whether building it trains a judge or starts programs."""

    def build(self, run: BuildSettings, say: Say) -> "EnvironmentLike":
        """Build the environment from checked settings. `say` prints progress.

        Import the environment's module inside, so that settings stay cheap to import.
        """
        raise NotImplementedError(f"{type(self).__name__} needs a build method")

    def check(self, run: BuildSettings) -> None:
        """Check these settings beside those of the run.

        ValueError names the setting.
        """

    @classmethod
    def section_name(cls) -> str:
        """Return "environment" for every environment: the chosen one is that section."""
        return "environment"


@dataclass
class EpisodesConfig(EnvironmentConfig):
    """Settings that all environments of several turns share."""

    max_turns: int | None = setting(None, ge=1)
    """Turns of the policy in an episode at most; null is the environment's own number."""
    max_context: int | None = setting(None, ge=1)
    """Tokens of prompt and all turns (sampling.max_tokens bounds each); null is the model's limit."""
    turn_timeout: float | None = setting(None, gt=0)
    """Seconds that the environment may take for one reply; null leaves it to timeouts.scoring."""
    history: str = setting("append", choices=("append", "template"))
    """Form of earlier turns for the policy: append (the tokens as it sampled them) or template (the conversation
    rendered anew; where that rewrites what was said, a branch begins)."""


@contextmanager
def naming_settings() -> Iterator[None]:
    """Put "environment." before the setting that an error inside begins with."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"environment.{error}") from error


def check_time(run: BuildSettings, seconds: float, what: str) -> None:
    """Require that scoring may take longer than `what`."""
    if run.timeouts.scoring <= seconds:
        raise ValueError(f"timeouts.scoring must be > {seconds:g} ({what}), got {run.timeouts.scoring:g}")


@dataclass
class ArithmeticConfig(EnvironmentConfig):
    """Generated sums, with difficulty levels."""

    name: str = "arithmetic"
    levels: list[int] = field(default_factory=lambda: [3])
    """Difficulty levels to draw problems from (environments/arithmetic.py lists them)."""
    num_train: int = 4096
    """Training problems (fewer if a level has fewer)."""
    num_test: int = 512
    """Held-out problems, none of which is in the training set."""
    problem_seed: int = 0
    """Seed of the drawn problems."""
    style: str = setting("short", choices=("short", "full"))
    """Wording: short (the sum alone, for nano, which continues it) or full (a question to a model that chats)."""

    knows_right: ClassVar[bool] = True

    def build(self, run: BuildSettings, say: Say) -> "EnvironmentLike":
        from covey.environments.arithmetic import Arithmetic

        return Arithmetic(tuple(self.levels), self.num_train, self.num_test, self.problem_seed, self.style)


@dataclass
class CustomConfig(EpisodesConfig):
    """An environment of your own, a class or function in a module of yours."""

    name: str = "custom"
    factory: str = ""
    """Function that makes the environment, as module:function, or a class."""
    options: dict[str, Any] = field(default_factory=dict)
    """Its arguments, by name."""

    masked_prompts: ClassVar[str] = "maybe"
    learned_judge: ClassVar[str] = "maybe"

    def build(self, run: BuildSettings, say: Say) -> "EnvironmentLike":
        from covey.environments.custom import make_custom

        return make_custom(self.factory, self.options)

    def check(self, run: BuildSettings) -> None:
        """Require environment.factory=module:function."""
        if not is_function_path(self.factory):
            got = self.factory or "none"
            raise ValueError(f"environment=custom needs environment.factory=module:function, got {got}")


@dataclass
class MixtureConfig(EnvironmentConfig):
    """Several environments whose prompts are drawn round-robin."""

    name: str = "mixture"
    parts: dict[str, Any] = field(default_factory=dict)
    """Settings of each environment by a name for it; `name` in them says which environment, where that is another."""
    weights: dict[str, float] = field(default_factory=dict)
    """Relative weights of parts in training; one that is not named weighs 1."""
    data: dict[str, Any] = field(default_factory=dict)
    """Rows of a part of its own, by its name, as in `data`; parts that need rows and are not named share `data`."""

    reads_rows: ClassVar[str] = "maybe"
    takes_rewards: ClassVar[bool] = True
    masked_prompts: ClassVar[str] = "maybe"

    def build(self, run: BuildSettings, say: Say) -> "EnvironmentLike":
        from covey.environments.mixture import Mixture

        parts = {name: part.environment.build(part, say) for name, part in part_configs(run).items()}
        return Mixture(parts, self.weights)


Whole = TypeVar("Whole", bound=BuildSettings)


def part_configs(config: Whole) -> dict[str, Whole]:
    """Return the configuration of each mixture part by name."""
    mixture = config.environment
    assert isinstance(mixture, MixtureConfig), "only a mixture has parts"
    needy = [name for name, part in mixture.parts.items() if part.reads_rows == "always"]
    shared = {name: config.data if name in needy else DataConfig() for name in mixture.parts}
    rows = shared | mixture.data
    return {
        name: cast(Whole, replace(cast(Any, config), environment=part, data=rows[name]))
        for name, part in mixture.parts.items()
    }
