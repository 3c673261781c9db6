"""KL estimators and their gradients, the exact KL, placement in the reward, controllers, refresh."""

import math

import pytest
import torch
from torch import Tensor

from covey.algorithm.controllers import KLController, MismatchWatch, kl_controller, update_kl_controller
from covey.algorithm.kl import ESTIMATORS, KLOptions, full_kl, kl_penalty, refresh
from covey.algorithm.settings import AlgorithmConfig
from covey.types import RunStopped

LOGITS = torch.tensor([0.2, -1.0, 1.3, 0.4], dtype=torch.float64)
REF_LOGITS = torch.tensor([0.9, 0.1, -0.3, 0.2], dtype=torch.float64)
ALL = torch.ones(4, dtype=torch.bool)


def at(q: float, options: KLOptions) -> tuple[float, float]:
    """Value and gradient of the penalty at one token with log pi - log ref = q."""
    log_prob = torch.tensor([[q]], dtype=torch.float64, requires_grad=True)
    value = kl_penalty(log_prob, torch.zeros(1, 1, dtype=torch.float64), torch.ones(1, 1) > 0, options)
    return value.item(), torch.autograd.grad(value.sum(), log_prob)[0].item()


@pytest.mark.parametrize(
    ("estimator", "value", "gradient"),
    [
        ("k1", 0.5, 1.0),
        ("k2", 0.125, 0.5),
        ("k3", math.exp(-0.5) - 0.5, 1 - math.exp(-0.5)),
        ("abs", 0.5, 1.0),
        ("k1_forward", -0.5, -1.0),
        ("k3_forward", math.exp(0.5) - 1.5, math.exp(0.5) - 1),
    ],
)
def test_estimators_at_half_a_nat(estimator: str, value: float, gradient: float) -> None:
    assert at(0.5, KLOptions(estimator, "naive")) == pytest.approx((value, gradient))


def test_every_estimator_is_0_at_equal_policies() -> None:
    assert {name: at(0.0, KLOptions(name, "naive"))[0] for name in ESTIMATORS} == dict.fromkeys(ESTIMATORS, 0.0)


def test_straight_through_keeps_the_value_and_takes_the_gradient_of_k2() -> None:
    value, gradient = at(0.5, KLOptions("k3", "straight_through_k2"))
    assert value == pytest.approx(math.exp(-0.5) - 0.5)
    assert gradient == pytest.approx(0.5)


def test_beyond_a_clamp_the_gradient_is_0() -> None:
    value, gradient = at(-30.0, KLOptions("k3", "naive", clamp_log_ratio=20.0))
    assert value == pytest.approx(math.exp(20) - 21)
    assert gradient == 0.0
    assert at(-5.0, KLOptions("k3", "naive", clamp_value=10.0)) == (10.0, 0.0)


def test_the_weight_of_is_weighted_is_clamped_too() -> None:
    one = torch.ones(1, 1, dtype=torch.float64)
    options = KLOptions("k2", "is_weighted", clamp_log_ratio=1.0)
    assert kl_penalty(3.0 * one, one, one > 0, options, -2.0 * one).item() == pytest.approx(2.0 * math.e)
    free = KLOptions("k2", "is_weighted", clamp_log_ratio=None)
    assert kl_penalty(3.0 * one, one, one > 0, free, -2.0 * one).item() == pytest.approx(2.0 * math.exp(5.0))


def test_a_far_policy_is_still_pulled_back_by_the_default_gradient() -> None:
    assert at(-30.0, KLOptions())[1] == pytest.approx(-30.0)


def test_an_extreme_ratio_is_finite() -> None:
    value, gradient = at(-1000.0, KLOptions())
    assert math.isfinite(value)
    assert gradient == pytest.approx(-1000.0)


def test_nan_under_the_mask_reaches_neither_value_nor_gradient() -> None:
    log_probs = torch.tensor([[0.3, float("nan")]], requires_grad=True)
    ref = torch.tensor([[0.0, float("-inf")]])
    mask = torch.tensor([[True, False]])
    for gradient in ("naive", "straight_through_k2", "is_weighted"):
        value = kl_penalty(log_probs, ref, mask, KLOptions("k3", gradient), torch.tensor([[0.1, float("nan")]]))
        assert value[0, 1].item() == 0.0
        assert torch.autograd.grad(value.sum(), log_probs)[0][0, 1].item() == 0.0


def expected_gradient(estimator: str, gradient: str) -> Tensor:
    """Of the penalty added to a loss, over the whole vocabulary, samples from the policy."""
    logits = LOGITS.clone().requires_grad_(True)
    log_p = logits.log_softmax(-1)
    options = KLOptions(estimator, gradient)
    values = kl_penalty(log_p, REF_LOGITS.log_softmax(-1), ALL, options, log_p.detach())
    return torch.autograd.grad((log_p.detach().exp() * values).sum(), logits)[0]


def exact_gradient(direction: str) -> Tensor:
    logits = LOGITS.clone().requires_grad_(True)
    pair = logits[None], REF_LOGITS[None]
    return torch.autograd.grad(full_kl(*(pair if direction == "reverse" else pair[::-1])).sum(), logits)[0]


def test_a_k1_loss_regularises_nothing() -> None:
    torch.testing.assert_close(expected_gradient("k1", "naive"), torch.zeros(4, dtype=torch.float64))


@pytest.mark.parametrize(
    ("estimator", "gradient"),
    [("k2", "naive"), ("k1", "straight_through_k2"), ("k3", "straight_through_k2"), ("k3", "is_weighted")],
)
def test_these_penalties_have_the_gradient_of_the_reverse_kl(estimator: str, gradient: str) -> None:
    torch.testing.assert_close(expected_gradient(estimator, gradient), exact_gradient("reverse"))


def test_a_naive_k3_loss_has_the_gradient_of_the_forward_kl() -> None:
    torch.testing.assert_close(expected_gradient("k3", "naive"), exact_gradient("forward"))


@pytest.mark.parametrize("estimator", ["k1_forward", "k3_forward"])
def test_a_penalty_to_the_sampler_has_the_gradient_of_its_kl(estimator: str) -> None:
    # Samples come from the other policy, and the penalty estimates KL(other || policy).
    logits = LOGITS.clone().requires_grad_(True)
    log_p, log_mu = logits.log_softmax(-1), REF_LOGITS.log_softmax(-1)
    values = kl_penalty(log_p, log_mu, ALL, KLOptions(estimator, "naive"))
    expectation = (log_mu.exp() * values).sum()
    torch.testing.assert_close(expectation, full_kl(REF_LOGITS[None], LOGITS[None])[0])
    torch.testing.assert_close(torch.autograd.grad(expectation, logits)[0], exact_gradient("forward"))


def test_is_weighted_is_unbiased_for_samples_of_the_old_policy() -> None:
    old = torch.tensor([0.5, 0.5, -0.5, 0.1], dtype=torch.float64).log_softmax(-1)
    logits = LOGITS.clone().requires_grad_(True)
    values = kl_penalty(logits.log_softmax(-1), REF_LOGITS.log_softmax(-1), ALL, KLOptions("k3", "is_weighted"), old)
    expectation = (old.exp() * values).sum()
    torch.testing.assert_close(expectation, full_kl(LOGITS[None], REF_LOGITS[None])[0])
    torch.testing.assert_close(torch.autograd.grad(expectation, logits)[0], exact_gradient("reverse"))


def test_tokens_a_filter_removed_from_both_policies_add_nothing() -> None:
    cut = torch.tensor([0.0, 0.0, float("-inf"), 0.0])
    logits = (LOGITS + cut).requires_grad_(True)
    kl = full_kl(logits[None], (REF_LOGITS + cut)[None])
    kept = torch.tensor([0, 1, 3])
    torch.testing.assert_close(kl, full_kl(LOGITS[None, kept], REF_LOGITS[None, kept]))
    assert bool(torch.autograd.grad(kl.sum(), logits)[0].isfinite().all())


def test_a_token_that_the_base_alone_cannot_say_is_infinitely_far() -> None:
    cut = torch.tensor([0.0, 0.0, float("-inf"), 0.0])
    assert full_kl(LOGITS[None], (REF_LOGITS + cut)[None]).item() == math.inf
    kept = torch.tensor([0, 1, 3])
    one_sided = full_kl((LOGITS + cut)[None], REF_LOGITS[None])
    expected = full_kl(LOGITS[None, kept], REF_LOGITS[None, kept]) - REF_LOGITS.softmax(-1)[kept].sum().log()
    torch.testing.assert_close(one_sided, expected)


def test_a_fixed_controller_never_moves() -> None:
    state = KLController(coef=0.05)
    assert update_kl_controller(state, 100.0, 64) == state


def test_a_proportional_controller_moves_towards_the_target() -> None:
    state = KLController(coef=0.05, rule="proportional", target=0.1, horizon=1000)
    assert update_kl_controller(state, 0.2, 100).coef == pytest.approx(0.05 * 1.02)
    assert update_kl_controller(state, 0.09, 100).coef == pytest.approx(0.05 * 0.99)


def test_a_doubling_controller_rests_inside_its_band() -> None:
    state = KLController(coef=0.04, rule="doubling", target=0.1)
    assert [update_kl_controller(state, kl, 1).coef for kl in (0.16, 0.14, 0.07, 0.06)] == [0.08, 0.04, 0.04, 0.02]
    at_bounds = KLController(coef=0.04, rule="doubling", target=0.5)
    assert [update_kl_controller(at_bounds, kl, 1).coef for kl in (0.75, 0.5 / 1.5)] == [0.04, 0.04]


def test_a_controller_stays_within_its_bounds() -> None:
    state = KLController(coef=0.04, rule="doubling", target=0.1, coef_min=0.03, coef_max=0.05)
    assert update_kl_controller(state, 1.0, 1).coef == 0.05
    assert update_kl_controller(state, 0.0, 1).coef == 0.03


def test_a_controller_is_what_the_settings_say() -> None:
    bounds = {"kl_coef_min": 0.05, "kl_coef_max": 0.3}
    steered = AlgorithmConfig(kl_coef=0.1, target_kl=0.2, kl_controller="doubling", kl_horizon=50, **bounds)
    assert kl_controller(steered) == KLController(0.1, "doubling", 0.2, horizon=50.0, coef_min=0.05, coef_max=0.3)
    assert kl_controller(AlgorithmConfig(kl_coef=0.1)) == KLController(0.1)


def test_a_mismatch_of_just_the_limit_stops_nothing() -> None:
    watch = MismatchWatch(0.5, is_stale=False)
    watch.look(0.5)
    with pytest.raises(RunStopped, match="log-probs of sampler and trainer differ by"):
        watch.look(math.nextafter(0.5, 1.0))


@pytest.mark.parametrize("kl", [float("nan"), float("inf")])
def test_a_kl_that_is_not_finite_leaves_the_controller(kl: float) -> None:
    state = KLController(coef=0.04, rule="doubling", target=0.1)
    assert update_kl_controller(state, kl, 1) == state


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"coef": 0.0, "rule": "doubling", "target": 0.1}, "target_kl=0.1 needs kl_coef > 0, got kl_coef=0.0"),
        ({"coef": 0.1, "coef_min": 2.0, "coef_max": 1.0}, "kl_coef_max must be >= kl_coef_min, got 2.0 and 1.0"),
        ({"coef": 0.5, "coef_min": 0.6}, "kl_coef must be between kl_coef_min=0.6 and kl_coef_max=inf, got 0.5"),
        ({"coef": 11.0, "coef_max": 10.0}, "kl_coef must be between kl_coef_min=0 and kl_coef_max=10, got 11"),
    ],
)
def test_a_controller_that_cannot_work_is_refused(settings: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message.replace(".", r"\.")):
        KLController(**settings)  # type: ignore[arg-type]


def test_a_refresh_mixes_and_a_hard_one_copies() -> None:
    reference, policy = torch.tensor([1.0, 0.1]), torch.tensor([2.0, 0.3])
    torch.testing.assert_close(refresh(reference, policy, 0.25), torch.tensor([1.25, 0.15]))
    assert refresh(reference, policy, 1.0).tolist() == policy.tolist()
    assert refresh(reference, policy, 0.0).tolist() == reference.tolist()


def test_a_steered_coefficient_stays_within_both_bounds() -> None:
    state = KLController(coef=0.1, rule="doubling", target=0.1, coef_min=0.08, coef_max=0.15)
    assert update_kl_controller(state, kl=0.001, num_completions=8).coef == 0.08
    assert update_kl_controller(state, kl=9.0, num_completions=8).coef == 0.15


def test_a_corrected_gap_is_not_called_untrained(caplog: pytest.LogCaptureFixture) -> None:
    MismatchWatch(None, is_stale=False, is_corrected=True).look(0.2)
    assert "algorithm.correction weighs each token by it" in caplog.text
