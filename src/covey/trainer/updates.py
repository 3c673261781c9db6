"""How a trainer trains, and in which order it takes the mini-batches of a step."""

import random
from dataclasses import dataclass

from covey.algorithm.objective import Objective
from covey.algorithm.settings import AlgorithmConfig
from covey.trainer.settings import OptimizerConfig
from covey.types import Sampling


@dataclass(frozen=True)
class TrainerSettings:
    """Say how to train, in plain values and pure functions."""

    objective: Objective
    algorithm: AlgorithmConfig
    optimizer: OptimizerConfig
    num_steps: int
    """Length of the learning-rate schedule."""
    sampling: Sampling
    """The distribution rollouts were drawn from: log-probs are taken under it."""
    logprob_chunk: int
    updates_per_batch: int = 1
    """Passes over the batch of a step."""
    num_mini_batches: int = 1
    """Optimiser steps of a pass."""
    seed: int = 0
    max_staleness: int = 0
    """Versions that tokens may be older than what is trained."""
    streaming: bool = False
    """Whether groups may be trained before the others of their step are there (`accumulate`)."""
    are_sampled: bool = True
    """Whether an engine sampled the tokens; demonstrations have no sampler whose log-probs could differ."""


def order_of_updates(settings: TrainerSettings, step: int, count: int) -> list[int]:
    """Return which of `count` mini-batches each update of a step takes: all of them in each pass, shuffled by seed."""
    order: list[int] = []
    for number in range(settings.updates_per_batch):
        shuffled = list(range(count))
        random.Random(f"{settings.seed}/mini-batches/{step}/{number}").shuffle(shuffled)
        order += shuffled
    return order
