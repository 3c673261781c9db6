"""Real models in every precision, with and without adapters and quantised weights, by every door: none is refused.

A real vocabulary, depth and chat template show what models of random weights do not. Cases run the checks before a
run, and a step or two; each precision meets each kind of weights by one door at least, doors of scripts among them.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import covey
from covey.cli.main import main
from covey_tasks.rows.short_answers import brief, tells

from .conftest import HEAVY

pytestmark = [pytest.mark.real, pytest.mark.timeout(900)]

SMOL, QWEN = "smollm2-135m", "qwen2.5-coder-0.5b"
SMALL: dict[str, Any] = {
    "groups_per_step": 2,
    "group_size": 4,
    "sampling.max_tokens": 16,
    "optimizer.warmup_steps": 0,
    "evaluation.num_prompts": 4,
    "evaluation.num_samples": 1,
    "preflight.num_prompts": 2,
    "preflight.max_tokens": 16,
    "output.progress": False,
}
LORA = {"lora_rank": 8}
WAYS: dict[str, dict[str, Any]] = {
    "all weights": {},
    "adapters": LORA,
    "4 bits": {**LORA, "load_in_4bit": True},
    "8 bits": {**LORA, "load_in_8bit": True},
}
Folder = Callable[[str], Path]


def case(*values: str, is_short: bool = False) -> Any:
    marks = [*([] if is_short else [pytest.mark.long]), *([HEAVY] if QWEN in values else [])]
    return pytest.param(*values, id="-".join(values).replace(" ", "_"), marks=marks)


def words(settings: dict[str, Any]) -> list[str]:
    return [f"{name}={str(value).lower() if isinstance(value, bool) else value}" for name, value in settings.items()]


def model_settings(folder: Path, precision: str, way: str) -> dict[str, Any]:
    chosen = {"name": folder, "precision": precision, **WAYS[way]}
    return {f"model.{name}": value for name, value in chosen.items()}


def summary(folder: Path) -> dict[str, Any]:
    return dict(json.loads((folder / "summary.json").read_text()))


@pytest.mark.parametrize(
    ("name", "precision", "way"),
    [
        case(SMOL, "float32", "all weights", is_short=True),
        case(SMOL, "float16", "all weights"),
        case(QWEN, "float32", "adapters"),
        case(QWEN, "bfloat16", "4 bits"),
    ],
)
def test_check_accepts_it(
    name: str, precision: str, way: str, real_model: Folder, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = {**SMALL, **model_settings(real_model(name), precision, way)}
    assert main(["check", "recipe=brief", *words(settings)]) == 0, capsys.readouterr()
    assert "FAILED" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "precision", "way"),
    [
        case(SMOL, "bfloat16", "adapters", is_short=True),
        case(SMOL, "float32", "4 bits"),
        case(QWEN, "bfloat16", "adapters"),
    ],
)
def test_the_command_trains_it(
    name: str, precision: str, way: str, real_model: Folder, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = {**SMALL, **model_settings(real_model(name), precision, way), "num_steps": 1}
    assert main(["train", "recipe=brief", *words(settings), f"hydra.run.dir={tmp_path}"]) == 0, capsys.readouterr().err
    assert summary(tmp_path)["status"] == "completed"


@pytest.mark.long
@pytest.mark.parametrize("recipe", ["brief", "json", "ifeval_small"])
def test_every_recipe_for_a_laptop_makes_two_steps(
    recipe: str, real_model: Folder, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    small = {name: value for name, value in SMALL.items() if not name.startswith("preflight.")}
    settings = {**small, "model.name": real_model(SMOL), "num_steps": 2, "preflight.enabled": False}
    command = ["train", f"recipe={recipe}", *words(settings), f"hydra.run.dir={tmp_path}"]
    assert main(command) == 0, capsys.readouterr().err
    found = summary(tmp_path)
    assert (found["status"], found["steps"]) == ("completed", 2)


@pytest.mark.parametrize(
    ("precision", "way"),
    [
        case("float32", "adapters"),
        case("bfloat16", "8 bits"),
        case("float16", "4 bits"),
    ],
)
def test_it_trains_from_python(precision: str, way: str, real_model: Folder, tmp_path: Path) -> None:
    rows = {split: found[:8] for split, found in brief().items()}
    settings = {**SMALL, **model_settings(real_model(SMOL), precision, way), "output.save_every": 0}
    name = str(settings.pop("model.name"))
    named = {setting.replace(".", "__"): value for setting, value in settings.items()}
    result = covey.train(name, tells, rows, folder=str(tmp_path / "run"), num_steps=1, **named)
    (said,) = result.sample([[{"role": "user", "content": "What is a canoe?"}]], n=1, max_tokens=4)
    assert said
