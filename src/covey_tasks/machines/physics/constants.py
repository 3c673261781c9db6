"""Constants of physics; a change of them is another physics version.

The game does not publish its own. These were chosen so that distances resemble those of arXiv 2510.14980.
"""

import hashlib
import json
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version


@dataclass(frozen=True, slots=True)
class Physics:
    """SI units: metres, seconds, kilograms, newtons, radians."""

    revision: int = 1
    """Revision, raised when a model is built differently from the same numbers."""
    gravity: float = 9.81
    timestep: float = 0.005
    iterations: int = 30
    """Maximum iterations of the contact solver."""
    gap: float = 0.005
    """Margin by which solids are smaller than their boxes, on each side, so that neighbours do not touch."""
    armature: float = 0.02
    """Armature of every joint: tiny inertias behind strong motors diverge without it."""

    power_time: float = 0.5
    """Time at which motors and rubber bands are switched on; until then the machine settles."""
    duration: float = 5.0
    longest: float = 8.0
    """Longest time for which a boulder in the air is followed."""

    friction: float = 0.6
    wheel_friction: float = 1.2
    slick_friction: float = 0.1
    grip_friction: float = 2.0
    elastic_stiffness: float = 20000.0
    """Stiffness of elastic pads, N/m."""
    elastic_damping: float = 20.0

    wheel_speed: float = 9.0
    wheel_torque: float = 25.0
    wheel_gain: float = 8.0
    """Torque for each rad/s that is missing."""
    rotor_speed: float = 8.0
    rotor_torque: float = 600.0
    rotor_gain: float = 400.0
    free_damping: float = 0.01
    """Damping of unpowered wheels and joints."""
    joint_damping: float = 0.1
    """Damping of hinges and ball joints."""
    hinge_range: float = 90.0
    """Degrees to each side."""
    suspension_travel: float = 0.5
    suspension_stiffness: float = 200.0
    suspension_damping: float = 8.0

    rod_radius: float = 0.25
    bowl_wall: float = 0.8
    """Height of a container's walls above its floor. Higher ones throw less: the boulder must get out."""
    bowl_thickness: float = 0.1
    band_stiffness: float = 100.0
    band_rest: float = 0.3
    """A rubber band pulls while it is longer than this share of its first length."""
    brace_play: float = 0.001
    """Share by which a brace gives way."""


PHYSICS = Physics()

WATCH_STEPS = 4
"""Steps from one look at the machine to the next: 0.02 s. Landings need that; pictures need less."""
SHOW_EVERY = 10
"""Looks from one shown sample to the next: 0.2 s."""
MAX_SPEED = 500.0
"""A joint that is faster (m/s or rad/s) belongs to a simulation that diverged."""
MAX_GAIN = 1000.0
"""Joules that may come from nowhere before a simulation counts as diverged: solids that are driven into each other fly
apart, and search found 28,900 J in a single look. Designs by rules gain 20 to 100."""

MAX_FREEDOM = 64
"""Degrees of freedom that are simulated at most; beyond it a machine scores 0, since the time grows with the cube. Only
ball joints or several boulders come so far: 48 blocks of other kinds have 53, with a boulder 58."""


def physics_version(physics: Physics = PHYSICS) -> str:
    """Name everything that scores depend on besides the design and rule."""
    constants = hashlib.sha256(json.dumps(asdict(physics), sort_keys=True).encode()).hexdigest()[:12]
    return f"{constants}-mujoco-{engine_version()}"


def engine_version() -> str:
    """Read the version of MuJoCo without importing it."""
    for package in ("mujoco-core", "mujoco"):
        try:
            return version(package)
        except PackageNotFoundError:
            continue
    raise ValueError(MISSING)


MISSING = "simulating machines needs mujoco: pip install 'covey[machines]'"
