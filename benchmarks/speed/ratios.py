"""From repetitions to figures: which were clean, medians with their spread, ratios measured side by side."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

Measurement = Mapping[str, Any]
"""What a worker reports of one step."""
Repetition = Mapping[str, Measurement]
"""One step of every contestant, one right after the other."""

BUSY_CORES, BUSY_CORES_SHORT, SHORT_SECONDS = 0.1, 0.15, 0.5
"""A step is clean while other processes used fewer cores than this; short steps are measured more coarsely."""


@dataclass(frozen=True)
class Spread:
    """A figure over repetitions."""

    median: float
    low: float
    high: float

    @staticmethod
    def of(values: Sequence[float]) -> "Spread":
        return Spread(statistics.median(values), min(values), max(values))

    def to_dict(self) -> dict[str, float]:
        return asdict(self)


def is_clean(measurement: Measurement) -> bool:
    """Whether the machine worked for this step alone."""
    limit = BUSY_CORES_SHORT if measurement["seconds"]["total"] < SHORT_SECONDS else BUSY_CORES
    return bool(measurement["others_cores"] < limit)


def split_clean(repetitions: Sequence[Repetition]) -> tuple[list[Repetition], int]:
    """The repetitions in which every contestant's step was clean, and how many were dropped."""
    kept = [repetition for repetition in repetitions if all(map(is_clean, repetition.values()))]
    return kept, len(repetitions) - len(kept)


def value_of(measurement: Measurement, measure: str) -> float:
    """`measure` is "seconds", or "peak_bytes"."""
    return float(measurement["seconds"]["total"] if measure == "seconds" else measurement[measure])


def best_rival(repetitions: Sequence[Repetition], measure: str, own: str = "covey") -> str:
    """The contestant besides `own` with the lowest median."""
    names = [name for name in repetitions[0] if name != own]
    return min(names, key=lambda name: statistics.median(value_of(r[name], measure) for r in repetitions))


def ratio(repetitions: Sequence[Repetition], rival: str, measure: str, own: str = "covey") -> Spread:
    """How many times as much the rival needs, pair by pair."""
    return Spread.of([value_of(r[rival], measure) / value_of(r[own], measure) for r in repetitions])


def contestant_figures(measurements: Sequence[Measurement]) -> dict[str, Any]:
    """Seconds by phase, tokens a second and peak memory of one contestant."""
    seconds = {name: [m["seconds"][name] for m in measurements] for name in measurements[0]["seconds"]}
    speed = [m["num_tokens"] / m["seconds"]["total"] for m in measurements]
    return {
        "seconds": {name: Spread.of(values).to_dict() for name, values in seconds.items()},
        "tokens_per_second": Spread.of(speed).to_dict(),
        "num_tokens": measurements[0]["num_tokens"],
        "peak_bytes": Spread.of([m["peak_bytes"] for m in measurements]).to_dict(),
        "process_bytes": max(m.get("process_bytes", 0) for m in measurements),
        "others_cores": Spread.of([m["others_cores"] for m in measurements]).to_dict(),
    }
