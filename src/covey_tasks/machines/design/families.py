"""Rule-based designs with random parameters, some bad on purpose."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from covey_tasks.machines.design.growth import Builder, faces
from covey_tasks.machines.design.types import Side, Tree

Family = Callable[[random.Random, Builder], None]
"""Builds on a builder that holds only the root; blocks that do not fit are left out."""


@dataclass(frozen=True, slots=True)
class Base:
    """A catapult's base: the foot that points forward, and the tower's top."""

    front: int
    tower: int


ArmFamily = Callable[[random.Random, Builder, Base], None]
"""Builds the throwing part onto a base."""

SMALL, BEAM, LOG, BALLAST, WHEEL, ROTOR, HINGE, BAND, CONTAINER, BOULDER = 15, 1, 63, 35, 2, 22, 5, 9, 30, 36
ROOT_FRONT, ROOT_BACK, ROOT_LEFT, ROOT_RIGHT, ROOT_UP = range(5)

WRONG_WHEEL = 0.2
"""Share of wheels that do not face to the side, and drive elsewhere or nowhere."""
WRONG_ARM = 0.25
"""Share of throwing arms on a side where they throw backwards, or not at all."""


def line_car(generator: random.Random, builder: Builder) -> None:
    """Add one to three beams in line, one to three axles."""
    beams = _row(builder, 0, ROOT_FRONT, [generator.choice((SMALL, BEAM, LOG)) for _ in range(generator.randint(1, 3))])
    _axles(generator, builder, beams)
    _maybe_ballast(generator, builder, beams)


def tee_car(generator: random.Random, builder: Builder) -> None:
    """Add a beam forward and one to each side, with wheels."""
    middle = _row(builder, 0, ROOT_FRONT, [generator.choice((BEAM, LOG))])
    across = [_row(builder, 0, side, [generator.choice((SMALL, BEAM))]) for side in (ROOT_LEFT, ROOT_RIGHT)]
    for arm in across:
        for beam in arm:
            builder.add(_wheel_or_not(generator), beam, 0)
    _axles(generator, builder, middle)
    _maybe_ballast(generator, builder, middle)


def rotor_arm(generator: random.Random, builder: Builder, base: Base) -> None:
    """Add a rotating block beside the tower, with an arm and bowl."""
    side: Side = generator.choice(("Left", "Right"))
    rotor = builder.add(ROTOR, base.tower, faces(builder.type_of(base.tower), side)[-1])
    if rotor is None:
        return
    # A rotor's own side of that name looks backwards, whichever side of the tower it sits on.
    other: Side = "Left" if side == "Right" else "Right"
    arm = other if generator.random() < WRONG_ARM else side
    _bowl(generator, builder, _row(builder, rotor, faces(ROTOR, arm)[0], _lengths(generator)))


def band_arm(generator: random.Random, builder: Builder, base: Base) -> None:
    """Add a hinge with lever and bowl, pulled forward by rubber bands."""
    hinge = builder.add(HINGE, base.tower, 0)
    if hinge is None:
        return
    lever: Side = "Down" if generator.random() < WRONG_ARM else "Up"  # a hinge that faces y+ has its Up to the back
    ends = _row(builder, hinge, faces(HINGE, lever)[0], _lengths(generator))
    mast = _row(builder, hinge, 0, [generator.choice((SMALL, BEAM, LOG))])
    _bowl(generator, builder, ends)
    sides: list[Side] = ["Up", "Left", "Right"]
    for side in generator.sample(sides, generator.randint(1, 2)) if mast else ():
        builder.join(BAND, (mast[-1], 0), (base.front, faces(builder.type_of(base.front), side)[-1]))


def catapult_base(generator: random.Random, builder: Builder) -> Base:
    """Add feet (2 to 4) and a tower (1 to 3 blocks)."""
    feet = [ROOT_FRONT, *generator.sample((ROOT_BACK, ROOT_LEFT, ROOT_RIGHT), generator.randint(1, 3))]
    tips = [tip for foot in feet for tip in _row(builder, 0, foot, [generator.choice((BEAM, LOG))])]
    heavy = generator.random() < 0.5
    tower = _row(builder, 0, ROOT_UP, [generator.choice((SMALL, BEAM, LOG)) for _ in range(generator.randint(1, 3))])
    for tip in tips if heavy else ():
        builder.add(BALLAST, tip, 0)
    return Base(tips[0], tower[-1])


def base_of(tree: Tree) -> Base:
    under = {(block.parent, block.face): index for index, block in enumerate(tree)}
    tower = under[0, ROOT_UP]
    while (tower, 0) in under:
        tower = under[tower, 0]
    return Base(under[0, ROOT_FRONT], tower)


def _row(builder: Builder, parent: int, face: int, types: Sequence[int]) -> list[int]:
    row: list[int] = []
    for type_ in types:
        added = builder.add(type_, parent, face)
        if added is None:
            break
        row.append(added)
        parent, face = added, 0
    return row


def _lengths(generator: random.Random) -> list[int]:
    return [generator.choice((SMALL, BEAM, LOG)) for _ in range(generator.randint(1, 2))]


def _axles(generator: random.Random, builder: Builder, beams: Sequence[int]) -> None:
    depths = [(beam, i) for beam in beams for i in range(len(faces(builder.type_of(beam), "Left")))]
    for beam, depth in generator.sample(depths, min(len(depths), generator.randint(1, 3))):
        for side in ("Left", "Right"):
            turned: Side = generator.choice(("Up", "Down")) if generator.random() < WRONG_WHEEL else side
            builder.add(_wheel_or_not(generator), beam, faces(builder.type_of(beam), turned)[depth])


def _wheel_or_not(generator: random.Random) -> int:
    return WHEEL if generator.random() < 0.9 else SMALL


def _maybe_ballast(generator: random.Random, builder: Builder, beams: Sequence[int]) -> None:
    if beams and generator.random() < 0.3:
        beam = generator.choice(beams)
        builder.add(BALLAST, beam, generator.choice(faces(builder.type_of(beam), "Up")))


def _bowl(generator: random.Random, builder: Builder, arm: Sequence[int]) -> None:
    """Add the boulder's container upright on the arm, if it fits."""
    if not arm:
        return
    up = faces(builder.type_of(arm[-1]), "Up")
    container = builder.add(CONTAINER, arm[-1], generator.choice(up))
    if container is not None:
        builder.add(BOULDER, container, 0)


CARS: dict[str, Family] = {"line_car": line_car, "tee_car": tee_car}
ARMS: dict[str, ArmFamily] = {"rotor_catapult": rotor_arm, "band_catapult": band_arm}
