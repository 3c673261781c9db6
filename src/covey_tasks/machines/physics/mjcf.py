"""A machine in MuJoCo's own language.

The game's axes (x right, y up, z forward) become MuJoCo's (Y, Z, X): a cyclic change, which keeps the numbers' sense
of rotation and makes z the way up. Bodies lie along the axes at the start, so boxes need no rotation.
"""

from collections.abc import Iterator, Sequence

from covey_tasks.machines.design.blocks import BLOCKS
from covey_tasks.machines.design.facing import DIRECTIONS
from covey_tasks.machines.design.types import Machine, Vector
from covey_tasks.machines.physics.assembly import MOTIONS, Assembly, Body, Line, axis_of, offset
from covey_tasks.machines.physics.constants import Physics
from covey_tasks.machines.physics.solids import Solid, Surface, minus
from covey_tasks.machines.physics.worlds import Wall


def model_text(machine: Machine, assembly: Assembly, walls: Sequence[Wall], physics: Physics) -> str:
    bodies = [_body_parts(machine, assembly, number, physics) for number in range(len(assembly.bodies))]
    return "".join(
        (
            (
                f'<mujoco><compiler angle="degree" autolimits="true"/><option timestep="{physics.timestep}"'
                f' gravity="0 0 {-physics.gravity}" integrator="implicitfast" solver="Newton"'
                f' iterations="{physics.iterations}" jacobian="dense" cone="pyramidal">'
                '<flag autoreset="disable" filterparent="disable"/></option>'
            ),
            "<worldbody>",
            f'<geom type="plane" size="0 0 1" {COLLISION["world"]} friction="{physics.friction}"/>',
            *[_wall(wall, physics) for wall in walls],
            *_nest(assembly, bodies, -1),
            "</worldbody>",
            "<tendon>",
            *(_tendon(index, line, physics) for index, line in enumerate(assembly.acting_lines)),
            "</tendon>",
            _actuators(assembly, physics),
            "</mujoco>",
        )
    )


def mujoco_vector(vector: Vector) -> str:
    x, y, z = vector
    return f"{z!r} {x!r} {y!r}"


def _wall(wall: Wall, physics: Physics) -> str:
    # The higher priority decides; without it MuJoCo takes the larger friction of the two.
    touch = 'condim="1" priority="1"' if wall.frictionless else f'friction="{physics.friction}"'
    place = f'pos="{mujoco_vector(wall.centre)}" size="{mujoco_vector(wall.half)}"'
    return f'<geom type="box" {place} {COLLISION["world"]} {touch}/>'


def _nest(assembly: Assembly, bodies: Sequence[str], parent: int) -> Iterator[str]:
    for number, body in enumerate(assembly.bodies):
        if body.parent == parent:
            yield f'<body name="b{number}" pos="{mujoco_vector(offset(assembly, number))}">'
            yield bodies[number]
            yield from _nest(assembly, bodies, number)
            yield "</body>"


def _body_parts(machine: Machine, assembly: Assembly, number: int, physics: Physics) -> str:
    body = assembly.bodies[number]
    parts = [_joint(number, body, physics)]
    for block, (own, solids) in enumerate(zip(assembly.body_of, assembly.solids, strict=True)):
        if own == number:
            mass = BLOCKS[machine.tree[block].type].mass / len(solids)
            parts += [_geom(solid, body.pivot, mass, physics) for solid in solids]
    for index, line in enumerate(assembly.acting_lines):
        for end, (owner, point) in enumerate(zip(line.bodies, line.points, strict=True)):
            if owner == number:
                parts.append(f'<site name="s{index}_{end}" pos="{mujoco_vector(minus(point, body.pivot))}"/>')
    return "".join(parts)


def _joint(number: int, body: Body, physics: Physics) -> str:
    motion = MOTIONS[body.kind]
    if motion == "free":
        return f'<freejoint name="j{number}"/>'
    axis = "" if motion == "ball" else f' axis="{mujoco_vector(DIRECTIONS[axis_of(body)])}"'
    more = {
        "wheel": "" if body.powered else f'damping="{physics.free_damping}"',
        "rotor": "",
        "swivel": f'damping="{physics.free_damping}"',
        "ball": f'damping="{physics.joint_damping}"',
        "hinge": f'damping="{physics.joint_damping}" range="{-physics.hinge_range} {physics.hinge_range}"',
        "suspension": f'damping="{physics.suspension_damping}" stiffness="{physics.suspension_stiffness}"'
        f' range="{-physics.suspension_travel} {physics.suspension_travel}"',
    }[body.kind]
    return f'<joint name="j{number}" type="{motion}"{axis} armature="{physics.armature}" {more}/>'


def _geom(solid: Solid, pivot: Vector, mass: float, physics: Physics) -> str:
    place = f'type="{solid.shape}" pos="{mujoco_vector(minus(solid.centre, pivot))}" {_size(solid)}'
    collision = COLLISION.get(solid.surface, COLLISION["solid"])
    return f'<geom {place} mass="{mass!r}" {collision} {_touch(solid.surface, physics)}/>'


def _size(solid: Solid) -> str:
    if solid.shape == "box":
        return f'size="{mujoco_vector(solid.half)}"'
    if solid.shape == "sphere":
        return f'size="{solid.half[0]!r}"'
    axis = DIRECTIONS[solid.axis]
    along = next(half for half, part in zip(solid.half, axis, strict=True) if part)
    radius = next(half for half, part in zip(solid.half, axis, strict=True) if not part)
    length = along - radius if solid.shape == "capsule" else along  # a capsule's length is without its round ends
    return f'size="{radius!r} {length!r}" zaxis="{mujoco_vector(axis)}"'


def _touch(surface: Surface, physics: Physics) -> str:
    friction = {"tyre": physics.wheel_friction, "slick": physics.slick_friction, "grip": physics.grip_friction}.get(
        surface, physics.friction
    )
    # The surface with the higher priority decides, so that wheels slip on anything
    if surface == "slick":
        return f'friction="{friction}" priority="1"'
    if surface == "elastic":
        return f'friction="{friction}" priority="1" solref="{-physics.elastic_stiffness} {-physics.elastic_damping}"'
    return f'friction="{friction}"' + (' condim="4"' if surface == "boulder" else "")


COLLISION = {
    "world": 'contype="1" conaffinity="0"',
    "solid": 'contype="2" conaffinity="3"',
    "housing": 'contype="4" conaffinity="1"',
    "boulder": 'contype="8" conaffinity="7"',
}
"""Bits: 1 the world, 2 solids, 4 housings, 8 boulders. Two geoms touch where one's type is in the other's affinity."""


def _tendon(index: int, line: Line, physics: Physics) -> str:
    a, b = line.points
    length = sum(x * x for x in minus(a, b)) ** 0.5
    if line.kind == "brace":
        # Faces of two bodies may lie on one point, and an empty range is no limit to MuJoCo.
        play = physics.brace_play * (length or 1.0)
        shortest, longest = length - play, length + play
        how = f'limited="true" range="{shortest!r} {longest!r}"'
    else:
        how = f'springlength="0 {physics.band_rest * length!r}" stiffness="{physics.band_stiffness}"'
    return f'<spatial name="t{index}" {how}><site site="s{index}_0"/><site site="s{index}_1"/></spatial>'


def _actuators(assembly: Assembly, physics: Physics) -> str:
    """Write a motor per powered joint, which keeps speed within its torque."""
    found = []
    motors = {"wheel": (physics.wheel_gain, physics.wheel_torque), "rotor": (physics.rotor_gain, physics.rotor_torque)}
    for number, body in enumerate(assembly.bodies):
        if body.powered and body.kind in motors:
            gain, torque = motors[body.kind]
            found.append(f'<velocity name="m{number}" joint="j{number}" kv="{gain}" forcerange="{-torque} {torque}"/>')
    return "".join(("<actuator>", *found, "</actuator>"))


def motor_speeds(assembly: Assembly, physics: Physics) -> list[float]:
    """Return each motor's target (rad/s), reversed for those that face x-.

    So wheels on both sides of a car drive the same way. In the order of `_actuators`.
    """
    speeds = {"wheel": physics.wheel_speed, "rotor": physics.rotor_speed}
    powered = [body for body in assembly.bodies if body.powered and body.kind in speeds]
    return [-speeds[body.kind] if body.facing == "x-" else speeds[body.kind] for body in powered]
