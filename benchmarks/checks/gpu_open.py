"""What no GPU has shown yet: kernels in Triton, hybrids, and the tokens a second of a whole step from 0.5B to 4B."""

import time
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch

from benchmarks.checks.gpu_models import (
    batch_of,
    config_of,
    device_here,
    make_shaped,
    make_trainer,
    mismatch,
    sample,
    second_step,
    synchronize,
)
from covey.engine.native import graph
from covey.policy.attention.base import Rule
from covey.policy.attention.varlen import cached_rows, flash_rows
from covey.policy.kernels.gpu.tiles import Tiles
from covey.policy.kernels.gpu.trials import computes
from covey.types import Sampling

Figures = dict[str, Any]
HEADS = {"0.5B": (2, 7, 64), "1.5B": (2, 6, 128), "7B": (4, 7, 128), "4B": (8, 4, 128)}
"""Key/value heads, query heads of each, and their width."""
QWEN35: dict[str, Any] = {
    "kind": "qwen3_5_text",
    "hidden_size": 1024,
    "intermediate_size": 3584,
    "num_hidden_layers": 24,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 16,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 6,
    "vocab_size": 248320,
    "tie_word_embeddings": True,
}
TINY: dict[str, Any] = {
    **{key: value for key, value in QWEN35.items() if key not in ("layer_types", "head_dim")},
    **{"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 64},
    **{"linear_num_key_heads": 2, "linear_num_value_heads": 2, "head_dim": 16},
    **{"linear_key_head_dim": 16, "linear_value_head_dim": 16, "layer_types": ["linear_attention", "full_attention"]},
}
STEPS = {"0.5B": "Qwen2.5-0.5B", "1.5B": "Qwen2.5-1.5B", "4B": "Qwen3-4B"}
PLAIN: dict[str, Any] = {"kind": "qwen2", "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
PLAIN |= {"num_key_value_heads": 2, "intermediate_size": 64, "vocab_size": 64}
PACKAGES = ("fla", "causal_conv1d", "mamba_ssm")


def kernels(tiny: bool) -> Figures:
    """The draw and the cascade against plain operations at real heads; microseconds beside FlashAttention's."""
    device = torch.device(device_here())
    found: Figures = {"draw": computes("draw", device)}
    for size, heads in HEADS.items():
        found[f"cascade, {size}"] = computes("cascade", device, torch.bfloat16, *heads)
    if device.type == "cpu":
        return {"skipped": "no GPU; tests/policy/kernels/gpu runs them through Triton's interpreter", **found}
    found["good"] = all(found.values())
    for rows in (32, 64, 512):
        found[f"{rows} rows"] = _attention(rows, *HEADS["1.5B"])
    logits = torch.randn(64, 151936, device=device)
    from covey.policy.kernels.gpu.draws import draw_tempered

    keys = torch.arange(64, device=device)
    found["draw of 64 rows, us"] = _microseconds(lambda: draw_tempered(logits, 1.0, keys, keys))
    return found


def _attention(rows: int, num_heads: int, queries: int, width: int, prompt: int = 300, own: int = 512) -> Figures:
    """One layer of rows in groups of eight, `own` tokens behind their prompts, in microseconds."""
    make = partial(torch.randn, device=device_here(), dtype=torch.bfloat16)
    shared = [make(rows // 8, num_heads, prompt, width) for _ in range(2)]
    cached = [make(rows, num_heads, prompt + 2 * own, width) for _ in range(2)]
    query = make(rows, num_heads * queries, width)
    tiles, rule = Tiles(rows, query.device), Rule(width**-0.5, None)
    tiles.write([(row // 8, prompt) for row in range(rows)])
    position = torch.full((rows,), prompt + own, device=query.device)
    places = cached_rows(position + 1, num_heads, cached[0].shape[2])
    once = _microseconds(lambda: tiles.attend(query, (shared[0], shared[1]), (cached[0], cached[1]), position, rule))
    each = _microseconds(lambda: flash_rows(query, cached[0], cached[1], places, rule))
    read = 2 * num_heads * width * 2 * (rows // 8 * prompt + rows * own)
    return {"once": once, "FlashAttention": each, "read_GBps": round(read / once / 1e3)}


def _microseconds(call: Callable[[], Any]) -> float:
    """As a graph, so that launches cost what they do in decoding."""
    call()
    recorded = torch.cuda.CUDAGraph()
    with torch.cuda.graph(recorded):
        call()
    recorded.replay()
    synchronize()
    started = time.perf_counter()
    for _ in range(50):
        recorded.replay()
    synchronize()
    return round(1e6 * (time.perf_counter() - started) / 50, 1)


def sharing(tiny: bool) -> Figures:
    """Milliseconds a decode step of 1.5B with prompts read once and read by every row, in one process."""
    found: Figures = {}
    real = graph.can_share
    policy = make_shaped(config_of(PLAIN if tiny else STEPS["1.5B"]))
    prompt, length, rows = (8, 8, (8,)) if tiny else (300, 512, (64, 512))
    try:
        for name, choice in (("once", real), ("by every row", lambda policy, shape: False)):
            graph.can_share = choice
            for count in rows:
                how = Sampling(max_tokens=length)
                drawn = sample(policy, count // 8, 8, how, prompt, max_rows=count, times=1 if tiny else 2)
                found[f"{count} rows, {name}, ms"] = round(1e3 * drawn.seconds / length, 2)
    finally:
        graph.can_share = real
    return found


def hybrid(tiny: bool) -> Figures:
    """Qwen3.5's shape at 0.8B: sampler against trainer, tokens a second of decoding and of training."""
    found: Figures = {"packages": [name for name in PACKAGES if find_spec(name) is not None]}
    policy = make_shaped(config_of(TINY if tiny else QWEN35))
    prompts, length, prompt = (2, 8, 8) if tiny else (8, 128, 300)
    drawn = sample(policy, prompts, 8, Sampling(max_tokens=length), prompt)
    batch = batch_of(policy, drawn.prompts, drawn.completions, micro_batch_tokens=64 if tiny else 8192)
    gap = mismatch(policy, batch)
    seconds = second_step(make_trainer(policy), batch)
    tokens = sum(part.input_ids_BT.numel() for part in batch.micro_batches)
    return found | {
        "path": policy.path,
        "mismatch": gap,
        "decode_tokens_per_second": round(drawn.stats.sampled_tokens / drawn.seconds),
        "training_tokens_per_second": round(tokens / seconds),
        "good": gap < 0.1,
    }


def rates(tiny: bool) -> Figures:
    """Tokens a second of one GPU over a whole step: 16 prompts of 300, 8 answers of 512 tokens, all weights."""
    found: Figures = {}
    prompts, length, prompt = (2, 8, 8) if tiny else (16, 512, 300)
    for size in ("tiny",) if tiny else STEPS:
        adapters = {"lora_rank": 16} if size == "4B" else {}
        policy = make_shaped(config_of(PLAIN if tiny else STEPS[size]), **adapters)
        drawn = sample(policy, prompts, 8, Sampling(max_tokens=length), prompt)
        batch = batch_of(policy, drawn.prompts, drawn.completions, micro_batch_tokens=64 if tiny else 8192)
        trained = second_step(make_trainer(policy), batch)
        tokens = prompts * 8 * length
        found[f"{size}{', adapters' if adapters else ''}"] = {
            "sampling_s": round(drawn.seconds, 2),
            "training_s": round(trained, 2),
            "tokens_per_second": round(tokens / (drawn.seconds + trained)),
        }
        del policy, batch, drawn
        torch.cuda.empty_cache() if device_here() == "cuda" else None
    return found
