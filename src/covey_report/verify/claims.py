"""Compare summary.json and versions.json with the rows that they follow from.

The functions that a run writes its summary with are given the rows of verdicts.jsonl; times are left out.
"""

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from covey.algorithm.intervals import SHARE, bounds_of, mean_interval, wilson
from covey.run.evaluate import Evaluation
from covey.run.folder import (
    CHANGES,
    CONFIG,
    FORMAT,
    MAX_BYTES,
    METRICS,
    PROOF,
    ROWS,
    SUMMARY,
    VERDICTS,
    VERSIONS,
    last_settings,
)
from covey.run.folder import read_summary as read_claims
from covey.run.records.summary import comparable, describe, gains
from covey.system.disk import as_written, read_regular
from covey.system.jsonl import read_rows
from covey_doctor.verdicts import of_each, with_prompts
from covey_report.verify.itself import ChangedFile

Row = Mapping[str, Any]
Found = Iterator[tuple[str, Any, Any]]
DIGITS = 1e-5
"""Relative difference that the six digits of verdicts.jsonl leave open."""
CLOSED = ("pass_at_k", "parts", "reward_parts")
"""Sections of a summary that have no other names than the rows."""
VERIFIED = "verified"
"""Begin of the names of files that covey verify writes."""


def claims_changed(folder: Path, proof: Sequence[Row]) -> Iterator[ChangedFile]:
    """Yield claims of a folder that its rows do not say."""
    settings = last_settings(folder)
    try:
        with as_written(folder / SUMMARY):
            claimed = read_claims(folder)
            found = [] if claimed is None else list(_summary_differs(folder, claimed, settings))
            for place, (said, rows) in {place: values for place, *values in found}.items():
                source = "verdicts" if place.startswith(("before", "after", "gain")) else "metrics"
                what = f"{place.removesuffix('.value')} is {_short(said)}, its {source} say {_short(rows)}"
                yield ChangedFile(f"{SUMMARY}: {what}", 0)
        with as_written(folder / VERSIONS):
            own = json.loads(read_regular(folder / VERSIONS, MAX_BYTES)) if (folder / VERSIONS).is_file() else {}
            if not proof and own.get("format", 1) >= FORMAT and settings.get("output.traces"):
                yield ChangedFile(f"{PROOF} is missing, which a run of this version writes", 0)
            yield from _versions_changed(proof, {VERSIONS: own, SUMMARY: (claimed or {}).get("versions", {})})
    except ValueError as error:
        yield ChangedFile(str(error), 0)


def _versions_changed(proof: Sequence[Row], claimed: Mapping[str, Row]) -> Iterator[ChangedFile]:
    began = [row["machine"] for row in proof if row.get("kind") == "begin"]
    for file, versions in claimed.items() if began else ():
        for name, value in versions.items():
            if name in began[-1] and value not in {one.get(name) for one in began}:
                yield ChangedFile(f"{file}: {name} is {_short(value)}, {PROOF} says {_short(began[-1][name])}", 0)


def _summary_differs(folder: Path, claimed: Row, settings: Row) -> Found:
    rows = list(read_rows(folder / METRICS))
    steps = [row for row in rows if row.get("kind") == "train"]
    totals = {"seed": settings["seed"], "confidence": settings["evaluation.confidence"], "steps": len(steps)}
    for name, (column, of_row) in TOTALS.items():
        totals |= {name: sum(map(of_row, steps))} if all(column in row for row in steps) else {}
    yield from differ(claimed, totals, "")
    looks = [row for row in rows if row.get("kind") == "evaluate"]
    verdicts = {row["step"]: row for row in with_prompts(read_rows(folder / VERDICTS))}
    sides = {"before": looks[:1], "after": looks[1:][-1:]}
    made: list[Evaluation] = []
    for side, found in sides.items():
        yield from differ(claimed, {side: _of_metrics(found[0], settings) if found else None}, "")
        for own in (verdicts[row["step"]] for row in found if row["step"] in verdicts):
            made.append(_nearest(claimed[side], own, last_settings(folder, own["step"])))
            yield from differ(claimed[side], _estimates(made[-1]), f"{side}.")
    if len(made) == sum(map(len, sides.values())):
        seen = [[("", name) for name in verdicts[row["step"]]["prompts"]] for (row,) in filter(None, sides.values())]
        pair = comparable(made[0], made[1], seen) if len(made) > 1 else (None, None)
        yield from differ(claimed, {"gain": _own(gains(*pair, settings["evaluation.confidence"]))}, "")


def _drops_of(row: Row) -> int:
    drops = {name: n for name, n in row.items() if name.startswith("dropped/")}
    return int(sum(n or 0 for name, n in drops.items() if name != "dropped/unscored_rollouts"))


def _of_metrics(row: Row, settings: Row) -> dict[str, Any]:
    """Return the values of an evaluation that its row of metrics has."""
    passes = {str(k): {"value": row.get(f"pass_at_{k}")} for k in settings["evaluation.k"] if f"pass_at_{k}" in row}
    found: dict[str, Any] = {"pass_at_k": passes, "parts": {}, "reward_parts": {}}
    for name, value in row.items():
        measure, _, own = name.partition("/")
        if measure == "reward":
            found["reward_parts"][own] = {"value": value}
        elif measure in ("accuracy", "reward_mean"):
            (found["parts"].setdefault(own, {}) if own else found)[measure] = {"value": value}
    return found


def _nearest(claimed: Row, row: Row, settings: Row) -> Evaluation:
    """Return an evaluation by its verdicts, with the bounds that were claimed.

    Rewards of single answers decide the bounds, and rows may have their means alone.
    """
    means = [value for value in of_each(row, "reward_mean") if not math.isnan(value)]
    both = [evaluation_of_row(row, settings, bounds) for bounds in {bounds_of(means), None}]
    return min(both, key=lambda one: len(list(differ(claimed, _estimates(one), ""))))


def evaluation_of_row(row: Row, settings: Row, bounds: tuple[float, float] | None = SHARE) -> Evaluation:
    """Compute the estimates of an evaluation from its verdicts."""
    right, rewards = (of_each(row, measure) for measure in ("accuracy", "reward_mean"))
    judged, known = ([value for value in values if not math.isnan(value)] for values in (right, rewards))
    confidence = settings["evaluation.confidence"]
    found = Evaluation(
        accuracy=wilson(sum(judged), len(judged), confidence),
        reward_mean=mean_interval(known, confidence, bounds),
        pass_at_k={},
        num_prompts=len(right),
        num_samples=settings["evaluation.num_samples"],
        num_unscored=0,
        correct_greedy=tuple(right),
        mean_reward=tuple(rewards),
        num_right=tuple(row.get("num_right", ())),
        num_scored=tuple(row.get("num_scored", ())),
    )
    for k in settings["evaluation.k"] if found.num_scored else ():
        of_prompts = [value for value in found.pass_of_each(k) if not math.isnan(value)]
        found.pass_at_k[k] = mean_interval(of_prompts, confidence, SHARE)
    return found


def _estimates(found: Evaluation) -> dict[str, Any]:
    return _own(describe(found)) or {}


def _own(found: Row | None) -> dict[str, Any] | None:
    """Leave out parts, of which verdicts tell nothing."""
    kept = (found or {}).items()
    return {name: value for name, value in kept if name not in ("parts", "reward_parts")} or None


def differ(claimed: Any, rows: Any, place: str) -> Found:
    """Yield claims that rows do not say, as (place, claim, rows).

    >>> list(differ({"after": {"accuracy": 0.53}}, {"after": {"accuracy": 0.23}}, ""))
    [('after.accuracy', 0.53, 0.23)]
    """
    if not isinstance(rows, Mapping):
        if not _is_same(claimed, rows):
            yield place.removesuffix("."), claimed, rows
        return
    own = claimed if isinstance(claimed, Mapping) else {}
    for name, value in rows.items():
        yield from differ(own.get(name), value, f"{place}{name}.")
        if name in CLOSED:
            yield from ((f"{place}{name}.{key}", own[name][key], None) for key in own.get(name, ()) - value.keys())


def _is_same(claimed: Any, rows: Any) -> bool:
    numbers = [math.nan if value is None else value for value in (claimed, rows)]
    if not all(isinstance(value, int | float) for value in numbers):
        return bool(claimed == rows)
    a, b = numbers
    return (math.isnan(a) and math.isnan(b)) or abs(a - b) <= DIGITS * max(1.0, abs(b))


def _short(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str("absent" if value is None else value)[:60]


def unchecked_rows(folder: Path, computed: Sequence[int]) -> str:
    """Count the steps without digest or recomputation, in words."""
    rows = list(read_rows(folder / PROOF))
    steps = {row["step"] for row in read_rows(folder / METRICS) if row.get("kind") == "train"}
    left = len(steps - {row["step"] for row in rows if row.get("kind") == "train"} - set(computed))
    which = "the other step" if left == 1 else f"the {left} other steps"
    return (
        f"{f'a part of {PROOF} is missing' if rows else f'no {PROOF}'}: rows of {which} are unchecked" if left else ""
    )


def not_covered(folder: Path) -> list[str]:
    """List the files, and parts of files, that nothing is compared with."""
    names = sorted(path.name + "/" * path.is_dir() for path in folder.iterdir())
    own = (CONFIG, CHANGES, "checkpoints/", *ROWS)
    return [PARTLY.get(name, name) for name in names if name not in own and not name.startswith(VERIFIED)]


TOTALS: dict[str, tuple[str, Callable[[Row], int]]] = {
    "skipped_steps": ("skipped", lambda row: int(row["skipped"])),
    "dropped_groups": ("dropped/stale_groups", _drops_of),
    "tokens": ("tokens_per_second", lambda row: round(row["tokens_per_second"] * row["seconds"])),
}
"""Sums over steps: the column that they need, and how a row is counted."""
PARTLY = {
    "report.html": "report.html (made of the other files: covey report FOLDER makes it again)",
    SUMMARY: f"of {SUMMARY} status, notes, times, memory, environment, intervals and gains of parts of rewards",
    VERSIONS: f"of {VERSIONS} the commands",
    "run.seal": "run.seal (says who made the settings)",
}
"""Files of which a part is compared, or that follow from others."""
