"""Time a push of weights into a vLLM that runs: random weights of Qwen2.5-0.5B's shape. Run it where vLLM is installed.

python -m benchmarks.scale.vllm_push float32 bfloat16
"""

import asyncio
import sys
import time

import torch
from transformers import AutoModelForCausalLM, Qwen2Config

from covey.engine.base import WeightSet
from covey.engine.settings import EngineConfig
from covey.engine.vllm.build import build
from covey.engine.weights import make_weight_set
from covey.policy.attention.base import register
from covey.policy.models.nano import nano_tokenizer
from covey.policy.policy import DTYPES, Policy

SHAPE = Qwen2Config(
    vocab_size=151936,
    hidden_size=896,
    intermediate_size=4864,
    num_hidden_layers=24,
    num_attention_heads=14,
    num_key_value_heads=2,
    max_position_embeddings=1024,
    tie_word_embeddings=True,
)
REPETITIONS = 3


def policy_of(precision: str) -> Policy:
    """Return a random policy, trained in float32 and computed in `precision`."""
    register()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        model = AutoModelForCausalLM.from_config(SHAPE, attn_implementation="covey", dtype=torch.float32)
    return Policy(model=model, tokenizer=nano_tokenizer(), precision=DTYPES[precision], head_is_linear=True)


def pushes(precision: str) -> list[tuple[float, float]]:
    """Return the seconds of making a set and of pushing it, for each repetition."""
    policy = policy_of(precision)
    engine = build(policy, EngineConfig(name="vllm", cache_bytes=200_000_000, max_rows=4))
    found = []
    try:
        for version in range(1, REPETITIONS + 1):
            started = time.perf_counter()
            weights: WeightSet = make_weight_set(policy, version)
            made = time.perf_counter()
            asyncio.run(engine.update(weights, "keep"))
            found.append((made - started, time.perf_counter() - made))
    finally:
        engine.close()
    return found


if __name__ == "__main__":
    for precision in sys.argv[1:] or ["float32", "bfloat16"]:
        for made, pushed in pushes(precision):
            print(f"{precision}: set made in {made:.2f} s, pushed in {pushed:.2f} s", flush=True)
