"""How many devices keep how busy, at which staleness: modelled for 8 to 4,096 GPUs, checked where something ran.

    python -m benchmarks.cluster_model            # about five minutes; writes benchmarks/scale/cluster_model.md

No GPU is used and none was: the models are `cluster_simulation.py` and `weight_push.py` of benchmarks/scale.
`predict` takes measured service times of groups, so that a measured run can be held against it.
"""

import math
import random
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean

from benchmarks.scale import weight_push
from benchmarks.scale.cluster_simulation import Cluster, Utilisation, best_split, predict, simulate
from covey.rollouts.buffer import Bound

PAGE = Path(__file__).resolve().parent / "scale" / "cluster_model.md"
BOUNDS = (0, 1, 2, 4, 8)
SIZES = (8, 16, 64, 256, 1024, 4096)
MOST_GROUPS = 256
"""Of a step: 2,048 completions."""
SWITCH_SECONDS = 10.0
STEPS = 10

OTHER_MODEL = {
    0.4: {0: 0.82, 1: 1.46, 2: 1.96, 4: 2.23, 8: 2.29},
    0.7: {0: 0.90, 1: 1.58, 2: 2.17, 4: 2.95, 8: 3.58},
    1.0: {0: 0.92, 1: 1.69, 2: 2.36, 4: 3.52, 8: 4.50},
}
"""Speed-up over colocated synchronous training on 16 GPUs by sigma and bound, of an earlier, separate simulation."""
OTHER_DRAINED = {0.4: {1: 1.41, 4: 1.39}, 0.7: {1: 1.23, 4: 1.24}, 1.0: {1: 1.21, 4: 1.20}}
MEASURED = {0: 0.950, 1: 0.510, 2: 0.397, 4: 0.279}
"""Seconds of a step by bound, of a prototype on Ray on two CPU cores whose samplers slept the service times."""


@dataclass(frozen=True)
class Row:
    """A cluster beside colocated synchronous training on as many devices."""

    cluster: Cluster
    found: Utilisation
    synchronous_seconds: float

    @property
    def speed_up(self) -> float:
        return self.synchronous_seconds / self.found.step_seconds


def synchronous_seconds(cluster: Cluster, steps: int = STEPS) -> float:
    """Return the step of all devices sampling, then all training."""
    devices = cluster.samplers + cluster.trainers
    both = replace(cluster, samplers=devices, trainers=devices, max_staleness=0, switch_seconds=SWITCH_SECONDS)
    return simulate(replace(both, drain="none"), steps).step_seconds


def row(cluster: Cluster, steps: int = STEPS, parts: int = 16) -> Row:
    best, found = best_split(cluster, steps, parts)
    return Row(best, found, synchronous_seconds(cluster, steps))


def of_size(devices: int, max_staleness: int = 0) -> Cluster:
    """Return the usual work on so many devices: four groups of a step for each, up to the largest batch."""
    groups = min(4 * devices, MOST_GROUPS)
    return Cluster(devices // 2, devices - devices // 2, groups_per_step=groups, max_staleness=max_staleness)


# ---------------------------------------------------------------------------------------------------------- checks


def predicted_prototype(max_staleness: int, draws: int = 40, steps: int = 40) -> tuple[float, float, float]:
    """Return mean, least and most seconds of a step of the prototype over draws of its lengths.

    2 samplers of 8 places, 8 groups a step, lengths lognormal (sigma 0.8, mean 60 tokens of 5 ms), training 0.25 s.
    """
    found = []
    for seed in range(draws):
        drawn = random.Random(seed)
        seconds = [0.005 * 60 * drawn.lognormvariate(-0.32, 0.8) for _ in range(8 * steps)]
        found.append(predict(seconds, 16, Bound(8, max_staleness), 0.25).step_seconds)
    return fmean(found), min(found), max(found)


def check_of_prediction() -> list[str]:
    rows = ["| bound | measured step, s | predicted, mean of 40 draws (range) | difference |", "|---|---|---|---|"]
    for bound, measured in MEASURED.items():
        mean, least, most = predicted_prototype(bound)
        difference = f"{measured / mean - 1:+.1%}"
        rows.append(f"| {bound} | {measured:.3f} | {mean:.3f} ({least:.3f} to {most:.3f}) | {difference} |")
    return rows


def check_of_simulation() -> tuple[list[str], float]:
    """Return rows of both simulations of 16 GPUs, and the largest relative difference between them."""
    rows = ["| sigma of lengths | " + " | ".join(f"S = {bound}" for bound in BOUNDS) + " |", "|---" * 6 + "|"]
    worst = 0.0
    for sigma, others in OTHER_MODEL.items():
        cells = []
        for bound, other in others.items():
            ours = row(replace(of_size(16, bound), sigma=sigma), 16).speed_up
            worst = max(worst, abs(ours / other - 1))
            cells.append(f"{ours:.2f} ({other:.2f})")
        rows.append(f"| {sigma} | {' | '.join(cells)} |")
    return rows, worst


def drained_rows() -> list[str]:
    ways = ("all together and the trainer waits", "all together", "each for itself")
    rows = ["| sigma of lengths | " + " | ".join(f"{way}, S = 1 | S = 4" for way in ways) + " |", "|---" * 7 + "|"]
    for sigma, others in OTHER_DRAINED.items():
        cluster = replace(of_size(16), sigma=sigma)
        cells = []
        for bound, other in others.items():
            ours = row(replace(cluster, drain="blocking", max_staleness=bound), 16).speed_up
            cells.append(f"{ours:.2f} ({other:.2f})")
        for how in ("all", "each"):
            cells += [f"{row(replace(cluster, drain=how, max_staleness=bound), 16).speed_up:.2f}" for bound in others]
        rows.append(f"| {sigma} | {' | '.join(cells)} |")
    return rows


# ---------------------------------------------------------------------------------------------------------- tables


def size_rows(sizes: Sequence[int] = SIZES) -> list[str]:
    """Return a row for each size and bound."""
    heads = (
        "GPUs",
        "groups a step",
        "S",
        "samplers + trainers",
        "step, s",
        "speed-up",
        "trainer busy",
        "samplers busy",
    )
    rows = [f"| {' | '.join((*heads, 'mean age'))} |", "|---" * 9 + "|"]
    for size in sizes:
        for bound in BOUNDS:
            found = row(of_size(size, bound), STEPS if size < 64 else 4, 16 if size < 64 else 8)
            use, cluster = found.found, found.cluster
            cells = (
                f"{size:,}",
                f"{cluster.groups_per_step:,}",
                str(bound),
                f"{cluster.samplers:,} + {cluster.trainers:,}",
                f"{use.step_seconds:.0f}",
                f"{found.speed_up:.2f}",
                f"{use.trainer_busy:.0%}",
                f"{use.sampler_busy:.0%}",
                f"{use.mean_age:.1f}",
            )
            rows.append(f"| {' | '.join(cells)} |")
    return rows


def reward_rows() -> list[str]:
    """Return rows for rewards that take their time."""
    rows = ["| mean seconds of a reward | " + " | ".join(f"S = {bound}" for bound in BOUNDS) + " |", "|---" * 6 + "|"]
    for seconds in (0.0, 10.0, 60.0):
        found = [row(replace(of_size(16, bound), reward_seconds=seconds), 16) for bound in BOUNDS]
        cells = [f"{one.found.step_seconds:.0f} s ({one.speed_up:.2f})" for one in found]
        rows.append(f"| {seconds:g} | {' | '.join(cells)} |")
    return rows


def page() -> str:
    simulated, worst = check_of_simulation()
    parts = [
        TITLE,
        "\n".join(check_of_prediction()),
        SIMULATED.format(worst=math.ceil(100 * worst)),
        "\n".join(simulated),
        DRAINED,
        "\n".join(drained_rows()),
        BY_SIZE,
        "\n".join(size_rows()),
        REWARDS,
        "\n".join(reward_rows()),
        PUSH,
        "\n".join(weight_push.table()),
        COMPARED,
        "\n".join(weight_push.comparison()),
        ENDING,
    ]
    return "\n\n".join(parts) + "\n"


TITLE = """# A cluster on paper

**Every figure on this page is modelled, except those that say measured or published.** No GPU was used. Written by
`python -m benchmarks.cluster_model`; how asynchronous training works is in
[docs/use/scale.md](../../docs/use/scale.md).

## The predictor against measured steps

`predict` follows the rule of admission group by group. Measured: a prototype of the scheduling on Ray, two samplers of
eight places on two CPU cores, whose completions are time spent asleep; 40 steps. Its lengths are not kept, so the
prediction is over 40 draws from their distribution, which differ by a tenth and more; from its own lengths the
prototype was within 1.7 to 2.6 % of the same rule. [async_schedule.md](async_schedule.md) holds runs of covey itself
against `benchmarks.scale.cluster_simulation.predict` over their own lengths."""

SIMULATED = """## The simulation against another one

Sixteen GPUs, 64 groups of 8 completions a step, lengths lognormal with a mean of 2,000 and at most 16,000 tokens; one
decoding step of a sampler takes 10 ms and 0.1 ms more for each completion; training takes 0.45 ms for a token on one
device; a push 2 s in flight. Speed-up over colocated synchronous training on the same sixteen (10 s to switch roles),
at the best split between samplers and trainers. In brackets, what another simulation, written separately, found for the
same figures; the largest difference is {worst} %. It does not say how many completions a sampler decodes at a time: 64
here, which comes nearest (with 128 and more, S = 8 at sigma 0.4 gains 15 to 25 % more). Other draws of lengths, other
ways to hand groups to samplers, and splits in sixteenths are what else differs."""

DRAINED = """The same where samplers end what is under way before they take new weights. `engine.update=wait` lets each
sampler do so for itself. Where all of them do so together and the trainer waits for that push before its next step, as
in the other simulation (in brackets), a larger bound gains next to nothing; where it trains what is there meanwhile, it
does. In flight (above) is faster than all."""

BY_SIZE = """## Utilisation and age by size

The same work; four groups a step for each GPU up to 256 groups, sigma 1.0. Above 64 GPUs the batch no longer grows: a
step cannot be shorter than its longest completion divided by S + 1, so more devices stand idle. One sampler is one
GPU, training scales without loss, and a push takes 2 s at every size: real clusters fall behind all three.
Trainer busy counts training and pushes; a sampler is busy while it decodes anything at all. From 64 GPUs on,
splits are tried in eighths."""

REWARDS = """## Rewards that take their time

Sixteen GPUs, sigma 1.0; seconds of a reward are exponential, and a completion has left its sampler meanwhile. In
brackets the speed-up over colocated synchronous training with the same rewards."""

PUSH = """## Pushing weights, by link

Nominal bandwidth of one direction, weights passed on from one receiver to the next in buckets of 100 MB. Seconds for
1 / 16 / 512 receivers."""

COMPARED = """Published figures of others beside this model. A sender that starts from host memory passes its PCIe link:
the four of Checkpoint Engine come near one. A factor well above 1 is time that no wire explains."""

ENDING = """Sources: README of MoonshotAI/checkpoint-engine; slime's announcement; TRL pull request 5892.

---

Implemented in: [cluster_simulation.py](cluster_simulation.py), [weight_push.py](weight_push.py),
[cluster_model.py](../cluster_model.py)."""


def main() -> int:
    PAGE.write_text(page(), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
