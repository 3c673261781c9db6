"""Settings of environment=machines."""

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar

from covey.environments.settings import BuildSettings, EnvironmentConfig, Say, check_time, naming_settings
from covey.system.setting import Requires, setting

if TYPE_CHECKING:
    from covey.environments.base import EnvironmentLike

TASKS_MADE_UP = Requires("tasks made up, data.path = null", ("data.path",), lambda path: path is None)
DESIGNS_MADE_UP = Requires(
    "designs made up, environment.demonstrations = null", ("environment.demonstrations",), lambda path: path is None
)
HAS_WORDS = Requires("environment.form = tree or global", ("environment.form",), lambda form: form != "compact")
IS_DRAWN = Requires(
    "tasks or designs made up, one of both files = null",
    ("data.path", "environment.demonstrations"),
    lambda tasks, designs: tasks is None or designs is None,
)


@dataclass
class MachinesConfig(EnvironmentConfig):
    """Machines of blocks, scored in a physics simulation (MuJoCo)."""

    name: str = "machines"
    stages: list[str] = field(default_factory=lambda: ["car"])
    """Stages requested in turn: valid, small_car, budget_car, car, arm, catapult; own rows may name theirs."""
    form: str = setting("tree", choices=("tree", "global", "compact"))
    """Form of written machines: tree (JSON), global (JSON with positions) or compact (characters, for nano)."""
    score: str = "strict"
    """Score of a machine: strict, paper or repo."""
    transform: str = setting("none", choices=("none", "sqrt", "log1p"))
    """Transform of the score to a reward: none, sqrt or log1p. Logged scores are never transformed."""
    file_reward: float = setting(0.0, ge=0)
    """Added for an answer that is a construction tree."""
    placed_reward: float = setting(0.0, ge=0)
    """Added for a machine that is valid altogether."""
    max_blocks: int = setting(48, le=48)
    """Most blocks of a machine, the root among them, where its stage allows so many."""
    instruction: str | None = setting(None, needs=HAS_WORDS)
    """Text of the system message; null takes the form's own, "" sends none."""
    num_train: int = setting(256, ge=1, needs=TASKS_MADE_UP)
    """Training prompts; those of a stage and a block budget are worded alike."""
    num_test: int = setting(16, ge=1, needs=TASKS_MADE_UP)
    """Held-out prompts."""
    demonstrations: str | None = None
    """A file of your own designs that a cold start learns from (docs/tasks/machines.md); null makes some up."""
    num_demonstrations: int = setting(1500, ge=1, needs=DESIGNS_MADE_UP)
    """Machines that a cold start learns from."""
    family_share: float = setting(0.5, ge=0, le=1, needs=DESIGNS_MADE_UP)
    """Share of rule-based designs among them; the others are grown at random."""
    demonstration_cap: float = setting(1.0, gt=0, le=1, needs=DESIGNS_MADE_UP)
    """Share of each family that is shown, lowest scores first: 0.75 leaves the best quarter out."""
    problem_seed: int = setting(0, needs=IS_DRAWN)
    """Seed of the drawn problems and demonstrations."""
    num_workers: int = setting(2, ge=1)
    """Processes that simulate."""
    timeout: float = setting(5.0, gt=0)
    """Seconds one simulation may take on the clock before its worker is killed; the worst machine needs 0.2."""
    cache_size: int = setting(65536, ge=0)
    """Outcomes kept, so that equal machines are simulated once; 0 keeps none."""

    reads_rows: ClassVar[str] = "maybe"

    def build(self, run: BuildSettings, say: Say) -> "EnvironmentLike":
        from covey_tasks.machines.environment import build_machines

        return build_machines(self, run)

    def check(self, run: BuildSettings) -> None:
        """Check stages, scores and the time of a group's machines."""
        from covey_tasks.machines.design.stages import STAGES, check_blocks, check_stages
        from covey_tasks.machines.scores import find_score

        with naming_settings():
            check_stages(self.stages)
            for stage in self.stages:
                find_score(STAGES[stage].task, self.score)
                check_blocks(stage, self.max_blocks)
        what = f"environment.timeout={self.timeout:g} for {run.group_size} machines in {self.num_workers} processes"
        check_time(run, self.timeout * math.ceil(run.group_size / self.num_workers), what)
