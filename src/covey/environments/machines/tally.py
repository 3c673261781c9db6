"""Numbers about the machines of a step."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from covey.environments.machines.design.tree import canonical
from covey.environments.machines.design.types import Invalid, Machine
from covey.environments.machines.physics.trajectory import Ending
from covey.types import Failure


@dataclass(slots=True)
class StepStats:
    """Counts group by group until it is asked."""

    scores: list[list[float]] = field(default_factory=list)
    """Of each group; machines that the system failed to score are left out."""
    num_unique: list[int] = field(default_factory=list)
    """Different valid machines of each group."""
    codes: list[str] = field(default_factory=list)
    """Of all answers; empty for valid machines."""
    endings: list[Ending] = field(default_factory=list)
    """Of what was simulated."""

    def add(
        self, machines: Sequence[Machine | Invalid], scores: Sequence[float | Failure], endings: Sequence[Ending]
    ) -> None:
        """Count all answers to one prompt."""
        self.scores.append([score for score in scores if not isinstance(score, Failure)])
        self.num_unique.append(len({canonical(found.tree) for found in machines if isinstance(found, Machine)}))
        self.codes += [found.code if isinstance(found, Invalid) else "" for found in machines]
        self.endings += endings

    def take(self) -> dict[str, float]:
        """Return what there is to log, and begin anew."""
        groups, unique, codes = [group for group in self.scores if group], self.num_unique, self.codes
        reasons = [code for code in codes if code] + [ending for ending in self.endings if ending != "complete"]
        self.scores, self.num_unique, self.codes, self.endings = [], [], [], []
        if not groups:
            return {}
        every = [score for group in groups for score in group]
        placed = [code for code in codes if code in ("", "overlap", "size", "boulder")]
        found = {
            "score_mean": sum(every) / len(every),
            "score_max": max(every),
            "unique_machines": sum(unique) / len(unique),
            **{f"invalid/{reason}": reasons.count(reason) / len(codes) for reason in sorted(set(reasons))},
        }
        if placed:  # of the texts that are trees
            found["spatial_validity"] = sum(code in ("", "boulder") for code in placed) / len(placed)
        return found | _best_at(groups)


def _best_at(groups: Sequence[Sequence[float]]) -> dict[str, float]:
    """Compute Best@N over the largest groups, for N = 1, 2, 4 ... up to their size. Evaluations have greedy ones
    beside."""
    largest = max(map(len, groups))
    chosen = [group for group in groups if len(group) == largest]
    sizes = [2**power for power in range(7) if 2**power <= largest]
    return {f"best_at_{size}": sum(best_of(group, size) for group in chosen) / len(chosen) for size in sizes}


def best_of(scores: Sequence[float], size: int) -> float:
    """Compute the expected best of so many scores drawn with replacement: what a bootstrap estimates, without its
    noise.

    >>> best_of([0.0, 4.0], 2)
    3.0
    """
    ranked, count = sorted(scores), len(scores)
    return sum(
        score * ((rank / count) ** size - ((rank - 1) / count) ** size) for rank, score in enumerate(ranked, start=1)
    )
