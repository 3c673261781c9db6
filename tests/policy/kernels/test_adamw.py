"""AdamW in C against torch's in float64: values, states that travel, the norm of all gradients."""

import copy

import pytest
import torch
from torch import Tensor, nn

from covey.policy.kernels import support
from covey.policy.kernels.adamw import BLOCK, AdamW, adamw, global_norm
from covey.trainer.optimizer import clipped_step
from tests.support.builders import normal

SIZES = ((3, BLOCK + 5), (7, 13), (1,), (BLOCK,))
"""More than a block, ends of vectors, one number."""
SETTINGS = {"lr": 1e-3, "betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 0.1}


def weights(dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    return [nn.Parameter(normal(*size, seed=place).to(dtype)) for place, size in enumerate(SIZES)]


def set_gradients(held: list[nn.Parameter], step: int) -> None:
    for place, weight in enumerate(held):
        weight.grad = (normal(*weight.shape, seed=100 * step + place) * 10.0 ** (step - 2)).to(weight.dtype)


def trained(optimizer: torch.optim.Optimizer, held: list[nn.Parameter], steps: range) -> list[Tensor]:
    for step in steps:
        set_gradients(held, step)
        optimizer.step()
    return [weight.detach().clone() for weight in held]


def test_it_is_nearer_to_adamw_in_float64_than_torchs_own_float32() -> None:
    exact, torchs, ours = weights(torch.float64), weights(), weights()
    expected = trained(torch.optim.AdamW(exact, **SETTINGS), exact, range(6))
    rounded = trained(torch.optim.AdamW(torchs, **SETTINGS, fused=True), torchs, range(6))
    found = trained(AdamW(ours, **SETTINGS), ours, range(6))
    for want, got, other in zip(expected, found, rounded, strict=True):
        error, of_torch = (got - want).abs(), (other - want).abs()
        assert float(error.max()) < 1e-6  # six steps, of weights up to 4: a half of their last place, 2.4e-7, each
        assert float(error.mean()) <= float(of_torch.mean()) + 1e-8


def test_no_bit_depends_on_the_number_of_threads() -> None:
    def run(threads: int) -> tuple[list[Tensor], float]:
        before = torch.get_num_threads()
        torch.set_num_threads(threads)
        try:
            held = weights()
            return trained(AdamW(held, **SETTINGS), held, range(3)), float(global_norm([w.grad for w in held]))
        finally:
            torch.set_num_threads(before)

    (alone, norm), (together, same_norm) = run(1), run(3)
    assert all(torch.equal(first, second) for first, second in zip(alone, together, strict=True))
    assert norm == same_norm


@pytest.mark.parametrize("before_in_c", [True, False])
def test_a_state_travels_to_torchs_adamw_and_back(before_in_c: bool) -> None:
    kinds = [AdamW, lambda held, **settings: torch.optim.AdamW(held, **settings, fused=True)]
    first, second = kinds if before_in_c else kinds[::-1]
    held = weights()
    optimizer = first(held, **SETTINGS)
    trained(optimizer, held, range(3))
    state = copy.deepcopy(optimizer.state_dict())
    copied = [nn.Parameter(weight.detach().clone()) for weight in held]
    other = second(copied, **SETTINGS)
    other.load_state_dict(state)
    assert {name: value.dtype for name, value in other.state_dict()["state"][0].items()} == {
        "step": torch.float32,
        "exp_avg": torch.float32,
        "exp_avg_sq": torch.float32,
    }
    expected, found = trained(optimizer, held, range(3, 5)), trained(other, copied, range(3, 5))
    for want, got in zip(expected, found, strict=True):
        assert float((got - want).abs().max()) < 1e-6


def test_a_resumed_run_has_the_same_bits() -> None:
    held = weights()
    optimizer = AdamW(held, **SETTINGS)
    trained(optimizer, held, range(2))
    state, copied = copy.deepcopy(optimizer.state_dict()), [nn.Parameter(w.detach().clone()) for w in held]
    resumed = AdamW(copied, **SETTINGS)
    resumed.load_state_dict(state)
    expected, found = trained(optimizer, held, range(2, 4)), trained(resumed, copied, range(2, 4))
    assert all(torch.equal(want, got) for want, got in zip(expected, found, strict=True))


@pytest.mark.parametrize("limit", [0.0, 0.25, 1e9])
def test_the_factor_of_clipping_is_that_of_torch_and_counts_once(limit: float) -> None:
    settings = SETTINGS | {"eps": 1.0}  # so that a step depends on the gradient's size
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    ours, torchs = weights(), weights()
    pairs = ((AdamW(ours, **settings), ours), (torch.optim.AdamW(torchs, **settings), torchs))
    for step, at_most in ((2, limit), (1, 0.0)):
        for optimizer, held in pairs:
            set_gradients(held, step)
            metrics = clipped_step(optimizer, scaler, held, at_most, is_finite=True)
            assert metrics["grad_clipped"] == float(limit == 0.25 and step == 2)
    for first, second in zip(ours, torchs, strict=True):
        assert float((first - second).detach().abs().max()) < 1e-6


def test_weights_without_gradient_stay_and_their_steps_are_not_counted() -> None:
    held = weights()
    optimizer, before = AdamW(held, **SETTINGS), held[1].detach().clone()
    set_gradients(held, 0)
    held[1].grad = None
    optimizer.step()
    assert torch.equal(held[1], before)
    assert len(optimizer.state_dict()["state"]) == len(SIZES) - 1


def test_the_norm_is_that_of_float64_where_squares_leave_float32() -> None:
    gradients = [
        normal(*size, seed=place) * scale
        for place, (size, scale) in enumerate(zip(SIZES, (1e25, 1, 1e-30, 1), strict=True))
    ]
    exact = torch.nn.utils.get_total_norm([gradient.double() for gradient in gradients])
    assert float(global_norm(gradients)) == pytest.approx(float(exact), rel=1e-12)
    assert float(global_norm([])) == 0.0
    assert not torch.isfinite(global_norm([torch.tensor([1.0, float("nan")])]))


def test_a_gradient_that_lies_turned_is_read_in_its_weights_order() -> None:
    ours, torchs = weights()[1:2], weights()[1:2]
    for held, kind in ((ours, AdamW), (torchs, torch.optim.AdamW)):
        held[0].grad = normal(13, 7).t()
        kind(held, **SETTINGS).step()
    assert float((ours[0] - torchs[0]).detach().abs().max()) < 5e-7


def test_torch_steps_where_c_cannot_or_is_not_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    def kind(held: list[nn.Parameter], kernels: str = "auto") -> type:
        return type(adamw([{"params": held}], kernels))

    assert kind(weights()) is AdamW
    assert kind(weights(), "torch") is torch.optim.AdamW
    assert kind(weights(torch.bfloat16)) is torch.optim.AdamW
    assert kind([nn.Parameter(normal(7, 13).t())]) is torch.optim.AdamW
    monkeypatch.setattr(support, "load", lambda source: "none")
    assert kind(weights()) is torch.optim.AdamW
