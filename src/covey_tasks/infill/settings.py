"""Settings of environment=infill."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar

from covey.environments.settings import BuildSettings, EnvironmentConfig, Say
from covey.system.disk import cache_folder
from covey.system.setting import Requires, setting

if TYPE_CHECKING:
    from covey.environments.base import EnvironmentLike

TRAINED_JUDGE = Requires(
    "a judge that covey trains (nano-judge, or second_judge among the monitors)",
    ("environment.judge", "environment.monitors"),
    lambda judge, monitors: judge == "nano-judge" or "second_judge" in monitors,
)


HAS_ROWS = Requires(
    "data.path = rows, not a text file", ("data.path",), lambda path: path is not None and not path.endswith(".txt")
)


@dataclass
class InfillConfig(EnvironmentConfig):
    """Masked texts scored by a learned judge: generated, a file, or `data`."""

    name: str = "infill"
    text_column: str = setting("text", needs=HAS_ROWS)
    """Column that holds the text, where `data` has rows."""
    window: int = setting(64, ge=2)
    """Most tokens of a text."""
    masking: str = setting("random", choices=("random", "spans"))
    """Masked tokens: random (each by itself) or spans."""
    mask_ratios: list[float] = field(default_factory=lambda: [0.3])
    """Shares of tokens masked, in equal parts; several are the stages that curriculum.name=difficulty climbs."""
    span_length: int = setting(
        4, ge=1, needs=Requires("environment.masking = spans", ("environment.masking",), lambda how: how == "spans")
    )
    """Tokens of a span."""
    num_train: int = setting(4096, ge=1)
    """Training prompts."""
    num_test: int = setting(512, ge=1)
    """Held-out prompts."""
    problem_seed: int = 0
    """Seed of the drawn texts and of their masks."""
    judge: str = "nano-judge"
    """Model that scores a text: nano-judge (trained by covey), a folder or a hub name of a sequence classifier."""
    judge_floor: float = setting(0.75, ge=0, le=1)
    """Share of held-out texts that a judge must rank above their corrupted versions, or it is refused."""
    judge_device: str = "auto"
    """Device of judges: auto, cpu, cuda, cuda:1, ..."""
    judge_batch_size: int = setting(64, ge=1)
    """Texts that a judge reads at a time."""
    judge_output: str = setting("probability", choices=("probability", "logit"))
    """The score: probability (in [0, 1]) or logit."""
    judge_label: int = setting(0, ge=0)
    """Output of the judge that is the score."""
    judge_num_steps: int = setting(300, ge=1, needs=TRAINED_JUDGE)
    """Optimiser steps in which nano-judge is trained."""
    judge_pairs: int = setting(32, ge=1, needs=TRAINED_JUDGE)
    """Real and corrupted texts of such a step."""
    judge_lr: float = setting(2e-3, gt=0, needs=TRAINED_JUDGE)
    """Peak learning rate of nano-judge; it falls to 0."""
    judge_hidden_size: int = setting(64, ge=8, needs=TRAINED_JUDGE)
    """Width of nano-judge."""
    judge_num_layers: int = setting(2, ge=1, needs=TRAINED_JUDGE)
    """Layers of nano-judge."""
    judge_cache_dir: str = setting(cache_folder, needs=TRAINED_JUDGE)
    """Content-addressed cache of trained judges."""
    monitors: list[str] = setting([], choices=("grammar", "second_judge", "ngram"))
    """Logged, never trained on: grammar (exact, of generated sentences), second_judge (trained independently), ngram
    (nats a character by a model of counts)."""

    reads_rows: ClassVar[str] = "maybe"
    masked_prompts: ClassVar[str] = "always"
    learned_judge: ClassVar[str] = "trained"
    slow_to_build: ClassVar[bool] = True

    def build(self, run: BuildSettings, say: Say) -> "EnvironmentLike":
        from covey_tasks.infill.build import build_infill

        return build_infill(self, run, say)

    def check(self, run: BuildSettings) -> None:
        """Check the shares of masked tokens, and that monitors can be computed."""
        if not self.mask_ratios or not all(0 < ratio < 1 for ratio in self.mask_ratios):
            raise ValueError(f"environment.mask_ratios must be numbers between 0 and 1, got {self.mask_ratios}")
        if run.data.path is not None and "grammar" in self.monitors:
            raise ValueError(f"environment.monitors=[grammar] needs data.path = null, got data.path={run.data.path}")
