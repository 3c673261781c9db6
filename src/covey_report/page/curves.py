"""Curves of a run: numbers, bands, a sentence each."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any

from covey.system.lookup import read_table
from covey.system.text.format import four_digits, number_of, three_digits
from covey_doctor.measures import mann_kendall, standard_error, thinned
from covey_doctor.rules.reward import OWN_PARTS
from covey_doctor.verdicts import of_each
from covey_report.logs.read import Row, RunFiles
from covey_report.page.bands import Band, block, inside, mean_band, moving_bands, moving_shares, share_band, window

FLAT = 1e-4
"""Share of a number by which rounding may move it."""
FEWEST = 5
"""Values that can show a trend: three of noise rise in order once in six times."""


@dataclass(frozen=True, slots=True)
class Plot:
    """A number that is drawn, if a run has it."""

    metric: str
    title: str
    only_if_varied: bool = False
    """Left out where it never changes."""
    is_log: bool = False
    trials: str = ""
    """The metric that counts a share's units, where these are independent of each other."""
    least: float | None = None
    """Lower bound of its values; shares lie between 0 and 1."""


PLOTS, TIMES = (tuple(Plot(**row) for row in rows) for rows in read_table(Path(__file__).with_suffix(".yaml")).values())
OWN_POINTS = 20_000
"""Maximum points of all curves named by reward functions and environments, of which there may be hundreds."""


def curves_of(run: RunFiles) -> list[dict[str, Any]]:
    """Draw curves in order: evaluations, rewards, other means, time."""
    names = list(dict.fromkeys(name for row in run.steps for name in row))
    parts = [name for name in names if name.startswith("reward/")]
    plots = [Plot(name, f"reward, part {name[7:]}") for name in (parts if len(parts) > 1 else [])]
    plots += [Plot(name, name, only_if_varied=True) for name in names if name.startswith("environment/")]
    plots += [*PLOTS, *TIMES]
    found = [_held_out(run), _reward(run), *(_metric(run.steps, plot) for plot in plots)]
    _thin([curve for curve in found if curve and curve["name"].startswith(("reward/", "environment/"))])
    ranked = [curve | {"rank": _rank(curve["name"])} for curve in found if curve]
    return sorted(ranked, key=lambda curve: curve["rank"])


def _thin(curves: Sequence[dict[str, Any]]) -> None:
    """Drop points evenly, except the last, where there are too many."""
    every = -(-sum(len(curve["x"]) for curve in curves) // OWN_POINTS)
    for curve in curves if every > 1 else ():
        curve |= {name: [*curve[name][:-1:every], curve[name][-1]] for name in ("x", "raw", "y", "low", "high")}


def _rank(name: str) -> int:
    """Rank a curve among all curves of all runs."""
    own = [plot.metric for plot in PLOTS]
    if name in own:
        return 10 + own.index(name)
    if name.startswith("environment/"):
        return 10 + len(own) if _is_form(name) else 4
    if name.startswith("reward/"):
        return 3 if _is_form(name) else 2
    return {"accuracy": 0, "reward": 1}.get(name, 11 + len(own))


def _is_form(name: str) -> bool:
    """Return True for metrics of form rather than correctness."""
    return not any(word in name.rpartition("/")[2].lower() for word in OWN_PARTS)


def span_of(run: RunFiles) -> tuple[int, int]:
    """Find the first and the last step of a run's curves.

    A run that was only looked at before its first step has the steps that it was to have.
    """
    steps = [row["step"] for row in (*run.steps, *run.looks)]
    first, last = min(steps, default=0), max(steps, default=0)
    wanted = run.settings.get("num_steps")
    return first, last if last > first else first + max(1, wanted if isinstance(wanted, int) else 1)


def number(value: Any) -> float | None:
    """Return a finite number, None for anything else."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    return float(value) if is_number else None


def _reward(run: RunFiles) -> dict[str, Any] | None:
    """Draw the reward of training, with intervals over prompts where known."""
    steps = [row["step"] for row in run.steps]
    values = [number(row.get("sampled_reward_mean")) for row in run.steps]
    if not any(value is not None for value in values):
        return None
    # Intervals over prompts, where every step has one of all that were sampled
    of_step = {row["step"]: _over_prompts(row) for row in run.updates}
    # The rewards of dropped groups are not kept
    whole = [row.get("num_groups_sampled", row.get("num_groups")) == row.get("num_groups") for row in run.steps]
    bands = [of_step.get(row["step"]) if has_all else None for row, has_all in zip(run.steps, whole, strict=True)]
    if all(band is not None and band.low is not None for band in bands):
        about = "95 % over the prompts of a step"
        drawn = [Band(value, band.low, band.high) for value, band in zip(values, bands, strict=True) if band]
    else:
        about, drawn = _moving(values)
    low, high = _range_of(values)
    drawn = [inside(band, low, high) for band in drawn]
    return _curve("reward", "reward of training", steps, values, drawn) | {"about": about}


def _over_prompts(row: Row) -> Band | None:
    """Compute the interval of a step's reward over its prompts. None where the file had no room for all of them."""
    groups = [[r for r in map(number, g.get("rewards", [])) if r is not None] for g in row.get("groups", [])]
    return mean_band([fmean(group) for group in groups if group]) if len(groups) == row.get("num_groups") else None


def _held_out(run: RunFiles) -> dict[str, Any] | None:
    """Draw evaluations as points with intervals: accuracy, else mean reward."""
    num_prompts = prompts_of(run)
    name = "accuracy" if run.looks and number(run.looks[-1].get("accuracy")) is not None else "reward_mean"
    looks = [(row["step"], number(row.get(name))) for row in run.looks]
    found = [(step, value) for step, value in looks if value is not None]
    if not found or not num_prompts:
        return None
    if name == "accuracy":
        bands = [share_band(value * num_prompts, num_prompts) for _, value in found]
    else:
        of_step = {row["step"]: [v for v in of_each(row, name) if not math.isnan(v)] for row in run.verdicts}
        bands = [mean_band(of_step.get(step, []))._replace(value=value) for step, value in found]
    steps, values = [step for step, _ in found], [value for _, value in found]
    title = f"{name.replace('reward_mean', 'mean reward')}, {(run.summary or {}).get('looked_at', 'held-out prompt')}s"
    curve = _curve("accuracy", title, steps, values, bands)
    # Intervals that lie apart tell of a few evaluations what a test over steps cannot
    first, last = bands[0], bands[-1]
    if None not in (first.low, first.high, last.low, last.high):
        curve["reading"] = reading(values, first.high < last.low or last.high < first.low)  # type: ignore[operator]
    return curve | {"about": f"95 % over {number_of(num_prompts, 'prompt')}", "points": True}


def prompts_of(run: RunFiles) -> int:
    """Count the held-out prompts of an evaluation, 0 if unknown."""
    summary = run.summary or {}
    look = summary.get("after") or summary.get("before") or {}
    if isinstance(look.get("num_prompts"), int):
        return int(look["num_prompts"])
    return len(run.verdicts[-1]["prompts"]) if run.verdicts else 0


def _metric(rows: Sequence[Row], plot: Plot) -> dict[str, Any] | None:
    found = [(row["step"], number(row.get(plot.metric))) for row in rows if plot.metric in row]
    values = [value for _, value in found]
    known = [value for value in values if value is not None]
    if not known or (plot.only_if_varied and max(known) - min(known) <= FLAT * max(map(abs, known))):
        return None
    about, bands = _moving(values)
    # Shares of what is counted have Wilson's interval, and no band leaves what a number can be
    counts = [number(row.get(plot.trials)) for row in rows if plot.metric in row] if plot.trials else []
    if counts and None not in counts:
        about = f"{_of_steps(window(len(values)))} and its 95 %, Wilson"
        bands = moving_shares(values, [count or 0.0 for count in counts], window(len(values)))
    is_log = plot.is_log and min(known) > 0
    low, high = _range_of(values) if _may_be_share(plot.metric) else (plot.least, None)
    bands = [inside(band, min(known) if is_log else low, high) for band in bands]
    curve = _curve(plot.metric, plot.title, [step for step, _ in found], values, bands) | {"about": about}
    return curve | ({"log": True} if is_log else {})


def _may_be_share(metric: str) -> bool:
    return metric.startswith(("reward/", "environment/")) or metric.endswith(("_fraction", "_frequency", "accuracy"))


def _range_of(values: Sequence[float | None]) -> tuple[float | None, float | None]:
    """Return the bounds 0 and 1 if all values lie between."""
    known = [value for value in values if value is not None]
    return (0.0, 1.0) if known and min(known) >= 0 and max(known) <= 1 else (None, None)


def _moving(values: Sequence[float | None]) -> tuple[str, list[Band]]:
    width = window(len(values))
    deviation = ", and their standard deviation" if width > 1 else ""
    return f"{_of_steps(width)}{deviation}", moving_bands(values, width)


def _of_steps(width: int) -> str:
    return f"mean of {width} steps" if width > 1 else "each step"


def _curve(
    name: str, title: str, steps: Sequence[int], values: Sequence[float | None], bands: Sequence[Band]
) -> dict[str, Any]:
    points = list(zip(steps, values, bands, strict=True))
    size = block(len(points))
    merged = [_merge(points[start : start + size]) for start in range(0, len(points), size)]
    return {
        "name": name,
        "title": title,
        "x": [step for step, _, _ in merged],
        "raw": [short(raw) for _, raw, _ in merged],
        "y": [short(band.value) for _, _, band in merged],
        "low": [short(band.low) for _, _, band in merged],
        "high": [short(band.high) for _, _, band in merged],
        "reading": reading([value for value in values if value is not None]),
    }


def _merge(points: Sequence[tuple[int, float | None, Band]]) -> tuple[int, float | None, Band]:
    if len(points) == 1:
        return points[0]

    def middle(values: Sequence[float | None]) -> float | None:
        known = [value for value in values if value is not None]
        return fmean(known) if known else None

    band = Band(*(middle([getattr(b, name) for _, _, b in points]) for name in Band._fields))
    return points[len(points) // 2][0], middle([raw for _, raw, _ in points]), band


def reading(values: Sequence[float], is_trend: bool | None = None) -> str:
    """Describe how a curve went between its ends.

    `is_trend` says so where more is known than the values.

    >>> reading([0.2] * 10 + [0.4] * 10)
    'rose by 100 %: 0.2 to 0.4'
    """
    if not values:
        return "nothing was measured"
    if len(values) == 1:
        return f"measured once: {three_digits(values[0])}"
    ends = max(1, len(values) // 10)
    first, last = fmean(values[:ends]), fmean(values[-ends:])
    shown = f"{three_digits(first)} to {three_digits(last)}"
    is_same = three_digits(first) == three_digits(last)
    low, high = min(values), max(values)
    if is_same or (first and abs(last / first - 1) < 0.005):  # would be 0 %
        if high - low <= 0.005 * abs(first):
            return f"stayed at {three_digits(last)}" if is_same else f"hardly moved: {shown}"
        return f"{three_digits(last)} at both ends ({three_digits(low)} to {three_digits(high)})"
    noise = math.hypot(standard_error(values[:ends]), standard_error(values[-ends:]))
    if not (_has_trend(values) and abs(last - first) > 2 * noise if is_trend is None else is_trend):
        is_few = len(values) < (FEWEST if is_trend is None else 3)
        return shown if is_few else f"no trend: {three_digits(low)} to {three_digits(high)}"
    way = "rose" if last > first else "fell"
    # Percentages are undefined at 0 and across it, and turned around below
    if min(first, last) <= 0:
        return f"{way}: {shown}"
    if last / first >= 10:
        return f"{way} {three_digits(last / first)}-fold: {shown}"
    return f"{way} by {abs(last / first - 1):.0%}: {shown}".replace("%", " %")


def _has_trend(values: Sequence[float]) -> bool:
    """Test for a trend: all steps of a few, else Mann-Kendall."""
    means = thinned(values)
    steps = [b - a for a, b in pairwise(means) if a != b]
    is_steady = bool(steps) and (all(step > 0 for step in steps) or all(step < 0 for step in steps))
    return (is_steady and len(means) >= FEWEST) or mann_kendall(means) < 0.05


def short(value: float | None) -> float | None:
    """Return a number of four digits, None if it cannot be drawn."""
    return None if value is None or not math.isfinite(value) else four_digits(value)


def phases_of(summary: Mapping[str, Any]) -> list[tuple[str, float, float]]:
    """Return (name, seconds, share) of each phase of a run, longest first."""
    found = summary.get("phases") or {}
    return sorted(((name, one["seconds"], one["share"]) for name, one in found.items()), key=lambda one: -one[1])
