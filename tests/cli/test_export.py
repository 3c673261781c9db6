"""`covey export`: a policy as transformers loads it, and a card that says what it is."""

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from peft import AutoPeftModelForCausalLM
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

import covey
from covey.cli.main import main

from ..support.builders import saved_model

pytestmark = pytest.mark.long
SMALL: dict[str, Any] = {"num_steps": 2, "groups_per_step": 2, "group_size": 4, "max_tokens": 4, "lr": 5e-2}
SMALL |= {"evaluation": {"num_prompts": 2}, "num_samples": 2, "k": [1, 2], "progress": False}
ROWS = [{"prompt": f"say {number}:"} for number in range(12)]


def early(completions: Sequence[str], **_: Any) -> list[float]:
    return [sum(map(ord, text)) % 97 / 97 for text in completions]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A run of all weights and one of adapters, of a model with tied embeddings."""
    made = tmp_path_factory.mktemp("runs")
    base = saved_model(made / "base", "qwen2")
    for name, changes in {"whole": {}, "adapters": {"lora_rank": 4}}.items():
        how = {**SMALL, **changes, "environment": {"in_process": True}}
        covey.train(base, early, ROWS, folder=made / name, **how)
    return {name: made / name for name in ("whole", "adapters")}


def logits(model: Any, folder: Path) -> Tensor:
    ids = AutoTokenizer.from_pretrained(folder)("say 3:", return_tensors="pt")["input_ids"]
    with torch.no_grad():
        found: Tensor = model.eval()(input_ids=ids).logits
    return found


def newest(run: Path) -> Path:
    return max(run.glob("checkpoints/step-*/policy"))


def test_a_run_is_exported_as_it_is(runs: dict[str, Path], tmp_path: Path) -> None:
    out = tmp_path / "a" / "whole"
    assert main(["export", str(runs["whole"]), "--to", str(out)]) == 0
    assert load_file(out / "model.safetensors").keys() == load_file(newest(runs["whole"]) / "model.safetensors").keys()
    found, wanted = (logits(AutoModelForCausalLM.from_pretrained(f), f) for f in (out, newest(runs["whole"])))
    assert torch.equal(found, wanted)


def test_weights_are_narrowed_and_nothing_else(runs: dict[str, Path], tmp_path: Path) -> None:
    assert main(["export", str(runs["whole"]), "--to", str(tmp_path / "half"), "--dtype", "bfloat16"]) == 0
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "half", dtype="auto")
    assert model.dtype == torch.bfloat16
    wanted = load_file(newest(runs["whole"]) / "model.safetensors")
    found = load_file(tmp_path / "half" / "model.safetensors")
    assert all(torch.equal(found[name], weight.bfloat16()) for name, weight in wanted.items())


def test_an_adapter_is_exported_with_its_base_or_merged(runs: dict[str, Path], tmp_path: Path) -> None:
    assert main(["export", str(runs["adapters"]), "--to", str(tmp_path / "adapter")]) == 0
    adapted = AutoPeftModelForCausalLM.from_pretrained(tmp_path / "adapter")
    assert main(["export", str(runs["adapters"]), "--to", str(tmp_path / "merged"), "--merge"]) == 0
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    assert not (tmp_path / "merged" / "adapter_config.json").exists()
    found, wanted = logits(merged, tmp_path / "merged"), logits(adapted, tmp_path / "adapter")
    torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-5)
    base = AutoModelForCausalLM.from_pretrained(runs["whole"].parent / "base")
    assert float((found - logits(base, tmp_path / "merged")).abs().max()) > 1e-3


def test_the_card_says_what_was_trained_and_how_to_verify_it(runs: dict[str, Path], tmp_path: Path) -> None:
    assert main(["export", str(runs["whole"]), "--to", str(tmp_path / "whole")]) == 0
    _, head, text = (tmp_path / "whole" / "README.md").read_text().split("---\n", 2)
    assert yaml.safe_load(head)["library_name"] == "transformers"
    summary = json.loads((runs["whole"] / "summary.json").read_text())
    gain = summary["gain"]["reward_mean"]
    assert f"{gain['value']:.3f} [{gain['low']:.3f}, {gain['high']:.3f}]" in text
    assert str(tmp_path.parent) not in text, "no path of this machine"
    assert "early" in text
    assert "all weights" in text
    digest = hashlib.sha256((tmp_path / "whole" / "model.safetensors").read_bytes()).hexdigest()
    assert f"{digest}  model.safetensors" in text


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["{adapters}", "--to", "{new}", "--dtype", "bfloat16"], "add --merge"),
        (["{whole}", "--to", "{whole}"], "is there already"),
        (["{whole}"], "--to FOLDER"),
        (["{whole}", "--to", "{new}", "--dtype", "int8"], "--dtype"),
        (["{whole}", "--to", "{new}", "--push"], "--push"),
        (["nowhere", "--to", "{new}"], "nowhere"),
    ],
)
def test_what_cannot_be_exported_is_refused_in_one_line(
    words: list[str], said: str, runs: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    places = {name: str(path) for name, path in runs.items()} | {"new": str(tmp_path / "new")}
    assert main(["export", *(word.format(**places) for word in words)]) != 0
    assert said in capsys.readouterr().err
    assert not (tmp_path / "new").exists()
