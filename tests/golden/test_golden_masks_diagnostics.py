"""Golden values of masks, entropies and metrics."""

from typing import Any

import torch

from covey.diagnostics import (
    avg_at_k,
    clip_fractions,
    effective_sample_size,
    ess_terms,
    group_metrics,
    maj_at_k,
    majority_vote,
    off_policy,
    pass_at_k,
    value,
)
from covey.masks import (
    EntropyControl,
    drop_truncated,
    entropy_bonus,
    entropy_of,
    high_entropy_mask,
    high_entropy_threshold,
    policy_token_mask,
    sum_pi_squared,
    token_log_probs,
    update_entropy_control,
)
from covey.scores import scores

from .cases import Case, check_all, golden, tensor


@golden("masks")
def test_masks_and_entropies_are_the_golden_ones(case: Case) -> None:
    computed = {
        "high_entropy": high_entropy_output,
        "truncated": truncated_output,
        "tool": tool_output,
        "entropy_bonus": entropy_bonus_output,
        "entropy_control": entropy_control_output,
        "entropy": lambda case: {"entropy": entropy_of(tensor(case.inputs["logits"]))},
        "token_log_prob": token_log_prob_output,
        "sum_pi_squared": lambda case: {"value": sum_pi_squared(tensor(case.inputs["logits"]))},
    }
    check_all(computed[case.params.get("mask") or case.params["quantity"]](case), case)


@golden("metrics_*")
def test_metrics_are_the_golden_ones(case: Case) -> None:
    computed = {
        "groups": groups_output,
        "offpolicy": off_policy_output,
        "ess": ess_output,
        "clip": clip_output,
        "pass_at_k": lambda case: {"value": pass_at_k(case.inputs["n"], case.inputs["c"], case.params["k"])},
        "avg_at_k": lambda case: dict(zip(("value", "per_prompt"), avg_at_k(case.inputs["rewards"]), strict=True)),
        "majority_vote": lambda case: {"value": majority_vote(case.inputs["answers"], case.inputs["correct"])},
        "maj_at_k": lambda case: {
            "value": maj_at_k(case.inputs["answers"], case.inputs["correct"], case.params["k"]),
        },
    }
    check_all(computed[case.params.get("metric") or case.params["metrics"]](case), case)


def high_entropy_output(case: Case) -> dict[str, Any]:
    entropy_NT, mask_NT = tensor(case.inputs["entropies"]), tensor(case.inputs["mask"]).bool()
    threshold = high_entropy_threshold(entropy_NT[mask_NT], case.params["keep_fraction"])
    return {"mask": high_entropy_mask(entropy_NT, mask_NT, threshold)}


def truncated_output(case: Case) -> dict[str, Any]:
    return {"mask": drop_truncated(tensor(case.inputs["mask"]).bool(), torch.tensor(case.inputs["truncated"]))}


def tool_output(case: Case) -> dict[str, Any]:
    return {"mask": policy_token_mask(tensor(case.inputs["mask"]).bool(), tensor(case.inputs["env_mask"]).bool())}


def entropy_bonus_output(case: Case) -> dict[str, Any]:
    logits = tensor(case.inputs["logits"]).requires_grad_()
    mask_NT = tensor(case.inputs["mask"]).bool()
    entropy_NT = entropy_of(logits)
    loss = entropy_bonus(entropy_NT, mask_NT, case.params["coef"], int(mask_NT.sum()))
    loss.backward()
    return {"entropy": entropy_NT, "loss": loss, "grad_logits": logits.grad}


def entropy_control_output(case: Case) -> dict[str, Any]:
    control, path = EntropyControl(case.params["init"], active=False), []
    for entropy in case.inputs["entropies"]:
        control = update_entropy_control(control, entropy=entropy, **case.options("target", "step", "low", "high"))
        path.append(control)
    return {"coef": [state.coef for state in path], "applied": [state.applied for state in path]}


def token_log_prob_output(case: Case) -> dict[str, Any]:
    token_ids = torch.tensor(case.inputs["token_ids"])
    return {"log_probs": token_log_probs(tensor(case.inputs["logits"]), token_ids, case.params["temperature"])}


def groups_output(case: Case) -> dict[str, Any]:
    metrics = group_metrics(scores(case.inputs["rewards"], case.inputs["groups"]))
    return {name: value(average) for name, average in metrics.items()}


def off_policy_output(case: Case) -> dict[str, Any]:
    mask_NT = tensor(case.inputs["mask"]).bool()
    metrics = off_policy(tensor(case.inputs["log_probs"]), tensor(case.inputs["behaviour_log_probs"]), mask_NT)
    return {name: value(average) for name, average in metrics.items()}


def ess_output(case: Case) -> dict[str, Any]:
    assert case.params["weights"] == "raw"
    mask_NT = tensor(case.inputs["mask"]).bool()
    gap_NT = tensor(case.inputs["log_probs"]) - tensor(case.inputs["behaviour_log_probs"])
    if case.params["level"] == "token":
        terms = ess_terms(gap_NT, mask_NT)
    else:
        terms = ess_terms(torch.where(mask_NT, gap_NT, 0.0).sum(1), mask_NT.any(1))
    return dict(zip(("ess", "ess_fraction"), effective_sample_size(terms), strict=True))


def clip_output(case: Case) -> dict[str, Any]:
    ratio_NT = (tensor(case.inputs["log_probs"]) - tensor(case.inputs["old_log_probs"])).exp()
    advantages_NT = tensor(case.inputs["advantages"])[:, None].expand_as(ratio_NT)
    mask_NT = tensor(case.inputs["mask"]).bool()
    metrics = clip_fractions(ratio_NT, advantages_NT, mask_NT, **case.options("eps_low", "eps_high"))
    return {name: value(average) for name, average in metrics.items()}
