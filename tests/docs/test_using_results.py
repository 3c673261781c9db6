"""The pages for a model of one's own: a run on conversations with adapters, its result merged, asked and measured."""

import runpy
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer

from covey.cli.main import main
from covey.policy.models.nano import nano_tokenizer
from covey_report.export import command as export

from ..support.builders import saved_model
from ..support.models.saved_models import qwen, save_model
from ..support.small import logging_as_it_was, rows
from .test_docs import command_lines, example_files

SMALL = ["num_steps=2", "groups_per_step=2", "group_size=4", "sampling.max_tokens=6", "environment.num_workers=1"]
SMALL += ["evaluation.num_samples=1", "evaluation.k=[1]", "optimizer.warmup_steps=0", "optimizer.lr=0.05"]
SMALL += ["model.precision=float32", "model.chat_template_kwargs.enable_thinking=false", "hydra.run.dir=first"]
SMALL += ["rewards=[sizes:size]"]  # untrained, the policy never says an answer that the page's function would reward


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The current folder, with a run of an own model and the examples of the page on results."""
    made = tmp_path_factory.mktemp("results")
    with pytest.MonkeyPatch.context() as patch, logging_as_it_was():
        patch.chdir(made)
        patch.syspath_prepend(made)
        page = "docs/use/using_results.md"
        for name, content in example_files(page).items():
            Path(name).write_text(content, encoding="utf-8")
        Path("sizes.py").write_text(
            "def size(completions, **columns):\n    return [len(str(c)) for c in completions]\n"
        )
        save_model(made / "FOLDER", qwen())
        (words,) = [words for words in command_lines(page) if words[:1] == ["train"] and "chat_rewards" in str(words)]
        assert main([*words, *SMALL]) == 0
        yield made


def test_the_command_of_the_page_trains_adapters_on_conversations(folder: Path) -> None:
    asked = rows(folder / "first" / "rollouts.jsonl")[0]["prompt"]
    assert [message["role"] for message in asked] == ["user"]
    saved = {path.name for path in (folder / "first" / "checkpoints" / "step-000002" / "policy").iterdir()}
    assert {"adapter_config.json", "adapter_model.safetensors", "tokenizer.json", "chat_template.jinja"} <= saved


@pytest.mark.long
def test_adapters_merge_into_an_ordinary_model_as_the_page_says(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    adapter = folder / "first" / "checkpoints" / "step-000002" / "policy"
    export.merge(adapter, Path("merged"))
    ids = torch.tensor([qwen()("12 + 30 = ")["input_ids"]])
    merged, own = (AutoModelForCausalLM.from_pretrained(name)(ids).logits for name in ("merged", str(adapter)))
    torch.testing.assert_close(merged, own, atol=1e-5, rtol=1e-5)
    assert not torch.allclose(merged, AutoModelForCausalLM.from_pretrained("FOLDER")(ids).logits, atol=1e-3)
    assert AutoTokenizer.from_pretrained("merged").chat_template == AutoTokenizer.from_pretrained(adapter).chat_template
    ask = runpy.run_path("ask_it.py")["ask"]
    assert ask("merged", "12 + 30 = ?", max_new_tokens=4) == ask(str(adapter), "12 + 30 = ?", max_new_tokens=4)


@pytest.mark.parametrize("tied", [True, False])
def test_adapters_on_a_head_are_merged_into_the_head_alone(folder: Path, tmp_path: Path, tied: bool) -> None:
    base, adapter = saved_model(tmp_path / "base", "llama", tie_word_embeddings=tied), str(tmp_path / "adapter")
    model = get_peft_model(
        AutoModelForCausalLM.from_pretrained(base), LoraConfig(r=4, target_modules=["q_proj", "lm_head"])
    )
    for name, weight in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(weight.data, std=0.3, generator=torch.Generator().manual_seed(0))
    model.save_pretrained(adapter)
    nano_tokenizer().save_pretrained(adapter)
    export.merge(Path(adapter), tmp_path / "merged")
    ids = torch.arange(1, 9)[None]
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")(input_ids=ids).logits
    torch.testing.assert_close(merged, model(input_ids=ids).logits, atol=1e-4, rtol=1e-5)


def test_a_merged_model_is_measured_and_trained_again(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    adapter = folder / "first" / "checkpoints" / "step-000002" / "policy"
    export.merge(adapter, Path("again"))
    shutil.rmtree(folder / "first")
    task = ["recipe=my_rewards", "model.name=again", "data.path=chats.jsonl", "rewards=[chat_rewards:contains]"]
    little = ["evaluation.num_samples=1", "evaluation.k=[1]", "sampling.max_tokens=4", "model.precision=float32"]
    assert main(["evaluate", *task, *little, "hydra.run.dir=measured"]) == 0, capsys.readouterr().err
    more = [*SMALL, "num_steps=1", "hydra.run.dir=second"]
    assert main(["train", *task, *more]) == 0, capsys.readouterr().err
