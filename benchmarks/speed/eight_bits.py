"""Milliseconds of a decode step with the trained weights and with eight bits, beside the floor.

    python -m benchmarks.speed.eight_bits   # SmolLM2-135M; writes results/real_runs.json
    python -m benchmarks.speed.eight_bits --model qwen2.5-coder-0.5b --rows 1 4 16

A step is what 48 more tokens take, by 48: packing and the prompt's pass are in both. Engines take turns. The floor
reads the weights once at the best rate here, of torch's sum or of one large product of the engine's, or multiplies at
the rate of this.
"""

import argparse
import asyncio
import json
import statistics
import sys
import time
from collections.abc import Sequence
from typing import Any

from benchmarks.demo.runs import machine
from benchmarks.real.hybrids import RESULTS
from benchmarks.real.models import model_folder
from benchmarks.speed import floor

SHORT, LONG, PROMPT = 16, 64, 32
BYTES = {"float32": 4, "bfloat16": 2, "int8": 1}


def seconds(engine: Any, num_rows: int, num_tokens: int) -> float:
    from covey.types import Sampling

    started = time.perf_counter()
    sampling = Sampling(max_tokens=num_tokens, temperature=1.0, seed=1)
    answers = asyncio.run(engine.generate([*range(100, 100 + PROMPT)], num_rows, sampling))
    assert max(len(answer.token_ids) for answer in answers) == num_tokens, "no answer may end"
    return time.perf_counter() - started


def engines_of(model: str) -> tuple[dict[str, Any], int]:
    """Engines by the type of their products, and how many weights a step reads."""
    from covey.engine.native.decode_weights import own_bytes
    from covey.engine.native.engine import NativeEngine
    from covey.policy.models.loading import load_policy
    from covey.policy.settings import ModelConfig

    engines: dict[str, Any] = {}
    for precision in ("float32", "bfloat16"):
        policy = load_policy(ModelConfig(name=str(model_folder(model)), precision=precision))
        policy.causal_lm.generation_config.eos_token_id = [len(policy.tokenizer) - 1]  # type: ignore[union-attr]
        engines[precision] = NativeEngine(policy, 2**30, 256)
        engines[f"int8 beside {precision}"] = NativeEngine(policy, 2**30, 256, weights="int8")
    return engines, own_bytes(policy) // 2


def own_rate(rows: int, dtype: Any) -> float:
    """Products of weights and numbers a second, of one product of the engine's own that is larger than caches."""
    import torch

    from covey.engine.native.panels import CompiledLinear, Weights

    layer = CompiledLinear(Weights.of(torch.randn(32768, 2048)), dtype)
    return rows * 32768 * 2048 / floor._seconds(lambda: layer(torch.ones(rows, 2048)), "cpu")


def measure(model: str, rows: Sequence[int], repetitions: int) -> list[dict[str, Any]]:
    import torch

    engines, num_weights = engines_of(model)
    bandwidth, rate = max(floor._bandwidth("cpu"), 4 * own_rate(1, torch.float32)), 2 * own_rate(64, torch.bfloat16)
    print(f"{num_weights / 1e6:.1f} million weights, {bandwidth / 1e9:.1f} GB/s, {rate / 1e9:.0f} GFLOP/s in bfloat16")
    found = []
    for num_rows in rows:
        steps: dict[str, list[float]] = {name: [] for name in engines}
        for _ in range(repetitions):
            for name, engine in engines.items():
                spent = seconds(engine, num_rows, LONG) - seconds(engine, num_rows, SHORT)
                steps[name].append(1e3 * spent / (LONG - SHORT))
        for name, each in steps.items():
            read = 1e3 * BYTES[name.split()[0]] * num_weights / bandwidth
            least = max(read, 2e3 * num_weights * num_rows / rate) if name == "bfloat16" else read
            middle = statistics.median(each)
            found.append({"weights": name, "rows": num_rows, "milliseconds": each, "floor": least})
            print(
                f"{num_rows:3} rows {name:22} {middle:6.1f} ms ({min(each):.1f} to {max(each):.1f}), floor {least:.1f}"
            )
    return found


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 4, 16, 64])
    parser.add_argument("--repetitions", type=int, default=3)
    options = parser.parse_args(argv)
    results = json.loads(RESULTS.read_text()) if RESULTS.is_file() else {}
    for each in measure(options.model, options.rows, options.repetitions):
        results[f"decode step, {options.model}, {each['weights']}, {each['rows']} rows"] = {
            **each,
            "machine": machine(),
        }
    RESULTS.write_text(json.dumps(results, indent=1, sort_keys=True) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
