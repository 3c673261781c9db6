"""`covey rollouts RUN`: a step's completions for reading, episodes turn by turn."""

from collections.abc import Sequence
from typing import Any

from rich.text import Text

from covey.run.folder import EVALUATIONS, ROLLOUTS
from covey.run.records.answer_text import as_text, episode_text
from covey.system.disk import NotWritten, as_written
from covey.system.text.console import CleanConsole
from covey_report.runs.folders import one_run_folder, read_flags, whole_number
from covey_report.runs.show import rows_of

NUM_SHOWN = 6
WITH_VALUE = {"--step": "a number", "--prompt": "the id of a prompt", "--number": "a number"}
ALONE = ("--evaluation", "--worst")


def run_rollouts(words: Sequence[str]) -> None:
    """Print rollouts of a run. ValueError, in one line, for wrong words."""
    others, given = read_flags(words, WITH_VALUE, ALONE)
    path = one_run_folder("rollouts", others) / (EVALUATIONS if "--evaluation" in given else ROLLOUTS)
    step, number = whole_number(given, "--step", None), whole_number(given, "--number", NUM_SHOWN)
    if not path.is_file():
        raise ValueError(f"{path} is not there: {path.parent} is no run folder, or output.rollouts_per_step was 0")
    with as_written(path):
        rows = chosen(list(rows_of(path)), step, given.get("--prompt"))
        rows.sort(key=lambda row: row["reward"] or 0.0, reverse="--worst" not in given)
        texts = [episode_text(row) if "turns" in row else as_text(row) for row in rows[:number]]
    console = CleanConsole()
    for text in texts:
        console.print(Text(text), soft_wrap=True)
    shown = f"{len(texts)} of the {len(rows)} that were kept of step {rows[0]['step']}"
    more = "--number shows more, " if len(texts) < len(rows) else ""
    setting = "answers_per_evaluation" if "--evaluation" in given else "rollouts_per_step"
    console.print(Text(f"{shown}; {more}output.{setting} keeps more", "italic"), soft_wrap=True)


def chosen(rows: Sequence[dict[str, Any]], step: int | None, prompt_id: str | None) -> list[dict[str, Any]]:
    """Return the rows of a step and prompt (default: last, all). NotWritten where there are none."""
    of_prompt = [row for row in rows if prompt_id in (None, row["prompt_id"])]
    wanted = step if step is not None else max((row["step"] for row in of_prompt), default=None)
    found = [row for row in of_prompt if row["step"] == wanted]
    if not found:
        steps = sorted({row["step"] for row in of_prompt})
        there = f"steps {steps[0]} to {steps[-1]}" if steps else "no rollouts"
        of = "" if prompt_id is None else f" of prompt {prompt_id}"
        raise NotWritten(f"nothing is kept{of}{'' if step is None else f' at step {step}'}; there are {there}")
    return found
