"""Demonstrations: random machines and rule-based designs, balanced by family.

They are not chosen by score, beyond a cap that takes the best away: reinforcement learning is to find those.
"""

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import cycle, islice

from covey_tasks.machines.design.blocks import BOULDER, CONTAINER
from covey_tasks.machines.design.families import ARMS, CARS, base_of, catapult_base
from covey_tasks.machines.design.growth import Builder, add_boulder, grow
from covey_tasks.machines.design.place import place
from covey_tasks.machines.design.stages import STAGES, Problem, check_problem, stage_problems
from covey_tasks.machines.design.tree import canonical
from covey_tasks.machines.design.types import Invalid, Tree
from covey_tasks.machines.settings import MachinesConfig

GROWTH = "growth"
MAX_GROWTH = 12
"""Most blocks of a random machine: hardly any larger one fits."""
NUM_DRAWS = 200
"""Machines made for one demonstration before its problem is given up."""


@dataclass(frozen=True, slots=True)
class Design:
    """A machine that answers a problem, and how it was made."""

    problem: Problem
    tree: Tree
    family: str


def make_designs(settings: MachinesConfig, problems: Sequence[Problem] = ()) -> list[Design]:
    """Make sound answers to problems round-robin, by default the stages'.

    Fewer where hardly any exist.
    """
    generator, count = random.Random(f"machines demonstrations {settings.problem_seed}"), settings.num_demonstrations
    problems = list(islice(cycle(problems), count))
    problems = problems or stage_problems(settings.stages, count, settings.max_blocks, generator)
    turns: Counter[str] = Counter()
    found: list[Design] = []
    for problem in problems:
        families = list(ARMS if STAGES[problem.stage].task == "catapult" else CARS)
        is_family = generator.random() < settings.family_share
        family = families[turns[problem.stage] % len(families)] if is_family else GROWTH
        turns[problem.stage] += is_family
        tree = _answer(generator, problem, family)
        found += [] if tree is None else [Design(problem, tree, family)]
    return found


def capped(designs: Sequence[Design], scores: Sequence[float], share: float) -> list[Design]:
    """Keep the share of each family with the lowest scores, ties included."""
    kept: list[Design] = []
    for family in dict.fromkeys(design.family for design in designs):
        own = [(score, design) for design, score in zip(designs, scores, strict=True) if design.family == family]
        ranked = sorted(score for score, _ in own)
        highest = ranked[max(0, round(share * len(ranked)) - 1)]
        kept += [design for score, design in own if score <= highest]
    return kept


def _answer(generator: random.Random, problem: Problem, family: str) -> Tree | None:
    for _ in range(NUM_DRAWS):
        builder = Builder(problem.rules, problem.given)
        _build(generator, builder, problem, family)
        stage, tree = STAGES[problem.stage], builder.tree
        tree = tree if stage.is_begun else canonical(tree)
        if len(tree) >= stage.min_blocks and not isinstance(place(tree, problem.rules), Invalid):
            assert check_problem(tree, problem) is None
            return tree
    return None


def _build(generator: random.Random, builder: Builder, problem: Problem, family: str) -> None:
    stage = STAGES[problem.stage]
    begun = len(builder)
    if family == GROWTH:
        room = 2 if {BOULDER, CONTAINER} <= problem.rules.types else 0
        most = min(problem.budget, begun - 1 + MAX_GROWTH) - room
        grow(generator, builder, generator.randint(min(most, begun + max(2, stage.min_blocks) - 1), most))
        if room:
            add_boulder(generator, builder)
    elif stage.task == "car":
        CARS[family](generator, builder)
    else:
        base = base_of(builder.tree) if stage.is_begun else catapult_base(generator, builder)
        ARMS[family](generator, builder, base)
