"""`covey machines`: show or simulate a machine, or list a run's best."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from covey.run.folder import ROLLOUTS
from covey.system.jsonl import read_rows
from covey.system.lookup import one_of
from covey_graders.tags import without_thoughts
from covey_report.runs.folders import read_flags
from covey_tasks.machines.design.blocks import BLOCKS
from covey_tasks.machines.design.compact import read_compact
from covey_tasks.machines.design.global_form import read_global
from covey_tasks.machines.design.place import place
from covey_tasks.machines.design.tree import canonical, num_boulders, read_machine
from covey_tasks.machines.design.types import Invalid, Machine, Rules, Tree
from covey_tasks.machines.physics.constants import physics_version
from covey_tasks.machines.physics.throwing import Throw
from covey_tasks.machines.physics.trajectory import ENDINGS, Outcome
from covey_tasks.machines.physics.worlds import World
from covey_tasks.machines.scores import SCORES, SHORT_NAMES


@dataclass(frozen=True, slots=True)
class Arguments:
    """A command line: verb, objects and flags."""

    action: str
    path: Path
    flags: dict[str, str]

    def output(self, flag: str, suffix: str, default: Path) -> Path:
        path = Path(self.flags.get(flag, default))
        if path.suffix != suffix:
            raise ValueError(f"{flag} must be a {suffix} file, got {path}")
        return path


def run_command(words: Sequence[str]) -> None:
    """Show, simulate or list machines. ValueError for wrong words."""
    plain, flags = read_flags(words, dict.fromkeys(FLAGS, "a value"))
    if len(plain) != 2:
        raise ValueError(f"covey machines needs what to do ({', '.join(ACTIONS)}) and a file, got {len(plain)} words")
    asked = Arguments(one_of("covey machines", plain[0], ACTIONS), Path(plain[1]), flags)
    idle = sorted(set(flags) - FLAGS_OF[asked.action])
    if idle:
        raise ValueError(f"covey machines {asked.action} does not read {', '.join(idle)}")
    ACTIONS[asked.action](asked)


def read_file(path: Path) -> Tree:
    """Read a machine in canonical order: plain JSON, or a fenced block."""
    if not path.is_file():
        raise ValueError(f"no file {path}; it must hold a machine as JSON (docs/tasks/machines.md has one)")
    tree = read_tree(path.read_text(encoding="utf-8"))
    machine = tree if isinstance(tree, Invalid) else place(canonical(tree), ANY_BLOCK)
    if isinstance(machine, Invalid):
        raise ValueError(f"{path}: {machine.message} ({machine.code})")
    return machine.tree


def _placed(tree: Tree) -> Machine:
    machine = place(tree, ANY_BLOCK)
    assert not isinstance(machine, Invalid), machine
    return machine


def _show(asked: Arguments) -> None:
    from covey_report.machines.drawing import draw_machine

    machine = _placed(read_file(asked.path))
    picture = asked.output("--out", ".png", asked.path.with_suffix(".png"))
    print(describe(machine))
    draw_machine(machine, picture, asked.path.stem)
    print(f"picture: {picture}")


def _simulate(asked: Arguments) -> None:
    """Simulate, print scores under every rule, and draw the way."""
    from covey_tasks.machines.physics.simulate import outcome

    machine = _placed(read_file(asked.path))
    guess = "catapult" if num_boulders(machine.tree) else "car"
    task = one_of("--task", asked.flags.get("--task", guess), SHORT_NAMES)
    picture = asked.output("--out", ".png", asked.path.with_suffix(".run.png"))
    film = asked.output("--film", ".gif", asked.path.with_suffix(".gif")) if "--film" in asked.flags else None
    print(describe(machine))
    scores = {name: SCORES[full] for name, full in SHORT_NAMES[task].items()}
    outcomes: dict[World, Outcome] = {
        world: outcome(machine, world) for world in sorted({score.world for score in scores.values()})
    }
    world = scores["strict"].world
    print(story(outcomes[world]))
    print("  ".join(f"{name} {score.of(outcomes[score.world]):.2f}" for name, score in scores.items()))
    print(f"physics {physics_version()}")
    _draw_run(machine, world, asked.path.stem, (picture, film))


def _gallery(asked: Arguments) -> None:
    from covey_report.machines.drawing import GalleryItem, draw_gallery

    count = asked.flags.get("--best", "12")
    if not count.isdecimal() or not 1 <= int(count) <= MOST_SHOWN:
        raise ValueError(f"--best must be a number from 1 to {MOST_SHOWN}, got {count}")
    picture = asked.output("--out", ".png", asked.path / "machines.png")
    film = asked.output("--film", ".gif", asked.path / "machines.gif") if "--film" in asked.flags else None
    found = best_of_run(asked.path, int(count))
    items = [GalleryItem(_placed(one.tree), f"{one.score:.1f} (step {one.step})") for one in found]
    draw_gallery(items, picture, f"best machines of {asked.path}")
    print(f"picture: {picture}")
    if film is not None:
        machine = items[0].machine
        world: World = "catapult" if num_boulders(machine.tree) else "car"
        _draw_run(machine, world, items[0].caption, (None, film))


def _draw_run(machine: Machine, world: World, title: str, files: tuple[Path | None, Path | None]) -> None:
    from covey_report.machines.drawing import draw_film, draw_recording
    from covey_tasks.machines.physics.simulate import record

    recording = record(machine, world)  # once for both
    picture, film = files
    if picture is not None:
        draw_recording(recording, picture, title)
        print(f"picture: {picture}")
    if film is not None:
        draw_film(recording, film, title)
        print(f"film: {film}")


def describe(machine: Machine) -> str:
    """Return size and mass, and blocks by kind.

    >>> print(describe(car))
    7 blocks, 6.2 kg, 2 x 2 x 8 m: 4 Powered Wheel, 2 Log, 1 Starting Block
    """
    kinds = Counter(BLOCKS[block.type].name for block in machine.tree)
    mass = sum(BLOCKS[block.type].mass for block in machine.tree)
    size = " x ".join(f"{length:g}" for length in machine.size)
    listed = ", ".join(f"{number} {name}" for name, number in kinds.most_common())
    return f"{len(machine.tree)} blocks, {mass:.4g} kg, {size} m: {listed}"


def story(outcome: Outcome) -> str:
    if outcome.ending != "complete":
        return ENDINGS[outcome.ending]
    header = ["time", "root x", "y", "z"] + (["boulder x", "y", "z"] if outcome.flight else [])
    lines = ["".join(f"{word:>10}" for word in header)]
    lines += ["".join(f"{number:10.2f}" for number in sample) for sample in outcome.samples]
    lines.append(f"the starting block moved {outcome.forward:.2f} m forward, {outcome.sideways:.2f} m to the right")
    flight = outcome.flight
    if flight is not None:
        ending = "landed" if flight.has_landed else "did not land, and was"
        heights = f"rose from {flight.start_height:.2f} to {flight.max_height:.2f} m"
        lines.append(f"the boulder {heights} and {ending} {flight.distance:.2f} m forward")
        lines.append(f"the starting block rose by {flight.lift:.2f} m meanwhile")
        lines += [] if flight.throw is None else [_said_of(flight.throw)]
    return "\n".join(lines)


def _said_of(throw: Throw) -> str:
    stands = "standing" if throw.on_ground else "off the ground"
    own = f"it had moved by {throw.own_way:.2f} m, rose by {throw.own_lift:.2f} m"
    counts = f"{throw.rise:.2f} m up and {throw.distance:.2f} m forward count"
    return f"the machine, {stands}, let go of it after {throw.time:.2f} s; {own}; {counts}"


MOST_SHOWN = 48
ACTIONS: dict[str, Callable[[Arguments], None]] = {"show": _show, "simulate": _simulate, "gallery": _gallery}
FLAGS_OF = {"show": {"--out"}, "simulate": {"--out", "--task", "--film"}, "gallery": {"--out", "--best", "--film"}}
FLAGS = ("--out", "--task", "--film", "--best")


ANY_BLOCK = Rules(frozenset(BLOCKS))


@dataclass(frozen=True, slots=True)
class ScoredMachine:
    """A machine of a run."""

    tree: Tree
    """Tree in its canonical order."""
    score: float
    step: int
    """Step at which it was first written."""


def best_of_run(folder: Path, count: int) -> list[ScoredMachine]:
    """Find the machines with the highest scores, each once. ValueError without any."""
    file = folder / ROLLOUTS
    if not file.is_file():
        raise ValueError(f"no {ROLLOUTS} in {folder}; covey train writes one")
    # Keep the first row of each machine: scores of equal machines are equal
    found: dict[Tree, ScoredMachine] = {}
    for row in read_rows(file):
        tree = tree_of_row(row)
        if isinstance(tree, Invalid) or not row["parts"].get("score"):
            continue
        one = ScoredMachine(canonical(tree), row["parts"]["score"], row["step"])
        found.setdefault(one.tree, one)
    if not found:
        raise ValueError(f"no machine with a score in {file}")
    return sorted(found.values(), key=lambda one: -one.score)[:count]


def tree_of_row(row: Mapping[str, Any]) -> Tree | Invalid:
    """Read a rollout's machine: compact prompts are text, others messages."""
    prompt, completion = row["prompt"], row["completion"]
    if isinstance(prompt, str):
        given = prompt.rpartition(" ")[2].partition(":")[2]  # the task's own words may hold a colon, and so do faces
        return read_compact(given + completion.strip(), ANY_BLOCK)
    return read_tree(without_thoughts(completion))


def read_tree(text: str) -> Tree | Invalid:
    tree = read_machine(text, ANY_BLOCK)
    return read_global(text, ANY_BLOCK) if isinstance(tree, Invalid) and '"Position"' in text else tree
