"""What machines do, against formulas and against what they were built for. Tolerances are stated where they apply."""

import math
from itertools import pairwise
from pathlib import Path

import pytest

pytest.importorskip("mujoco", reason="needs covey[machines]")

from covey_tasks.machines.design.blocks import BLOCKS
from covey_tasks.machines.design.place import face_in_world
from covey_tasks.machines.design.types import ROOT, Block, Machine, PlacedBlock, Tree, Vector
from covey_tasks.machines.physics.constants import PHYSICS
from covey_tasks.machines.physics.simulate import Simulation, begin, outcome, simulate
from covey_tasks.machines.physics.worlds import WORLDS
from covey_tasks.machines.scores import SCORES

from .designs import BAND_CATAPULT, BURSTER, CAR, CROSS, GALLOWS, LEAPER, ROTOR_CATAPULT, SMALL_CAR, SPRINGER, machine

G = 9.81


# ------------------------------------------------------------------------------------------------ machines that work


def test_a_four_wheeled_car_drives_straight_over_30_m_in_5_s() -> None:
    found = outcome(machine(CAR), "car")
    assert found.ending == "complete"
    assert 30.0 < found.forward < 40.0
    assert abs(found.sideways) < 0.1
    assert found.flight is None


def test_a_small_car_drives_on_two_wheels() -> None:
    assert 25.0 < outcome(machine(SMALL_CAR), "car").forward < 35.0


@pytest.mark.parametrize("tree", [ROTOR_CATAPULT, BAND_CATAPULT])
def test_a_catapult_throws_20_to_30_m_over_the_fence(tree: Tree) -> None:
    flight = outcome(machine(tree), "catapult").flight
    assert flight is not None
    assert flight.has_landed
    assert 20.0 < flight.distance < 30.0
    assert flight.max_height - flight.start_height > 3.0
    assert flight.gap > 15.0


def test_a_machine_that_leaps_up_with_its_boulder_scores_nothing_under_the_strict_rule() -> None:
    found = outcome(machine(LEAPER), "catapult")
    assert found.flight is not None
    assert found.flight.lift > 10.0
    assert found.flight.distance > 50.0
    assert SCORES["catapult_paper"].of(found) > 1000.0
    assert SCORES["catapult_strict"].of(found) == 0.0
    assert found.flight.throw is not None
    assert found.flight.throw.own_lift > 10.0


def test_what_evolution_found_below_earlier_limits_scores_nothing_under_the_strict_rule() -> None:
    found = outcome(machine(SPRINGER), "catapult")
    assert found.flight is not None
    assert found.flight.throw is not None
    assert found.flight.lift < 3.0
    assert found.flight.throw.own_lift > 2.0
    assert found.flight.throw.distance < 0.75 * found.flight.distance
    assert SCORES["catapult_strict"].of(found) == 0.0


@pytest.mark.parametrize("kind", [7, 9])
def test_a_line_between_faces_on_one_point_does_not_end_the_simulator(kind: int) -> None:
    hinges: Tree = (ROOT, Block(63, 0, 0), Block(5, 0, 4), Block(5, 1, 7))  # side by side, on the root and on the log
    points: dict[Vector, list[tuple[int, int]]] = {}
    for index in (2, 3):
        for face in range(len(BLOCKS[5].faces)):
            points.setdefault(face_in_world(machine(hinges).placed[index], face)[0], []).append((index, face))
    ((first, second),) = (ends for ends in points.values() if len(ends) > 1)
    assert outcome(machine((*hinges, Block(kind, *first, *second))), "open").ending == "complete"


def test_a_simulation_that_makes_energy_has_diverged() -> None:
    assert simulate(machine(BURSTER), "catapult").ending == "unstable"
    gained: list[float] = []
    for tree in (CAR, ROTOR_CATAPULT, BAND_CATAPULT):
        simulate(machine(tree), "catapult", seen=lambda simulation: gained.append(simulation.gained))
        assert 0.0 < gained[-1] < 50.0


def test_a_catapult_is_paid_for_the_boulders_motion_beyond_its_own() -> None:
    for tree, lowest in ((ROTOR_CATAPULT, 70.0), (BAND_CATAPULT, 50.0)):
        found = outcome(machine(tree), "catapult")
        assert found.flight is not None
        throw = found.flight.throw
        assert throw is not None
        assert throw.on_ground
        assert (0.9 < throw.time < 1.2, throw.own_way < 0.5, throw.own_lift < 0.6) == (True, True, True)
        assert 0.8 * throw.flown < throw.distance < throw.flown < found.flight.distance
        assert lowest < SCORES["catapult_strict"].of(found) < throw.flown * found.flight.max_height


def test_machines_without_a_motor_stay_where_they_are() -> None:
    found = outcome(machine(CROSS), "open")
    assert found.moved < 0.01


TOWER: Tree = (*CROSS, Block(1, 0, 4), Block(1, 9, 0))
LENGTHWISE: Tree = (ROOT, Block(63, 0, 0), Block(63, 0, 1))
CROSSWISE: Tree = (ROOT, Block(63, 0, 3), Block(63, 0, 2))


@pytest.mark.parametrize(
    ("tree", "faces", "direction"),
    [
        (LENGTHWISE, (3, 6), (0, 1)),  # facing x-, at the left of both logs: to z+
        (LENGTHWISE, (6, 3), (0, 1)),  # facing x+
        (CROSSWISE, (3, 6), (-1, 0)),  # facing z+: to x-
        (CROSSWISE, (6, 3), (1, 0)),  # facing z-: to x+
    ],
)
def test_a_wheel_drives_to_where_its_facing_says(
    tree: Tree, faces: tuple[int, int], direction: tuple[int, int]
) -> None:
    wheels = (Block(2, 1, faces[0]), Block(2, 2, faces[1]))
    found = simulate(machine((*tree, *wheels)), "open")
    x, _, z = (found.root_T3[75] - found.root_T3[0]).tolist()  # after a second under power
    assert x * direction[0] + z * direction[1] > 1.0
    assert abs(x * direction[1] + z * direction[0]) < 1.0


def test_what_sits_on_the_front_of_a_rotating_block_does_not_turn_with_it() -> None:
    def speed(*faces: int) -> float:
        simulation = begin(machine((*TOWER, Block(22, 10, 4), *[Block(15, 11, face) for face in faces])), "open")
        for _ in range(100):
            simulation.watch()
        return float(simulation.data.cvel[simulation.assembly.body_of[12] + 1][:3].max())

    assert speed(0) < 0.5
    assert speed(1, 2) == pytest.approx(PHYSICS.rotor_speed, rel=0.05)


def test_a_stop_block_stops_an_arm() -> None:
    free = (*TOWER, Block(22, 10, 4), Block(1, 11, 2))
    post = (Block(1, 1, 7), Block(1, 13, 0), Block(15, 14, 4))  # before the tower, with a peg into the arm's circle

    def turns(tree: Tree) -> float:
        simulation = begin(machine(tree), "open")
        for _ in range(250):
            simulation.watch()
        return abs(float(simulation.data.joint("j1").qpos[0])) / (2 * math.pi)

    assert turns(free) > 3
    assert turns((*free, *post)) < 1


# ------------------------------------------------------------------------------------------------ formulas


def test_an_isolated_block_falls_as_galilei_says() -> None:
    """Within g t dt / 2, the error of the first-order step, and a billionth."""
    high = Machine((ROOT,), (PlacedBlock(ROOT, (0.0, 200.0, 0.0), "z+"),), (1.0, 1.0, 1.0))
    found = simulate(high, "open")
    for time, (x, y, z) in zip(found.times_T, found.root_T3, strict=True):
        fallen = 200.0 - y
        assert abs(fallen - G * time**2 / 2) <= G * time * PHYSICS.timestep / 2 + 1e-9
        assert (x, z) == (0.0, 0.0)
    assert found.times_T[-1] == pytest.approx(5.0)


def test_a_log_on_a_ball_joint_swings_with_the_period_of_a_physical_pendulum() -> None:
    """Within 1 %: 2 pi sqrt(I / (m g d)) for 5 degrees, with the cube in the joint and the log 2 m below it."""
    cube, log_width, log_length = 0.99, 0.99, 2.99
    inertia = 0.5 * 2 * cube**2 / 12 + (log_width**2 + log_length**2) / 12 + 1.0 * 2.0**2 + PHYSICS.armature
    expected = 2 * math.pi * math.sqrt(inertia / (1.0 * G * 2.0))
    assert expected == pytest.approx(3.15, abs=0.01)
    simulation = begin(machine(GALLOWS), "open")
    tilt = math.radians(5) / 2
    simulation.data.joint("j1").qpos[:] = (math.cos(tilt), math.sin(tilt), 0.0, 0.0)
    angles = watched(simulation, "j1", 800)
    assert max(angles) == pytest.approx(2 * tilt, rel=0.01)
    assert period(angles, 0.02) == pytest.approx(expected, rel=0.01)


def watched(simulation: Simulation, joint: str, num_looks: int) -> list[float]:
    """Angle of a ball joint that swings about one axis."""
    angles = []
    for _ in range(num_looks):
        angles.append(2 * math.asin(float(simulation.data.joint(joint).qpos[1])))
        simulation.watch()
    return angles


def period(angles: list[float], seconds: float) -> float:
    """Mean time from one rise through zero to the next, between looks by interpolation."""
    rises = [index + a / (a - b) for index, (a, b) in enumerate(pairwise(angles)) if a < 0 <= b]
    assert len(rises) >= 4
    return (rises[-1] - rises[0]) / (len(rises) - 1) * seconds


def test_a_wheel_rolls_without_slipping() -> None:
    """The car's speed is angular speed times radius within 1 %, and that is the motor's target within 1 %."""
    radius = 1.0 - PHYSICS.gap
    simulation = begin(machine(CAR), "open")
    places = []
    for _ in range(250):
        simulation.watch()
        places.append(simulation.place(0)[2])
    speed = (places[-1] - places[-51]) / 1.0
    turning = [float(simulation.data.joint(f"j{number}").qvel[0]) for number in range(1, 5)]
    assert [abs(w) for w in turning] == pytest.approx([speed / radius] * 4, rel=0.01)
    assert speed == pytest.approx(PHYSICS.wheel_speed * radius, rel=0.01)


def test_a_thrown_boulder_flies_a_parabola() -> None:
    """Between leaving the bowl and landing, second differences of its height are gravity, within 1 %."""
    found = simulate(machine(ROTOR_CATAPULT), "open")
    assert found.landing is not None
    assert found.boulder_T3 is not None
    heights = found.boulder_T3[found.landing - 60 : found.landing - 2, 1]
    gravity = -(heights[2:] - 2 * heights[1:-1] + heights[:-2]) / 0.02**2
    assert gravity == pytest.approx([G] * len(gravity), rel=0.01)


# ------------------------------------------------------------------------------------------------ endings


def test_a_flying_boulder_is_simulated_until_it_lands_or_8_s() -> None:
    def fall(height: float) -> tuple[float, int | None]:
        high = Machine(
            (ROOT, Block(36, 0, 4)),
            (PlacedBlock(ROOT, (0.0, 0.5, 0.0), "z+"), PlacedBlock(Block(36, 0, 4), (9.0, height, 0.0), "y+")),
            (20.0, height, 2.0),
        )
        found = simulate(high, "open")
        return float(found.times_T[-1]), found.landing

    assert fall(50.0) == (pytest.approx(5.0), pytest.approx(math.sqrt(2 * 50 / G) / 0.02, abs=2))
    assert fall(200.0) == (pytest.approx(6.38, abs=0.04), pytest.approx(math.sqrt(2 * 200 / G) / 0.02, abs=2))
    assert fall(1000.0) == (pytest.approx(8.0), None)


def test_a_boulder_that_stays_in_its_bowl_never_lands() -> None:
    still = (*CROSS, Block(30, 0, 4), Block(36, 9, 0))
    found = outcome(machine(still), "catapult")
    assert found.flight is not None
    assert not found.flight.has_landed
    assert abs(found.flight.distance) < 0.05
    assert found.samples[-1][0] == 5.0


@pytest.mark.parametrize("look", [0, 15, 249, 250])
def test_a_simulation_that_diverges_is_unstable_and_has_no_numbers(look: int) -> None:
    def kick(simulation: Simulation) -> None:
        if simulation.num_looks == look:
            simulation.data.qvel[:] = 1e12

    found = simulate(machine(CAR), "car", seen=kick)
    assert (found.ending, len(found.times_T)) == ("unstable", 0)


def test_warnings_of_the_engine_leave_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)

    def kick(simulation: Simulation) -> None:
        simulation.data.qvel[:] = math.nan

    assert simulate(machine(CAR), "car", seen=kick).ending == "unstable"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("speed", "is_broken"), [(499.0, False), (501.0, True), (math.nan, True), (-501.0, True)])
def test_what_is_too_fast_or_no_number_is_broken(speed: float, is_broken: bool) -> None:
    simulation = begin(machine(CAR), "car")
    simulation.data.qvel[7] = speed
    assert simulation.is_broken() is is_broken


def test_a_machine_of_too_many_ball_joints_is_not_simulated() -> None:
    """The root has 6 degrees of freedom, each joint 3; 64 are the limit."""
    rays = [[Block(44, 0, face), *[Block(44, 5 * face + index, 0) for index in range(1, 5)]] for face in range(4)]
    joints = [joint for ray in rays for joint in ray]
    assert len(joints) == 20
    assert outcome(machine((ROOT, *joints[:19])), "open").ending == "complete"
    assert outcome(machine((ROOT, *joints)), "open").ending == "too_free"


def test_the_car_has_walls_and_the_catapult_a_fence() -> None:
    assert [len(WORLDS[world]) for world in ("car", "catapult", "open")] == [3, 4, 0]
    assert {wall.half[1] * 2 for wall in WORLDS["catapult"]} == {1.5}
    sideways = (ROOT, Block(2, 0, 1), Block(63, 0, 0), Block(2, 2, 0))
    found = outcome(machine(sideways), "open")
    walled = outcome(machine(sideways), "car")
    assert abs(walled.sideways) < 12.0 < 13.0 + abs(found.sideways)


# ------------------------------------------------------------------------------------------------ determinism


@pytest.mark.long
def test_outcomes_are_equal_to_the_last_bit_in_any_order() -> None:
    trees = [CAR, ROTOR_CATAPULT, SMALL_CAR, BAND_CATAPULT, GALLOWS]
    forward = [outcome(machine(tree), "catapult") for tree in trees]
    backward = [outcome(machine(tree), "catapult") for tree in reversed(trees)]
    assert forward == backward[::-1]
