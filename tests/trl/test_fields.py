"""Every field of TRL's GRPOConfig is mapped or refused by name; the page lists all of them."""

import importlib
import math
import re
import sys
import warnings
from dataclasses import fields
from inspect import signature
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from peft import LoraConfig
from transformers import EarlyStoppingCallback, TrainerCallback

from covey.trl import GRPOConfig, GRPOTrainer
from covey_trl.callbacks import Bridge, log_row
from covey_trl.config import default_of
from covey_trl.fields import GONE, MAPPED, OWN, REFUSED, named_in_errors, table
from covey_trl.mapping import settings_of

from ..support.builders import saved_model
from ..support.models.tiny_models import tiny_model
from ..support.processes import in_a_fork
from .test_same_gradient_as_trl import TOKENIZER

ROOT = Path(__file__).resolve().parents[2]
ROWS = [{"prompt": f"say {number}:"} for number in range(20)]
OWN_WORDS = {"save_only_model": True, "pad_to_multiple_of": 8, "gradient_checkpointing_kwargs": {"use_reentrant": True}}


def test_every_field_of_trl_is_here_with_its_default_and_mapped_or_refused() -> None:
    trl = pytest.importorskip("trl")
    theirs = {field.name: field for field in fields(trl.GRPOConfig)}
    assert {*theirs, *OWN} == {field.name for field in fields(GRPOConfig)} == set(MAPPED) | set(REFUSED)
    assert set(theirs).isdisjoint(OWN)
    assert set(MAPPED).isdisjoint(REFUSED)
    for name, field in theirs.items():
        default = field.default_factory() if callable(field.default_factory) else field.default
        assert default_of(name) == default, name


def changed(default: Any) -> Any:
    """Another value than the default."""
    return default + 7 if isinstance(default, int | float) else f"not {default}"


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_a_refused_field_is_named_with_the_reason_when_it_is_set(name: str) -> None:
    default = default_of(name)
    value = OWN_WORDS.get(name, not default if isinstance(default, bool) else changed(default))
    args = GRPOConfig()
    setattr(args, name, value)
    with pytest.raises(ValueError) as refused:
        settings_of(args, num_rows=100)
    assert str(refused.value).startswith(f"GRPOConfig({name}=")
    assert REFUSED[name] in str(refused.value)


@pytest.mark.parametrize(
    ("made", "said"),
    [
        (GRPOConfig, "max_prompt_length: leave it out: prompts are never cut, and the preflight names those"),
        (GRPOConfig, "warmup_ratio: write warmup_steps, which below 1 is a share of the steps"),
        (GRPOConfig, "learning_rat; did you mean learning_rate?"),
        (GRPOTrainer, "tokenizer: GRPOTrainer takes it as processing_class"),
        (GRPOTrainer, "reward_func; did you mean reward_funcs?"),
    ],
)
def test_a_field_or_argument_that_is_not_there_is_refused_with_what_to_write(made: type, said: str) -> None:
    kind = {GRPOConfig: "field", GRPOTrainer: "argument"}[made]
    with pytest.raises(TypeError, match=re.escape(f"{made.__name__} has no {kind} {said}")):
        made(**{re.match(r"\w+", said)[0]: 1})  # type: ignore[index] # it matches
    assert not {*GONE} & {*signature(made).parameters}
    assert signature(GRPOConfig).parameters["learning_rate"].default == 1e-6


BASE: dict[str, Any] = {"bf16": False, "per_device_train_batch_size": 16, "num_generations": 4}
CHANGES: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({}, {"groups_per_step": 4, "group_size": 4, "num_steps": 75, "seed": 42, "optimizer.lr": 1e-6}),
    ({"gradient_accumulation_steps": 3}, {"groups_per_step": 12, "num_steps": 24}),
    ({"max_steps": 30, "num_iterations": 3}, {"num_steps": 10, "updates_per_batch": 3}),
    ({"steps_per_generation": 4}, {"groups_per_step": 16, "mini_batch_groups": 4, "num_steps": 18}),
    ({"steps_per_generation": 4, "max_steps": 24, "num_iterations": 3}, {"num_steps": 2}),
    ({"bf16": None}, {"model.precision": "bfloat16"}),
    ({"fp16": True, "bf16": None}, {"model.precision": "float16"}),
    ({"max_steps": 100, "warmup_steps": 0.1}, {"optimizer.warmup_steps": 10, "optimizer.schedule": "linear"}),
    (
        {"lr_scheduler_type": "cosine_with_min_lr", "lr_scheduler_kwargs": {"min_lr_rate": 0.1}},
        {"optimizer.schedule": "cosine", "optimizer.min_lr_ratio": 0.1},
    ),
    ({"lr_scheduler_type": "constant", "warmup_steps": 10}, {"optimizer.warmup_steps": 0}),
    ({"lr_scheduler_type": "constant_with_warmup", "warmup_steps": 10}, {"optimizer.warmup_steps": 10}),
    ({"optim": "adamw_8bit"}, {"optimizer.name": "adamw8bit"}),
    ({"save_steps": 0.2, "max_steps": 50}, {"output.save_every": 10}),
    ({"eval_strategy": "epoch"}, {"evaluation.every": 25}),
    (
        {"max_steps": 2, "per_device_train_batch_size": 512, "eval_strategy": "epoch", "save_strategy": "epoch"},
        {"groups_per_step": 128, "evaluation.every": 1, "output.save_every": 1},
    ),
    (
        {"num_iterations": 2, "eval_strategy": "steps", "eval_steps": 10, "save_steps": 7},
        {"evaluation.every": 5, "output.save_every": 4},
    ),
    ({"loss_type": "dr_grpo"}, {"algorithm.aggregation": "seq_mean_token_sum_norm", "algorithm.count_empty": True}),
    ({"importance_sampling_level": "sequence"}, {"algorithm.ratio": "sequence_mean"}),
    ({"beta": 0.04}, {"algorithm.kl_coef": 0.04, "algorithm.kl_gradient": "is_weighted"}),
    ({"report_to": ["tensorboard"]}, {"output.trackers": ["tensorboard"]}),
    ({"generation_kwargs": {"stop_strings": ["\n"]}}, {"sampling.stop": ["\n"]}),
    ({"generation_kwargs": {"temperature": None, "top_p": None}}, {"sampling.temperature": 1.0, "sampling.top_p": 1.0}),
    ({"max_grad_norm": None}, {"optimizer.max_grad_norm": 0.0}),
    ({"fsdp": "full_shard auto_wrap"}, {"parallel.strategy": "fsdp"}),
    ({"use_vllm": True}, {"engine.name": "vllm", "algorithm.correction": "mask", "algorithm.correction_max": 3.0}),
    ({"log_completions": True, "num_completions_to_print": 3}, {"output.show_rollouts": 3}),
    (
        {"beta": 0.1, "sync_ref_model": True, "ref_model_sync_steps": 64},
        {"algorithm.reference_refresh_every": 64, "algorithm.reference_refresh_alpha": 0.6},
    ),
    (
        {"beta": 0.1, "sync_ref_model": True, "ref_model_sync_steps": 64, "num_iterations": 4},
        {"algorithm.reference_refresh_every": 16},
    ),
    ({"use_vllm": True, "vllm_max_model_length": 90}, {"sampling.max_total_tokens": 90}),
    # Advantages and losses
    (
        {"scale_rewards": "batch", "epsilon": 0.1, "epsilon_high": 0.3, "delta": 4.0},
        {"algorithm.advantage": "group_center_batch_std", "algorithm.advantage_options": {"eps": 1e-4}}
        | {"algorithm.loss_options": {"eps_low": 0.1, "eps_high": 0.3, "two_sided_delta": 4.0}},
    ),
    ({"scale_rewards": False}, {"algorithm.advantage": "group_center", "algorithm.advantage_options": {}}),
    (
        {"loss_type": "sapo", "sapo_temperature_pos": 2.0, "sapo_temperature_neg": 3.0},
        {"algorithm.loss": "sapo", "algorithm.loss_options": {"tau_pos": 2.0, "tau_neg": 3.0}},
    ),
    (
        {"loss_type": "vespo", "vespo_k_pos": 1.0, "vespo_lambda_pos": 4.0, "vespo_k_neg": 5.0},
        {"algorithm.loss_options": {"k_pos": 1.0, "lambda_pos": 4.0, "k_neg": 5.0, "lambda_neg": 2.0}},
    ),
    (
        {"mask_truncated_completions": True, "off_policy_mask_threshold": 0.5, "top_entropy_quantile": 0.2},
        {"algorithm.mask_truncated": True, "algorithm.off_policy_mask_delta": 0.5}
        | {"algorithm.high_entropy_fraction": 0.2},
    ),
    (
        {"use_adaptive_entropy": True, "entropy_target": 0.7, "entropy_coef": 0.01},
        {"algorithm.target_entropy": 0.7, "algorithm.entropy_coef": 0.01},
    ),
    ({"beta": 0.1, "use_bias_correction_kl": False}, {"algorithm.kl_gradient": "naive", "algorithm.kl_clamp": None}),
    # The optimiser
    (
        {"weight_decay": 0.1, "adam_beta1": 0.8, "adam_beta2": 0.99, "adam_epsilon": 1e-6, "max_grad_norm": 0.5},
        {"optimizer.weight_decay": 0.1, "optimizer.betas": [0.8, 0.99], "optimizer.eps": 1e-6}
        | {"optimizer.max_grad_norm": 0.5},
    ),
    (
        {"lr_scheduler_type": "cosine_with_min_lr", "learning_rate": 0.5, "lr_scheduler_kwargs": {"min_lr": 0.125}},
        {"optimizer.min_lr_ratio": 0.25},
    ),
    ({"max_steps": 10, "warmup_steps": 10}, {"optimizer.schedule": "constant", "optimizer.warmup_steps": 10}),
    # Sampling
    (
        {"temperature": 0.7, "top_k": 5, "generation_kwargs": {"top_p": 0.9, "min_p": 0.1}},
        {"sampling.temperature": 0.7, "sampling.top_k": 5, "sampling.top_p": 0.9, "sampling.min_p": 0.1},
    ),
    (
        {"max_completion_length": 20000, "per_device_eval_batch_size": 40},
        {"sampling.max_tokens": 20000, "micro_batch_tokens": 20000, "engine.max_rows": 40},
    ),
    (
        {"use_vllm": True, "vllm_importance_sampling_mode": "token_truncate", "vllm_importance_sampling_clip_min": 0.5}
        | {"vllm_importance_sampling_clip_max": None},
        {"algorithm.correction": "truncate", "algorithm.correction_level": "token", "algorithm.correction_min": 0.5}
        | {"algorithm.correction_max": math.inf},
    ),
    ({"use_vllm": True, "vllm_importance_sampling_correction": False}, {"algorithm.correction": "none"}),
    (
        {"use_vllm": True, "vllm_enable_sleep_mode": True, "vllm_gpu_memory_utilization": 0.5},
        {"engine.sleep": 2, "engine.gpu_memory_utilization": 0.5},
    ),
    (
        {"use_vllm": True, "vllm_mode": "server", "vllm_server_base_url": "http://far:1"},
        {"engine.url": "http://far:1"},
    ),
    # The run
    (
        {"num_train_epochs": 0.1, "shuffle_dataset": False, "ddp_timeout": 60, "use_cpu": True},
        {"num_steps": 3, "shuffle": False, "timeouts.ranks": 60.0, "model.device": "cpu"},
    ),
    ({}, {"preflight.enabled": True}),
    ({"preflight": False}, {"preflight.enabled": False}),
    (
        {"preflight_logprob_tolerance": 0.1, "preflight_gradient_tolerance": 0.2},
        {"preflight.logprob_tolerance": 0.1, "preflight.gradient_tolerance": 0.2},
    ),
    ({"chat_template_kwargs": {"thinks": False}}, {"model.chat_template_kwargs": {"thinks": False}}),
    (
        {"save_strategy": "no", "save_total_limit": 2, "disable_tqdm": True},
        {"output.save_every": 0, "output.keep_last": 2, "output.progress": False},
    ),
    (
        {"eval_strategy": "steps", "num_generations_eval": 2},
        {"evaluation.every": 10, "evaluation.num_samples": 2, "output.keep_last": 10**6},
    ),
]


@pytest.mark.parametrize(("given", "wanted"), CHANGES)
def test_a_mapped_field_becomes_the_setting_that_the_page_names(given: dict[str, Any], wanted: dict[str, Any]) -> None:
    found = settings_of(GRPOConfig(**BASE | given), num_rows=100)
    assert {name: found[name] for name in wanted} == wanted


def test_an_error_that_names_settings_names_the_fields_that_set_them() -> None:
    said = "preflight: memory: 9 GiB; lower sampling.max_tokens (preflight.enabled=false trains unchecked)"
    with pytest.raises(ValueError) as refused, named_in_errors():
        raise ValueError(said)
    fields_named = "max_completion_length for sampling.max_tokens, preflight for preflight.enabled"
    assert str(refused.value) == f"{said} (in GRPOConfig: {fields_named})"
    with pytest.raises(ValueError, match=r"^micro_batch_tokens must be >= 1$"), named_in_errors():
        raise ValueError("micro_batch_tokens must be >= 1")


def test_fields_of_a_vllm_beside_the_trainer_say_nothing_of_a_server() -> None:
    given = {"use_vllm": True, "vllm_mode": "server", "vllm_enable_sleep_mode": True, "vllm_max_model_length": 90}
    found = settings_of(GRPOConfig(**BASE | given), num_rows=100)
    assert {name for name in found if name.startswith(("engine.", "sampling.max"))} == {
        *("engine.name", "engine.url", "engine.max_rows", "sampling.max_tokens")
    }


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"steps_per_generation": 3, "gradient_accumulation_steps": 2}, "steps_per_generation=3 must be a multiple of"),
        (
            {"steps_per_generation": 4, "num_generations": 32},
            "2 prompts of a batch cannot be shared out to 4 o",
        ),
        ({"num_generations": 3}, "must be a multiple of num_generations=3"),
        ({"num_generations": 1}, "num_generations must be >= 2"),
        ({"loss_type": "bnpo", "gradient_accumulation_steps": 2}, "loss_type='bnpo' divides by the tokens of a micro"),
        ({"loss_type": "ppo"}, "loss_type must be one of"),
        ({"optim": "lion_8bit"}, "optim='lion_8bit' has no counterpart in covey"),
        ({"vllm_importance_sampling_mode": "token_mask"}, "needs use_vllm=True"),
        ({"max_steps": 5, "num_iterations": 2}, "max_steps=5 must be a multiple of the 2 optimiser steps on a batch"),
        ({"report_to": "mlflow"}, "report_to='mlflow' has no counterpart"),
        ({"generation_kwargs": {"num_beams": 2}}, "generation_kwargs has no counterpart in covey for num_beams"),
        ({"logging_strategy": "epoch"}, "logging_strategy='epoch' has no counterpart in covey: there is no, steps"),
        ({"hub_strategy": "checkpoint"}, "hub_strategy='checkpoint' has no counterpart in covey"),
        ({"use_vllm": True, "vllm_mode": "serve"}, "vllm_mode='serve' has no counterpart in covey"),
        ({"generation_kwargs": "{top_p"}, "generation_kwargs must be a dict, or one in JSON, got '{top_p'"),
        ({"sync_ref_model": True}, "sync_ref_model=True needs beta > 0"),
        ({"top_entropy_quantile": 0.5, "entropy_coef": 0.1}, "entropy_coef and use_adaptive_entropy need top_entropy"),
        ({"top_entropy_quantile": 0.5, "use_adaptive_entropy": True}, "need top_entropy_quantile=1"),
        (
            {"loss_type": "vespo", "use_vllm": True, "vllm_importance_sampling_mode": "token_truncate"},
            "loss_type='vespo' with use_vllm=True needs vllm_importance_sampling_correction=False",
        ),
        ({"per_device_train_batch_size": 512}, "train_dataset has 100 rows, and a step takes 128 prompts"),
        ({"fsdp": "full_shard offload"}, "full_shard is parallel.strategy=fsdp"),
        ({"beta": 0.1, "importance_sampling_level": "sequence"}, "needs use_bias_correction_kl=False"),
        ({"generation_batch_size": 16, "steps_per_generation": 1}, "say the same: give one of both"),
        ({"num_generations": "8"}, "num_generations must be an integer, got '8'"),
        ({"gradient_accumulation_steps": 0}, "gradient_accumulation_steps must be >= 1, got 0"),
        ({"num_iterations": None}, "num_iterations must be an integer, got None"),
        ({"save_steps": "a"}, "save_steps must be a number, got 'a'"),
        ({"generation_kwargs": 5}, "generation_kwargs must be a dict, or one in JSON, got 5"),
        ({"chat_template_kwargs": "[1]"}, "chat_template_kwargs must be a dict, or one in JSON, got [1]"),
        ({"reward_weights": 1}, "reward_weights must be a list, got 1"),
        ({"report_to": 5}, "report_to must be a name or a list of names, got 5"),
        ({"output_dir": 5}, "output_dir must be a path, got 5"),
        ({"log_completions": "some"}, "log_completions must be true or false, got 'some'"),
        ({"logging_steps": 0}, "logging_steps must be > 0, got 0; logging_strategy='no' leaves it out"),
        ({"save_steps": -1}, "save_steps must be > 0, got -1; save_strategy='no' leaves it out"),
        ({"fp16": True, "bf16": True}, "fp16=True and bf16=True exclude each other: give one"),
    ],
)
def test_values_without_a_counterpart_are_refused_in_one_line(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError) as refused:
        settings_of(GRPOConfig(**BASE | given), num_rows=100)
    assert message in str(refused.value)


def test_a_log_row_has_means_of_its_steps_under_trls_names() -> None:
    steps: list[dict[str, float | None]] = [
        {"loss": 1.0, "sampled_reward_mean": 0.5, "reward_mean": 9.0, "clip_low": 0.125, "clip_high": 0.25}
        | {"reward/exact": 0.0, "reward_std/exact": 0.5, "kl": None, "zero_std_fraction": 0.5, "seconds": 1.0},
        {"loss": 3.0, "sampled_reward_mean": 1.0, "reward_mean": 9.0, "clip_low": 0.375, "clip_high": 0.75}
        | {"reward/exact": 1.0, "reward_std/exact": 1.0, "kl": 0.25, "zero_std_fraction": 0.0, "seconds": 2.0},
    ]
    assert log_row(steps) == {
        "loss": 2.0,
        "reward": 0.75,
        "clip_ratio/low_mean": 0.25,
        "clip_ratio/high_mean": 0.5,
        "rewards/exact/mean": 0.5,
        "rewards/exact/std": 0.75,
        "kl": 0.25,
        "frac_reward_zero_std": 0.25,
        "step_time": 1.5,
    }


@pytest.mark.parametrize(
    ("given", "logged"),
    [
        ({"logging_steps": 4}, [2, 4, 5]),
        ({"logging_steps": 3}, [2, 3, 5]),
        ({"logging_steps": 0.5}, [3, 5]),
        ({"logging_steps": 100, "logging_first_step": True}, [1, 5]),
        ({"logging_steps": 1, "logging_strategy": "no"}, []),
    ],
)
def test_steps_are_logged_at_trls_interval_and_at_the_end(given: dict[str, Any], logged: list[int]) -> None:
    """Five batches, of two optimiser steps each."""
    bridge = Bridge(GRPOConfig(**BASE | {"num_iterations": 2} | given), [], num_steps=10, is_evaluated=False)
    source = SimpleNamespace(epochs=lambda: 0.25)  # it alone knows what is taken, of what is drawn
    bridge.on_start(SimpleNamespace(policy=SimpleNamespace(model=None, tokenizer=None), source=source), ROOT)  # type: ignore[arg-type] # all that it reads of a run
    for step in range(1, 6):
        bridge.on_step(step, {"loss": float(step)})
    bridge.end()
    assert [(row["step"], row["epoch"]) for row in bridge.state.log_history] == [(2 * step, 0.25) for step in logged]


@pytest.mark.parametrize("name", ["compute_loss", "_calculate_rewards", "create_optimizer"])
def test_a_subclass_whose_override_would_never_be_called_is_refused_by_name(name: str) -> None:
    made = type("Mine", (GRPOTrainer,), {name: lambda self: None, "my_own": 1, "evaluate": GRPOTrainer.evaluate})
    with pytest.raises(ValueError, match=f"Mine.{name} would never be called"):
        made(tiny_model(), len, GRPOConfig(**BASE), ROWS, processing_class=TOKENIZER)


def test_a_callback_that_is_none_is_refused_in_one_line() -> None:
    with pytest.raises(ValueError, match="callbacks must be TrainerCallbacks of transformers, got <built-in function"):
        GRPOTrainer(tiny_model(), len, GRPOConfig(**BASE), ROWS, processing_class=TOKENIZER, callbacks=[len])


def test_callbacks_of_transformers_hear_of_a_saved_policy() -> None:
    steps: list[int] = []

    class Saves(TrainerCallback):
        def on_save(self, args: Any, state: Any, control: Any, **keywords: Any) -> None:
            steps.append(state.global_step)

    bridge = Bridge(GRPOConfig(**BASE), [Saves], num_steps=9, is_evaluated=False)
    bridge.state.global_step = 4
    bridge.on_save(4, ROOT)
    assert steps == [4]


def test_what_a_callback_asks_for_in_vain_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    class Asks(TrainerCallback):
        def on_save(self, args: Any, state: Any, control: Any, **keywords: Any) -> None:
            assert not control.should_evaluate
            control.should_evaluate = True

    bridge = Bridge(GRPOConfig(**BASE), [Asks], num_steps=9, is_evaluated=False)
    bridge.on_save(1, ROOT)
    bridge.on_save(2, ROOT)
    (said,) = [record.getMessage() for record in caplog.records]
    assert said == (
        "Asks set control.should_evaluate, which nothing obeys here: eval_steps says when policies are evaluated"
    )


def test_callbacks_get_the_tokenizer() -> None:
    found: list[Any] = []

    class Reads(TrainerCallback):
        def on_train_begin(self, args: Any, state: Any, control: Any, processing_class: Any, **keywords: Any) -> None:
            found.append(processing_class)

    bridge = Bridge(GRPOConfig(**BASE), [Reads], num_steps=9, is_evaluated=False)
    run: Any = SimpleNamespace(policy=SimpleNamespace(model=None, tokenizer=TOKENIZER))
    bridge.on_start(run, ROOT)
    assert found == [TOKENIZER]


def test_a_callback_that_waits_for_a_metric_of_transformers_is_refused_in_one_line() -> None:
    with pytest.raises(ValueError, match=r"^EarlyStoppingCallback needs metric_for_best_model, which covey has not: "):
        Bridge(GRPOConfig(**BASE), [EarlyStoppingCallback], num_steps=1, is_evaluated=True)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"model": 5}, "model must be a name, a folder or a model, got 5"),
        ({"args": {"max_steps": 1}}, "args must be a GRPOConfig of covey.trl, got a dict"),
        ({"processing_class": "gpt2"}, "processing_class must be a tokenizer, got 'gpt2'"),
        ({"callbacks": 5}, "callbacks must be a list, got 5"),
        ({"optimizers": 5}, "optimizers must be a list, got 5"),
        ({"tools": len}, "tools must be a list, got <built-in function len>"),
        (
            {"args": GRPOConfig(**BASE, model_init_kwargs={"torch_dtype": "bf16"}), "model": "nowhere"},
            "model_init_kwargs['dtype'] must be one of float32, bfloat16, float16, float64, auto, got bf16; did you "
            "mean bfloat16?",
        ),
        (
            {"model": "nowhere", "quantization_config": {"load_in_4bit": True}},
            "quantization_config must be of BitsAndBytesConfig in 4 or 8 bits, got {'load_in_4bit': True}",
        ),
        (
            {"model": "nowhere", "quantization_config": "4bit"},
            "quantization_config must be of BitsAndBytesConfig in 4 or 8 bits, got '4bit'",
        ),
        ({"model": "nano", "peft_config": {"r": 8}}, "peft_config must be a LoraConfig of plain adapters, got dict"),
    ],
)
def test_an_argument_of_another_kind_is_refused_in_one_line(given: dict[str, Any], message: str) -> None:
    usual = {"model": tiny_model(), "reward_funcs": len, "args": GRPOConfig(**BASE), "train_dataset": ROWS}
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        GRPOTrainer(**usual | {"processing_class": TOKENIZER} | given)


def test_a_dtype_by_its_former_name_is_that_of_the_weights(tmp_path: Path) -> None:
    name = saved_model(tmp_path / "model", "llama")
    args = GRPOConfig(**BASE, model_init_kwargs={"torch_dtype": "bfloat16"})
    made = GRPOTrainer(name, len, args, ROWS, processing_class=TOKENIZER)
    assert next(made.model.parameters()).dtype == torch.bfloat16


def test_adapters_bring_no_warning_of_a_name_that_has_gone(tmp_path: Path) -> None:
    name = saved_model(tmp_path / "model", "llama")
    adapters = LoraConfig(r=2, task_type="CAUSAL_LM")
    with warnings.catch_warnings():
        warnings.simplefilter("error", FutureWarning)
        GRPOTrainer(name, len, GRPOConfig(**BASE), ROWS, processing_class=TOKENIZER, peft_config=adapters)


def test_a_folder_without_a_run_is_nothing_to_resume_from(tmp_path: Path) -> None:
    trainer = GRPOTrainer(tiny_model(), len, GRPOConfig(**BASE), ROWS, processing_class=TOKENIZER)
    with pytest.raises(ValueError, match=r"^resume_from_checkpoint=.*nowhere is no run of covey's, and no checkpoint"):
        trainer.train(resume_from_checkpoint=str(tmp_path / "nowhere"))


def test_a_rollout_function_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="rollout_func has no counterpart in covey yet"):
        GRPOTrainer(tiny_model(), len, GRPOConfig(**BASE), ROWS, processing_class=TOKENIZER, rollout_func=len)


def test_the_page_has_the_table_of_all_fields() -> None:
    assert table() in (ROOT / "docs" / "use" / "trl.md").read_text()


def test_trl_is_not_imported() -> None:
    def imported_anew() -> list[str]:
        for name in [name for name in sys.modules if name.partition(".")[0] in ("covey", "trl")]:
            del sys.modules[name]
        importlib.import_module("covey.trl")
        return [name for name in sys.modules if name.partition(".")[0] == "trl"]

    assert in_a_fork(imported_anew) == []
