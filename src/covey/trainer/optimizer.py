"""Optimisers and learning-rate schedules. The schedule is a pure function of the step, so it has no state to save."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from covey.policy import sharding
from covey.trainer.settings import OptimizerConfig


def build_optimizer(model: nn.Module, settings: OptimizerConfig) -> torch.optim.Optimizer:
    """Build the optimiser of all trainable parameters, with weight decay on matrices only.

    Norms and biases have one axis.
    """
    trainable = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in trainable if p.dim() >= 2], "weight_decay": settings.weight_decay},
        {"params": [p for p in trainable if p.dim() < 2], "weight_decay": 0.0},
    ]
    return OPTIMIZERS[settings.name]([g for g in groups if g["params"]], settings)


def _adamw(groups: list[dict[str, Any]], settings: OptimizerConfig) -> torch.optim.Optimizer:
    beta1, beta2 = settings.betas
    on_gpu = all(parameter.is_cuda for group in groups for parameter in group["params"])
    # One kernel for all of a step's arithmetic; None leaves the choice on CPUs to torch.
    return torch.optim.AdamW(groups, lr=settings.lr, betas=(beta1, beta2), eps=settings.eps, fused=on_gpu or None)


def _adamw8bit(groups: list[dict[str, Any]], settings: OptimizerConfig) -> torch.optim.Optimizer:
    try:
        from bitsandbytes.optim import AdamW8bit
    except ImportError as error:
        raise ValueError("optimizer.name=adamw8bit needs bitsandbytes: pip install 'covey[quantization]'") from error
    beta1, beta2 = settings.betas
    return AdamW8bit(groups, lr=settings.lr, betas=(beta1, beta2), eps=settings.eps)


def _sgd(groups: list[dict[str, Any]], settings: OptimizerConfig) -> torch.optim.Optimizer:
    return torch.optim.SGD(groups, lr=settings.lr)


OPTIMIZERS: Mapping[str, Callable[[list[dict[str, Any]], OptimizerConfig], torch.optim.Optimizer]] = {
    "adamw": _adamw,
    "adamw8bit": _adamw8bit,
    "sgd": _sgd,
}


def clipped_step(
    optimizer: torch.optim.Optimizer,
    scaler: torch.amp.GradScaler,
    parameters: Sequence[nn.Parameter],
    limit: float,
    *,
    is_finite: bool,
) -> dict[str, float]:
    """Clip the gradients of all parameters to the norm `limit`, step with them, and return what to log of it.

    A limit of 0 clips nothing. Nothing changes where the gradients, or the loss they come from (`is_finite`), are not
    finite. Collective where weights are sharded.
    """
    scaler.unscale_(optimizer)
    norm = torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
    # Whole before it is used: torch 2.9 adds to a sharded norm on each rank, and clips by another factor.
    norm = sharding.whole(norm) if hasattr(norm, "full_tensor") else norm
    torch.nn.utils.clip_grads_with_norm_(parameters, limit if limit > 0 else torch.inf, norm)
    is_finite = bool(torch.isfinite(norm)) and is_finite
    if is_finite:
        scaler.step(optimizer)
    else:
        optimizer.zero_grad(set_to_none=True)
    scaler.update()
    return {
        "grad_norm": float(norm),
        "grad_clipped": float(limit > 0 and bool(norm > limit)),
        "skipped": float(not is_finite),
    }


def learning_rate(step: int, num_steps: int, settings: OptimizerConfig) -> float:
    """Return the rate of step 0, 1, ..., num_steps - 1: a linear rise over the warm-up, then the schedule.

    Every step learns: the rise begins above 0, and as in transformers the end of the decay is that of the step after
    the last.
    """
    if step < settings.warmup_steps:
        return settings.lr * (step + 1) / settings.warmup_steps
    num_decay_steps = max(num_steps - settings.warmup_steps, 1)
    progress = min((step - settings.warmup_steps) / num_decay_steps, 1.0)
    floor = settings.min_lr_ratio
    return settings.lr * (floor + (1 - floor) * SCHEDULES[settings.schedule](progress))


SCHEDULES: Mapping[str, Callable[[float], float]] = {
    "constant": lambda progress: 1.0,
    "linear": lambda progress: 1.0 - progress,
    "cosine": lambda progress: 0.5 * (1.0 + math.cos(math.pi * progress)),
}
"""Share of the peak rate after this share of the steps."""
