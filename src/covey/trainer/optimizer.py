"""Optimiser, learning-rate schedule, and order of mini-batches.

Schedule and order are pure functions of the step, so they have no state to save.
"""

import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.amp import GradScaler
from torch.optim import Optimizer

from covey.algorithm.objective import Objective
from covey.algorithm.settings import AlgorithmConfig
from covey.policy import sharding
from covey.policy.kernels.adamw import AdamW, adamw, global_norm
from covey.trainer.settings import OptimizerConfig
from covey.types import Group, Rollout, Sampling


@dataclass(frozen=True)
class TrainerSettings:
    """The trainer's settings, in plain values and functions."""

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
    """Versions that tokens may be older than the trained policy."""
    streaming: bool = False
    """Whether groups may be trained before the others of their step are there (`accumulate`)."""
    groups_per_step: int = 1
    """Groups of all ranks: the counts of early groups are scaled up to it until those of the step are known."""
    teach: Callable[[Group], Sequence[Rollout | None]] | None = None
    """Returns what the teacher reads of each rollout of a group, None for nothing; None: it reads them as they are."""
    answers: Callable[[Group], Sequence[Rollout]] | None = None
    """Returns answers to a group's prompt that are learnt as they are; None has none."""
    kernels: str = "auto"
    """With "torch", the optimiser's step is torch's."""
    are_sampled: bool = True
    """Whether an engine sampled the tokens; demonstrations have no sampler whose log-probs could differ."""


def build_optimizer(model: nn.Module, settings: OptimizerConfig, kernels: str = "auto") -> Optimizer:
    """Build the optimiser, with weight decay on matrices only. Norms and biases have one axis."""
    trainable = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in trainable if p.dim() >= 2], "weight_decay": settings.weight_decay},
        {"params": [p for p in trainable if p.dim() < 2], "weight_decay": 0.0},
    ]
    return OPTIMIZERS[settings.name]([g for g in groups if g["params"]], settings, kernels)


def _adamw(groups: list[dict[str, Any]], settings: OptimizerConfig, kernels: str) -> Optimizer:
    beta1, beta2 = settings.betas
    return adamw(groups, kernels, lr=settings.lr, betas=(beta1, beta2), eps=settings.eps)


def _adamw8bit(groups: list[dict[str, Any]], settings: OptimizerConfig, kernels: str) -> Optimizer:
    try:
        from bitsandbytes.optim import AdamW8bit
    except ImportError as error:
        raise ValueError("optimizer.name=adamw8bit needs bitsandbytes: pip install 'covey[quantization]'") from error
    beta1, beta2 = settings.betas
    return AdamW8bit(groups, lr=settings.lr, betas=(beta1, beta2), eps=settings.eps)


OPTIMIZERS: Mapping[str, Callable[[list[dict[str, Any]], OptimizerConfig, str], Optimizer]] = {
    "adamw": _adamw,
    "adamw8bit": _adamw8bit,
    "sgd": lambda groups, settings, kernels: torch.optim.SGD(groups, lr=settings.lr),
}


def optimizer_state(optimizer: Optimizer, *, sharded: bool) -> dict[str, Any]:
    """Return the state, whole for sharded weights, where it is collective."""
    return sharding.full_optimizer_state(optimizer) if sharded else optimizer.state_dict()


def load_moments(optimizer: Optimizer, state: Mapping[str, Any], *, sharded: bool) -> None:
    """Load the state of `optimizer_state` without settings, which a run may change."""
    # Before loading: by `fused`, torch puts the counters of steps where that kernel reads them
    pairs = zip(optimizer.param_groups, state["param_groups"], strict=True)
    own = {**state, "param_groups": [{**group, "params": saved["params"]} for group, saved in pairs]}
    load = partial(sharding.load_full_optimizer_state, optimizer) if sharded else optimizer.load_state_dict
    load(own)


@contextmanager
def gradients_first(parameters: Sequence[nn.Parameter]) -> Iterator[None]:
    """Allocate gradients before activations, so that these leave no holes.

    Parameters that no pass reaches have none afterwards.
    """
    made = [parameter for parameter in parameters if parameter.grad is None]
    for parameter in made:
        parameter.grad = torch.zeros_like(parameter)
    yield
    for parameter in made:
        if parameter.grad is not None and parameter.grad._version == 0 and not parameter.grad.any():
            parameter.grad = None


def clipped_step(
    optimizer: Optimizer, scaler: GradScaler, parameters: Sequence[nn.Parameter], limit: float, *, is_finite: bool
) -> dict[str, float]:
    """Clip gradients to the norm `limit`, step, and return metrics.

    A limit of 0 clips nothing. Nothing changes where the gradients, or the loss they come from (`is_finite`), are not
    finite. Collective where weights are sharded.
    """
    scaler.unscale_(optimizer)
    gradients = [p.grad for p in parameters if p.grad is not None]
    limit = limit if limit > 0 else torch.inf
    if isinstance(optimizer, AdamW):
        norm = global_norm(gradients)
        optimizer.factor = min(1.0, limit / (float(norm) + 1e-6))
    else:
        norm = torch.nn.utils.get_total_norm(gradients)
        # Whole before it is used: torch 2.9 adds to a sharded norm on each rank, and clips by another factor.
        norm = sharding.whole(norm) if hasattr(norm, "full_tensor") else norm
        torch.nn.utils.clip_grads_with_norm_(parameters, limit, norm)
    is_finite = bool(torch.isfinite(norm)) and is_finite
    if is_finite:
        scaler.step(optimizer)
    else:
        optimizer.zero_grad(set_to_none=True)
    scaler.update()
    return {"grad_norm": float(norm), "grad_clipped": float(norm > limit), "skipped": float(not is_finite)}


def learning_rate(step: int, num_steps: int, settings: OptimizerConfig) -> float:
    """Return a step's learning rate: linear warm-up, then the schedule.

    Steps are 0, 1, ..., num_steps - 1.
    Every step learns: the rise begins above 0, and as in transformers the end of the decay is that of the step after
    the last.
    """
    if step < settings.warmup_steps:
        return settings.lr * (step + 1) / settings.warmup_steps
    num_decay_steps = max(num_steps - settings.warmup_steps, 1)
    progress = min((step - settings.warmup_steps) / num_decay_steps, 1.0)
    floor = settings.min_lr_ratio
    return settings.lr * (floor + (1 - floor) * SCHEDULES[settings.schedule](progress))


def order_of_updates(settings: TrainerSettings, step: int, count: int) -> list[int]:
    """Return each update's mini-batch, shuffled by seed within passes."""
    order: list[int] = []
    for number in range(settings.updates_per_batch):
        shuffled = list(range(count))
        random.Random(f"{settings.seed}/mini-batches/{step}/{number}").shuffle(shuffled)
        order += shuffled
    return order


SCHEDULES: Mapping[str, Callable[[float], float]] = {
    "constant": lambda progress: 1.0,
    "linear": lambda progress: 1.0 - progress,
    "cosine": lambda progress: 0.5 * (1.0 + math.cos(math.pi * progress)),
}
"""Share of the peak rate after this share of the steps."""
