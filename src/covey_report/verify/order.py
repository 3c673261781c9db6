"""Find steps whose rows are missing, doubled or out of order.

Rows alone tell it, so it is found without proof.jsonl, and where that file lost the same step.
"""

from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path

from covey.run.folder import METRICS, PROOF, ROWS, UPDATES, VERDICTS
from covey.system.jsonl import read_rows
from covey.system.text.format import number_of
from covey_report.verify.itself import ChangedFile

ONE_EACH = ((METRICS, "train"), (METRICS, "evaluate"), (UPDATES, "train"), (VERDICTS, "evaluate"), (PROOF, "train"))
"""Kinds of rows of which a step has one."""


def rows_misplaced(folder: Path) -> Iterator[ChangedFile]:
    """Yield steps without a row, with several, or out of order."""
    rows = {name: [(row["step"], row.get("kind")) for row in read_rows(folder / name)] for name in ROWS}
    steps = {pair: [step for step, kind in rows[pair[0]] if kind == pair[1]] for pair in ONE_EACH}
    trained, evaluated, updated, judged, proven = steps.values()
    is_trained = trained or updated or proven  # an evaluation alone has steps without training
    last = max((step for of_log in rows.values() for step, _ in of_log), default=0) if is_trained else 0
    began = min((step for step, kind in rows[PROOF] if kind == "begin"), default=0)
    wanted = {
        (METRICS, "train"): range(1, last + 1),
        (METRICS, "evaluate"): judged[:-1],  # a kill may part the last from its metrics
        (VERDICTS, "evaluate"): [step for step in evaluated if judged and step > judged[0]],
        (PROOF, "train"): range(began + 1, max(proven, default=began)),
    }
    if rows[PROOF] and rows[PROOF][0][1] != "begin":
        yield ChangedFile(f"{PROOF}: its first row is missing", 0)
    for (name, kind), found in steps.items():
        is_basis = found is trained
        if missing := sorted(set(wanted.get((name, kind), ())) - set(found)):
            more = f", and {number_of(len(missing) - 1, 'other')}" if missing[1:] else ""
            what = "step" if kind == "train" else "the evaluation after step"
            yield ChangedFile(f"{name}: {what} {missing[0]} is missing{more}", None if is_basis else 0)
        twice = next((a for a, b in pairwise(sorted(found)) if a == b), None)
        if twice is not None:
            yield ChangedFile(f"{name}: step {twice} has several rows of kind {kind}", 0)
    for name, of_log in rows.items():
        yield from _falls(name, [step for step, _ in of_log])


def _falls(name: str, steps: Sequence[int]) -> Iterator[ChangedFile]:
    for line, (before, step) in enumerate(pairwise(steps), 2):
        if step < before:
            yield ChangedFile(f"{name}: row {line} is of step {step}, after one of step {before}", 0)
            return
