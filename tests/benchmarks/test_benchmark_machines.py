"""The benchmark of machines runs, and its tables have the rows they should."""

import random

import pytest

pytest.importorskip("mujoco", reason="needs covey[machines]")

from benchmarks.environments.machines import HARD, cost, designs, large, main, summary
from covey_tasks.machines.design.blocks import BOULDER
from covey_tasks.machines.physics.constants import physics_version
from covey_tasks.machines.physics.simulate import begin, standing


def test_every_part_prints_its_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--machines", "8", "--only", "speed", "--only", "baselines"]) == 0
    out = capsys.readouterr().out
    assert physics_version() in out
    assert "| 1 | " in out
    assert "| 2 | " in out
    assert "| catapult | random | 8 | catapult_strict | " in out
    assert "| car | rule-based | 8 | car_paper | " in out


def test_the_worst_machines_are_as_large_as_the_limits_allow() -> None:
    generator = random.Random(0)
    trees = {name: large(generator, types) for name, types in HARD.items()}
    assert max(len(tree) for tree in trees.values()) == 48
    balls = begin(standing(trees["19 ball joints, other blocks"]), "open")
    assert balls.model.nv == 6 + 3 * 19
    assert any(block.type == BOULDER for block in trees["catapult blocks"])
    assert cost(trees["springs"]).milliseconds > 0


def test_designs_are_different_and_repeatable() -> None:
    found = designs("car", 10, 0.0, seed=1)
    assert len(set(found)) == 10
    assert found == designs("car", 10, 0.0, seed=1)
    assert found != designs("car", 10, 0.0, seed=2)


def test_a_summary_counts_what_is_not_0() -> None:
    assert summary([0.0, 0.0, 1.0, 3.0]) == "1.0 | 50% | 0.5 | 2.9 | 3.0"
