"""The work of sampler processes: a line per step, totals per run."""

from collections.abc import Mapping
from dataclasses import dataclass

Row = Mapping[str, float | None]


@dataclass
class SamplersTotals:
    """Sums over the steps of a run, 0 without sampler processes."""

    steps: int = 0
    seconds: float = 0.0
    tokens: float = 0.0
    age_sum: float = 0.0
    age_max: float = 0.0
    trainer_waited: float = 0.0
    samplers_waited: float = 0.0

    def add(self, row: Row) -> None:
        """Add a step's row, if samplers are its source."""
        if "samplers/alive" not in row:
            return
        self.steps += 1
        self.seconds += row["seconds"] or 0.0
        self.tokens += row.get("samplers/tokens") or 0.0
        self.age_sum += row["staleness/mean"] or 0.0
        self.age_max = max(self.age_max, row["staleness/max"] or 0.0)
        self.trainer_waited += row["trainer_waited_seconds"] or 0.0
        self.samplers_waited += row["samplers/waited_seconds"] or 0.0

    def described(self) -> dict[str, float] | None:
        """Return the summary's values, None without samplers."""
        if self.steps == 0:
            return None
        return {
            "age_mean": self.age_sum / self.steps,
            "age_max": self.age_max,
            "trainer_waited_seconds": self.trainer_waited,
            "samplers_waited_seconds": self.samplers_waited,
            "tokens_per_second": self.tokens / self.seconds if self.seconds > 0 else 0.0,
        }


def samplers_line(row: Row) -> str:
    """Describe age, buffer, waits and speed in a line, "" without samplers.

    >>> samplers_line({"samplers/alive": 2.0, "staleness/mean": 0.75, "staleness/max": 1.0, ...})
    'age 0.8 max 1  buffer 3/8  waited 0.2 s, samplers 0.0 s, 3,412 tokens/s'
    """
    if "samplers/alive" not in row:
        return ""
    # Values are null where nothing was measured
    number = {name: value or 0.0 for name, value in row.items()}
    rate = number.get("samplers/tokens", 0.0) / max(number["seconds"], 1e-9)
    return (
        f"age {number['staleness/mean']:.1f} max {number['staleness/max']:g}  "
        f"buffer {number['buffer/finished']:g}/{number['buffer/pending']:g}  "
        f"waited {number['trainer_waited_seconds']:.1f} s, "
        f"samplers {number['samplers/waited_seconds']:.1f} s, {rate:,.0f} tokens/s"
    )
