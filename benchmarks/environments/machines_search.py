"""Evolution of machines under a score: what does search find that nobody meant?

    python -m benchmarks.environments.machines_search [--score catapult_strict] [--seconds N] [--seed N]
        [--from random|rules]

Prints the best machine in its compact form, and what it does: does it throw? docs/tasks/machines.md says what that
is, and what was found. Needs covey[machines].
"""

import argparse
import random
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from covey_tasks.machines.design.blocks import BLOCKS, BOULDER, CATAPULT_TYPES, ROOT_TYPE
from covey_tasks.machines.design.compact import write_compact
from covey_tasks.machines.design.demonstrations import make_designs
from covey_tasks.machines.design.growth import Builder, add_boulder, grow
from covey_tasks.machines.design.place import place
from covey_tasks.machines.design.tree import canonical, check_tree
from covey_tasks.machines.design.types import Block, Invalid, Rules, Tree
from covey_tasks.machines.physics.constants import physics_version
from covey_tasks.machines.physics.simulate import outcome_of
from covey_tasks.machines.physics.trajectory import Outcome
from covey_tasks.machines.scores import SCORES, Score
from covey_tasks.machines.settings import MachinesConfig

RULES = Rules(CATAPULT_TYPES, needs_boulder=True)
SOLID = sorted(kind for kind in CATAPULT_TYPES - {ROOT_TYPE, BOULDER} if not BLOCKS[kind].is_linear)
ANY = sorted(CATAPULT_TYPES - {ROOT_TYPE, BOULDER})
NUM_KEPT, NUM_CHILDREN, NUM_TRIES = 30, 30, 40


@dataclass
class Search:
    """The best machines so far, each simulated once."""

    rule: Score
    generator: random.Random
    worth: dict[Tree, tuple[float, float]] = field(default_factory=dict)

    def step(self, machines: Sequence[Tree]) -> list[Tree]:
        """Keep the best and add changed ones."""
        kept = self.ranked(machines)[:NUM_KEPT]
        pools = [kept[: self.generator.choice((3, 10, NUM_KEPT))] for _ in range(NUM_CHILDREN)]
        return kept + [changed(self.generator, self.generator.choice(pool)) for pool in pools]

    def ranked(self, machines: Sequence[Tree]) -> list[Tree]:
        """Best first, each once."""
        return sorted(dict.fromkeys(machines), key=self.value, reverse=True)

    def value(self, tree: Tree) -> tuple[float, float]:
        """The score, and what tells machines without one apart."""
        if tree not in self.worth:
            outcome = outcome_of(tree, self.rule.world)
            self.worth[tree] = self.rule.of(outcome), nearly(outcome)
        return self.worth[tree]


def nearly(outcome: Outcome) -> float:
    """How near a machine is to a throw."""
    if outcome.flight is None:
        return 0.0
    throw = outcome.flight.throw
    rise = outcome.flight.max_height - outcome.flight.start_height
    return rise if throw is None else rise + throw.rise + throw.distance


def changed(generator: random.Random, tree: Tree) -> Tree:
    """Another valid machine; the same where none was found."""
    for _ in range(NUM_TRIES):
        made = tree
        for _ in range(generator.choice((1, 1, 2, 3))):
            made = generator.choice((without_block, with_block, with_block, with_other_type))(generator, made)
            if check_tree(made, replace(RULES, needs_boulder=False)) is not None:
                break
        found = sound(generator, made)
        if found is not None and found != tree:
            return found
    return tree


def sound(generator: random.Random, tree: Tree) -> Tree | None:
    """The machine with a boulder, if it fits into space."""
    if check_tree(tree, replace(RULES, needs_boulder=False)) is not None:
        return None
    if all(block.type != BOULDER for block in tree) and not isinstance(
        place(tree, replace(RULES, needs_boulder=False)), Invalid
    ):
        builder = Builder(RULES, tree)
        add_boulder(generator, builder)
        tree = builder.tree
    if check_tree(tree, RULES) is not None or isinstance(place(tree, RULES), Invalid):
        return None
    return canonical(tree)


def without_block(generator: random.Random, tree: Tree) -> Tree:
    """Less one block and what sits on it."""
    if len(tree) < 4:
        return tree
    gone = {generator.randrange(1, len(tree))}
    for index, block in enumerate(tree):
        gone |= {index} if gone & {block.parent, block.parent_b} else set()
    kept = [index for index in range(len(tree)) if index not in gone]
    number = {old: new for new, old in enumerate(kept)} | {-1: -1}
    return tuple(
        replace(
            tree[old],
            parent=number[tree[old].parent],
            parent_b=None if tree[old].parent_b is None else number[tree[old].parent_b or 0],
        )
        for old in kept
    )


def with_block(generator: random.Random, tree: Tree) -> Tree:
    """One more block, where it fits."""
    if isinstance(place(tree, replace(RULES, needs_boulder=False)), Invalid):
        return tree
    builder = Builder(RULES, tree)
    free, kind = builder.free_faces(), generator.choice(ANY)
    if not free:
        return tree
    if BLOCKS[kind].is_linear:
        builder.join(kind, generator.choice(free), generator.choice(free))
    else:
        builder.add(kind, *generator.choice(free))
    return builder.tree


def with_other_type(generator: random.Random, tree: Tree) -> Tree:
    """One block replaced by another on the same face."""
    index = generator.randrange(1, len(tree)) if len(tree) > 1 else 0
    if index == 0 or tree[index].type == BOULDER or BLOCKS[tree[index].type].is_linear:
        return tree
    other = Block(generator.choice(SOLID), tree[index].parent, tree[index].face)
    return (*tree[:index], other, *tree[index + 1 :])


def random_machine(generator: random.Random) -> Tree:
    """Grown at random, with a boulder in a container."""
    while True:
        builder = Builder(RULES)
        grow(generator, builder, generator.randint(3, 14))
        tree = sound(generator, builder.tree)
        if tree is not None:
            return tree


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.environments.machines_search", description=__doc__)
    parser.add_argument("--score", choices=[name for name in SCORES if name.startswith("catapult")])
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--from", dest="start", choices=("random", "rules"), default="random")
    asked = parser.parse_args(argv)
    generator = random.Random(asked.seed)
    search = Search(SCORES[asked.score or "catapult_strict"], generator)
    if asked.start == "rules":
        wanted = MachinesConfig(stages=["catapult"], num_demonstrations=120, family_share=1.0, problem_seed=asked.seed)
        machines = [design.tree for design in make_designs(wanted)]
    else:
        machines = [random_machine(generator) for _ in range(60)]
    began = time.monotonic()
    while time.monotonic() - began < asked.seconds:
        machines = search.step(machines)
    best = search.ranked(machines)[0]
    print(f"physics {physics_version()}, {len(search.worth)} machines simulated")
    print(f"{search.rule.name} {search.value(best)[0]:.1f}: {write_compact(best)}")
    print(outcome_of(best, search.rule.world).flight)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
