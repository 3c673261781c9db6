"""Tokens a second of hybrids beside a Llama of as many weights, in covey's engine.

    python -m benchmarks.real.hybrids        # rows 4, 16 and 64, both precisions; writes results/real_runs.json
    python -m benchmarks.real.hybrids --rows 16 --precision float32 --repetitions 5

Random weights of about 130 million, shaped as hybrids are, and SmolLM2's own shape of a Llama; the
tokenizer is SmolLM2's. All engines sample in one process and take turns; a line gives the median of the repetitions and
its share of the Llama's. Lines of other runs stay in the file. The folders lie beside the real models;
`benchmarks.real.beside_trl FOLDER --general` takes them.
"""

import argparse
import asyncio
import json
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.demo.runs import machine
from benchmarks.real.models import model_folder

RESULTS = Path(__file__).resolve().parents[1] / "results" / "real_runs.json"
BASE = {
    "hidden_size": 576,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "intermediate_size": 1536,
    "head_dim": 64,
}
DELTA = {"linear_num_value_heads": 9, "linear_num_key_heads": 9, "linear_key_head_dim": 64, "linear_value_head_dim": 64}
SELECT = {"mamba_num_heads": 18, "mamba_head_dim": 64, "ssm_state_size": 64, "n_groups": 2, "chunk_size": 64}
MAMBA = {"mamba_n_heads": 18, "mamba_d_head": 64, "mamba_d_state": 64, "mamba_n_groups": 2, "mamba_chunk_size": 64}
MULTIPLIERS = {"key_multiplier": 0.5, "ssm_in_multiplier": 0.8, "attention_out_multiplier": 0.9}
SHAPES: Mapping[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {"num_hidden_layers": 30}),
    "qwen3.5-like": (
        "qwen3_5_text",
        {**DELTA, "num_hidden_layers": 24, "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 6},
    ),
    "nemotron-h-like": (
        "nemotron_h",
        {**SELECT, "layers_block_type": ["mamba", "mlp"] * 16 + ["attention", "mlp"] * 4, "intermediate_size": 2304},
    ),
    "lfm2-like": (
        "lfm2",
        {
            "num_hidden_layers": 26,
            "layer_types": (["conv"] * 2 + ["full_attention"]) * 8 + ["conv"] * 2,
            "block_auto_adjust_ff_dim": False,
        },
    ),
    "lfm3-like": (
        "lfm3",
        {
            "num_hidden_layers": 26,
            "layer_types": ["conv", "conv", "sliding_attention"] * 8 + ["conv", "full_attention"],
        },
    ),
    "falcon-h1-like": ("falcon_h1", {**MAMBA, "num_hidden_layers": 18, "mamba_d_ssm": 1152, **MULTIPLIERS}),
    "bamba-like": ("bamba", {**MAMBA, "num_hidden_layers": 22, "attn_layer_indices": [3, 9, 15, 21]}),
    "granite-like": (
        "granitemoehybrid",
        {
            **MAMBA,
            "num_hidden_layers": 22,
            "layer_types": (["mamba"] * 5 + ["attention"]) * 3 + ["mamba"] * 4,
            "shared_intermediate_size": 1536,
            "num_local_experts": 0,
        },
    ),
    "olmo-hybrid-like": (
        "olmo_hybrid",
        {**DELTA, "num_hidden_layers": 24, "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 6},
    ),
}
NUM_TOKENS, PROMPT = 64, 32


def folder_of(name: str) -> Path:
    """Return the folder of a shape, made first where it is not there."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    folder = model_folder("smollm2-135m").parent / f"random-{name}"
    if (folder / "config.json").is_file():
        return folder
    tokenizer = AutoTokenizer.from_pretrained(model_folder("smollm2-135m"))
    kind, shape = SHAPES[name]
    special = {key: getattr(tokenizer, key) for key in ("pad_token_id", "bos_token_id", "eos_token_id")}
    config = AutoConfig.for_model(
        kind,
        vocab_size=len(tokenizer),
        tie_word_embeddings=True,
        max_position_embeddings=2048,
        **special,
        **BASE | shape,
    )
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def tokens_per_second(engine: Any, num_rows: int, num_tokens: int) -> float:
    from covey.types import Sampling

    async def run() -> int:
        prompt = [*range(100, 100 + PROMPT)]
        answers = await engine.generate(prompt, num_rows, Sampling(max_tokens=num_tokens, temperature=1.0, seed=1))
        return sum(len(answer.token_ids) for answer in answers)

    started = time.perf_counter()
    return asyncio.run(run()) / (time.perf_counter() - started)


def measure(shapes: Sequence[str], precision: str, rows: Sequence[int], repetitions: int) -> list[dict[str, Any]]:
    """Return the tokens a second of each shape and number of rows."""
    from covey.engine.native.engine import NativeEngine
    from covey.policy.models.loading import load_policy
    from covey.policy.settings import ModelConfig

    engines = {}
    for name in shapes:
        policy = load_policy(ModelConfig(name=str(folder_of(name)), precision=precision))
        assert policy.path == "fast", name
        engines[name] = NativeEngine(policy, 2**31, 256)
    found = []
    for num_rows in rows:
        speeds: dict[str, list[float]] = {name: [] for name in shapes}
        for engine in engines.values():
            tokens_per_second(engine, num_rows, 8)
        for _ in range(repetitions):
            for name, engine in engines.items():
                speeds[name].append(tokens_per_second(engine, num_rows, NUM_TOKENS))
        middle = {name: statistics.median(each) for name, each in speeds.items()}
        for name, each in speeds.items():
            share = middle[name] / middle["llama"]
            found.append({"shape": name, "precision": precision, "rows": num_rows, "speeds": each, "share": share})
            print(
                f"{name:16} {precision:9} {num_rows:3} rows {middle[name]:7.0f} tokens/s {share:6.0%} of the Llama",
                flush=True,
            )
    return found


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", default=[*SHAPES], help="the Llama is always among them")
    parser.add_argument("--rows", type=int, nargs="+", default=[4, 16, 64])
    parser.add_argument("--precision", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--repetitions", type=int, default=3)
    options = parser.parse_args(argv)
    results = json.loads(RESULTS.read_text()) if RESULTS.is_file() else {}
    for precision in options.precision:
        for each in measure([*dict.fromkeys(("llama", *options.shapes))], precision, options.rows, options.repetitions):
            name = f"sampling, {each['shape']}, {precision}, {each['rows']} rows"
            results[name] = {**each, "machine": machine()}
    RESULTS.write_text(json.dumps(results, indent=1, sort_keys=True) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
