"""Scripts as TRL's users write them run with one import changed, offline, on tiny models."""

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM, TrainerCallback

from benchmarks.checks.architectures import save
from covey.trl import GRPOConfig, GRPOTrainer

from ..support.builders import saved_classifier, saved_model
from ..support.small import equal

SCRIPTS = Path(__file__).parent / "scripts"
THEIRS, OURS = "from trl import GRPOConfig, GRPOTrainer", "from covey.trl import GRPOConfig, GRPOTrainer"
TRAINED = (
    "quick_start",
    "custom_reward",
    "conversational",
    "several_rewards",
    "lora",
    "callbacks",
    "reward_model",
    "environment",
)

STEPS = {"custom_reward": 6, "callbacks": 3, "reward_model": 1, "several_rewards": 3}
"""Optimiser steps of the scripts that make others than two."""


def run(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: str | None = None) -> dict[str, Any]:
    """The names a script leaves, its one import changed."""
    source = (SCRIPTS / f"{name}.py").read_text()
    assert source.count(THEIRS) == 1
    monkeypatch.chdir(tmp_path)
    scope: dict[str, Any] = {"__name__": "__main__", "MODEL": model or saved_model(tmp_path / "policy", "llama")}
    if "JUDGE" in source:
        scope["JUDGE"] = saved_classifier(tmp_path / "judge", num_labels=1)
    exec(compile(source.replace(THEIRS, OURS), f"{name}.py", "exec"), scope)
    return scope


def history(scope: dict[str, Any]) -> list[dict[str, float]]:
    return [row for row in scope["trainer"].state.log_history if "reward" in row]


def test_a_run_that_the_preflight_refuses_names_the_field_that_turns_it_off(tmp_path: Path) -> None:
    def trainer(**changed: Any) -> GRPOTrainer:
        args = GRPOConfig(
            output_dir=str(tmp_path / "out"),
            bf16=False,
            max_steps=1,
            max_completion_length=4,
            num_generations=2,
            **changed,
        )
        model = saved_model(tmp_path / "policy", "llama")
        return GRPOTrainer(model, lambda completions, **_: [0.0 for _ in completions], args, [{"prompt": "a"}] * 8)

    impossible = {"preflight_logprob_tolerance": 1e-12}
    with pytest.raises(ValueError, match=r"^preflight: .*in GRPOConfig: .*preflight for preflight.enabled"):
        trainer(**impossible).train()
    assert trainer(preflight=False).train().global_step == 1


@pytest.mark.long
@pytest.mark.parametrize(
    ("architecture", "script"),
    [
        *((architecture, "quick_start") for architecture in ("qwen3_5_text", "nemotron_h", "lfm2", "llama4_text")),
        *((architecture, "lora") for architecture in ("qwen3_5_text", "lfm2")),  # peft refuses the others' all-linear
    ],
)
def test_a_script_trains_models_of_other_layers(
    architecture: str, script: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(architecture, str(tmp_path / "hybrid"))
    scope = run(script, tmp_path, monkeypatch, str(tmp_path / "hybrid"))
    assert scope["trainer"].state.global_step == 2


@pytest.mark.long
@pytest.mark.parametrize("name", TRAINED)
def test_a_script_trains_with_one_import_changed(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scope = run(name, tmp_path, monkeypatch)
    trainer = scope["trainer"]
    assert trainer.state.global_step == {
        "custom_reward": 6,
        "callbacks": 3,
        "reward_model": 1,
        "several_rewards": 3,
    }.get(name, 2)
    (check,) = [CHECKS.get(name, lambda scope, folder: None)]
    check(scope, tmp_path)


FILES = ("train_results", "eval_results", "all_results", "trainer_state")
"""What `save_metrics` and `save_state` write."""


def check_custom_reward(scope: dict[str, Any], folder: Path) -> None:
    assert (folder / "custom" / "final" / "model.safetensors").is_file()
    evaluated = [row["step"] for row in scope["trainer"].state.log_history if "eval_reward" in row]
    assert evaluated == [0, 3, 6]
    assert [row["step"] for row in history(scope)] == [2, 4, 6]
    assert scope["result"].global_step == 6
    written = {name: json.loads((folder / "custom" / f"{name}.json").read_text()) for name in FILES}
    assert written["train_results"] == scope["result"].metrics
    assert written["all_results"] == written["train_results"] | written["eval_results"]
    assert written["trainer_state"]["global_step"] == 6
    assert written["trainer_state"]["log_history"] == scope["trainer"].state.log_history


def check_several_rewards(scope: dict[str, Any], folder: Path) -> None:
    """What TRL's own script does once it has trained."""
    trainer, pushed = scope["trainer"], []

    def push(name: str, **keywords: Any) -> None:
        pushed.append((name, keywords))

    trainer.model.push_to_hub = trainer.processing_class.push_to_hub = push
    trainer.accelerator.print("trained")
    trainer.accelerator.wait_for_everyone()
    assert trainer.accelerator.is_local_main_process
    assert trainer.accelerator.unwrap_model(trainer.model) is trainer.model
    trainer.create_model_card(dataset_name="trl-lib/tldr", tags=["grpo"])
    trainer.push_to_hub(dataset_name="trl-lib/tldr", tags=["grpo"])
    assert pushed == [(trainer.hub_model_id, {"commit_message": "End of training"})] * 2
    measured = trainer.evaluate(list(scope["trainer"]._splits["train"])[:3], metric_key_prefix="test")
    assert sorted(measured) == ["test_reward"]  # its rewards do not say what is right
    trainer.end()


def check_lora(scope: dict[str, Any], folder: Path) -> None:
    assert (folder / "lora" / "adapter" / "adapter_model.safetensors").is_file()
    trained = [name for name, weight in scope["trainer"].model.named_parameters() if weight.requires_grad]
    assert trained
    assert all(".lora_" in name for name in trained)


def check_reward_model(scope: dict[str, Any], folder: Path) -> None:
    (row,) = history(scope)
    by_name, in_memory = row["rewards/judge/mean"], row["rewards/judge_2/mean"]
    assert by_name == pytest.approx(in_memory, abs=1e-5)


def check_callbacks(scope: dict[str, Any], folder: Path) -> None:
    kept = [path.name for path in (folder / "callbacks" / "checkpoints").iterdir()]
    assert kept == ["step-000003"]


def check_environment(scope: dict[str, Any], folder: Path) -> None:
    first, last = history(scope)
    assert first["rewards/Shop/mean"] == last["rewards/Shop/mean"] == 0.5
    assert first["reward"] == pytest.approx(first["rewards/length/mean"] + 0.5)
    completions, shops, things = scope["SEEN"][-1]
    assert (len(completions), shops, len(things)) == (1, ["Shop"], 1)
    assert completions[0][-1]["role"] == "assistant"
    config = (folder / "shop" / "config.yaml").read_text()
    assert "max_turns: 4" in config
    made = scope["trainer"]._make_environment(scope["trainer"].config)
    names = [schema["function"]["name"] for schema in made.tool_schemas(made.prompts("train")[0])]
    assert names == ["multiply", "buy"]


@pytest.mark.long
def test_the_environment_supplies_prompts_where_there_are_no_rows(tmp_path: Path) -> None:
    class Asks:
        def reset(self, **row: Any) -> str:
            return "What is 2 + 2?"

        def get_reward(self) -> float:
            return 1.0

    args = GRPOConfig(
        output_dir=str(tmp_path / "run"),
        max_steps=1,
        per_device_train_batch_size=4,
        num_generations=4,
        max_completion_length=4,
        bf16=False,
        report_to="none",
        logging_steps=1,
    )
    trainer = GRPOTrainer(saved_model(tmp_path / "policy", "llama"), args=args, environment_factory=Asks)
    trainer.train()
    assert [row["reward"] for row in trainer.state.log_history if "reward" in row] == [1.0]
    with pytest.raises(ValueError, match="max_steps must say how long"):
        GRPOTrainer(
            trainer.model,
            args=GRPOConfig(bf16=False),
            environment_factory=Asks,
            processing_class=trainer.processing_class,
        )


CHECKS = {
    "several_rewards": check_several_rewards,
    "environment": check_environment,
    "custom_reward": check_custom_reward,
    "lora": check_lora,
    "reward_model": check_reward_model,
    "callbacks": check_callbacks,
}


def test_the_flags_of_vllm_become_the_engine_and_the_correction(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = run("vllm_flags", tmp_path, monkeypatch)["trainer"].config
    assert (config.engine.name, config.engine.url) == ("vllm", "http://localhost:8000")
    found = config.algorithm
    assert (found.correction, found.correction_level, found.correction_max) == ("truncate", "token", 2.0)


def test_a_stopped_script_resumes_to_the_same_weights_as_one_that_was_not_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class StopAfterTwo(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **keywords: Any) -> None:
            control.should_training_stop = state.global_step >= 2

    name = saved_model(tmp_path / "policy", "llama")

    def trainer(folder: str, *callbacks: Any) -> GRPOTrainer:
        batch: dict[str, Any] = {"num_generations": 4, "per_device_train_batch_size": 4, "max_completion_length": 6}
        batch |= {"max_steps": 4, "bf16": False, "learning_rate": 1e-3, "disable_tqdm": True}
        args = GRPOConfig(str(tmp_path / folder), **batch)
        rows = [{"prompt": f"say {number}:"} for number in range(8)]
        return GRPOTrainer(name, lengths, args, train_dataset=rows, callbacks=list(callbacks))

    whole, stopped, resumed = trainer("whole"), trainer("run", StopAfterTwo), trainer("run")
    with pytest.raises(ValueError, match=r"^resume_from_checkpoint=True: no run in .*run has a checkpoint$"):
        resumed.train(resume_from_checkpoint=True)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.yaml").write_text("seed: 0\n")  # of a run that got nowhere: the next one is run-2
    assert [whole.train().global_step, stopped.train().global_step] == [4, 2]
    assert resumed.train(resume_from_checkpoint=True).global_step == 4
    assert (tmp_path / "run-2" / "checkpoints" / "step-000004").is_dir()
    for found in (whole, resumed):
        found.save_model(str(tmp_path / "saved"))
        assert (tmp_path / "saved" / "config.json").is_file()
    assert equal(dict(resumed.model.state_dict()), dict(whole.model.state_dict()))
    assert not equal(dict(stopped.model.state_dict()), dict(whole.model.state_dict()))


def test_a_ref_model_is_what_beta_compares_with_and_needs_a_beta(tmp_path: Path) -> None:
    name, other = saved_model(tmp_path / "policy", "llama"), saved_model(tmp_path / "other", "qwen2")

    def trainer(beta: float, given: Any) -> GRPOTrainer:
        batch: dict[str, Any] = {"num_generations": 4, "per_device_train_batch_size": 4, "max_completion_length": 6}
        batch |= {"max_steps": 1, "bf16": False, "disable_tqdm": True, "beta": beta, "logging_steps": 1}
        args = GRPOConfig(str(tmp_path / f"run {beta} {type(given).__name__}"), **batch)
        rows = [{"prompt": f"say {number}:"} for number in range(8)]
        return GRPOTrainer(name, lengths, args, train_dataset=rows, ref_model=given)

    model = AutoModelForCausalLM.from_pretrained(other)
    by_name, in_memory, usual = trainer(0.1, other), trainer(0.1, model), trainer(0.1, None)
    for found in (by_name, in_memory, usual):
        found.train()
    found_kl = [found.state.log_history[0]["kl"] for found in (by_name, in_memory, usual)]
    assert found_kl[0] == found_kl[1] > 0.1
    assert found_kl[2] == pytest.approx(0.0, abs=1e-6)
    with pytest.raises(ValueError, match=r"^ref_model needs beta > 0"):
        trainer(0.0, other)


def test_the_model_is_loaded_once_before_training(tmp_path: Path) -> None:
    args = GRPOConfig(str(tmp_path / "run"), num_generations=4, per_device_train_batch_size=4, bf16=False)
    rows = [{"prompt": f"say {number}:"} for number in range(8)]
    trainer = GRPOTrainer(saved_model(tmp_path / "policy", "llama"), lengths, args, train_dataset=rows)
    assert trainer.model is trainer.model


def lengths(completions: list[str], **columns: Any) -> list[float]:
    return [len(text.encode()) % 5 / 4 for text in completions]
