"""covey.train and covey.build: objects and names in, a Result out."""

import importlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset, DatasetDict
from peft import LoraConfig, get_peft_model
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen2Config

import covey
from benchmarks.checks.architectures import save
from covey.algorithm.settings import AlgorithmConfig
from covey.api.request import Arguments
from covey.api.settings import full_name
from covey.api.training import make_resume_request
from covey.config.compose import to_yaml
from covey.config.schema import Config
from covey_preflight import preflight
from covey_preflight.subject import Check

from ..support.byte_rewards import by_bytes
from ..support.processes import as_job_steps
from ..support.small import TOKENIZER, equal, saved_weights

ROOT = Path(__file__).resolve().parents[2]
ROWS = [{"prompt": f"say {index}:", "letter": "e"} for index in range(30)]
SMALL: dict[str, Any] = {
    "num_steps": 2,
    "groups_per_step": 2,
    "group_size": 4,
    "max_tokens": 4,
    "lr": 1e-2,
    "num_samples": 2,
    "k": [1, 2],
    "evaluation": {"num_prompts": 2},
    "progress": False,
    "preflight": {"enabled": False},
}
NANO: dict[str, Any] = {**SMALL, "nano_hidden_size": 16, "nano_num_layers": 1, "nano_num_heads": 2}


def model_in_memory() -> PreTrainedModel:
    torch.manual_seed(0)
    shape = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = Qwen2Config(
        vocab_size=len(TOKENIZER),
        num_key_value_heads=2,
        max_position_embeddings=128,
        eos_token_id=TOKENIZER.eos_token_id,
        bos_token_id=None,
        pad_token_id=TOKENIZER.pad_token_id,
        **shape,
    )
    return AutoModelForCausalLM.from_config(config)


def weights_of(model: torch.nn.Module) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


class Mine:
    """The two methods that make an object an environment."""

    def prompts(self, split: str) -> list[covey.Prompt]:
        return [covey.Prompt(f"{split}-{index}", "mine", f"{split} {index}:", {}) for index in range(3)]

    async def score(self, prompt: covey.Prompt, completions: Sequence[str]) -> list[covey.Reward]:
        return [covey.Reward(value) for value in by_bytes(completions)]


# ------------------------------------------------------------------------------------------------ what is trained


@pytest.mark.long
def test_a_name_a_function_and_rows_give_a_result(tmp_path: Path) -> None:
    result = covey.train("nano", by_bytes, ROWS, folder=tmp_path / "run", **NANO)
    assert (result.status, result.folder) == ("completed", tmp_path / "run")
    for evaluation in (result.before, result.after):
        assert evaluation is not None
        assert evaluation.accuracy is None or evaluation.accuracy.value is None  # no reward says what is right
        assert evaluation.reward_mean is not None
    assert list(result.metrics["step"]) == [row["step"] for row in result.rows] == [1, 2]
    assert equal(weights_of(result.model), saved_weights(tmp_path / "run"))
    assert result.summary["steps"] == 2
    assert "reward/by_bytes" in result.rows[0]


@pytest.mark.long
@pytest.mark.parametrize("form", ["rows", "file", "module"])
def test_a_teacher_alone_needs_no_rewards(form: str, tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    data = path if form == "file" else ROWS
    shown = {"algorithm": {"teacher_shows": ["gold"], "gold_column": "letter"}}
    policy, other = model_in_memory(), model_in_memory()
    torch.nn.init.normal_(other.lm_head.weight)
    chosen: dict[str, Any] = {"teacher": other} if form == "module" else {"teacher": "self"} | shown
    before = weights_of(policy)
    result = covey.train(policy, data=data, tokenizer=TOKENIZER, folder=tmp_path / "run", **SMALL, **chosen)
    steps = [json.loads(line) for line in (result.folder / "metrics.jsonl").read_text().splitlines()]
    kl = [row["teacher/kl"] for row in steps if "teacher/kl" in row]
    assert len(kl) == 2
    assert kl[0] != 0.0
    assert not any(name.startswith("reward/") for row in steps for name in row)
    assert {row["sampled_reward_mean"] for row in steps if row["kind"] == "train"} == {None}
    rows = [json.loads(line) for line in (result.folder / "rollouts.jsonl").read_text().splitlines()]
    assert {row["reward"] for row in rows} == {None}
    assert result.before is None or result.before.accuracy is None
    assert not all(torch.equal(before[name], value) for name, value in weights_of(policy).items())


@pytest.mark.long
def test_a_model_in_memory_is_trained_in_place_and_attends_as_before_afterwards(tmp_path: Path) -> None:
    model = model_in_memory()
    before = weights_of(model)
    result = covey.train(model, by_bytes, ROWS, tokenizer=TOKENIZER, folder=tmp_path / "run", **SMALL)
    assert result.model is model
    assert not equal(weights_of(model), before)
    assert model.config._attn_implementation == "sdpa"
    saved = AutoModelForCausalLM.from_pretrained(result.save(tmp_path / "saved"))
    assert equal(dict(saved.state_dict()), weights_of(model))


@pytest.mark.long
@pytest.mark.parametrize(("architecture", "own"), [("gemma2", "eager"), ("llama", "sdpa")])
def test_a_folder_attends_as_transformers_would_load_it_after_training(
    architecture: str, own: str, tmp_path: Path
) -> None:
    save(architecture, str(tmp_path / "given"))
    result = covey.train(str(tmp_path / "given"), by_bytes, ROWS, folder=tmp_path / "run", **SMALL)
    assert result.model.config._attn_implementation == own
    assert len(result.sample(["say 1:"], n=2)[0]) == 2


@pytest.mark.long
def test_adapters_of_peft_in_memory_are_trained_and_nothing_else(tmp_path: Path) -> None:
    peft = importlib.import_module("peft")
    model = peft.get_peft_model(model_in_memory(), peft.LoraConfig(r=2, target_modules="all-linear"))
    before = weights_of(model)
    result = covey.train(model, by_bytes, ROWS, tokenizer=TOKENIZER, folder=tmp_path / "run", **SMALL)
    changed = [name for name, tensor in weights_of(result.model).items() if not torch.equal(tensor, before[name])]
    assert changed
    assert all(".lora_" in name for name in changed)


@pytest.mark.parametrize(
    "data",
    [
        Dataset.from_list(ROWS),
        {"train": ROWS[:8], "test": ROWS[8:]},
        DatasetDict({"train": Dataset.from_list(ROWS[:8]), "validation": Dataset.from_list(ROWS[8:])}),
        (row for row in ROWS),
    ],
    ids=["dataset", "splits", "validation", "generator"],
)
def test_rows_come_as_any_object_that_holds_rows(data: Any, tmp_path: Path) -> None:
    settings = NANO | {"evaluation": {"num_prompts": 100}}
    result = covey.train("nano", by_bytes, data, folder=tmp_path / "run", **settings)
    assert result.before is not None
    assert result.before.num_prompts == (22 if isinstance(data, dict) else 3)


def test_an_object_with_two_methods_is_an_environment(tmp_path: Path) -> None:
    result = covey.train("nano", data=Mine(), folder=tmp_path / "run", **NANO)
    assert result.evaluate(num_prompts=1).num_prompts == 1
    assert result.evaluate(Mine(), num_prompts=3).num_prompts == 3


@pytest.mark.long
def test_several_rewards_are_weighed_and_may_be_named(tmp_path: Path) -> None:
    rewards = [by_bytes, "think_format", {"function": "repetition", "args": {"ngram": 2}}]
    weights = [1.0, 0.5, 0.1]
    result = covey.train("nano", rewards, ROWS, reward_weights=weights, folder=tmp_path / "run", **NANO)
    row = result.rows[0]
    parts = [row[f"reward/{name}"] for name in ("by_bytes", "think_format", "repetition")]
    wanted = sum(weight * part for weight, part in zip(weights, parts, strict=True))
    assert row["sampled_reward_mean"] == pytest.approx(wanted)


@pytest.mark.long
def test_a_recipe_and_presets_are_named_as_on_the_command_line(tmp_path: Path) -> None:
    cold = {"cold_start": {"enabled": False}}
    result = covey.train(recipe="arithmetic", algorithm="dr_grpo", folder=tmp_path / "run", **NANO | cold)
    assert result.config.environment.name == "arithmetic"
    assert result.config.optimizer.betas == [0.9, 0.99]
    assert result.config.algorithm.advantage == "group_center"


@pytest.mark.long
def test_settings_of_a_config_are_left_as_they_are(tmp_path: Path) -> None:
    config = Config(num_steps=1)
    result = covey.train("nano", by_bytes, ROWS, config=config, folder=tmp_path / "run", **NANO | {"num_steps": 2})
    assert (config.num_steps, result.config.num_steps) == (1, 2)


# ------------------------------------------------------------------------------------------------ what is refused


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({"learning_rate": 1.0}, "unknown setting learning_rate; did you mean optimizer.lr?"),
        ({"num_step": 1}, "unknown setting num_step; did you mean num_steps or cold_start.num_steps?"),
        ({"optimizer": {"learning_rate": 1.0}}, "unknown setting optimizer.learning_rate; did you mean optimizer.lr?"),
        ({"enabled": True}, "setting enabled is one of several: write cold_start__enabled or preflight__enabled"),
        ({"algorithm": "dappo"}, "algorithm must be one of"),
        ({"environment": "gsm8k"}, "environment=gsm8k has rewards of its own: leave rewards and data out"),
        ({"num_steps": "10"}, "num_steps must be an integer, got '10'"),
        ({"source": "ray"}, "source=ray works in other processes, which cannot have rewards, rows or an environment"),
        ({"tokenizer": TOKENIZER}, "tokenizer=... goes with a model in memory"),
        ({"algorithm": "dapo", "config": Config()}, "algorithm=dapo is a preset"),
    ],
)
def test_what_has_no_meaning_is_refused_in_one_line(keywords: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError) as refused:
        covey.train("nano", by_bytes, ROWS, folder=tmp_path / "run", **keywords)
    assert message in str(refused.value)
    assert "\n" not in str(refused.value)
    assert not (tmp_path / "run").exists()


def test_a_model_in_memory_needs_its_tokenizer_and_no_cold_start(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="a model in memory needs tokenizer"):
        covey.train(model_in_memory(), by_bytes, ROWS)
    with pytest.raises(ValueError, match=r"cold_start.enabled=true needs a model by name or folder, got one in memory"):
        covey.train(model_in_memory(), by_bytes, ROWS, tokenizer=TOKENIZER, cold_start__enabled=True)


def test_the_last_part_of_a_name_is_enough_where_it_is_clear() -> None:
    names = ("lr", "optimizer.lr", "num_steps", "max_tokens", "lora_rank", "num_prompts", "kl_coef", "loss_options")
    assert [full_name(Config(), name) for name in names] == [
        *("optimizer.lr", "optimizer.lr", "num_steps", "sampling.max_tokens", "model.lora_rank"),
        *("evaluation.num_prompts", "algorithm.kl_coef", "algorithm.loss_options"),
    ]


# ------------------------------------------------------------------------------------------------ resuming


def test_a_run_of_objects_resumes_to_the_same_weights(tmp_path: Path) -> None:
    def half(step: int, metrics: dict[str, float | None]) -> None:
        if step == 2:
            raise covey.StopTraining("half is done")

    given = {"tokenizer": TOKENIZER, **SMALL | {"num_steps": 4, "kl_coef": 0.1}}
    whole = covey.train(model_in_memory(), by_bytes, ROWS, folder=tmp_path / "whole", **given)
    begun = covey.train(model_in_memory(), by_bytes, ROWS, folder=tmp_path / "run", callbacks=[half], **given)
    assert (len(begun.rows), begun.status) == (2, "completed")
    trained = r"the reference of this run was <in memory: Qwen2ForCausalLM> with weights .* would make it <in memory: "
    with pytest.raises(ValueError, match=trained):
        covey.train(begun.model, by_bytes, ROWS, tokenizer=TOKENIZER, resume=tmp_path / "run")
    ended = covey.train(model_in_memory(), by_bytes, ROWS, tokenizer=TOKENIZER, resume=tmp_path / "run")
    assert len(ended.rows) == 4
    assert equal(weights_of(ended.model), weights_of(whole.model))
    with pytest.raises(ValueError, match=r"optimizer.lr=1.0 differs from optimizer.lr=0.01"):
        covey.train(model_in_memory(), by_bytes, ROWS, tokenizer=TOKENIZER, resume=tmp_path / "run", lr=1.0)


@pytest.mark.long
def test_what_a_resume_is_told_wrongly_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match=r"^pass either folder= or resume=, not both, got folder=other and resume=run$"
    ):
        covey.train(resume="run", folder="other")
    covey.train("nano", by_bytes, ROWS, folder=tmp_path, **SMALL)
    again: dict[str, Any] = {"rewards": by_bytes, "data": ROWS, "resume": tmp_path}
    with pytest.raises(ValueError, match=r"^optimizer\.lr=1\.0 differs"):
        covey.train(**again, lr=1.0, num_steps=3, resume_changes="num_steps")
    with pytest.raises(ValueError, match=r"000002 does not fit the policy: \[.model.embed.* are of another size$"):
        covey.train(**again, num_steps=3, model__nano_hidden_size=32, resume_changes=["num_steps", "model"])


def test_a_run_of_samplers_that_was_begun_without_a_correction_is_resumed_without_one(tmp_path: Path) -> None:
    begun = Config(source="ray", max_staleness=1, algorithm=AlgorithmConfig(loss="sapo"))
    (tmp_path / "config.yaml").write_text(to_yaml(begun))
    assert make_resume_request(Arguments(), tmp_path, None).config.algorithm.correction == "none"


def test_the_command_says_that_it_cannot_resume_objects_and_what_can(tmp_path: Path) -> None:
    covey.train(model_in_memory(), by_bytes, ROWS, tokenizer=TOKENIZER, folder=tmp_path / "run", **SMALL)
    words = ["covey", "train", f"resume={tmp_path / 'run'}", "num_steps=3", "resume_changes=[num_steps]"]
    done = subprocess.run([sys.executable, "-m", *words], capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 2
    assert "covey.train(model, ..., resume=FOLDER) resumes the run" in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


def test_what_runs_here_alone_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    keywords = NANO | {"progress": True}
    covey.train("nano", lambda completions, **columns: by_bytes(completions), ROWS, folder=tmp_path, **keywords)
    said = capsys.readouterr().out.splitlines()
    assert said[0].startswith("rewards in this process: <lambda> (worker processes")
    resumes = "covey.train(...) with the same objects and resume=FOLDER resumes the run"
    assert said[1] == f"of this program alone: the rows, <lambda>; {resumes}"


# ------------------------------------------------------------------------------------------------ callbacks


class Noting(covey.Callback):
    """Notes what it hears, and adds to the metrics."""

    def __init__(self) -> None:
        self.heard: list[tuple[str, int]] = []

    def on_start(self, run: Any, folder: Path) -> None:
        self.heard.append(("start", len(run.test_prompts)))

    def on_step(self, step: int, metrics: dict[str, float | None]) -> None:
        metrics["mine/twice"] = 2.0 * step
        self.heard.append(("step", step))

    def on_evaluation(self, step: int, evaluation: covey.Evaluation) -> None:
        self.heard.append(("evaluation", step))
        if step == 2:
            raise covey.StopTraining("enough")


@pytest.mark.long
def test_callbacks_hear_of_the_run_add_metrics_and_stop_it(tmp_path: Path) -> None:
    noting = Noting()
    keywords = NANO | {"num_steps": 9, "evaluation": {"num_prompts": 2, "every": 1}}
    result = covey.train("nano", by_bytes, ROWS, folder=tmp_path, callbacks=[noting], **keywords)
    evaluated = [("evaluation", 0), ("step", 1), ("evaluation", 1), ("step", 2), ("evaluation", 2)]
    assert noting.heard == [("start", 2), *evaluated]
    assert [row["mine/twice"] for row in result.rows] == [2.0, 4.0]
    assert (tmp_path / "checkpoints" / "step-000002").is_dir()


@pytest.mark.parametrize("name", ["run", "."])
def test_a_run_that_is_refused_before_it_did_anything_leaves_the_folders_there_were(name: str, tmp_path: Path) -> None:
    for folder in (tmp_path / name, tmp_path / name):
        with pytest.raises(ValueError, match="no column 'prompt'"):
            covey.train("nano", by_bytes, [{"text": "say 3:"}, {"text": "say 4:"}], folder=folder, **NANO)
        assert list(tmp_path.iterdir()) == []


def test_a_run_whose_reward_function_is_refused_leaves_no_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failed = Check(False, "none could be scored", "", name="reward functions")
    monkeypatch.setattr(preflight, "run_checks", lambda subject, say, after_failure: [failed])
    with pytest.raises(ValueError, match="none could be scored"):
        covey.train("nano", by_bytes, ROWS, folder=tmp_path / "run", **NANO | {"preflight": {"enabled": True}})
    assert list(tmp_path.iterdir()) == []


@pytest.mark.long
def test_a_stop_in_the_evaluation_before_the_first_step_trains_none(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    class Enough(covey.Callback):
        def on_evaluation(self, step: int, evaluation: covey.Evaluation) -> None:
            raise covey.StopTraining("good as it is")

    result = covey.train("nano", by_bytes, ROWS, folder=tmp_path, callbacks=Enough(), **NANO)
    assert result.rows == []
    assert len(result.evaluations) == 1
    assert "stopped after step 0: good as it is\n" in capsys.readouterr().out


class Killed(covey.Callback):
    """Ends the process in the evaluation after step 2."""

    def on_evaluation(self, step: int, evaluation: covey.Evaluation) -> None:
        if step == 2:
            raise RuntimeError("killed")


@pytest.mark.long
def test_a_requested_stop_survives_a_kill(
    tmp_path: Path,
) -> None:
    def enough(step: int, metrics: dict[str, float | None]) -> None:
        if step == 2:
            raise covey.StopTraining("enough")

    keywords = NANO | {"num_steps": 4, "evaluation": {"num_prompts": 2}, "output__save_every": 1}
    with pytest.raises(RuntimeError, match="killed"):
        covey.train("nano", by_bytes, ROWS, folder=tmp_path, callbacks=[enough, Killed()], **keywords)
    result = covey.train(rewards=by_bytes, data=ROWS, resume=tmp_path, callbacks=enough)
    assert [row["step"] for row in result.rows] == [1, 2]


@pytest.mark.parametrize("asked", [{"teacher": "self", "teacher_shows": ["gold"]}, {"sft_coef": 0.1}])
def test_unknown_right_answers_are_refused(asked: dict[str, object], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"set algorithm\.gold_column to their column"):
        covey.train("nano", by_bytes, ROWS, folder=tmp_path / "run", algorithm=asked, num_steps=1)


@pytest.mark.long
def test_a_killed_run_with_a_moving_teacher_resumes_to_the_same_weights(tmp_path: Path) -> None:
    taught = {"teacher": "self", "algorithm": {"teacher_shows": ["gold"], "gold_column": "letter",
              "teacher_weights": "ema", "teacher_rate": 0.5}}  # fmt: skip
    given = NANO | taught | {"num_steps": 4, "evaluation": {"num_prompts": 2, "every": 2}, "output__save_every": 1}
    whole = covey.train("nano", data=ROWS, folder=tmp_path / "whole", **given)
    with pytest.raises(RuntimeError, match="killed"):
        covey.train("nano", data=ROWS, folder=tmp_path / "run", callbacks=Killed(), **given)
    ended = covey.train(data=ROWS, resume=tmp_path / "run", teacher="self")
    assert [row["teacher/kl"] for row in ended.rows] == [row["teacher/kl"] for row in whole.rows]
    assert equal(weights_of(ended.model), weights_of(whole.model))


@pytest.mark.long
@pytest.mark.parametrize("engine", ["native", "transformers"])
def test_a_folder_of_adapters_teaches_its_own_base(engine: str, tmp_path: Path) -> None:
    base, adapter = tmp_path / "base", tmp_path / "adapter"
    model_in_memory().save_pretrained(base)
    TOKENIZER.save_pretrained(base)
    adapters = LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    get_peft_model(AutoModelForCausalLM.from_pretrained(base), adapters).save_pretrained(adapter)
    given = SMALL | {"engine__name": engine, "lora_rank": 2}
    found = covey.train(base, data=ROWS, folder=tmp_path / "run", teacher=adapter, **given)
    assert all(abs(float(row["teacher/kl"] or 0.0)) > 1e-4 for row in found.rows)


# ------------------------------------------------------------------------------------------------ the result


@pytest.mark.long
def test_a_result_samples_texts_and_conversations_and_shows_itself(tmp_path: Path) -> None:
    result = covey.train("nano", by_bytes, ROWS, folder=tmp_path / "run", **NANO)
    assert len(result.sample("say 3:", n=3)) == 3
    assert [type(text) for text in result.sample([{"role": "user", "content": "say 3"}], n=2)] == [str, str]
    assert result.sample([]) == []
    said = {"role": "user", "content": "say 3"}
    wanted = "prompts must be a list of texts or conversations, got "
    for wrong, got in ((said, "{'role'"), ([said, "say 4:"], "{'role'"), ([3], "3"), ([[]], r"\[\]"), ([{}], "{}")):
        with pytest.raises(ValueError, match=f"^{wanted}{got}"):
            result.sample(wrong)
    with pytest.raises(ValueError, match=r"^unknown setting of sampling temprature; did you mean temperature\?$"):
        result.sample("say 3:", temprature=0)
    (tmp_path / "rows.jsonl").write_text("")
    with pytest.raises(ValueError, match=r"/rows.jsonl: the folder cannot be made \(File exists\); name another$"):
        result.save(tmp_path / "rows.jsonl")
    asked = [[said], "say 4:"]
    first, again = (result.sample(asked, n=2, temperature=0, max_tokens=3) for _ in range(2))
    assert first == again
    assert [len(texts) for texts in first] == [2, 2]
    assert repr(result).splitlines()[0] == f"completed after 2 steps, {tmp_path / 'run'}"
    assert "<svg" in result._repr_html_()
    assert "<td>mean reward</td>" in result._repr_html_()


@pytest.mark.long
def test_interrupting_a_notebook_gives_the_result_so_far(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(step: int, metrics: dict[str, float | None]) -> None:
        if step == 2:
            os.kill(os.getpid(), signal.SIGINT)

    given = {"callbacks": [interrupted], **NANO | {"num_steps": 50}}
    with pytest.raises(KeyboardInterrupt, match="stopped by SIGINT") as stopped:
        covey.train("nano", by_bytes, ROWS, folder=tmp_path / "script", **given)
    assert stopped.type is KeyboardInterrupt, "of another class a script ends with status 1 and not by the signal"
    assert (tmp_path / "script" / "checkpoints" / "step-000002").is_dir()
    monkeypatch.setattr("covey.api.training.is_notebook", lambda: True)
    result = covey.train("nano", by_bytes, ROWS, folder=tmp_path / "cell", **given)
    assert (result.status, len(result.rows), result.after) == ("interrupted", 2, None)
    assert equal(weights_of(result.model), saved_weights(tmp_path / "cell"))


# ------------------------------------------------------------------------------------------------ the loop


@pytest.mark.long
def test_a_loop_of_your_own_trains_as_covey_train_does(tmp_path: Path) -> None:
    result = covey.train("nano", by_bytes, ROWS, folder=tmp_path / "run", **NANO)
    with covey.build("nano", by_bytes, ROWS, **NANO) as parts:
        losses = [parts.step(groups)["loss"] for groups in parts]
        assert parts.evaluate() == result.after
        assert len(parts.sample(["say 3:"], n=2)[0]) == 2
        with pytest.raises(ValueError, match=r"^prompts must be a list of texts or conversations, got 'say 3:'"):
            parts.sample("say 3:")
        parts.save(tmp_path / "saved")
    assert losses == [row["loss"] for row in result.rows]
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    assert equal(dict(saved.state_dict()), weights_of(result.model))


@pytest.mark.long
def test_a_loop_that_forgets_to_train_is_told(tmp_path: Path) -> None:
    with (
        covey.build("nano", by_bytes, ROWS, **NANO) as parts,
        pytest.raises(ValueError, match=r"call parts.step\(groups\)"),
    ):
        for _ in parts:
            pass


def test_two_processes_train_together_at_both_levels(tmp_path: Path) -> None:
    given = NANO | {"groups_per_step": 4}

    def trained() -> float:
        result = covey.train("nano", by_bytes, ROWS, folder=tmp_path / "run", **given)
        with covey.build("nano", by_bytes, ROWS, **given) as parts:
            losses = [parts.step(groups)["loss"] for groups in parts]
        assert losses == [row["loss"] for row in result.rows], losses
        return sum(float(tensor.double().sum()) for tensor in weights_of(result.model).values())

    totals = as_job_steps(trained)
    assert totals[0] == totals[1]
    assert len(list(tmp_path.glob("run*"))) == 1
    (manifest,) = tmp_path.glob("run/checkpoints/*/manifest.json")
    assert json.loads(manifest.read_text())["num_ranks"] == 2
