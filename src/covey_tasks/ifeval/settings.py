"""Settings of environment=ifeval."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from covey.environments.settings import BuildSettings, EnvironmentConfig, Say, naming_settings
from covey.system.setting import Requires, setting

if TYPE_CHECKING:
    from covey.environments.base import EnvironmentLike

OF_TORCHRL = Requires("environment.scheme = torchrl", ("environment.scheme",), lambda scheme: scheme == "torchrl")
GENERATED = Requires("data.path = null, so that prompts are generated", ("data.path",), lambda path: path is None)


@dataclass
class IfevalConfig(EnvironmentConfig):
    """Instructions that a program checks: generated, or `data` with IFEval's columns."""

    name: str = "ifeval"
    scheme: str = setting("strict_share", choices=("strict", "strict_share", "loose", "loose_share", "torchrl"))
    """Reward scheme: strict, strict_share, loose, loose_share or torchrl."""
    measure_weights: list[float] = setting([0.4, 0.3, 0.2, 0.1], needs=OF_TORCHRL)
    """Weights of all strictly, share strictly, all loosely, share loosely (scheme torchrl)."""
    answer_bonus: float = setting(0.1, needs=OF_TORCHRL)
    """Added for exactly one answer block (scheme torchrl)."""
    think_bonus: float = setting(0.05, needs=OF_TORCHRL)
    """Added for exactly one think block (scheme torchrl)."""
    min_words: int = setting(
        3, needs=Requires("a scheme other than torchrl", ("environment.scheme",), lambda scheme: scheme != "torchrl")
    )
    """An answer with fewer different words of two letters and more earns nothing (all schemes but torchrl)."""
    instruction: str | None = None
    """Text of the system message; null takes the scheme's own, "" sends none."""
    benchmark: str | None = None
    """Rows to evaluate on instead of held-out prompts, such as google/IFEval: a file, a folder or a hub name."""
    style: str = setting("full", choices=("full", "short"), needs=GENERATED)
    """Wording of generated prompts: full, or short (a few words, for the nano policy)."""
    kinds: list[str] = setting([], needs=GENERATED)
    """Kinds of instruction that are generated, such as punctuation:no_comma; empty takes all of the style."""
    max_instructions: int = setting(3, ge=1, needs=GENERATED)
    """Most instructions of a generated prompt."""
    num_train: int = setting(4096, ge=1, needs=GENERATED)
    """Generated training prompts."""
    num_test: int = setting(
        512,
        ge=1,
        needs=(GENERATED, Requires("environment.benchmark = null", ("environment.benchmark",), lambda path: not path)),
    )
    """Generated held-out prompts, none of which is in the training set."""
    problem_seed: int = setting(0, needs=GENERATED)
    """Seed of the generated prompts."""

    reads_rows: ClassVar[str] = "maybe"
    knows_right: ClassVar[bool] = True

    def build(self, run: BuildSettings, say: Say) -> "EnvironmentLike":
        from covey_tasks.ifeval.environment import build_ifeval

        return build_ifeval(self, run)

    def check(self, run: BuildSettings) -> None:
        """Check the number of weights, and that the kinds exist."""
        from covey_tasks.ifeval.generator import check_kinds
        from covey_tasks.ifeval.rewards import Scheme

        with naming_settings():
            Scheme(self)
            if run.data.path is None:
                check_kinds(self)
