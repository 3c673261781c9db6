"""Settings of environment=code."""

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar

from covey.environments.settings import BuildSettings, EpisodesConfig, Say, check_time, naming_settings
from covey.system.setting import Requires, setting

if TYPE_CHECKING:
    from covey.environments.base import EnvironmentLike

TEST_PACKAGES = ("numpy",)
DEFAULT_SLOTS = 2
"""Slots on a machine with one processor."""
PROBLEMS_GENERATED = Requires("problems made up, data.path = null", ("data.path",), lambda path: path is None)
IS_DRAWN = Requires(
    "problems made up (data.path = null), or environment.tests_per_problem set",
    ("data.path", "environment.tests_per_problem"),
    lambda path, num_tests: path is None or num_tests is not None,
)


@dataclass
class CodeConfig(EpisodesConfig):
    """Programs judged by tests in a sandbox: generated problems, or `data`."""

    name: str = "code"
    problem: str = setting("starters", needs=PROBLEMS_GENERATED)
    """A family of problems, or starters (the easiest), or all (docs/tasks/code.md lists them)."""
    difficulty: int | None = setting(None, needs=PROBLEMS_GENERATED)
    """Only problems of this difficulty; null takes all of `problem`."""
    style: str = setting("full", choices=("full", "short"), needs=PROBLEMS_GENERATED)
    """Wording of made-up problems: full (signature, two examples, where the answer goes), or short (for nano)."""
    num_train: int = setting(4096, ge=1, needs=PROBLEMS_GENERATED)
    """Training problems (fewer where a family has not so many)."""
    num_test: int = setting(512, ge=1, needs=PROBLEMS_GENERATED)
    """Held-out problems, none of which is in the training set."""
    problem_seed: int = setting(0, needs=IS_DRAWN)
    """Seed of the drawn problems, and of the drawn tests of rows."""
    tests_per_problem: int | None = setting(None, ge=1)
    """Tests of a problem, drawn by `problem_seed`; null takes ten of a made-up problem, all of a row."""
    partial_weight: float = setting(0.5, ge=0, le=1)
    """Reward for passing some of the tests: this times their share. 0 rewards only programs that pass all."""
    max_turns: int | None = setting(1, ge=1)
    """Programs that the policy may write for one problem. Above 1 a third of the tests are told where they fail, and
    the others judge the last program."""
    test_packages: list[str] = field(default_factory=lambda: ["numpy"])
    """Packages that test code of rows may import where they are installed; programs never may."""
    isolation: str = setting("auto", choices=("auto", "namespace", "landlock", "unsafe_no_isolation"))
    """Isolation of programs: auto, namespace, landlock or unsafe_no_isolation."""
    num_slots: int | None = setting(None, ge=1)
    """Programs that run at the same time; null takes one more than there are processors."""
    timeout: float = 5.0
    """Longest time for one test, and for loading a program."""
    total_seconds: float = 20.0
    """Longest time for all tests of a program."""
    cpu_seconds: int = 20
    """Processor time of one program."""
    memory_bytes: int = 536870912
    """Memory of one program, besides the interpreter's own."""
    output_bytes: int = 8388608
    """Longest answer of a program."""
    cache_size: int = setting(65536, ge=0)
    """Verdicts kept, so that equal programs run once; 0 keeps none."""
    recheck_rate: float = setting(0.01, ge=0, le=1)
    """Share of programs with full score that run again, on fresh inputs where there are any."""

    reads_rows: ClassVar[str] = "maybe"
    knows_right: ClassVar[bool] = True

    def build(self, run: BuildSettings, say: Say) -> "EnvironmentLike":
        from covey_tasks.code.environment import build_code

        return build_code(self, run)

    def check(self, run: BuildSettings) -> None:
        """Check ranges, that problems exist, and the time for a group's programs."""
        from covey_tasks.code.environment import code_limits
        from covey_tasks.code.families import chosen_families

        with naming_settings():
            code_limits(self)
            if run.data.path is None:
                chosen_families(self.problem, self.difficulty)
        num_slots = self.num_slots or DEFAULT_SLOTS
        what = f"environment.total_seconds={self.total_seconds:g} for {run.group_size} programs in {num_slots} slots"
        check_time(run, self.total_seconds * math.ceil(run.group_size / num_slots), what)
