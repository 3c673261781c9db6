"""Construction trees as JSON: read, checked, written with the paper's keys.

Paper: type, id (index), parent, face_id. Repository: id (type!), order_id (index), parent, bp_id. Which of the two a
file means is told by the presence of order_id. Source: BesiegeField, arXiv 2510.14980, D.1.2.
"""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from covey_tasks.machines.design.blocks import BLOCKS, BOULDER, ROOT_TYPE
from covey_tasks.machines.design.types import ROOT, Block, Code, Invalid, Rules, Tree

SHORT_NUMBER = re.compile(r"-?[0-9]{1,4}", re.ASCII)
"""The original's own prompt writes "id": "0"."""
LANGUAGE = re.compile(r"\A\s*[A-Za-z]\w*")
"""Language tag of a fence, whatever it is."""
MAX_SHOWN = 100
"""Characters of a wrong value that a message shows."""

PAPER = ("type", "id", "parent", "face_id")
PAPER_LINEAR = ("type", "id", "parent_a", "face_id_a", "parent_b", "face_id_b")
REPOSITORY = ("id", "order_id", "parent", "bp_id")
REPOSITORY_LINEAR = ("id", "order_id", "parent_a", "bp_id_a", "parent_b", "bp_id_b")


class NoMachine(Exception):
    """Ends the reading of a text; `read_machine` and others return it."""

    def __init__(self, code: Code, message: str) -> None:
        super().__init__(message)
        self.invalid = Invalid(code, message)


def read_machine(text: str, rules: Rules) -> Tree | Invalid:
    """Read the tree of an answer: its last fenced block, or all.

    Any text may come in: its faults are data.
    """
    try:
        rows = read_rows(text, rules.max_blocks)
        in_repository = "order_id" in rows[0]
        tree = tuple(_block(index, row, in_repository) for index, row in enumerate(rows))
        wrong = check_tree(tree, rules)
        if wrong is not None:
            raise NoMachine(wrong.code, wrong.message)
        return tree
    except NoMachine as found:
        return found.invalid


def read_rows(text: str, max_blocks: int) -> list[dict[str, Any]]:
    try:
        fenced = text.split("```")[1::2]
        rows = json.loads((LANGUAGE.sub("", fenced[-1]) if fenced else text), object_pairs_hook=_without_doubles)
    except (ValueError, RecursionError) as error:  # deep nesting, and whole numbers of more than 4300 digits
        raise NoMachine("json", f"not valid JSON: {str(error)[:MAX_SHOWN]}") from None
    if not isinstance(rows, list) or not rows or not all(isinstance(row, dict) for row in rows):
        raise NoMachine("shape", "expected a non-empty list of objects")
    if len(rows) > max_blocks:
        raise NoMachine("too_many", f"{len(rows)} blocks, at most {max_blocks}")
    return rows


def _without_doubles(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a key twice")
    return found


def _block(index: int, row: Mapping[str, Any], in_repository: bool) -> Block:
    plain, linear = (REPOSITORY, REPOSITORY_LINEAR) if in_repository else (PAPER, PAPER_LINEAR)
    kind = whole(index, plain[0], row[plain[0]]) if plain[0] in row else None
    expected = linear if (kind in BLOCKS and BLOCKS[kind].is_linear) else plain
    if kind not in BLOCKS and "parent_a" in row:
        expected = linear
    if set(row) != set(expected):
        raise NoMachine("field", f"block {index}: fields must be exactly [{', '.join(expected)}]")
    type_, place, *ends = (whole(index, name, row[name]) for name in expected)
    if place != index:
        raise NoMachine("id", f"block {index}: id is {shown(place)}, expected its position {index}")
    return Block(type_, *ends)


def whole(index: int, name: str, value: Any) -> int:
    """Read a whole number, also as a short decimal string."""
    if isinstance(value, str) and SHORT_NUMBER.fullmatch(value):
        return int(value)
    if type(value) is not int:
        raise NoMachine("field", f"block {index}: {name} must be an integer")
    return value


def shown(number: int) -> str:
    """Write a number of any length. str() itself refuses very long ones."""
    return str(number) if abs(number) < 10**9 else "a very large number"


def check_tree(tree: Tree, rules: Rules) -> Invalid | None:
    """Find the first thing that is wrong with the tree, if any."""
    if not tree:
        return Invalid("shape", "expected a non-empty list of objects")
    if len(tree) > rules.max_blocks:
        return Invalid("too_many", f"{len(tree)} blocks, at most {rules.max_blocks}")
    taken: set[tuple[int, int]] = set()
    for index, block in enumerate(tree):
        wrong = _check_kind(index, block, rules) or _check_ends(index, block, tree, taken)
        if wrong is not None:
            return wrong
    num_linear = sum(BLOCKS[block.type].is_linear for block in tree)
    if num_linear > rules.max_linear:
        return Invalid("too_many", f"{num_linear} linear blocks, at most {rules.max_linear}")
    return None


def _check_kind(index: int, block: Block, rules: Rules) -> Invalid | None:
    if block.type not in BLOCKS or block.type not in rules.types | {ROOT_TYPE}:
        return Invalid("type", f"block {index}: block type {shown(block.type)} is not allowed here")
    if (index == 0) != (block == ROOT) or (index > 0 and block.type == ROOT_TYPE):
        return Invalid("root", "block 0 must be the starting block (type 0, parent -1, face -1), and no other")
    if BLOCKS[block.type].is_linear != (block.parent_b is not None and block.face_b is not None):
        return Invalid("field", f"block {index}: linear blocks and no others have two parents")
    return None


def _check_ends(index: int, block: Block, tree: Tree, taken: set[tuple[int, int]]) -> Invalid | None:
    if index == 0:
        return None
    for parent, face in ends(block):
        if not 0 <= parent < index:
            return Invalid("parent", f"block {index}: parent {shown(parent)} does not exist before it")
        above = BLOCKS[tree[parent].type]
        if not 0 <= face < len(above.faces):
            has = f"has no face {shown(face)} (it has {len(above.faces)})"
            return Invalid("face", f"block {index}: parent {parent} ({above.name}) {has}")
    if block.parent_b is not None:
        return None  # linear blocks use free and occupied faces alike, and occupy none
    if (block.parent, block.face) in taken:
        return Invalid("occupied", f"block {index}: face {block.face} of block {block.parent} is already occupied")
    taken.add((block.parent, block.face))
    return None


def ends(block: Block) -> tuple[tuple[int, int], ...]:
    if block.parent_b is None or block.face_b is None:
        return ((block.parent, block.face),)
    return ((block.parent, block.face), (block.parent_b, block.face_b))


def write_json(tree: Tree) -> str:
    """Write one object per line, with the paper's keys.

    >>> print(write_json((ROOT, Block(2, 0, 3))))
    [{"type":0,"id":0,"parent":-1,"face_id":-1},
    {"type":2,"id":1,"parent":0,"face_id":3}]
    """
    return "[" + ",\n".join(_write(index, block) for index, block in enumerate(tree)) + "]"


def _write(index: int, block: Block) -> str:
    keys = PAPER if block.parent_b is None else PAPER_LINEAR
    values = (block.type, index, *(number for end in ends(block) for number in end))
    return json.dumps(dict(zip(keys, values, strict=True)), separators=(",", ":"))


def canonical(tree: Tree) -> Tree:
    """Return the canonical tree: breadth first, by face, linear blocks last.

    Two sound trees are the same machine exactly if their canonical forms are equal.
    """
    children = sorted((i for i, b in enumerate(tree) if i > 0 and b.parent_b is None), key=lambda i: tree[i].face)
    order = [0]
    for parent in order:  # grows while it is walked through
        order += [child for child in children if tree[child].parent == parent]
    place = {old: new for new, old in enumerate(order)}
    solid = [tree[old] for old in order]
    moved = [ROOT, *(Block(b.type, place[b.parent], b.face) for b in solid[1:])]
    both = [(b.type, sorted((place[p], f) for p, f in ends(b))) for b in tree if b.parent_b is not None]
    return (*moved, *(Block(type_, *first, *second) for type_, (first, second) in sorted(both)))


def num_boulders(tree: Tree) -> int:
    return sum(block.type == BOULDER for block in tree)
