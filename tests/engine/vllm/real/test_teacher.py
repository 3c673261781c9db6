"""Real vLLM as a teacher: its log-probs of prompts, whole updates by them, and a run of a real model."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer

import covey
from covey.cluster.teacher_server import TeacherServer
from covey.engine.vllm import files
from covey.policy.models.nano import nano_tokenizer
from covey.policy.reference import Reference
from covey.policy.teacher import Teacher

from ....trainer.test_teacher import moved, rewarded, settings_of, trainer_of
from .tiny_served import server_of, tiny_policy, train_a_little

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]
REAL = Path(os.environ.get("COVEY_REAL_MODELS", "models")) / "smollm2-135m"
SMALL_CACHE = "--kv-cache-memory-bytes 20000000 --max-num-seqs 16"
TOP = {"top_k": 20, "support": "teacher"}
WAYS: dict[str, dict[str, Any]] = {
    "advantage": {},
    "sampled": {"teacher_term": "sampled"},
    "forward": {"teacher_term": "divergence", "teacher_options": {"beta": 0.0, **TOP}},
    "reverse": {"teacher_term": "divergence", "teacher_options": {"beta": 1.0, **TOP}},
}


def test_an_update_by_a_servers_words_is_that_of_the_same_model_here(tmp_path: Path) -> None:
    teacher = tiny_policy("qwen3", tied=True)
    train_a_little(teacher, seed=50)
    files.save_policy(teacher, tmp_path / "model")
    nano_tokenizer().save_pretrained(tmp_path / "model")
    with server_of(tmp_path / "model", tmp_path / "log", SMALL_CACHE) as (url, _):
        for way, changes in WAYS.items():
            asked, found = settings_of(**changes, teacher_temperature=1.0), {}
            server = TeacherServer(url, nano_tokenizer(), changes.get("teacher_options", {}).get("top_k", 0))
            for name, model in {"here": Reference(teacher, None, is_own=True), "server": server}.items():
                trainer = trainer_of(tiny_policy("qwen3", tied=True), Teacher(model, temperature=1.0), asked)
                found[name] = moved(trainer, rewarded(), "shared", 10_000)
            gaps = [float((found["server"][name] - here).abs().max()) for name, here in found["here"].items()]
            sizes = [float(here.abs().max()) for here in found["here"].values()]
            assert max(gaps) < 1e-4 * max(sizes), (way, max(gaps), max(sizes))


@pytest.mark.skipif(not REAL.is_dir(), reason="make test-real downloads it")
@pytest.mark.parametrize("way", ["advantage", "forward"])
def test_two_steps_of_a_real_model_by_the_server_of_it_as_it_was(way: str, tmp_path: Path) -> None:
    rows = [
        {"prompt": text} for text in ("17 + 25 =", "The capital of France is", "Rain falls", "9 * 8 =", "Is 7 prime?")
    ]
    small = {"num_steps": 2, "groups_per_step": 2, "group_size": 2, "sampling__max_tokens": 24, "model__lora_rank": 8}
    small |= {"preflight__enabled": False, "evaluation__every": 0, "evaluation__num_prompts": 1, "seed": 3}
    found, tokenizer = {}, AutoTokenizer.from_pretrained(REAL)
    with server_of(REAL, tmp_path / "log", "--kv-cache-memory-bytes 200000000 --max-num-seqs 8") as (url, _):
        for name, teacher in {"here": str(REAL), "server": url}.items():
            asked = {"reward_weight": 0.0, **WAYS[way]}
            result = covey.train(
                shaken(),
                data=rows,
                tokenizer=tokenizer,
                teacher=teacher,
                algorithm=asked,
                folder=tmp_path / name,
                **small,
            )
            found[name] = [row[column] for row in result.rows for column in ("teacher/kl", "grad_norm")]
    assert found["server"] == pytest.approx(found["here"], rel=1e-3)
    assert found["here"][0] > 1e-2


def shaken() -> nn.Module:
    """The model with weights that are 3 % off."""
    model, generator = AutoModelForCausalLM.from_pretrained(REAL, dtype=torch.float32), torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(1 + 0.03 * torch.randn(weight.shape, generator=generator))
    return model
