"""Train runs with planted faults and healthy ones, keep their columns, write the table of docs/use/doctor.md.

python -m benchmarks.checks.doctor --runs FOLDER   # trains what is not in FOLDER yet, an hour and more on two cores
python -m benchmarks.checks.doctor --table         # the table alone, from what is kept
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.checks.doctor.kept import kept_of, read_kept, read_rows, write_kept
from benchmarks.checks.doctor.logs import MADE_SICK
from benchmarks.checks.doctor.planted import CONTROLS, PLANTED
from covey_doctor.catalogue import RULES
from covey_doctor.diagnose import diagnose
from covey_doctor.finding import Finding, Level
from covey_doctor.log import RunLog

PAGE = Path(__file__).resolve().parents[3] / "docs" / "use" / "doctor.md"
BEGIN, END = "<!-- table of benchmarks.checks.doctor -->", "<!-- end of the table -->"
CUT = 40
"""Steps of a healthy run at most, four windows of the rules: where a recipe has more, it is cut to these."""
RECIPES = {
    "lookup_nano": 60,
    "guess_nano": 60,
    "machines_nano": 60,
    "catapult_nano": 50,
    "countdown_nano": CUT,
    "gsm8k_nano": CUT,
    "tldr_nano": 50,
    "arithmetic": CUT,
    "arithmetic_curriculum": CUT,
    "math_nano": CUT,
    "ifeval_nano": CUT,
    "calculator_nano": CUT,
    "code": 60,
    "machines_clamped_nano": CUT,
    "tldr_reference_ratio_nano": 50,
    "torchrl_gsm8k_nano": CUT,
    "torchrl_ifeval_nano": CUT,
    "infill_nano": CUT,
    "code_summed": 60,
}
"""Every recipe that trains a policy of its own offline, and the steps it is given here."""
SEEDS = (0, 1, 2)
HOW = (
    "A *run* was trained so; a *changed log* has the columns of the real run `arithmetic-0`, one of them changed. "
    "Bold: level `sick`, others `watch`."
)
QUIET = ("output.report=false", "output.progress=false", "output.save_every=0")


def train(folder: Path, words: Sequence[str]) -> None:
    """Train into a folder, in a process of its own, unless it has been, whole."""
    if folder.is_dir():
        if is_whole(folder):
            return
        shutil.rmtree(folder)
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run([sys.executable, *words, *QUIET, f"hydra.run.dir={folder}"], env=environment, check=False)


def is_whole(folder: Path) -> bool:
    """Return True if a run ended by itself: at its last step or by its planted fault."""
    summary = folder / "summary.json"
    return summary.is_file() and json.loads(summary.read_text())["status"] != "interrupted"


def words_of(recipe: str, seed: int) -> tuple[str, ...]:
    return (f"seed={seed}", f"num_steps={RECIPES[recipe]}", "preflight.enabled=false")


def name_of(recipe: str, seed: int) -> str:
    return f"{recipe.replace('/', '_')}-{seed}"


def control_of(recipe: str) -> str:
    return f"control_{recipe}"


def train_all(runs: Path) -> None:
    """Train what is not there yet, the first seed of every recipe before the next."""
    for name in PLANTED:
        train(runs / name, ["-m", "benchmarks.checks.doctor.planted", name])
    train_healthy(runs, SEEDS[:1])
    for recipe in CONTROLS:
        words = ["control", recipe, *words_of(recipe, 0)]
        train(runs / control_of(recipe), ["-m", "benchmarks.checks.doctor.planted", *words])
    train_healthy(runs, SEEDS[1:])


def train_healthy(runs: Path, seeds: Sequence[int]) -> None:
    for seed in seeds:
        for recipe in RECIPES:
            train(runs / name_of(recipe, seed), ["-m", "covey", "train", f"recipe={recipe}", *words_of(recipe, seed)])


def longest(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, Any]:
    """Return the kept runs, of two of one name the one with more steps, the newer of equals.

    A run that was stopped before its first step says nothing, and is left out.
    """
    old, new = ({name: one for name, one in runs.items() if one["steps"]} for runs in (old, new))
    stays = {name for name in old if name in new and old[name]["steps"][-1] > new[name]["steps"][-1]}
    return {name: old[name] if name in stays or name not in new else new[name] for name in {**old, **new}}


def names_first(expected: Sequence[str], found: Sequence[Finding]) -> bool:
    """Tell whether one of the expected findings is first or second."""
    return bool(set(expected) & {finding.rule.id for finding in found[:2]})


def row(name: str, kind: str, expected: Sequence[str], log: RunLog) -> str:
    found = diagnose(log)
    shown = [marked(one) for one in found if one.level > Level.NOTE]
    first, second = (*shown, "–", "–")[:2]
    named = "yes" if names_first(expected, found) else "**no**"
    return f"| {name} | {kind} | {', '.join(expected)} | {first} | {second} | {named} |"


def marked(finding: Finding) -> str:
    """Return number and name of a finding, the number in bold at the highest level."""
    rule = finding.rule
    return f"**{rule.id}** {rule.name}" if finding.level is Level.SICK else f"{rule.id} {rule.name}"


def table() -> str:
    """Return the tables: planted faults, shuffled rewards, healthy runs, all rules."""
    kept = read_kept()
    healthy = {name: log for name, log in kept.items() if is_healthy(name)}
    runs = {name: planted for name, planted in PLANTED.items() if planted.expected and name in kept}
    rows = [row(name, "run", planted.expected, kept[name]) for name, planted in runs.items()]
    rows += [
        row(name, "changed log", made.expected, made.change(kept["arithmetic-0"])) for name, made in MADE_SICK.items()
    ]
    named = sum(line.endswith("| yes |") for line in rows)
    lines = [f"{named} of {len(rows)} planted faults are found first or second. {HOW}", ""]
    lines += ["| planted fault | in a | expected | first | second | found |", "|---|---|---|---|---|---|", *rows, ""]
    lines += [*control_lines({name: log for name, log in kept.items() if name in map(control_of, CONTROLS)}), ""]
    sick = {name: [one for one in diagnose(log) if one.level is Level.SICK] for name, log in healthy.items()}
    number = sum(bool(found) for found in sick.values())
    lines += [f"Of {len(healthy)} runs without a fault, {number} have a finding of that level. {not_run(kept)}", ""]
    lines += ["| healthy run | steps | `sick` | `watch` | `note` |", "|---|---|---|---|---|"]
    lines += [healthy_row(name, log) for name, log in sorted(healthy.items())]
    lines += ["", "All rules, a cause before what follows from it:", ""]
    lines += ["| finding | name | why it matters | source |", "|---|---|---|---|"]
    lines += [f"| {rule.id} | {rule.name} | {rule.why} | {rule.source} |" for rule in RULES]
    return "\n".join(lines)


def not_run(kept: Mapping[str, RunLog]) -> str:
    """Say how much of recipes by seeds was run, and what was not at all."""
    number = sum(name_of(recipe, seed) in kept for recipe in RECIPES for seed in SEEDS)
    never = [recipe for recipe in RECIPES if not any(name_of(recipe, seed) in kept for seed in SEEDS)]
    said = f"{number} of the {len(RECIPES) * len(SEEDS)} runs of every offline recipe by {len(SEEDS)} seeds were made"
    rest = f"; none of {', '.join(never)}" if never else ""
    return (
        f"{said}{rest}. Recipes of more steps than the table says are cut to them, four windows of the rules and more."
    )


def control_lines(controls: Mapping[str, RunLog]) -> list[str]:
    """Return the table of recipes whose rewards were shuffled within each group."""
    found = sum(any(one.level is Level.SICK for one in diagnose(log)) for log in controls.values())
    trained = f"Of {len(controls)} recipes trained with rewards shuffled within each group"
    lines = [f"{trained}, {found} have a finding of that level.", ""]
    lines += ["| shuffled | steps | `sick` | `watch` | `note` |", "|---|---|---|---|---|"]
    return lines + [healthy_row(name.removeprefix("control_"), log) for name, log in sorted(controls.items())]


def is_healthy(name: str) -> bool:
    """Return True if a kept run has no planted fault."""
    return not name.startswith("control_") and (name not in PLANTED or not PLANTED[name].expected)


def healthy_row(name: str, log: RunLog) -> str:
    cells = [
        ", ".join(f"{one.rule.id} {one.rule.name}" for one in diagnose(log) if one.level is level) or "–"
        for level in (Level.SICK, Level.WATCH, Level.NOTE)
    ]
    return f"| {name} | {len(log.steps)} | {' | '.join(cells)} |"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=Path, help="where run folders are, or will be")
    parser.add_argument(
        "--keep", action="store_true", help="train nothing, keep the columns of the runs that are there"
    )
    parser.add_argument("--table", action="store_true")
    options = parser.parse_args()
    if options.runs is not None:
        if not options.keep:
            train_all(options.runs)
        wanted = [*PLANTED, *map(control_of, CONTROLS), *(name_of(recipe, s) for recipe in RECIPES for s in SEEDS)]
        folders = {name: options.runs / name for name in wanted if (options.runs / name / "summary.json").is_file()}
        write_kept(longest(read_rows(), {name: kept_of(folder) for name, folder in folders.items()}))
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    PAGE.write_text(f"{before}{BEGIN}\n\n{table()}\n\n{END}{rest.partition(END)[2]}", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
