"""Tiny policies of the shapes that vLLM serves on a CPU (heads of 32), and how they are served."""

import asyncio
import copy
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config, Qwen3Config

from covey.engine.settings import EngineConfig
from covey.engine.vllm.build import build
from covey.engine.vllm.engine import VLLMEngine
from covey.policy.attention.base import register
from covey.policy.models.nano import nano_tokenizer
from covey.policy.policy import Policy
from covey.types import Completion, Sampling

from ...tiny import plain_logprobs

CONFIGS: dict[str, Any] = {"llama": LlamaConfig, "qwen2": Qwen2Config, "qwen3": Qwen3Config}
TOKENIZER = nano_tokenizer()
PROMPT = (5, 6, 7)
SETTINGS = EngineConfig(name="vllm", cache_bytes=20_000_000, max_rows=16)


def tiny_policy(architecture: str, *, tied: bool) -> Policy:
    """Random weights with sharp logits; no stop token."""
    register()
    config = CONFIGS[architecture](
        vocab_size=len(TOKENIZER), hidden_size=128, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=32, max_position_embeddings=512, initializer_range=0.2,
        tie_word_embeddings=tied, bos_token_id=None, eos_token_id=None, pad_token_id=None,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        model = AutoModelForCausalLM.from_config(config, attn_implementation="covey")
    tokenizer = copy.deepcopy(TOKENIZER)
    tokenizer.eos_token = None
    return Policy(model=model, tokenizer=tokenizer, precision=torch.float32, head_is_linear=True)


@contextmanager
def serving(policy: Policy) -> Iterator[VLLMEngine]:
    engine = build(policy, SETTINGS)
    try:
        yield engine
    finally:
        engine.close()


@contextmanager
def server_of(model: Path, log: Path, more: str = "") -> Iterator[tuple[str, "subprocess.Popen[bytes]"]]:
    """vLLM's own server of a folder: its address and its process."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    words = f"--model {model} --host 127.0.0.1 --port {port} --enforce-eager --max-model-len 512 --dtype float32 {more}"
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", *words.split()]
    environment = os.environ | {"VLLM_SERVER_DEV_MODE": "1"}
    with log.open("wb") as file:
        process = subprocess.Popen(command, env=environment, stdout=file, stderr=file, start_new_session=True)
        try:
            wait_for(port, process, log)
            yield f"http://127.0.0.1:{port}", process
        finally:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def wait_for(port: int, process: "subprocess.Popen[bytes]", log: Path) -> None:
    deadline = time.monotonic() + 240
    while time.monotonic() < deadline:
        assert process.poll() is None, log.read_text()[-2000:]
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.5)
    pytest.fail(f"no server: {log.read_text()[-2000:]}")


def train_a_little(policy: Policy, seed: int, size: float = 0.05) -> None:
    """Move what is trained by random amounts."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in policy.model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn(parameter.shape, generator=generator) * size)


def sample(engine: VLLMEngine, sampling: Sampling, n: int = 4, prompt: Sequence[int] = PROMPT) -> list[Completion]:
    return asyncio.run(engine.generate(prompt, n, sampling))


def gap(policy: Policy, completions: Sequence[Completion], sampling: Sampling) -> float:
    """The most nats between what the engine said and what transformers say of the whole completion."""
    return max(float(gaps(policy, completion, sampling).max()) for completion in completions)


def gaps(policy: Policy, completion: Completion, sampling: Sampling) -> Tensor:
    expected = plain_logprobs(policy.causal_lm, PROMPT, completion, sampling)
    return (expected - torch.tensor(completion.logprobs)).abs()
