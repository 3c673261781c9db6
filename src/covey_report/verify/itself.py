"""Compare the files of a run folder with each other.

Settings, logs and checkpoints are compared with what was noted while they were written. Nothing of the folder is run.
"""

import hashlib
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import yaml
from safetensors import SafetensorError

from covey.run.checkpoints.checkpoint import SETTINGS, complete_checkpoints, problem
from covey.run.checkpoints.manifest import MANIFEST, digest_of_file, step_of
from covey.run.checkpoints.manifest import MAX_BYTES as MAX_TEXT
from covey.run.checkpoints.saved_settings import CONTROL
from covey.run.folder import CONFIG, METRICS, PROOF, ROWS, UPDATES, VERDICTS, last_settings, read_summary
from covey.system.disk import as_written, read_regular
from covey.system.jsonl import MAX_BYTES, object_of, read_rows
from covey.system.lookup import YAML_LOADER
from covey.system.section import flat
from covey.system.text.format import number_of
from covey_report.verify.proof import DIGITS, FORMAT, LOGS, saved_checks, split, unpack

Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class ChangedFile:
    """A place where a file is not what was written."""

    text: str
    step: int | None = None
    """Step whose recomputation can tell what it was."""


def read_proof(folder: Path) -> list[Row]:
    """Return the rows of proof.jsonl, if any. ValueError for a foreign format."""
    rows = list(read_rows(folder / PROOF))
    if rows and rows[0].get("format", FORMAT) != FORMAT:
        raise ValueError(f"{folder / PROOF} must have format {FORMAT}, got {str(rows[0].get('format'))[:20]}")
    return rows


def look_at_folder(folder: Path, proof: Sequence[Row]) -> list[ChangedFile]:
    """List files that disagree, settings first. ValueError for foreign content."""
    with as_written(folder / PROOF):
        return [*settings_changed(folder, proof), *checkpoints_changed(folder, proof), *logs_changed(folder, proof)]


def settings_changed(folder: Path, proof: Sequence[Row]) -> Iterator[ChangedFile]:
    """Yield settings that differ from what the run and its checkpoints had."""
    for row in (row for row in proof if row.get("kind") == "begin"):
        had = flat(yaml.load(row["settings"], YAML_LOADER))
        yield from _differ(had, last_settings(folder, row["step"]), f"after step {row['step']} the run had")
    for checkpoint in complete_checkpoints(folder / "checkpoints"):
        if not (checkpoint / SETTINGS).is_file():
            continue
        had = flat(yaml.load(read_regular(checkpoint / SETTINGS, MAX_TEXT), YAML_LOADER))
        step = step_of(checkpoint) or 0
        yield from _differ(had, last_settings(folder, step - 1), f"{checkpoint.name} was saved with")


def _differ(had: Mapping[str, Any], now: Mapping[str, Any], told: str) -> Iterator[ChangedFile]:
    for name in dict.fromkeys((*had, *now)):
        if name not in CONTROL and had.get(name) != now.get(name):
            yield ChangedFile(f"{CONFIG} says {name}={_short(now.get(name))}, {told} {_short(had.get(name))}")


def _short(value: Any) -> str:
    return ("null" if value is None else str(value))[:120]


def checkpoints_changed(folder: Path, proof: Sequence[Row]) -> Iterator[ChangedFile]:
    """Yield files and tensors of checkpoints that are not what was saved."""
    noted = {row["step"]: row for row in proof if row.get("kind") == "save"}
    for checkpoint in complete_checkpoints(folder / "checkpoints"):
        row = noted.get(step_of(checkpoint) or 0)
        fault, tensors = problem(checkpoint), None if row is None else changed_tensors(checkpoint, row)
        resealed = row is not None and digest_of_file(checkpoint / MANIFEST) != row["manifest"]
        if fault or tensors or resealed:
            what = fault or f"{MANIFEST} is not what was written"
            yield ChangedFile(f"{checkpoint.name}: {what}" + (f"; {tensors}" if tensors else ""))


def changed_tensors(checkpoint: Path, row: Row) -> str | None:
    """Name the first tensor with another check than the run noted."""
    try:
        found = list(saved_checks(checkpoint))
    except (SafetensorError, OSError, ValueError) as error:
        return f"the weights cannot be read ({str(error)[:100]})"
    then = split(unpack(row["tensors"]))
    if len(then) != len(found):
        return f"it has {number_of(len(found), 'tensor')}, {len(then)} were saved"
    names = [name for (name, now), before in zip(found, then, strict=True) if now != before]
    more = f", and {len(names) - 1} more" if len(names) > 1 else ""
    return f"tensor {names[0]} differs{more}" if names else None


def logs_changed(folder: Path, proof: Sequence[Row]) -> Iterator[ChangedFile]:
    """Yield the first changed lines of each log."""
    for name in LOGS:
        of_log = [(row["step"], *row["logs"][name]) for row in proof if name in row.get("logs", ())]
        if of_log and (found := first_change(folder / name, of_log)):
            yield found
        elif of_log:
            yield from _find_added(folder, name, of_log[-1][1], max(row["step"] for row in proof))


def first_change(path: Path, marks: Sequence[Sequence[Any]]) -> ChangedFile | None:
    """Find the first lines changed between marks of (step, lines, digest)."""
    if not os.path.lexists(path):
        return ChangedFile(f"{path.name} is missing, of which {PROOF} has digests", 0)
    lines = lines_of(path)
    digest, size = hashlib.sha256(), 0
    for step, end, wanted in marks:
        digest.update(b"".join(lines[size:end]))
        if len(lines) < end or digest.copy().hexdigest()[:DIGITS] != wanted:
            places = f"line {size + 1}" if end <= size + 1 else f"one of lines {size + 1} to {end}"
            return ChangedFile(f"{path.name}: {places} (step {step}) is not what was written", step)
        size = max(size, end)
    return None


def lines_of(path: Path) -> list[bytes]:
    """Return the lines of a log with their ends."""
    return read_regular(path, MAX_BYTES).splitlines(keepends=True) if os.path.lexists(path) else []


def _find_added(folder: Path, name: str, size: int, last: int) -> Iterator[ChangedFile]:
    """Yield lines after the last mark, unless a kill explains them."""
    rest = lines_of(folder / name)[size:]
    is_whole = False
    with suppress(ValueError):  # a broken one is named elsewhere
        is_whole = (read_summary(folder) or {}).get("status") == "completed"
    steps = [object_of(line).get("step") for line in rest]
    if rest and (is_whole or any(type(step) is int and step < last for step in steps)):
        yield ChangedFile(f"{name}: {number_of(len(steps), 'line')} at its end were not written by the run")


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
