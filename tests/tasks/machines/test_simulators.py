"""Machines in worker processes: the same outcomes from any of them, and what crashes costs one sample."""

import asyncio
import hashlib
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("mujoco", reason="needs covey[machines]")

from covey.types import Failure
from covey_tasks.machines.design.blocks import BLOCKS
from covey_tasks.machines.design.types import ROOT, Block, Tree
from covey_tasks.machines.physics import simulators as simulators_module
from covey_tasks.machines.physics.assembly import assemble
from covey_tasks.machines.physics.constants import PHYSICS, Physics, physics_version
from covey_tasks.machines.physics.mjcf import model_text, motor_speeds
from covey_tasks.machines.physics.simulate import outcome_of
from covey_tasks.machines.physics.simulators import CachedSimulators, Simulators
from covey_tasks.machines.physics.trajectory import Outcome
from covey_tasks.machines.physics.worlds import WORLDS, World

from .designs import BAND_CATAPULT, CAR, GALLOWS, ROTOR_CATAPULT, SMALL_CAR, machine

TREES: tuple[Tree, ...] = (CAR, ROTOR_CATAPULT, SMALL_CAR, BAND_CATAPULT, GALLOWS, CAR)


def run_all(
    simulators: Simulators | CachedSimulators, trees: Sequence[Tree], world: World = "catapult"
) -> list[Outcome | Failure]:
    async def together() -> list[Outcome | Failure]:
        return list(await asyncio.gather(*[simulators.run(tree, world) for tree in trees]))

    return asyncio.run(together())


@pytest.fixture
def tasks(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A module that worker processes can import too."""
    monkeypatch.syspath_prepend(Path(__file__).parent)
    import simulator_tasks

    yield simulator_tasks
    monkeypatch.delitem(sys.modules, "simulator_tasks")


def make(num_workers: int, function: Callable[..., dict[str, Any]] | None = None, timeout: float = 60.0) -> Simulators:
    return Simulators(num_workers, timeout, function)


@pytest.mark.long
def test_one_and_two_processes_and_this_one_find_the_same_bits_in_any_order() -> None:
    here = [outcome_of(tree, "catapult") for tree in TREES]
    for num_workers in (1, 2):
        simulators = make(num_workers)
        assert run_all(simulators, TREES) == here
        assert run_all(simulators, TREES[::-1]) == here[::-1]
        simulators.close()


def test_the_order_of_the_blocks_changes_nothing() -> None:
    shuffled = (ROOT, Block(63, 0, 1), Block(2, 1, 6), Block(63, 0, 0), Block(2, 3, 6), Block(2, 1, 3), Block(2, 3, 3))
    simulators = make(1)
    first, second = run_all(simulators, [CAR, shuffled], "car")
    simulators.close()
    assert first == second


@pytest.mark.long
def test_a_crash_a_hang_and_an_error_cost_one_sample_each(tasks: Any) -> None:
    chain: Tree = (ROOT, Block(1, 0, 0), Block(1, 1, 0), Block(1, 2, 0))
    simulators = make(2, tasks.act, timeout=2.0)
    found = run_all(simulators, [chain[:1], chain[:2], chain[:1], chain[:3], chain[:4], chain[:1]])
    simulators.close()
    fine = Outcome("complete", 1.0, 0.0, 0.0, None, ())
    assert [found[0], found[2], found[5]] == [fine] * 3
    assert found[1] == Failure("ended its process (signal 11)")
    assert found[3] == Failure("took longer than 2 s")
    assert isinstance(found[4], Failure)
    assert found[4].reason.startswith("raised RuntimeError: no such world")


def test_after_close_there_is_no_worker() -> None:
    simulators = make(1)
    run_all(simulators, [ROOT_ONLY])
    simulators.close()
    (found,) = run_all(simulators, [ROOT_ONLY])
    assert isinstance(found, Failure)
    assert "closed" in found.reason


def test_a_worker_holds_nothing_heavy_but_the_physics(tasks: Any) -> None:
    simulators = make(1, tasks.modules)
    (found,) = run_all(simulators, [ROOT_ONLY])
    simulators.close()
    assert isinstance(found, Outcome)
    assert found.forward == 0.0


def test_without_mujoco_the_remedy_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(simulators_module, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"simulating machines needs mujoco: pip install 'covey\[machines\]'"):
        Simulators()


@pytest.mark.slow
def test_tasks_of_text_and_the_environment_are_imported_without_mujoco() -> None:
    code = (
        "import sys; sys.modules['mujoco'] = None; import covey_tasks.machines.environment, covey.loop;"
        "from covey_tasks.machines.physics.simulators import Simulators\n"
        "try: Simulators()\n"
        "except ValueError as error: print(error)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "simulating machines needs mujoco: pip install 'covey[machines]'\n"


ROOT_ONLY: Tree = (ROOT,)


# ------------------------------------------------------------------------------------------------ cache and version


class Counted:
    """Says how many blocks a machine has, and remembers who asked."""

    def __init__(self, failures: int = 0) -> None:
        self.asked: list[tuple[Tree, World]] = []
        self.failures = failures
        self.version = "a"
        self.is_closed = False

    async def run(self, tree: Tree, world: World) -> Outcome | Failure:
        self.asked.append((tree, world))
        await asyncio.sleep(0)
        if len(self.asked) <= self.failures:
            return Failure("took longer than 5 s")
        return Outcome("complete", float(len(tree)), 0.0, 0.0, None, ())

    def close(self) -> None:
        self.is_closed = True


def test_a_machine_is_simulated_once_in_any_order_of_blocks() -> None:
    counted = Counted()
    cache = CachedSimulators(counted, 8)
    other = (ROOT, Block(2, 0, 3), Block(2, 0, 2))
    same = (ROOT, Block(2, 0, 2), Block(2, 0, 3))
    found = run_all(cache, [other, same, other], "car") + run_all(cache, [same], "car")
    assert len({id(outcome) for outcome in found}) == 1
    assert len(counted.asked) == 1
    assert cache.take_counts() == (4, 1)
    assert cache.take_counts() == (0, 0)


def test_another_machine_world_or_physics_is_another_outcome() -> None:
    counted = Counted()
    cache = CachedSimulators(counted, 8)
    run_all(cache, [CAR, SMALL_CAR], "car")
    run_all(cache, [CAR], "open")
    counted.version = "b"
    run_all(cache, [CAR], "car")
    assert len(counted.asked) == 4


def test_a_failure_is_not_kept() -> None:
    counted = Counted(failures=1)
    cache = CachedSimulators(counted, 8)
    assert isinstance(run_all(cache, [CAR])[0], Failure)
    assert isinstance(run_all(cache, [CAR])[0], Outcome)
    assert len(counted.asked) == 2


def test_the_machine_longest_unused_makes_room() -> None:
    counted = Counted()
    cache = CachedSimulators(counted, 2)
    for tree in (CAR, SMALL_CAR, CAR, GALLOWS, CAR, SMALL_CAR):
        run_all(cache, [tree])
    assert len(counted.asked) == 4
    cache.close()
    assert counted.is_closed


def test_the_physics_version_is_of_the_constants_and_of_mujoco() -> None:
    assert physics_version() == physics_version(Physics())
    assert physics_version() != physics_version(Physics(rotor_torque=PHYSICS.rotor_torque + 1))
    assert "-mujoco-4." in physics_version()
    assert make(1).version == physics_version()


def test_machines_and_numbers_of_revision_1_stay_as_they_are() -> None:
    """Whoever changes a number, or raises `Physics.revision` for what else a model is built of, changes these too."""
    hinged = (ROOT, Block(5, 0, 4), Block(1, 1, 0))
    alone: list[Tree] = [(ROOT, Block(type_, 0, 4)) for type_, block in BLOCKS.items() if type_ and not block.is_linear]
    bound: list[Tree] = [(*hinged, Block(type_, 0, 0, 2, 0)) for type_, block in BLOCKS.items() if block.is_linear]
    written = hashlib.sha256()
    axle: Tree = (ROOT, Block(22, 0, 0), Block(15, 1, 0), Block(15, 1, 1))
    for tree in (*alone, *bound, axle, CAR, GALLOWS, ROTOR_CATAPULT, BAND_CATAPULT):
        made = machine(tree)
        assembly = assemble(made, PHYSICS)
        walls = [wall for world in WORLDS.values() for wall in world]
        written.update(f"{model_text(made, assembly, walls, PHYSICS)}{motor_speeds(assembly, PHYSICS)}".encode())
    assert (written.hexdigest()[:12], physics_version()[:12]) == ("36ed33bf1200", "fabc750871c7")
