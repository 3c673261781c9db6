"""From settings to the parts of a run."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from covey.algorithm.settings import AlgorithmConfig
from covey.engine.fake import FakeEngine
from covey.engine.native.engine import NativeEngine
from covey.environments.arithmetic import Arithmetic
from covey.environments.base import Environment, Split
from covey.run.build import Run, build_environment, build_run, training_sampling
from covey.run.build_stream import build_group_filter
from covey.system.waits.timer import PhaseTimer
from covey.types import Failure, Prompt, Reward, Sampling
from tests.support.scripted import Scripted

from ..support.fake_ray import fake_ray
from ..support.small import group, scripted, small_config


def built(environment: Environment | None = None, **changes: Any) -> Run:
    return build_run(small_config(**changes), environment or scripted(), PhaseTimer())


def test_the_environment_is_the_one_that_is_named_with_its_own_settings() -> None:
    config = small_config(environment__levels=[1], environment__num_train=7, environment__num_test=3)
    environment = build_environment(config)
    assert isinstance(environment, Arithmetic)
    assert (len(environment.prompts("train")), len(environment.prompts("test"))) == (7, 3)


def test_the_engine_is_the_one_that_is_named() -> None:
    assert isinstance(built().source.sampler.engine, NativeEngine)
    assert isinstance(built(engine__name="fake").source.sampler.engine, FakeEngine)


def test_a_run_that_is_refused_has_started_no_samplers() -> None:
    with fake_ray() as ray, pytest.raises(ValueError, match="needs module nothing, which cannot be imported"):
        built(source="ray", algorithm__advantage="nothing:at_all")
    assert (ray.started_with, ray.groups) == ({}, [])


def test_rollouts_are_drawn_as_the_settings_say() -> None:
    config = small_config(
        seed=5,
        sampling__temperature=0.7,
        sampling__top_k=4,
        sampling__top_p=0.9,
        sampling__min_p=0.1,
        sampling__stop=["\n"],
    )
    assert training_sampling(config) == Sampling(0.7, 4, 0.9, 0.1, 4, ("\n",), 5)


def test_held_out_prompts_are_spread_over_the_split_and_at_most_all() -> None:
    environment = Scripted({"train": ["a:"], "test": [f"{i}:" for i in range(10)]}, lambda prompt, text: 0.0)
    spread = built(environment, evaluation__num_prompts=4).test_prompts
    assert [prompt.id for prompt in spread] == ["test-0", "test-2", "test-5", "test-7"]
    assert len(built(environment, evaluation__num_prompts=99).test_prompts) == 10


def test_an_environment_without_training_prompts_is_one_line() -> None:
    empty = Scripted({"train": [], "test": ["a:"]}, lambda prompt, text: 0.0)
    with pytest.raises(ValueError, match=r"^environment=arithmetic has no training prompts$"):
        built(empty)


# ------------------------------------------------------------------------------------------------ the reference


@pytest.mark.parametrize(
    ("changes", "wanted"),
    [
        ({}, False),
        ({"algorithm__kl_coef": 0.1}, True),
        ({"algorithm__kl_coef": 0.1, "algorithm__kl_in": "reward"}, True),
        ({"algorithm__kl_coef": 0.1, "algorithm__kl_estimator": "full"}, True),
        ({"algorithm__ratio": "sequence", "algorithm__ratio_denominator": "reference"}, True),
    ],
)
def test_a_reference_is_held_only_where_something_reads_it(changes: dict[str, Any], wanted: bool) -> None:
    assert (built(**changes).trainer.reference is not None) == wanted


def test_the_reference_is_a_frozen_copy_or_the_model_under_the_adapter() -> None:
    run = built(algorithm__kl_coef=0.1)
    assert run.trainer.reference is not None
    assert run.trainer.reference.policy.model is not run.policy.model
    assert not any(p.requires_grad for p in run.trainer.reference.policy.model.parameters())
    adapted = built(algorithm__kl_coef=0.1, model__lora_rank=2)
    assert adapted.trainer.reference is not None
    assert adapted.trainer.reference.policy.model is adapted.policy.model


def test_the_same_seed_builds_the_same_policy_and_leaves_the_global_state() -> None:
    torch.manual_seed(3)
    before = torch.get_rng_state()
    first, second, other = built(), built(), built(seed=1)
    assert torch.equal(torch.get_rng_state(), before)
    weights = [torch.cat([p.flatten() for p in run.policy.model.parameters()]) for run in (first, second, other)]
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])


# ------------------------------------------------------------------------------------------------ filters and weights


def test_a_group_filter_takes_its_options() -> None:
    assert build_group_filter(AlgorithmConfig()) is None
    options = {"low": 0.2, "high": 0.8}
    keep = build_group_filter(AlgorithmConfig(group_filter="mean_bounds", group_filter_options=options))
    assert keep is not None
    assert keep(torch.tensor([0.0, 1.0]))
    assert not keep(torch.tensor([0.0, 0.0, 0.0, 0.0, 0.0, 1.0]))
    with pytest.raises(ValueError, match=r"^algorithm\.group_filter_options must be among low, high for mean_bounds"):
        build_group_filter(AlgorithmConfig(group_filter="mean_bounds", group_filter_options={"lowest": 1}))


@dataclass(frozen=True)
class Weighing:
    """An environment whose reward has parts of different weight."""

    part_weights: Mapping[str, float]

    def prompts(self, split: Split) -> list[Prompt]:
        return [Prompt(f"{split}-0", "weighing", "?", {})]

    async def score(self, prompt: Prompt, completions: Sequence[str]) -> list[Reward | Failure]:
        return [Reward(0.0, {}) for _ in completions]


def test_the_weights_of_parts_reach_the_estimator() -> None:
    groups = [group(1.0, 0.0)]
    up = built(Weighing({"value": 1.0}), algorithm__advantage="gdpo").credit.assign(groups)
    down = built(Weighing({"value": -1.0}), algorithm__advantage="gdpo").credit.assign(groups)
    assert up.advantages[0][0] > 0
    assert down.advantages[0] == pytest.approx([-value for value in up.advantages[0]])
