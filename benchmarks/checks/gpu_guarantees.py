"""The promises of docs/trust/guarantees.md on a device, by the cases of tests/guarantees and without pytest.

On a GPU the tolerances are those of a CPU in float64 and float32; bfloat16 has its own. Resuming to the same bits is
the part `learns`, several processes are what one GPU cannot show.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from benchmarks.checks.gpu_models import CACHE_BYTES, batch_of, device_here, make_policy, mismatch, sample
from covey.engine.native.engine import NativeEngine
from covey.policy.policy import Policy
from covey.types import Completion, Sampling
from tests.guarantees.update.updates import EVERYTHING_ON, WAYS, WHOLE, farthest, make_case

Figures = dict[str, Any]
UPDATES = (
    ("gpt2", torch.float64, 1e-9),
    ("qwen2", torch.float32, 1e-5),
    ("llama", torch.float32, 1e-5),
    ("mistral", torch.float32, 1e-5),
    ("bert", torch.float64, 1e-9),
)
"""Architecture, type, and how far gradient and metrics may be from the plainest computation on the same device."""
NATS = {"float32": 1e-4, "bfloat16": 0.1}
"""How far a token's log-prob may be from the sampler's."""
SAMPLINGS = {
    "plain": Sampling(max_tokens=16),
    "temperature": Sampling(temperature=0.7, max_tokens=16),
    "filters": Sampling(temperature=0.7, top_k=20, top_p=0.9, min_p=0.02, max_tokens=16),
}
PROMPTS = [[(7 * index + place) % 250 + 1 for place in range(3 + index % 5)] for index in range(8)]


def guarantees(tiny: bool) -> Figures:
    """Promises 1, 2 and 5: one update however it is computed, what is sampled is trained, same seed same rollouts."""
    found: Figures = {"right": True}
    for architecture, dtype, tolerance in UPDATES[:1] if tiny else UPDATES:
        gap = update_gap(architecture, dtype, few=tiny)
        found[f"update, {architecture}"], found["right"] = gap, found["right"] and gap < tolerance
    for precision, rank in (("float32", 0),) if tiny else (("float32", 0), ("float32", 4), ("bfloat16", 0)):
        policy = make_policy(precision=precision, lora_rank=rank)
        gaps = {name: sampled_gap(policy, how) for name, how in SAMPLINGS.items()}
        found[f"sampled, {precision}, rank {rank}"] = gaps
        found["right"] &= max(gaps.values()) < NATS[precision]
    found["same rollouts"] = has_same_rollouts(make_policy(precision="float64"))
    found["right"] &= found["same rollouts"]
    return found


def update_gap(architecture: str, dtype: torch.dtype, few: bool = False) -> float:
    """Return how far gradients and metrics of every way are from the plainest, all on the device, relative."""
    ways = [replace(way, device=device_here()) for name, own in WAYS.items() for way in (own[:1] if few else own)]
    worst = farthest(make_case(architecture, dtype, EVERYTHING_ON), ways, plainest=replace(WHOLE, device=device_here()))
    return max(worst.gradient, worst.metric)


def sampled_gap(policy: Policy, how: Sampling) -> float:
    """Return the most nats by which a token's log-prob in the trainer, in any layout, is off the sampler's."""
    drawn = sample(policy, 4, 4, how)
    batches = [batch_of(policy, drawn.prompts, drawn.completions, packing, 64) for packing in ("shared", "padded")]
    return max(mismatch(policy, batch, how) for batch in batches)


def has_same_rollouts(policy: Policy) -> bool:
    """Tell whether completions are the same token for token alone, together, and where few rows fit at a time."""
    alone = [completions(policy, [index])[0] for index in range(len(PROMPTS))]
    together = completions(policy, range(len(PROMPTS)))
    in_waves = completions(policy, range(len(PROMPTS)), max_rows=5)
    return alone == together == in_waves


def completions(policy: Policy, chosen: Sequence[int], max_rows: int = 512) -> list[list[tuple[int, ...]]]:
    """Return the tokens of three completions of each chosen prompt, whose seed is its number."""
    engine = NativeEngine(policy, CACHE_BYTES[policy.device.type], max_rows)

    async def run() -> list[list[Completion]]:
        calls = (engine.generate(PROMPTS[index], 3, Sampling(max_tokens=12, seed=index)) for index in chosen)
        return list(await asyncio.gather(*calls))

    return [[completion.token_ids for completion in group] for group in asyncio.run(run())]
