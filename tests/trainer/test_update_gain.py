"""The gain of an update: what it did to the answers that were rewarded."""

from collections.abc import Sequence
from dataclasses import replace
from statistics import stdev

import pytest
import torch

from covey.policy.policy import Policy
from covey.trainer.batch import make_rows
from covey.trainer.prepare import Packing, pack_rows
from covey.trainer.trainer import Trainer
from covey.trainer.update_gain import FIRST, _best_and_worst, is_gain_measured, measure_update_gain
from covey.types import Group, Reward, Sampling

from ..support.builders import (
    SGD,
    as_fills,
    copied,
    logprobs,
    make,
    make_policy,
    make_trainer,
    random_groups,
    sampled_by,
)

REWARDS = ((0.0, 1.0, 0.5), (1.0, 0.0), (0.0, 0.0, 1.0, 0.0))
PACKING = Packing("shared", 10_000)


def judged(policy: Policy, rewards: Sequence[Sequence[float]] = REWARDS) -> list[Group]:
    """Groups that this policy has sampled, with rewards."""
    return [
        replace(group, rollouts=tuple(replace(r, reward=Reward(v)) for r, v in zip(group.rollouts, own, strict=True)))
        for group, own in zip(sampled_by(policy, random_groups(), Sampling()), rewards, strict=True)
    ]


def updated(policy: Policy, groups: Sequence[Group], sign: float = 1.0) -> Trainer:
    """The trainer after an update with rewards, less their group's mean, as advantages."""
    trainer = make_trainer(policy, optimizer=replace(SGD, lr=1e-3))
    advantages = [[sign * (v - sum(g.rewards) / len(g.rewards)) for v in g.rewards] for g in groups]
    batch = pack_rows(make_rows(groups, advantages), policy, PACKING, totals=(43, 9, 9))
    trainer.step(batch, 0)
    return trainer


def test_an_update_widens_the_best_worst_gap_and_a_wrong_sign_narrows_it() -> None:
    policy = make_policy("qwen2", torch.float64)
    groups = judged(policy)
    right = measure_update_gain(groups, updated(copied(policy), groups), PACKING)
    wrong = measure_update_gain(groups, updated(copied(policy), groups, sign=-1.0), PACKING)
    assert right["update_gain"] > 3 * right["update_gain_error"] > 0
    # A step so small is linear: what one gains the other loses
    assert wrong["update_gain"] == pytest.approx(-right["update_gain"], rel=0.05)


@pytest.mark.parametrize("budget", [10_000, 12])
def test_the_gain_compares_summed_log_probs_of_best_and_worst_answer(budget: int) -> None:
    policy = make_policy("qwen2", torch.float64)
    groups = judged(policy)
    before = copied(policy)
    trainer = updated(policy, groups)
    gains = []
    for group, best, worst in zip(groups, (1, 0, 2), (0, 1, 0), strict=True):
        answers = (group.rollouts[best], group.rollouts[worst])
        of_both = [make([Group(group.prompt, (one,), ())]).micro_batches for one in answers]
        rises = [
            float(sum(logprobs(trainer.policy, m, trainer.forward.scoring)))
            - float(sum(logprobs(before, m, trainer.forward.scoring)))
            for m in of_both
        ]
        gains.append(rises[0] - rises[1])
    found = measure_update_gain(groups, trainer, Packing("shared", budget))
    assert found["update_gain"] == pytest.approx(sum(gains) / 3, rel=1e-6)
    assert found["update_gain_error"] == pytest.approx(stdev(gains) / 3**0.5, rel=1e-6)


def test_an_answer_without_tokens_is_neither_best_nor_worst() -> None:
    (group, *_) = random_groups()
    answers = [replace(one, reward=Reward(float(place))) for place, one in enumerate(group.rollouts)]
    empty = [replace(answers[0], loss_mask=(False,) * len(answers[0].loss_mask), reward=Reward(v)) for v in (-9.0, 9.0)]
    found = _best_and_worst(replace(group, rollouts=(empty[0], *answers, empty[1])))
    assert found is not None
    assert found.rollouts == (answers[-1], answers[0])
    assert _best_and_worst(replace(group, rollouts=tuple(empty))) is None


def test_without_an_update_nothing_is_gained() -> None:
    policy = make_policy("qwen2", torch.float64)
    found = measure_update_gain(judged(policy), make_trainer(policy), PACKING)
    assert abs(found["update_gain"]) < 1e-12


def test_fills_of_a_masked_policy_have_an_update_gain() -> None:
    policy = make_policy("bert", torch.float64)
    filled = sampled_by(policy, as_fills(random_groups()), Sampling())
    groups = [
        replace(group, rollouts=tuple(replace(r, reward=Reward(v)) for r, v in zip(group.rollouts, own, strict=True)))
        for group, own in zip(filled, REWARDS, strict=True)
    ]
    assert abs(measure_update_gain(groups, make_trainer(policy), PACKING)["update_gain"]) < 1e-12
    found = measure_update_gain(groups, updated(policy, groups), PACKING)
    assert found["update_gain"] > 0


def test_equal_rewards_have_no_update_gain() -> None:
    policy = make_policy("qwen2", torch.float64)
    groups = judged(policy, ((1.0, 1.0, 1.0), (0.0, 0.0), (0.0, 0.0, 1.0, 0.0)))
    assert measure_update_gain(groups, make_trainer(policy), PACKING) == {}


def test_a_look_changes_neither_weights_nor_optimiser() -> None:
    policy = make_policy("qwen2", torch.float64)
    groups = judged(policy)
    trainer = updated(policy, groups)
    before = [parameter.detach().clone() for parameter in policy.model.parameters()]
    measure_update_gain(groups, trainer, PACKING)
    assert all(torch.equal(a, b) for a, b in zip(before, policy.model.parameters(), strict=True))
    assert all(parameter.requires_grad for parameter in policy.model.parameters())


def test_the_gain_of_the_first_steps_and_every_fifth_is_measured() -> None:
    looked = [step + 1 for step in range(20) if is_gain_measured(step)]
    assert looked == [1, 2, 3, 5, 10, 15, 20]
    assert looked[:FIRST] == [1, 2, 3]
