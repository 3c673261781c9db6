"""Every algorithm preset builds, and says only what differs from the defaults."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf

from covey.algorithm.aggregation import count_totals
from covey.algorithm.build import build_objective
from covey.algorithm.credit.advantages import ADVANTAGES
from covey.algorithm.credit.scores import scores
from covey.algorithm.credit.selection import GROUP_FILTERS
from covey.algorithm.loss_inputs import ObjectiveInputs, clamp_symmetric
from covey.algorithm.settings import AlgorithmConfig
from covey.config.shelves import former, preset_file, presets
from covey.system.lookup import check_options

NAMES = list(presets("algorithm"))


def settings(name: str) -> Any:
    chosen = OmegaConf.load(presets("algorithm")[name])
    assert chosen.pop("defaults") == ["schema_algorithm", "_self_"]
    return chosen


def preset(name: str) -> AlgorithmConfig:
    merged = OmegaConf.merge(OmegaConf.structured(AlgorithmConfig), settings(name))
    return OmegaConf.to_object(merged)  # type: ignore[return-value]


def two_groups() -> tuple[list[float], list[str], ObjectiveInputs]:
    """Two groups of 6, each with two good answers, one of them better."""
    generator = torch.Generator().manual_seed(0)
    old_NT = -torch.rand(12, 4, generator=generator, dtype=torch.float64)
    near_NT = old_NT + 1e-5 * torch.randn(12, 4, generator=generator, dtype=torch.float64)
    rewards = [1.0, 0.5, 0.0, 0.0, 0.1, 0.0, 0.0, 0.2, 0.0, 1.0, 0.0, 0.7]
    inputs = ObjectiveInputs(
        log_probs_NT=near_NT.clone().requires_grad_(True),
        old_log_probs_NT=old_NT,
        sampler_log_probs_NT=old_NT,
        advantages=torch.zeros(12),
        mask_NT=torch.arange(4) < torch.tensor([4, 2, 3] * 4)[:, None],
        ref_log_probs_NT=old_NT,
        entropy_NT=torch.ones_like(old_NT),
        full_kl_NT=torch.zeros_like(old_NT),
    )
    return rewards, ["a"] * 6 + ["b"] * 6, inputs


@pytest.mark.parametrize("name", NAMES)
def test_a_preset_makes_the_best_answers_likelier(name: str) -> None:
    algorithm = preset(name)
    rewards, groups, inputs = two_groups()
    estimator = ADVANTAGES[algorithm.advantage]
    check_options(estimator, algorithm.advantage_options)
    given = scores(rewards, groups, lengths=inputs.mask_NT.sum(1), parts=[[r, r / 2] for r in rewards])
    advantages_N = clamp_symmetric(estimator(given, **algorithm.advantage_options), algorithm.advantage_clip)
    objective = build_objective(algorithm, norm_length=4)
    inputs = replace(inputs, advantages=advantages_N)
    statistics = objective.batch_statistics(inputs, 0) if objective.needs_batch_selection else None
    loss, _ = objective(inputs, count_totals(inputs.mask_NT), algorithm.kl_coef, algorithm.entropy_coef, statistics)
    (gradient_NT,) = torch.autograd.grad(loss, inputs.log_probs_NT)
    push_N = gradient_NT.sum(1)
    assert float(push_N[0]) < 0
    assert float(push_N[9]) < 0
    assert bool((push_N[[2, 3, 5]] >= 0).all())


@pytest.mark.parametrize("name", [name for name in NAMES if name not in former("algorithm").values()])
def test_a_preset_sets_only_what_differs_from_the_defaults(name: str) -> None:
    defaults = OmegaConf.structured(AlgorithmConfig)
    for key, value in settings(name).items():
        assert value != defaults[key], f"{name}: {key} is the default anyway"


def test_the_default_preset_is_the_schema() -> None:
    assert preset("grpo") == AlgorithmConfig()


@pytest.mark.long
def test_group_filters_of_presets_exist() -> None:
    used = {preset(name).group_filter for name in NAMES} - {None}
    assert used == {"zero_std"}
    assert used <= set(GROUP_FILTERS)


def test_every_preset_begins_with_what_it_is() -> None:
    for name in NAMES:
        assert presets("algorithm")[name].read_text().startswith("# "), name


def test_former_names_lead_to_presets() -> None:
    for group in ("algorithm", "recipe"):
        assert former(group)
        assert set(former(group).values()) <= set(presets(group))
        assert [name for name in former(group) if preset_file(group, name) is None] == []


def test_the_modern_names_are_there() -> None:
    expected = (
        "grpo dr_grpo dapo rloo gspo gspo_token cispo sapo gmpo luspo dppo pass_at_k pass_at_k_analytic "
        "best_minus_second gdpo maxrl opo gpg reinforce_plus_plus_baseline vespo topr clip_cov kl_cov decoupled"
    )
    assert set(expected.split()) <= set(NAMES)
