"""What memory a GPU will need, told from the shape of the model."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hydra import compose, initialize_config_dir
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from covey.config import compose as settings
from covey.config.schema import Config, group_choices
from covey.engine.native.decode_weights import is_wanted, own_bytes
from covey.engine.native.runner import cache_shape
from covey.engine.settings import CACHE_BYTES
from covey.policy.models.loading import load_policy
from covey.policy.settings import ModelConfig
from covey.run.build import build_run
from covey.run.memory import estimate as memory
from covey.run.memory.estimate import holds_reference, with_checkpointing, with_fused_layers, workload
from covey.run.memory.memory_model import kept_bytes, memory_of
from covey.run.memory.model_shapes import shape_of
from covey.system import machine
from covey.system.waits.timer import PhaseTimer
from covey_preflight.memory import check_memory
from covey_preflight.subject import PreflightContext
from covey_report.plan.settings import derive_numbers, plan, report, weights

from ...support.builders import nano
from ...support.models.saved_models import qwen, save_model
from ...support.small import scripted, small_config

GB80 = 80 * 10**9


def composed(*overrides: str) -> Config:
    settings.register()
    with initialize_config_dir(str(settings.CONF), version_base=None):
        return settings.to_config(compose("config", overrides=list(overrides)))


PUBLISHED = {
    "Qwen/Qwen2.5-0.5B-Instruct": 494_032_768,
    "Qwen/Qwen2.5-Coder-0.5B-Instruct": 494_032_768,
    "Qwen/Qwen2.5-1.5B": 1_543_714_304,
    "Qwen/Qwen2.5-3B": 3_085_938_688,
    "Qwen/Qwen2.5-Math-7B": 7_615_616_512,
    "Qwen/Qwen2.5-14B-Instruct": 14_770_033_664,
    "Qwen/Qwen2.5-32B": 32_763_876_352,
    "Qwen/Qwen2.5-72B": 72_706_203_648,
    "Qwen/Qwen3-0.6B": 596_049_920,
    "Qwen/Qwen3-1.7B-Base": 1_720_574_976,
    "Qwen/Qwen3-4B-Instruct-2507": 4_022_468_096,
    "Qwen/Qwen3-8B": 8_190_735_360,
    "Qwen/Qwen3-14B": 14_768_307_200,
    "Qwen/Qwen3-32B": 32_762_123_264,
    "HuggingFaceTB/SmolLM2-135M-Instruct": 134_515_008,
    "meta-llama/Llama-3.2-1B": 1_235_814_400,
    "meta-llama/Llama-3.2-3B-Instruct": 3_212_749_824,
    "meta-llama/Meta-Llama-3.1-8B": 8_030_261_248,
    "meta-llama/Llama-3.3-70B-Instruct": 70_553_706_496,
}
"""Weights as their owners publish them."""


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_public_model_has_as_many_weights_as_its_card_says(name: str) -> None:
    shape = shape_of(ModelConfig(name=name))
    assert shape is not None
    assert shape.weights == PUBLISHED[name]


@pytest.mark.long
def test_every_choice_of_a_model_on_the_hub_has_a_known_shape() -> None:
    names = group_choices()["model"]
    of_hub = [name for name in names if "nano" not in name and "bert" not in name]
    assert len(of_hub) > 10
    assert [name for name in of_hub if not plan(composed("recipe=arithmetic", f"model={name}"), 1)] == []


ARCHITECTURES: dict[str, dict[str, Any]] = {
    "qwen3": {"head_dim": 32, "num_key_value_heads": 2, "tie_word_embeddings": True},
    "llama": {"head_dim": 8, "num_key_value_heads": 1},
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "num_key_value_heads": 2},
    "mixtral": {"num_local_experts": 4, "num_key_value_heads": 2},
    "gemma3_text": {"head_dim": 16, "num_key_value_heads": 1},
    "phi3": {"pad_token_id": 0},
    "gpt2": {},
    "gpt_neox": {},
}


@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_the_weights_and_the_adapters_of_any_saved_model_are_counted(kind: str, tmp_path: Path) -> None:
    config = AutoConfig.for_model(
        kind,
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        **ARCHITECTURES[kind],
    )
    config.save_pretrained(tmp_path)
    shape = shape_of(ModelConfig(name=str(tmp_path)))
    model = AutoModelForCausalLM.from_config(config)
    assert shape is not None
    assert shape.weights == sum(p.numel() for p in model.parameters())
    cached = model(input_ids=torch.tensor([[1, 2, 3]]))
    keys = sum(x.numel() for layer in cached.past_key_values.layers for x in (layer.keys, layer.values)) // 3
    assert shape.key_value_width == keys


@pytest.mark.parametrize("targets", [["all-linear"], ["q_proj", "v_proj"], ["down_proj", "lm_head"]])
def test_adapters_are_counted_as_they_are_built(targets: list[str], tmp_path: Path) -> None:
    model = ModelConfig(name=save_model(tmp_path, qwen()), lora_rank=4, lora_targets=targets)
    policy = load_policy(model, seed=0)
    trained = sum(p.numel() for p in policy.model.parameters() if p.requires_grad)
    assert weights(model) == (trained, sum(p.numel() for p in policy.model.parameters()))


def test_saved_adapters_are_counted_with_the_model_below(tmp_path: Path) -> None:
    base = save_model(tmp_path / "base", qwen())
    policy = load_policy(ModelConfig(name=base, lora_rank=4), seed=0)
    policy.model.save_pretrained(tmp_path / "adapter")  # type: ignore[operator]
    assert weights(ModelConfig(name=str(tmp_path / "adapter"), lora_rank=4)) == weights(
        ModelConfig(name=base, lora_rank=4)
    )


@pytest.mark.parametrize(
    "changes",
    [
        {"model__precision": "bfloat16"},
        {"model__precision": "bfloat16", "model__lora_rank": 2},
        {"model__lora_rank": 2, "model__lora_targets": ["q_proj", "up_proj"]},
        {},
    ],
)
def test_the_copy_that_sampling_reads_is_counted_as_it_is_made(changes: dict[str, Any], tmp_path: Path) -> None:
    config = small_config(model__name=save_model(tmp_path, qwen()), model__kernels="torch", **changes)
    policy = load_policy(config.model, seed=0)
    made = own_bytes(policy) if is_wanted(policy) else 0
    assert plan(config, 1).get("decode_copy", 0) == made


@pytest.mark.parametrize("bits", [None, 4, 8])
@pytest.mark.parametrize(("precision", "size"), [("float32", 4), ("bfloat16", 2)])
def test_on_a_cpu_what_sampling_lays_out_is_counted_in_plain_numbers(
    precision: str, size: int, bits: int | None, tmp_path: Path
) -> None:
    model = ModelConfig(name=save_model(tmp_path, qwen()), precision=precision, lora_rank=2)
    policy, shape = load_policy(model, seed=0), shape_of(model)
    assert shape is not None
    is_beside = precision == "bfloat16"
    read = [
        parameter
        for module_name, module in policy.model.named_modules()
        if isinstance(module, nn.Linear)
        for name, parameter in module.named_parameters(prefix=module_name)
        if "lora_" not in name or is_beside
    ]
    model = replace(model, load_in_4bit=bits == 4, load_in_8bit=bits == 8)
    load = with_fused_layers(workload(replace(Config(), model=model), 1), model, shape, is_gpu=False)
    assert kept_bytes(shape, load)["decode_copy"] == size * sum(parameter.numel() for parameter in read)


def test_the_machines_recipe_fits_eight_gpus_of_80_gb() -> None:
    found = plan(composed("recipe=machines", "model=qwen2.5-14b-instruct"), num_ranks=8)
    assert found["weights"] == pytest.approx(2 * 14.77e9 + 4 * 275e6, rel=0.01)
    assert found["gradients"] == pytest.approx(4 * 275e6, rel=0.01)
    assert found["optimizer"] == pytest.approx(2 * 275e6, rel=0.01)
    assert found["decode_copy"] == pytest.approx(2 * 275e6, rel=0.01)
    kept = sum(found[name] for name in ("weights", "gradients", "optimizer", "decode_copy"))
    assert found["in_all"] == kept + max(found["training"], found["sampling"] - found["gradients"])
    assert 40e9 < found["in_all"] < 0.9 * GB80


@pytest.mark.long
def test_all_weights_of_it_do_not_fit_but_may_be_sharded() -> None:
    whole = ("recipe=machines", "model.lora_rank=0", "optimizer=adamw")
    assert plan(composed(*whole), num_ranks=8)["in_all"] > 2 * GB80
    sharded = plan(composed(*whole, "parallel.strategy=fsdp"), num_ranks=8)
    assert sharded["in_all"] < GB80
    assert sharded["sampling"] > 2 * PUBLISHED["Qwen/Qwen2.5-14B-Instruct"], "weights are whole while a rank samples"


@pytest.mark.long
def test_a_cold_start_takes_what_training_all_weights_takes() -> None:
    """The warm-up trains all weights in full precision, whatever trains afterwards."""
    adapters = ("recipe=machines", "model.lora_rank=16")
    without = plan(composed(*adapters), num_ranks=8)
    whole = composed(*adapters, "cold_start.enabled=true", "cold_start.all_weights=true")
    found = plan(whole, num_ranks=8)
    warm_up = composed(
        *adapters, "model.lora_rank=0", "model.load_in_4bit=false", "optimizer=adamw", "algorithm.kl_coef=0"
    )
    assert whole.warmed_model.lora_rank == 0
    assert found["cold_start"] == plan(warm_up, num_ranks=8)["in_all"]
    assert found["in_all"] == found["cold_start"] > without["in_all"]
    of_adapters = plan(composed(*adapters, "cold_start.enabled=true"), num_ranks=8)
    assert of_adapters["cold_start"] < 0.4 * found["cold_start"]


def test_a_penalty_needs_a_copy_of_all_weights_and_under_adapters_none() -> None:
    whole = ("recipe=gsm8k", "data.path=rows.jsonl", "algorithm.kl_coef=0.1")
    assert plan(composed(*whole), 1)["reference"] == 4 * PUBLISHED["Qwen/Qwen2.5-0.5B-Instruct"]
    assert "reference" not in plan(composed(*whole, "model.lora_rank=8"), 1)


def test_a_reference_on_gpus_of_its_own_takes_nothing_of_the_trainers() -> None:
    config = composed("algorithm.kl_coef=0.1")
    config.source, config.devices.reference = "ray", 1
    assert not holds_reference(config)
    config.devices.reference = 0
    assert holds_reference(config)


@pytest.mark.long
def test_smaller_choices_need_less() -> None:
    usual = plan(composed("recipe=machines"), num_ranks=8)
    smaller = {
        "model.load_in_4bit=true": "weights",
        "model.lora_rank=8": "gradients",
        "model.lora_targets=[q_proj]": "gradients",
        "micro_batch_tokens=4096": "training",
        "engine.cache_bytes=1073741824": "sampling",
    }
    for override, part in smaller.items():
        assert plan(composed("recipe=machines", override), num_ranks=8)[part] < 0.7 * usual[part], override
    assert plan(composed("recipe=machines", "model.gradient_checkpointing=false"), 8)["training"] > usual["training"]


def test_nothing_is_said_of_a_model_whose_shape_is_not_known(tmp_path: Path) -> None:
    assert plan(Config(), num_ranks=1) == {}
    assert shape_of(ModelConfig(name="nobody/knows-it")) is None
    for content in ({"n_embd": 768}, {"model_type": "of_tomorrow"}, {"model_type": "llama", "hidden_size": 0}):
        (tmp_path / "config.json").write_text(json.dumps(content))
        assert shape_of(ModelConfig(name=str(tmp_path))) is None


def test_the_printed_configuration_ends_with_the_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "8")
    monkeypatch.setattr(machine, "NVIDIA", "/dev/null")
    shown = report(composed("recipe=machines", "model=qwen2.5-14b-instruct"))
    for line in ("rollouts_per_step: 512", "groups_per_rank: 1", "rollouts_per_rank: 64", "micro_batches_per_rank: 8"):
        assert f"#   {line}\n" in shown
    assert "#   weights: 15,045,284,864\n#   trained: 275,251,200 (1.83%)\n" in shown
    assert shown.count("# memory of each GPU") == 1
    assert "#   in_all: " in shown.splitlines()[-1]


def test_without_a_gpu_memory_is_the_process_and_the_engines_cache(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(machine, "NVIDIA", "/dev/none")
    config = composed("recipe=ifeval", "model=qwen2.5-coder-0.5b-instruct")
    shown = report(config)
    assert "# memory of each process, estimated" in shown
    assert "GPU" not in shown.partition("# memory")[2]
    load = workload(config, 1)
    shape = shape_of(config.model)
    assert shape is not None
    logits = memory_of(shape, replace(load, num_cached=0))["sampling"]
    assert plan(config, 1)["sampling"] - logits > 3 * CACHE_BYTES  # all rows at their bound
    assert plan(config, 1, is_gpu=False)["sampling"] - logits == CACHE_BYTES


def test_numbers_of_a_long_run_are_told_at_once() -> None:
    found = derive_numbers(
        composed(
            *("num_steps=1000000000", "groups_per_step=2", "group_size=8"),
            "group_size_schedule=[{step: 100, group_size: 4}, {step: 1000, group_size: 2}]",
        )
    )
    assert found["rollouts_in_all"] == 2 * (100 * 8 + 900 * 4 + (10**9 - 1000) * 2)


@pytest.mark.parametrize(
    "words", [("group_size=100000000",), ("groups_per_step=100000000",), ("group_size=2000", "groups_per_step=501")]
)
def test_more_completions_than_can_be_held_are_refused_before_anything_is_made(words: tuple[str, ...]) -> None:
    with pytest.raises(ValueError, match=r"^groups_per_step x group_size must be <= 1,000,000 \(.* memory\), got \d"):
        composed(*words)


def test_a_policy_made_from_nothing_is_not_planned() -> None:
    assert weights(ModelConfig()) is None
    assert nano(seed=0).model.num_parameters() > 0  # type: ignore[operator]


@pytest.mark.parametrize("optimizer", ["adamw", "adamw8bit", "sgd"])
def test_what_is_told_beforehand_and_what_is_checked_are_one_model(optimizer: str, tmp_path: Path) -> None:
    name = save_model(tmp_path, qwen())
    config = small_config(model__name=str(name), optimizer__name=optimizer)
    run = build_run(config, scripted(), PhaseTimer())
    try:
        subject = PreflightContext(run, config)
        values, told = check_memory(subject).values, plan(config, num_ranks=1)
        prompts = config.groups_per_step * len(subject.longest[1]) * cache_shape(run.policy).slot_bytes
    finally:
        run.close()
    assert values["optimizer"] == told["optimizer"]
    assert values["sampling"] == told["sampling"] + prompts


@pytest.mark.long
def test_activations_are_kept_where_they_fit_and_computed_again_where_not(monkeypatch: pytest.MonkeyPatch) -> None:
    def chosen(*overrides: str, free: int, is_gpu: bool = False) -> bool | None:
        composed_ = composed("recipe=machines", "model=qwen2.5-1.5b", "micro_batch_tokens=8192", *overrides)
        return with_checkpointing(composed_, 1, free, is_gpu=is_gpu).model.gradient_checkpointing

    assert chosen(free=GB80) is False
    assert chosen(free=24 * 10**9, is_gpu=True) is True
    assert chosen(free=24 * 10**9) is False, "passes end with groups on a CPU"
    assert chosen("model.lora_rank=16", free=48 * 10**9) is False
    assert chosen("model.gradient_checkpointing=true", free=GB80) is True, "what is said counts"
    assert chosen("model.gradient_checkpointing=false", free=1) is False
    # Through Liger, on a GPU, a third less is kept
    whole = ("micro_batch_tokens=14336", "model.precision=bfloat16", "model.lora_rank=0")
    monkeypatch.setattr(memory, "chooses_liger", lambda kernels, is_half: kernels == "auto" and is_half)
    assert chosen(*whole, free=GB80, is_gpu=True) is False
    assert chosen(*whole, "model.kernels=torch", free=GB80, is_gpu=True) is True
    assert with_checkpointing(Config(), 1, 1, is_gpu=False).model.gradient_checkpointing is False, (
        "nothing is known of this shape"
    )
