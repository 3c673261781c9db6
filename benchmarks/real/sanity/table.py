"""The page of the sanity set, from what was measured."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.real.sanity.faults import FAULTS

HERE = Path(__file__).resolve().parent
SET = HERE / "problems.jsonl"
SHORT = HERE / "short.jsonl"
"""Of numbers and words alone, for runs with a fault planted."""
RESULTS = HERE.parents[1] / "results" / "sanity.json"
PAGE = HERE.parent / "sanity.md"
BEGIN, END = "<!-- tables of benchmarks.real.sanity -->", "<!-- end of the tables -->"
LEARNT = 0.95
"""Mean reward that a correct system reaches (arXiv 2510.26788)."""
CLEARLY = 0.1
"""Below that a run that failed must end: more than three errors of 64 attempts."""
HEAD = "| fault | problems | seed | steps | before | after | wall | named by |\n|---|---|---|---|---|---|---|---|"


def is_right(found: Mapping[str, Any]) -> bool:
    """Tell whether a run did as it must: learnt without a fault; with one failed, unless it hides, and was named."""
    if found["fault"] is None:
        return "after" in found and bool(found["after"] >= LEARNT)
    fails = "refused" in found or found["after"] < LEARNT - CLEARLY
    return (fails or FAULTS[found["fault"]].hides) and is_named(found)


def is_named(found: Mapping[str, Any]) -> bool:
    """Tell whether covey's own checks refused the run, or the doctor's first or second finding names the fault."""
    first = [finding.split()[1] for finding in found.get("findings", ())[:2]]
    return "refused" in found or bool(set(first) & set(FAULTS[found["fault"]].named_by))


def row_of(found: Mapping[str, Any]) -> str:
    """Return a row of the table."""
    start = f"| {found['fault'] or 'none'} | {found['problems']} | {found['seed']}"
    if "refused" in found:
        return f"{start} | 0 | | | | refused: {found['refused']} |"
    named = "; ".join(found["findings"][:1]) or "–"
    shares = f"{100 * found['before']:.1f} % | {100 * found['after']:.1f} %"
    return f"{start} | {len(found['curve'])} | {shares} | {found['seconds']} s | {named} |"


def read_results() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.is_file() else {}
    return found


def tables(results: Mapping[str, Any]) -> str:
    runs = list(results.values())
    healthy = [found for found in runs if found["fault"] is None]
    sick = [found for found in runs if found["fault"] is not None]
    curves = [
        f"| {one['problems']} | {one['seed']} | {' '.join(f'{value:.2f}' for value in one['curve'])} |"
        for one in healthy
    ]
    lines = [_table(healthy), "", "| problems | seed | mean training reward, step by step |", "|---|---|---|", *curves]
    if sick:
        told = f"{sum(map(is_right, sick))} of {len(sick)} runs with a fault failed, or hide theirs, and were named."
        lines += ["", told, "", _table(sick)]
    return "\n".join(lines)


def _table(runs: Sequence[Mapping[str, Any]]) -> str:
    return "\n".join([HEAD, *map(row_of, runs)])


def write_page() -> None:
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    PAGE.write_text(f"{before}{BEGIN}\n\n{tables(read_results())}\n\n{END}{rest.partition(END)[2]}", encoding="utf-8")
