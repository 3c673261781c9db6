"""Every golden advantage of a rollout: estimators, the pass@k family and selection."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from covey.algorithm.credit.advantages import ADVANTAGES, Scores, scores
from covey.algorithm.credit.advantages import pairwise_scores as outcome_scores
from covey.algorithm.credit.passk import expected_best, subset_weights
from covey.algorithm.credit.selection import SELECTION
from covey.algorithm.loss_inputs import clamp_symmetric

from .cases import Case, check_all, golden, tensor

OPTIONS = {
    "group_zscore": ("ddof", "eps", "eps_mode", "singleton"),
    "group_center": ("singleton",),
    "leave_one_out": ("singleton", "post_normalize", "ddof", "eps"),
    "group_center_batch_std": ("std_of", "ddof", "eps", "eps_mode", "recenter"),
    "group_center_token_whiten": ("ddof", "eps", "eps_mode"),
    "opo": ("singleton",),
    "gpg": ("alpha", "f_norm", "singleton"),
    # "std" only says how the peer computed the same number: for rewards 0 and 1 both forms are equal.
    "passk": ("k", "eps"),
    "pkpo": ("k", "variant", "scale", "loo_scale"),
    "best_minus_second": ("scale", "ddof", "eps"),
    "pairwise": ("form", "temperature", "post", "ddof", "eps"),
    "gdpo": ("ddof", "eps", "eps_mode", "post"),
    "maxrl": (),
    "role_ema": ("decay",),
    "none": (),
    "reinforce_plus_plus": ("ddof", "eps"),
}
SELECTION_OPTIONS = ("k", "m", "baseline_over", "rank_by", "group_size", "low", "high")
HANDLED_ELSEWHERE = {"advantage_clip", "select", "weights", "std", "estimator", *SELECTION_OPTIONS}


@golden("adv_*")
def test_advantages_are_the_golden_ones(case: Case) -> None:
    estimator = case.params["estimator"]
    unknown = set(case.params) - set(OPTIONS[estimator]) - HANDLED_ELSEWHERE
    assert not unknown, f"{case.id}: parameters {unknown} reach no function"
    given = scores_of(case)
    outputs = selected(case, given) if "select" in case.params else {"advantages": estimate(case, given)}
    if "token_advantages" in case.expected:
        outputs["token_advantages"] = outputs["advantages"][:, None] * tensor(case.inputs["mask"])
    check_all(outputs | by_products(case, given), case)


def scores_of(case: Case) -> Scores:
    inputs = case.inputs
    preferences = tensor(inputs.get("preferences", []))
    rewards = tensor(inputs["rewards"]) if "rewards" in inputs else tensor([0.0] * len(preferences))
    parts, weights = None, None
    if rewards.ndim == 2:
        parts, weights = rewards, tensor(case.params["weights"])
        # A part that does not apply is NaN and adds nothing; a rollout without any part is not scored.
        rewards = torch.where(parts.isnan().all(1), torch.nan, (parts * weights).nansum(1))
    lengths = tensor(inputs["mask"]).sum(1) if "mask" in inputs else inputs.get("lengths")
    groups = inputs.get("groups", [0] * len(rewards))
    made = scores(rewards, groups, lengths=lengths, parts=parts, weights=weights, roles=inputs.get("roles", ()))
    return replace(made, preferences_NN=preferences)


def estimate(case: Case, given: Scores) -> Tensor:
    name = case.params["estimator"]
    advantages_N = ADVANTAGES[name](given, **case.options(*OPTIONS[name]))
    return clamp_symmetric(advantages_N, case.params.get("advantage_clip"))


def selected(case: Case, given: Scores) -> dict[str, Any]:
    select = SELECTION[case.params["select"]]
    chosen = select(given, lambda scored: estimate(case, scored), **case.options(*SELECTION_OPTIONS))
    kept = given.rewards_N[chosen.keep_N]
    return {
        "advantages": chosen.advantages_N,
        "keep": chosen.keep_N.double(),
        "variance": kept.var(correction=0),
    }


def by_products(case: Case, given: Scores) -> dict[str, Any]:
    """What some cases expect besides the advantages, for their one group."""
    ascending_M = given.rewards_N.sort().values
    outputs: dict[str, Any] = {}
    if "scores" in case.expected:
        outputs["scores"] = outcome_scores(given, **case.options("form", "temperature"))
    if "max_at_k" in case.expected:
        outputs["max_at_k"] = expected_best(ascending_M, case.params["k"])
    if "pass_at_k" in case.expected:
        mean = expected_best(ascending_M, case.params["k"])
        weights_M = subset_weights(len(ascending_M), case.params["k"], ascending_M)
        outputs["pass_at_k"] = mean
        outputs["subset_std"] = (weights_M @ (ascending_M - mean) ** 2).sqrt()
    return outputs
