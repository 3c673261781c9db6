"""Optimisers, what they decay, and learning-rate schedules as numbers."""

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from transformers import get_scheduler

from covey.trainer.optimizer import SCHEDULES, build_optimizer, gradients_first, learning_rate
from covey.trainer.settings import OptimizerConfig


def rates(num_steps: int, **settings: float | str | int) -> list[float]:
    chosen = OptimizerConfig(lr=1.0, **settings)  # type: ignore[arg-type]
    return [round(learning_rate(step, num_steps, chosen), 6) for step in range(num_steps)]


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"schedule": "constant"}, [1.0, 1.0, 1.0, 1.0, 1.0]),
        ({"schedule": "constant", "warmup_steps": 2}, [0.5, 1.0, 1.0, 1.0, 1.0]),
        ({"schedule": "linear"}, [1.0, 0.8, 0.6, 0.4, 0.2]),
        ({"schedule": "linear", "min_lr_ratio": 0.2}, [1.0, 0.84, 0.68, 0.52, 0.36]),
        ({"schedule": "linear", "warmup_steps": 2}, [0.5, 1.0, 1.0, 0.666667, 0.333333]),
        ({"schedule": "cosine"}, [1.0, 0.904508, 0.654508, 0.345492, 0.095492]),
        ({"schedule": "cosine", "min_lr_ratio": 0.5}, [1.0, 0.952254, 0.827254, 0.672746, 0.547746]),
        ({"schedule": "cosine", "warmup_steps": 4}, [0.25, 0.5, 0.75, 1.0, 1.0]),
        ({"schedule": "linear", "warmup_steps": 9}, [0.111111, 0.222222, 0.333333, 0.444444, 0.555556]),
    ],
    ids=str,
)
def test_a_schedule_is_these_numbers(settings: dict[str, float | str | int], expected: list[float]) -> None:
    assert rates(5, **settings) == expected


@pytest.mark.parametrize("schedule", ["linear", "cosine"])
@pytest.mark.parametrize("num_steps", [1, 2, 7])
def test_after_the_warm_up_a_schedule_has_the_rates_of_transformers(schedule: str, num_steps: int) -> None:
    optimizer = torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=1.0)
    scheduler = get_scheduler(schedule, optimizer, num_warmup_steps=3, num_training_steps=3 + num_steps)
    expected = []
    for _ in range(3 + num_steps):
        expected.append(scheduler.get_last_lr()[0])
        optimizer.step()
        scheduler.step()
    ours = rates(3 + num_steps, schedule=schedule, warmup_steps=3)
    assert ours[3:] == pytest.approx(expected[3:], abs=1e-6)
    assert min(ours) > 0


@pytest.mark.parametrize("schedule", sorted(SCHEDULES))
def test_a_schedule_of_one_step_and_steps_beyond_the_end_are_defined(schedule: str) -> None:
    settings = OptimizerConfig(lr=1.0, schedule=schedule, min_lr_ratio=0.1)
    assert learning_rate(0, 1, settings) == pytest.approx(1.0)
    assert learning_rate(50, 5, settings) == pytest.approx(1.0 if schedule == "constant" else 0.1)


class Small(nn.Module):
    """A matrix, a bias and a norm, one of them frozen."""

    def __init__(self, frozen: str = "") -> None:
        super().__init__()
        self.linear = nn.Linear(3, 2)
        self.norm = nn.LayerNorm(2)
        for name, parameter in self.named_parameters():
            parameter.requires_grad_(name != frozen)


@pytest.mark.parametrize("name", ["adamw", "sgd"])
def test_weight_decay_shrinks_matrices_and_leaves_biases_and_norms(name: str) -> None:
    model = Small()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(1.0)
    optimizer = build_optimizer(model, OptimizerConfig(name=name, lr=0.1, weight_decay=0.5))
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    means = {key: round(float(parameter.detach().mean()), 6) for key, parameter in model.named_parameters()}
    assert means == {"linear.weight": 0.95, "linear.bias": 1.0, "norm.weight": 1.0, "norm.bias": 1.0}


def test_adamws_first_step_is_the_learning_rate_against_the_gradients_sign() -> None:
    model = Small()
    before = model.linear.weight.detach().clone()
    optimizer = build_optimizer(model, OptimizerConfig(lr=0.01))
    model.linear.weight.grad = torch.tensor([[3.0, -0.2, 1.0], [-5.0, 0.1, 2.0]])
    optimizer.step()
    moved = model.linear.weight.detach() - before
    assert torch.allclose(moved, -0.01 * model.linear.weight.grad.sign(), atol=1e-6)


def test_betas_and_eps_reach_adamw() -> None:
    optimizer = build_optimizer(Small(), OptimizerConfig(betas=[0.8, 0.95], eps=1e-5))
    assert (optimizer.defaults["betas"], optimizer.defaults["eps"]) == ((0.8, 0.95), 1e-5)


@pytest.mark.parametrize("name", ["adamw", "sgd"])
def test_frozen_weights_are_not_given_to_the_optimiser(name: str) -> None:
    model = Small(frozen="linear.weight")
    optimizer = build_optimizer(model, OptimizerConfig(name=name))
    held = [p for group in optimizer.param_groups for p in group["params"]]
    assert {id(p) for p in held} == {id(p) for p in model.parameters() if p.requires_grad}
    assert len(held) == 3


def test_8_bit_adamw_without_bitsandbytes_names_the_package_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    monkeypatch.setitem(sys.modules, "bitsandbytes.optim", None)
    with pytest.raises(ValueError, match=r"adamw8bit needs bitsandbytes: pip install 'covey\[quantization\]'"):
        build_optimizer(Small(), OptimizerConfig(name="adamw8bit"))


def test_all_settings_reach_8_bit_adamw(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[dict[str, Any]] = []
    fake = SimpleNamespace(AdamW8bit=lambda groups, **settings: given.append(settings))
    monkeypatch.setitem(sys.modules, "bitsandbytes.optim", fake)  # type: ignore[arg-type]
    build_optimizer(Small(), OptimizerConfig(name="adamw8bit", lr=0.1, betas=[0.8, 0.95], eps=1e-5))
    assert given == [{"lr": 0.1, "betas": (0.8, 0.95), "eps": 1e-5}]


def test_8_bit_adamw_goes_where_adamw_goes() -> None:
    pytest.importorskip("bitsandbytes")
    gradient = torch.randn(64, 128, generator=torch.Generator().manual_seed(0))

    def trained(name: str) -> nn.Linear:
        torch.manual_seed(1)
        model = nn.Linear(128, 64)
        optimizer = build_optimizer(model, OptimizerConfig(name=name, lr=0.01))
        for _ in range(3):
            model.weight.grad, model.bias.grad = gradient.clone(), torch.ones(64)
            optimizer.step()
        return model

    exact, rounded = trained("adamw"), trained("adamw8bit")
    gap = (exact.weight - rounded.weight).detach().abs()
    assert float(gap.mean()) < 1e-3  # of about 0.03 that they moved
    assert not torch.equal(exact.weight, rounded.weight)


def test_gradients_that_lie_first_are_those_of_backward_and_none_where_no_pass_comes() -> None:
    reached, zero, unreached = (nn.Parameter(torch.ones(3)) for _ in range(3))
    with gradients_first([reached, zero, unreached]):
        (2 * reached + 0 * zero).sum().backward()
    assert reached.grad is not None
    assert reached.grad.tolist() == [2, 2, 2]
    assert zero.grad is not None
    assert unreached.grad is None
