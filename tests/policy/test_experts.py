"""Mixtures of experts: the balancing loss, the same for every layout, and the load of experts."""

import copy
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from benchmarks.checks.architecture_configs import tiny_config
from covey.algorithm.settings import AlgorithmConfig
from covey.policy.experts import ExpertWatch, find_routers
from covey.policy.models.loading import load_policy
from covey.policy.models.probe import tell
from covey.policy.policy import Policy
from covey.policy.settings import ModelConfig
from covey.types import Batch, Rollout

from ..support.builders import (
    ADVANTAGES,
    gradient,
    make,
    make_trainer,
    nano,
    random_groups,
    relative_error,
    save_random,
)

COEF = 0.5
BALANCED = AlgorithmConfig(loss="reinforce", router_aux_loss_coef=COEF)


def mixture(name: str, folder: Path, precision: str = "float64", **settings: object) -> Policy:
    from transformers import AutoModelForCausalLM

    save_random(folder, AutoModelForCausalLM, tiny_config(name), seed=1)
    return load_policy(ModelConfig(name=str(folder), precision=precision, device="cpu", **settings))  # type: ignore[arg-type]


class Wide(TorchFunctionMode):
    """Makes float64 of what modelling files compute in float32 for any model: norms, and probabilities of routers."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        def widened(value: Any) -> Any:
            return torch.float64 if value is torch.float32 else value

        named = {name: widened(value) for name, value in (kwargs or {}).items()}
        return (Tensor.double if func is Tensor.float else func)(*map(widened, args), **named)


def batch_of(policy: Policy, packing: str = "padded", budget: int = 10_000) -> Batch:
    return make(random_groups(vocabulary=250), packing, budget, ADVANTAGES, attention=policy.attention)


def step_of(
    policy: Policy, batch: Batch, algorithm: AlgorithmConfig = BALANCED, *, wide: bool = True
) -> tuple[Tensor, dict[str, float]]:
    trainer = make_trainer(policy, algorithm)
    before = copy.deepcopy(policy.model.state_dict())
    with Wide() if wide and policy.precision == torch.float64 else nullcontext():
        metrics = trainer.step(batch, 0)
    found = gradient(policy)
    policy.model.load_state_dict(before)
    return found, metrics


def balance_by_hand(policy: Policy, rollouts: Sequence[Rollout]) -> Tensor:
    """The mean over tokens of what their rollouts' experts share, from transformers' own router logits."""
    total, tokens = torch.zeros((), dtype=torch.float64), 0
    for rollout in rollouts:
        out = policy.causal_lm(input_ids=torch.tensor([rollout.input_ids]), output_router_logits=True, use_cache=False)
        own = torch.tensor(rollout.loss_mask)
        per_layer = []
        for logits_TE in out.router_logits:
            p_TE = logits_TE.reshape(-1, logits_TE.shape[-1])[own].softmax(dim=-1)
            chosen = torch.zeros_like(p_TE).scatter(1, p_TE.topk(2).indices, 1.0)
            per_layer.append(p_TE.shape[1] * (chosen.mean(dim=0) * p_TE.mean(dim=0)).sum())
        total = total + torch.stack(per_layer).mean() * own.sum()
        tokens += int(own.sum())
    return COEF * total / tokens


@pytest.mark.parametrize("name", ["qwen3_moe", "qwen3_next", "llama4_text"])
def test_the_balancing_loss_and_its_gradient_are_those_of_the_formula(name: str, tmp_path: Path) -> None:
    policy = mixture(name, tmp_path)
    groups = random_groups(vocabulary=250)
    with_term, metrics = step_of(policy, batch_of(policy))
    without, plain = step_of(policy, batch_of(policy), replace(BALANCED, router_aux_loss_coef=0.0))
    policy.model.zero_grad(set_to_none=True)
    with Wide():
        expected = balance_by_hand(policy, [rollout for group in groups for rollout in group.rollouts])
        expected.backward()
    assert metrics["router_loss"] == pytest.approx(float(expected), rel=1e-9)
    assert metrics["loss"] == pytest.approx(plain["loss"] + metrics["router_loss"], rel=1e-9)
    assert "router_loss" not in plain
    assert relative_error(with_term - without, gradient(policy)) < 1e-9


@pytest.mark.parametrize("name", ["qwen3_moe", "qwen3_next", "jamba"])
def test_neither_update_nor_load_depend_on_the_layout(name: str, tmp_path: Path) -> None:
    policy = mixture(name, tmp_path)
    expected, told = step_of(policy, batch_of(policy))
    assert told["router_loss"] > 0
    for packing, budget in (("padded", 40), ("packed", 40), ("shared", 10_000), ("shared", 30)):
        found, metrics = step_of(policy, batch_of(policy, packing, budget))
        assert relative_error(found, expected) < 1e-9, packing
        assert metrics["router_loss"] == pytest.approx(told["router_loss"], rel=1e-9)
        for measure in ("moe/load_max", "moe/dead_fraction"):
            assert metrics[measure] == told[measure]


@pytest.mark.parametrize("name", ["qwen3_moe", "qwen3_next"])
def test_checkpointing_and_adapters_leave_the_balancing_loss_what_it_is(name: str, tmp_path: Path) -> None:
    kept, again = (mixture(name, tmp_path, lora_rank=2, gradient_checkpointing=flag) for flag in (False, True))
    expected, told = step_of(kept, batch_of(kept), wide=False)
    found, metrics = step_of(again, batch_of(again), wide=False)
    assert relative_error(found, expected) < 1e-9
    assert metrics["router_loss"] == told["router_loss"]
    assert metrics["moe/load_max"] == told["moe/load_max"]


def test_the_load_is_that_of_loss_tokens(tmp_path: Path) -> None:
    policy = mixture("qwen3_moe", tmp_path, "float32")
    with torch.no_grad():
        for router in find_routers(policy.causal_lm):
            router.module.weight.zero_()  # type: ignore[union-attr, operator]
    _, metrics = step_of(policy, batch_of(policy))
    # All ties: each of the 43 loss tokens goes to the same two of four experts
    assert metrics["moe/load_max"] == 2.0
    assert metrics["moe/dead_fraction"] == 0.5
    # f is 1 for two of four experts and P 1/4: 4 (1/4 + 1/4)
    assert metrics["router_loss"] == pytest.approx(COEF * 2.0)


def test_the_coefficient_is_the_models_own_unless_set(tmp_path: Path) -> None:
    policy = mixture("qwen3_moe", tmp_path, "float32")
    assert ExpertWatch.of(policy, None).coef == 0.001
    assert ExpertWatch.of(policy, 0.0).coef == 0.0
    assert ExpertWatch.of(nano(), None).coef == 0.0
    with pytest.raises(ValueError, match=r"algorithm\.router_aux_loss_coef=0\.5 needs a mixture of experts, Qwen2"):
        ExpertWatch.of(nano(), 0.5)


def test_models_without_experts_log_nothing_of_them() -> None:
    _, metrics = step_of(nano(), batch_of(nano()), AlgorithmConfig(loss="reinforce"))
    assert not [name for name in metrics if name.startswith(("moe/", "router"))]


def test_noise_of_routers_is_off_and_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tell.cache_clear()  # it is said once a process
    policy = mixture("phimoe", tmp_path, "float32")
    assert "the noise of" in caplog.text
    assert "PhimoeTopKRouter" in caplog.text
    first, _ = step_of(policy, batch_of(policy))
    second, _ = step_of(policy, batch_of(policy))
    assert torch.equal(first, second)
