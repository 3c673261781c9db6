"""What training steers once a batch: the KL coefficient, the entropy bonus, the reference."""

import math
from dataclasses import replace
from typing import Any

import pytest

from covey.algorithm.settings import AlgorithmConfig
from covey.policy.reference import make_reference
from covey.types import Group, Rollout, Sampling

from ..support.builders import (
    ADAMW,
    ADVANTAGES,
    SGD,
    copied,
    make,
    make_policy,
    make_trainer,
    random_groups,
    same,
    sampled_by,
    weights,
)


def test_the_kl_controller_moves_the_coefficient_once_a_batch() -> None:
    algorithm = AlgorithmConfig(kl_coef=0.1, target_kl=0.1, kl_controller="doubling", kl_coef_max=0.15)
    policy = make_policy("qwen2")
    slow, near = replace(SGD, lr=1e-3), make_reference(policy, refreshed=False)
    trainer = make_trainer(policy, algorithm, slow, near, updates_per_batch=2)
    batch = make(random_groups(), advantages=ADVANTAGES)
    assert trainer.step(batch, 0)["kl_coef"] == pytest.approx(0.05)  # a KL near 0 halves it
    assert trainer.step(batch, 1)["kl_coef"] == pytest.approx(0.025)
    stranger = make_reference(make_policy("qwen2", seed=9), refreshed=False)
    far = make_trainer(policy, algorithm, SGD, stranger)
    metrics = far.step(batch, 0)
    assert metrics["kl_sequence_mean"] > 0.15
    assert metrics["kl_coef"] == pytest.approx(0.15)  # doubled, then held at its maximum


def test_the_proportional_controller_counts_the_completions_of_the_batch() -> None:
    algorithm = AlgorithmConfig(kl_coef=0.1, target_kl=0.5, kl_horizon=90)
    policy = make_policy("qwen2")
    trainer = make_trainer(policy, algorithm, SGD, make_reference(policy, refreshed=False))
    metrics = trainer.step(make(random_groups(), "shared", 20, ADVANTAGES), 0)
    assert metrics["kl_coef"] == pytest.approx(0.1 * (1 - 0.2 * 9 / 90))


def test_the_kl_controller_is_fed_the_mean_over_sequences_of_their_token_means() -> None:
    """The longest completion has nine times the tokens of the shortest, and no more say."""
    policy, other = make_policy("qwen2"), make_policy("qwen2", seed=9)
    groups = random_groups()
    mine, theirs = (sampled_by(each, groups, Sampling()) for each in (policy, other))
    sequence_means = []
    for ours, others in zip(rollouts(mine), rollouts(theirs), strict=True):
        pairs = zip(ours.sampler_logprobs, others.sampler_logprobs, ours.loss_mask, strict=True)
        k3 = [math.expm1(b - a) - (b - a) for a, b, chosen in pairs if chosen]
        sequence_means.append(sum(k3) / len(k3))
    mean = sum(sequence_means) / 9
    algorithm = AlgorithmConfig(kl_coef=0.1, target_kl=mean / 1.1, kl_horizon=90)
    trainer = make_trainer(policy, algorithm, SGD, make_reference(other, refreshed=False))
    metrics = trainer.step(make(groups, "shared", 20, ADVANTAGES), 0)
    assert metrics["kl"] != pytest.approx(mean, rel=0.05)  # the mean over tokens
    assert metrics["kl_coef"] == pytest.approx(0.1 * (1 + 0.1 * 9 / 90), rel=1e-4)


def test_the_kl_controller_is_fed_the_last_pass_over_the_batch() -> None:
    """The first has a KL of 0, so the mean of both is below the band around what the last one has."""

    def step(**steered: Any) -> dict[str, float]:
        policy, algorithm = make_policy("qwen2"), AlgorithmConfig(kl_coef=0.1, **steered)
        reference = make_reference(copied(policy), refreshed=False)
        trainer = make_trainer(policy, algorithm, SGD, reference, updates_per_batch=2)
        return trainer.step(make(random_groups(), advantages=ADVANTAGES), 0)

    last = 2 * step()["kl_sequence_mean"]
    assert last > 0
    assert step(target_kl=last, kl_controller="doubling")["kl_coef"] == 0.1


def rollouts(groups: list[Group]) -> list[Rollout]:
    return [rollout for group in groups for rollout in group.rollouts]


def test_the_reference_is_refreshed_on_schedule_and_not_before() -> None:
    algorithm = AlgorithmConfig(kl_coef=0.1, reference_refresh_every=2, reference_refresh_alpha=1.0)
    policy = make_policy("qwen2")
    reference = make_reference(policy, refreshed=True)
    trainer = make_trainer(policy, algorithm, SGD, reference)
    batch, start = make(random_groups(), advantages=ADVANTAGES), weights(policy)
    refreshed = []
    for step in range(4):
        trainer.step(batch, step)
        refreshed.append(same(weights(reference.policy), weights(policy)))
        assert same(weights(reference.policy), start) == (step == 0)
    assert refreshed == [False, True, False, True]


def test_the_entropy_target_moves_the_bonus_and_the_bonus_moves_the_policy() -> None:
    batch = make(random_groups(), advantages=ADVANTAGES)
    hungry, sated = (
        make_trainer(make_policy("qwen2"), AlgorithmConfig(target_entropy=target)) for target in (100.0, 0.0)
    )
    assert [hungry.step(batch, step)["entropy_coef"] for step in range(2)] == pytest.approx([0.005, 0.01])
    assert [sated.step(batch, step)["entropy_coef"] for step in range(2)] == [0.0, 0.0]
    plain = make_trainer(make_policy("qwen2"), AlgorithmConfig())
    for step in range(2):
        plain.step(batch, step)
    assert same(weights(sated.policy), weights(plain.policy))
    assert not same(weights(hungry.policy), weights(plain.policy))
    last = hungry.step(batch, 2)
    assert last["entropy_loss"] == pytest.approx(-0.01 * last["entropy"])


NAN_ADVANTAGE = (ADVANTAGES[0], (-1.5, math.nan), ADVANTAGES[2])


def test_a_batch_that_is_not_finite_steers_nothing() -> None:
    algorithm = AlgorithmConfig(kl_coef=0.1, target_kl=0.5, kl_controller="doubling", target_entropy=1.0)
    policy = make_policy("qwen2")
    trainer = make_trainer(policy, algorithm, ADAMW, make_reference(policy, refreshed=False))
    metrics = trainer.step(make(random_groups(), advantages=NAN_ADVANTAGE), 0)
    assert (metrics["kl_coef"], trainer.entropy.coef) == (0.1, 0.0)
