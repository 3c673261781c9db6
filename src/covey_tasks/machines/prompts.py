"""Prompts and answers about machines, in words or few characters."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from covey.environments.base import Split, conversation
from covey.system.lookup import read_table
from covey.types import Message, Prompt
from covey_graders.tags import without_thoughts
from covey_tasks.machines.design.blocks import BLOCKS, BOULDER, CONTAINER, BlockType
from covey_tasks.machines.design.compact import read_compact, write_compact
from covey_tasks.machines.design.facing import FACINGS
from covey_tasks.machines.design.global_form import read_global, write_global
from covey_tasks.machines.design.place import place_blocks
from covey_tasks.machines.design.stages import STAGES, Problem
from covey_tasks.machines.design.tree import read_machine, write_json
from covey_tasks.machines.design.types import Invalid, PlacedBlock, Rules, Side, Tree

ENVIRONMENT = "machines"
WORDS = read_table(Path(__file__).with_suffix(".yaml"))


@dataclass(frozen=True, slots=True)
class Form:
    """Written form of a machine."""

    read: Callable[[str, Rules], Tree | Invalid]
    write: Callable[[Tree], str]


def make_prompt(split: Split, index: int, problem: Problem, form: str, score: str, instruction: str | None) -> Prompt:
    columns = {"problem": problem, "stage": problem.stage, "budget": problem.budget}
    return Prompt(f"{split}-{index}", ENVIRONMENT, _text(problem, form, score, instruction), columns)


def _text(problem: Problem, form: str, score: str, instruction: str | None) -> str | tuple[Message, ...]:
    if form == "compact":
        return f"{problem.words or problem.stage} {problem.budget}:{write_compact(problem.given)}"
    system = instruction_of(problem.rules, form) if instruction is None else instruction
    goal = WORDS["valid"] if STAGES[problem.stage].pays_validity else WORDS["goals"][score]
    parts = [problem.words or goal, f"Use at most {problem.budget} blocks, the starting block among them."]
    if STAGES[problem.stage].is_begun:
        parts.append(
            f"Begin with exactly these blocks and add others:\n```json\n{FORMS[form].write(problem.given)}\n```"
        )
    return conversation("\n".join(parts), system)


def read_answer(completion: str, problem: Problem, form: str) -> Tree | Invalid:
    """Read the tree of a completion. The compact form continues the prompt."""
    if form == "compact":
        return read_compact(write_compact(problem.given) + completion.strip(), problem.rules)
    return FORMS[form].read(without_thoughts(completion), problem.rules)


def write_answer(tree: Tree, problem: Problem, form: str) -> str:
    """Write a completion, with a word about each block if room."""
    if form == "compact":
        return write_compact(tree)[len(write_compact(problem.given)) :]
    return f"{explanation(tree, STAGES[problem.stage].task)}\n```json\n{FORMS[form].write(tree)}\n```"


def instruction_of(rules: Rules, form: str) -> str:
    solid = [BLOCKS[type_] for type_ in BLOCKS if type_ in rules.types and not BLOCKS[type_].is_linear]
    linear = [BLOCKS[type_] for type_ in BLOCKS if type_ in rules.types and BLOCKS[type_].is_linear]
    limits = " x ".join(f"{length:g}" for length in rules.size_limit)
    lines = [
        WORDS["building"].format(max_linear=rules.max_linear, limits=limits),
        "\nFacings (facing of the parent: world direction of its faces)",
        *(f"{facing}: " + ", ".join(map(" ".join, sides.items())) for facing, sides in FACINGS.items()),
        "\nBlocks (type, name, size, mass; faces in the middle of the block's sides, at this z from its origin)",
        *(_block_line(block) for block in solid),
        *(f"{block.type} {block.name}, linear, {block.mass:g} kg: {block.does}" for block in linear),
        "\nAnswer",
        WORDS[form],
    ]
    return "\n".join(lines)


def _block_line(block: BlockType) -> str:
    size = "x".join(f"{length:g}" for length in block.size)
    does = f"; {block.does}" if block.does else ""
    return f"{block.type} {block.name}, {size}, {block.mass:g} kg{does}; {_faces(block)}"


def _faces(block: BlockType) -> str:
    if not block.faces:
        return "no faces"
    sides: dict[Side, list[int]] = {}
    for number, face in enumerate(block.faces):
        sides.setdefault(face.side, []).append(number)
    return "; ".join(
        f"{', '.join(map(str, numbers))} {side} z {', '.join(f'{block.faces[n].point[2]:g}' for n in numbers)}"
        for side, numbers in sides.items()
    )


def explanation(tree: Tree, task: str) -> str:
    placed = enumerate(place_blocks(tree)[1:], start=1)
    lines = [f"{index}: {_describe(block, tree)}" for index, block in placed]
    return "\n".join([f"A {task} of {len(tree)} blocks, built in this order.", *lines])


def _describe(placed: PlacedBlock, tree: Tree) -> str:
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
        return f"drives {DRIVES[placed.facing]}"
    if of.type == CONTAINER:
        return "a bowl for the boulder" if placed.facing == "y+" else "holds nothing this way"
    return "lies where it is put" if of.type == BOULDER else of.does


DRIVES = {"x-": "to z+", "x+": "to z+", "z+": "to x-", "z-": "to x+", "y+": "nowhere", "y-": "nowhere"}
"""Direction in which a powered wheel of this facing drives."""

FORMS = {
    "tree": Form(read_machine, write_json),
    "global": Form(read_global, write_global),
    "compact": Form(read_compact, write_compact),
}
