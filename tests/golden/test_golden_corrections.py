"""Every golden case of off-policy weights, rejection and masks."""

import torch

from covey.algorithm.corrections import (
    WeightOptions,
    importance_weights,
    m2po_keep,
    mean_weight,
    off_policy_keep,
    parse_rejection,
    rejection_keep,
)

from .cases import Case, check, check_all, golden, tensor


@golden("offpolicy_weights")
def test_importance_weights_are_golden(case: Case) -> None:
    options = WeightOptions(**case.params)
    mask_NT = tensor(case.inputs["mask"]) > 0
    old_NT, sampler_NT = tensor(case.inputs["log_probs"]), tensor(case.inputs["behaviour_log_probs"])
    weights_NT = importance_weights(old_NT, sampler_NT, mask_NT, options)
    mean = mean_weight(weights_NT, mask_NT, options.level)
    check(weights_NT / mean if options.self_normalize else weights_NT, case, "weights")
    # The reference logs the mean over tokens at every level, also where it normalises over sequences.
    token_mean = mean_weight(weights_NT, mask_NT, "token")
    ess = weights_NT.sum() ** 2 / weights_NT.square().sum()
    got = {"mean": float(token_mean), "ess_fraction": float(ess / mask_NT.sum())}
    for name, want in case.expected.get("metrics", {}).items():
        assert abs(got[name] - want) <= case.atol + case.rtol * abs(want), (
            f"{case.id}: {name} is {got[name]}, not {want}"
        )


@golden("offpolicy_rejection")
def test_rejection_keeps_the_golden_tokens(case: Case) -> None:
    mask_NT = tensor(case.inputs["mask"]) > 0
    criteria = parse_rejection(case.params["criteria"], case.params["thresholds"])
    old_NT, sampler_NT = tensor(case.inputs["log_probs"]), tensor(case.inputs["behaviour_log_probs"])
    keep_NT = rejection_keep(old_NT, sampler_NT, mask_NT, criteria)
    num_tokens = mask_NT.sum()
    rejected = (mask_NT & ~keep_NT).sum() / num_tokens.clamp(min=1).to(torch.float64)
    check_all({"mask": keep_NT, "rejected_token_fraction": rejected}, case)


@golden("offpolicy_sequence_mask")
def test_off_policy_masks_keep_the_golden_rows_and_tokens(case: Case) -> None:
    mask_NT, log_probs_NT = tensor(case.inputs["mask"]) > 0, tensor(case.inputs["log_probs"])
    if case.params["rule"] == "m2po":
        sampler_NT = tensor(case.inputs["behaviour_log_probs"])
        check_all({"mask": m2po_keep(log_probs_NT, sampler_NT, mask_NT, case.params["threshold"])}, case)
        return
    advantages_NT = tensor(case.inputs["advantages"])[:, None].expand_as(log_probs_NT)
    sampler_NT = tensor(case.inputs["old_log_probs"])
    check_all({"keep": off_policy_keep(advantages_NT, log_probs_NT, sampler_NT, mask_NT, case.params["delta"])}, case)
