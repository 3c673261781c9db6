"""Compare groups of runs by prompt; a group differs in seeds alone."""

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, astuple
from statistics import fmean, variance
from typing import Any

from covey.algorithm.intervals import Estimate, bounds_of, mean_interval, pass_of_each, student
from covey.run.folder import last_settings, run_of
from covey.system.text.format import number_of
from covey_doctor.verdicts import of_each
from covey_report.branch.paired import line_of, pair
from covey_report.logs.read import Row, RunFiles
from covey_report.page.curves import short
from covey_report.page.origins import plain
from covey_report.runs.outcome import WORDS, is_number, spell, state_of

CONFIDENCE = 0.95
PASSES = (1, 2, 4, 8, 16, 32, 64)
"""The k of pass@k that are compared."""
OF_ONE_RUN = ("seed", "resume", "trust_run", "output.", "timeouts.", "cold_start.cache_dir", "hydra.")
"""Settings in which runs of one group may differ."""
JUDGES = re.compile(
    r"rewards|reward_weights|evaluation\.correct_above|environment\.(?!(num|max|worker|cache|judge_cache)_|\w*timeout|history)\w.*"
).fullmatch
"""Matches settings that decide what an answer earns."""


def comparison(runs: Sequence[RunFiles], names: Sequence[str]) -> dict[str, Any]:
    """Compare each group of runs with the first, by settings and evaluations.

    Runs of one group alone are taken together, and each is compared with the first.
    """
    settings = list(dict.fromkeys(name for run in runs for name in run.settings))
    values = [(name, [_shown(run.settings.get(name)) for run in runs]) for name in settings]
    groups = groups_of(runs)
    together = _together([run.verdicts[-1] for run in runs if run.verdicts]) if len(groups) == 1 else None
    if together and all(len(set(of)) == 1 for name, of in values if name in ("seed", "model.name")):
        together = "runs of the same settings and seed"
    if any(run.settings.get("served") for run in runs):
        together = "models of a service, each its client's own: not compared"
    groups = [[place] for place in range(len(runs))] if together else groups
    labels = [names[first] + (f" and {number_of(len(more), 'more seed')}" if more else "") for first, *more in groups]
    base, *others = ([runs[place] for place in group if runs[place].verdicts] for group in groups)
    gains = [{"name": label, **_against(base, other)} for label, other in zip(labels[1:], others, strict=True)]
    for gain, (place, *_) in zip(gains, groups[1:], strict=True):
        if gain["measures"] and (changed := [name for name, of in values if JUDGES(name) and of[0] != of[place]]):
            gain |= {"state": "none", "words": f"not comparable, as other settings judged: {', '.join(changed)}"}
    gains = [gain for gain in gains if gain["measures"] or not together]
    return {
        "settings": [(name, of) for name, of in values if len(set(of)) > 1],
        "base": labels[0],
        "together": together,
        "gains": [{**gain, "lines": lines_of(gain, labels[0]) + branch_lines(runs, gain, labels)} for gain in gains],
    }


def branch_lines(runs: Sequence[RunFiles], gain: Mapping[str, Any], labels: Sequence[str]) -> list[str]:
    """Describe the rewards of branches of one checkpoint, a run each."""
    place = labels.index(gain["name"])
    found = pair(runs[0], runs[place]) if len(labels) == len(runs) else None
    return [] if found is None else [line_of(found)]


def groups_of(runs: Sequence[RunFiles]) -> list[list[int]]:
    """Group the places of runs that differ only in the seed."""
    found: dict[str, list[int]] = {}
    for place, run in enumerate(runs):
        found.setdefault(_key(run.settings), []).append(place)
    return list(found.values())


def _key(settings: Mapping[str, Any]) -> str:
    kept = {name: value for name, value in settings.items() if not name.startswith(OF_ONE_RUN)}
    # A policy that a run saved is what that run's settings made
    name = str(settings.get("model.name"))
    if (saved := run_of(name)) is not None:
        kept["model.name"] = [_key(last_settings(saved)), name.split("/")[-2]]
    return json.dumps(kept, sort_keys=True, default=str)


def _together(rows: Sequence[Row]) -> str:
    """Describe the mean of runs that differ in the seed alone."""
    said, shared = "one group of runs, alike but for the seed", _in_common(rows)
    for name in measures_of(*rows)[:1] if shared and len(rows) > 1 else ():
        values = [_values(row, name, shared) for row in rows]
        found = difference([[0.0] * len(shared)] * len(rows), values)
        if math.isnan(found.value):
            return said
        low = max(found.low, 0.0) if bounds_of([one for of_run in values for one in of_run]) else found.low
        told = _told(name, [short(value) for value in (found.value, low, found.high)], sign="")
        said += f"; together {told} on {number_of(len(shared), 'prompt')}"
    return said


def _in_common(rows: Sequence[Row]) -> list[str]:
    everywhere = set.intersection(*(set(row["prompts"]) for row in rows)) if rows else set()
    return [name for name in rows[0]["prompts"] if name in everywhere] if everywhere else []


def _shown(value: Any) -> str:
    return "null" if value in (None, {}, []) else plain(value)


def _against(*sides: Sequence[RunFiles]) -> dict[str, Any]:
    """Subtract one side from the other on the shared prompts, with intervals."""
    base, other = ([run.verdicts[-1] for run in runs] for runs in sides)
    rows = [*base, *other]
    shared = _in_common(rows) if base and other else []
    found = {
        name: difference(*([_values(row, name, shared) for row in side] for side in (base, other)))
        for name in (measures_of(*rows) if shared else ())
    }
    # Without a prompt that both sides could judge there is no difference, not one of 0
    found = {name: one for name, one in found.items() if not math.isnan(one.value)}
    first = next(iter(found.values()), None)
    state = state_of(None if first is None else asdict(first), len(shared))
    words, levels = READINGS[state], {name: [_level(side, name, shared) for side in (base, other)] for name in found}
    if found and all(_values(row, name, shared) == _values(rows[0], name, shared) for row in rows for name in found):
        words += ", the same rewards on every prompt"
        if _write_alike([run for runs in sides for run in runs]):  # chance did the same to all
            words, found = SAME, {name: Estimate(0.0, math.nan, math.nan) for name in found}
    return {
        "num_prompts": len(shared),
        "seeds": [len(base), len(other)],
        "measures": {name: [short(value) for value in astuple(one)] for name, one in found.items()},
        "levels": levels,
        "state": state,
        "words": words if found else "nothing in common",
    }


def _level(rows: Sequence[Row], measure: str, shared: Sequence[str]) -> float | None:
    """Return the mean of a measure over runs and known prompts."""
    known = [value for row in rows for value in _values(row, measure, shared) if not math.isnan(value)]
    return short(fmean(known)) if known else None


def _write_alike(runs: Sequence[RunFiles]) -> bool:
    """Return True if last evaluations kept equal answers."""
    of_last = ([row for row in run.answers if row["step"] == run.verdicts[-1]["step"]] for run in runs)
    first, *others = ([(row.get("prompt"), row.get("completion")) for row in rows] for rows in of_last)
    return bool(first) and all(own == first for own in others)


SAME = "the same answers"
READINGS = WORDS | {"shown": "better, shown", "lost": "worse, shown", "unclear": "no difference shown"}


def _values(row: Row, measure: str, shared: Sequence[str]) -> list[float]:
    _, is_pass, k = measure.partition("pass@")
    values = pass_of_each(row["num_scored"], row["num_right"], int(k)) if is_pass else of_each(row, measure)
    own = dict(zip(row["prompts"], values, strict=True))
    return [own[name] for name in shared]


def measures_of(*rows: Row) -> list[str]:
    """List the measures that all rows have, the main one first."""
    most = min(min(row.get("num_scored") or [0]) for row in rows)
    tells = all(set(row["right"]) - {"-"} for row in rows)
    return [*(["accuracy", *(f"pass@{k}" for k in PASSES if k <= most)] if tells else []), "reward_mean"]


def difference(base: Sequence[Sequence[float]], other: Sequence[Sequence[float]]) -> Estimate:
    """Estimate the mean difference of two groups of runs over shared prompts.

    The interval has what prompts leave open, paired, and where both sides have several runs what seeds do besides
    (Welch, Biometrika 34:28, 1947).
    """
    columns = [column for side in (base, other) for column in side]
    known = [place for place in range(len(columns[0])) if not any(math.isnan(column[place]) for column in columns)]
    means = [[fmean(column[place] for column in side) for place in known] for side in (base, other)]
    is_bounded = bounds_of([column[place] for column in columns for place in known]) is not None
    found = mean_interval([b - a for a, b in zip(*means, strict=True)], CONFIDENCE, (-1.0, 1.0) if is_bounded else None)
    if min(len(base), len(other)) < 2 or not known:
        return found
    # Add what runs of other seeds would differ by
    sides = [[fmean(column[place] for place in known) for column in side] for side in (base, other)]
    parts = [variance(of_runs) / len(of_runs) for of_runs in sides]
    spread = sum(part**2 / (len(of_runs) - 1) for part, of_runs in zip(parts, sides, strict=True))
    of_seeds = student(CONFIDENCE, sum(parts) ** 2 / spread) * math.sqrt(sum(parts)) if spread else 0.0
    low = found.value - math.hypot(found.value - found.low, of_seeds)
    high = found.value + math.hypot(found.high - found.value, of_seeds)
    return Estimate(found.value, max(low, -1.0) if is_bounded else low, min(high, 1.0) if is_bounded else high)


def lines_of(found: Mapping[str, Any], base: str) -> list[str]:
    """Describe a comparison: a line, then one for each measure."""
    if not found["measures"]:
        return [f"{found['name']} against {base}"]
    runs = "{} and {} runs".format(*found["seeds"]) if max(found["seeds"]) > 1 else "a run each"
    runs += ": other seeds may differ by more" if min(found["seeds"]) < 2 and found["words"] != SAME else ""
    first = f"{found['name']} against {base}, {number_of(found['num_prompts'], 'prompt')}, {runs}"
    return [first, *(_told(name, values, levels=found["levels"][name]) for name, values in found["measures"].items())]


def _told(name: str, values: Sequence[float | None], sign: str = "+", levels: Sequence[float | None] = ()) -> str:
    """Spell a measure with its interval, unit and levels."""
    value, low, high = values
    is_share = name != "reward_mean"
    factor, form = (100, ".1f") if is_share else (1, ".3f")
    said = f"{name if is_share else 'mean reward'} {factor * (value or 0):{sign}{form}}"
    reached = " → ".join(f"{factor * level:{form}}" for level in levels if level is not None)
    said += " points" if is_share and reached else ""
    said += f" {spell({'low': low, 'high': high}, factor, form)}" if is_number(low) and is_number(high) else ""
    return said + (f", {reached}{' %' * is_share}" if reached else "")
