"""Promise 1 for every loss, aggregation, penalty and rule: no split, layout or order of the groups matters to any.

GPT-2, which continues its prompts, and BERT, which fills them in, in float64: exact up to rounding.
"""

import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from covey.algorithm.aggregation import AGGREGATIONS
from covey.algorithm.build import build_objective
from covey.algorithm.credit.advantages import ADVANTAGES
from covey.algorithm.metrics import group_metrics, value
from covey.algorithm.settings import AlgorithmConfig
from covey.types import Group, Prompt, Reward
from tests.support.builders import credit_assigner

from ...support.builders import random_groups
from .updates import (
    EVERY_LOSS,
    LOSS_OPTIONS,
    Distance,
    How,
    UpdateCase,
    algorithm_of,
    any_way,
    batch_of,
    distance,
    farthest,
    make_case,
    one_update,
)

EXACT = 1e-9
SPLITS = [How("padded", 1), How("packed", 25), How("shared", 20, order=(2, 0, 1))]
"""Nine micro-batches, some of several rollouts, some of parts of a group."""
DISTINCT = list({function: name for name, function in reversed(AGGREGATIONS.items())}.values())
"""Of aggregations with two names, one."""
SETTINGS: list[dict[str, Any]] = [
    {"ratio": "sequence_mean", "aggregation": "seq_mean"},
    {"ratio": "sequence_mean_token", "loss": "cispo"},
    {"ratio": "sequence", "ratio_denominator": "behaviour", "aggregation": "seq_sum"},
    {"ratio_denominator": "reference"},
    {"kl_coef": 0.1, "kl_aggregation": "seq_mean_token_sum", "count_empty": True},
    {"kl_coef": 0.1, "kl_estimator": "k1", "kl_gradient": "naive"},
    {"kl_coef": 0.1, "kl_estimator": "k2", "kl_gradient": "naive"},
    {"kl_coef": 0.1, "kl_estimator": "abs", "kl_gradient": "naive"},
    {"kl_coef": 0.1, "kl_gradient": "is_weighted"},
    {"kl_coef": 0.1, "kl_estimator": "full"},
    {"sampler_kl_coef": 0.1},
    {"sampler_kl_coef": 0.1, "sampler_kl_estimator": "k1_forward"},
    {"entropy_coef": 0.01},
    {"high_entropy_fraction": 0.4},
    {"m2po_threshold": 0.05},
    {"correction": "truncate", "correction_max": 1.1, "correction_self_normalize": True},
    {"correction": "truncate", "correction_level": "sequence", "correction_min": 0.5},
    {"correction": "mask", "correction_level": "sequence_mean", "correction_self_normalize": True},
    {"rejection": "token_k1,seq_mean_k3", "rejection_thresholds": "0.6_1.6,0.05"},
    {"off_policy_mask_delta": 0.02},
    {"loss": "clip_cov", "loss_options": LOSS_OPTIONS["clip_cov"], "m2po_threshold": 0.05, "kl_coef": 0.1},
]


def holds(found: Distance) -> None:
    assert found.gradient < EXACT, found
    assert found.metric < EXACT, found


def pairs() -> Iterator[Any]:
    """Yield each loss with each aggregation, two of each loss quick: an aggregation only multiplies its terms."""
    for row, loss in enumerate(EVERY_LOSS):
        for column, aggregation in enumerate(DISTINCT):
            is_quick = (column - row) % len(DISTINCT) in (0, 3)
            yield pytest.param(loss, aggregation, marks=[] if is_quick else pytest.mark.slow)


@pytest.mark.parametrize(("loss", "aggregation"), pairs())
def test_every_loss_under_every_aggregation_has_one_gradient_and_one_set_of_metrics(
    loss: str, aggregation: str
) -> None:
    case = make_case(algorithm=algorithm_of(loss, aggregation=aggregation))
    seed = len(DISTINCT) * EVERY_LOSS.index(loss) + DISTINCT.index(aggregation)
    holds(farthest(case, [any_way(seed, num_groups=3)]))


def losses_of_policies() -> Iterator[Any]:
    """Yield each loss with each policy: all weights quick, every other loss where it fills in, adapters slow."""
    for place, loss in enumerate(EVERY_LOSS):
        yield pytest.param(loss, "gpt2", 0, id=f"full-{loss}")
        yield pytest.param(loss, "gpt2", 4, id=f"lora-{loss}", marks=pytest.mark.slow)
        yield pytest.param(loss, "bert", 0, id=f"fills-{loss}", marks=[] if place % 2 == 0 else pytest.mark.slow)


@pytest.mark.parametrize(("loss", "architecture", "lora_rank"), losses_of_policies())
def test_every_loss_adds_up_over_the_same_splits(loss: str, architecture: str, lora_rank: int) -> None:
    case = make_case(architecture, algorithm=algorithm_of(loss), lora_rank=lora_rank)
    holds(farthest(case, SPLITS))
    logged = one_update(case).metrics
    if build_objective(case.algorithm, 16).needs_old:
        assert abs(logged["ratio"] - 1) > 1e-4
    assert logged["skipped"] == 0


@pytest.mark.parametrize(
    ("settings", "architecture"),
    [
        pytest.param(settings, name, id=f"{','.join(settings)}-{name}", marks=marks)
        for place, settings in enumerate(SETTINGS)
        for name, marks in (("gpt2", []), ("bert", [] if place % 3 == 0 else [pytest.mark.slow]))
    ],
)
def test_corrections_penalties_and_rules_over_the_whole_batch_do_not_see_the_split(
    settings: dict[str, Any], architecture: str
) -> None:
    holds(farthest(make_case(architecture, algorithm=AlgorithmConfig(**settings)), SPLITS))


CHOOSING: list[tuple[dict[str, Any], str]] = [
    ({"loss": "clip_cov", "loss_options": LOSS_OPTIONS["clip_cov"]}, "cov_fraction"),
    ({"loss": "kl_cov", "loss_options": LOSS_OPTIONS["kl_cov"]}, "cov_fraction"),
    ({"high_entropy_fraction": 0.4}, "policy_token_fraction"),
    ({"m2po_threshold": 0.05}, "policy_token_fraction"),
    ({"off_policy_mask_delta": 0.02}, "policy_token_fraction"),
    ({"rejection": "token_k1,seq_mean_k3", "rejection_thresholds": "0.6_1.6,0.05"}, "policy_token_fraction"),
    ({}, "clip_fraction"),
]


@pytest.mark.parametrize(("settings", "name"), CHOOSING, ids=lambda value: ",".join(value) if value != {} else "clip")
def test_the_rules_above_really_choose_some_tokens_and_not_all(settings: dict[str, Any], name: str) -> None:
    logged = one_update(make_case(algorithm=AlgorithmConfig(**settings)), How("shared", 40)).metrics
    assert 0 < logged[name] < 1


# ------------------------------------------------------------------------------------- rollouts that have no gradient

SOME_ZERO = ((1.0, 0.0, 0.25), (0.0, 0.0), (0.5, -1.0, 0.0, -0.25))


def skipping(algorithm: AlgorithmConfig) -> tuple[Distance, UpdateCase]:
    """What changes where rollouts of advantage 0 are left out of the work, by the loss alone of the metrics."""
    case = make_case(algorithm=algorithm, advantages=SOME_ZERO)
    fewer = batch_of(case, How("shared", 40, skip_zero=True))
    assert sum(m.num_rows for m in fewer.micro_batches) == 5
    assert (fewer.num_loss_tokens, fewer.num_sequences, fewer.num_rollouts) == (43, 9, 9)
    everything, some = (one_update(case, How("shared", 40, skip_zero=skip)) for skip in (False, True))
    of_all = ("loss", "policy_loss", "grad_norm", "learning_rate", "skipped")
    pair = [replace(update, metrics={name: update.metrics[name] for name in of_all}) for update in (some, everything)]
    return distance(*pair), case


@pytest.mark.parametrize("loss", EVERY_LOSS)
def test_leaving_out_rollouts_of_advantage_zero_is_allowed_just_where_it_changes_nothing(loss: str) -> None:
    found, case = skipping(algorithm_of(loss))
    free = build_objective(case.algorithm, 16).zero_advantage_is_free
    assert found.gradient < EXACT if free else found.gradient > 1e-4
    assert not free or found.metric < EXACT
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
def test_rollouts_of_advantage_zero_are_trained_where_something_else_acts_on_them(settings: dict[str, Any]) -> None:
    algorithm = AlgorithmConfig(**settings)
    assert not build_objective(algorithm, 16).zero_advantage_is_free
    assert skipping(algorithm)[0].gradient > 1e-4


@pytest.mark.parametrize(
    "settings",
    [{"correction": "truncate"}, {"off_policy_mask_delta": 0.02}, {"ratio": "sequence"}],
    ids=lambda settings: next(iter(settings)),
)
def test_rules_within_a_rollout_leave_skipping_free(settings: dict[str, Any]) -> None:
    algorithm = AlgorithmConfig(**settings)
    assert build_objective(algorithm, 16).zero_advantage_is_free
    holds(skipping(algorithm)[0])


def test_a_kl_in_the_reward_is_measured_on_every_rollout() -> None:
    in_reward = AlgorithmConfig(kl_coef=0.1, kl_in="reward", kl_estimator="k1")
    assert not build_objective(in_reward, 16).zero_advantage_is_free


# ------------------------------------------------------------------------------------- before the update: advantages

ADVANTAGE_OPTIONS: dict[str, dict[str, Any]] = {"passk": {"k": 2}, "pkpo": {"k": 2}}
IN_ORDER = {"role_ema"}
"""Runs a baseline along the batch, so that the order is part of the formula."""


def rewarded_groups() -> list[Group]:
    """Three groups of unequal size; rewards in two parts, none twice in a group."""
    chance = random.Random(1)
    return [
        Group(
            Prompt(name, "test", "", {}),
            tuple(
                replace(r, reward=Reward(a + b, {"a": a, "b": b}))
                for r in group.rollouts
                for a, b in [(chance.random(), chance.random())]
            ),
            (),
        )
        for name, group in zip("abc", random_groups(), strict=True)
    ]


@pytest.mark.parametrize("advantage", [name for name in ADVANTAGES if name not in IN_ORDER])
def test_no_advantage_depends_on_the_order_of_the_groups(advantage: str) -> None:
    algorithm = AlgorithmConfig(advantage=advantage, advantage_options=ADVANTAGE_OPTIONS.get(advantage, {}))
    groups = rewarded_groups()
    there = credit_assigner(algorithm, {}).assign(groups)
    back = credit_assigner(algorithm, {}).assign(groups[::-1])
    for one, other in zip(there.advantages, back.advantages[::-1], strict=True):
        assert one == pytest.approx(other, rel=1e-12, abs=1e-12)
    first, second = (
        {name: value(average) for name, average in group_metrics(credit.scores).items()} for credit in (there, back)
    )
    assert first == pytest.approx(second, rel=1e-12)


def test_a_running_baseline_does_depend_on_the_order() -> None:
    groups = rewarded_groups()
    assigned = [credit_assigner(AlgorithmConfig(advantage="role_ema"), {}).assign(g) for g in (groups, groups[::-1])]
    there, back = (torch.tensor([a for group in credit.advantages for a in group]) for credit in assigned)
    assert sorted(there.tolist()) != pytest.approx(sorted(back.tolist()))
