"""The table: every case is a contest, its figures and its floor."""

import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from benchmarks.speed import floor
from benchmarks.speed.cases import Case
from benchmarks.speed.contest import WorkerFailed, contest, has_vllm
from benchmarks.speed.ratios import Repetition, best_rival, contestant_figures, ratio, split_clean
from benchmarks.speed.report import circumstances, load, save
from benchmarks.speed.workloads import Job

Say = Callable[[str], None]


def run(cases: Mapping[str, Case], num_repetitions: int, say: Say) -> None:
    """Measure these cases; others that were measured before stay in the results."""
    rates = floor.measured()
    content = load("table")
    results = content.get("cases", {})
    with tempfile.TemporaryDirectory() as folder:
        for name, case in cases.items():
            results[name] = measure(case, num_repetitions, rates, Path(folder))
            say(f"{name}: {in_short(results[name])}")
            in_order = {key: results[key] for key in [*cases, *results] if key in results}
            save("table", {"circumstances": circumstances(), "cases": in_order})


def measure(case: Case, num_repetitions: int, rates: Mapping[str, floor.Rates], folder: Path) -> dict[str, Any]:
    """One row; a contestant that fails makes it a row that says so."""
    told = {"what": case.what, "at_least": case.at_least, "aim": case.aim, "measure": case.measure}
    if not has_vllm(list(case.jobs.values())):
        return {**told, "error": "vLLM is not installed; `make bench-vllm-setup` does it"}
    try:
        repetitions = contest(case.jobs, num_repetitions, folder / "models", folder / "logs")
    except WorkerFailed as error:
        return {**told, "error": str(error)}
    found = {**told, **figures(repetitions, case.measure)}
    key = f"{case.covey.workload.size}/{case.covey.precision}"
    if key in rates:
        found["floor"] = against_floor(case.covey, found["contestants"]["covey"]["seconds"], rates[key])
    return {**found, "raw": repetitions}


def figures(repetitions: list[Repetition], measure: str) -> dict[str, Any]:
    """Of the clean repetitions; of all where none was clean, which the counts then say."""
    clean, num_dropped = split_clean(repetitions)
    used = clean or repetitions
    rival = best_rival(used, measure)
    return {
        "rival": rival,
        "ratio": ratio(used, rival, measure).to_dict(),
        "num_clean": len(clean),
        "num_dropped": num_dropped,
        "contestants": {name: contestant_figures([r[name] for r in used]) for name in used[0]},
    }


def against_floor(job: Job, seconds: dict[str, Any], rates: floor.Rates) -> dict[str, Any]:
    return {"precision": job.precision, "rates": vars(rates), "shares": floor.shares(job, seconds, rates)}


def in_short(found: Mapping[str, Any]) -> str:
    if "error" in found:
        return str(found["error"])
    spread, count = found["ratio"], f"{found['num_clean']} clean, {found['num_dropped']} dropped"
    return f"{spread['median']:.2f}x ({spread['low']:.2f} to {spread['high']:.2f}) of {found['rival']}, {count}"
