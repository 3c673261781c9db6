"""How fast does a run with samplers of its own go, at which bound of staleness?

    python -m benchmarks.scale.async_schedule              # five minutes; writes benchmarks/scale/async_schedule.md

Samplers and training sleep for as long as they would compute, so that two cores show the scheduling alone: 2 samplers
of 8 places on a real Ray, 8 groups a step, lengths lognormal (sigma 0.8, mean 60 tokens of 5 ms), training 0.25 s.
Each measured run is held against `predict` of benchmarks/scale/cluster_simulation.py over the same service times.
"""

import argparse
import asyncio
import platform
import random
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from benchmarks.scale.cluster_simulation import predict
from covey.cluster.settings import DevicesConfig
from covey.cluster.slot import PoolLimits
from covey.cluster.source import RaySource
from covey.config.schema import Config
from covey.engine.fake import FakeEngine
from covey.environments.arithmetic import Arithmetic
from covey.policy.models.loading import load_policy
from covey.policy.policy import Policy
from covey.rollouts.buffer import Bound
from covey.rollouts.sampler import Sampler
from covey.rollouts.source import LocalSource
from covey.rollouts.stream import PromptStream, rollout_seed
from covey.system.waits.watchdog import Watchdog
from covey.types import Completion, Sampling

PAGE = Path(__file__).resolve().parent / "async_schedule.md"
GROUPS, PLACES, SAMPLERS = 8, 8, 2
TOKEN_SECONDS, MEAN_TOKENS, SIGMA = 0.005, 60, 0.8
TRAIN_SECONDS = 0.25
BOUNDS = (0, 1, 2, 4)
ASKED = {1: 1.7, 2: 2.2, 4: 3.0}
"""Least speed-up over bound 0."""


def seconds_of(seed: int) -> float:
    """Return the service time of the group with this seed."""
    return TOKEN_SECONDS * MEAN_TOKENS * random.Random(seed).lognormvariate(-SIGMA * SIGMA / 2, SIGMA)


class SleepingEngine(FakeEngine):
    """Answers with one token after as long as a group would take."""

    async def generate(self, prompt_ids: object, n: int, sampling: Sampling) -> list[Completion]:
        version = self.version
        await asyncio.sleep(seconds_of(sampling.seed))
        return [Completion((8,), (-0.5,), "stop", version) for _ in range(n)]


def make_sampler() -> Sampler:
    policy = small_policy()
    engine = SleepingEngine(lambda ids, index: (8,), vocab_size=len(policy.tokenizer))
    return Sampler(engine, Arithmetic(), policy.tokenizer)


def small_policy() -> Policy:
    config = Config()
    config.model.nano_hidden_size, config.model.nano_num_layers, config.model.nano_num_heads = 16, 1, 2
    return load_policy(config.model, seed=0)


@dataclass(frozen=True)
class Measured:
    """One run."""

    step_seconds: float
    predicted: float
    waited: float
    """Share of the time in which the trainer waited."""
    oldest: int


def measure(max_staleness: int, steps: int, seed: int) -> Measured:
    """Run so many steps after the pipeline is full, and predict the same."""
    bound, policy = Bound(GROUPS, max_staleness), small_policy()
    stream = PromptStream(Arithmetic().prompts("train"), seed=seed, shuffle=True)
    ahead = PromptStream(stream.prompts, seed=seed, shuffle=True)
    first = max_staleness + 1  # the steps in which the pipeline fills
    local = LocalSource(make_sampler(), stream, group_size=1, sampling=Sampling())
    source = RaySource(local, policy, bound, Watchdog())
    try:
        devices = DevicesConfig(sampler=SAMPLERS, groups_per_sampler=PLACES)
        source.start(make_sampler, devices, "keep", PoolLimits(120, 60))
        source.run(stream.prompts[:1], 1, Sampling())  # start-up is over once there is an answer
        waited, ages, started = 0.0, [], 0.0
        for step in range(first + steps):
            if step == first:
                started, waited = time.monotonic(), 0.0
            source.take(GROUPS)
            time.sleep(TRAIN_SECONDS)
            source.publish(step + 1)
            found = source.take_metrics()
            waited += found["trainer_waited_seconds"]
            ages.append(int(found["staleness/max"]))
        seconds = time.monotonic() - started
    finally:
        source.close()
    drawn = ahead.draw((first + steps) * GROUPS)
    lengths = [seconds_of(rollout_seed(seed, prompt.id, epoch)) for prompt, epoch in drawn]
    predicted = predict(lengths, PLACES * SAMPLERS, bound, TRAIN_SECONDS).step_seconds
    return Measured(seconds / steps, predicted, waited / seconds, max(ages))


def page(found: dict[int, list[Measured]], steps: int) -> str:
    """Return the report."""
    base = median(run.step_seconds for run in found[0])
    rows = [
        "# The schedule of asynchronous training",
        "",
        "Two samplers of 8 places on a real Ray and a trainer, all of them asleep for as long as they would compute: "
        f"{GROUPS} groups a step, lengths lognormal (sigma {SIGMA:g}, mean {MEAN_TOKENS} tokens of "
        f"{TOKEN_SECONDS * 1000:g} ms), training {TRAIN_SECONDS:g} s. Median of {len(found[0])} seeds of {steps} steps "
        "each (least to most); the prediction is of the same service times. The machine ran other work beside.",
        "",
        f"`python -m benchmarks.scale.async_schedule` on {platform.machine()}, 2 cores, Linux, no GPU.",
        "",
        "| max_staleness | step, s | predicted, s | difference | speed-up | asked | trainer waits | oldest |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for bound, runs in found.items():
        steps_s = sorted(run.step_seconds for run in runs)
        middle = median(steps_s)
        predicted = median(run.predicted for run in runs)
        error = median(run.step_seconds / run.predicted - 1 for run in runs)
        asked = f"{ASKED[bound]:g}" if bound in ASKED else ""
        waits = median(run.waited for run in runs)
        rows.append(
            f"| {bound} | {middle:.3f} ({steps_s[0]:.3f} to {steps_s[-1]:.3f}) | {predicted:.3f} | {error:+.1%} "
            f"| {base / middle:.2f} | {asked} | {waits:.0%} | {max(run.oldest for run in runs)} |"
        )
    return "\n".join(rows) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--seeds", type=int, default=3)
    chosen = parser.parse_args()
    found = {bound: [measure(bound, chosen.steps, seed) for seed in range(chosen.seeds)] for bound in BOUNDS}
    PAGE.write_text(page(found, chosen.steps))
    print(PAGE.read_text())


if __name__ == "__main__":
    main()
