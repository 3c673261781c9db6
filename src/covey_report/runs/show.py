"""`covey show RUN`: results with best and worst answers."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from covey.environments.data.files import json_fault
from covey.run.folder import (
    CONFIG,
    EVALUATIONS,
    METRICS,
    ROLLOUTS,
    SUMMARY,
    changes_of,
    is_running,
    last_settings,
    read_summary,
    spell_changes,
)
from covey.run.records.answer_text import as_text
from covey.system.disk import NotWritten, as_written
from covey.system.text.console import CleanConsole
from covey.system.text.format import relative, three_digits
from covey_report.logs.foreign import read_any
from covey_report.runs.folders import read_flags, run_folders, whole_number
from covey_report.runs.tables import print_folder, render, side_by_side

Row = dict[str, Any]

MOST_NAMED = 4
"""Settings of a run beside its name."""
NUM_ANSWERS = 3
"""Shown of the best, and of the worst."""
ANSWERS = "--answers"


def run_show(words: Sequence[str]) -> None:
    """Show one run, or several side by side. ValueError."""
    named, given = read_flags(words, {ANSWERS: "a number"})
    folders, number = run_folders("show", named), whole_number(given, ANSWERS, NUM_ANSWERS)
    for folder in folders:
        if not (folder / CONFIG).is_file():
            raise ValueError(f"{folder} is no run folder (it has no {CONFIG})")
    if len(folders) > 1:
        print_side_by_side(folders)
        return
    (folder,) = folders
    console = CleanConsole()
    content = read_summary(folder)
    with as_written(folder / (METRICS if content is None else SUMMARY)):
        console.print(Text(_state(folder)) if content is None else render(content, folder), soft_wrap=content is None)
    for text in (text for line in changes_of(folder) for text in spell_changes(line)):
        console.print(Text(text), soft_wrap=True)
    print_answers(folder, number, number, console)
    print_folder(folder, console)


def print_side_by_side(folders: Sequence[Path]) -> None:
    """Print each run's result below its name and its own settings."""
    from covey_report.text import compared_lines

    names = [relative(folder) for folder in folders]
    runs = {
        f"{name}{own}": read_summary(f) for f, name, own in zip(folders, names, _own_settings(folders), strict=True)
    }
    with as_written(f"{SUMMARY} of {', '.join(names)}"):
        CleanConsole().print(side_by_side(runs), soft_wrap=True)
    for line in compared_lines(list(map(read_any, folders)), names):
        CleanConsole().print(line, soft_wrap=True, markup=False, highlight=False)


def _own_settings(folders: Sequence[Path]) -> list[str]:
    settings = [last_settings(folder) if (folder / CONFIG).is_file() else {} for folder in folders]
    every = {name: None for found in settings for name in found}
    differing = [name for name in every if any(one.get(name) != settings[0].get(name) for one in settings)][:MOST_NAMED]
    own = [" ".join(f"{name}={one[name]}" for name in differing if one.get(name) not in (None, {})) for one in settings]
    return [f" ({text})" if text else "" for text in own]


def print_worst_answers(folder: Path, console: Console) -> None:
    """Print the worst answers of the last evaluation."""
    print_answers(folder, 0, NUM_ANSWERS, console)


def print_answers(folder: Path, num_best: int, num_worst: int, console: Console) -> None:
    """Print the best and worst answers of the last evaluation or step.

    The worst are wrong, greedy or sampled, or earn less than the best of a step.
    """
    with as_written(folder / EVALUATIONS):
        rows = last_answers(folder)
        told = [row for row in rows if row["reward"] is not None]  # not where a teacher trains alone
        # Greedy ones first among equals
        ordered = sorted(
            told or rows, key=lambda row: (not row.get("correct"), -(row["reward"] or 0.0), not row.get("greedy"))
        )
        best = ordered[: min(num_best, len(ordered))]
        rest = ordered[len(best) :] if told else []
        wrong = [row for row in rest if not row.get("correct", row["reward"] >= ordered[0]["reward"])]
        worst = wrong[max(0, len(wrong) - num_worst) :][::-1]
        greedy = sum(bool(row.get("greedy")) for row in rows)
        kinds = f"{greedy} greedy and {len(rows) - greedy} sampled" if greedy else f"{len(rows)}"
        of = f"of {kinds} kept, step {rows[0]['step']}" if rows else ""
        for title, chosen in (("best answers" if told else "answers", best), ("worst answers", worst)):
            texts = [as_text(row) for row in chosen]
            if texts:
                console.print(Text(f"\n{title} ({of})", "italic"))
            for text in texts:
                console.print(Text(text), soft_wrap=True)
        if num_worst and rows and all(row.get("correct") for row in ordered):
            console.print(Text(f"\nno answer is wrong ({of})", "italic"))


def last_answers(folder: Path) -> list[Row]:
    """Return the last evaluation's answers, else the last step's."""
    for name in (EVALUATIONS, ROLLOUTS):
        found: list[Row] = []
        for row in rows_of(folder / name):
            if found and found[0]["step"] != row["step"]:
                found = []
            found.append(row)
        if found:
            return found
    return []


def rows_of(path: Path) -> Iterator[Row]:
    """Read the rows of a growing file, none without it."""
    if not path.is_file():
        return
    with path.open(encoding="utf-8", newline="\n") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.endswith("\n"):  # being written, or torn
                return
            try:
                row = json.loads(line.rstrip())
            except (ValueError, RecursionError) as error:
                raise NotWritten(f"{path} line {number} is not JSON ({json_fault(error)})") from None
            if not isinstance(row, dict):
                raise NotWritten(f"{path} line {number} is no row")
            yield row


def _state(folder: Path) -> str:
    steps = [row for row in rows_of(folder / METRICS) if row["kind"] == "train"]
    if not steps:
        return f"no step is finished yet; {_what_follows(folder)}"
    last = steps[-1]
    if last_settings(folder).get("served"):
        rest = "a model of covey serve, which knows no rewards"
        return f"step {last['step']}, {last['time']}: loss {three_digits(last['loss'])}; {rest}"
    reward = last["sampled_reward_mean"]
    told = "none" if reward is None else three_digits(reward)
    return f"step {last['step']}, {last['time']}: reward {told}; {_what_follows(folder)}"


def _what_follows(folder: Path) -> str:
    if is_running(folder):
        return "the run continues"

    from covey.run.checkpoints.resume import resume_hint

    return f"the run was killed; {resume_hint(folder)}"
