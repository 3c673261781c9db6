"""Every golden case of policy losses and aggregation, value and gradient."""

from typing import Any

import torch
from torch import Tensor

from covey.algorithm.aggregation import Reduction, StepCounts, aggregate, count_totals
from covey.algorithm.corrections import WeightOptions, importance_weights
from covey.algorithm.kl import KLOptions, kl_penalty
from covey.algorithm.loss_inputs import LossInputs, ObjectiveInputs, RatioOptions, loss_inputs
from covey.algorithm.losses import LOSSES
from covey.algorithm.metrics import event_sums, mean_over, ratio_sums
from covey.algorithm.objective import DENOMINATORS

from .cases import Case, check, check_all, golden, tensor

LOSS_OPTIONS = (
    *("eps_low", "eps_high", "dual_clip", "two_sided_delta", "ratio_min", "ratio_max", "tau_pos", "tau_neg"),
    *("kl_coef", "div_low", "div_high", "div", "ratio_cap", "adv_tau", "kl_tau", "beta", "pos", "neg"),
    *("k_pos", "lambda_pos", "k_neg", "lambda_neg"),
)
DESCRIBED = {
    *("loss", "ratio", "log_ratio_clamp", "aggregation", "count_empty", "ratio_denominator", "behaviour_weight"),
    *("kl", "clip_space", "denominator", "proximal", "cov_ratio", "cov_low", "cov_high"),
}
METRIC_NAMES = {
    "clip_region": "clip_fraction",
    "cov_clip_fraction": "cov_fraction",
    "mask_fraction": "dropped_fraction",
}


def clipped_ratio(inputs: LossInputs, *, ratio_min: float, ratio_max: float) -> Tensor:
    """What one library calls CISPO; no loss of covey's, here only so that its case is not skipped."""
    return -inputs.ratio.clamp(ratio_min, ratio_max) * inputs.advantages_NT


def case_inputs(case: Case) -> LossInputs:
    mask_NT = tensor(case.inputs["mask"]) > 0
    log_probs_NT = tensor(case.inputs["log_probs"]).requires_grad_(True)
    base_NT, advantages = denominator(case, log_probs_NT, mask_NT), tensor(case.inputs["advantages"])
    options = RatioOptions(case.params.get("ratio", "token"), case.params.get("log_ratio_clamp", 20.0))
    inputs = loss_inputs(log_probs_NT, base_NT, advantages, mask_NT, None, options)
    loss = LOSSES.get(case.params["loss"])
    if loss is None or loss.selector is None:
        return inputs
    names_of = {"clip_cov": ("eps_low", "eps_high", "cov_ratio", "cov_low", "cov_high"), "kl_cov": ("cov_ratio",)}
    selected_NT = loss.selector(inputs, 0, **case.options(*names_of[case.params["loss"]]))
    return loss_inputs(log_probs_NT, base_NT, advantages, mask_NT, selected_NT, options)


def denominator(case: Case, log_probs_NT: Tensor, mask_NT: Tensor) -> Tensor:
    def given(*names: str) -> Tensor:
        found = [tensor(case.inputs[name]) for name in names if name in case.inputs]
        return found[0] if found else log_probs_NT.detach()

    inputs = ObjectiveInputs(
        log_probs_NT=log_probs_NT,
        old_log_probs_NT=given("proximal_log_probs", "old_log_probs"),
        sampler_log_probs_NT=given("behaviour_log_probs"),
        advantages=tensor(case.inputs["advantages"]),
        mask_NT=mask_NT,
        ref_log_probs_NT=given("ref_log_probs"),
    )
    return DENOMINATORS[case.params.get("ratio_denominator", "old")](inputs)


def policy_terms(case: Case, inputs: LossInputs) -> Tensor:
    name = case.params["loss"]
    loss = clipped_ratio if name == "clipped_ratio" else LOSSES[name].function
    terms_NT = loss(inputs, **case.options(*LOSS_OPTIONS))
    if "is_weights" in case.inputs:
        terms_NT = terms_NT * tensor(case.inputs["is_weights"])
    if "behaviour_weight" in case.params:
        options = WeightOptions(**case.params["behaviour_weight"])
        sampler_NT = tensor(case.inputs["behaviour_log_probs"])
        terms_NT = terms_NT * importance_weights(inputs.old_log_probs_NT, sampler_NT, inputs.mask_NT, options)
    return terms_NT


def kl_terms(case: Case, log_probs_NT: Tensor, inputs: LossInputs) -> Tensor:
    options = KLOptions(case.params["kl"]["estimator"], case.params["kl"]["gradient"])
    ref_NT = tensor(case.inputs["ref_log_probs"])
    return kl_penalty(log_probs_NT, ref_NT, inputs.mask_NT, options, inputs.old_log_probs_NT)


def metrics(case: Case, inputs: LossInputs, kl_NT: Tensor | None) -> dict[str, float]:
    pairs = ratio_sums(inputs)
    loss = LOSSES.get(case.params["loss"])
    if loss is not None and loss.events is not None:
        found = loss.events(inputs, **case.options(*LOSS_OPTIONS))
        by_token = "clip_fraction" in case.expected.get("metrics", {})
        pairs |= {name: mean_over(e, inputs.mask_NT) for name, e in found.items()} if by_token else {}
        pairs |= event_sums(found, inputs) if not by_token else {}
    if case.params["loss"] == "gmpo":
        pairs |= out_of_range(case, inputs)
    if kl_NT is not None:
        pairs["kl"] = mean_over(kl_NT, inputs.mask_NT)
    return {name: float(n) / float(d) if d > 0 else 0.0 for name, (n, d) in pairs.items()}


def out_of_range(case: Case, inputs: LossInputs) -> dict[str, tuple[Tensor, Tensor]]:
    """verl's reading for GMPO: outside either bound, by the sign of the advantage; covey logs the clipped direction."""
    delta_NT, advantages_NT = inputs.token_log_ratio.detach(), inputs.advantages_NT
    out_NT = (delta_NT < -case.params["eps_low"]) | (delta_NT > case.params["eps_high"])
    return {
        "clip_fraction_pos": mean_over(out_NT & (advantages_NT > 0), inputs.mask_NT),
        "clip_fraction_neg": mean_over(out_NT & (advantages_NT < 0), inputs.mask_NT),
    }


@golden("loss_*")
def test_a_policy_loss_has_the_golden_value_gradient_and_metrics(case: Case) -> None:
    unknown = set(case.params) - set(LOSS_OPTIONS) - DESCRIBED
    assert not unknown, f"{case.id} sets {unknown}, which this test does not read"
    inputs = case_inputs(case)
    terms_NT, kl_NT = policy_terms(case, inputs), None
    log_probs_NT = inputs.log_probs_NT
    if "kl" in case.params:
        kl_NT = kl_terms(case, log_probs_NT, inputs)
        terms_NT = terms_NT + case.params["kl"]["coef"] * kl_NT
    reduction = Reduction(case.params["aggregation"], None, case.params["count_empty"])
    loss = aggregate(terms_NT, inputs.mask_NT, count_totals(inputs.mask_NT), reduction)
    (gradient_NT,) = torch.autograd.grad(loss, log_probs_NT)
    check(loss, case, "loss")
    check(gradient_NT, case, "grad_log_probs")
    check_metrics(case, metrics(case, inputs, kl_NT))


def check_metrics(case: Case, got: dict[str, float]) -> None:
    for name, want in case.expected.get("metrics", {}).items():
        value = got[METRIC_NAMES.get(name, name)]
        assert abs(value - want) <= case.atol + case.rtol * abs(want), f"{case.id}: {name} is {value}, expected {want}"


def reduction_of(case: Case) -> Reduction:
    options: dict[str, Any] = case.options("norm_length", "count_empty")
    return Reduction(case.params["mode"], **options)


@golden("aggregation")
def test_an_aggregation_has_the_golden_value_and_gradient(case: Case) -> None:
    values_NT = tensor(case.inputs["values"]).requires_grad_(True)
    mask_NT = tensor(case.inputs["mask"]) > 0
    loss = aggregate(values_NT, mask_NT, count_totals(mask_NT), reduction_of(case))
    (gradient_NT,) = torch.autograd.grad(loss, values_NT)
    check_all({"loss": loss, "grad": gradient_NT}, case)


@golden("aggregation_accumulation")
def test_losses_of_micro_batches_and_ranks_add_up_to_the_loss_of_the_batch(case: Case) -> None:
    values_NT, mask_NT = tensor(case.inputs["values"]), tensor(case.inputs["mask"]) > 0
    reduction, totals = reduction_of(case), count_totals(mask_NT)

    def part(rows: list[int], totals: StepCounts) -> Tensor:
        return aggregate(values_NT[rows], mask_NT[rows], totals, reduction)

    micro = [part(rows, totals) for rows in case.inputs["micro_batches"]]
    ranks = [part(rows, totals) * case.params["dp_size"] for rows in case.inputs["ranks"]]
    local = [part(rows, count_totals(mask_NT[rows])) for rows in case.inputs["micro_batches"]]
    check_all(
        {
            "loss": aggregate(values_NT, mask_NT, totals, reduction),
            "micro_losses": torch.stack(micro),
            "sum_of_micro_losses": sum(micro),
            "rank_losses": torch.stack(ranks),
            "mean_of_rank_losses": sum(ranks) / len(ranks),
            "global_tokens": float(totals.num_tokens),
            "global_sequences": float(totals.num_sequences),
            "naive_mean_of_local_means": sum(local) / len(local),
        },
        case,
    )


@golden("aggregation_accumulation")
def test_the_mean_of_local_means_is_another_number(case: Case) -> None:
    assert abs(case.expected["naive_mean_of_local_means"] - case.expected["loss"]) > 1e-3
