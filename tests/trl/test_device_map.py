"""`device_map`: on the one device of a process "auto" is that device, and a model is never split without a word."""

from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM

from covey.cli.command_line import arrange
from covey.policy.models.loading import policy_in_memory
from covey.policy.models.nano import nano_tokenizer
from covey.policy.settings import ModelConfig
from covey.trl import GRPOConfig, GRPOTrainer
from covey_trl.device_map import device_of_map
from covey_trl.translation.command import as_lines, read_file, translate

from ..support.builders import saved_model


def trainer(folder: Path, keywords: dict[str, Any]) -> GRPOTrainer:
    name = saved_model(folder / "policy", "llama")
    batch: dict[str, Any] = {"num_generations": 4, "per_device_train_batch_size": 4, "max_completion_length": 4}
    batch |= {"max_steps": 1, "bf16": False, "disable_tqdm": True, "model_init_kwargs": keywords}
    args = GRPOConfig(str(folder / "run"), **batch)
    rows = [{"prompt": f"say {number}:"} for number in range(8)]
    return GRPOTrainer(name, lambda completions, **_: [float(len(c)) for c in completions], args, rows)


@pytest.mark.long
def test_a_trl_script_with_device_map_auto_trains_on_the_device_there_is(tmp_path: Path) -> None:
    found = trainer(tmp_path, {"device_map": "auto"})
    assert found.config.model.device == "auto"
    assert found.train().global_step == 1
    assert found.model.device.type == found._result.policy.device.type  # type: ignore[union-attr]


@pytest.mark.parametrize("value", ["balanced", "sequential", {"": 0, "lm_head": 1}, {"model": "cpu", "head": "disk"}])
def test_a_device_map_that_splits_a_model_is_refused_by_name_with_its_counterpart(value: Any, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"^model_init_kwargs: device_map=.* has no counterpart: .*strategy=fsdp"):
        trainer(tmp_path, {"device_map": value})


@pytest.mark.parametrize(
    ("value", "rank", "device"),
    [
        ("auto", None, "auto"),
        ("auto", "1", "auto"),
        ("cpu", None, "cpu"),
        ("cuda", None, "cuda"),
        (1, None, "cuda:1"),
        ({"": 0}, None, "cuda:0"),
        ({"": "cuda:1"}, None, "cuda:1"),
        ({"": 1}, "1", "auto"),
        ({"": "auto"}, None, "auto"),
        ({"model": "cuda:0", "lm_head": 0}, None, "cuda:0"),
    ],
)
def test_a_device_map_of_one_device_is_that_device(
    value: Any, rank: str | None, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    if rank is not None:
        monkeypatch.setenv("LOCAL_RANK", rank)
    assert device_of_map(value) == device


def test_the_gpu_of_another_rank_is_named_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert device_of_map({"": 0}) == "cuda:0"


@pytest.mark.parametrize(
    ("typed", "line"),
    [
        ("device_map=auto", "device_map=auto is model.device=auto here (a model is on one device"),
        ("device_map=balanced", "device_map=balanced is no setting here (a model is on one device"),
    ],
)
def test_covey_train_answers_a_device_map(typed: str, line: str) -> None:
    with pytest.raises(ValueError) as caught:
        arrange("train", ["recipe=arithmetic", typed])
    assert line in str(caught.value)


def test_covey_translate_knows_it_as_a_flag_and_among_the_keywords_of_a_file(tmp_path: Path) -> None:
    assert "model.device=cpu" in as_lines(translate(["trl", "grpo", "--device_map", "cpu"]))[0]
    file = tmp_path / "trl.yaml"
    file.write_text("model_name_or_path: a/b\nnum_generations: 8\nbeta: 0.1\nmax_steps: 3\n")
    with file.open("a") as more:
        more.write("model_init_kwargs:\n  device_map: auto\n  torch_dtype: bfloat16\n  load_in_8bit: true\n")
    command, *_ = as_lines(translate(read_file(file)))
    for word in ("model.device=auto", "model.precision=bfloat16", "model.load_in_8bit=true"):
        assert f"  {word}" in command


def test_a_model_in_memory_that_is_split_over_devices_is_refused(tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(saved_model(tmp_path, "llama"))
    tokenizer = nano_tokenizer()
    model.hf_device_map = {"": "cpu"}
    assert policy_in_memory(model, tokenizer, ModelConfig(), seed=0).device.type == "cpu"
    model.hf_device_map = {"model.embed_tokens": 0, "model.layers.0": 1}
    with pytest.raises(
        ValueError, match=r"^the model in memory is split over 0, 1 \(device_map\): one process has one"
    ):
        policy_in_memory(model, tokenizer, ModelConfig(), seed=0)
