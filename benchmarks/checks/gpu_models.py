"""Policies of random weights made where they run, what they sample, and the batches that they train on."""

import asyncio
import copy
import os
import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.speed.models import model_config, saved_model, word_tokenizer
from benchmarks.speed.workloads import Workload
from covey.algorithm.build import build_objective
from covey.algorithm.settings import AlgorithmConfig
from covey.engine.base import EngineStats
from covey.engine.native.engine import NativeEngine
from covey.policy.logprobs import Scoring, score_tokens
from covey.policy.models.loading import load_policy, policy_in_memory
from covey.policy.policy import Policy, inference
from covey.policy.reference import make_reference
from covey.policy.settings import ModelConfig
from covey.rollouts.rollout import causal_rollout
from covey.run.memory.model_shapes import PUBLIC
from covey.trainer.batch import count, make_batch, make_rows
from covey.trainer.optimizer import TrainerSettings
from covey.trainer.settings import OptimizerConfig
from covey.trainer.trainer import Trainer
from covey.types import Batch, Completion, Group, Prompt, Reward, Sampling

KERNELS = os.environ.get("GPU_CHECK_KERNELS", "auto")
"""model.kernels of policies made here."""
CACHE_BYTES = {"cpu": 2**26, "cuda": 24 * 2**30}


@dataclass(frozen=True)
class Sampled:
    """What the last of several equal runs of the engine gave."""

    prompts: list[list[int]]
    completions: list[list[Completion]]
    seconds: float
    """Median of all runs but the first."""
    spread: tuple[float, float]
    """Their fastest and slowest."""
    stats: EngineStats
    kernels: str


def device_here() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def make_policy(size: str = "tiny", device: str | None = None, **settings: Any) -> Policy:
    """Make a Qwen2 of random weights, the same for the same size, where it will run; bf16 unless `settings` say so."""
    place = device or device_here()
    work = Workload(size, (8,))
    chosen = ModelConfig(name=size, device=place, **{"precision": "bfloat16", "kernels": KERNELS, **settings})
    with torch.random.fork_rng(devices=[]), torch.device("cpu" if size == "tiny" else place):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(model_config(work), dtype=torch.float32)
    if size == "tiny":  # usual weights are so small that every token is as likely as every other
        with torch.no_grad():
            for weight in model.parameters():
                weight.mul_(4.0) if weight.dim() > 1 else None
    return policy_in_memory(model, word_tokenizer(work.shape.vocabulary), chosen, seed=0)


def config_of(shape: str | Mapping[str, Any]) -> Any:
    """Return the configuration of a public name that covey knows, or of dimensions with their kind."""
    dimensions = dict(PUBLIC[shape.lower()] if isinstance(shape, str) else shape)
    return AutoConfig.for_model(dimensions.pop("kind"), **dimensions)


def make_shaped(config: Any, **settings: Any) -> Policy:
    """Make a policy of random weights of a configuration where it will run, frozen ones in half precision."""
    chosen = ModelConfig(name="shaped", device=device_here(), **{"precision": "bfloat16", **settings})
    kept = torch.bfloat16 if chosen.lora_rank else torch.float32
    config = copy.deepcopy(config)
    config.pad_token_id, config.bos_token_id, config.eos_token_id = 0, None, config.vocab_size
    with torch.random.fork_rng(devices=[]), torch.device(device_here()):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, dtype=kept)
    return policy_in_memory(model, word_tokenizer(config.vocab_size), chosen, seed=0)


def make_loaded_policy(folder: Path, **settings: Any) -> Policy:
    """Load a saved model, as a run does: 4-bit weights come from files only."""
    name = saved_model(Workload("S", (8,)), folder)
    return load_policy(ModelConfig(name=name, device=device_here(), **settings), seed=0)


def sample(
    policy: Policy,
    num_prompts: int,
    group: int,
    how: Sampling,
    prompt_length: int = 16,
    max_rows: int = 512,
    times: int = 1,
) -> Sampled:
    """Sample once to warm up, and then as many times, which are timed."""
    draw, vocabulary = random.Random(0), policy.causal_lm.config.vocab_size
    lengths = [prompt_length + index % 7 for index in range(num_prompts)]
    prompts = [[draw.randrange(1, vocabulary) for _ in range(length)] for length in lengths]
    engine = NativeEngine(policy, CACHE_BYTES[policy.device.type], max_rows)

    async def run() -> list[list[Completion]]:
        return list(await asyncio.gather(*(engine.generate(prompt, group, how) for prompt in prompts)))

    asyncio.run(run())
    seconds = []
    for _ in range(times):
        engine.take_stats()
        synchronize()
        started = time.perf_counter()
        found = asyncio.run(run())
        synchronize()
        seconds.append(time.perf_counter() - started)
    spread = min(seconds), max(seconds)
    return Sampled(prompts, found, statistics.median(seconds), spread, engine.take_stats(), engine.kernels)


def given_completions(
    policy: Policy, num_prompts: int, group: int, lengths: tuple[int, int], prompt_length: int, seed: int = 0
) -> tuple[list[list[int]], list[list[Completion]]]:
    """Random prompts, and random completions of random lengths in place of sampled ones."""
    draw, vocabulary = random.Random(seed), policy.causal_lm.config.vocab_size

    def ids(number: int) -> list[int]:
        return [draw.randrange(1, vocabulary) for _ in range(number)]

    prompts = [ids(prompt_length + draw.randrange(1 + prompt_length // 8)) for _ in range(num_prompts)]
    counts = [[draw.randint(*lengths) for _ in range(group)] for _ in range(num_prompts)]
    made = [[Completion(tuple(ids(n)), (-1.0,) * n, "length", 0) for n in row] for row in counts]
    return prompts, made


def batch_of(
    policy: Policy,
    prompts: Sequence[Sequence[int]],
    completions: Sequence[Sequence[Completion]],
    packing: str = "shared",
    micro_batch_tokens: int = 16384,
    attention: str | None = None,
) -> Batch:
    """Lay rollouts out; advantages are 1 and -1 by turns."""
    groups = [
        Group(Prompt(str(i), "x", "", {}), tuple(causal_rollout(ids, c, Reward(0.0, {}), "") for c in own), ())
        for i, (ids, own) in enumerate(zip(prompts, completions, strict=True))
    ]
    rows = make_rows(groups, [[1.0 if i % 2 else -1.0 for i in range(len(g.rollouts))] for g in groups])
    tokens, sequences = count(rows)
    return make_batch(
        rows,
        packing=packing,
        micro_batch_tokens=micro_batch_tokens,
        totals=(tokens, sequences, sequences),
        device=policy.device,
        attention=attention or policy.attention,
    )


def mismatch(policy: Policy, batch: Batch, how: Sampling | None = None) -> float:
    """Return the largest difference of log-probs between sampler and trainer, in nats."""
    scoring = Scoring(how or Sampling(), 0)
    with inference(policy.model):
        gaps = [
            (score_tokens(policy, part, scoring).logprob_L.double() - part.sampler_logprob_L).abs()
            for part in batch.micro_batches
        ]
    return max(float(gap.max()) for gap in gaps)


def branching(drawn: Sampled) -> list[list[Completion]]:
    """Return completions of which each begins as another of its group does: with half of that, and then of its own."""

    def joined(first: Completion, other: Completion) -> Completion:
        half = len(first.token_ids) // 2
        ids, logprobs = first.token_ids[:half] + other.token_ids[half:], first.logprobs[:half] + other.logprobs[half:]
        return replace(other, token_ids=ids, logprobs=logprobs)

    return [[joined(group[0], other) for other in group] for group in drawn.completions]


def make_trainer(
    policy: Policy, sampling: Sampling | None = None, optimizer: str = "adamw", chunk: int = 4096, **algorithm: Any
) -> Trainer:
    """Make a trainer of the policy; a penalty gets its reference."""
    how = AlgorithmConfig(**algorithm)
    objective = build_objective(how, norm_length=64)
    reference = make_reference(policy, refreshed=False) if objective.needs_reference else None
    settings = TrainerSettings(
        objective, how, OptimizerConfig(name=optimizer, lr=1e-6), 10, sampling or Sampling(), chunk, are_sampled=False
    )
    return Trainer(policy, settings, reference)


def second_step(trainer: Trainer, batch: Batch) -> float:
    """Return the seconds of a second step, after one that compiles and warms up."""
    trainer.step(batch, 0)
    return timed(lambda: trainer.step(batch, 1))


def timed(call: Callable[[], Any]) -> float:
    """Return the seconds of a call, the work of the device included."""
    synchronize()
    started = time.perf_counter()
    call()
    synchronize()
    return time.perf_counter() - started


def gradient(policy: Policy, batch: Batch) -> torch.Tensor:
    """Return the gradient of a step on the host, in float64; the step itself is made at rate 0."""
    found: list[torch.Tensor] = []

    def keep() -> None:
        found.extend(p.grad.flatten().double().cpu() for p in policy.model.parameters() if p.grad is not None)

    trainer = make_trainer(policy, optimizer="sgd")
    trainer.settings.optimizer.lr = 0.0
    trainer.step(batch, 0, keep)
    trainer.drop_gradients()
    return torch.cat(found)


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
