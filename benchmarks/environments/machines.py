"""Machines: how fast they are simulated, what the worst one costs, and what random and rule-based designs score.

    python -m benchmarks.environments.machines [--only speed|worst|baselines] [--machines N] [--seed N]

Target on two idle cores: 120 machines a second, building and placing included. Needs covey[machines].
"""

import argparse
import asyncio
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from covey.types import Failure
from covey_tasks.machines.design.blocks import BLOCKS, BOULDER, CAR_TYPES, CATAPULT_TYPES, CONTAINER
from covey_tasks.machines.design.demonstrations import make_designs
from covey_tasks.machines.design.growth import Builder, add_boulder, grow
from covey_tasks.machines.design.place import place
from covey_tasks.machines.design.types import ROOT, Block, Invalid, Rules, Tree
from covey_tasks.machines.physics.assembly import assemble
from covey_tasks.machines.physics.constants import PHYSICS, physics_version
from covey_tasks.machines.physics.simulate import outcome_of, standing
from covey_tasks.machines.physics.simulators import Simulators
from covey_tasks.machines.physics.trajectory import Outcome
from covey_tasks.machines.physics.worlds import World
from covey_tasks.machines.scores import SCORES, SHORT_NAMES
from covey_tasks.machines.settings import MachinesConfig

NUM_WARM_UP = 16
BLIND_SIZES = (3, 5, 8, 12, 16)
HARD = {
    "car blocks": CAR_TYPES,
    "catapult blocks": CATAPULT_TYPES,
    "all blocks but ball joints": frozenset(BLOCKS) - {44, 76},
    "springs": frozenset({0, 16}),
    "hinges and cubes": frozenset({0, 5, 15}),
    "rotating blocks and cubes": frozenset({0, 15, 22}),
    "wheels and cubes": frozenset({0, 2, 15}),
    "19 ball joints, other blocks": frozenset({0, 15, 41, 44}),
}
"""Block types of the machines that cost most."""
BALL, MAX_BALLS = 44, 19


def designs(task: str, count: int, family_share: float, seed: int) -> list[Tree]:
    """Different sound machines: random growth of at most 12 blocks, or rule-based families."""
    wanted = MachinesConfig(stages=[task], num_demonstrations=4 * count, family_share=family_share, problem_seed=seed)
    return list(dict.fromkeys(design.tree for design in make_designs(wanted)))[:count]


# ------------------------------------------------------------------------------------------------ speed


def speed(count: int, seed: int) -> None:
    """Machines a second from worker processes: half cars, half catapults, half random, half rule-based."""
    parts = [designs(task, count // 4, share, seed) for task in SHORT_NAMES for share in (0.0, 1.0)]
    trees = [tree for part in parts for tree in part]
    random.Random(seed).shuffle(trees)
    mean = statistics.mean(len(tree) for tree in trees)
    print(f"{len(trees)} different machines of {mean:.1f} blocks on average\n")
    print("| processes | machines/s |\n|---|---|")
    for num_workers in (1, 2):
        simulators = Simulators(num_workers, timeout=60.0)
        outcomes_in(simulators, trees[:NUM_WARM_UP], "catapult")
        started = time.perf_counter()
        outcomes_in(simulators, trees, "catapult")
        print(f"| {num_workers} | {len(trees) / (time.perf_counter() - started):.0f} |", flush=True)
        simulators.close()


# ------------------------------------------------------------------------------------------------ worst case


@dataclass(frozen=True, slots=True)
class Cost:
    """Of one machine, on one core."""

    milliseconds: float
    num_blocks: int
    num_bodies: int


def worst(count: int, seed: int) -> None:
    """The most expensive machines that the limits allow: 48 blocks, 64 degrees of freedom, 8 s."""
    generator = random.Random(seed)
    print("| made of | machines | mean ms | worst ms | its blocks | its bodies |\n|---|---|---|---|---|---|")
    for name, types in HARD.items():
        costs = [cost(large(generator, types)) for _ in range(count)]
        most = max(costs, key=lambda one: one.milliseconds)
        mean = statistics.mean(one.milliseconds for one in costs)
        shape = f"{most.num_blocks} | {most.num_bodies}"
        print(f"| {name} | {count} | {mean:.0f} | {most.milliseconds:.0f} | {shape} |", flush=True)


def large(generator: random.Random, types: frozenset[int]) -> Tree:
    """A random machine of 48 blocks, or as many as fit; as many ball joints as are allowed, and a boulder."""
    begun = grow(generator, Builder(Rules(frozenset({0, BALL}))), 1 + MAX_BALLS) if BALL in types else (ROOT,)
    builder = Builder(Rules(types - {BALL}), begun)
    if {CONTAINER, BOULDER} <= types:
        add_boulder(generator, builder)
    return grow(generator, builder, 48)


def cost(tree: Tree) -> Cost:
    """Time of the processor, which neighbours on the machine do not change much."""
    started = time.process_time()
    outcome_of(tree, "catapult")
    seconds = time.process_time() - started
    return Cost(seconds * 1e3, len(tree), len(assemble(standing(tree), PHYSICS).bodies))


# ------------------------------------------------------------------------------------------------ baselines


def baselines(count: int, seed: int) -> None:
    """What machines score that nobody learnt to build."""
    print("| blind trees of car blocks | " + " | ".join(f"{size} blocks" for size in BLIND_SIZES) + " |")
    print("|---|" + "---|" * len(BLIND_SIZES))
    shares = [blind_validity(random.Random(seed), size, 10 * count) for size in BLIND_SIZES]
    print("| valid | " + " | ".join(f"{share:.0%}" for share in shares) + " |\n")
    print("| task | designs | machines | score | mean | not 0 | median | 99 % | best |\n" + "|---" * 9 + "|")
    simulators = Simulators(timeout=60.0)
    for task, scores in SHORT_NAMES.items():
        for name, share in (("random", 0.0), ("rule-based", 1.0)):
            trees = designs(task, count, share, seed)
            outcomes = {world: outcomes_in(simulators, trees, world) for world in worlds(task)}
            for score in dict.fromkeys(scores.values()):
                rule = SCORES[score]
                values = [rule.of(outcome) for outcome in outcomes[rule.world]]
                print(f"| {task} | {name} | {len(trees)} | {score} | {summary(values)} |", flush=True)
    simulators.close()


def worlds(task: str) -> list[World]:
    return list(dict.fromkeys(SCORES[name].world for name in SHORT_NAMES[task].values()))


def outcomes_in(simulators: Simulators, trees: Sequence[Tree], world: World) -> list[Outcome]:
    """All asked for at once, as a group of rollouts is judged."""

    async def together() -> list[Outcome | Failure]:
        return list(await asyncio.gather(*[simulators.run(tree, world) for tree in trees]))

    found = asyncio.run(together())
    assert not any(isinstance(one, Failure) for one in found), found
    return [one for one in found if isinstance(one, Outcome)]


def summary(values: Sequence[float]) -> str:
    """Mean, share that is not 0, median, 99th percentile, largest."""
    marks = statistics.quantiles(values, n=100, method="inclusive")
    above = sum(value > 0 for value in values) / len(values)
    return f"{statistics.mean(values):.1f} | {above:.0%} | {marks[49]:.1f} | {marks[98]:.1f} | {max(values):.1f}"


def blind_validity(generator: random.Random, num_blocks: int, count: int) -> float:
    """Share of valid machines among trees whose types, parents and faces are drawn blindly."""
    rules = Rules(CAR_TYPES)
    types = sorted(type_ for type_ in CAR_TYPES - {0} if not BLOCKS[type_].is_linear)
    valid = 0
    for _ in range(count):
        tree = [ROOT]
        while len(tree) < num_blocks:
            parent = generator.randrange(len(tree))
            face = generator.randrange(len(BLOCKS[tree[parent].type].faces))
            tree.append(Block(generator.choice(types), parent, face))
        valid += not isinstance(place(tuple(tree), rules), Invalid)
    return valid / count


PARTS: dict[str, Callable[[int, int], None]] = {"speed": speed, "worst": worst, "baselines": baselines}
COUNTS = {"speed": 400, "worst": 20, "baselines": 400}


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.environments.machines", description=__doc__)
    parser.add_argument("--only", action="append", choices=PARTS, help="all, if none is named")
    parser.add_argument("--machines", type=int, help="how many of each kind")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args(argv)
    print(f"physics {physics_version()}")
    for name in arguments.only or PARTS:
        print(f"\n{name}\n")
        PARTS[name](arguments.machines or COUNTS[name], arguments.seed)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
