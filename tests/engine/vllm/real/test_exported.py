"""Real vLLM on a policy that `covey export` wrote: the greedy text of SmolLM2 with its adapters merged."""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

import covey
from benchmarks.real.models import make_model, model_folder
from covey.cli.main import main
from covey.engine.native.engine import NativeEngine
from covey.policy.models.loading import load_policy
from covey.policy.settings import ModelConfig
from covey.rollouts.encoding import encode_prompt
from covey.types import Prompt, Sampling

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]

QUESTIONS = ("What is the capital of France?", "Write one sentence about the sea.", "Count from one to ten.")
NUM_TOKENS = 40


def brevity(completions: Sequence[Any], **_: Any) -> list[float]:
    return [1 / (1 + len(messages[-1]["content"])) for messages in completions]


def greedy(settings: ModelConfig) -> dict[tuple[int, ...], tuple[int, ...]]:
    """Return what covey's own engine writes to each prompt, both as tokens."""
    policy = load_policy(settings)
    engine, sampling = NativeEngine(policy, 1 << 28, 64), Sampling(temperature=0.0, max_tokens=NUM_TOKENS)
    talks = [Prompt(question, "?", ({"role": "user", "content": question},), {}) for question in QUESTIONS]
    prompts = [tuple(encode_prompt(policy.tokenizer, talk)) for talk in talks]
    return {ids: tuple(asyncio.run(engine.generate(ids, 1, sampling))[0].token_ids) for ids in prompts}


def test_vllm_writes_the_greedy_text_of_an_export(tmp_path: Path) -> None:
    folder, run, out = model_folder("smollm2-135m"), tmp_path / "run", tmp_path / "out"
    make_model("smollm2-135m", folder)
    rows = [{"prompt": [{"role": "user", "content": question}]} for question in QUESTIONS * 4]
    little = {"num_steps": 3, "groups_per_step": 2, "group_size": 4, "max_tokens": 16, "lr": 5e-3, "progress": False}
    unseen = {"preflight": {"enabled": False}, "evaluation": {"num_prompts": 1}, "environment": {"in_process": True}}
    covey.train(str(folder), brevity, rows, folder=run, lora_rank=8, **little, **unseen)
    assert main(["export", str(run), "--to", str(out), "--merge"]) == 0
    saved = max(run.glob("checkpoints/step-*/policy"))
    own = greedy(ModelConfig(name=str(saved), lora_rank=8))
    assert len(own) == 3
    assert own != greedy(ModelConfig(name=str(folder))), "training shows"

    from vllm import LLM, SamplingParams

    served = LLM(model=str(out), dtype="float32", max_model_len=256, enforce_eager=True, gpu_memory_utilization=0.3)
    asked = [{"prompt_token_ids": list(ids)} for ids in own]
    found = served.generate(asked, SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS))
    assert [tuple(one.outputs[0].token_ids) for one in found] == list(own.values())
