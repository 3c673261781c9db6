"""A run that is resumed with other settings trains by those, and keeps what training has found."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from covey.algorithm.settings import AlgorithmConfig
from covey.policy.reference import make_reference
from covey.trainer.optimizer import load_moments
from covey.trainer.settings import OptimizerConfig
from covey.trainer.trainer import Trainer

from ..support.builders import ADAMW, ADVANTAGES, copied, make, make_policy, make_trainer, random_groups

STEERED = AlgorithmConfig(kl_coef=0.1, target_kl=0.1, kl_controller="doubling", entropy_coef=0.2, target_entropy=9.0)


def trainer_of(algorithm: AlgorithmConfig | None = None, optimizer: OptimizerConfig = ADAMW) -> Trainer:
    policy = make_policy("qwen2")
    return make_trainer(policy, algorithm, optimizer, make_reference(copied(policy), refreshed=False))


def resumed(before: Trainer, **changes: Any) -> Trainer:
    """The trainer of changed settings after a step of `before`."""
    before.step(make(random_groups(), advantages=ADVANTAGES), 0)
    after = trainer_of(**changes)
    after.load_state_dict(before.state_dict())
    return after


def test_a_changed_optimiser_setting_holds_from_the_resumed_step_on() -> None:
    changed = replace(ADAMW, weight_decay=0.5, betas=[0.5, 0.9], eps=1e-6)
    optimizer = resumed(trainer_of(), optimizer=changed)._optimizer
    settings = [(g["weight_decay"], g["betas"], g["eps"]) for g in optimizer.param_groups]
    assert settings == [(0.5, (0.5, 0.9), 1e-6), (0.0, (0.5, 0.9), 1e-6)]
    assert all(float(moments["step"]) == 1.0 for moments in optimizer.state.values())


def test_counters_of_steps_are_placed_as_the_fused_kernel_of_this_machine_reads_them() -> None:
    parameter = torch.nn.Parameter(torch.ones(2))
    before, after = (torch.optim.AdamW([parameter], fused=fused) for fused in (False, True))
    parameter.sum().backward()
    before.step()
    state = before.state_dict()
    state["state"][0]["step"] = torch.tensor(1.0, dtype=torch.float64)  # for one on another device
    load_moments(after, state, sharded=False)
    assert after.state[parameter]["step"].dtype is torch.float32
    assert after.param_groups[0]["fused"]


@pytest.mark.parametrize("before", ["adamw", "sgd"])
def test_another_optimiser_begins_without_moments(before: str) -> None:
    after = {"adamw": "sgd", "sgd": "adamw"}[before]
    trainer = resumed(trainer_of(optimizer=replace(ADAMW, name=before)), optimizer=replace(ADAMW, name=after))
    assert not trainer._optimizer.state
    assert trainer.step(make(random_groups(1), advantages=ADVANTAGES), 1)["skipped"] == 0


def test_coefficients_that_nothing_steers_are_those_of_the_settings() -> None:
    trainer = resumed(trainer_of(), algorithm=AlgorithmConfig(kl_coef=0.25, entropy_coef=0.5))
    assert (trainer.controller.coef, trainer.entropy.applied) == (0.25, 0.5)
    trainer = resumed(trainer_of(STEERED), algorithm=AlgorithmConfig(kl_coef=0.25, entropy_coef=0.5))
    assert (trainer.controller.coef, trainer.entropy.applied) == (0.25, 0.5)
    trainer = resumed(trainer_of(), algorithm=STEERED)
    assert (trainer.controller.coef, trainer.entropy.coef, trainer.entropy.applied) == (0.1, 0.2, 0.0)


def test_controlled_coefficients_resume_within_their_bounds() -> None:
    trainer = resumed(trainer_of(STEERED), algorithm=STEERED)
    assert (trainer.controller.coef, trainer.entropy.applied) == pytest.approx((0.05, 0.205))
    trainer = resumed(trainer_of(STEERED), algorithm=replace(STEERED, kl_coef_min=0.08))
    assert trainer.controller.coef == 0.08
    idle = replace(STEERED, target_entropy=0.01)
    trainer = resumed(trainer_of(idle), algorithm=idle)
    assert (trainer.entropy.coef, trainer.entropy.applied) == (pytest.approx(0.195), 0.0)


def test_a_new_float16_run_starts_its_loss_scale_where_the_checkpoint_has_none() -> None:
    trainer = trainer_of()
    trainer._scaler = torch.amp.GradScaler("cpu", init_scale=8.0, enabled=True)
    trainer.load_state_dict(trainer_of().state_dict())
    assert trainer.loss_scale == 8.0
