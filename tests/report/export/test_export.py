"""`covey export`: a policy as transformers loads it, and a card that says what it is."""

import hashlib
import json
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from peft import AutoPeftModelForCausalLM
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoModelForMultimodalLM, AutoTokenizer

import covey
from covey.cli.main import main
from covey.policy.models.loading import load_policy
from covey.policy.settings import ModelConfig

from ...support.builders import saved_model
from ...support.models.composite_models import composite_folder
from ...support.models.saved_models import qwen, save_model
from .fake_hub import TOKEN, FakeHub, fake_hub

pytestmark = pytest.mark.long
SMALL: dict[str, Any] = {"num_steps": 2, "groups_per_step": 2, "group_size": 4, "max_tokens": 4, "lr": 5e-2}
SMALL |= {
    "evaluation": {"num_prompts": 2, "every": 1},
    "output": {"save_every": 1},
    "num_samples": 2,
    "k": [1, 2],
    "progress": False,
}
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
    assert main(["export", str(runs["whole"]), "--to", str(tmp_path / "again"), "--merge"]) == 2


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
    assert "Its model, rows or rewards were objects of a program, which alone can measure it again." in text
    assert "covey evaluate" not in text


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["{adapters}", "--to", "{new}", "--dtype", "bfloat16"], "add --merge"),
        (["{whole}", "--to", "{whole}"], "is there already"),
        (["{whole}"], "--to FOLDER"),
        (["{whole}", "--to", "{new}", "--dtype", "int8"], "--dtype"),
        (["{whole}", "--to", "{new}", "--push"], "--push needs a repository"),
        (["{whole}", "--to", "{new}", "--push", "a b"], "--push must be OWNER/NAME, got a b"),
        (["{whole}", "--to", "{new}", "--push", "me/mine"], "--push me/mine needs the hub: HF_HUB_OFFLINE is set"),
        (["{adapters}", "--to", "{new}", "--push", "me/mine"], "base model that others have, got adapters of /"),
        (["{adapters}", "--to", "{new}", "--gguf"], "--gguf needs a whole model, and this policy is an adapter"),
        (
            ["{whole}", "--to", "{new}", "--gguf", "q9"],
            "--gguf must be one of f16, bf16, f32, q8_0, q5_1, q4_0, got q9",
        ),
        (["{whole}", "--to", "{whole}/checkpoints/mine"], "--to must lie outside of the run's checkpoints"),
        (["{whole}", "--from-gguf", "x", "--to", "{new}"], "covey export --from-gguf FILE --to FOLDER"),
        (["--from-gguf", "x.gguf", "--to", "{new}", "--merge"], "--from-gguf takes --to and --dtype, got --merge"),
        (["--from-gguf", "x.gguf", "--to", "{new}"], "--from-gguf must name a file, got x.gguf"),
        (["--from-gguf", __file__, "--to", "{new}"], "cannot be converted (GGUF magic invalid)"),
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


def test_an_empty_folder_is_filled(runs: dict[str, Path], tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    assert main(["export", str(runs["whole"]), "--to", str(tmp_path / "empty")]) == 0
    assert (tmp_path / "empty" / "model.safetensors").is_file()


def test_an_earlier_checkpoint_has_its_own_card(runs: dict[str, Path], tmp_path: Path) -> None:
    first = runs["whole"] / "checkpoints" / "step-000001"
    for given in (first, first / "policy"):
        out = tmp_path / given.name
        assert main(["export", str(given), "--to", str(out)]) == 0
        text = (out / "README.md").read_text()
        assert "| steps | 1 of 2, seed 0 |" in text
        look = next(row for row in rows(runs["whole"] / "metrics.jsonl", "evaluate") if row["step"] == 1)
        assert f" {look['reward_mean']:.3f} [" in text
        found, wanted = (load_file(folder / "model.safetensors") for folder in (out, first / "policy"))
        assert all(torch.equal(found[name], weight) for name, weight in wanted.items())


def rows(file: Path, kind: str) -> list[dict[str, Any]]:
    return [row for row in map(json.loads, file.read_text().splitlines()) if row["kind"] == kind]


def test_a_run_that_was_killed_is_exported_with_what_was_measured(runs: dict[str, Path], tmp_path: Path) -> None:
    run = tmp_path / "killed"
    shutil.copytree(runs["whole"], run)
    (run / "summary.json").unlink()
    for name in ("metrics", "verdicts", "evaluations"):
        lines = (run / f"{name}.jsonl").read_text().splitlines(keepends=True)
        (run / f"{name}.jsonl").write_text("".join(line for line in lines if json.loads(line)["step"] < 2))
    assert main(["export", str(run), "--to", str(tmp_path / "out")]) == 0
    text = (tmp_path / "out" / "README.md").read_text()
    assert "| | before |\n|---|---|\n| mean reward | " in text
    (run / "verdicts.jsonl").unlink()
    (run / "evaluations.jsonl").unlink()
    assert main(["export", str(run), "--to", str(tmp_path / "bare")]) == 0
    assert "Nothing was measured." in (tmp_path / "bare" / "README.md").read_text()


def test_a_damaged_checkpoint_is_not_exported(
    runs: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    shutil.copytree(runs["whole"], run)
    with (newest(run) / "model.safetensors").open("r+b") as file:
        file.seek(-1, 2)
        file.write(b"\x7f")
    assert main(["export", str(run), "--to", str(tmp_path / "out")]) == 2
    assert "step-000002 is damaged" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_full_disk_is_told_and_leaves_nothing(
    runs: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(shutil, "copytree", full)
    assert main(["export", str(runs["whole"]), "--to", str(tmp_path / "out")]) != 0
    said = capsys.readouterr().err.strip()
    assert said.count("\n") == 0
    assert "out: No space left on device; make room on its disk" in said
    assert list(tmp_path.iterdir()) == []


def test_a_missing_base_model_is_named(
    runs: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base = runs["whole"].parent / "base"
    base.rename(base.with_name("moved"))
    try:
        assert main(["export", str(runs["adapters"]), "--to", str(tmp_path / "out"), "--merge"]) == 2
        assert f"the adapters' base model {base} cannot be loaded (" in capsys.readouterr().err
        with pytest.raises(ValueError, match=r"holds adapters of .*base, and there is no"):
            load_policy(str(newest(runs["adapters"])))
    finally:
        base.with_name("moved").rename(base)


class Own(nn.Module):
    """A model that transformers does not know."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.mixed, self.outer = nn.Embedding(256, 16), nn.Linear(16, 16), nn.Linear(16, 256)

    def forward(self, ids: Tensor) -> Tensor:
        found: Tensor = self.outer(torch.tanh(self.mixed(self.inner(ids).cumsum(1) / 10)))
        return found


@pytest.mark.parametrize("lora_rank", [0, 4])
def test_a_module_of_ones_own_is_exported_as_its_weights(
    lora_rank: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = Own()
    two = (lambda text: list(text.encode()), lambda ids: bytes(ids).decode("latin1"))
    how = {**SMALL, "lora_rank": lora_rank, "environment": {"in_process": True}}
    covey.train(given, early, ROWS, folder=tmp_path / "run", tokenizer=two, **how)
    assert main(["export", str(tmp_path / "run"), "--to", str(tmp_path / "out")]) == 0
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"README.md", "config.json", "model.safetensors"}
    fresh, ids = Own(), torch.arange(20)[None]
    fresh.load_state_dict(load_file(tmp_path / "out" / "model.safetensors"))
    torch.testing.assert_close(fresh(ids), given(ids), atol=1e-5, rtol=1e-5)
    assert float((fresh(ids) - Own()(ids)).detach().abs().max()) > 1e-3
    text = (tmp_path / "out" / "README.md").read_text()
    assert "# Own, trained by GRPO" in text
    assert "module.load_state_dict(" in text
    assert main(["export", str(tmp_path / "run"), "--to", str(tmp_path / "gguf"), "--gguf"]) == 2
    assert "gemma3_text, got covey_module; llama.cpp converts more" in capsys.readouterr().err


def test_adapters_of_text_and_pictures_merge_into_the_class_they_came_as(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base = composite_folder("smolvlm", tmp_path / "base")
    how = {**SMALL, "lora_rank": 4, "environment": {"in_process": True}}
    covey.train(str(base), early, ROWS, folder=tmp_path / "run", **how)
    assert main(["export", str(tmp_path / "run"), "--to", str(tmp_path / "out"), "--merge"]) == 0
    merged, plain = (AutoModelForMultimodalLM.from_pretrained(folder) for folder in (tmp_path / "out", base))
    assert type(merged).__name__ == "SmolVLMForConditionalGeneration"
    adapted = load_policy(ModelConfig(name=str(newest(tmp_path / "run")), lora_rank=4))
    ids = torch.arange(5, 25)[None]
    with torch.no_grad():
        found, wanted, before = (model.eval()(input_ids=ids).logits for model in (merged, adapted.model, plain))
    torch.testing.assert_close(found, wanted, atol=1e-4, rtol=1e-4)
    assert float((found - before).abs().max()) > 1e-3
    assert (tmp_path / "out" / "preprocessor_config.json").is_file()
    assert "AutoModelForMultimodalLM.from_pretrained(FOLDER)" in (tmp_path / "out" / "README.md").read_text()
    assert main(["export", str(tmp_path / "run"), "--to", str(tmp_path / "gguf"), "--merge", "--gguf"]) == 2
    assert "gemma3_text, got smolvlm; llama.cpp converts more" in capsys.readouterr().err


# ------------------------------------------------------------------------------------------------ GGUF and the hub


@pytest.fixture(scope="module")
def merged(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of adapters on conversations, whose tokenizer a GGUF file can hold."""
    made = tmp_path_factory.mktemp("conversations")
    base, talk = (
        save_model(made / "base", qwen()),
        [{"prompt": [{"role": "user", "content": f"{n}"}]} for n in range(12)],
    )
    covey.train(base, early_talk, talk, folder=made / "run", **SMALL, lora_rank=4, environment={"in_process": True})
    return made / "run"


def early_talk(completions: Sequence[Any], **_: Any) -> list[float]:
    return early([messages[-1]["content"] for messages in completions])


def test_a_merged_policy_becomes_a_gguf_file_beside_it(merged: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert main(["export", "--gguf", str(merged), "--to", str(out), "--merge"]) == 0
    read = AutoModelForCausalLM.from_pretrained(out, gguf_file="model-f16.gguf", dtype=torch.float32)
    torch.testing.assert_close(
        logits(read, out), logits(AutoModelForCausalLM.from_pretrained(out), out), atol=1e-3, rtol=1e-2
    )
    text = (out / "README.md").read_text()
    assert "`llama-cli -m model-f16.gguf` runs it in llama.cpp." in text
    assert f"{hashlib.sha256((out / 'model-f16.gguf').read_bytes()).hexdigest()}  model-f16.gguf" in text
    assert AutoTokenizer.from_pretrained(out).chat_template == qwen().chat_template


@pytest.fixture
def hub(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    from huggingface_hub import constants

    from covey.system.hub import silence

    with fake_hub(refuses=getattr(request, "param", "")) as served:
        monkeypatch.setattr(constants, "ENDPOINT", served.url)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)  # its client has a wire of its own
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        silence.cache_clear()
        yield served
    silence.cache_clear()


def test_a_push_sends_every_file_to_a_private_repository(
    merged: Path, hub: FakeHub, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert main(["export", str(merged), "--to", str(out), "--merge", "--push", "me/mine"]) == 0
    (made,) = hub.created
    assert (made["name"], made["organization"]) == ("mine", "me")
    assert "private" in (made.get("visibility"), *(name for name, value in made.items() if value is True))
    assert hub.committed.keys() == {file.name for file in out.iterdir()}
    assert hub.committed["README.md"] == (out / "README.md").read_bytes()
    weights = (out / "model.safetensors").read_bytes()
    assert hub.committed["model.safetensors"] == hashlib.sha256(weights).hexdigest()
    assert hub.large == {hashlib.sha256(weights).hexdigest(): weights}
    assert f"Bearer {TOKEN}" in hub.tokens
    said = "".join(capfd.readouterr())
    assert f"{hub.url}/me/mine" in said.replace("\n", "")
    assert TOKEN not in said


@pytest.mark.parametrize("hub", ["/api/repos/create", "/commit/"], indirect=True)
def test_a_refused_push_is_told_in_one_line_and_keeps_the_folder(
    merged: Path, hub: FakeHub, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert main(["export", str(merged), "--to", str(out), "--merge", "--push", "me/mine"]) == 2
    said = capfd.readouterr().err
    (line,) = [line for line in said.splitlines() if line.startswith("covey: ")]
    assert "--push me/mine was refused (" in line
    assert "403" in line
    assert line.endswith(f"; try again: hf upload me/mine {out}")
    assert TOKEN not in said
    assert (out / "model.safetensors").is_file()


def test_a_push_without_a_token_is_refused_before_any_work(
    merged: Path, hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("HF_TOKEN")
    monkeypatch.setattr("huggingface_hub.constants.HF_TOKEN_PATH", str(tmp_path / "none"))
    assert main(["export", str(merged), "--to", str(tmp_path / "out"), "--merge", "--push", "me/mine"]) == 2
    assert "--push me/mine needs a token of the hub: hf auth login, or HF_TOKEN" in capsys.readouterr().err
    assert hub.created == []
    assert not (tmp_path / "out").exists()
