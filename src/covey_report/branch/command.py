"""`covey branch RUN --at STEP key=value ...`: train children in pairs."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path

from covey.cli.flags import split_flags
from covey.system import ranks
from covey.system.text.console import CleanConsole
from covey.system.text.format import number_of
from covey_report.branch.make import BranchAsked, branch, check_arms
from covey_report.branch.paired import over_runs, pair, spell
from covey_report.compare import comparison
from covey_report.logs.read import read_run
from covey_report.runs.folders import refuse_flags, run_folder_of
from covey_report.runs.tables import relative

FLAGS = {"--at": "a step", "--steps": "a number", "--out": "a folder"}
NEXT = "--"
"""Word between the settings of two children."""
TRUST = "trust_run=true"


def run_branch(words: Sequence[str]) -> None:
    """Train children of a checkpoint beside its parent. ValueError."""
    asked = read_words(words)
    check_arms(asked.arms)
    if ranks.world_size() > 1:
        raise ValueError("covey branch trains in one process: leave the launcher out")
    made = [branch(asked, run) for run in asked.runs]
    say = partial(CleanConsole().print, soft_wrap=True)
    rewards: list[list[float]] = [[] for _ in asked.arms]
    for folders, _ in made:
        runs = [read_run(folder) for folder in folders]
        names = [folder.name for folder in folders]
        say(f"branches of step {asked.at}: {', '.join(map(relative, folders))}")
        for place, other in enumerate(runs[1:]):
            (gain,) = comparison([runs[0], other], [names[0], names[place + 1]])["gains"]
            for line in gain["lines"]:
                say(f"  {line}")
            if (found := pair(runs[0], other)) is not None:
                rewards[place].append(found.difference.value)
    for words_of, values in zip(asked.arms, rewards, strict=True):
        if len(values) > 1:
            say(f"{' '.join(words_of)} over {number_of(len(values), 'parent')}: mean reward {spell(over_runs(values))}")
    folders = made[0][0]
    say(f"covey report {' '.join(map(relative, folders))} draws them; covey train resume=FOLDER trains one on")


def read_words(words: Sequence[str]) -> BranchAsked:
    """Return runs, step and the settings of each child. ValueError."""
    parts: list[list[str]] = [[]]
    for word in words:
        if word == NEXT:
            parts.append([])
        else:
            parts[-1].append(word)
    first, flags = split_flags([word for word in parts[0] if word != TRUST], FLAGS, ())
    for part in parts[1:]:
        others, more = split_flags([word for word in part if word != TRUST], FLAGS, ())
        part[:], flags = others, flags | more
        refuse_flags(others, tuple(FLAGS))
    refuse_flags(first, tuple(FLAGS))
    runs = [word for word in first if "=" not in word]
    arms = [tuple(word for word in part if "=" in word) for part in (first, *parts[1:])]
    stray = [word for part in parts[1:] for word in part if "=" not in word]
    if not all(arms) or "--at" not in flags or stray:
        raise ValueError(
            "covey branch needs a run, --at STEP and the settings of each child, such as covey branch "
            "outputs/DATE/TIME --at 100 optimizer.lr=1e-5 -- optimizer.lr=3e-6"
        )
    numbers = {name: flags[name] for name in ("--at", "--steps") if name in flags}
    for name, value in numbers.items():
        if not value.isdecimal() or int(value) == 0:
            raise ValueError(f"{name} must be a whole number above 0, got {value}")
    return BranchAsked(
        tuple(run_folder_of("branch", [run]) for run in runs) or (run_folder_of("branch", []),),
        int(numbers["--at"]),
        int(numbers["--steps"]) if "--steps" in numbers else None,
        tuple(arms),
        Path(flags["--out"]) if "--out" in flags else None,
        TRUST in words,
    )
