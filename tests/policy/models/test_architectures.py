"""Architectures of transformers: the same as transformers alone computes them, or refused in one line at loading."""

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
    "gemma3n_text",
)
ANOTHER_MASK = "needs attention to all before a token or a window of it, {} has another mask"
OWN = "needs attention that transformers lets others compute, {} has its own"
BESIDE = "needs texts that are the same beside others, with positions of their own; {} changes them"
REFUSED = {
    "doge": ANOTHER_MASK.format("DogeAttention"),
    "phimoe": "needs an architecture without noise in training mode, PhimoeForCausalLM has it",
    "phimoe, window": ANOTHER_MASK.format("PhimoeAttention"),
    "minimax_m3, sparse": "needs attention that covey knows, MiniMaxM3VLAttention wants block_indices to be regarded",
    "diffllama": "needs attention once in every layer, DiffLlamaForCausalLM has it 4 times in 2",
    "falcon_h1": BESIDE.format("FalconH1ForCausalLM"),
    "zaya": BESIDE.format("ZayaForCausalLM"),
    "bart": BESIDE.format("BartForCausalLM"),
    "whisper": "needs max_position_embeddings, WhisperConfig has none",
    "mpt": OWN.format("MptForCausalLM"),
    "stablelm": OWN.format("StableLmForCausalLM"),
    "falcon": OWN.format("this architecture"),
    "gptj": OWN.format("this architecture"),
    "bloom": OWN.format("BloomForCausalLM"),
    "llama4_text": ANOTHER_MASK.format("Llama4TextAttention"),
    "deepseek_v32": "needs attention that covey knows, DeepseekV32Attention wants indices to be regarded",
    "glm_moe_dsa": "needs attention that covey knows, GlmMoeDsaAttention wants indices to be regarded",
    "qwen3_next": "needs attention in every layer, Qwen3NextForCausalLM has it in 1 of 2",
}


@pytest.mark.parametrize("name", SAME)
def test_an_architecture_is_sampled_and_trained_as_transformers_computes_it(name: str) -> None:
    found = examined(name)
    assert found["status"] == "works", found


@pytest.mark.parametrize("name", REFUSED)
def test_an_architecture_that_would_come_out_otherwise_is_refused_in_one_line_at_loading(
    name: str, tmp_path: Path
) -> None:
    save(name, str(tmp_path))
    with pytest.raises(ValueError) as caught:
        load_policy(ModelConfig(name=str(tmp_path)), seed=0)
    assert str(caught.value).startswith("model.name")
    assert REFUSED[name] in str(caught.value)
    assert "\n" not in str(caught.value)


def test_texts_never_reach_the_second_table_of_longrope(tmp_path: Path) -> None:
    save("phi3, longrope", str(tmp_path))
    assert load_policy(ModelConfig(name=str(tmp_path)), seed=0).max_length == 32


@pytest.mark.slow  # some two hundred models
@pytest.mark.timeout(3600)
def test_no_architecture_of_transformers_is_different_without_a_word() -> None:
    rows = [examined_apart(name) for name in architectures()]
    assert [row for row in rows if row["status"] in ("different", "failed")] == []
    assert sum(row["status"] == "works" for row in rows) >= 80


def test_the_page_has_every_architecture_once_and_none_that_is_different() -> None:
    named = [line.split(" | ")[0][2:] for line in PAGE.read_text().splitlines() if line.startswith("| ")]
    assert sorted(name for name in named if name != "architecture") == sorted(architectures())
    assert "Different without a word" not in PAGE.read_text()
    assert set(VARIANTS) <= set(named)
    assert "| odd | a \\| b |" in page([{"name": "odd", "status": "refused", "reason": "a | b"}])


def test_development_stays_at_the_version_of_transformers_that_the_page_was_written_with() -> None:
    makefile = (PAGE.parents[2] / "Makefile").read_text()
    pinned = re.search(r"^TRANSFORMERS := transformers==(\S+)$", makefile, re.MULTILINE)
    assert pinned is not None
    assert f"of transformers {pinned[1]} (" in PAGE.read_text()
