"""The reward-function document's script: its words are answered all at once, its reward and its 4 bits run."""

import copy
from pathlib import Path
from typing import Any

import pytest
from peft import LoraConfig
from transformers import BitsAndBytesConfig

import covey
from covey.trl import GRPOConfig, GRPOTrainer

from ..support.models.tiny_models import tiny_model
from ..support.small import TOKENIZER
from .sample_rewards import of_columns, simple_reward

ROWS = [{"prompt": f"Post {number}:", "response": "short", "score": number} for number in range(8)]
SMALL: dict[str, Any] = {
    "per_device_train_batch_size": 4,
    "num_generations": 2,
    "max_completion_length": 4,
    "max_steps": 1,
    "bf16": False,
    "report_to": "none",
    "preflight": False,
    "disable_tqdm": True,
}


def test_all_words_of_the_documents_config_are_answered_at_once() -> None:
    with pytest.raises(TypeError) as caught:
        GRPOConfig(
            group_size=4, beta=0.05, learning_rate=5e-6, mini_batch_size=4, batch_size=128, target_kl=0.1,
            gradient_accumulation_steps=4, reward_fn=simple_reward, ppo_epochs=1, clip_range=0.2,
        )  # type: ignore[call-arg] # fmt: skip
    said = str(caught.value)
    assert said.startswith("GRPOConfig has no field group_size: write num_generations; no mini_batch_size: write per_")
    for answer in (
        "no batch_size: write generation_batch_size",
        "no reward_fn: GRPOTrainer takes it as reward_funcs",
        "no ppo_epochs: write num_iterations",
        "no clip_range: write epsilon",
    ):
        assert answer in said
    assert "target_kl" not in said


def test_what_the_answers_say_is_what_the_documents_recipe_does() -> None:
    args = GRPOConfig(
        num_generations=4, beta=0.05, learning_rate=5e-6, per_device_train_batch_size=4, generation_batch_size=128,
        gradient_accumulation_steps=4, target_kl=0.1, bf16=False,
    )  # fmt: skip
    trainer = GRPOTrainer("nano", simple_reward, args, train_dataset=[*ROWS * 8])
    config = trainer.config
    assert (config.groups_per_step, config.group_size, config.mini_batch_groups) == (32, 4, 4)
    assert (config.algorithm.kl_coef, config.algorithm.target_kl) == (0.05, 0.1)
    with pytest.raises(ValueError, match=r"target_kl=0\.1 needs beta > 0"):
        GRPOTrainer("nano", simple_reward, GRPOConfig(target_kl=0.1, bf16=False), train_dataset=ROWS)


def test_a_reward_of_samples_is_called_with_rows_and_their_completions(tmp_path: Path) -> None:
    result = covey.train(
        "nano", [simple_reward, of_columns], ROWS * 2, num_steps=1, groups_per_step=2, group_size=2, max_tokens=4,
        folder=tmp_path / "run", evaluation={"num_prompts": 1, "num_samples": 1}, preflight={"enabled": False},
        output={"progress": False, "report": False},
    )  # fmt: skip
    row = next(row for row in result.rows if "reward/of_columns" in row)
    assert row["reward/simple_reward"] in (0.0, 0.25, 0.5, 0.75, 1.0)
    trainer = GRPOTrainer("nano", simple_reward, GRPOConfig(str(tmp_path / "trl"), **SMALL), train_dataset=ROWS)
    assert trainer.train().global_step == 1


FOUR_BITS = {"bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True}
ADAPTERS = LoraConfig(
    r=16, lora_alpha=32, target_modules=["q_proj", "v_proj"], lora_dropout=0.05, task_type="CAUSAL_LM"
)


@pytest.mark.parametrize(
    "given",
    [
        {"quantization_config": BitsAndBytesConfig(load_in_4bit=True, **FOUR_BITS)},
        {"model_init_kwargs": {"load_in_4bit": True, "device_map": "auto"}},
    ],
)
def test_weights_in_4_bits_under_adapters_are_settings_of_the_run(given: dict[str, Any], tmp_path: Path) -> None:
    args = GRPOConfig(str(tmp_path), **SMALL, model_init_kwargs=given.pop("model_init_kwargs", None))
    used = copy.deepcopy(ADAPTERS)
    used.base_model_name_or_path = "tiny"  # as peft writes it where the same object has served before
    trainer = GRPOTrainer("nano", simple_reward, args, train_dataset=ROWS, peft_config=used, **given)
    model = trainer.config.model
    assert (model.load_in_4bit, model.load_in_8bit, model.lora_rank, model.lora_alpha) == (True, False, 16, 32.0)
    assert (model.lora_targets, model.lora_dropout) == (["q_proj", "v_proj"], 0.05)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"quantization_config": BitsAndBytesConfig(load_in_4bit=True), "peft_config": ADAPTERS}, "4 bits are nf4"),
        ({"quantization_config": BitsAndBytesConfig(load_in_8bit=True)}, "need a peft_config"),
        (
            {
                "quantization_config": BitsAndBytesConfig(load_in_8bit=True),
                "peft_config": LoraConfig(r=4, use_rslora=True),
            },
            "peft_config may set r, lora_alpha, lora_dropout, target_modules, got use_rslora",
        ),
    ],
)
def test_other_quantised_weights_are_refused_in_one_line(given: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        GRPOTrainer("nano", simple_reward, GRPOConfig(str(tmp_path), **SMALL), train_dataset=ROWS, **given)


def test_a_model_object_is_never_in_4_bits(tmp_path: Path) -> None:
    four = BitsAndBytesConfig(load_in_4bit=True, **FOUR_BITS)
    given = {"quantization_config": four, "peft_config": ADAPTERS, "processing_class": TOKENIZER}
    with pytest.raises(ValueError, match="need a model by name, got one in memory"):
        GRPOTrainer(tiny_model(), simple_reward, GRPOConfig(str(tmp_path), **SMALL), train_dataset=ROWS, **given)
