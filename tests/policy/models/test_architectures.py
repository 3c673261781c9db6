"""Architectures of transformers: the same as transformers alone computes them, on the fast path or the general one."""

import re
from pathlib import Path

import pytest

from benchmarks.checks.architecture_configs import VARIANTS, architectures
from benchmarks.checks.architectures import PAGE, examined, examined_apart, page, save
from covey.policy.models.loading import load_policy
from covey.policy.settings import ModelConfig

SAME = (
    *("llama", "llama, yarn", "qwen2, window", "qwen3_moe", "mistral", "mixtral", "gemma2", "gemma3_text", "gpt_oss"),
    *("olmo2", "granite", "cohere2", "glm4", "deepseek_v3", "phi3", "smollm3", "gpt2", "bert", "roberta", "afmoe"),
    *("gemma3n_text", "whisper"),
    # Layers with a state beside attention
    *("qwen3_5_text", "qwen3_next", "olmo_hybrid", "nemotron_h", "granitemoehybrid", "falcon_h1", "lfm2", "lfm3"),
)
GENERAL = {
    "doge": "DogeAttention has another mask",
    "minimax_m3, sparse": "MiniMaxM3VLAttention wants block_indices to be regarded",
    "diffllama": "DiffLlamaForCausalLM has it 4 times in 2",
    "zaya": "ZayaForCausalLM changes them",
    "stablelm": "StableLmForCausalLM has its own",
    "falcon": "this architecture has attention of its own",
    "deepseek_v32": "DeepseekV32Attention wants indices to be regarded",
    "zamba2": "Zamba2ForCausalLM shares one for several",
    "jamba": "JambaForCausalLM changes them",
}
"""Why they are not on the fast path."""


@pytest.mark.parametrize("name", SAME)
def test_an_architecture_is_sampled_and_trained_as_transformers_computes_it(name: str) -> None:
    found = examined(name)
    assert found["status"] == "fast", found


@pytest.mark.parametrize("name", GENERAL)
def test_another_architecture_takes_the_general_path_and_says_why(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save(name, str(tmp_path))
    assert load_policy(ModelConfig(name=str(tmp_path)), seed=0).path == "general"
    assert any("general path" in record.message and GENERAL[name] in record.message for record in caplog.records)


def test_texts_never_reach_the_second_table_of_longrope(tmp_path: Path) -> None:
    save("phi3, longrope", str(tmp_path))
    assert load_policy(ModelConfig(name=str(tmp_path)), seed=0).max_length == 32


@pytest.mark.slow  # some two hundred models
@pytest.mark.timeout(3600)
def test_no_architecture_of_transformers_is_different_without_a_word() -> None:
    rows = [examined_apart(name) for name in architectures()]
    assert [row for row in rows if row["status"] in ("different", "failed")] == []
    assert sum(row["status"] in ("fast", "general") for row in rows) >= 180


def test_the_page_has_every_architecture_once_and_none_that_is_different() -> None:
    named = [line.split(" | ")[0][2:].strip("*") for line in PAGE.read_text().splitlines() if line.startswith("| ")]
    assert sorted(name for name in named if name != "architecture") == sorted(architectures())
    assert "Different without a word" not in PAGE.read_text()
    assert set(VARIANTS) <= set(named)
    assert "| odd | a \\| b |" in page([{"name": "odd", "status": "refused", "reason": "a | b"}])


def test_development_stays_at_the_version_of_transformers_that_the_page_was_written_with() -> None:
    makefile = (PAGE.parents[2] / "Makefile").read_text()
    pinned = re.search(r"^TRANSFORMERS := transformers==(\S+)$", makefile, re.MULTILINE)
    assert pinned is not None
    assert f"of transformers {pinned[1]} (" in PAGE.read_text()
