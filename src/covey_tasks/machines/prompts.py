"""What the policy is told, in words or in a few characters for the nano policy, and what demonstrations say."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from covey.environments.base import Split, conversation
from covey.environments.math.answers import without_thoughts
from covey.types import Message, Prompt
from covey_tasks.machines.design.blocks import BLOCKS, BOULDER, CONTAINER, BlockType
from covey_tasks.machines.design.compact import read_compact, write_compact
from covey_tasks.machines.design.facing import FACINGS
from covey_tasks.machines.design.global_form import read_global, write_global
from covey_tasks.machines.design.place import place_blocks
from covey_tasks.machines.design.stages import STAGES, Problem
from covey_tasks.machines.design.tree import read_machine, write_json
from covey_tasks.machines.design.types import Facing, Invalid, PlacedBlock, Rules, Side, Tree

ENVIRONMENT = "machines"


@dataclass(frozen=True, slots=True)
class Form:
    """How a machine is written."""

    read: Callable[[str, Rules], Tree | Invalid]
    write: Callable[[Tree], str]
    output: str
    """What the prompt says about it; empty for the compact form, whose prompts are a few characters."""


def make_prompt(split: Split, index: int, problem: Problem, form: str, score: str, instruction: str | None) -> Prompt:
    """Put a problem to the policy. `score` is the full name of the rule that judges."""
    columns = {"problem": problem, "stage": problem.stage, "budget": problem.budget}
    return Prompt(f"{split}-{index}", ENVIRONMENT, _text(problem, form, score, instruction), columns)


def _text(problem: Problem, form: str, score: str, instruction: str | None) -> str | tuple[Message, ...]:
    # The short form for tiny models
    if form == "compact":
        return f"{problem.words or problem.stage} {problem.budget}:{write_compact(problem.given)}"
    # The task in words
    system = instruction_of(problem.rules, form) if instruction is None else instruction
    goal = VALID_GOAL if STAGES[problem.stage].pays_validity else GOALS[score]
    parts = [problem.words or goal, f"Use at most {problem.budget} blocks, the starting block among them."]
    # A machine that is begun must be continued
    if STAGES[problem.stage].is_begun:
        parts.append(
            f"Begin with exactly these blocks and add others:\n```json\n{FORMS[form].write(problem.given)}\n```"
        )
    return conversation("\n".join(parts), system)


def read_answer(completion: str, problem: Problem, form: str) -> Tree | Invalid:
    """Return the tree a completion stands for, less its thoughts. The compact form goes on from the prompt."""
    if form == "compact":
        return read_compact(write_compact(problem.given) + completion.strip(), problem.rules)
    return FORMS[form].read(without_thoughts(completion), problem.rules)


def write_answer(tree: Tree, problem: Problem, form: str) -> str:
    """Write a completion that stands for this tree, with a word about each block where the form has room for it."""
    if form == "compact":
        return write_compact(tree)[len(write_compact(problem.given)) :]
    return f"{explanation(tree, STAGES[problem.stage].task)}\n```json\n{FORMS[form].write(tree)}\n```"


# ------------------------------------------------------------------------------------------------ for language models


def instruction_of(rules: Rules, form: str) -> str:
    """Describe how machines are built, from which blocks, and how they are written."""
    # Blocks that are allowed
    solid = [BLOCKS[type_] for type_ in BLOCKS if type_ in rules.types and not BLOCKS[type_].is_linear]
    linear = [BLOCKS[type_] for type_ in BLOCKS if type_ in rules.types and BLOCKS[type_].is_linear]
    limits = " x ".join(f"{length:g}" for length in rules.size_limit)
    # Rules, facings, blocks, and the form of the answer
    lines = [
        BUILDING.format(max_linear=rules.max_linear, limits=limits),
        "\nFacings (facing of the parent: world direction of its faces)",
        *(f"{facing}: {_named(sides.items())}" for facing, sides in FACINGS.items()),
        "\nBlocks (type, name, size, mass; faces in the middle of the block's sides, at this z from its origin)",
        *(_block_line(block) for block in solid),
        *(f"{block.type} {block.name}, linear, {block.mass:g} kg: {block.does}" for block in linear),
        "\nAnswer",
        FORMS[form].output,
    ]
    return "\n".join(lines)


def _block_line(block: BlockType) -> str:
    size = "x".join(f"{length:g}" for length in block.size)
    does = f"; {block.does}" if block.does else ""
    return f"{block.type} {block.name}, {size}, {block.mass:g} kg{does}; {_faces(block)}"


def _faces(block: BlockType) -> str:
    """Return its faces by side: "0 Front z 2. 1, 2 Left z 0.5, 1.5"."""
    if not block.faces:
        return "no faces"
    sides: dict[Side, list[int]] = {}
    for number, face in enumerate(block.faces):
        sides.setdefault(face.side, []).append(number)
    return "; ".join(
        f"{', '.join(map(str, numbers))} {side} z {', '.join(f'{block.faces[n].point[2]:g}' for n in numbers)}"
        for side, numbers in sides.items()
    )


def _named(pairs: Iterable[tuple[str, str]]) -> str:
    return ", ".join(f"{name} {direction}" for name, direction in pairs)


def explanation(tree: Tree, task: str) -> str:
    """Write a sentence about the machine and half a line about each block."""
    lines = [f"A {task} of {len(tree)} blocks, built in this order."]
    placed = place_blocks(tree)
    for index, block in enumerate(placed[1:], start=1):
        lines.append(f"{index}: {_described(block, tree)}")
    return "\n".join(lines)


def _described(placed: PlacedBlock, tree: Tree) -> str:
    block, of = placed.block, BLOCKS[placed.block.type]
    if block.parent_b is not None:
        return f"{of.name} from block {block.parent} to block {block.parent_b}: {of.does}."
    parent = BLOCKS[tree[block.parent].type]
    note = _note(placed)
    where = f"{of.name} on face {block.face} ({parent.faces[block.face].side}) of block {block.parent}"
    return f"{where}, faces {placed.facing}{': ' if note else ''}{note}."


def _note(placed: PlacedBlock) -> str:
    of = BLOCKS[placed.block.type]
    if of.kind == "wheel" and of.powered:
        towards = DRIVES[placed.facing]
        return f"drives to {towards}" if towards else "drives nowhere"
    if of.type == CONTAINER:
        return "a bowl for the boulder" if placed.facing == "y+" else "holds nothing this way"
    return "lies where it is put" if of.type == BOULDER else of.does


DRIVES: dict[Facing, Facing | None] = {"x-": "z+", "x+": "z+", "z+": "x-", "z-": "x+", "y+": None, "y-": None}
"""Where a powered wheel of this facing drives to."""

BUILDING = """You design machines out of blocks. Lengths are metres; the world has x to the right, y up, z forward.

Rules
- A machine is a tree. The starting block is the root; every other block sits on one face of an earlier block.
- A new block's origin is the point of that face, and its Front looks the way the face looks in the world. Blocks cannot
  be turned, scaled or moved in any other way. Seen from the origin, Right is the block's x, Up its y, Front its z.
- A face carries at most one block. Blocks may touch but not overlap; only the boulder may lie in a container's box.
- Linear blocks run between two faces, take no room and may use faces that are taken; at most {max_linear} of them.
- The whole machine must fit into {limits} (x, y, z). It is then put down on the ground.
- After 0.5 s all motors run and rubber bands pull, until the end. Nothing can be switched or released, nothing breaks.
- Powered wheels that face x- or x+ drive to z+; those that face z+ drive to x-, z- to x+, all others nowhere."""

TREE_OUTPUT = """Say in a few sentences what you build, then give one fenced block:
```json
[{"type":0,"id":0,"parent":-1,"face_id":-1},
{"type":T,"id":1,"parent":0,"face_id":F}]
```
One object for each block, in the order of building: id is its position in the list, parent the id of the block it sits
on, face_id the number of that block's face. A linear block is
{"type":T,"id":I,"parent_a":A,"face_id_a":F,"parent_b":B,"face_id_b":G}. The last fenced block counts."""

GLOBAL_OUTPUT = """Say in a few sentences what you build, then give one fenced block:
```json
[{"type":0,"Position":[0,0,0],"Rotation":[0,0,0,1]},
{"type":T,"Position":[X,Y,Z],"Rotation":[QX,QY,QZ,QW]}]
```
One object for each block, the starting block first: where its origin is, seen from the starting block's centre, and the
quaternion that turns z+ to its facing. A linear block also has "end-position":[X,Y,Z], its second end seen from its
first. Origins must be faces of earlier blocks. The last fenced block counts."""

VALID_GOAL = "Build any machine of at least three blocks that keeps all the rules."
_CATAPULT = "Build a catapult with exactly one boulder (type 36). The boulder must come"
GOALS = {
    "car_paper": "Build a car. Its score is how far forward (z+), in metres, the starting block is after 5 seconds.",
    "car_repo": "Build a car. Its score is how far in any direction, in metres, the starting block is after 5 seconds.",
    "catapult_paper": f"{_CATAPULT} higher than 3 m. The score is its largest height times the distance forward (z+) "
    "to where it first lands. A fence 1.5 m high stands 11 m away on all sides.",
    "catapult_repo": f"{_CATAPULT} up to 3 m and land away from the machine. The score is one plus its rise, times the "
    "distance forward (z+) to where it first lands.",
    "catapult_strict": f"{_CATAPULT} up to 3 m, rise at least 1 m above where it lay, and land away from the machine. "
    "When the machine lets go, it must stand on the ground, its centre of mass within 1.5 m of where it was at first; "
    "until the boulder lands, that may rise by 2 m at most. The score is the boulder's rise times the distance forward "
    "(z+) to where it first lands, less what the machine's own motion gives. A fence 1.5 m high stands 11 m away on "
    "all sides.",
}
"""By the full name of the score."""

FORMS = {
    "tree": Form(read_machine, write_json, TREE_OUTPUT),
    "global": Form(read_global, write_global, GLOBAL_OUTPUT),
    "compact": Form(read_compact, write_compact, ""),
}
