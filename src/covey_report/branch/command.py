"""`covey branch RUN --at STEP key=value ...`: train children in pairs."""

import json
import os
import re
import shutil
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from covey.config import compose as settings
from covey.config.schema import Config
from covey.loop import train
from covey.policy.models.adapters import BASE
from covey.run import trust
from covey.run.checkpoints.checkpoint import complete_checkpoints, problem
from covey.run.checkpoints.manifest import MANIFEST, digest_of_file, folder_name, step_of
from covey.run.checkpoints.saved_settings import is_named, parse_words, settings_of
from covey.run.folder import CHANGES, CONFIG, ROWS, begin_log, changes_of
from covey.run.given import RunObjects
from covey.run.records.callbacks import Callback, StopTraining
from covey.system import ranks
from covey.system.jsonl import write_json
from covey.system.text.console import CleanConsole
from covey.system.text.format import number_of, relative
from covey_report.branch.paired import FACTS, over_runs, pair, spell
from covey_report.compare import comparison
from covey_report.logs.read import read_run
from covey_report.runs.folders import read_flags, run_folder_of, whole_number

PARENT = "parent"
"""Name of the child with the parent's own settings."""
UNPAIRED = {
    **dict.fromkeys(("seed", "shuffle", "data", "curriculum", "groups_per_step"), "other prompts would be drawn"),
    **dict.fromkeys(("environment", "rewards", "reward_weights", "evaluation"), "it would be measured otherwise"),
    **dict.fromkeys(("model", "cold_start"), "the weights are those of the checkpoint"),
    **dict.fromkeys(("source", "devices", "engine", "streaming", "max_staleness"), "tokens would depend on the clock"),
    **dict.fromkeys(("num_steps", "num_epochs", "total_rollouts"), "--steps says how many are trained"),
}
"""Settings, or sections of them, that a child cannot change, with the reason."""


@dataclass(frozen=True, slots=True)
class BranchAsked:
    """The words of a branch."""

    runs: tuple[Path, ...]
    at: int
    steps: int | None
    arms: tuple[tuple[str, ...], ...]
    """Settings of each child."""
    out: Path | None
    is_trusted: bool = False


class StopAfter(Callback):
    """Ends a run after a step."""

    def __init__(self, last: int) -> None:
        self._last = last

    def on_step(self, step: int, metrics: dict[str, float | None]) -> None:
        """End the run at the last step of the branch."""
        if step >= self._last:
            raise StopTraining("the last of the branch")


def check_arms(arms: Sequence[Sequence[str]]) -> None:
    """Refuse settings that would break the pairing. ValueError."""
    for override in (override for arm in arms for override in parse_words(arm)):
        name = override.key_or_group
        why = next((why for key, why in UNPAIRED.items() if is_named(name, [key])), None)
        if why is not None:
            raise ValueError(f"covey branch must leave {name} as it was ({why}), got {override.input_line}")


def checkpoint_of(run: Path, at: int, num_steps: int) -> Path:
    """Return the checkpoint to branch from. ValueError without an undamaged one."""
    checkpoint = run / "checkpoints" / folder_name(at)
    steps = [step_of(path) or 0 for path in complete_checkpoints(run / "checkpoints")]
    kept = [step for step in steps if step < num_steps]
    if not kept:
        raise ValueError(
            f"{run} has no kept checkpoint before its last step ({num_steps}) to branch from; train again with "
            "output.save_every=N output.keep_last=1000, which keeps one after every N steps"
        )
    if at not in kept:
        raise ValueError(
            f"--at must be a step of a kept checkpoint of {run} before its last step "
            f"({', '.join(map(str, kept))}), got {at}; output.save_every and output.keep_last keep more"
        )
    if (fault := problem(checkpoint)) is not None:
        raise ValueError(f"{checkpoint} is damaged ({fault})")
    return checkpoint


def branch(asked: BranchAsked, run: Path) -> tuple[list[Path], int]:
    """Train parent and children; return their folders and last step."""
    arms = [(PARENT, ()), *((name_of(words), words) for words in asked.arms)]
    configs = [_config_of(run, words, trusted=asked.is_trusted) for _, words in arms]
    if configs[0].source != "local" or configs[0].streaming:
        raise ValueError(f"covey branch needs source=local and streaming=false, {run} draws tokens by the clock")
    checkpoint = checkpoint_of(run, asked.at, configs[0].num_steps)
    last = min(asked.at + (asked.steps or configs[0].num_steps), configs[0].num_steps)
    place = asked.out or run.parent / f"{run.resolve().name}-at-{asked.at}"
    root = place / run.resolve().name if len(asked.runs) > 1 else place
    folders = [root / name for name, _ in arms]
    for folder, (_, words) in zip(folders, arms, strict=True):
        _make_child(run, checkpoint, folder, words, asked)
    for folder, (_, words) in zip(folders, arms, strict=True):
        begin_log(folder)
        config = _config_of(folder, words, trusted=asked.is_trusted)
        train(config, folder, RunObjects(callbacks=(StopAfter(last),)))
    return folders, last


def name_of(words: Sequence[str]) -> str:
    """Return a folder name for settings.

    >>> name_of(["optimizer.lr=1e-5", "algorithm.shaping={a: 1}"])
    'optimizer.lr=1e-5,algorithm.shaping=_a_1_'
    """
    return re.sub(r"[^\w.,=+-]+", "_", ",".join(words))[:120]


def _config_of(run: Path, words: Sequence[str], *, trusted: bool) -> Config:
    settings.register()
    names = sorted({override.key_or_group for override in parse_words(words)})
    control = [f"resume_changes=[{','.join(names)}]", f"trust_run={str(trusted).lower()}"]
    return settings.to_config(settings_of(run, [*words, *control]))


def _make_child(run: Path, checkpoint: Path, folder: Path, words: Sequence[str], asked: BranchAsked) -> None:
    """Copy the files that a resume needs; those of checkpoints are linked."""
    try:
        folder.mkdir(parents=True)
    except FileExistsError:
        raise ValueError(f"{folder} is there already; --out FOLDER names another place") from None
    for name in (CONFIG, *ROWS):
        if (run / name).is_file():
            shutil.copyfile(run / name, folder / name)
    changes = [line for line in changes_of(run) if line["after_step"] <= asked.at]
    if changes:
        (folder / CHANGES).write_text("".join(json.dumps(line) + "\n" for line in changes), encoding="utf-8")
    for source in (checkpoint, *([run / BASE] if (run / BASE).is_dir() else [])):
        shutil.copytree(source, folder / source.relative_to(run), copy_function=_link)
    facts = {"parent": str(run.resolve()), "at": asked.at, "settings": list(words)}
    write_json(folder / FACTS, facts | {"checkpoint": digest_of_file(checkpoint / MANIFEST)})
    if trust.is_own(run) or asked.is_trusted:
        trust.seal(folder)


def _link(source: str, target: str) -> None:
    with suppress(OSError):
        os.link(source, target)
        return
    shutil.copyfile(source, target)


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
            first, *measures = gain["lines"]
            for line in (f"{first}: {gain['words']}", *measures):
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
    flags: dict[str, str] = {}
    for part in parts:
        part[:], more = read_flags([word for word in part if word != TRUST], FLAGS)
        flags |= more
    runs = [word for word in parts[0] if "=" not in word]
    arms = [tuple(word for word in part if "=" in word) for part in parts]
    stray = [word for part in parts[1:] for word in part if "=" not in word]
    if not all(arms) or "--at" not in flags or stray:
        raise ValueError(
            "covey branch needs a run, --at STEP and the settings of each child, such as covey branch "
            "outputs/DATE/TIME --at 100 optimizer.lr=1e-5 -- optimizer.lr=3e-6"
        )
    return BranchAsked(
        tuple(run_folder_of("branch", [run]) for run in runs) or (run_folder_of("branch", []),),
        whole_number(flags, "--at", 0, least=1),
        whole_number(flags, "--steps", None, least=1),
        tuple(arms),
        Path(flags["--out"]) if "--out" in flags else None,
        TRUST in words,
    )
