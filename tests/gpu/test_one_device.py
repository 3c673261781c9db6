"""No operation meets tensors of two devices: engines, layouts, objectives, checkpoints and a whole run, pretended."""

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from covey.algorithm.losses import LOSSES
from covey.algorithm.settings import AlgorithmConfig
from covey.engine.build import ENGINES
from covey.engine.settings import EngineConfig
from covey.loop import train
from covey.policy.models.loading import load_policy
from covey.policy.policy import Policy
from covey.policy.reference import make_reference
from covey.policy.settings import ModelConfig
from covey.run.checkpoints.checkpoint import load_weights, save_policy
from covey.trainer.layouts import LAYOUTS
from covey.trainer.settings import OptimizerConfig
from covey.trainer.trainer import Trainer
from covey.types import Batch, Sampling

from ..guarantees.update.updates import LOSS_OPTIONS
from ..support import builders
from ..support.builders import ADVANTAGES, as_fills, make_trainer, random_groups
from ..support.pretend_gpu import CUDA, PretendGpu
from ..support.small import small_config

SMALL: dict[str, Any] = {"nano_hidden_size": 32, "nano_num_layers": 1, "nano_num_heads": 2}
MASKED = {"name": "nano-masked", "kind": "masked", "nano_architecture": "modernbert"}
MODELS: dict[str, dict[str, Any]] = {
    "float32": {},
    "bfloat16": {"precision": "bfloat16"},
    "float16": {"precision": "float16", "nano_architecture": "qwen3"},
    "window": {"nano_architecture": "mistral", "precision": "bfloat16"},
    "adapters": {"lora_rank": 4, "precision": "bfloat16"},
    "checkpointing": {"gradient_checkpointing": True, "precision": "bfloat16", "nano_num_layers": 2},
    "offload": {"activation_offload": True, "nano_num_layers": 2},
}
SAMPLINGS = {
    "plain": Sampling(max_tokens=6),
    "filters": Sampling(max_tokens=6, top_k=20, top_p=0.9, min_p=0.01, temperature=0.8),
    "greedy": Sampling(max_tokens=6, temperature=0.0),
}
PENALTY: dict[str, Any] = {"kl_coef": 0.1}
OBJECTIVES: dict[str, dict[str, Any]] = {
    **{loss: {"loss": loss, "loss_options": LOSS_OPTIONS.get(loss, {})} for loss in LOSSES},
    "kl k3": {**PENALTY, "kl_estimator": "k3"},
    "full kl": {**PENALTY, "kl_estimator": "full"},
    "high entropy": {"high_entropy_fraction": 0.5},
    "m2po": {"m2po_threshold": 0.04},
    "entropy": {"entropy_coef": 0.01},
}


def policy_of(**settings: Any) -> Policy:
    return load_policy(ModelConfig(**{**SMALL, **settings}), seed=0)


def sample(policy: Policy, sampling: Sampling, prompts: Sequence[Sequence[int]], engine: str = "native") -> None:
    sampler = ENGINES[engine](policy, EngineConfig(name=engine), "auto")

    async def run() -> None:
        await asyncio.gather(*(sampler.generate(ids, 3, sampling) for ids in prompts))

    asyncio.run(run())


def batch_of(policy: Policy, packing: str = "shared") -> Batch:
    """Several micro-batches on the policy's device."""
    groups = random_groups(vocabulary=250)
    groups = groups if policy.mask_id is None else as_fills(groups)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(builders, "CPU", policy.device)
        return builders.make(groups, packing, 48, ADVANTAGES, attention=policy.attention)


def trainer_of(policy: Policy, optimizer: str = "adamw", **algorithm: Any) -> Trainer:
    how = AlgorithmConfig(**algorithm)
    reference = make_reference(policy, refreshed=False) if how.kl_coef else None
    return make_trainer(
        policy, how, OptimizerConfig(name=optimizer, lr=1e-3), reference, updates_per_batch=2, logprob_chunk=8
    )


def test_the_pretend_device_finds_a_mixed_operation_and_a_wait() -> None:
    with PretendGpu() as gpu:
        there, here = torch.arange(3, device=CUDA), torch.arange(3)
        assert str((there + 1).device) == "cuda:0"
        assert not gpu.mixed
        assert not gpu.waits
        there + here
        (there * 2).tolist()
        assert sum(gpu.mixed.values()) == 1
        assert sum(gpu.waits.values()) == 1
        assert dict(gpu.kernels) == {"add": 2, "mul": 1}


SLOW_BFLOAT16 = pytest.param("bfloat16", marks=pytest.mark.slow)
"""All weights in bfloat16, without adapters or a window besides."""


@pytest.mark.long
@pytest.mark.parametrize("model", [SLOW_BFLOAT16, "float16", "window", "adapters"])
def test_the_native_engine_stays_on_the_device(model: str) -> None:
    with PretendGpu() as gpu:
        policy = policy_of(**MODELS[model])
        for sampling in SAMPLINGS.values():
            sample(policy, sampling, [[5, 6, 7], [8], [9, 10]])
        assert not gpu.mixed


def test_a_masked_policy_stays_on_the_device() -> None:
    with PretendGpu() as gpu:
        policy = policy_of(**MASKED)
        prompt = [5, 6, *[policy.mask_id or 0] * 4, 7]
        for likelihood in ("trajectory", "one_step"):
            how = Sampling(max_tokens=6, top_k=20, num_passes=3, likelihood=likelihood)  # type: ignore[arg-type]
            sample(policy, how, [prompt, prompt[1:]], "fill")
        for packing in LAYOUTS:
            trainer_of(policy, optimizer="sgd").step(batch_of(policy, packing), 0)
        assert not gpu.mixed


@pytest.mark.long
@pytest.mark.parametrize("model", [SLOW_BFLOAT16, *(model for model in MODELS if model != "bfloat16")])
def test_updates_stay_on_the_device_in_every_layout(model: str) -> None:
    with PretendGpu() as gpu:
        policy = policy_of(**MODELS[model])
        for packing in LAYOUTS:
            trainer_of(policy, optimizer="sgd").step(batch_of(policy, packing), 0)
        assert not gpu.mixed


@pytest.mark.long
@pytest.mark.parametrize("name", OBJECTIVES)
def test_every_objective_stays_on_the_device(name: str) -> None:
    with PretendGpu() as gpu:
        policy = policy_of()
        metrics = trainer_of(policy, **OBJECTIVES[name]).step(batch_of(policy), 0)
        assert metrics["skipped"] == 0
        assert not gpu.mixed


@pytest.mark.long
def test_filters_of_the_sampler_stay_on_the_device_in_training() -> None:
    with PretendGpu() as gpu:
        policy = policy_of()
        how = AlgorithmConfig(kl_coef=0.1)
        reference = make_reference(policy, refreshed=False)
        trainer = make_trainer(policy, how, reference=reference, sampling=SAMPLINGS["filters"], logprob_chunk=8)
        trainer.step(batch_of(policy), 0)
        assert not gpu.mixed


@pytest.mark.parametrize("model", [SLOW_BFLOAT16, "adapters"])
def test_a_checkpoint_comes_back_to_the_device(model: str, tmp_path: Path) -> None:
    with PretendGpu() as gpu:
        policy = policy_of(**MODELS[model])
        trainer, batch = trainer_of(policy), batch_of(policy)
        trainer.step(batch, 0)
        save_policy(policy, tmp_path / "policy")
        torch.save(trainer.state_dict(), tmp_path / "state.pt")
        again = policy_of(**MODELS[model])
        load_weights(again, tmp_path)
        other = trainer_of(again)
        other.load_state_dict(torch.load(tmp_path / "state.pt", map_location="cpu", weights_only=True))
        assert other.step(batch, 1) == pytest.approx(trainer.step(batch, 1), rel=1e-3)
        assert not gpu.mixed


@pytest.mark.long
def test_a_whole_run_with_its_checks_stays_on_the_device(tmp_path: Path) -> None:
    with PretendGpu() as gpu:
        train(small_config(num_steps=1), tmp_path / "run")
        assert not gpu.mixed
    metrics = json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[-1])
    assert metrics["step"] == 1


@pytest.mark.long
def test_kernels_repeat_in_the_training_pass_alone_where_that_is_asked_for() -> None:
    seen: list[bool] = []
    with PretendGpu() as gpu:
        policy = policy_of(deterministic=True)
        trainer = trainer_of(policy, optimizer="sgd")
        trainer.observer = lambda part, inputs: seen.append(torch.are_deterministic_algorithms_enabled())
        trainer.step(batch_of(policy), 0)
        assert not gpu.mixed
    assert seen
    assert all(seen)
    assert not torch.are_deterministic_algorithms_enabled()
