"""Read a user's tasks and designs of machines from rows (columns: docs/tasks/machines.md)."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from covey.environments.data.files import read_file
from covey_tasks.columns import text_in
from covey_tasks.machines.design.place import place
from covey_tasks.machines.design.stages import STAGES, Problem, check_problem
from covey_tasks.machines.design.tree import read_machine
from covey_tasks.machines.design.types import ROOT, Invalid, Rules, Tree
from covey_tasks.machines.prompts import read_answer, write_answer
from covey_tasks.machines.scores import find_score
from covey_tasks.machines.settings import MachinesConfig

Row = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Example:
    """A problem with an answer in the form of a completion."""

    problem: Problem
    text: str


def read_examples(path: str, settings: MachinesConfig) -> list[Example]:
    """Read a file's designs. ValueError names the first bad row and column."""
    file, found = Path(path).expanduser(), []
    if not file.is_file():
        raise ValueError(f"environment.demonstrations={path} is no file")
    for entry in read_file(file):
        if entry.row is None:
            raise ValueError(f"{entry.place} {entry.problem}")
        try:
            found.append(example_of(entry.row, settings))
        except ValueError as error:
            raise ValueError(f"{entry.place} {error}") from error
    if not found:
        raise ValueError(f"environment.demonstrations={path} has no rows")
    return found


def problem_of(row: Row, settings: MachinesConfig) -> Problem:
    """Read the problem of a row. ValueError where a column is wrong."""
    words = row.get("prompt")
    if words is not None and (not isinstance(words, str) or not words.strip()):
        raise ValueError(f"column 'prompt' must be text, got {words!r:.80}")
    stage = _stage(row, settings)
    return Problem(stage, _budget(row, stage, settings), _given(row, stage), words)


def example_of(row: Row, settings: MachinesConfig) -> Example:
    """Read the design of a row, which must be a machine."""
    if ("machine" in row) == ("completion" in row):
        got = "both" if "machine" in row else f"none of them (has: {', '.join(row) or 'none'})"
        raise ValueError(f"must have a column 'machine' or 'completion', got {got}")
    problem = problem_of(row, settings)
    if "completion" in row:
        text = text_in(row, "completion")
        _sound(read_answer(text, problem, settings.form), problem, "completion")
        return Example(problem, text)
    tree = _sound(_read("machine", row["machine"], problem.rules), problem, "machine")
    return Example(problem, write_answer(tree, problem, settings.form))


def _stage(row: Row, settings: MachinesConfig) -> str:
    stage = row.get("stage")
    if stage is None:
        if len(settings.stages) > 1:
            raise ValueError(f"has no column 'stage', and environment.stages={settings.stages} leaves it open")
        return settings.stages[0]
    if stage not in STAGES:
        raise ValueError(f"column 'stage' must be one of {', '.join(STAGES)}, got {stage!r:.80}")
    try:
        find_score(STAGES[stage].task, settings.score)
    except ValueError as error:
        raise ValueError(f"column 'stage' is {stage}: environment.{error}") from error
    return str(stage)


def _budget(row: Row, stage: str, settings: MachinesConfig) -> int:
    most = min(max(STAGES[stage].budgets), settings.max_blocks)
    budget = row.get("budget")
    if budget is None:
        return most
    least = max(2, STAGES[stage].min_blocks)
    if isinstance(budget, bool) or not isinstance(budget, int) or not least <= budget <= most:
        raise ValueError(f"column 'budget' must be a whole number from {least} to {most}, got {budget!r:.80}")
    return budget


def _given(row: Row, stage: str) -> Tree:
    given, is_begun = row.get("given"), STAGES[stage].is_begun
    if (given is not None) != is_begun:
        raise ValueError(f"column 'given' (a list of blocks) {'must be there' if is_begun else 'is not'} for {stage}")
    if given is None:
        return (ROOT,)
    rules = replace(Problem(stage, max(STAGES[stage].budgets)).rules, needs_boulder=False)
    tree = _read("given", given, rules)
    if isinstance(found := place(tree, rules), Invalid):
        raise ValueError(f"column 'given': {found.message}")
    return tree


def _read(column: str, value: Any, rules: Rules) -> Tree:
    if not isinstance(value, str | list):
        raise ValueError(f"column {column!r} must be a list of blocks or its JSON, got {value!r:.80}")
    tree = read_machine(value if isinstance(value, str) else json.dumps(value), rules)
    if isinstance(tree, Invalid):
        raise ValueError(f"column {column!r}: {tree.message}")
    return tree


def _sound(tree: Tree | Invalid, problem: Problem, column: str) -> Tree:
    """Check that the tree is a machine that answers the problem."""
    found = tree if isinstance(tree, Invalid) else check_problem(tree, problem) or place(tree, problem.rules)
    if isinstance(found, Invalid):
        raise ValueError(f"column {column!r}: {found.message}")
    least = STAGES[problem.stage].min_blocks
    if len(found.tree) < least:
        raise ValueError(f"column {column!r}: {len(found.tree)} blocks, stage {problem.stage} asks for {least}")
    return found.tree
