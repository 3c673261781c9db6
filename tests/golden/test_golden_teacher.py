"""Every golden case of a teacher: its terms, their gradients, who teaches whom, and the supervised term."""

from typing import Any

import torch
from torch import Tensor

from covey.algorithm.aggregation import StepCounts
from covey.algorithm.build import build_objective
from covey.algorithm.kl import refresh
from covey.algorithm.loss_inputs import ObjectiveInputs
from covey.algorithm.settings import AlgorithmConfig
from covey.algorithm.teacher.terms import (
    FORMS,
    Taught,
    choose_lessons,
    divergence,
    mixed_logits,
    sampled_loss,
    stale_weight,
)

from .cases import Case, check, check_all, golden, tensor

LOSSES = {"ratio": ("clip", {"eps_low": 1e9, "eps_high": 1e9}), "reinforce": ("reinforce", {})}
"""A ratio without a clip is a clip that nothing reaches."""


def term(name: str) -> Any:
    return golden("teacher", where=lambda case: case.params["term"] == name)


def algorithm(case: Case) -> AlgorithmConfig:
    """Return the settings of a case."""
    p = case.params
    kind = "sampled" if p["term"] == "mix" else p["term"]
    names = {"advantage": ("base", "discount", "clip"), "sampled": ("form", "clip")}
    options = case.options(*names.get(kind, ("beta", "top_k", "support", "tail", "log_prob_floor", "clip")))
    if "prefix_weight" in p:
        options["prefix_gamma"] = p["prefix_weight"]["gamma"]
    loss, of_loss = LOSSES.get(p.get("loss"), ("clip", case.options("eps_low", "eps_high")))
    if "drop_below" in p:
        loss, of_loss = "ipo_mask", {"div": p["drop_below"], "kl_tau": p["drift_coef"], "falls_only": True}
    correction = {}
    if "behaviour_weight" in p:
        given = p["behaviour_weight"]
        correction = {"correction": given["mode"], "correction_min": given["min"], "correction_max": given["max"]}
    return AlgorithmConfig(
        teacher="self",
        teacher_term=kind,
        teacher_options=options,
        teacher_coef=p.get("coef", 1.0),
        teacher_mix=p.get("mix", "sum"),
        teacher_max_ratio=p.get("stale_weight", {}).get("max"),
        teacher_denominator=p.get("denominator", "all_tokens"),
        reward_weight=p.get("reward_weight", 1.0) if "advantages" in case.inputs else 0.0,
        loss=loss,
        loss_options=of_loss,
        ratio_denominator=p.get("ratio_denominator", "old"),
        aggregation=p["aggregation"],
        count_empty=p.get("count_empty", False),
        **correction,
    )


def counts(mask_NT: Tensor, taught_NT: Tensor) -> StepCounts:
    def of(mask: Tensor) -> tuple[int, int]:
        return int(mask.sum()), int(mask.any(1).sum())

    return StepCounts(*of(mask_NT), len(mask_NT), of(taught_NT))


def inputs_of(case: Case, log_probs_NT: Tensor, mask_NT: Tensor, **others: Tensor) -> ObjectiveInputs:
    def given(name: str, default: Tensor) -> Tensor:
        return tensor(case.inputs[name]) if name in case.inputs else default

    zeros_N = torch.zeros(len(mask_NT), dtype=torch.float64)
    speaks_N = given("teacher_mask", zeros_N + 1) > 0
    return ObjectiveInputs(
        log_probs_NT=log_probs_NT,
        old_log_probs_NT=given("old_log_probs", log_probs_NT.detach()),
        sampler_log_probs_NT=given("behaviour_log_probs", log_probs_NT.detach()),
        advantages=given("advantages", zeros_N),
        mask_NT=mask_NT,
        teacher_mask_NT=speaks_N[:, None].expand_as(mask_NT),
        position_NT=given("positions", zeros_N).long() if "positions" in case.inputs else None,
        **others,
    )


@golden("teacher", where=lambda case: case.params["term"] in ("advantage", "sampled", "mix"))
def test_a_teacher_of_sampled_tokens_gives_the_golden_loss_and_gradient(case: Case) -> None:
    log_probs_NT, mask_NT = tensor(case.inputs["log_probs"]).requires_grad_(True), tensor(case.inputs["mask"]) > 0
    inputs = inputs_of(case, log_probs_NT, mask_NT, teacher_log_probs_NT=tensor(case.inputs["teacher_log_probs"]))
    objective = build_objective(algorithm(case), norm_length=1)
    loss, sums = objective(inputs, counts(mask_NT, mask_NT & inputs.teacher_mask_NT))
    (gradient_NT,) = torch.autograd.grad(loss, log_probs_NT)
    numerator, denominator = sums["teacher/kl"]
    got = {
        "loss": loss,
        "grad_log_probs": gradient_NT,
        "teacher_kl": numerator / denominator.clamp(min=1),
        "token_advantages": objective._ready(inputs).advantages,
    }
    if case.params["term"] == "mix":
        weight = 1 - case.params["coef"] if case.params["mix"] == "convex" else 1.0
        got["policy_loss"] = sums["policy_loss"].numerator / weight
        got["teacher_loss"] = sums["teacher_loss"].numerator / case.params["coef"]
    check_all(got, case)


@term("divergence")
def test_a_divergence_over_the_vocabulary_has_the_golden_value_and_gradient(case: Case) -> None:
    logits_NTV, mask_NT = tensor(case.inputs["logits"]).requires_grad_(True), tensor(case.inputs["mask"]) > 0
    tau = case.params["temperature"]
    tempered = logits_NTV / tau, tensor(case.inputs["teacher_logits"]) / case.params.get("teacher_temperature", tau)
    objective = build_objective(algorithm(case), norm_length=1)
    assert objective.teacher is not None
    divergence_NT = objective.teacher.function(*(one.flatten(0, 1) for one in tempered)).view(mask_NT.shape)
    ids_NT1 = tensor(case.inputs.get("token_ids", torch.zeros(mask_NT.shape).tolist()), torch.int64)[..., None]
    log_probs_NT = tempered[0].log_softmax(-1).gather(-1, ids_NT1)[..., 0]
    others = {"divergence_NT": divergence_NT, "teacher_log_probs_NT": torch.zeros_like(divergence_NT)}
    inputs = inputs_of(case, log_probs_NT, mask_NT, **others)
    speaks_NT = mask_NT & inputs.teacher_mask_NT
    loss, _ = objective(inputs, counts(mask_NT, speaks_NT))
    (gradient_NTV,) = torch.autograd.grad(loss, logits_NTV)
    shown_NT = torch.where(speaks_NT, divergence_NT, 0.0)
    check_all({"divergence": shown_NT, "loss": loss, "grad_logits": gradient_NTV}, case)


@term("sft")
def test_the_supervised_term_is_golden_over_its_own_tokens(case: Case) -> None:
    log_probs_NT, mask_NT = tensor(case.inputs["log_probs"]).requires_grad_(True), tensor(case.inputs["mask"]) > 0
    learnt_NT = mask_NT & (mask_NT.cumsum(1) > case.params.get("skip_first", 0))
    settings = AlgorithmConfig(sft_coef=case.params["coef"], aggregation=case.params["aggregation"])
    nothing_NT = torch.zeros_like(mask_NT)
    inputs = inputs_of(case, log_probs_NT, nothing_NT, supervised_NT=learnt_NT)
    supervised = int(learnt_NT.sum()), int(learnt_NT.any(1).sum())
    loss, _ = build_objective(settings, 1)(inputs, StepCounts(0, 0, len(mask_NT), supervised=supervised))
    (gradient_NT,) = torch.autograd.grad(loss, log_probs_NT)
    check_all({"loss": loss, "grad_log_probs": gradient_NT}, case)


@term("selection")
def test_solved_siblings_and_feedback_are_chosen_as_in_the_golden_cases(case: Case) -> None:
    rewards, groups = case.inputs["rewards"], case.inputs["groups"]
    feedback = (
        case.inputs.get("feedback", [False] * len(rewards)) if case.params["feedback"] else [False] * len(rewards)
    )
    options = case.options("threshold", "exclude_self", "feedback_only_without_solution")
    got: dict[str, list[Any]] = {name: [-1] * len(rewards) for name in ("demonstration", "feedback_used")}
    for group in dict.fromkeys(groups):
        members = [place for place, own in enumerate(groups) if own == group]
        lessons = choose_lessons([rewards[m] for m in members], [bool(feedback[m]) for m in members], **options)
        for member, shown, used in zip(members, lessons.demonstrations, lessons.feedback_used, strict=True):
            got["demonstration"][member] = -1 if shown is None else members[shown]
            got["feedback_used"][member] = float(used)
    pairs = zip(got["demonstration"], got["feedback_used"], strict=True)
    got["teacher_mask"] = [float(shown >= 0 or used > 0) for shown, used in pairs]
    check_all(got, case)


@term("follow")
def test_a_teacher_follows_the_policy_as_in_the_golden_cases(case: Case) -> None:
    rate = case.params["rate"]
    if case.params["follow"] == "ema":
        check(refresh(tensor(case.inputs["teacher"]), tensor(case.inputs["policy"]), rate), case, "teacher")
        return
    logits_LV = mixed_logits(tensor(case.inputs["base_logits"]), tensor(case.inputs["logits"]), rate)
    check_all({"teacher_logits": logits_LV, "teacher_log_probs": logits_LV.log_softmax(-1)}, case)


@term("expectations")
def test_average_gradients_are_of_the_golden_divergences(case: Case) -> None:
    logits_V = tensor(case.inputs["logits"]).requires_grad_(True)
    teacher_V = tensor(case.inputs["teacher_logits"])
    log_p_V, log_q_V = logits_V.log_softmax(-1), teacher_V.log_softmax(-1)
    held_V = log_p_V.detach()
    taught = Taught(log_p_V[None], held_V[None], held_V[None], log_q_V[None], torch.ones(1, len(held_V)) > 0)

    def gradient(of: Tensor) -> Tensor:
        return torch.autograd.grad(of, logits_V, retain_graph=True)[0]

    def average(values_V: Tensor) -> Tensor:
        return gradient((held_V.exp() * values_V).sum())

    pair = logits_V[None], teacher_V[None]
    values = {beta: divergence(*pair, beta=beta, top_k=None)[0] for beta in (0.0, 1.0)}
    assert bool((stale_weight(taught, 2.0) == 1).all())
    assert "k1" not in FORMS
    check_all(
        {
            "reverse_kl": values[1.0],
            "forward_kl": values[0.0],
            "grad_advantage": average(sampled_loss(taught)[0]),
            "grad_k1": average(log_p_V - log_q_V),
            "grad_k2": average(sampled_loss(taught, form="k2")[0]),
            "grad_k3": average(sampled_loss(taught, form="k3")[0]),
            "grad_reverse_kl": gradient(values[1.0]),
            "grad_forward_kl": gradient(values[0.0]),
        },
        case,
    )
