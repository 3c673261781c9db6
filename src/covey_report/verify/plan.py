"""Draw the steps to compute again, and their starts."""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from covey.run.checkpoints.checkpoint import complete_checkpoints
from covey.run.checkpoints.manifest import read_manifest, step_of
from covey.run.folder import changes_of
from covey_report.runs.local_ranks import MOST_STARTED, number_to_start

Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class StepRange:
    """Consecutive steps computed from one state."""

    start: int
    """Steps finished in it: 0, or those of a checkpoint."""
    last: int
    """The last step computed, counted from 1."""


@dataclass(frozen=True, slots=True)
class Leg:
    """Conditions of steps that only a resume changes."""

    changes: int
    """Resumes with other settings before it."""
    ranks: int
    threads: int


@dataclass(frozen=True, slots=True)
class DrawnSteps:
    """Drawn steps, and the work to reach them."""

    drawn: tuple[int, ...]
    work: tuple[tuple[Leg, tuple[StepRange, ...]], ...]
    reach: int
    """Steps that could have been drawn."""
    total: int
    """Steps of the run."""

    @property
    def cost(self) -> int:
        """Return the number of steps to compute."""
        return sum(one.last - one.start for _, ranges in self.work for one in ranges)


def starts_of(folder: Path) -> list[int]:
    """Return the states that steps can be computed from. `look_at_folder` has verified the checkpoints."""
    return [0, *(step_of(path) or 0 for path in complete_checkpoints(folder / "checkpoints"))]


def legs_of(folder: Path, proof: Sequence[Row], total: int) -> list[Leg]:
    """Return the conditions of each step, of step 1 first."""
    changed = [int(line["after_step"]) for line in changes_of(folder)]
    began = {int(row["step"]): row["machine"] for row in proof if row.get("kind") == "begin"}
    noted = {step_of(path) or 0: read_manifest(path) for path in complete_checkpoints(folder / "checkpoints")}
    newest = noted[max(noted)] if noted else {}
    legs = []
    facts: Mapping[str, Any] = {}
    for step in range(1, total + 1):
        facts = began.get(step - 1, facts)
        later = next((noted[at] for at in sorted(noted) if at >= step), newest)
        told = facts or {"ranks": later.get("num_ranks", 1), "threads": later.get("num_threads", 1)}
        ranks, threads = (number_to_start(name, told.get(name, 1)) for name in MOST_STARTED)
        legs.append(Leg(sum(after <= step - 1 for after in changed), ranks, threads))
    return legs


def make_plan(
    starts: Sequence[int], legs: Sequence[Leg], wanted: int, most: int, seed: int, first: Sequence[int] = ()
) -> DrawnSteps:
    """Draw random steps, at most `wanted`, within `most` steps of work. Steps in `first` come before others."""
    reach = {step: start for step in range(1, len(legs) + 1) if (start := _start_of(step, starts, legs)) is not None}
    order = sorted(reach)
    random.Random(seed).shuffle(order)
    order = [*(step for step in first if step in reach), *(step for step in order if step not in first)]
    drawn: list[int] = []
    lasts: dict[int, int] = {}
    for step in order:
        start = reach[step]
        more = max(0, step - lasts.get(start, start))
        if len(drawn) < wanted and sum(last - at for at, last in lasts.items()) + more <= most:
            drawn.append(step)
            lasts[start] = max(step, lasts.get(start, start))
    work: dict[Leg, list[StepRange]] = {}
    for start, last in sorted(lasts.items()):
        work.setdefault(legs[start], []).append(StepRange(start, last))
    return DrawnSteps(
        tuple(sorted(drawn)), tuple((leg, tuple(own)) for leg, own in work.items()), len(reach), len(legs)
    )


def _start_of(step: int, starts: Sequence[int], legs: Sequence[Leg]) -> int | None:
    """Return the nearest state before a step under its conditions."""
    start = max((at for at in starts if at < step), default=None)
    return start if start is not None and len(set(legs[start:step])) == 1 else None
