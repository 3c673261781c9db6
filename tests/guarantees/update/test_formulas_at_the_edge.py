"""Promise 8, degenerate cases: where there is nothing to compute, or far too much, values and gradients stay finite.

Whatever stands outside the mask, NaN and infinity included, reaches neither value nor gradient; nothing to average is
0, still attached to the graph.
"""

import itertools
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from covey.algorithm.aggregation import count_totals
from covey.algorithm.build import build_objective
from covey.algorithm.credit.advantages import ADVANTAGES, scores
from covey.algorithm.credit.scores import Scores
from covey.algorithm.credit.selection import SELECTION
from covey.algorithm.credit.shaping import SHAPING
from covey.algorithm.kl import ESTIMATORS, GRADIENTS, KLOptions, kl_penalty
from covey.algorithm.loss_inputs import LEVELS, ObjectiveInputs
from covey.algorithm.metrics import summarise
from covey.algorithm.settings import AlgorithmConfig

from .updates import EVERY_LOSS, algorithm_of

NAN, INF = math.nan, math.inf
ONE_OF_EACH = ("token_mean", "seq_mean_token_mean", "seq_mean_token_sum_norm", "token_sum")
"""An aggregation for each thing they divide by."""

# ------------------------------------------------------------------------------------- losses


def rows(log_probs: list[list[float]], gap: list[list[float]], mask: list[list[int]]) -> ObjectiveInputs:
    """Policy log-probs in float32, which overflows first, and by how much old, sampler and reference ones are lower."""
    log_probs_NT = torch.tensor(log_probs).requires_grad_(True)
    lower_NT = log_probs_NT.detach() - torch.tensor(gap)
    advantages_NT = torch.tensor([1.0, -2.0, 0.5, -0.25])[: len(mask), None]
    entropy_NT = torch.ones_like(lower_NT)
    return ObjectiveInputs(
        log_probs_NT,
        lower_NT,
        lower_NT.clone(),
        advantages_NT.expand_as(lower_NT),
        torch.tensor(mask).bool(),
        lower_NT.clone(),
        entropy_NT,
    )


PLAIN = [[-1.0, -2.0, -0.5], [-0.1, -3.0, -1.5]]
EDGES = {
    "no token is valid": rows(PLAIN, [[0.1] * 3] * 2, [[0, 0, 0], [0, 0, 0]]),
    "no token is valid and all are NaN": rows([[NAN] * 3] * 2, [[NAN] * 3] * 2, [[0, 0, 0], [0, 0, 0]]),
    "NaN and infinity under the mask": rows(
        [[-1.0, NAN, INF], [-INF, -2.0, NAN]], [[0.1, NAN, INF], [NAN, 0.1, -INF]], [[1, 0, 0], [0, 1, 0]]
    ),
    "one row is empty": rows(PLAIN, [[0.1] * 3] * 2, [[1, 1, 1], [0, 0, 0]]),
    "one token": rows([[-1.0]], [[0.0]], [[1]]),
    "certain tokens": rows([[0.0, 0.0, -1e-30]] * 2, [[0.0] * 3] * 2, [[1, 1, 1], [1, 1, 1]]),
    "the ratio explodes": rows([[-1.0, -2.0, -0.5]] * 2, [[1e4, 1e4, 1e4]] * 2, [[1, 1, 1], [1, 1, 1]]),
    "the ratio vanishes": rows([[-1e4, -1e4, -1e4]] * 2, [[-1e4, -1e4, -1e4]] * 2, [[1, 1, 1], [1, 1, 0]]),
    "advantages are 0": replace(rows(PLAIN, [[0.1] * 3] * 2, [[1, 1, 1], [1, 1, 0]]), advantages=torch.zeros(2, 3)),
}


def objective_of(algorithm: AlgorithmConfig, inputs: ObjectiveInputs) -> tuple[Tensor, Tensor, dict[str, float]]:
    """Loss, gradient and metrics with every penalty on."""
    objective = build_objective(replace(algorithm, entropy_coef=0.01), norm_length=16)
    given = replace(inputs, log_probs_NT=inputs.log_probs_NT.detach().clone().requires_grad_(True))
    statistics = objective.batch_statistics(given, 0) if objective.needs_batch_selection else None
    loss, sums = objective(given, count_totals(given.mask_NT), 0.1, 0.01, statistics)
    (gradient_NT,) = torch.autograd.grad(loss, given.log_probs_NT)
    largest = {name: float(value) for name, value in objective.maxima(given).items()}
    return loss.detach(), gradient_NT, summarise(sums) | largest


@pytest.mark.parametrize("edge", EDGES)
@pytest.mark.parametrize("loss", EVERY_LOSS)
def test_every_loss_is_finite_at_every_edge_in_value_gradient_and_metrics(loss: str, edge: str) -> None:
    inputs = EDGES[edge]
    for aggregation, count_empty in itertools.product(ONE_OF_EACH, (False, True)):
        algorithm = algorithm_of(
            loss, aggregation=aggregation, count_empty=count_empty, kl_coef=0.1, sampler_kl_coef=0.1, entropy_coef=0.01
        )
        value, gradient_NT, metrics = objective_of(algorithm, inputs)
        assert bool(value.isfinite())
        assert bool(gradient_NT.isfinite().all())
        assert not bool(gradient_NT[~inputs.mask_NT].any())
        assert all(map(math.isfinite, metrics.values())), metrics
        if not bool(inputs.mask_NT.any()):
            assert float(value) == 0.0


@pytest.mark.parametrize("edge", EDGES)
@pytest.mark.parametrize("level", LEVELS)
def test_every_ratio_level_is_finite_at_every_edge(level: str, edge: str) -> None:
    for loss, denominator in itertools.product(("clip", "cispo", "sapo"), ("old", "behaviour", "reference")):
        algorithm = AlgorithmConfig(loss=loss, ratio=level, ratio_denominator=denominator)
        value, gradient_NT, _ = objective_of(algorithm, EDGES[edge])
        assert bool(value.isfinite() & gradient_NT.isfinite().all())


CORRECTIONS: list[dict[str, Any]] = [
    *({"correction": mode, "correction_level": level, "correction_self_normalize": own}
      for mode in ("truncate", "mask") for level in ("token", "sequence", "sequence_mean") for own in (False, True)),
    {"rejection": "token_k1,seq_sum_k2,seq_mean_k3,seq_max_k3", "rejection_thresholds": "0.5_2.0,0.1,0.1,0.1"},
    {"off_policy_mask_delta": 0.1},
    {"m2po_threshold": 0.01},
    {"high_entropy_fraction": 0.2},
]  # fmt: skip


@pytest.mark.parametrize("edge", EDGES)
@pytest.mark.parametrize("settings", CORRECTIONS, ids=lambda settings: ",".join(map(str, settings.values())))
def test_every_correction_is_finite_at_every_edge(settings: dict[str, Any], edge: str) -> None:
    value, gradient_NT, metrics = objective_of(AlgorithmConfig(**settings), EDGES[edge])
    assert bool(value.isfinite() & gradient_NT.isfinite().all())
    assert all(map(math.isfinite, metrics.values())), metrics


@pytest.mark.parametrize("edge", EDGES)
@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_every_kl_estimator_is_finite_at_every_edge(estimator: str, edge: str) -> None:
    inputs = EDGES[edge]
    assert inputs.ref_log_probs_NT is not None
    for gradient in GRADIENTS:
        log_probs_NT = inputs.log_probs_NT.detach().clone().requires_grad_(True)
        options = KLOptions(estimator, gradient)
        kl_NT = kl_penalty(log_probs_NT, inputs.ref_log_probs_NT, inputs.mask_NT, options)
        (gradient_NT,) = torch.autograd.grad(kl_NT.sum(), log_probs_NT)
        assert bool(kl_NT.isfinite().all() & gradient_NT.isfinite().all())
        assert not bool(kl_NT[~inputs.mask_NT].any() | gradient_NT[~inputs.mask_NT].any())


# ------------------------------------------------------------------------------------- advantages

GROUPS: dict[str, Scores] = {
    "all rewards are equal": scores([0.5] * 4, [0] * 4, lengths=[1, 2, 3, 4]),
    "all rewards are 0": scores([0.0] * 4, [0] * 4, lengths=[1, 2, 3, 4]),
    "one rollout is not scored": scores([1.0, NAN, 0.0, 0.5], [0] * 4, lengths=[1, 2, 3, 4]),
    "no rollout is scored": scores([NAN] * 4, [0] * 4, lengths=[1, 2, 3, 4]),
    "one is scored in each group": scores([1.0, NAN, NAN, 0.0], [0, 0, 1, 1], lengths=[1, 2, 3, 4]),
    "groups of one": scores([1.0, 0.0, 0.5], [0, 1, 2], lengths=[1, 2, 3]),
    "unequal groups": scores([1.0, 0.0, 0.5, 1.0, 0.0], [0, 1, 1, 1, 1], lengths=[1, 2, 3, 4, 5]),
    "completions without tokens": scores([1.0, 0.0, 0.5, 0.25], [0, 0, 1, 1], lengths=[0, 0, 0, 0]),
    "a large common offset": scores([1e8, 1e8 + 1, 1e8 + 2, 1e8 + 1], [0] * 4, lengths=[1, 2, 3, 4]),
    "huge and tiny": scores([1e12, 1e-12, 0.0, 1.0], [0, 0, 1, 1], lengths=[1, 2, 3, 4]),
}
TOO_SMALL = {"passk", "pkpo", "best_minus_second"}
"""Refuse groups in which their k-subsets, or a second best, do not exist."""
SMALL_GROUPS = {"no rollout is scored", "one is scored in each group", "groups of one", "unequal groups"}
NO_LEARNING = {"all rewards are equal", "all rewards are 0"}
NOT_CENTRED = {"none", "role_ema", "pkpo", "maxrl"}


@pytest.mark.parametrize("case", GROUPS)
@pytest.mark.parametrize("name", ADVANTAGES)
def test_every_advantage_is_finite_at_every_edge(name: str, case: str) -> None:
    given = with_parts(GROUPS[case])
    options = {"k": 2} if name in ("passk", "pkpo") else {}
    try:
        advantages_N = ADVANTAGES[name](given, **options)
    except ValueError:
        assert name in TOO_SMALL
        assert case in SMALL_GROUPS
        return
    assert advantages_N.shape == given.rewards_N.shape
    assert bool(advantages_N.isfinite().all()), advantages_N
    assert not bool(advantages_N[~given.scored].any())
    if case in NO_LEARNING and name not in NOT_CENTRED:
        assert not bool(advantages_N.any()), advantages_N


def with_parts(given: Scores) -> Scores:
    """The reward as the sum of two parts, for the estimators that look at them one by one."""
    half_N1 = given.rewards_N[:, None] / 2
    return replace(given, parts_NK=torch.cat([half_N1, half_N1], dim=1), weights_K=torch.ones(2, dtype=torch.float64))


def test_a_large_common_offset_does_not_eat_the_spread() -> None:
    offset, plain = GROUPS["a large common offset"], scores([0.0, 1.0, 2.0, 1.0], [0] * 4)
    expected = [-1.224743, 0.0, 1.224743, 0.0]
    assert ADVANTAGES["group_zscore"](offset).tolist() == pytest.approx(expected, abs=1e-5)
    assert ADVANTAGES["group_zscore"](plain).tolist() == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("case", GROUPS)
@pytest.mark.parametrize(
    ("name", "options"),
    [("top_k", {"k": 3}), ("max_variance", {"m": 3}), ("balanced_subset", {"group_size": 3})],
)
def test_every_selection_keeps_something_it_may_keep(name: str, options: dict[str, int], case: str) -> None:
    given = GROUPS[case]
    chosen = SELECTION[name](given, ADVANTAGES["group_center"], **options)
    assert bool(chosen.advantages_N.isfinite().all())
    assert not bool(chosen.keep_N[~given.scored].any())
    for group in range(given.num_groups):
        members_N = (given.groups_N == group) & given.scored
        assert int((chosen.keep_N & members_N).sum()) == min(3, int(members_N.sum()))


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("soft_overlong", {"max_len": 4, "cache": 4}),
        ("stop_properly", {"coef": -1.0}),
        ("stop_properly", {"coef": 0.0}),
        ("repetition", {"ngram": 3}),
        ("pass_rate_linear", {}),
    ],
)
@pytest.mark.parametrize("case", GROUPS)
def test_shaping_leaves_what_was_not_scored_alone_and_the_rest_finite(
    name: str, options: dict[str, float], case: str
) -> None:
    given, n = GROUPS[case], len(GROUPS[case].rewards_N)
    zeros_N = torch.zeros(n, dtype=torch.int64)
    info = replace(given, written_N=zeros_N, total_lengths_N=zeros_N, turns_N=zeros_N, truncated_N=zeros_N == 0)
    shaped_N = SHAPING[name](given.rewards_N, info, **options)
    assert bool((shaped_N.isnan() == given.rewards_N.isnan()).all())
    assert bool(shaped_N[given.scored].isfinite().all())
