"""The composite objective: what it adds up, and that no split of the batch changes it."""

import math
from dataclasses import fields, replace
from itertools import combinations
from typing import Any

import pytest
import torch
from torch import Tensor

from covey.algorithm.aggregation import AGGREGATIONS, count_totals
from covey.algorithm.build import build_objective
from covey.algorithm.corrections import m2po_keep, row_mean
from covey.algorithm.loss_inputs import ObjectiveInputs
from covey.algorithm.losses import LOSSES
from covey.algorithm.metrics import combine, summarise, weight_sums
from covey.algorithm.settings import AlgorithmConfig

NEEDED: dict[str, dict[str, Any]] = {"dro": {"beta": 0.3}}
LENGTHS = (5, 2, 0, 3, 4, 1)


def batch(seed: int = 0) -> ObjectiveInputs:
    generator = torch.Generator().manual_seed(seed)
    shape = (len(LENGTHS), 5)

    def noise(scale: float) -> Tensor:
        return scale * torch.randn(shape, generator=generator, dtype=torch.float64)

    old_NT = -2 * torch.rand(shape, generator=generator, dtype=torch.float64)
    return ObjectiveInputs(
        log_probs_NT=old_NT + noise(0.3),
        old_log_probs_NT=old_NT,
        sampler_log_probs_NT=old_NT + noise(0.4),
        advantages=noise(1.0)[:, 0],
        mask_NT=torch.arange(5) < torch.tensor(LENGTHS)[:, None],
        ref_log_probs_NT=old_NT + noise(0.3),
        entropy_NT=noise(1.0).exp(),
        full_kl_NT=noise(1.0).exp(),
    )


def rows(inputs: ObjectiveInputs, index: list[int]) -> ObjectiveInputs:
    """Some rows, cut to the longest of them."""
    width = max(max(LENGTHS[i] for i in index), 1)
    given = {f.name: getattr(inputs, f.name) for f in fields(inputs)}
    picked = {name: value[torch.tensor(index)] for name, value in given.items() if value is not None}
    return ObjectiveInputs(**{name: value[:, :width] if value.ndim == 2 else value for name, value in picked.items()})


TAUGHT = {"teacher": "teacher", "teacher_term": "sampled"}


def config(**settings: Any) -> AlgorithmConfig:
    return AlgorithmConfig(**settings)


def run(
    algorithm: AlgorithmConfig, inputs: ObjectiveInputs, parts: list[list[int]]
) -> tuple[float, Tensor, dict[str, float]]:
    """Loss, gradient with respect to log-probs and entropy, and logged numbers, computed over `parts` of the rows."""
    objective = build_objective(algorithm, norm_length=6)
    leaves = {name: getattr(inputs, name).clone().requires_grad_(True) for name in ("log_probs_NT", "entropy_NT")}
    inputs, totals = replace(inputs, **leaves), count_totals(inputs.mask_NT)
    whole = objective.batch_statistics(inputs, seed=3) if objective.needs_batch_selection else None
    loss, sums = torch.zeros((), dtype=torch.float64), []
    for index in parts:
        part = rows(inputs, index)
        statistics = None if whole is None else whole.rows(torch.tensor(index), part.mask_NT.shape[1])
        term, logged = objective(part, totals, algorithm.kl_coef, algorithm.entropy_coef, statistics)
        loss = loss + term
        sums.append(logged)
    gradients = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True)
    flat = torch.cat([torch.zeros_like(inputs.mask_NT).double() if g is None else g for g in gradients])
    return float(loss.detach()), flat, summarise(combine(sums))


WHOLE = [list(range(6))]
SPLITS = [[[0, 1, 2], [3, 4, 5]], [[0], [1], [2], [3], [4], [5]], [[0, 1, 3, 4], [2], [5]]]


def assert_no_split_matters(algorithm: AlgorithmConfig) -> None:
    loss, gradient, logged = run(algorithm, batch(), WHOLE)
    assert math.isfinite(loss)
    assert bool((gradient != 0).any())
    for parts in SPLITS:
        other_loss, other_gradient, other_logged = run(algorithm, batch(), parts)
        assert other_loss == pytest.approx(loss, rel=1e-9)
        torch.testing.assert_close(other_gradient, gradient, rtol=1e-9, atol=1e-12)
        assert other_logged == pytest.approx(logged, rel=1e-6)


@pytest.mark.parametrize("aggregation", sorted(AGGREGATIONS))
@pytest.mark.parametrize("loss", sorted(LOSSES))
def test_no_split_of_the_batch_changes_a_loss_or_its_gradient(loss: str, aggregation: str) -> None:
    options = NEEDED.get(loss, {})
    assert_no_split_matters(config(loss=loss, loss_options=options, aggregation=aggregation))


@pytest.mark.parametrize(
    "settings",
    [
        {"kl_coef": 0.1, "kl_aggregation": "seq_mean_token_sum"},
        {"kl_coef": 0.1, "kl_estimator": "full"},
        {"kl_coef": 0.1, "kl_gradient": "is_weighted", "count_empty": True, "aggregation": "seq_mean"},
        {"sampler_kl_coef": 0.1},
        {"entropy_coef": 0.01},
        {"high_entropy_fraction": 0.4},
        {"correction": "truncate", "correction_self_normalize": True},
        {"correction": "mask", "correction_level": "sequence", "correction_min": 0.2, "correction_max": 4.0},
        {"correction": "truncate", "correction_level": "sequence_mean", "correction_self_normalize": True},
        {"rejection": "token_k1,seq_mean_k3", "rejection_thresholds": "0.6_1.6,0.2"},
        {"off_policy_mask_delta": 0.1},
        {"m2po_threshold": 0.05},
        {"ratio": "sequence_mean", "aggregation": "seq_mean_token_mean"},
        {"ratio": "sequence", "ratio_denominator": "behaviour", "aggregation": "seq_mean"},
        {"loss": "clip_cov", "loss_options": {"cov_ratio": 0.2, "cov_low": 0.1}, "kl_coef": 0.1},
        {"loss": "kl_cov", "loss_options": {"cov_ratio": 0.2}, "m2po_threshold": 0.05, "entropy_coef": 0.01},
    ],
)
def test_no_split_of_the_batch_changes_a_correction_or_a_penalty(settings: dict[str, Any]) -> None:
    assert_no_split_matters(config(**settings))


@pytest.mark.parametrize(
    "settings",
    [
        {"high_entropy_fraction": 0.4},
        {"correction": "truncate", "correction_self_normalize": True},
        {"m2po_threshold": 0.05},
        {"loss": "clip_cov"},
        {"loss": "kl_cov"},
    ],
)
def test_rules_over_the_whole_batch_announce_themselves(settings: dict[str, Any]) -> None:
    assert build_objective(config(**settings), 6).needs_batch_selection
    assert not build_objective(config(), 6).needs_batch_selection


def test_the_tokens_a_selector_chose_reach_the_loss() -> None:
    algorithm = config(loss="kl_cov", loss_options={"cov_ratio": 0.2, "kl_coef": 1.0})
    logged = run(algorithm, batch(), SPLITS[0])[2]
    free = run(config(loss="kl_cov", loss_options={"cov_ratio": 0.2, "kl_coef": 0.0}), batch(), SPLITS[0])[2]
    assert logged["cov_fraction"] == pytest.approx(3 / 15)
    assert logged["policy_loss"] > free["policy_loss"]


EVERYTHING: dict[str, Any] = {
    "kl_coef": 0.1,
    "sampler_kl_coef": 0.1,
    "entropy_coef": 0.01,
    "high_entropy_fraction": 0.5,
    "correction": "truncate",
    "correction_self_normalize": True,
    "rejection": "token_k2",
    "rejection_thresholds": "0.5",
    "off_policy_mask_delta": 0.1,
    "m2po_threshold": 0.5,
}


def poisoned(inputs: ObjectiveInputs) -> ObjectiveInputs:
    tensors = {f.name: getattr(inputs, f.name) for f in fields(inputs) if getattr(inputs, f.name) is not None}
    dirty = {
        n: torch.where(inputs.mask_NT, v, torch.nan)
        for n, v in tensors.items()
        if v.is_floating_point() and v.ndim == 2
    }
    return replace(inputs, **dirty)


def test_nan_under_the_mask_changes_nothing_at_all() -> None:
    clean, dirty = (run(config(**EVERYTHING), inputs, WHOLE) for inputs in (batch(), poisoned(batch())))
    assert clean[0] == dirty[0]
    assert clean[2] == dirty[2]
    torch.testing.assert_close(clean[1], dirty[1], rtol=0, atol=0)


def test_with_every_token_masked_the_loss_is_zero_and_attached() -> None:
    nothing = replace(batch(), mask_NT=torch.zeros_like(batch().mask_NT))
    loss, gradient, logged = run(config(**EVERYTHING), poisoned(nothing), WHOLE)
    assert loss == 0.0
    assert bool((gradient == 0).all())
    assert logged == {}


def test_the_loss_is_the_sum_of_its_logged_pieces() -> None:
    loss, _, logged = run(config(kl_coef=0.1, sampler_kl_coef=0.2, entropy_coef=0.01), batch(), SPLITS[0])
    pieces = ("policy_loss", "kl_loss", "sampler_kl_loss", "entropy_loss")
    assert loss == pytest.approx(logged["loss"]) == pytest.approx(sum(logged[name] for name in pieces))
    assert logged["entropy_loss"] == pytest.approx(-0.01 * logged["entropy"])
    by_sequence = run(config(entropy_coef=0.01, aggregation="seq_mean_token_mean"), batch(), SPLITS[0])[2]
    assert by_sequence["entropy_loss"] == logged["entropy_loss"]  # over all tokens, however the policy term is
    assert logged["kl_loss"] == pytest.approx(0.1 * logged["kl"])


@pytest.mark.parametrize("parts", SPLITS)
def test_the_balancing_loss_of_rollouts_is_reduced_as_the_policy_loss_is(parts: list[list[int]]) -> None:
    balance_N = torch.linspace(1.0, 2.0, len(LENGTHS), dtype=torch.float64)
    inputs = poisoned(replace(batch(), balance_NT=balance_N[:, None].expand(-1, 5)))
    lengths_N = torch.tensor(LENGTHS, dtype=torch.float64)
    bare, expected = run(config(), batch(), parts)[0], float((balance_N * lengths_N).sum() / lengths_N.sum())
    loss, _, logged = run(config(), inputs, parts)
    assert logged["router_loss"] == pytest.approx(expected)
    assert loss == pytest.approx(bare + expected)
    by_rollout = run(config(aggregation="seq_mean_token_mean"), inputs, parts)[2]["router_loss"]
    assert by_rollout == pytest.approx(float(balance_N[lengths_N > 0].mean()))


@pytest.mark.parametrize("estimator", ["k1_forward", "k3"])
def test_the_penalty_to_the_sampler_is_the_divergence_from_it(estimator: str) -> None:
    logged = run(config(sampler_kl_coef=0.2, sampler_kl_estimator=estimator), batch(), WHOLE)[2]
    gap_L = (batch().log_probs_NT - batch().sampler_log_probs_NT)[batch().mask_NT]
    of_token_L = -gap_L if estimator == "k1_forward" else gap_L.exp() - 1 - gap_L
    assert logged["sampler_kl_loss"] == pytest.approx(0.2 * float(of_token_L.mean()))


def test_weights_and_rejection_touch_the_policy_term_only() -> None:
    plain = run(config(kl_coef=0.1), batch(), WHOLE)[2]
    corrected = run(
        config(kl_coef=0.1, correction="mask", rejection="token_k2", rejection_thresholds="0.01"), batch(), WHOLE
    )[2]
    assert corrected["kl_loss"] == pytest.approx(plain["kl_loss"])
    assert corrected["policy_loss"] != pytest.approx(plain["policy_loss"])
    assert corrected["policy_token_fraction"] < 1 == plain["policy_token_fraction"]
    masked = run(config(correction="mask", correction_min=0.8, correction_max=1.25), batch(), WHOLE)[2]
    assert masked["policy_token_fraction"] < 1


def test_rejected_tokens_stay_in_the_denominator() -> None:
    inputs = replace(batch(), advantages=torch.ones(6, dtype=torch.float64))
    inputs = replace(inputs, old_log_probs_NT=inputs.log_probs_NT)
    _, _, logged = run(config(rejection="token_k2", rejection_thresholds="0.01"), inputs, WHOLE)
    assert logged["policy_loss"] == pytest.approx(-logged["policy_token_fraction"])


def test_rejected_tokens_stay_in_the_length_of_their_sequence() -> None:
    inputs = replace(batch(), advantages=torch.ones(6, dtype=torch.float64))
    inputs = replace(inputs, old_log_probs_NT=inputs.log_probs_NT)
    rejecting = config(rejection="token_k2", rejection_thresholds="0.01", aggregation="seq_mean_token_mean")
    _, _, logged = run(rejecting, inputs, WHOLE)
    gap_NT = inputs.old_log_probs_NT - inputs.sampler_log_probs_NT
    kept_NT = inputs.mask_NT & (gap_NT.square() / 2 <= 0.01)
    counts_N = inputs.mask_NT.sum(1)
    shares = kept_NT.sum(1)[counts_N > 0] / counts_N[counts_N > 0]
    assert 0 < kept_NT.sum() < counts_N.sum()
    assert logged["policy_loss"] == pytest.approx(-float(shares.mean()))


def kept_share(**settings: Any) -> float:
    return run(config(**settings), batch(), WHOLE)[2]["policy_token_fraction"]


def test_a_token_stays_where_every_rule_keeps_it() -> None:
    inputs, mask_NT = batch(), batch().mask_NT
    gap_NT = inputs.old_log_probs_NT - inputs.sampler_log_probs_NT
    near_NT = m2po_keep(inputs.old_log_probs_NT, inputs.sampler_log_probs_NT, mask_NT, 0.02)
    assert inputs.entropy_NT is not None
    unsure_NT = mask_NT & (inputs.entropy_NT >= inputs.entropy_NT[mask_NT].quantile(0.6))
    accepted_NT = mask_NT & (gap_NT.square() / 2 <= 0.05)
    on_policy_N = ~(
        (inputs.advantages < 0) & (row_mean(inputs.sampler_log_probs_NT - inputs.log_probs_NT, mask_NT) > 0)
    )
    rules: list[tuple[dict[str, Any], Tensor]] = [
        ({"m2po_threshold": 0.02}, near_NT),
        ({"high_entropy_fraction": 0.4}, unsure_NT),
        ({"rejection": "token_k2", "rejection_thresholds": "0.05"}, accepted_NT),
        ({"off_policy_mask_delta": 1e-12}, on_policy_N[:, None].expand_as(mask_NT)),
    ]
    for (one, kept_NT), (other, others_NT) in combinations(rules, 2):
        expected = float((mask_NT & kept_NT & others_NT).sum() / mask_NT.sum())
        assert kept_share(**one, **other) == pytest.approx(expected)
        assert expected < max(kept_share(**one), kept_share(**other))


def test_sequences_are_dropped_by_the_gap_to_the_policy_that_is_trained_now() -> None:
    old_NT, mask_NT = batch().old_log_probs_NT, batch().mask_NT
    moved = replace(batch(), sampler_log_probs_NT=old_NT, log_probs_NT=old_NT - 1.0)
    kept = run(config(off_policy_mask_delta=0.5), moved, WHOLE)[2]["policy_token_fraction"]
    assert kept == pytest.approx(float((mask_NT & (moved.advantages >= 0)[:, None]).sum() / mask_NT.sum()))
    assert kept < 1


def test_weights_are_divided_by_their_mean_where_that_is_asked_for_alone() -> None:
    truncated = run(config(correction="truncate"), batch(), WHOLE)[2]["correction_weight"]
    beside = run(config(correction="truncate", m2po_threshold=9.0), batch(), WHOLE)[2]["correction_weight"]
    assert beside == pytest.approx(truncated) != pytest.approx(1.0)


def test_a_penalty_has_the_aggregation_and_the_clamp_of_penalties() -> None:
    for penalty, name in (("kl_coef", "kl_loss"), ("sampler_kl_coef", "sampler_kl_loss")):
        summed = run(config(**{penalty: 0.1}, kl_aggregation="token_sum"), batch(), WHOLE)[2]
        assert summed[name] == pytest.approx(15 * run(config(**{penalty: 0.1}), batch(), WHOLE)[2][name])
        assert summed["policy_loss"] == pytest.approx(run(config(), batch(), WHOLE)[2]["policy_loss"])
    clamped = run(config(sampler_kl_coef=1.0, kl_clamp=1e-3), batch(), WHOLE)[2]["sampler_kl_loss"]
    assert 0 < clamped < 1e-6


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, {"num_tokens"}),
        ({"entropy_coef": 0.1, "aggregation": "seq_mean"}, {"num_sequences", "num_tokens"}),
        ({"target_entropy": 0.1, "aggregation": "token_sum"}, {"", "num_tokens"}),
        ({"kl_coef": 0.1, "kl_aggregation": "seq_mean_token_sum"}, {"num_sequences", "num_tokens"}),
        ({"sampler_kl_coef": 0.1, "kl_aggregation": "seq_mean", "count_empty": True}, {"num_rows", "num_tokens"}),
        ({"kl_coef": 0.1, "kl_in": "reward", "kl_estimator": "k1"}, {"num_tokens"}),
    ],
)
def test_an_objective_says_what_divides_its_terms(settings: dict[str, Any], expected: set[str]) -> None:
    assert build_objective(config(**settings), 6).divisors == expected


def test_high_entropy_keeps_the_share_asked_for() -> None:
    logged = run(config(high_entropy_fraction=0.4), batch(), WHOLE)[2]
    assert logged["policy_token_fraction"] == pytest.approx(6 / 15)


def test_self_normalised_weights_average_to_1() -> None:
    logged = run(config(correction="truncate", correction_self_normalize=True), batch(), SPLITS[0])[2]
    assert logged["correction_weight"] == pytest.approx(1.0)


def test_on_policy_nothing_is_clipped_weighted_or_rejected() -> None:
    inputs = batch()
    same = inputs.log_probs_NT
    inputs = replace(inputs, old_log_probs_NT=same, sampler_log_probs_NT=same)
    _, gradient, logged = run(config(**{**EVERYTHING, "high_entropy_fraction": 1.0, "kl_coef": 0.0}), inputs, WHOLE)
    for name in ("ratio", "correction_weight", "ess_fraction", "policy_token_fraction"):
        assert logged[name] == pytest.approx(1.0)
    for name in ("clip_fraction", "approx_kl", "mismatch", "mismatch_kl"):
        assert logged[name] == pytest.approx(0.0)
    num_tokens = sum(LENGTHS)
    torch.testing.assert_close(gradient[:6], -(inputs.advantages[:, None] * inputs.mask_NT) / num_tokens)


def test_kl_in_the_reward_adds_nothing_to_the_loss_but_is_measured() -> None:
    algorithm = config(kl_coef=0.1, kl_in="reward", kl_estimator="k1")
    objective = build_objective(algorithm, 6)
    logged = run(algorithm, batch(), WHOLE)[2]
    assert objective.needs_reference
    assert "kl_loss" not in logged
    expected = (batch().log_probs_NT - batch().ref_log_probs_NT)[batch().mask_NT].mean()
    assert logged["kl"] == pytest.approx(float(expected))
    torch.testing.assert_close(
        objective.kl_values(batch()),
        torch.where(batch().mask_NT, batch().log_probs_NT - batch().ref_log_probs_NT, 0.0),
    )


def test_sequence_ratios_are_logged_over_sequences() -> None:
    inputs = replace(batch(), advantages=torch.ones(6, dtype=torch.float64))
    steps = torch.tensor([1.0, 0.0, 1.0, 0.0, 0.0, 0.0])[:, None]
    inputs = replace(inputs, log_probs_NT=inputs.old_log_probs_NT + steps)
    logged = run(config(ratio="sequence_mean"), inputs, WHOLE)[2]
    assert logged["clip_high"] == pytest.approx(1 / 5)


def test_the_largest_ratio_and_mismatch_are_found_inside_the_mask() -> None:
    objective, inputs = build_objective(config(), 6), batch()
    expected = (inputs.log_probs_NT - inputs.old_log_probs_NT)[inputs.mask_NT].exp().max()
    gap = (inputs.old_log_probs_NT - inputs.sampler_log_probs_NT)[inputs.mask_NT].abs().max()
    for given in (inputs, poisoned(inputs)):
        maxima = objective.maxima(given)
        assert float(maxima["ratio_max"]) == pytest.approx(float(expected))
        assert float(maxima["mismatch_max"]) == pytest.approx(float(gap))


@pytest.mark.parametrize(
    ("settings", "needs"),
    [
        ({}, {"needs_old"}),
        ({"loss": "reinforce"}, set()),
        ({"loss": "nll"}, set()),
        ({"loss": "reinforce", "correction": "truncate"}, {"needs_old"}),
        ({"loss": "reinforce", "rejection": "token_k2", "rejection_thresholds": "1"}, {"needs_old"}),
        ({"loss": "reinforce", "m2po_threshold": 0.1}, {"needs_old", "needs_batch_selection"}),
        ({"loss": "reinforce", "kl_coef": 0.1}, {"needs_reference"}),
        ({"loss": "reinforce", **TAUGHT, "teacher_max_ratio": None}, set()),
        ({"loss": "reinforce", **TAUGHT}, {"needs_old"}),
        ({"loss": "reinforce", "kl_coef": 0.1, "kl_gradient": "is_weighted"}, {"needs_reference", "needs_old"}),
        ({"loss": "reinforce", "kl_coef": 0.1, "kl_estimator": "full"}, {"needs_reference", "needs_full_kl"}),
        ({"kl_estimator": "full"}, {"needs_old"}),
        ({"ratio_denominator": "reference"}, {"needs_reference"}),
        ({"ratio_denominator": "behaviour"}, set()),
        ({"entropy_coef": 0.1}, {"needs_old", "needs_entropy_gradient"}),
        ({"target_entropy": 0.1}, {"needs_old", "needs_entropy_gradient"}),
        ({"high_entropy_fraction": 0.5}, {"needs_old", "needs_batch_selection"}),
    ],
)
def test_an_objective_says_what_it_needs(settings: dict[str, Any], needs: set[str]) -> None:
    objective = build_objective(config(**settings), 6)
    got = {
        "needs_old": objective.needs_old,
        "needs_reference": objective.needs_reference,
        "needs_full_kl": objective.needs_full_kl,
        "needs_entropy_gradient": objective.needs_entropy_gradient,
        "needs_batch_selection": objective.needs_batch_selection,
    }
    assert {name for name, needed in got.items() if needed} == needs


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"loss_options": {"epsilon": 0.2}}, "loss_options must be among eps_low.* for clip, got epsilon"),
        ({"loss": "dro"}, "loss_options must set beta for dro"),
        ({"loss": "clip_cov", "loss_options": {"cov": 1}}, "for clip_cov, got cov"),
        ({"loss": "gmpo", "ratio": "sequence"}, "ratio=sequence needs loss=clip or cispo or sapo, got loss=gmpo"),
        ({"kl_estimator": "full", "kl_gradient": "is_weighted"}, "kl_gradient=is_weighted needs a sampled"),
        ({"kl_in": "reward", "kl_aggregation": "seq_mean"}, "kl_aggregation=seq_mean needs kl_in=loss"),
        (
            {"correction": "truncate", "ratio_denominator": "behaviour"},
            "correction=truncate needs ratio_denominator=old, got behaviour",
        ),
        ({"rejection": "token_k9", "rejection_thresholds": "1"}, "got token_k9"),
    ],
)
def test_a_setting_that_cannot_work_is_refused_at_once(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build_objective(config(**settings), 6)


def test_a_loss_of_your_own_is_found_by_its_path() -> None:
    own = run(config(loss="covey.algorithm.losses:clip", loss_options={"eps_high": 0.2}), batch(), WHOLE)
    named = run(config(loss="clip", loss_options={"eps_high": 0.2}), batch(), WHOLE)
    assert own[0] == named[0]


def test_an_estimator_of_your_own_is_found_by_its_path() -> None:
    own = run(config(kl_coef=0.1, kl_estimator="covey.algorithm.kl:k2"), batch(), WHOLE)
    assert own[0] == run(config(kl_coef=0.1, kl_estimator="k2"), batch(), WHOLE)[0]


def test_a_constant_length_comes_from_the_sampling_limit_unless_set() -> None:
    objective_loss = run(config(aggregation="token_sum_norm"), batch(), WHOLE)[0]
    set_loss = run(config(aggregation="token_sum_norm", norm_length=12), batch(), WHOLE)[0]
    assert objective_loss == pytest.approx(2 * set_loss)
    own = "covey.algorithm.aggregation:token_sum_norm"
    assert run(config(aggregation=own), batch(), WHOLE)[0] == pytest.approx(objective_loss)
    assert run(config(aggregation=own, norm_length=12), batch(), WHOLE)[0] == pytest.approx(set_loss)


@pytest.mark.parametrize("gap", [0.0, -1.0, -19.0])
def test_the_effective_sample_size_is_1_of_equal_weights_however_small(gap: float) -> None:
    sampler_NT = torch.full((2, 3), -1.0)
    sums = weight_sums(sampler_NT + gap, sampler_NT, torch.ones(2, 3, dtype=torch.bool))
    assert summarise(sums)["ess_fraction"] == pytest.approx(1.0, rel=1e-5)


def test_the_effective_sample_size_weighs_the_current_policy() -> None:
    inputs = batch()
    moved = replace(inputs, sampler_log_probs_NT=inputs.old_log_probs_NT)  # on-policy before the first update
    weights = (inputs.log_probs_NT - inputs.old_log_probs_NT)[inputs.mask_NT].exp()
    expected = float(weights.sum() ** 2 / (weights.numel() * (weights**2).sum()))
    assert expected < 0.95
    assert run(config(), moved, WHOLE)[2]["ess_fraction"] == pytest.approx(expected)
