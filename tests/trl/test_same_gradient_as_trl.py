"""Same groups, same rewards: an update of covey.trl is the update of TRL itself, whatever the objective."""

import copy
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from torch import Tensor

from covey.api.settings import make_config
from covey.policy.models.loading import policy_in_memory
from covey.rollouts.rollout import causal_rollout
from covey.run.build import build_reference, trainer_settings
from covey.system.waits.timer import PhaseTimer
from covey.trainer.prepare import Packing, make_training_batches
from covey.trainer.trainer import Trainer
from covey.trl import GRPOConfig
from covey.types import Completion, Group, Prompt, Reward
from covey_trl.mapping import settings_of
from tests.support.builders import credit_assigner

from ..support.models.tiny_models import tiny_model
from ..support.small import TOKENIZER

trl = pytest.importorskip("trl", reason="compares with TRL's own trainer: pip install trl")

END = int(TOKENIZER.eos_token_id)
PROMPTS = ("not one:", "and two:")
"""Of one length: TRL counts the positions of GPT-2 from the padding on the left, covey from the first token."""
COMPLETIONS = {
    "not one:": [[70, 71, END], [72, END], [73, 74, 75, 76, 77], [70, END]],
    "and two:": [[80, 81, 82, 83, END], [84, 85, 86, 87, 88], [89, END], [80, 82, END]],
}
REWARDS = {"not one:": [1.0, 0.25, 0.5, 0.0], "and two:": [0.0, 1.0, 0.75, 0.5]}
LENGTH = 5
FIXED: dict[str, Any] = {
    "num_generations": 4,
    "max_completion_length": LENGTH,
    "bf16": False,
    "gradient_checkpointing": False,
    "optim": "sgd",
    "learning_rate": 0.3,
    "lr_scheduler_type": "constant",
    "max_grad_norm": 0.0,
}


def reward_of(prompts: Sequence[str], completion_ids: Sequence[Sequence[int]], **columns: Any) -> list[float]:
    pairs = zip(prompts, completion_ids, strict=True)
    return [REWARDS[prompt][COMPLETIONS[prompt].index(list(ids))] for prompt, ids in pairs]


def length_of(completion_ids: Sequence[Sequence[int]], **columns: Any) -> list[float]:
    return [len(ids) / 8 for ids in completion_ids]


Update = dict[str, Tensor]
"""What is added to each weight."""


def update_of_trl(
    model: torch.nn.Module, given: Mapping[str, Any], rewards: list[Any], folder: Path
) -> dict[str, Tensor]:
    """What TRL's own trainer adds to the weights, its sampling replaced by the fixed completions."""
    model.save_pretrained(folder / "model")  # TRL loads its reference model from there
    quiet = {"report_to": "none", "save_strategy": "no", "use_cpu": True, "model_init_kwargs": {"dtype": "auto"}}
    args = trl.GRPOConfig(output_dir=str(folder / "run"), **quiet, **given)
    rows = Dataset.from_list([{"prompt": prompt} for prompt in PROMPTS])
    before = weights_of(model)
    name, tokenizer = str(folder / "model"), copy.deepcopy(TOKENIZER)
    trainer = trl.GRPOTrainer(name, rewards, args, train_dataset=rows, processing_class=tokenizer)

    def fixed(prompt_ids: Sequence[Sequence[int]], *ignored: Any, **keywords: Any) -> tuple[list[list[int]], None]:
        names = [TOKENIZER.decode(list(ids)) for ids in prompt_ids]
        return [COMPLETIONS[name][names[:place].count(name)] for place, name in enumerate(names)], None

    trainer._generate_single_turn = fixed
    trainer.train()
    return {name: weight - before[name] for name, weight in weights_of(trainer.model).items()}


def update_of_covey(model: torch.nn.Module, given: Mapping[str, Any], rewards: list[Any]) -> Update:
    """What covey's trainer adds to the weights, by the settings that covey.trl makes of the same arguments."""
    settings = settings_of(GRPOConfig(**given), num_rows=len(PROMPTS)) | {"environment": "reward_functions"}
    precision = {torch.float64: "float64", torch.float32: "float32"}[next(model.parameters()).dtype]
    config = make_config(None, settings | {"model.precision": precision, "engine.max_rows": 8}).config
    before = weights_of(model)
    policy = policy_in_memory(model, copy.deepcopy(TOKENIZER), config.model, seed=0)
    trainer = Trainer(policy, trainer_settings(config), build_reference(config, policy, []), PhaseTimer())
    weights = dict(zip([f.__name__ for f in rewards], given.get("reward_weights") or [1.0] * len(rewards), strict=True))
    groups = [group_of(prompt, rewards, weights) for prompt in PROMPTS]
    packing = Packing(config.packing, config.micro_batch_tokens)
    (batch,), _ = make_training_batches(groups, trainer, credit_assigner(config.algorithm, weights), packing, 0)
    trainer.step(batch, 0)
    return {name: weight - before[name] for name, weight in weights_of(model).items()}


def group_of(prompt: str, rewards: list[Any], weights: Mapping[str, float]) -> Group:
    rollouts = []
    ids = TOKENIZER(prompt)["input_ids"]
    for tokens in COMPLETIONS[prompt]:
        parts = {f.__name__: f(prompts=[prompt], completion_ids=[tokens])[0] for f in rewards}
        completion = Completion(
            tuple(tokens), (-1.0,) * len(tokens), "stop" if tokens[-1] == END else "length", policy_version=0
        )
        reward = Reward(sum(weights[name] * value for name, value in parts.items()), parts)
        rollouts.append(causal_rollout(ids, completion, reward, ""))
    return Group(Prompt(prompt, "test", prompt, {}), tuple(rollouts), ())


def weights_of(model: torch.nn.Module) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in model.named_parameters()}


def relative_error(given: Mapping[str, Any], folder: Path, rewards: list[Any] | None = None) -> float:
    """The norm of the difference of both updates, over that of TRL's."""
    rewards = rewards or [reward_of]
    micro_batches = given.get("gradient_accumulation_steps", 1)
    whole = {**FIXED, **given, "per_device_train_batch_size": 8 // micro_batches}
    whole["max_steps"] = whole.get("num_iterations", 1)
    model = tiny_model(torch.float64)
    theirs = update_of_trl(copy.deepcopy(model), whole, rewards, folder)
    ours = update_of_covey(model, whole, rewards)
    gap = torch.stack([(ours[name] - theirs[name]).norm() for name in theirs]).norm()
    size = torch.stack([tensor.norm() for tensor in theirs.values()]).norm()
    assert size > 1e-4, "TRL's update is nothing to compare with"
    return float(gap / size)


LOSS_TYPES = ("grpo", "dapo", "dr_grpo", "bnpo", "cispo", "sapo", "luspo", "vespo")
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {"scale_rewards": "group"},
    "batch scale, KL, two iterations, truncated masked, two micro-batches": {
        "scale_rewards": "batch",
        "beta": 0.1,
        "num_iterations": 2,
        "mask_truncated_completions": True,
        "gradient_accumulation_steps": 2,
    },
    "no scale, sequence ratio, two iterations": {
        "scale_rewards": "none",
        "importance_sampling_level": "sequence",
        "num_iterations": 2,
    },
    "sequence ratio, KL without weights, two iterations, truncated masked": {
        "importance_sampling_level": "sequence",
        "beta": 0.1,
        "use_bias_correction_kl": False,
        "num_iterations": 2,
        "mask_truncated_completions": True,
    },
}
OTHERS: dict[str, dict[str, Any]] = {
    "delta": {"loss_type": "grpo", "delta": 1.05, "num_iterations": 3},
    "narrow clip": {"loss_type": "dapo", "epsilon": 0.01, "epsilon_high": 0.02, "num_iterations": 3},
    "entropy bonus": {"loss_type": "dapo", "entropy_coef": 0.05},
    "entropy bonus that waits for the first entropy": {
        "loss_type": "dapo",
        "use_adaptive_entropy": True,
        "entropy_coef": 0.05,
        "entropy_target": 9.0,
    },
    "sapo temperatures": {"loss_type": "sapo", "sapo_temperature_pos": 2.0, "num_iterations": 2},
    "vespo weights": {"loss_type": "vespo", "vespo_k_pos": 1.0, "vespo_lambda_neg": 1.0, "num_iterations": 2},
    "temperature": {"loss_type": "dapo", "temperature": 0.7, "num_iterations": 2},
}


def pairs() -> Iterator[Any]:
    """Each loss with the variant of most fields and with one of the others, which share the rest; all in test-slow."""
    most = "batch scale, KL, two iterations, truncated masked, two micro-batches"
    others = [variant for variant in VARIANTS if variant != most]
    for place, loss_type in enumerate(LOSS_TYPES):
        for variant in VARIANTS:
            is_quick = variant in (most, others[place % len(others)])
            yield pytest.param(loss_type, variant, marks=[] if is_quick else pytest.mark.slow)


@pytest.mark.parametrize(("loss_type", "variant"), pairs())
def test_an_update_is_that_of_trl(loss_type: str, variant: str, tmp_path: Path) -> None:
    given = {"loss_type": loss_type, **VARIANTS[variant]}
    if loss_type == "bnpo":  # which divides by the tokens of a micro-batch
        given.pop("gradient_accumulation_steps", None)
    assert relative_error(given, tmp_path) < 1e-5


@pytest.mark.parametrize("name", OTHERS)
def test_so_it_is_with_other_fields_of_the_objective(name: str, tmp_path: Path) -> None:
    assert relative_error(OTHERS[name], tmp_path) < 1e-5


@pytest.mark.parametrize("how", ["sum_then_normalize", "normalize_then_sum"])
def test_so_it_is_with_several_rewards(how: str, tmp_path: Path) -> None:
    given = {"multi_objective_aggregation": how, "reward_weights": [1.0, 0.5]}
    assert relative_error(given, tmp_path, [reward_of, length_of]) < 1e-5
