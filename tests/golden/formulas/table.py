"""The formula behind each document of golden values, by the document's name."""

from collections.abc import Callable

from . import advantages, distributions, documents, kl, metrics, off_policy, policy_loss, reductions, shaping, subsets
from . import teacher as of_teacher
from . import turns as of_turns
from .advantages import Inputs
from .exact import Expected, Params, exact, rounded
from .token_level import optimal_token_baseline, reinforce_plus_plus, remax

ESTIMATORS = {
    "group_zscore": advantages.group_zscore,
    "group_center": advantages.group_center,
    "leave_one_out": advantages.leave_one_out,
    "group_center_batch_std": advantages.group_center_batch_std,
    "group_center_token_whiten": advantages.group_center_token_whiten,
    "opo": advantages.opo,
    "gpg": advantages.gpg,
    "pairwise": advantages.pairwise,
    "gdpo": advantages.gdpo,
    "maxrl": advantages.maxrl,
    "role_ema": advantages.role_ema,
    "none": advantages.none,
    "reinforce_plus_plus": advantages.reinforce_plus_plus,
    "passk": subsets.passk,
    "pkpo": subsets.pkpo,
    "best_minus_second": subsets.best_minus_second,
}
TOKEN_LEVEL = {
    "optimal_token_baseline": optimal_token_baseline,
    "reinforce_plus_plus": reinforce_plus_plus,
    "remax": remax,
}


def advantage(params: Params, inputs: Inputs) -> Expected:
    """Return the advantages of a case, and what else its estimator is known by."""
    name = params["estimator"]
    if "token_rewards" in inputs or name not in ESTIMATORS:
        return TOKEN_LEVEL[name](params, inputs)
    if "select" in params:
        return subsets.selected(params, inputs)
    values = advantages.clipped(params, ESTIMATORS[name](params, inputs))
    found: Expected = {"advantages": values}
    if "mask" in inputs:
        found["token_advantages"] = [[a * m for m in row] for a, row in zip(values, inputs["mask"], strict=True)]
    if name == "pairwise":
        found["scores"] = advantages.pairwise_scores(params, inputs)
    if name in ("passk", "pkpo") and len(set(inputs["groups"])) == 1:
        by = subsets.passk_by_products(params, inputs)
        found |= by if name == "passk" else {"max_at_k": by["pass_at_k"]}
    return found


def masked_policy(params: Params, inputs: Inputs) -> Expected:
    """Return what a case of the policy that fills in masked positions asks for."""
    if params["quantity"] == "distribution":
        return distributions.fill_distribution(params, inputs)
    if params["quantity"] == "loss":
        return distributions.fill_loss(params, inputs)
    # diffu-GRPO (arXiv 2504.12216): the clipped loss with a KL, on one-step log-probs.
    kl = {"estimator": params["kl"], "coef": params["beta"], "gradient": "naive"}
    found = policy_loss.policy_loss(params | {"loss": "clip", "kl": kl}, inputs)
    return {name: found[name] for name in ("loss", "grad_log_probs")}


FORMULAS: dict[str, Callable[[Params, Inputs], Expected]] = {
    "adv_": advantage,
    "loss_": policy_loss.policy_loss,
    "aggregation_accumulation": reductions.accumulation,
    "aggregation": reductions.aggregation,
    "kl_estimators": kl.estimators,
    "kl_full": kl.full,
    "kl_in_reward": kl.in_reward,
    "kl_controller": kl.controller,
    "reference_update": kl.refreshed,
    "offpolicy_weights": off_policy.weights,
    "offpolicy_rejection": off_policy.rejection,
    "offpolicy_sequence_mask": off_policy.sequence_mask,
    "masks": distributions.masks,
    "masked_policy": masked_policy,
    "metrics_": metrics.diagnostics,
    "reward_length_penalty": shaping.shaping,
    "group_filter": shaping.group_filter,
    "turn_credit": lambda params, inputs: {"advantages": of_turns.credit(params, inputs)},
    "document_formulas": documents.document,
    "teacher": of_teacher.teacher,
}


def expected(document: str, params: Params, inputs: Inputs) -> Expected:
    """Return what a case of a document must give, in float64."""
    formula = next(formula for name, formula in FORMULAS.items() if document.startswith(name))
    return rounded(formula(exact(params), exact(inputs)))
