"""A log that TRL itself has just written is read: its parquet of completions and its trainer_state.json."""

import subprocess
import sys
from pathlib import Path

import pytest

from covey.cli.main import main
from covey_report.logs.foreign import read_any
from covey_report.page.make import make_report

pytestmark = pytest.mark.slow

PROGRAM = """
import sys
from datasets import Dataset
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import GRPOConfig, GRPOTrainer

vocabulary = {c: i for i, c in enumerate(["<pad>", "<eos>", *map(chr, range(32, 127))])}
tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
tokenizer.decoder = decoders.Fuse()
wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>")
sizes = dict(hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2)
model = LlamaForCausalLM(LlamaConfig(vocab_size=97, pad_token_id=0, eos_token_id=1, bos_token_id=None, **sizes))

def length(completions, **columns):
    return [float(len(text) % 3) for text in completions]

def vowels(completions, **columns):
    return [sum(letter in "aeiou" for letter in text) / 8 for text in completions]

given = dict(max_steps=3, per_device_train_batch_size=4, num_generations=2, max_completion_length=8, logging_steps=1)
quiet = dict(log_completions=True, report_to=[], use_cpu=True, save_strategy="no", disable_tqdm=True)
rows = Dataset.from_list([{"prompt": f"say {i}"} for i in range(8)])
trainer = GRPOTrainer(
    model=model, reward_funcs=[length, vowels], args=GRPOConfig(output_dir=sys.argv[1], **given, **quiet),
    train_dataset=rows, processing_class=wrapped,
)
trainer.train()
trainer.save_state()
"""


def test_a_log_of_trl_is_read_as_trl_writes_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("trl")
    folder = tmp_path / "out"
    subprocess.run([sys.executable, "-c", PROGRAM, str(folder)], check=True, capture_output=True, cwd=tmp_path)
    run = read_any(folder)
    assert [row["step"] for row in run.steps] == [1, 2, 3]
    answers = [one for row in run.traces for one in row["rollouts"]]
    assert len(answers) == 3 * 4
    for one in answers:
        text = one["completion"]
        assert one["parts"] == {"length": len(text) % 3, "vowels": sum(letter in "aeiou" for letter in text) / 8}
        assert one["reward"] == sum(one["parts"].values())
        assert isinstance(one["advantage"], float)
    assert all(row["prompt"].startswith("say ") for row in run.traces)
    assert {len(row["rollouts"]) % 2 for row in run.traces} == {0}  # groups stay whole
    assert make_report([folder]).stat().st_size > 0
    assert main(["doctor", str(folder)]) == 0  # too early to say
    assert "3 steps" in capsys.readouterr().out
