"""Policy losses, importance ratios, whole-batch rules and aggregation."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from covey.algorithm.aggregation import AGGREGATIONS, Reduction, StepCounts, aggregate, count_totals, divisor
from covey.algorithm.loss_inputs import LEVELS, LossInputs, RatioOptions, log_ratio, loss_inputs
from covey.algorithm.losses import LOSSES, clip, clip_events, gmpo, nll, topr
from covey.algorithm.settings import WITH_RATIO_LEVEL, WITHOUT_EXPONENTIAL, WITHOUT_RATIO
from covey.algorithm.token_selection import select_clip_cov, select_kl_cov

NEEDED: dict[str, dict[str, Any]] = {"dro": {"beta": 0.3}}
LOSS_NAMES = sorted(LOSSES)


def make(num_rows: int = 4, num_columns: int = 5, seed: int = 0, spread: float = 0.3) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    old_NT = -2 * torch.rand(num_rows, num_columns, generator=generator, dtype=torch.float64)
    step_NT = spread * torch.randn(num_rows, num_columns, generator=generator, dtype=torch.float64)
    lengths_N = torch.tensor([5, 2, 0, 3])[:num_rows]
    return {
        "log_probs": old_NT + step_NT,
        "old": old_NT,
        "advantages": torch.tensor([1.0, -0.5, 2.0, -1.5], dtype=torch.float64)[:num_rows],
        "mask": torch.arange(num_columns) < lengths_N[:, None],
    }


def inputs_of(values: dict[str, Tensor], level: str = "token") -> LossInputs:
    ratio = RatioOptions(level, 20.0)
    return loss_inputs(
        values["log_probs"], values["old"], values["advantages"], values["mask"], values.get("selected"), ratio
    )


def loss_and_gradient(name: str, values: dict[str, Tensor], mode: str = "token_mean") -> tuple[Tensor, Tensor]:
    leaf = values["log_probs"].clone().requires_grad_(True)
    inputs = inputs_of({**values, "log_probs": leaf})
    terms_NT = LOSSES[name].function(inputs, **NEEDED.get(name, {}))
    reduction = Reduction(mode, norm_length=8)
    loss = aggregate(terms_NT, inputs.mask_NT, count_totals(inputs.mask_NT), reduction)
    return loss.detach(), torch.autograd.grad(loss, leaf)[0]


def row(log_prob: float, old: float, advantage: float) -> LossInputs:
    one = torch.ones(1, 1, dtype=torch.float64)
    return loss_inputs(log_prob * one, old * one, advantage * one, one > 0)


@pytest.mark.parametrize("name", WITH_RATIO_LEVEL)
@pytest.mark.parametrize("level", ["sequence", "sequence_mean"])
def test_losses_that_allow_any_level_of_the_ratio_read_it(name: str, level: str) -> None:
    values, loss = make(), LOSSES[name].function
    assert not torch.equal(loss(inputs_of(values, level)), loss(inputs_of(values, "token")))


def test_a_ratio_above_the_upper_bound_is_clipped_for_a_good_token_only() -> None:
    assert clip(row(math.log(1.5), 0.0, 2.0)).item() == pytest.approx(-2.56)
    assert clip(row(math.log(1.5), 0.0, -2.0)).item() == pytest.approx(3.0)


def test_a_ratio_below_the_lower_bound_is_clipped_for_a_bad_token_only() -> None:
    assert clip(row(math.log(0.5), 0.0, -2.0)).item() == pytest.approx(1.6)
    assert clip(row(math.log(0.5), 0.0, 2.0)).item() == pytest.approx(-1.0)


def test_dual_clip_bounds_the_loss_of_a_bad_token() -> None:
    assert clip(row(math.log(9.0), 0.0, -2.0)).item() == pytest.approx(18.0)
    assert clip(row(math.log(9.0), 0.0, -2.0), dual_clip=3.0).item() == pytest.approx(6.0)
    assert clip(row(math.log(9.0), 0.0, -2.0), two_sided_delta=3.0).item() == pytest.approx(6.0)
    assert clip(row(math.log(9.0), 0.0, 2.0), dual_clip=3.0).item() == pytest.approx(-2.56)


def test_gmpo_is_the_geometric_mean_of_the_ratios() -> None:
    log_probs = torch.tensor([[math.log(1.2), math.log(0.9)]], dtype=torch.float64)
    inputs = loss_inputs(log_probs, torch.zeros_like(log_probs), torch.ones(1), torch.ones(1, 2) > 0)
    torch.testing.assert_close(gmpo(inputs), torch.full((1, 2), -math.sqrt(1.2 * 0.9), dtype=torch.float64))


def test_gmpo_clips_a_ratio_only_where_it_would_gain() -> None:
    options = {"eps_low": 0.1, "eps_high": 0.3}
    for gap, advantage, used in ((0.5, 2.0, 0.3), (-0.5, 2.0, -0.5), (0.5, -2.0, 0.5), (-0.5, -2.0, -0.1)):
        assert gmpo(row(gap, 0.0, advantage), **options).item() == pytest.approx(-advantage * math.exp(used))


def test_topr_truncates_the_weight_of_bad_sequences_only() -> None:
    log_probs = torch.tensor([[math.log(2.0)], [math.log(2.0)]], dtype=torch.float64)
    old = torch.zeros_like(log_probs)
    inputs = loss_inputs(log_probs, old, torch.tensor([3.0, -3.0]), torch.ones(2, 1) > 0)
    torch.testing.assert_close(topr(inputs), torch.tensor([[-3.0], [3.0]], dtype=torch.float64) * math.log(2.0))


def test_topr_has_bounds_for_good_sequences_and_others_for_bad_ones() -> None:
    half = math.log(0.5)
    assert topr(row(half, 0.0, 3.0)).item() == pytest.approx(-3 * half)  # the weight of a good one is always 1
    assert topr(row(half, 0.0, -3.0)).item() == pytest.approx(0.5 * 3 * half)


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_the_weight_of_a_sequence_obeys_the_clamp_that_is_set(level: str) -> None:
    one = torch.ones(1, 2, dtype=torch.float64)
    inputs = loss_inputs(-3.0 * one, 0.0 * one, -one, one > 0, None, RatioOptions(level, 1.0))
    torch.testing.assert_close(topr(inputs), -3.0 * one * math.exp(-1.0))
    far = loss_inputs(-3.0 * one, 0.0 * one, -one, one > 0, None, RatioOptions(level, None))
    torch.testing.assert_close(topr(far), -3.0 * one * math.exp(-6.0))


def test_nll_reads_no_advantage() -> None:
    values = make()
    poor = {**values, "advantages": torch.zeros(4, dtype=torch.float64)}
    torch.testing.assert_close(nll(inputs_of(values)), nll(inputs_of(poor)))


@pytest.mark.parametrize("name", [name for name in LOSS_NAMES if name != "nll"])
def test_on_policy_every_loss_has_the_gradient_of_reinforce(name: str) -> None:
    values = make()
    values["old"] = values["log_probs"]
    _, expected = loss_and_gradient("reinforce", values)
    _, actual = loss_and_gradient(name, values)
    torch.testing.assert_close(actual, expected)


@pytest.mark.parametrize("level", ["token", "sequence_mean_token"])
def test_on_policy_the_clipped_gradient_is_reinforce_at_token_levels(level: str) -> None:
    values = make()
    leaf = values["log_probs"].clone().requires_grad_(True)
    terms_NT = clip(inputs_of({**values, "log_probs": leaf, "old": values["log_probs"]}, level))
    (gradient,) = torch.autograd.grad(terms_NT.sum(), leaf)
    torch.testing.assert_close(gradient, -values["advantages"][:, None] * values["mask"])


@pytest.mark.parametrize("name", ["dppo_tv", "dppo_kl", "dppo_tv_ratio"])
def test_dppo_drops_good_tokens_by_the_upper_bound_and_bad_ones_by_the_lower(name: str) -> None:
    # Between the two bounds by either distance: 0.2 of probability, a Bernoulli KL of 0.087.
    up, down = row(math.log(0.7), math.log(0.5), 1.0), row(math.log(0.3), math.log(0.5), -1.0)
    options = {"kl_tau": 0.0} if name == "dppo_tv_ratio" else {}
    for low, high, kept in ((0.05, 0.3, [True, False]), (0.3, 0.05, [False, True])):
        terms = [LOSSES[name].function(one, div_low=low, div_high=high, **options).item() for one in (up, down)]
        assert [term != 0 for term in terms] == kept
    # By default 0.15 of probability, 0.05 of KL, and 0.2 of probability where the ratio has a gradient
    kept_by_default = {"dppo_tv": [False, True], "dppo_kl": [False, True], "dppo_tv_ratio": [True, True]}[name]
    for new, is_kept in zip((0.69, 0.52), kept_by_default, strict=True):
        assert (LOSSES[name].function(row(math.log(new), math.log(0.5), 1.0), **options).item() != 0) == is_kept


@pytest.mark.parametrize(("name", "bounds"), [("ipo_mask", ("div",)), ("dppo_tv", ("div_low", "div_high"))])
@pytest.mark.parametrize(("new", "advantage"), [(0.75, 1.0), (0.25, -1.0)])
def test_a_token_whose_probability_moved_by_just_the_bound_is_kept(
    name: str, bounds: tuple[str, ...], new: float, advantage: float
) -> None:
    options = {"kl_tau": 0.0} if name == "ipo_mask" else {}
    for bound, is_kept in ((0.25, True), (math.nextafter(0.25, 0.0), False)):
        token = row(math.log(new), math.log(0.5), advantage)
        term = LOSSES[name].function(token, **dict.fromkeys(bounds, bound), **options)
        assert (term.item() != 0) == is_kept


def test_a_sure_token_that_becomes_surer_has_hardly_moved() -> None:
    # In float32 both probabilities are 1, and what is left beside them is not
    one = torch.ones(1, 1)
    sure = loss_inputs(-1e-9 * one, -1e-6 * one, one, one > 0)
    assert LOSSES["dppo_kl"].function(sure).item() != 0


@pytest.mark.parametrize("name", LOSS_NAMES)
def test_advantages_and_old_log_probs_are_constants_for_the_gradient(name: str) -> None:
    values = make()
    constants = [values[key].requires_grad_(True) for key in ("advantages", "old")]
    values["log_probs"] = values["log_probs"].clone().requires_grad_(True)
    LOSSES[name].function(inputs_of(values), **NEEDED.get(name, {})).sum().backward()
    assert [constant.grad for constant in constants] == [None, None]


@pytest.mark.parametrize("name", LOSS_NAMES)
def test_what_stands_under_the_mask_changes_neither_value_nor_gradient(name: str) -> None:
    values = make()
    dirty = dict(values)
    for key, poison in (("log_probs", float("nan")), ("old", float("inf"))):
        dirty[key] = torch.where(values["mask"], values[key], poison)
    for clean, poisoned in zip(loss_and_gradient(name, values), loss_and_gradient(name, dirty), strict=True):
        torch.testing.assert_close(clean, poisoned, rtol=0, atol=0)


@pytest.mark.parametrize("name", LOSS_NAMES)
@pytest.mark.parametrize("mode", sorted(AGGREGATIONS))
def test_with_every_token_masked_the_loss_is_zero_with_a_zero_gradient(name: str, mode: str) -> None:
    values = make()
    values["mask"] = torch.zeros_like(values["mask"])
    values["log_probs"] = torch.full_like(values["log_probs"], float("nan"))
    loss, gradient = loss_and_gradient(name, values, mode)
    assert loss.item() == 0.0
    assert bool((gradient == 0).all())


@pytest.mark.parametrize("name", [n for n in LOSS_NAMES if n not in {"dppo_tv_ratio", "ipo_mask", "dro", "nll"}])
def test_zero_advantage_gives_zero_gradient(name: str) -> None:
    values = make()
    values["advantages"] = torch.zeros(4, dtype=torch.float64)
    loss, gradient = loss_and_gradient(name, values)
    assert loss.item() == 0.0
    assert bool((gradient == 0).all())


@pytest.mark.parametrize("name", LOSS_NAMES)
def test_rows_without_tokens_get_no_gradient(name: str) -> None:
    _, gradient = loss_and_gradient(name, make())
    assert bool((gradient[2] == 0).all())


@pytest.mark.parametrize("half", [torch.bfloat16, torch.float16])
def test_a_loss_in_half_precision_is_computed_in_float32(half: torch.dtype) -> None:
    values = {key: v.to(half) if v.is_floating_point() else v for key, v in make().items()}
    assert clip(inputs_of(values)).dtype == torch.float32


def test_log_ratios_are_clamped_after_summing_with_zero_gradient_beyond() -> None:
    log_probs = torch.full((1, 4), 9.0, requires_grad=True)
    mask = torch.ones(1, 4) > 0
    token = log_ratio(log_probs, torch.zeros(1, 4), mask, RatioOptions("token", 20.0))
    sequence = log_ratio(log_probs, torch.zeros(1, 4), mask, RatioOptions("sequence", 20.0))
    assert token.tolist() == [[9.0] * 4]
    assert sequence.tolist() == [[20.0] * 4]
    assert torch.autograd.grad(sequence.sum(), log_probs)[0].tolist() == [[0.0] * 4]
    free = log_ratio(log_probs, torch.zeros(1, 4), mask, RatioOptions("sequence", None))
    assert free.tolist() == [[36.0] * 4]


def test_ratio_levels_of_one_sequence() -> None:
    log_probs = torch.tensor([[0.1, 0.5, 9.0]], dtype=torch.float64)
    mask = torch.tensor([[True, True, False]])
    got = {
        level: log_ratio(log_probs, torch.zeros(1, 3, dtype=torch.float64), mask, RatioOptions(level)).tolist()[0]
        for level in LEVELS
    }
    assert got["token"] == [0.1, 0.5, 0.0]
    assert got["sequence"] == [0.6, 0.6, 0.0]
    assert got["sequence_mean"] == [0.3, 0.3, 0.0]
    assert got["sequence_mean_token"] == pytest.approx([0.3, 0.3, 0.0])


def test_gspo_token_has_the_value_of_gspo_and_its_gradient_for_sequence_advantages() -> None:
    values = make()
    results = []
    for level in ("sequence_mean", "sequence_mean_token"):
        leaf = values["log_probs"].clone().requires_grad_(True)
        inputs = inputs_of({**values, "log_probs": leaf}, level)
        terms_NT = clip(inputs)
        loss = aggregate(terms_NT, inputs.mask_NT, count_totals(inputs.mask_NT), Reduction("seq_mean_token_mean"))
        results.append((loss.detach(), torch.autograd.grad(loss, leaf)[0]))
    torch.testing.assert_close(results[0], results[1])


def test_gspo_token_gives_each_token_the_gradient_of_its_own_advantage() -> None:
    log_probs = torch.tensor([[0.1, 0.3]], dtype=torch.float64, requires_grad=True)
    advantages, mask = torch.tensor([[1.0, -2.0]], dtype=torch.float64), torch.ones(1, 2) > 0
    ratio = RatioOptions("sequence_mean_token", 20.0)
    inputs = loss_inputs(log_probs, torch.zeros(1, 2, dtype=torch.float64), advantages, mask, None, ratio)
    (inputs.ratio * inputs.advantages_NT).sum().backward()
    torch.testing.assert_close(log_probs.grad, math.exp(0.2) * advantages)


def covariance_inputs() -> LossInputs:
    log_probs = torch.tensor([[-0.1, -3.0, -2.0, -0.2]], dtype=torch.float64)
    advantages = torch.tensor([[2.0, -2.0, 1.0, -1.0]], dtype=torch.float64)
    return loss_inputs(log_probs, log_probs, advantages, torch.ones(1, 4) > 0)


def test_kl_cov_selects_the_tokens_of_largest_covariance() -> None:
    # Means are 0 and -1.325, so covariances are 2.45, 3.35, -0.675 and -1.125.
    inputs = covariance_inputs()
    assert select_kl_cov(inputs, 0, cov_ratio=0.5).tolist() == [[True, True, False, False]]
    assert select_kl_cov(inputs, 0, cov_ratio=0.0).tolist() == [[False, True, False, False]]


def test_clip_cov_draws_among_the_candidates_and_the_seed_decides() -> None:
    inputs = covariance_inputs()
    both = select_clip_cov(inputs, 0, cov_ratio=1.0, cov_low=1.0, cov_high=5.0)
    assert both.tolist() == [[True, True, False, False]]
    draws = {tuple(select_clip_cov(inputs, seed, cov_ratio=0.0).tolist()[0]) for seed in range(20)}
    assert draws == {(True, False, False, False), (False, True, False, False)}
    again = [select_clip_cov(inputs, 7, cov_ratio=0.0).tolist() for _ in range(2)]
    assert again[0] == again[1]


def test_clip_cov_does_not_draw_tokens_the_clip_has_cut_already() -> None:
    inputs = covariance_inputs()
    # Ratios 1.25 with A > 0 (inside 1.28) and 0.7 with A < 0 (cut).
    old = inputs.log_probs_NT - torch.log(torch.tensor([[1.25, 0.7, 1.0, 1.0]], dtype=torch.float64))
    moved = loss_inputs(inputs.log_probs_NT, old, inputs.advantages_NT, inputs.mask_NT)
    options = {"cov_ratio": 1.0, "cov_low": 1.0, "cov_high": 5.0}
    assert select_clip_cov(moved, 0, **options).tolist() == [[True, False, False, False]]
    assert not bool(select_clip_cov(moved, 0, eps_high=0.2, **options).any())


def test_covariances_just_at_a_bound_are_outside_and_shares_of_tokens_are_rounded_down() -> None:
    log_probs = torch.tensor([[-1.0, -3.0, -1.0, -3.0]], dtype=torch.float64)
    advantages = torch.tensor([[1.0, -1.0, -1.0, 1.0]], dtype=torch.float64)
    inputs = loss_inputs(log_probs, log_probs, advantages, torch.ones(1, 4) > 0)  # covariances 1, 1, -1, -1
    for low, high, count in ((0.9, 1.1, 2), (1.0, 5.0, 0), (0.0, 1.0, 0)):
        assert int(select_clip_cov(inputs, 0, cov_ratio=1.0, cov_low=low, cov_high=high).sum()) == count
    assert int(select_kl_cov(inputs, 0, cov_ratio=0.74).sum()) == 2


def test_a_draw_takes_the_same_tokens_wherever_rollouts_lie_in_the_batch() -> None:
    def drawn(order: list[int], seed: int) -> list[list[bool]]:
        picked = {key: values[torch.tensor(order)] for key, values in make(spread=0.0).items()}
        chosen_NT = select_clip_cov(inputs_of(picked), seed, cov_ratio=0.2, cov_low=-50.0, cov_high=50.0)
        return [chosen_NT[order.index(row)].tolist() for row in range(4)]

    for seed in range(5):
        assert drawn([3, 1, 0, 2], seed) == drawn([0, 1, 2, 3], seed)
    assert len({str(drawn([0, 1, 2, 3], seed)) for seed in range(5)}) > 1


@pytest.mark.parametrize("select", [select_clip_cov, select_kl_cov])
def test_a_selector_of_nothing_selects_nothing(select: Callable[..., Tensor]) -> None:
    values = make()
    values["mask"] = torch.zeros_like(values["mask"])
    assert not bool(select(inputs_of(values), 0).any())


def test_clip_cov_takes_the_selected_tokens_out_and_kl_cov_penalises_them() -> None:
    values = make()
    values["selected"] = torch.zeros_like(values["mask"])
    values["selected"][0, 1] = True
    inputs = inputs_of(values)
    assert LOSSES["clip_cov"].function(inputs)[0, 1].item() == 0.0
    plain = -(inputs.ratio * inputs.advantages_NT)[0, 1] + 0.5 * inputs.delta[0, 1].abs()
    assert LOSSES["kl_cov"].function(inputs, kl_coef=0.5)[0, 1].item() == pytest.approx(plain.item())
    # The penalty is beyond the clamp of ratios
    far = {**values, "log_probs": values["old"] - 30.0, "advantages": torch.zeros(4, dtype=torch.float64)}
    assert LOSSES["kl_cov"].function(inputs_of(far), kl_coef=0.5)[0, 1].item() == pytest.approx(15.0)


def test_events_name_the_tokens_whose_gradient_was_cut() -> None:
    log_probs = torch.log(torch.tensor([[1.5, 0.5, 1.5, 0.5, 1.0]], dtype=torch.float64)).requires_grad_(True)
    advantages = torch.tensor([[1.0, -1.0, -1.0, 1.0, 1.0]], dtype=torch.float64)
    inputs = loss_inputs(log_probs, torch.zeros(1, 5), advantages, torch.ones(1, 5) > 0)
    (gradient,) = torch.autograd.grad(clip(inputs).sum(), log_probs)
    events = clip_events(inputs)
    assert events["clip_high"].tolist() == [[True, False, False, False, False]]
    assert events["clip_low"].tolist() == [[False, True, False, False, False]]
    assert (gradient == 0).tolist() == events["clip_fraction"].tolist()


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("clip", {"eps_low": 0.5, "eps_high": 0.5}),
        ("cispo", {"ratio_min": 0.5, "ratio_max": 1.5}),
        ("gmpo", {"eps_low": math.log(2.0), "eps_high": math.log(1.5)}),
    ],
)
def test_a_ratio_just_at_a_bound_is_not_clipped(name: str, options: dict[str, float]) -> None:
    events = LOSSES[name].events
    assert events is not None
    for ratio, advantage in ((1.5, 1.0), (0.5, -1.0)):
        at_bound = events(row(math.log(ratio), 0.0, advantage), **options)
        assert not any(bool(event.any()) for event in at_bound.values())
        beyond = events(row(math.log(ratio) + 1e-9 * advantage, 0.0, advantage), **options)
        assert bool(beyond["clip_fraction"].all())


@pytest.mark.parametrize("name", sorted(name for name, loss in LOSSES.items() if loss.events is not None))
def test_no_event_happens_outside_the_mask(name: str) -> None:
    values = make(spread=3.0)
    values["selected"] = torch.ones_like(values["mask"])
    events = LOSSES[name].events
    assert events is not None
    for event_NT in events(inputs_of(values)).values():
        assert not bool((event_NT & ~values["mask"]).any())


VALUES = torch.tensor([[1.0, 2.0, 3.0], [4.0, 9.0, 9.0], [9.0, 9.0, 9.0]])
MASK = torch.tensor([[True, True, True], [True, False, False], [False, False, False]])


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("token_mean", 10 / 4),
        ("seq_mean_token_mean", (2 + 4) / 2),
        ("seq_mean", (2 + 4) / 2),
        ("seq_sum", 2 + 4),
        ("seq_mean_token_sum", 10 / 2),
        ("seq_mean_token_sum_norm", 10 / 16),
        ("token_sum", 10.0),
        ("seq_sum_token_sum", 10.0),
        ("token_sum_norm", 10 / 8),
    ],
)
def test_aggregations_of_a_small_batch(mode: str, expected: float) -> None:
    assert aggregate(VALUES, MASK, count_totals(MASK), Reduction(mode, 8)).item() == pytest.approx(expected)


def test_every_aggregation_is_in_the_small_batch_test() -> None:
    assert len(AGGREGATIONS) == 9


def test_taught_and_supervised_tokens_have_counts_of_their_own() -> None:
    totals = StepCounts(num_tokens=9, num_sequences=3, num_rows=4, taught=(5, 2), supervised=(7, 1))
    assert totals.of("taught") == StepCounts(num_tokens=5, num_sequences=2, num_rows=4)
    assert totals.of("supervised") == StepCounts(num_tokens=7, num_sequences=1, num_rows=1)


def test_empty_rows_count_only_when_asked() -> None:
    totals = count_totals(MASK)
    assert totals == StepCounts(num_tokens=4, num_sequences=2, num_rows=3)
    counted = Reduction("seq_mean_token_mean", count_empty=True)
    assert aggregate(VALUES, MASK, totals, counted).item() == pytest.approx(6 / 3)
    assert (divisor(counted), divisor(Reduction("seq_mean_token_mean"))) == ("num_rows", "num_sequences")


@pytest.mark.parametrize("mode", sorted(AGGREGATIONS))
def test_shares_of_micro_batches_add_up_to_the_loss_of_the_batch(mode: str) -> None:
    totals, reduction = count_totals(MASK), Reduction(mode, 8)
    whole = aggregate(VALUES, MASK, totals, reduction)
    parts = [aggregate(VALUES[i : i + 1], MASK[i : i + 1], totals, reduction) for i in range(3)]
    torch.testing.assert_close(torch.stack(parts).sum(), whole)


def test_padding_more_columns_changes_no_aggregation() -> None:
    wide, wide_mask = torch.nn.functional.pad(VALUES, (0, 7), value=5.0), torch.nn.functional.pad(MASK, (0, 7))
    for mode in AGGREGATIONS:
        narrow = aggregate(VALUES, MASK, count_totals(MASK), Reduction(mode, 8))
        torch.testing.assert_close(aggregate(wide, wide_mask, count_totals(wide_mask), Reduction(mode, 8)), narrow)


def test_a_norm_aggregation_needs_a_length() -> None:
    with pytest.raises(ValueError, match="aggregation=token_sum_norm needs norm_length >= 1, got None"):
        aggregate(VALUES, MASK, count_totals(MASK), Reduction("token_sum_norm"))


def test_the_settings_know_of_a_loss_what_its_record_says() -> None:
    assert {name for name, loss in LOSSES.items() if loss.any_ratio_level} == set(WITH_RATIO_LEVEL)
    assert {name for name, loss in LOSSES.items() if not loss.reads_old} == set(WITHOUT_RATIO)
    assert {name for name, loss in LOSSES.items() if not loss.exponentiates} == set(WITHOUT_EXPONENTIAL)
