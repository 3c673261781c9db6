"""Build machines block by block, taking only blocks that fit."""

import random

from covey_tasks.machines.design.blocks import BLOCKS, BOULDER, CONTAINER, ROOT_TYPE
from covey_tasks.machines.design.place import Box, attached, box, face_in_world, inside_container, intersect
from covey_tasks.machines.design.types import ROOT, Block, PlacedBlock, Rules, Side, Tree

NUM_TRIES = 30
"""Draws for one block before a machine is left as it is: hardly anything fits any more."""


class Builder:
    """A machine in the making, which is sound after every block.

    >>> builder = Builder(Rules(CAR_TYPES))
    >>> log = builder.add(63, 0, 0)
    >>> builder.add(63, 0, 0) is None  # occupied
    True
    """

    def __init__(self, rules: Rules, tree: Tree = (ROOT,)) -> None:
        self.rules = rules
        root = PlacedBlock(tree[0], (0.0, 0.0, 0.0), "z+")
        self._blocks = [tree[0]]
        self._placed = [root]
        self._boxes: dict[int, Box] = {0: box(root)}
        self._taken: set[tuple[int, int]] = set()
        for block in tree[1:]:
            self._take(block)

    @property
    def tree(self) -> Tree:
        return tuple(self._blocks)

    def __len__(self) -> int:
        return len(self._blocks)

    def type_of(self, index: int) -> int:
        return self._blocks[index].type

    def add(self, type_: int, parent: int, face: int) -> int | None:
        """Attach a block. None where it does not fit."""
        block = Block(type_, parent, face)
        is_there = 0 <= face < len(BLOCKS[self.type_of(parent)].faces)
        if not is_there or (parent, face) in self._taken or len(self) >= self.rules.max_blocks:
            return None
        if type_ not in self.rules.types or not self._fits(block):
            return None
        self._take(block)
        return len(self) - 1

    def join(self, type_: int, first: tuple[int, int], second: tuple[int, int]) -> int | None:
        """Attach a linear block. None where there are too many."""
        num_linear = sum(block.parent_b is not None for block in self._blocks)
        is_full = num_linear >= self.rules.max_linear or len(self) >= self.rules.max_blocks
        if is_full or type_ not in self.rules.types or first == second:
            return None
        self._take(Block(type_, *first, *second))
        return len(self) - 1

    def free_faces(self) -> list[tuple[int, int]]:
        every = ((p, f) for p, block in enumerate(self._blocks) for f in range(len(BLOCKS[block.type].faces)))
        return [end for end in every if end not in self._taken]

    def looks_up(self, parent: int, face: int) -> bool:
        return face_in_world(self._placed[parent], face)[1] == "y+"

    def _fits(self, block: Block) -> bool:
        new, tree = box(attached(block, self._placed)), [*self._blocks, block]
        last = len(self)
        meets = (intersect(other, new) and not inside_container(tree, i, last) for i, other in self._boxes.items())
        if any(meets):
            return False
        both = [*self._boxes.values(), new]
        return all(
            round(max(high[axis] for _, high in both) - min(low[axis] for low, _ in both), 2) <= limit
            for axis, limit in enumerate(self.rules.size_limit)
        )

    def _take(self, block: Block) -> None:
        placed = attached(block, self._placed)
        self._blocks.append(block)
        self._placed.append(placed)
        if placed.end is None:
            self._boxes[len(self) - 1] = box(placed)
            self._taken.add((block.parent, block.face))


def faces(type_: int, side: Side) -> list[int]:
    """Return the numbers of a block's faces on one side, back first.

    >>> faces(63, "Right")
    [4, 5, 6]
    """
    return [number for number, face in enumerate(BLOCKS[type_].faces) if face.side == side]


def grow(generator: random.Random, builder: Builder, num_blocks: int) -> Tree:
    """Add random blocks on random faces up to `num_blocks`, while they fit."""
    types = sorted(builder.rules.types - {ROOT_TYPE, CONTAINER, BOULDER})
    num_tries = 0
    while len(builder) < num_blocks and num_tries < NUM_TRIES:
        num_tries = 0 if _add(generator, builder, generator.choice(types)) is not None else num_tries + 1
    return builder.tree


def _add(generator: random.Random, builder: Builder, type_: int) -> int | None:
    free = builder.free_faces()
    if BLOCKS[type_].is_linear:
        return builder.join(type_, generator.choice(free), generator.choice(free)) if len(free) > 1 else None
    return builder.add(type_, *generator.choice(free)) if free else None


def add_boulder(generator: random.Random, builder: Builder) -> bool:
    """Add a boulder in a container, where there is room for it."""
    free = builder.free_faces()
    generator.shuffle(free)
    for parent, face in free:
        if not builder.looks_up(parent, face):
            continue
        container = builder.add(CONTAINER, parent, face)
        if container is not None:
            return builder.add(BOULDER, container, 0) is not None
    return False
