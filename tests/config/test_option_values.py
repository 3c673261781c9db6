"""Values of the options of an algorithm's functions: what a function would refuse at a step is refused before a run."""

import importlib
from collections.abc import Collection
from typing import Any

import pytest

from covey.algorithm.controllers import CONTROLLERS
from covey.algorithm.kl import GRADIENTS, SAMPLER_ESTIMATORS
from covey.algorithm.loss_inputs import LEVELS
from covey.algorithm.objective import DENOMINATORS
from covey.config.auto_adjust import add_correction
from covey.config.checks import walk
from covey.config.schema import Config
from covey.config.validate import validate

from ..support.small import small_config

ADVANTAGE, LOSS, SELECTION = "algorithm.advantage_options", "algorithm.loss_options", "algorithm.selection_options"
REFUSED: list[tuple[dict[str, Any], str]] = [
    # A word that is none of an option's
    ({"advantage_options": {"eps_mode": "flor"}}, f"{ADVANTAGE} of group_zscore: eps_mode must be one of add, floor"),
    ({"advantage": "gpg", "advantage_options": {"f_norm": "std"}}, f"{ADVANTAGE} of gpg: f_norm must be one of"),
    ({"advantage": "pairwise", "advantage_options": {"form": "matrix"}}, f"{ADVANTAGE} of pairwise: form=matrix needs"),
    (
        {"selection": "top_k", "selection_options": {"k": 2, "rank_by": "size"}},
        f"{SELECTION} of top_k: rank_by must be",
    ),
    # Numbers that contradict each other
    (
        {"shaping": {"soft_overlong": {"max_len": 10, "cache": 20}}},
        r"algorithm.shaping.soft_overlong: cache must be in \[1",
    ),
    (
        {"group_filter": "mean_bounds", "group_filter_options": {"low": 2.0}},
        "algorithm.group_filter_options of mean_bounds: low must be < high=1.0, got 2.0",
    ),
    ({"loss": "cispo", "loss_options": {"ratio_min": 6.0}}, f"{LOSS} of cispo: ratio_max must be >= ratio_min=6.0"),
    ({"loss": "topr", "loss_options": {"pos": [1.0]}}, f"{LOSS}.pos must be two numbers, the smaller one first"),
    ({"loss": "topr", "loss_options": {"neg": [1.0, 0.5]}}, f"{LOSS}.neg must be two numbers, the smaller one first"),
    ({"advantage": "gdpo", "kl_coef": 0.1, "kl_in": "reward"}, "algorithm.kl_in=reward needs an advantage of the"),
    # Numbers out of range
    ({"advantage_options": {"ddof": 3}}, f"{ADVANTAGE}.ddof must be <= 1, got 3"),
    ({"advantage_options": {"eps": -1e-6}}, f"{ADVANTAGE}.eps must be >= 0"),
    ({"loss_options": {"eps_high": -0.28}}, f"{LOSS}.eps_high must be >= 0"),
    ({"loss_options": {"dual_clip": 0.2}}, f"{LOSS}.dual_clip must be > 1"),
    ({"loss": "clip_cov", "loss_options": {"cov_ratio": 0}}, f"{LOSS}.cov_ratio must be > 0"),
    ({"selection": "top_k", "selection_options": {"k": 0}}, f"{SELECTION}.k must be >= 1, got 0"),
    # Values of another type
    ({"loss_options": {"eps_low": "0,2"}}, f"{LOSS}.eps_low must be a number, got '0,2'"),
    ({"loss_options": {"eps_low": None}}, f"{LOSS}.eps_low must be a number, got None"),
    ({"advantage": "passk", "advantage_options": {"k": 2.5}}, f"{ADVANTAGE}.k must be an integer, got 2.5"),
    ({"advantage": "pkpo", "advantage_options": {"k": "two"}}, f"{ADVANTAGE}.k must be an integer, got 'two'"),
    # Too few completions that are kept and compared: every advantage would be 0
    (
        {"advantage": "pkpo", "advantage_options": {"k": 4, "variant": "loo"}},
        f"{ADVANTAGE}.k=4 needs group_size >= 5 for pkpo, got group_size=4",
    ),
    (
        {
            "advantage": "passk",
            "advantage_options": {"k": 2},
            "selection": "max_variance",
            "selection_options": {"m": 2},
        },
        f"{ADVANTAGE}.k=2 needs group_size >= 3 for passk, got 2 that algorithm.selection keeps and compares",
    ),
    (
        {"selection": "top_k", "selection_options": {"k": 1, "baseline_over": "selected"}},
        "algorithm.advantage=group_zscore needs 2 completions to compare, got 1 that algorithm.selection keeps",
    ),
    # Weights of 0 or less, which train nothing
    ({"correction": "truncate", "correction_max": -1.0}, "algorithm.correction_max must be > 0, got -1.0"),
    ({"correction": "mask", "correction_max": 0.0}, "algorithm.correction_max must be > 0, got 0.0"),
    ({"correction": "truncate", "correction_min": -0.5}, "algorithm.correction_min must be >= 0, got -0.5"),
]


@pytest.mark.parametrize(("changes", "line"), REFUSED, ids=[line.split(" must")[0] for _, line in REFUSED])
def test_a_value_that_a_function_cannot_take_is_refused_before_the_run(changes: dict[str, Any], line: str) -> None:
    config, _ = add_correction(small_config(**{f"algorithm__{name}": value for name, value in changes.items()}))
    with pytest.raises(ValueError, match=f"^{line}") as found:
        validate(config)
    assert "\n" not in str(found.value)


TAKEN: list[dict[str, Any]] = [
    {"advantage_options": {"ddof": 0, "eps": 0.0, "eps_mode": "floor", "singleton": "error"}},
    {"advantage": "gpg", "advantage_options": {"f_norm": "group_std"}},
    {"advantage": "gpg", "advantage_options": {"f_norm": 2}},
    {"advantage": "gdpo", "advantage_options": {"post": "token_whiten"}},
    {"loss_options": {"eps_low": 0, "dual_clip": 3, "two_sided_delta": None}},
    {"loss": "topr", "loss_options": {"pos": [0.5, 1], "neg": [0, 0]}},
    {"loss": "dppo_tv", "loss_options": {"ratio_cap": None}},
    {"selection": "balanced_subset", "selection_options": {"group_size": 2}},
    {"selection": "top_k", "selection_options": {"k": 1}},
    {"loss": "nll", "selection": "top_k", "selection_options": {"k": 1, "baseline_over": "selected"}},
    {
        "advantage_options": {"singleton": "raw"},
        "selection": "top_k",
        "selection_options": {"k": 1, "baseline_over": "selected"},
    },
    {"advantage": "none", "selection": "top_k", "selection_options": {"k": 1, "baseline_over": "selected"}},
]


@pytest.mark.parametrize("changes", TAKEN, ids=str)
def test_values_at_the_edge_of_a_range_are_taken(changes: dict[str, Any]) -> None:
    validate(small_config(**{f"algorithm__{name}": value for name, value in changes.items()}))


def test_the_names_that_are_choices_are_those_of_the_tables() -> None:
    found = {one.name: one.bounds for one in walk(Config())}
    tables = {name: bounds.table for name, bounds in found.items() if bounds.table}
    assert len(tables) == 8
    for name, table in tables.items():
        module, _, attribute = table.partition(":")
        keys = tuple(vars(importlib.import_module(module))[attribute])
        assert found[name].names() == (*found[name].choices, *keys)
    inner: dict[str, Collection[str]] = {
        **{"ratio": LEVELS, "ratio_denominator": DENOMINATORS, "kl_controller": CONTROLLERS},
        **{"kl_gradient": (*GRADIENTS, "is_weighted"), "sampler_kl_estimator": SAMPLER_ESTIMATORS},
        "correction_level": [level for level in LEVELS if level != "sequence_mean_token"],
    }
    for name, names in inner.items():
        assert found[f"algorithm.{name}"].choices == tuple(names)
