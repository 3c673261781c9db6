"""Construction trees in few tokens, for policies of single characters.

A block is three tokens, its type, its parent and the parent's face; a linear block has five, the second parent and face
besides. The root is not written and a block's index is its position. Each token is one character, and the three kinds
share none, so that a tree is told from its text and the text from the tree:

    T63 P0 F0, T2 P1 F1, T2 P1 F4   is   Ba0Wb1Wb4
"""

from covey_tasks.machines.design.blocks import BLOCKS, ROOT_TYPE
from covey_tasks.machines.design.tree import check_tree, ends
from covey_tasks.machines.design.types import ROOT, Block, Invalid, Rules, Tree

PARENTS = "abcdefghijklmnopqrstuvwxyz!#$%&()*+,-./=>?@[]^_{"
"""The character of each index a parent can have."""
FACES = "0123456789:;<"
"""The character of each face."""

_TYPE_OF = {block.character: type_ for type_, block in BLOCKS.items() if type_ != ROOT_TYPE}


def read_compact(text: str, rules: Rules) -> Tree | Invalid:
    """Read the tree of a compact text. Any text may come in."""
    rest = text.strip()
    tree = [ROOT]
    while rest:
        block, length = _block(rest)
        if block is None:
            return Invalid("shape", f"block {len(tree)}: expected a type, a parent and a face, got {rest[:5]!r}")
        if len(tree) == rules.max_blocks:
            return Invalid("too_many", f"more than {rules.max_blocks} blocks, at most {rules.max_blocks}")
        tree.append(block)
        rest = rest[length:]
    return check_tree(tuple(tree), rules) or tuple(tree)


def _block(text: str) -> tuple[Block | None, int]:
    """Read the first block of a text, and its length in characters."""
    type_ = _TYPE_OF.get(text[0])
    length = 5 if type_ is not None and BLOCKS[type_].is_linear else 3
    places = [PARENTS.find(character) for character in text[1:length:2]]
    faces = [FACES.find(character) for character in text[2:length:2]]
    if type_ is None or len(text) < length or min(places + faces) < 0:
        return None, 0
    numbers = (number for end in zip(places, faces, strict=True) for number in end)
    return Block(type_, *numbers), length


def write_compact(tree: Tree) -> str:
    """Write a sound tree of at most 48 blocks as compact text.

    >>> write_compact((ROOT, Block(63, 0, 0), Block(2, 1, 1)))
    'Ba0Wb1'
    """
    return "".join(
        BLOCKS[block.type].character + "".join(PARENTS[parent] + FACES[face] for parent, face in ends(block))
        for block in tree
        if block.type != ROOT_TYPE
    )
