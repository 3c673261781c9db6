"""Stages of difficulty, from three sound blocks to a whole catapult."""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from covey_tasks.machines.design.blocks import CAR_TYPES, CATAPULT_TYPES
from covey_tasks.machines.design.families import ARMS, catapult_base
from covey_tasks.machines.design.growth import Builder
from covey_tasks.machines.design.place import place
from covey_tasks.machines.design.types import ROOT, Invalid, Rules, Tree

Task = Literal["car", "catapult"]


@dataclass(frozen=True, slots=True)
class Stage:
    """One kind of prompt.

    >>> STAGES["small_car"].budgets
    (7,)
    """

    difficulty: int
    task: Task
    budgets: tuple[int, ...]
    """Most blocks of a machine, the root among them; each prompt states one of these."""
    min_blocks: int = 1
    """A smaller machine earns nothing."""
    pays_validity: bool = False
    """A sound machine is worth 1; nothing is simulated."""
    is_begun: bool = False
    """The prompt gives the first blocks, and the machine must begin with them."""


@dataclass(frozen=True, slots=True)
class Problem:
    """A problem: its stage, block budget, and given blocks."""

    stage: str
    budget: int
    given: Tree = (ROOT,)
    words: str | None = None
    """Request in the user's own words; None takes those of the stage and its score."""

    @property
    def rules(self) -> Rules:
        task = STAGES[self.stage].task
        types = CATAPULT_TYPES if task == "catapult" else CAR_TYPES
        return Rules(types, max_blocks=self.budget, needs_boulder=task == "catapult")


def stage_problems(stages: Sequence[str], count: int, max_blocks: int, generator: random.Random) -> list[Problem]:
    """Draw problems, the stages and their budgets round-robin."""
    check_stages(stages)
    found: list[Problem] = []
    for index in range(count):
        stage, turn = stages[index % len(stages)], index // len(stages)
        budgets = STAGES[stage].budgets
        budget = min(budgets[turn % len(budgets)], max_blocks)
        found.append(Problem(stage, budget, _given(stage, generator)))
    return found


def check_stages(stages: Sequence[str]) -> None:
    unknown = [stage for stage in stages if stage not in STAGES]
    if unknown or not stages or len(set(stages)) < len(stages):
        raise ValueError(f"stages must be different ones of {', '.join(STAGES)}, got {list(stages)}")


def check_blocks(stage: str, max_blocks: int) -> None:
    """Refuse (ValueError) so few blocks that the stage has no right answer."""
    asked = STAGES[stage]
    least = 8 if asked.task == "catapult" else max(2, asked.min_blocks)
    least = max(asked.budgets) if asked.is_begun else least
    if max_blocks < least:
        raise ValueError(f"max_blocks must be >= {least} for stage {stage}, got {max_blocks}")


def _given(stage: str, generator: random.Random) -> Tree:
    if not STAGES[stage].is_begun:
        return (ROOT,)
    rules = Problem(stage, max(STAGES[stage].budgets)).rules
    while True:
        builder = Builder(rules)
        base = catapult_base(generator, builder)
        given = builder.tree
        generator.choice(list(ARMS.values()))(generator, builder, base)
        if not isinstance(place(builder.tree, rules), Invalid):
            return given


def check_problem(tree: Tree, problem: Problem) -> Invalid | None:
    if tree[: len(problem.given)] != problem.given:
        return Invalid("root", f"the first {len(problem.given)} blocks must be those that are given")
    return None


STAGES: dict[str, Stage] = {
    "valid": Stage(0, "car", budgets=(5,), min_blocks=3, pays_validity=True),
    "small_car": Stage(1, "car", budgets=(7,)),
    "budget_car": Stage(2, "car", budgets=(4, 5, 6, 7, 8, 10, 12)),
    "car": Stage(2, "car", budgets=(48,)),
    "arm": Stage(3, "catapult", budgets=(24,), is_begun=True),
    "catapult": Stage(4, "catapult", budgets=(48,)),
}
