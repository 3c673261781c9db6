"""Build the functions that a preset names, checking names and options."""

import inspect
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from covey.algorithm.aggregation import Reduction
from covey.algorithm.corrections import WeightOptions, parse_rejection
from covey.algorithm.credit.advantages import ADVANTAGES, role_baselines
from covey.algorithm.credit.assign import CreditFunctions
from covey.algorithm.credit.selection import SELECTION
from covey.algorithm.credit.shaping import SHAPING
from covey.algorithm.credit.turns import anchored_fraction, chosen_turn_credit
from covey.algorithm.kl import SAMPLER_ESTIMATORS, KLOptions
from covey.algorithm.loss_inputs import RatioOptions
from covey.algorithm.losses import LOSS_FUNCTIONS, LOSSES, Loss
from covey.algorithm.objective import KLTerms, Objective
from covey.algorithm.settings import AlgorithmConfig
from covey.algorithm.teacher.terms import BASES, FORMS, SUPPORTS, TAILS, TERMS, TeacherTerm, choose_lessons
from covey.system import custom
from covey.system.lookup import check_options, one_of, resolve


def build_credit(algorithm: AlgorithmConfig) -> CreditFunctions:
    """Look up the functions from rewards to advantages. ValueError names the setting."""
    estimate = custom.lookup(custom.ADVANTAGE, algorithm.advantage, ADVANTAGES, algorithm.advantage_options)
    shaping = (custom.lookup(custom.SHAPING, name, SHAPING, options) for name, options in algorithm.shaping.items())
    turn_credit, select = None, None
    if algorithm.turn_credit != "episode":
        turn_credit = chosen_turn_credit(algorithm.turn_credit, algorithm.turn_credit_options)
    if algorithm.selection is not None:
        select = custom.lookup(custom.SELECTION, algorithm.selection, SELECTION, algorithm.selection_options)
    takes_answers = isinstance(estimate, custom.Custom) and estimate.num_inputs == 2
    has_roles = algorithm.advantage == "role_ema"
    return CreditFunctions(
        estimate,
        takes_answers,
        tuple(shaping),
        turn_credit,
        select,
        leaves_out=algorithm.leaves_out,
        length_alpha=algorithm.length_normalizer,
        clip=algorithm.advantage_clip,
        next_baselines=partial(role_baselines, **algorithm.advantage_options) if has_roles else None,
        turn_metrics=anchored_fraction if algorithm.turn_credit == "anchor_state" else None,
    )


def build_objective(algorithm: AlgorithmConfig, norm_length: int) -> Objective:
    """Build the objective of a preset, checking names and options.

    `norm_length` is the constant length of the *_norm aggregations where the preset sets none. ValueError names the
    setting.
    """
    length = norm_length if algorithm.norm_length is None else algorithm.norm_length
    has_bonus = algorithm.entropy_coef != 0 or algorithm.target_entropy is not None
    return Objective(
        loss=_bound_loss(algorithm),
        ratio=RatioOptions(algorithm.ratio, algorithm.log_ratio_clamp),
        denominator=algorithm.ratio_denominator,
        reduction=_reduction(custom.AGGREGATION, algorithm.aggregation, length, algorithm),
        high_entropy_fraction=algorithm.high_entropy_fraction,
        weights=_correction_weights(algorithm),
        criteria=parse_rejection(algorithm.rejection, algorithm.rejection_thresholds),
        sequence_delta=algorithm.off_policy_mask_delta,
        m2po_threshold=algorithm.m2po_threshold,
        kl=_kl_terms(algorithm, length),
        entropy_bonus=Reduction(algorithm.entropy_aggregation, length, algorithm.count_empty) if has_bonus else None,
        teacher=_teacher_term(algorithm),
        reward_weight=algorithm.reward_weight,
        supervised_coef=algorithm.sft_coef,
    )


def _teacher_term(algorithm: AlgorithmConfig) -> TeacherTerm | None:
    """Build the teacher's term, None without one. ValueError for its options."""
    if algorithm.teacher is None:
        return None
    kind, options, where = algorithm.teacher_term, algorithm.teacher_options, "algorithm.teacher_options"
    function = TERMS[kind]
    check_options(function, options, setting=where)
    if options.get("form") == "k1":
        raise ValueError(f"{where}.form must be {', '.join(FORMS)}, got k1: its average gradient is 0")
    for name, table in TEACHER_CHOICES.items():
        if name in options:
            one_of(f"{where}.{name}", options[name], table)
    if not 0 <= options.get("beta", 1) <= 1:
        raise ValueError(f"{where}.beta must be in [0, 1], got {options['beta']}")
    if options.get("log_prob_floor") is not None and options.get("tail") != "none":
        raise ValueError(f"{where}.log_prob_floor needs {where}.tail=none, got {options.get('tail', 'bucket')}")
    if options.get("discount") and options.get("prefix_gamma"):
        raise ValueError(f"{where}.prefix_gamma needs {where}.discount=0, got {options['discount']:g}")
    check_options(choose_lessons, algorithm.teacher_selection, setting="algorithm.teacher_selection")
    is_convex, own_totals = algorithm.teacher_mix == "convex", algorithm.teacher_denominator == "teacher_tokens"
    if is_convex and algorithm.teacher_coef > 1:
        raise ValueError(f"teacher_coef must be <= 1 with teacher_mix=convex, got {algorithm.teacher_coef:g}")
    if own_totals and kind == "advantage" and algorithm.reward_weight > 0:
        raise ValueError(
            f"teacher_denominator=teacher_tokens needs reward_weight=0 with teacher_term=advantage, "
            f"got {algorithm.reward_weight:g}"
        )
    return TeacherTerm(
        kind,
        partial(function, **options),
        algorithm.teacher_coef,
        options.get("base", "current"),
        None if kind == "divergence" else options.get("clip"),
        is_convex,
        own_totals,
        algorithm.teacher_max_ratio,
    )


def _bound_loss(algorithm: AlgorithmConfig) -> Loss:
    name = algorithm.loss
    # A custom loss may read a ratio of any level; what else is known of it is what its signature says.
    chosen = LOSSES.get(name) or Loss(resolve(name, {}), any_ratio_level=True, proportional=False)
    if algorithm.ratio != "token" and not chosen.any_ratio_level:
        known = " or ".join(name for name, loss in LOSSES.items() if loss.any_ratio_level)
        raise ValueError(f"ratio={algorithm.ratio} needs loss={known}, got loss={name}")
    loss_options, selector_options = _split_options(dict(algorithm.loss_options), chosen)
    return replace(
        chosen,
        function=custom.lookup(custom.LOSS, name, LOSS_FUNCTIONS, loss_options),
        events=None if chosen.events is None else partial(chosen.events, **loss_options),
        selector=None if chosen.selector is None else partial(chosen.selector, **selector_options),
    )


def _split_options(options: dict[str, Any], loss: Loss) -> tuple[dict[str, Any], dict[str, Any]]:
    """Split options into the loss's and its selector's, refusing unknown ones."""
    known = set() if loss.selector is None else {p.name for p in _keywords(loss.selector)}
    own = {p.name for p in _keywords(loss.function)}
    loss_options = {key: value for key, value in options.items() if key in own or key not in known}
    check_options(loss.function, loss_options, setting="loss_options")
    return loss_options, {key: value for key, value in options.items() if key in known}


def _keywords(function: Callable[..., Any]) -> list[inspect.Parameter]:
    return [p for p in inspect.signature(function).parameters.values() if p.kind is p.KEYWORD_ONLY]


def _correction_weights(algorithm: AlgorithmConfig) -> WeightOptions | None:
    if algorithm.correction == "none":
        return None
    if algorithm.ratio_denominator == "behaviour":
        raise ValueError(f"correction={algorithm.correction} needs ratio_denominator=old, got behaviour")
    return WeightOptions(
        level=algorithm.correction_level,
        mode=algorithm.correction,
        min=algorithm.correction_min,
        max=algorithm.correction_max,
        self_normalize=algorithm.correction_self_normalize,
        log_ratio_clamp=algorithm.log_ratio_clamp,
    )


def _kl_terms(algorithm: AlgorithmConfig, norm_length: int) -> KLTerms:
    full = algorithm.kl_estimator == "full"
    if full and algorithm.kl_gradient == "is_weighted":
        raise ValueError("kl_gradient=is_weighted needs a sampled kl_estimator such as k3, got kl_estimator=full")
    if algorithm.kl_in == "reward" and algorithm.kl_aggregation is not None and algorithm.sampler_kl_coef == 0:
        raise ValueError(f"kl_aggregation={algorithm.kl_aggregation} needs kl_in=loss, got kl_in=reward")
    role = custom.AGGREGATION if algorithm.kl_aggregation is None else custom.KL_AGGREGATION
    mode = algorithm.kl_aggregation or algorithm.aggregation
    return KLTerms(
        active=algorithm.kl_coef != 0 or algorithm.target_kl is not None,
        in_loss=algorithm.kl_in == "loss",
        full=full,
        options=KLOptions(
            estimator="k3" if full else algorithm.kl_estimator,
            gradient=algorithm.kl_gradient,
            clamp_log_ratio=algorithm.kl_clamp,
            custom=_own(custom.KL_ESTIMATOR, algorithm.kl_estimator),
        ),
        sampler_coef=algorithm.sampler_kl_coef,
        sampler_options=KLOptions(SAMPLER_ESTIMATORS[algorithm.sampler_kl_estimator], "naive", algorithm.kl_clamp),
        reduction=_reduction(role, mode, norm_length, algorithm),
    )


def _reduction(role: custom.FunctionRole, mode: str, norm_length: int, algorithm: AlgorithmConfig) -> Reduction:
    return Reduction(mode, norm_length, algorithm.count_empty, _own(role, mode))


def _own(role: custom.FunctionRole, name: str) -> Callable[..., Any] | None:
    return custom.lookup(role, name, {}) if ":" in name else None


TEACHER_CHOICES: Mapping[str, Collection[str]] = {"base": BASES, "form": FORMS, "support": SUPPORTS, "tail": TAILS}
"""Options of a teacher's term that are words."""
