"""How a batch is split changes speed and memory, never the update. GPT-2 in float64: exact up to rounding."""

from typing import Any

import pytest
import torch
from torch import Tensor

from covey.batch import with_signal
from covey.config import AlgorithmConfig, OptimizerConfig
from covey.engine.base import Sampling
from covey.losses import LOSSES
from covey.objective import build_objective
from covey.policy.policy import Policy
from covey.policy.reference import make_reference
from covey.types import Batch, Group

from .builders import (
    ADVANTAGES,
    copied,
    gradient,
    make,
    make_policy,
    make_trainer,
    random_groups,
    relative_error,
    sampled_by,
)

EXACT = 1e-9
SAMPLING = Sampling(temperature=0.8)
REQUIRED: dict[str, dict[str, Any]] = {
    "dro": {"beta": 0.3},
    # Shares large enough to choose some of 43 tokens.
    "clip_cov": {"cov_ratio": 0.1, "cov_low": 0.1, "cov_high": 50.0},
    "kl_cov": {"cov_ratio": 0.1},
}
TWO_UPDATES = OptimizerConfig(name="sgd", lr=0.02, max_grad_norm=0.0)
"""The first moves the ratio away from 1, the second is looked at."""
SPLITS = (("padded", 1), ("packed", 25), ("shared", 20))
"""Nine micro-batches, some of several rollouts, some of parts of a group."""


@pytest.fixture(scope="module")
def policy() -> Policy:
    return make_policy("gpt2", torch.float64)


@pytest.fixture(scope="module")
def groups(policy: Policy) -> list[Group]:
    return sampled_by(policy, random_groups(), SAMPLING, noise=0.3)


def second_gradient(policy: Policy, algorithm: AlgorithmConfig, batch: Batch) -> tuple[Tensor, dict[str, float]]:
    """The gradient of the second update on a batch, and what is logged of it, from the same start every time."""
    reference = make_reference(make_policy("gpt2", torch.float64, seed=4), refreshed=False)
    trained = copied(policy)
    trainer = make_trainer(trained, algorithm, TWO_UPDATES, reference, updates_per_batch=2, sampling=SAMPLING)
    metrics = trainer.step(batch, 0)
    return gradient(trained), metrics


def assert_no_split_matters(policy: Policy, groups: list[Group], algorithm: AlgorithmConfig) -> dict[str, float]:
    whole = make(groups, "padded", 10_000, ADVANTAGES)
    assert len(whole.micro_batches) == 1
    expected, logged = second_gradient(policy, algorithm, whole)
    for packing, budget in SPLITS:
        parts = make(groups, packing, budget, ADVANTAGES)
        assert len(parts.micro_batches) > 2
        got, other = second_gradient(policy, algorithm, parts)
        assert relative_error(got, expected) < EXACT
        assert {**other, "num_micro_batches": 1.0} == pytest.approx(logged, rel=1e-6)
    return logged


@pytest.mark.parametrize("aggregation", ["token_mean", "seq_mean_token_mean", "token_sum_norm"])
@pytest.mark.parametrize("loss", sorted(LOSSES))
def test_micro_batches_add_up_to_the_gradient_of_the_whole_batch(
    policy: Policy, groups: list[Group], loss: str, aggregation: str
) -> None:
    algorithm = AlgorithmConfig(loss=loss, loss_options=REQUIRED.get(loss, {}), aggregation=aggregation)
    logged = assert_no_split_matters(policy, groups, algorithm)
    if build_objective(algorithm, 16).needs_old:
        assert abs(logged["ratio"] - 1) > 1e-3
    assert logged["skipped"] == 0


@pytest.mark.parametrize(
    "settings",
    [
        {"ratio": "sequence_mean", "aggregation": "seq_mean"},
        {"ratio": "sequence", "ratio_denominator": "behaviour", "aggregation": "seq_sum"},
        {"ratio_denominator": "reference"},
        {"kl_coef": 0.1, "kl_aggregation": "seq_mean_token_sum", "count_empty": True},
        {"kl_coef": 0.1, "kl_gradient": "is_weighted"},
        {"kl_coef": 0.1, "kl_estimator": "full"},
        {"sampler_kl_coef": 0.1},
        {"entropy_coef": 0.01},
        {"high_entropy_fraction": 0.4},
        {"m2po_threshold": 0.05},
        {"correction": "truncate", "correction_max": 1.1, "correction_self_normalize": True},
        {"correction": "mask", "correction_level": "sequence_mean", "correction_self_normalize": True},
        {"rejection": "token_k1,seq_mean_k3", "rejection_thresholds": "0.6_1.6,0.05"},
        {"off_policy_mask_delta": 0.02},
        {"loss": "clip_cov", "loss_options": REQUIRED["clip_cov"], "m2po_threshold": 0.05, "kl_coef": 0.1},
    ],
    ids=lambda settings: ",".join(settings),
)
def test_corrections_penalties_and_rules_over_the_whole_batch_do_not_see_the_split(
    policy: Policy, groups: list[Group], settings: dict[str, Any]
) -> None:
    assert_no_split_matters(policy, groups, AlgorithmConfig(**settings))


@pytest.mark.parametrize(
    ("settings", "name"),
    [
        ({"loss": "clip_cov", "loss_options": REQUIRED["clip_cov"]}, "cov_fraction"),
        ({"loss": "kl_cov", "loss_options": REQUIRED["kl_cov"]}, "cov_fraction"),
        ({"high_entropy_fraction": 0.4}, "policy_token_fraction"),
        ({"m2po_threshold": 0.05}, "policy_token_fraction"),
        ({"off_policy_mask_delta": 0.02}, "policy_token_fraction"),
        ({"rejection": "token_k1,seq_mean_k3", "rejection_thresholds": "0.6_1.6,0.05"}, "policy_token_fraction"),
    ],
)
def test_the_rules_above_really_choose_some_tokens_and_not_all(
    policy: Policy, groups: list[Group], settings: dict[str, Any], name: str
) -> None:
    _, logged = second_gradient(policy, AlgorithmConfig(**settings), make(groups, "shared", 40, ADVANTAGES))
    assert 0 < logged[name] < 1


@pytest.mark.parametrize("aggregation", ["token_mean", "seq_mean_token_mean"])
def test_the_mean_of_micro_batch_means_is_told_apart_from_the_right_gradient(
    policy: Policy, groups: list[Group], aggregation: str
) -> None:
    algorithm = AlgorithmConfig(aggregation=aggregation)

    def first_gradient(batch: Batch) -> Tensor:
        trained = copied(policy)
        make_trainer(trained, algorithm, sampling=SAMPLING).step(batch, 0)
        return gradient(trained)

    expected = first_gradient(make(groups, "shared", 10_000, ADVANTAGES))
    alone = [first_gradient(make([g], advantages=[a])) for g, a in zip(groups, ADVANTAGES, strict=True)]
    wrong = torch.stack(alone).mean(0)
    assert relative_error(wrong, expected) > 0.05
    shares = [9 / 43 * 13 / 9, 10 / 43, 20 / 43] if aggregation == "token_mean" else [3 / 9, 2 / 9, 4 / 9]
    right = torch.stack([share * part for share, part in zip(shares, alone, strict=True)]).sum(0)
    assert relative_error(right, expected) < EXACT


SOME_ZERO = ((1.0, 0.0, 0.25), (0.0, 0.0), (0.5, -1.0, 0.0, -0.25))


def skipping_changes(policy: Policy, groups: list[Group], algorithm: AlgorithmConfig) -> float:
    """Relative change of the gradient where rollouts of advantage 0 are left out of the work."""
    everything = make(groups, "shared", 40, SOME_ZERO)
    fewer = make(groups, "shared", 40, SOME_ZERO, keep=with_signal)
    assert sum(m.num_rows for m in fewer.micro_batches) == 5
    assert (fewer.num_loss_tokens, fewer.num_sequences, fewer.num_rollouts) == (43, 9, 9)
    expected, logged = second_gradient(policy, algorithm, everything)
    got, other = second_gradient(policy, algorithm, fewer)
    if build_objective(algorithm, 16).zero_advantage_is_free:
        assert other["loss"] == pytest.approx(logged["loss"], rel=1e-9, abs=1e-12)
        assert other["num_rollouts_trained"] == 5
    return relative_error(got, expected)


@pytest.mark.parametrize("loss", sorted(LOSSES))
def test_leaving_out_rollouts_of_advantage_zero_is_allowed_just_where_it_changes_nothing(
    policy: Policy, groups: list[Group], loss: str
) -> None:
    algorithm = AlgorithmConfig(loss=loss, loss_options=REQUIRED.get(loss, {}))
    change = skipping_changes(policy, groups, algorithm)
    free = build_objective(algorithm, 16).zero_advantage_is_free
    assert change < EXACT if free else change > 1e-4
    assert free == (loss not in ("kl_cov", "clip_cov", "dppo_tv_ratio", "ipo_mask", "dro", "nll"))


@pytest.mark.parametrize(
    "settings",
    [
        {"kl_coef": 0.1},
        {"sampler_kl_coef": 0.1},
        {"entropy_coef": 0.01},
        {"high_entropy_fraction": 0.4},
        {"correction": "truncate", "correction_self_normalize": True},
    ],
    ids=lambda settings: next(iter(settings)),
)
def test_rollouts_of_advantage_zero_are_trained_where_something_else_acts_on_them(
    policy: Policy, groups: list[Group], settings: dict[str, Any]
) -> None:
    algorithm = AlgorithmConfig(**settings)
    assert not build_objective(algorithm, 16).zero_advantage_is_free
    assert skipping_changes(policy, groups, algorithm) > 1e-4


@pytest.mark.parametrize(
    "settings",
    [{"correction": "truncate"}, {"off_policy_mask_delta": 0.02}, {"ratio": "sequence"}],
    ids=lambda settings: next(iter(settings)),
)
def test_rules_within_a_rollout_leave_skipping_free(
    policy: Policy, groups: list[Group], settings: dict[str, Any]
) -> None:
    algorithm = AlgorithmConfig(**settings)
    assert build_objective(algorithm, 16).zero_advantage_is_free
    assert skipping_changes(policy, groups, algorithm) < EXACT


def test_a_kl_in_the_reward_is_measured_on_every_rollout() -> None:
    assert not build_objective(
        AlgorithmConfig(kl_coef=0.1, kl_in="reward", kl_estimator="k1"), 16
    ).zero_advantage_is_free
