"""The columns of a run for rules: numbers by step, in windows."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean, median
from typing import Any, NamedTuple

from covey_doctor.measures import standard_error

Row = Mapping[str, Any]
MIN_WINDOW, SHARE = 10, 0.05
"""Steps of a window: at least this number, and at least this share of the run."""
HUGE = 1e100
"""Bound on numbers of a log, larger ones are clipped: its square is still a number."""
NOT_SHOWN = "not_shown"
"""Key of a sentence in a summary on results of evaluations that may be chance."""
SKIPPED_ROWS = 2
"""Rows skipped at the start, before the baseline: the optimiser's state is not yet one."""


class RunPart(NamedTuple):
    """A number, and the part of the run that it is of."""

    value: float
    first: int
    """Step, as the next."""
    last: int
    is_look: bool = False
    """Whether it was measured by an evaluation after these steps, rather than in them."""

    @property
    def steps(self) -> str:
        """Return the steps in words.

        >>> RunPart(0.5, 3, 12).steps, RunPart(0.5, 0, 0, is_look=True).steps
        ('steps 3 to 12', 'before step 1')
        """
        if self.is_look:
            return f"after step {self.last}" if self.last else "before step 1"
        return f"step {self.last}" if self.first == self.last else f"steps {self.first} to {self.last}"


@dataclass(frozen=True, slots=True)
class LogWindow:
    """Neighbouring steps of one column."""

    first: int
    last: int
    values: tuple[float, ...]

    @staticmethod
    def of(points: Sequence[tuple[int, float]]) -> "LogWindow":
        return LogWindow(points[0][0], points[-1][0], tuple(value for _, value in points))

    @property
    def mean(self) -> float:
        return fmean(self.values)

    @property
    def error(self) -> float:
        return standard_error(self.values)

    @property
    def part(self) -> RunPart:
        return RunPart(self.mean, self.first, self.last)


@dataclass(frozen=True, slots=True)
class LogSpan:
    """Two or more windows in a row of which something holds."""

    windows: tuple[LogWindow, ...]
    is_over: bool
    """Whether a later window is free of it."""
    since: int
    """Its first step: that of the first window, or of the column where it holds from there on."""

    @property
    def until(self) -> int | None:
        return self.windows[-1].last if self.is_over else None

    @property
    def mean(self) -> float:
        return fmean(window.mean for window in self.windows)


@dataclass(slots=True)
class RunLog:
    """The logs of a run so far; columns may be missing."""

    steps: list[int] = field(default_factory=list)
    columns: dict[str, list[float | None]] = field(default_factory=dict)
    """Values of training rows, by name; as long as `steps`, None where a row has no number."""
    look_steps: list[int] = field(default_factory=list)
    looks: dict[str, list[float | None]] = field(default_factory=dict)
    """Values of evaluations, likewise."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Dotted name -> value."""
    updates: Sequence[Row] = ()
    """Rows of updates.jsonl."""
    verdicts: Sequence[Row] = ()
    """Verdicts on all prompts of each evaluation (`covey_doctor.verdicts`)."""
    answers: Sequence[Row] = ()
    """Answers of evaluations and of training: rows with step, prompt_id, completion, reward."""
    rollouts: Sequence[Row] = ()
    summary: Row = field(default_factory=dict)
    """The run's result: `status`, `after` and its `num_prompts`, `gain` by measure, `confidence`, `looked_at`, and
    NOT_SHOWN."""
    error: str | None = None
    """Reason why the run ended early."""
    control: "RunLog | None" = None
    """The same run with shuffled rewards."""
    is_foreign: bool = False
    """Whether another tool wrote it, of whose settings little is known."""

    def add_row(self, row: Row, *, is_look: bool = False) -> None:
        """Take a row of numbers in."""
        steps, columns = (self.look_steps, self.looks) if is_look else (self.steps, self.columns)
        for name, value in row.items():
            if name in ("step", "kind", "time"):
                continue
            column = columns.setdefault(name, [None] * len(steps))
            column.append(as_number(value))
        steps.append(int(row["step"]))
        for column in columns.values():
            column.extend([None] * (len(steps) - len(column)))

    def derived(self, name: str, points: Iterable[tuple[int, float]]) -> "RunLog":
        """Return a log of the run with one derived column."""
        return log_of([{"step": step, name: value} for step, value in points], settings=self.settings)

    @property
    def width(self) -> int:
        """Return the rows of a window."""
        planned = self.settings.get("num_steps")
        rows = max(len(self.steps), planned if isinstance(planned, int) and not self.is_foreign else 0)
        return max(MIN_WINDOW, int(SHARE * rows))

    def known(self, name: str) -> list[tuple[int, float]]:
        """Return (step, number) of a column where there is a finite one."""
        return _finite(self.steps, self.columns.get(name, ()))

    def values(self, name: str) -> list[float]:
        return [value for _, value in self.known(name)]

    def windows(self, name: str) -> list[LogWindow]:
        """Return a column's windows, counted back from its last number."""
        points, width = self.known(name), self.width
        ends = range(len(points), width - 1, -width)
        return [LogWindow.of(points[end - width : end]) for end in reversed(ends)]

    def baseline(self, name: str) -> LogWindow | None:
        """Return the baseline: the first window after the first rows, if complete."""
        part = self.known(name)[SKIPPED_ROWS : SKIPPED_ROWS + self.width]
        return None if len(part) < self.width else LogWindow.of(part)

    def usual(self, name: str) -> RunPart | None:
        base = self.baseline(name)
        return None if base is None else RunPart(float(median(base.values)), base.first, base.last)

    def at_first(self, name: str, pick: Callable[..., RunPart]) -> RunPart | None:
        """Pick from the medians of baseline and first rows.

        Faults within the first steps are in the baseline already.
        """
        usual, rows = self.usual(name), self.known(name)[: SKIPPED_ROWS + 1]
        if usual is None:
            return None
        early = RunPart(float(median(value for _, value in rows)), rows[0][0], rows[-1][0])
        return pick(usual, early, key=lambda part: part.value)

    def lasting(self, name: str, holds: Callable[[LogWindow], bool]) -> LogSpan | None:
        """Return the latest windows in a row of which something holds."""
        windows, runs = self.windows(name), [[]]  # type: tuple[list[LogWindow], list[list[LogWindow]]]
        for window in windows:
            if holds(window):
                runs[-1].append(window)
            elif runs[-1]:
                runs.append([])
        found = [run for run in runs if len(run) >= 2]
        if not found:
            return None
        # A condition of all windows may hold in the steps before the first as well, which are in none
        latest, points = found[-1], self.known(name)
        rest = [value for step, value in points if step < windows[0].first]
        before = LogWindow(points[0][0], latest[0].first, tuple(rest))
        is_whole = latest[0] is windows[0] and (not rest or holds(before))
        since = points[0][0] if is_whole else latest[0].first
        return LogSpan(tuple(latest), latest[-1] is not windows[-1], since)

    def looks_at(self, name: str) -> list[tuple[int, float]]:
        """Return (step, number) of the evaluations that have it."""
        return _finite(self.look_steps, self.looks.get(name, ()))

    def setting(self, name: str, default: Any = None) -> Any:
        return self.settings.get(name, default)


def _finite(steps: Sequence[int], column: Sequence[float | None]) -> list[tuple[int, float]]:
    pairs = zip(steps, column, strict=bool(column))
    return [(step, value) for step, value in pairs if value is not None and math.isfinite(value)]


def log_of(steps: Sequence[Row], looks: Sequence[Row] = (), **rest: Any) -> RunLog:
    """Return the log of rows of training and of evaluations."""
    log = RunLog(**rest)
    for row in steps:
        log.add_row(row)
    for row in looks:
        log.add_row(row, is_look=True)
    return log


def as_number(value: Any) -> float | None:
    """Return a number, also from JSON's words for it.

    >>> as_number("-inf")
    -inf
    """
    if isinstance(value, str) and value.lower() in ("nan", "inf", "-inf", "infinity", "-infinity"):
        return float(value)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return max(-HUGE, min(HUGE, float(value))) if math.isfinite(value) else float(value)
