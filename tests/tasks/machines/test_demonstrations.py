"""Random growth, rule-based families, and what is made of them for a cold start."""

import random
from collections import Counter

import pytest

from covey_tasks.machines.design.blocks import CAR_TYPES, CATAPULT_TYPES, CONTAINER
from covey_tasks.machines.design.demonstrations import Design, capped, make_designs
from covey_tasks.machines.design.families import ARMS, CARS, base_of, catapult_base
from covey_tasks.machines.design.growth import Builder, add_boulder, faces, grow
from covey_tasks.machines.design.place import place
from covey_tasks.machines.design.stages import STAGES, Problem, check_problem, stage_problems
from covey_tasks.machines.design.types import ROOT, Block, Invalid, Machine, Rules, Tree

from .designs import demonstrating

CAR = Rules(CAR_TYPES)
CATAPULT = Rules(CATAPULT_TYPES, needs_boulder=True)


def test_a_builder_takes_what_fits_and_nothing_else() -> None:
    builder = Builder(Rules(CAR_TYPES, max_blocks=4))
    assert builder.add(63, 0, 0) == 1
    assert builder.add(63, 0, 0) is None, "occupied"
    assert builder.add(36, 0, 1) is None, "not allowed"
    assert builder.add(63, 0, 6) is None, "no such face"
    assert builder.add(2, 1, 1) == 2
    assert builder.add(2, 1, 2) is None, "overlap"
    assert builder.join(9, (0, 1), (0, 1)) is None, "no length"
    assert builder.join(9, (0, 0), (1, 0)) == 3
    assert builder.add(15, 0, 1) is None, "full"
    assert len(builder.tree) == 4


def test_a_builder_knows_the_largest_size() -> None:
    builder = Builder(CATAPULT)
    assert [builder.add(63, index, 4 if index == 0 else 0) for index in range(3)] == [1, 2, None]


def test_every_grown_demonstration_is_a_machine() -> None:
    generator = random.Random(0)
    for _ in range(200):
        tree = grow(generator, Builder(CAR), generator.randint(2, 14))
        assert isinstance(place(tree, CAR), Machine)


def test_growth_uses_every_type_but_what_a_catapult_throws() -> None:
    generator = random.Random(0)
    used = {block.type for _ in range(100) for block in grow(generator, Builder(CATAPULT), 10)}
    assert used == CATAPULT_TYPES - {30, 36}


def test_a_boulder_is_put_into_an_upright_bowl() -> None:
    builder = Builder(CATAPULT)
    assert add_boulder(random.Random(0), builder)
    machine = place(builder.tree, CATAPULT)
    assert isinstance(machine, Machine)
    assert [p.facing for p in machine.placed if p.block.type == CONTAINER] == ["y+"]


@pytest.mark.parametrize("family", CARS)
def test_cars_of_a_family_are_machines_and_differ(family: str) -> None:
    generator, trees = random.Random(0), set()
    for _ in range(100):
        builder = Builder(CAR)
        CARS[family](generator, builder)
        assert isinstance(place(builder.tree, CAR), Machine)
        trees.add(builder.tree)
    assert len(trees) > 80


@pytest.mark.parametrize("family", ARMS)
def test_catapults_of_a_family_mostly_carry_a_boulder(family: str) -> None:
    generator, found = random.Random(0), []
    for _ in range(100):
        builder = Builder(CATAPULT)
        ARMS[family](generator, builder, catapult_base(generator, builder))
        found.append(isinstance(place(builder.tree, CATAPULT), Machine))
    assert sum(found) > 30


def test_a_base_is_found_again_in_a_tree() -> None:
    generator = random.Random(0)
    for _ in range(50):
        builder = Builder(CATAPULT)
        assert catapult_base(generator, builder) == base_of(builder.tree)


def test_faces_are_counted_from_back_to_front() -> None:
    assert faces(63, "Right") == [4, 5, 6]
    assert faces(0, "Back") == [1]
    assert faces(36, "Up") == []


# ------------------------------------------------------------------------------------------------ demonstrations


@pytest.mark.parametrize("stage", STAGES)
def test_every_stage_has_demonstrations_that_answer_it(stage: str) -> None:
    designs = make_designs(demonstrating((stage,), 40, 48, 0.5, seed=0))
    assert len(designs) >= 36
    for design in designs:
        assert isinstance(place(design.tree, design.problem.rules), Machine)
        assert STAGES[stage].min_blocks <= len(design.tree) <= design.problem.budget
        assert design.tree[: len(design.problem.given)] == design.problem.given


def test_demonstrations_are_balanced_by_family() -> None:
    designs = make_designs(demonstrating(("car",), 400, 48, 0.5, seed=0))
    counts = Counter(design.family for design in designs)
    assert set(counts) == {"growth", *CARS}
    assert counts["line_car"] == pytest.approx(counts["tee_car"], abs=2)
    assert counts["growth"] == pytest.approx(200, abs=40)
    assert {d.family for d in make_designs(demonstrating(("car",), 40, 48, 0.0, seed=0))} == {"growth"}


def test_the_same_seed_gives_the_same_demonstrations() -> None:
    first, again, other = (make_designs(demonstrating(("catapult",), 20, 30, 0.5, seed)) for seed in (0, 0, 1))
    assert first == again
    assert first != other


def test_the_cap_leaves_out_the_best_of_each_family() -> None:
    problem = Problem("car", 7)
    designs = [Design(problem, (ROOT,), family) for family in ("growth", "line_car") for _ in range(4)]
    kept = capped(designs, [0.0, 0.0, 0.0, 5.0, 10.0, 20.0, 30.0, 40.0], 0.75)
    assert Counter(design.family for design in kept) == {"growth": 3, "line_car": 3}
    assert capped(designs, [0.0] * 8, 0.75) == designs
    assert len(capped(designs[:4], [0.0, 0.0, 0.0, 5.0], 0.25)) == 3


# ------------------------------------------------------------------------------------------------ stages


def test_problems_take_stages_and_budgets_in_turn() -> None:
    problems = stage_problems(["valid", "budget_car"], 8, 48, random.Random(0))
    assert [(p.stage, p.budget) for p in problems] == [
        *(("valid", 5), ("budget_car", 4), ("valid", 5), ("budget_car", 5)),
        *(("valid", 5), ("budget_car", 6), ("valid", 5), ("budget_car", 7)),
    ]


def test_the_base_that_is_given_can_be_built_on() -> None:
    for problem in stage_problems(["arm"], 30, 48, random.Random(0)):
        assert len(problem.given) >= 4
        assert any(
            isinstance(place(_with_arm(family, problem, seed), problem.rules), Machine)
            for family in ARMS
            for seed in range(50)
        )


def _with_arm(family: str, problem: Problem, seed: int) -> Tree:
    builder = Builder(problem.rules, problem.given)
    ARMS[family](random.Random(seed), builder, base_of(problem.given))
    return builder.tree


def test_an_answer_begins_with_all_that_is_given() -> None:
    problem = Problem("arm", 24, (ROOT, Block(63, 0, 0), Block(1, 0, 4)))
    assert check_problem((*problem.given, Block(1, 2, 0)), problem) is None
    for tree in (problem.given[:2], (*problem.given[:2], Block(63, 0, 4))):
        assert check_problem(tree, problem) == Invalid("root", "the first 3 blocks must be those that are given")


def test_no_budget_is_above_the_most_blocks() -> None:
    assert {p.budget for p in stage_problems(["budget_car"], 20, 6, random.Random(0))} == {4, 5, 6}


def test_stages_become_harder() -> None:
    levels = [STAGES[name].difficulty for name in ("valid", "small_car", "budget_car", "arm", "catapult")]
    assert levels == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("stages", [[], ["plane"], ["car", "car"]])
def test_unknown_stages_are_refused_in_one_line(stages: list[str]) -> None:
    with pytest.raises(ValueError, match="stages must be different ones of valid, small_car, budget_car, car, arm"):
        stage_problems(stages, 4, 48, random.Random(0))
