"""The best machines of a run, from the rollouts that its folder keeps (all of them: output.rollouts_per_step)."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from covey.environments.machines.design.blocks import BLOCKS
from covey.environments.machines.design.compact import read_compact
from covey.environments.machines.design.global_form import read_global
from covey.environments.machines.design.tree import canonical, read_machine
from covey.environments.machines.design.types import Invalid, Rules, Tree

ROLLOUTS = "rollouts.jsonl"
ANY_BLOCK = Rules(frozenset(BLOCKS))


@dataclass(frozen=True, slots=True)
class ScoredMachine:
    """A machine of a run."""

    tree: Tree
    """In its canonical order."""
    score: float
    step: int
    """At which it was first written."""


def best_of_run(folder: Path, count: int) -> list[ScoredMachine]:
    """Find the machines with the highest scores, each once. Raises ValueError where the run kept none."""
    file = folder / ROLLOUTS
    if not file.is_file():
        raise ValueError(f"no {ROLLOUTS} in {folder}; covey train writes one")
    found: dict[Tree, ScoredMachine] = {}
    for row in map(json.loads, file.read_text(encoding="utf-8").splitlines()):
        tree = tree_of_row(row)
        if isinstance(tree, Invalid) or not row["parts"].get("score"):
            continue
        one = ScoredMachine(canonical(tree), row["parts"]["score"], row["step"])
        found.setdefault(one.tree, one)
    if not found:
        raise ValueError(f"no machine with a score in {file}")
    return sorted(found.values(), key=lambda one: -one.score)[:count]


def tree_of_row(row: Mapping[str, Any]) -> Tree | Invalid:
    """Read the machine of a rollout, whichever form its prompt asked for: compact prompts are text, others messages."""
    prompt, completion = row["prompt"], row["completion"]
    if isinstance(prompt, str):
        return read_compact(prompt.partition(":")[2] + completion.strip(), ANY_BLOCK)
    return read_tree(completion)


def read_tree(text: str) -> Tree | Invalid:
    """Read a construction tree, or else blocks with positions."""
    tree = read_machine(text, ANY_BLOCK)
    return read_global(text, ANY_BLOCK) if isinstance(tree, Invalid) and '"Position"' in text else tree
