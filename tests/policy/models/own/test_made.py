"""Models by a function or by code beside their weights: trained, resumed, measured, and only by the user's word."""

import io
import json
import os
import re
import shutil
import sys
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import covey
from covey.cli.main import main
from covey.policy.models.loading import load_policy
from covey.policy.models.made import code_hashes
from covey.policy.settings import ModelConfig

from ....docs.test_docs import example_files
from ....support.processes import in_a_fork
from .checkouts import BEGINNINGS, write_checkout
from .local_code import write_tiny

WORDS = ["groups_per_step=2", "group_size=4", "sampling.max_tokens=4", "optimizer.lr=1e-2", "engine.max_rows=8"]
WORDS += ["evaluation.num_prompts=2", "evaluation.num_samples=2", "evaluation.k=[1]"]
TASK = ["environment=reward_functions", "rewards=[rewards:low]", "data.path=rows.jsonl"]


def covey_in(folder: Path, *words: str) -> str:
    """What a command says that ends well, in a fork of this warm process and of its folder."""

    def run() -> tuple[int, str]:
        enter(folder)
        with redirect_stdout(io.StringIO()) as said, redirect_stderr(said):
            return main(list(words)), said.getvalue()

    status, text = in_a_fork(run, seconds=300.0)
    assert status == 0, text
    return str(text)


def enter(folder: Path) -> None:
    """Be where a program would begin: its folder is the current one, and the first to import from."""
    os.chdir(folder)
    sys.path.insert(0, "")


def run_in(folder: Path, program: str) -> None:
    enter(folder)
    exec(program, {"__name__": "__main__"})


@pytest.mark.long
@pytest.mark.parametrize("policy", BEGINNINGS)
def test_the_pages_lines_train_a_communitys_checkpoint(policy: str, tmp_path: Path) -> None:
    write_checkout(tmp_path, policy)
    text = example_files("docs/use/own_model.md")[f"{policy}.py"]
    shown = '50257, "context_length": 1024, "emb_dim": 768, "n_heads": 12, "n_layers": 12'
    text = text.replace(shown, '257, "context_length": 64, "emb_dim": 32, "n_heads": 1, "n_layers": 2')
    (tmp_path / f"{policy}.py").write_text(text, encoding="utf-8")
    in_a_fork(partial(run_in, tmp_path, BEGINNINGS[policy]), seconds=120.0)
    words = ["model.name=weights", f"model.code={policy}:load", *TASK, *WORDS, "hydra.run.dir=run"]
    covey_in(tmp_path, "train", *words, "num_steps=2", "output.save_every=1")
    last = load_file(tmp_path / "run/checkpoints/step-000002/policy/model.safetensors")
    shutil.rmtree(tmp_path / "run/checkpoints/step-000002")
    (tmp_path / f"{policy}.py").write_text(f"{text}\n# changed\n", encoding="utf-8")
    assert f"code of the model in {policy}.py was" in covey_in(tmp_path, "train", "resume=run")
    again = load_file(tmp_path / "run/checkpoints/step-000002/policy/model.safetensors")
    assert all(torch.equal(weight, again[name]) for name, weight in last.items())
    measured = covey_in(tmp_path, "evaluate", "model.name=run/checkpoints/step-000002/policy")
    assert f"model.code={policy}:load" in measured


def decode(ids: list[int]) -> str:
    return bytes(ids).decode("latin-1")


def load_bigrams(name: str) -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(256, 8), nn.Linear(8, 8), nn.Linear(8, 256))
    return model, (lambda text: list(text.encode()), decode)


def in_a_table(name: str) -> Any:
    return {"model": nn.Linear(2, 2)}


def early(completions: list[str], **_: Any) -> list[float]:
    return [sum(letter < "m" for letter in text) / 4 for text in completions]


ROWS = [{"prompt": f"say {number}"} for number in range(8)]


def test_a_missing_file_that_a_policy_was_made_of_is_named(tmp_path: Path) -> None:
    (tmp_path / "book.pth").write_bytes(b"")
    how: dict[str, Any] = {"model__code": load_bigrams, "num_steps": 1, "group_size": 2, "groups_per_step": 2}
    how |= {"max_tokens": 4, "environment": {"in_process": True}, "preflight": {"enabled": False}, "progress": False}
    covey.train(str(tmp_path / "book.pth"), early, ROWS, folder=tmp_path / "run", **how)
    (tmp_path / "book.pth").unlink()
    saved = max((tmp_path / "run").glob("checkpoints/step-*/policy"))
    with pytest.raises(ValueError, match=r"policy needs .*book\.pth too, the file that its run made the module of"):
        load_policy(ModelConfig(name=str(saved), code=f"{__name__}:load_bigrams"))
    assert main(["export", str(tmp_path / "run"), "--to", str(tmp_path / "out")]) == 0
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["made_from"] == "book.pth"
    assert str(tmp_path) not in (tmp_path / "out" / "config.json").read_text()


SMALL: dict[str, Any] = {"groups_per_step": 2, "group_size": 4, "max_tokens": 4, "lr": 1e-2, "progress": False}
SMALL |= {"num_steps": 1, "num_samples": 2, "k": [1], "evaluation": {"num_prompts": 2}, "engine__max_rows": 8}
SMALL |= {"environment": {"in_process": True}}


@pytest.mark.long
@pytest.mark.parametrize("changes", [{}, {"lora_rank": 2}])
def test_a_program_names_the_function_or_gives_it(changes: dict[str, Any], tmp_path: Path) -> None:
    how = {**SMALL, **changes, "code": load_bigrams}
    result = covey.train("anything", early, ROWS, folder=tmp_path / "run", **how)
    assert result.config.model.code == f"{__name__}:load_bigrams"
    saved = tmp_path / "run" / "checkpoints" / "step-000001" / "policy"
    loaded = load_policy(replace(result.config.model, name=str(saved)))
    trained = result.policy.model.state_dict()
    assert all(torch.equal(weight, trained[name]) for name, weight in loaded.model.state_dict().items())
    assert any("lora_" in name for name in trained) == bool(changes)


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("gpt.py", "must be module:function, or folder (code beside weights), got gpt.py"),
        ("./my/gpt.py:load", "got ./my/gpt.py:load; write my.gpt:load"),
        (f"{__name__}:nothing", f"module {__name__} must define the function nothing"),
        (f"{__name__}:in_a_table", "must return (module, tokenizer), got dict"),
        (f"{__name__}:decode", "raised TypeError: string argument without an encoding (test_made.py:"),
    ],
)
def test_what_makes_no_model_is_said_in_one_line(code: str, said: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=re.escape(said)) as refused:
        covey.train("anything", early, ROWS, folder=tmp_path / "run", code=code, **SMALL)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("word", ["model.load_in_4bit=true model.lora_rank=2", "engine.name=vllm engine.url=http://x"])
def test_what_needs_saved_weights_refuses_a_function(word: str, capsys: pytest.CaptureFixture[str]) -> None:
    task = ["recipe=arithmetic", "model.name=anything", f"model.code={__name__}:load_bigrams"]
    assert main(["train", *task, *word.split()]) == 2
    assert f"needs a model that transformers saved, got model.code={__name__}:load_bigrams" in capsys.readouterr().err


TINY = ["recipe=arithmetic", "model.code=folder", "cold_start.enabled=false", "num_steps=1", *WORDS]
POLICY = "run/checkpoints/step-000001/policy"


def test_code_beside_weights_runs_by_the_users_word_alone(tmp_path: Path) -> None:
    folder = write_tiny(tmp_path / "tiny", tmp_path / "ran")
    with pytest.raises(ValueError, match=r"runs by your word alone: model\.code=folder"):
        load_policy(ModelConfig(name=str(folder), device="cpu"))
    assert not (tmp_path / "ran").exists()
    policy = load_policy(ModelConfig(name=str(folder), device="cpu", code="folder"))
    assert (tmp_path / "ran").exists()
    assert list(code_hashes(policy.causal_lm)) == ["configuration_tiny.py", "layers_tiny.py", "modeling_tiny.py"]


def test_positions_that_code_computes_when_it_is_made_are_there(tmp_path: Path) -> None:
    policy = load_policy(ModelConfig(name=str(write_tiny(tmp_path / "tiny")), device="cpu", code="folder"))
    cos = policy.model.get_buffer("layers.1.cos")
    assert cos[0].tolist() == [1.0] * 16
    assert float(cos[1, 0]) == pytest.approx(0.5403023)


def test_code_of_a_hub_is_not_fetched(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="hf download somebody/theirs --local-dir FOLDER"):
        load_policy(ModelConfig(name="somebody/theirs", device="cpu", code="folder"))
    folder = write_tiny(tmp_path / "tiny")
    config = json.loads((folder / "config.json").read_text())
    config["auto_map"]["AutoConfig"] = "somebody/theirs--configuration_tiny.TinyConfig"
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"runs code of the folder alone, config\.json names that of a hub"):
        load_policy(ModelConfig(name=str(folder), device="cpu", code="folder"))


@pytest.mark.long
def test_a_run_carries_its_code_and_another_persons_run_does_not_run_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    witness = tmp_path / "ran"
    write_tiny(Path("tiny"), witness)
    assert main(["train", "model.name=tiny", *TINY, "hydra.run.dir=run"]) == 0
    assert (Path(POLICY) / "layers_tiny.py").read_text() == Path("tiny/layers_tiny.py").read_text()
    assert main(["evaluate", f"model.name={POLICY}"]) == 0
    # Their folder holds the same files; what is in it is named, and not run
    shutil.copytree("run", "theirs")
    Path("theirs/run.seal").unlink()
    for file in Path("theirs").rglob("*.py"):
        file.write_text(f"{file.read_text()}\n# theirs\n")
    witness.unlink()
    theirs = POLICY.replace("run/", "theirs/", 1)
    capsys.readouterr()
    own = ["recipe=arithmetic", f"model.name={theirs}"]
    for words in (
        ["evaluate", f"model.name={theirs}"],
        ["evaluate", f"model.name={theirs}", "model.code=folder"],
        ["evaluate", f"model.name={POLICY}", "--against", theirs],
        ["evaluate", *own],
        ["train", *own, *TINY[1:], "hydra.run.dir=next"],
        ["train", "resume=theirs"],
    ):
        assert main(words) == 2, words
        assert capsys.readouterr().err.count("\n") <= 2
        assert not witness.exists(), words
    assert main(["evaluate", f"model.name={theirs}", "trust_run=true"]) == 0
    assert witness.exists()


@pytest.mark.long
@pytest.mark.parametrize("way", ["field", "keyword", "keywords"])
def test_trls_trust_remote_code_takes_the_code_of_a_folder(way: str, tmp_path: Path) -> None:
    from covey.trl import GRPOConfig, GRPOTrainer

    folder = str(write_tiny(tmp_path / "tiny"))
    more: dict[str, Any] = {"trust_remote_code": True} if way == "field" else {}
    keywords = {"keyword": {"trust_remote_code": True}, "keywords": {"trust_remote_code": True, "dtype": "float32"}}
    more |= {"model_init_kwargs": keywords[way]} if way in keywords else {}
    args = GRPOConfig(
        output_dir=str(tmp_path / "out"),
        per_device_train_batch_size=4,
        num_generations=4,
        max_steps=1,
        bf16=False,
        max_completion_length=4,
        gradient_checkpointing=False,
        report_to="none",
        use_cpu=True,
        disable_tqdm=True,
        **more,
    )
    trainer = GRPOTrainer(folder, early, args=args, train_dataset=ROWS)
    trainer.train()
    assert type(trainer.model).__name__ == "TinyForCausalLM"


def test_trl_refuses_code_without_the_word(tmp_path: Path) -> None:
    from covey.trl import GRPOConfig, GRPOTrainer

    folder = str(write_tiny(tmp_path / "tiny"))
    args = GRPOConfig(
        output_dir=str(tmp_path / "out"),
        per_device_train_batch_size=4,
        num_generations=4,
        max_steps=1,
        bf16=False,
        report_to="none",
        use_cpu=True,
        disable_tqdm=True,
    )
    with pytest.raises(ValueError, match=r"model\.code=folder"):
        GRPOTrainer(folder, early, args=args, train_dataset=ROWS).train()
