"""Simulates a machine in MuJoCo. The one place that imports it.

A simulation depends on the machine, the world and the constants only: each has a model and a state of its own, the
step is fixed and nothing is carried over, so its bits do not depend on what ran before it, or in which process.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from covey_tasks.machines.design.blocks import BLOCKS, BOULDER
from covey_tasks.machines.design.place import place
from covey_tasks.machines.design.tree import canonical
from covey_tasks.machines.design.types import Block, Invalid, Machine, Rules, Tree
from covey_tasks.machines.physics.assembly import Assembly, assemble
from covey_tasks.machines.physics.constants import (
    MAX_FREEDOM,
    MAX_GAIN,
    MAX_SPEED,
    MISSING,
    PHYSICS,
    SHOW_EVERY,
    WATCH_STEPS,
    Physics,
)
from covey_tasks.machines.physics.mjcf import model_text, motor_speeds
from covey_tasks.machines.physics.throwing import Thrower
from covey_tasks.machines.physics.trajectory import Array, Outcome, Recording, Trajectory, summarize, without_motion
from covey_tasks.machines.physics.worlds import WORLDS, World

try:
    import mujoco
except ImportError as error:
    raise ValueError(MISSING) from error

# Unless told otherwise, MuJoCo writes warnings to a file in the current folder. `MjData` counts them anyway.
mujoco.set_mju_user_warning(lambda message: None)

TOUCHES_GROUND = 0.05
"""The boulder has landed when less than this is between it and the ground, in metres. A look every 0.02 s cannot miss
it: contact is soft, and lasts longer."""
TO_GAME = [1, 2, 0]
"""MuJoCo's axes that are the game's x, y and z."""
GROUND = 0
"""The geom of the ground: the first of the model."""
BOULDER_RADIUS = BLOCKS[BOULDER].size[0] / 2
BROKEN = (mujoco.mjtWarning.mjWARN_BADQPOS, mujoco.mjtWarning.mjWARN_BADQVEL, mujoco.mjtWarning.mjWARN_BADQACC)


@dataclass(slots=True)
class Simulation:
    """A machine in motion."""

    model: "mujoco.MjModel"
    data: "mujoco.MjData"
    assembly: Assembly
    physics: Physics
    num_looks: int = 0
    energy: float = math.inf
    """Joules at the last look: of motion, height, and stretched parts."""
    gained: float = 0.0
    """Joules that no motor gave, in all."""

    def watch(self) -> None:
        """Simulate to the next look, with the power on when due."""
        if self.num_looks == round(self.physics.power_time / (WATCH_STEPS * self.physics.timestep)):
            self.data.ctrl[:] = motor_speeds(self.assembly, self.physics)
            stiffness = self.physics.band_stiffness
            lines = self.assembly.acting_lines
            self.model.tendon_stiffness[:] = [stiffness if line.kind == "band" else 0.0 for line in lines]
            self.energy = math.inf
        force, speed, power = self.data.actuator_force, self.data.actuator_velocity, 0.0
        for _ in range(WATCH_STEPS):
            mujoco.mj_step(self.model, self.data)
            power += max(0.0, float(force @ speed))
        # Energy that no motor gave is the solver's error
        mujoco.mj_energyPos(self.model, self.data)
        mujoco.mj_energyVel(self.model, self.data)
        energy = float(self.data.energy.sum())
        self.gained += max(0.0, energy - self.energy - power * self.physics.timestep)
        self.energy = energy
        self.num_looks += 1

    def place(self, body: int) -> tuple[float, float, float]:
        first = self.model.jnt_qposadr[self.model.body_jntadr[body + 1]]  # body 0 is the world
        z, x, y = self.data.qpos[first : first + 3].tolist()
        return x, y, z

    def is_broken(self) -> bool:
        speeds = self.data.qvel
        return (
            not bool(np.isfinite(self.data.qpos).all() and (np.abs(speeds) <= MAX_SPEED).all())  # NaN compares false
            or any(self.data.warning[kind].number > 0 for kind in BROKEN)
            or not self.gained <= MAX_GAIN
        )

    def centre(self) -> tuple[float, float, float]:
        """Compute the machine's centre of mass, without its boulder."""
        mujoco.mj_kinematics(self.model, self.data)  # what a step leaves behind is from before it moved
        mujoco.mj_comPos(self.model, self.data)
        z, x, y = self.data.subtree_com[1].tolist()  # body 1 is the root's
        return x, y, z

    def touches(self) -> tuple[bool, bool]:
        """Check contact with the boulder, and with the ground."""
        assert self.assembly.boulder is not None
        pairs = self.data.contact.geom
        boulder = self.model.geom_bodyid[pairs] == self.assembly.boulder + 1
        world = self.model.geom_bodyid[pairs] == 0
        holds = boulder.any(axis=1) & ~world.any(axis=1)
        stands = (pairs == GROUND).any(axis=1) & ~boulder.any(axis=1)
        return bool(holds.any()), bool(stands.any())

    def is_held(self) -> bool:
        assert self.assembly.boulder is not None
        owners = self.model.geom_bodyid[self.data.contact.geom]
        return bool((owners == self.assembly.boulder + 1).any())


def begin(machine: Machine, world: World, physics: Physics = PHYSICS) -> Simulation:
    assembly = assemble(machine, physics)
    model = mujoco.MjModel.from_xml_string(model_text(machine, assembly, WORLDS[world], physics))
    model.tendon_stiffness[:] = 0.0
    return Simulation(model, mujoco.MjData(model), assembly, physics)


def simulate(
    machine: Machine, world: World, physics: Physics = PHYSICS, seen: Callable[[Simulation], None] | None = None
) -> Trajectory:
    """Simulate 5 s, up to 8 s while a boulder flies.

    `seen` is called at the start and at every look.
    """
    simulation = begin(machine, world, physics)
    if simulation.model.nv > MAX_FREEDOM:
        return without_motion("too_free")
    boulder = simulation.assembly.boulder
    rows: list[tuple[float, ...]] = []
    centres: list[tuple[float, ...]] = []
    touches: list[tuple[bool, bool]] = []
    gained: list[float] = []
    landing: int | None = None
    goes_on = True
    while goes_on:
        rows.append(simulation.place(0) + (() if boulder is None else simulation.place(boulder)))
        if boulder is not None and landing is None:
            centres.append(simulation.centre())
            touches.append(simulation.touches())
            gained.append(simulation.gained)
        if seen is not None:
            seen(simulation)
        if boulder is not None and landing is None and rows[-1][4] - BOULDER_RADIUS < TOUCHES_GROUND:
            landing = simulation.num_looks
        goes_on = _goes_on(simulation, has_landed=landing is not None)
        if (simulation.num_looks % SHOW_EVERY == 0 or not goes_on) and simulation.is_broken():
            return without_motion("unstable")
        if goes_on:
            simulation.watch()
    places: Array = np.array(rows)
    times_T: Array = np.arange(len(rows), dtype=np.float64) * (WATCH_STEPS * physics.timestep)
    if boulder is None:
        return Trajectory("complete", times_T, places[:, :3], None, None)
    holds_T, stands_T = np.array(touches).T
    thrower = Thrower(np.array(centres), holds_T, stands_T, np.array(gained))
    return Trajectory("complete", times_T, places[:, :3], places[:, 3:], landing, thrower)


def _goes_on(simulation: Simulation, has_landed: bool) -> bool:
    """Check whether time is left; a boulder in the air has more."""
    physics, looks = simulation.physics, simulation.num_looks
    each = WATCH_STEPS * physics.timestep
    if looks < round(physics.duration / each):
        return True
    if simulation.assembly.boulder is None or has_landed or looks >= round(physics.longest / each):
        return False
    return not simulation.is_held()


def record(machine: Machine, world: World, physics: Physics = PHYSICS) -> Recording:
    """Simulate with every body's way recorded, bit for bit the same."""
    positions: list[Array] = []
    rotations: list[Array] = []

    def keep(simulation: Simulation) -> None:
        mujoco.mj_kinematics(simulation.model, simulation.data)
        positions.append(simulation.data.xpos[1:, TO_GAME])
        rotations.append(simulation.data.xmat[1:].reshape(-1, 3, 3)[:, TO_GAME][:, :, TO_GAME])

    trajectory = simulate(machine, world, physics, seen=keep)
    return Recording(machine, world, trajectory, np.array(positions), np.array(rotations))


def outcome(machine: Machine, world: World, physics: Physics = PHYSICS) -> Outcome:
    last = round(physics.duration / (WATCH_STEPS * physics.timestep))
    return summarize(simulate(machine, world, physics), last, SHOW_EVERY, physics.gravity)


def outcome_of(tree: Tree, world: World) -> Outcome:
    """Return a valid tree's outcome, simulated in canonical order for equal bits."""
    return outcome(standing(tree), world)


def standing(tree: Tree) -> Machine:
    machine = place(canonical(tree), ANYTHING)
    assert not isinstance(machine, Invalid), machine
    return machine


def run(rows: Sequence[Sequence[Any]], world: World) -> dict[str, Any]:
    """Run a worker's task: rows of a tree in, `Outcome` data out."""
    return outcome_of(tuple(Block(*row) for row in rows), world).to_data()


ANYTHING = Rules(frozenset(BLOCKS), max_blocks=10**6, max_linear=10**6, size_limit=(math.inf,) * 3)
