"""Golden values of masks, entropies and metrics, from the functions that a run calls."""

from typing import Any

import torch
from torch import Tensor, nn

from covey.algorithm.aggregation import Reduction, aggregate, count_totals
from covey.algorithm.controllers import EntropyControl, update_entropy_control
from covey.algorithm.credit.scores import scores
from covey.algorithm.intervals import pass_at_k
from covey.algorithm.loss_inputs import loss_inputs
from covey.algorithm.losses import clip_events
from covey.algorithm.metrics import group_metrics, mean_over, off_policy, summarise, value, weight_sums
from covey.algorithm.token_selection import high_entropy_mask, high_entropy_threshold
from covey.policy.head import Head, score_rows

from .cases import Case, check, check_all, golden, tensor


@golden("masks")
def test_masks_and_entropies_are_the_golden_ones(case: Case) -> None:
    computed = {
        "high_entropy": high_entropy_output,
        "entropy_bonus": entropy_bonus_output,
        "entropy_control": entropy_control_output,
        # A policy's own logits are finite: an impossible token is one far below the others.
        "entropy": lambda case: {"entropy": entropies(tensor(case.inputs["logits"]).clamp(min=-1e4))},
        "token_log_prob": token_log_prob_output,
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
    }
    got = computed[case.params.get("metric") or case.params["metrics"]](case)
    if case.params.get("metrics") in ("ess", "clip"):
        # The sample size itself, and the tokens out of range whatever their sign, are not logged.
        for name in set(case.expected) - {"ess", "out_of_range_fraction"}:
            check(got[name], case, name)
        return
    check_all(got, case)


def score(logits: Tensor, token_ids: Tensor, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
    """Return log-probs and entropies (...) of logits (..., V): a head whose weight is the identity leaves them."""
    size = logits.shape[-1]
    layer = nn.Linear(size, size, bias=False, dtype=logits.dtype)
    layer.weight = nn.Parameter(torch.eye(size, dtype=logits.dtype), requires_grad=False)
    head = Head(layer, logits.dtype, temperature, token_ids.numel(), entropy_gradient=True)
    found = score_rows(head, logits.reshape(-1, size), token_ids.reshape(-1))
    return found[0].view(token_ids.shape), found[1].view(token_ids.shape)


def entropies(logits: Tensor) -> Tensor:
    return score(logits, torch.zeros(logits.shape[:-1], dtype=torch.int64))[1]


def high_entropy_output(case: Case) -> dict[str, Any]:
    entropy_NT, mask_NT = tensor(case.inputs["entropies"]), tensor(case.inputs["mask"]).bool()
    threshold = high_entropy_threshold(entropy_NT[mask_NT], case.params["keep_fraction"])
    return {"mask": high_entropy_mask(entropy_NT, mask_NT, threshold)}


def entropy_bonus_output(case: Case) -> dict[str, Any]:
    logits = tensor(case.inputs["logits"]).requires_grad_()
    mask_NT = tensor(case.inputs["mask"]).bool()
    entropy_NT = entropies(logits)
    loss = -case.params["coef"] * aggregate(entropy_NT, mask_NT, count_totals(mask_NT), Reduction("token_mean"))
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
    return {"log_probs": score(tensor(case.inputs["logits"]), token_ids, case.params["temperature"])[0]}


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
    sums = weight_sums(tensor(case.inputs["log_probs"]), tensor(case.inputs["behaviour_log_probs"]), mask_NT)
    return {"ess_fraction": summarise(sums).get("ess_fraction", 0.0)}


def clip_output(case: Case) -> dict[str, Any]:
    log_probs_NT, old_NT = tensor(case.inputs["log_probs"]), tensor(case.inputs["old_log_probs"])
    mask_NT = tensor(case.inputs["mask"]).bool()
    inputs = loss_inputs(log_probs_NT, old_NT, tensor(case.inputs["advantages"]), mask_NT)
    events = clip_events(inputs, **case.options("eps_low", "eps_high"))
    return {name: value(mean_over(event_NT.double(), mask_NT)) for name, event_NT in events.items()}
