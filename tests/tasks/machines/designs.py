"""Machines written out block by block. Faces: of the root Front, Back, Left, Right, Up, Down; of a beam Front, then
those to the Left, to the Right, Up and Down, from its back to its front."""

from collections.abc import Sequence

from covey_tasks.machines.design.blocks import BLOCKS
from covey_tasks.machines.design.compact import read_compact
from covey_tasks.machines.design.place import place
from covey_tasks.machines.design.tree import canonical
from covey_tasks.machines.design.types import ROOT, Block, Invalid, Machine, Rules, Tree
from covey_tasks.machines.settings import MachinesConfig

ANY = Rules(frozenset(BLOCKS))


def demonstrating(stages: Sequence[str], count: int, max_blocks: int, share: float, seed: int) -> MachinesConfig:
    return MachinesConfig(
        stages=list(stages), num_demonstrations=count, max_blocks=max_blocks, family_share=share, problem_seed=seed
    )


def standing_of(text: str) -> Tree:
    """In the order in which it is simulated."""
    tree = read_compact(text, ANY)
    assert not isinstance(tree, Invalid), tree
    return canonical(tree)


CAR: Tree = (
    ROOT,
    Block(63, 0, 0),  # a log forward, a log back
    Block(63, 0, 1),
    Block(2, 1, 3),  # powered wheels at their ends, left and right
    Block(2, 1, 6),
    Block(2, 2, 3),
    Block(2, 2, 6),
)
"""Four driven wheels."""

SMALL_CAR: Tree = (ROOT, Block(1, 0, 0), Block(2, 0, 2), Block(2, 0, 3))

CROSS: Tree = (
    ROOT,
    Block(63, 0, 0),
    Block(63, 0, 1),
    Block(63, 0, 2),
    Block(63, 0, 3),
    Block(35, 1, 0),
    Block(35, 2, 0),
    Block(35, 3, 0),
    Block(35, 4, 0),
)
"""Four logs on the ground with ballast at their ends: what stands firmly."""

ROTOR_CATAPULT: Tree = (
    *CROSS,
    Block(1, 0, 4),  # a tower
    Block(1, 9, 0),
    Block(22, 10, 4),  # at its right, a rotating block
    Block(1, 11, 2),  # on that, an arm backwards
    Block(30, 12, 6),  # on that, the bowl
    Block(36, 13, 0),
)

BAND_CATAPULT: Tree = (
    *CROSS,
    Block(1, 0, 4),  # a tower
    Block(1, 9, 0),
    Block(5, 9, 5),  # at its back, a hinge
    Block(1, 11, 0),  # on that, an arm backwards
    Block(1, 12, 0),
    Block(30, 13, 6),  # on that, the bowl
    Block(36, 14, 0),
    Block(9, 13, 0, 10, 0),  # from the end of the arm to the top of the tower
)

LEAPER: Tree = (
    ROOT,
    Block(63, 0, 0),  # a light base: a log forward, a beam back, a log to the right
    Block(1, 0, 1),
    Block(63, 0, 3),
    Block(15, 0, 4),  # a tower
    Block(63, 4, 0),
    Block(5, 5, 0),  # on top of it, a hinge, on that a mast and a lever backwards
    Block(63, 6, 0),
    Block(1, 6, 3),
    Block(1, 8, 0),
    Block(30, 9, 6),  # on that, the bowl
    Block(36, 10, 0),
    *(Block(9, 1, 9, 7, 0),) * 4,  # from the end of the base to the top of the mast
)
"""A catapult whose rubber bands throw itself up, with the boulder."""

SPRINGER: Tree = standing_of(
    "Ba0Aa1Sa4Mb0Rc0Hd0Bg0Yb3h0Sf7Yb<h:Sh;Ah8Hc1Cm6Qo0Mj4Tj2Yl3e0Bq1Mt4Rb6Hc5Hb7Yh<v2Sg2Ac2Bf1Sa3Bu3St6H#3"
)
"""What evolution found under an earlier score: four rubber bands, and its starting block springs up by 2.91 m."""

BURSTER: Tree = standing_of("Sa0Ta2Ma3Tc3Rc4Wd2Sd3Bd4Be3Bh0Cj7Tk0Mk4Pk6Ql0Rn2Ro0Mq5Ze1k1Yf7n3Yj1n0Yj2q0")
"""What evolution found next: rotating blocks press the boulder through a wall of its bowl until they fly apart."""

GALLOWS: Tree = (
    *CROSS,
    Block(1, 0, 4),  # a tower
    Block(1, 9, 0),
    Block(1, 10, 0),
    Block(63, 11, 6),  # a beam backwards
    Block(44, 12, 12),  # under its end, a ball joint
    Block(63, 13, 0),  # and a log that hangs from it
)


def machine(tree: Tree) -> Machine:
    """In space; the trees here are valid."""
    found = place(tree, ANY)
    assert not isinstance(found, Invalid), found
    return found
