"""Every golden case of KL estimators, placement, controllers, the reference, and of the single-step masked policy."""

import itertools
from typing import Any

import torch
from torch import Tensor

from covey.algorithm.aggregation import Reduction, aggregate, count_totals
from covey.algorithm.controllers import KLController, update_kl_controller
from covey.algorithm.credit.advantages import ADVANTAGES
from covey.algorithm.credit.scores import scores
from covey.algorithm.kl import KLOptions, full_kl, kl_penalty, refresh
from covey.algorithm.loss_inputs import loss_inputs
from covey.algorithm.losses import clip
from covey.algorithm.metrics import sequence_mean, value

from .cases import Case, check, check_all, golden, tensor
from .reference_masked_policy import fill_entropy, fill_kl, fill_log_probs, fill_mask, reduce_positions


@golden("kl_estimators")
def test_a_kl_estimator_has_the_golden_value_and_gradient(case: Case) -> None:
    log_probs_NT = tensor(case.inputs["log_probs"]).requires_grad_(True)
    mask_NT = tensor(case.inputs.get("mask", torch.ones_like(log_probs_NT).tolist())) > 0
    options = KLOptions(
        case.params["estimator"],
        case.params["gradient"],
        case.params.get("clamp_log_ratio"),
        case.params.get("clamp_value"),
    )
    kl_NT = kl_penalty(log_probs_NT, tensor(case.inputs["ref_log_probs"]), mask_NT, options)
    mean = aggregate(kl_NT, mask_NT, count_totals(mask_NT), Reduction("token_mean"))
    loss = case.params.get("coef", 0.0) * mean
    (of_sum_NT,) = torch.autograd.grad(kl_NT.sum(), log_probs_NT, retain_graph=True)
    (of_loss_NT,) = torch.autograd.grad(loss, log_probs_NT)
    got = {"kl": kl_NT, "grad_log_probs_of_sum": of_sum_NT, "loss": loss, "kl_mean": mean, "grad_log_probs": of_loss_NT}
    if case.params.get("reduction") == "mean_over_all_positions":
        # One library averages over padding as well; covey does not, so only the denominator differs.
        assert bool(mask_NT.all()) or case.params["estimator"] == "k3"
        padded = padding_included(case, log_probs_NT)
        got |= {key: padded[key] for key in padded}
    check_all(got, case)


def padding_included(case: Case, log_probs_NT: Tensor) -> dict[str, Tensor]:
    everything_NT = torch.ones_like(log_probs_NT, dtype=torch.bool)
    kl_NT = kl_penalty(log_probs_NT, tensor(case.inputs["ref_log_probs"]), everything_NT, KLOptions("k3", "naive"))
    loss = case.params["coef"] * kl_NT.mean()
    (gradient_NT,) = torch.autograd.grad(loss, log_probs_NT)
    return {"loss": loss, "kl_mean": kl_NT.mean(), "grad_log_probs": gradient_NT}


@golden("kl_full")
def test_the_exact_kl_and_the_expectations_of_its_estimators_are_golden(case: Case) -> None:
    if case.params["estimator"] == "expectations":
        check_nested(expectations(tensor(case.inputs["logits"]), tensor(case.inputs["ref_logits"])), case)
        return
    logits_NTV, mask_NT = tensor(case.inputs["logits"]).requires_grad_(True), tensor(case.inputs["mask"]) > 0
    flat = (logits_NTV.flatten(0, 1), tensor(case.inputs["ref_logits"]).flatten(0, 1))
    pair = flat if case.params["direction"] == "reverse" else flat[::-1]
    kl_NT = full_kl(*pair).view(mask_NT.shape)
    loss = aggregate(kl_NT, mask_NT, count_totals(mask_NT), Reduction("token_mean"))
    (gradient_NTV,) = torch.autograd.grad(loss, logits_NTV)
    check_all({"kl": kl_NT, "loss": loss, "grad_logits": gradient_NTV}, case)


def expectations(logits_V: Tensor, ref_logits_V: Tensor) -> dict[str, Any]:
    """Exact expectations over the vocabulary, samples from the policy."""
    logits_V = logits_V.requires_grad_(True)
    log_p_V, log_r_V = logits_V.log_softmax(-1), ref_logits_V.log_softmax(-1)
    p_V, everywhere_V = log_p_V.detach().exp(), torch.ones_like(log_p_V, dtype=torch.bool)

    def gradient(of: Tensor) -> Tensor:
        return torch.autograd.grad(of, logits_V, retain_graph=True)[0]

    values = {k: kl_penalty(log_p_V, log_r_V, everywhere_V, KLOptions(k, "naive")) for k in ("k1", "k2", "k3")}
    pair = logits_V[None], ref_logits_V[None]
    reverse, forward = full_kl(*pair)[0], full_kl(*pair[::-1])[0]
    return {
        "exact_kl": reverse,
        "expected_value": {k: (p_V * value).sum() for k, value in values.items()},
        "exact_grad": gradient(reverse),
        "expected_grad_as_loss": {k: gradient((p_V * value).sum()) for k, value in values.items()},
        "expected_grad_k1_in_reward": gradient((p_V * values["k1"].detach() * log_p_V).sum()),
        "exact_forward_kl_grad": gradient(forward),
    }


def check_nested(got: dict[str, Any], case: Case) -> None:
    for key, want in case.expected.items():
        for name in want if isinstance(want, dict) else [None]:
            expected, actual = (want, got[key]) if name is None else (want[name], got[key][name])
            torch.testing.assert_close(actual.detach(), tensor(expected), rtol=case.rtol, atol=case.atol)


@golden("kl_in_reward")
def test_a_kl_in_the_reward_is_golden(case: Case) -> None:
    mask_NT, rewards_N = tensor(case.inputs["mask"]) > 0, tensor(case.inputs["rewards"])
    options, coef = KLOptions(case.params["estimator"], "naive"), case.params["coef"]
    kl_NT = kl_penalty(tensor(case.inputs["old_log_probs"]), tensor(case.inputs["ref_log_probs"]), mask_NT, options)
    if case.params["level"] == "token":
        check(value(sequence_mean(kl_NT, mask_NT)), case, "controller_kl")
        return
    shaped_N = rewards_N - coef * kl_NT.sum(1)
    advantages_N = ADVANTAGES[case.params["then"]](scores(shaped_N, case.inputs["groups"]))
    check_all({"shaped_rewards": shaped_N, "advantages": advantages_N}, case)


@golden("kl_controller")
def test_a_kl_controller_takes_the_golden_path(case: Case) -> None:
    settings = {name: value for name, value in case.params.items() if name not in ("controller", "init")}
    state = KLController(coef=case.params["init"], rule=case.params["controller"], **settings)
    path = []
    for kl in case.inputs["kl"]:
        state = update_kl_controller(state, kl, case.inputs.get("n_steps", 1))
        path.append(state.coef)
    check_all({"coef": path}, case)


@golden("reference_update")
def test_a_reference_refresh_is_golden(case: Case) -> None:
    policy, reference = tensor(case.inputs["policy"]), tensor(case.inputs["reference"])
    check_all({"reference": refresh(reference, policy, case.params["alpha"])}, case)


@golden("masked_policy")
def test_a_single_step_masked_policy_is_golden(case: Case) -> None:
    computed = {"distribution": fill_distribution, "loss": fill_loss, "diffu_grpo_loss": diffusion_loss}
    check_all(computed[case.params["quantity"]](case), case)


def fill_distribution(case: Case) -> dict[str, Any]:
    logits_1TV, ref_1TV = tensor(case.inputs["logits"])[None], tensor(case.inputs["ref_logits"])[None]
    positions_1M = torch.tensor(case.inputs["masked_positions"])[None]
    samples_1GM = torch.tensor(case.inputs["samples"])[None]
    num_masked, num_entries = positions_1M.shape[1], logits_1TV.shape[-1]
    every_fill = list(itertools.product(range(num_entries), repeat=num_masked))
    all_fills_1GM = torch.tensor(every_fill)[None]
    kl_1M = fill_kl(logits_1TV, ref_1TV, positions_1M)
    return {
        "total_probability": fill_log_probs(logits_1TV, positions_1M, all_fills_1GM).sum(1).exp().sum(),
        "sequence_log_probs": fill_log_probs(logits_1TV, positions_1M, samples_1GM).sum(1),
        "ref_sequence_log_probs": fill_log_probs(ref_1TV, positions_1M, samples_1GM).sum(1),
        "kl_sum": kl_1M.sum(),
        "kl_per_position": kl_1M[0],
        "kl_mean": kl_1M.mean(),
        "entropy_sum": fill_entropy(logits_1TV, positions_1M).sum(),
    }


def fill_loss(case: Case) -> dict[str, Any]:
    logits_BTV, positions_BM = tensor(case.inputs["logits"]).requires_grad_(True), tensor_of(case, "masked_positions")
    samples_BGM = tensor_of(case, "samples")
    group_size = samples_BGM.shape[1]
    log_probs_NM = fill_log_probs(logits_BTV, positions_BM, samples_BGM)
    rewards_N, groups = (
        tensor(case.inputs["rewards"]).flatten(),
        [b for b in range(len(samples_BGM)) for _ in range(group_size)],
    )
    options = case.options("std_of", "ddof", "eps")
    advantages_N = ADVANTAGES[case.params["estimator"]](scores(rewards_N, groups), **options)
    mask_NM = fill_mask(positions_BM).repeat_interleave(group_size, 0)
    kl_BM = fill_kl(logits_BTV, tensor(case.inputs["ref_logits"]), positions_BM)
    kl_N = reduce_positions(kl_BM, positions_BM, case.params["kl_reduction"]).repeat_interleave(group_size)
    terms_NM = -advantages_N[:, None] * log_probs_NM
    reduction = Reduction("seq_mean_token_sum", count_empty=True)
    policy_loss = aggregate(terms_NM, mask_NM, count_totals(mask_NM), reduction)
    loss = policy_loss + case.params["beta"] * kl_N.mean()
    return {
        "advantages": advantages_N,
        "sequence_log_probs": log_probs_NM.sum(1),
        "pg_loss": policy_loss,
        "kl": kl_N,
        "loss": loss,
        "grad_logits": torch.autograd.grad(loss, logits_BTV)[0],
    }


def tensor_of(case: Case, name: str) -> Tensor:
    return torch.tensor(case.inputs[name])


def diffusion_loss(case: Case) -> dict[str, Any]:
    log_probs_NT, mask_NT = tensor(case.inputs["log_probs"]).requires_grad_(True), tensor(case.inputs["mask"]) > 0
    old_NT, ref_NT = tensor(case.inputs["old_log_probs"]), tensor(case.inputs["ref_log_probs"])
    inputs = loss_inputs(log_probs_NT, old_NT, tensor(case.inputs["advantages"]), mask_NT)
    kl_NT = kl_penalty(log_probs_NT, ref_NT, mask_NT, KLOptions(case.params["kl"], "naive"))
    terms_NT = clip(inputs, **case.options("eps_low", "eps_high")) + case.params["beta"] * kl_NT
    loss = aggregate(terms_NT, mask_NT, count_totals(mask_NT), Reduction(case.params["aggregation"]))
    return {"loss": loss, "grad_log_probs": torch.autograd.grad(loss, log_probs_NT)[0]}
