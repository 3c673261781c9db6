"""What one GPU must show, part by part. Each returns its figures, with "right" where a result can be wrong."""

import json
import re
import shutil
import tempfile
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from benchmarks.checks.gpu_fits import fits as fits
from benchmarks.checks.gpu_fits import fits_trl as fits_trl
from benchmarks.checks.gpu_guarantees import guarantees as guarantees
from benchmarks.checks.gpu_models import (
    KERNELS,
    Sampled,
    batch_of,
    branching,
    device_here,
    given_completions,
    gradient,
    make_loaded_policy,
    make_policy,
    make_trainer,
    mismatch,
    sample,
    timed,
)
from benchmarks.checks.gpu_open import hybrid as hybrid
from benchmarks.checks.gpu_open import kernels as kernels
from benchmarks.checks.gpu_open import rates as rates
from benchmarks.checks.gpu_open import sharing as sharing
from benchmarks.speed import floor
from benchmarks.speed.workloads import Workload
from covey.config.schema import Config
from covey.environments.settings import ArithmeticConfig
from covey.loop import train
from covey.policy.attention.choice import varlen_obstacle
from covey.policy.policy import Policy
from covey.policy.settings import ModelConfig, chooses_liger
from covey.run.memory.memory_model import Workload as Load
from covey.run.memory.memory_model import kept_bytes, training_bytes
from covey.run.memory.model_shapes import shape_of
from covey.types import Sampling

Figures = dict[str, Any]
EXACT = {"float32": 1e-4, "bfloat16": 0.1}
"""Nats between engine and trainer, and the relative distance of gradients of two layouts, or of trees and rows."""
AGAINST_CPU = 1e-3
PEAK_FLOPS = {"H100": 989e12, "H200": 989e12, "A100": 312e12}
MODELS = {"tiny": "tiny", "0.5B": "Qwen2.5-0.5B", "1.5B": "Qwen2.5-1.5B"}


def facts(tiny: bool) -> Figures:
    """Versions, the device, its fastest product and how fast it copies."""
    found: Figures = {"torch": torch.__version__, "cuda": torch.version.cuda, "device": device_here()}
    if device_here() == "cpu":
        return found
    width, data = 8192, torch.empty(2**31, dtype=torch.uint8, device="cuda")
    other, x = torch.empty_like(data), torch.randn(width, width, device="cuda", dtype=torch.bfloat16)
    return found | {
        "device": torch.cuda.get_device_name(),
        "cudnn": torch.backends.cudnn.version(),
        "tflops": round(2e-12 * width**3 / _seconds(lambda: x @ x)),
        "copied_GBps": round(2e-9 * data.nbytes / _seconds(lambda: other.copy_(data))),
    }


def exact(tiny: bool) -> Figures:
    """Engine against trainer, layouts against each other, float32 here against float32 on a CPU."""
    found: Figures = {"right": True}
    for precision, rank in (("float32", 0), ("bfloat16", 0), ("bfloat16", 4)):
        policy, limit = make_policy(precision=precision, lora_rank=rank), EXACT[precision]
        drawn = sample(policy, 4, 4, Sampling(max_tokens=24))
        batch = batch_of(policy, drawn.prompts, drawn.completions)
        layouts = [
            gradient(policy, batch_of(policy, drawn.prompts, drawn.completions, packing, 64))
            for packing in ("shared", "packed", "padded")
        ]
        row = {
            "mismatch": mismatch(policy, batch),
            "layouts": max(_distance(g, layouts[0]) for g in layouts[1:]),
            "trees": _of_trees(policy, drawn),
        }
        found["right"] &= max(row.values()) < limit and policy.head_is_linear
        if precision == "float32":
            row["against the CPU"] = _distance(layouts[0], _gradient_on_cpu(policy, drawn))
            found["right"] &= row["against the CPU"] < AGAINST_CPU
        found[f"{precision}, rank {rank}, {policy.attention}"] = row
    return found


def waits(tiny: bool) -> Figures:
    """How often the host waits in a decode step and in a training step, as CUDA's own debug mode sees it."""
    if device_here() == "cpu":
        return {"skipped": "no GPU"}
    policy = make_policy()
    drawn = sample(policy, 4, 4, Sampling(max_tokens=8))
    trainer, batch = make_trainer(policy), batch_of(policy, drawn.prompts, drawn.completions)
    trainer.step(batch, 0)
    torch.cuda.set_sync_debug_mode("warn")
    num_steps = 2 * 63
    found = {
        "decode step": _waits(lambda: sample(policy, 4, 4, Sampling(max_tokens=64)), num_steps),
        "training step": _waits(lambda: trainer.step(batch, 1), len(batch.micro_batches)),
    }
    return {**found, "good": found["decode step"]["waits"] <= 2 and found["training step"]["waits"] <= 10}


def crashes(tiny: bool) -> Figures:
    """Settings that take another path on a GPU: how a step of each ends."""
    filters = Sampling(max_tokens=16, top_k=20, top_p=0.9)
    cases: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
        "gradient checkpointing": ({"gradient_checkpointing": True}, {}),
        "adapters": ({"lora_rank": 4, "gradient_checkpointing": True}, {}),
        "float16": ({"precision": "float16"}, {}),
        "offload": ({"activation_offload": True}, {}),
        "filters": ({}, {"sampling": filters}),
        "kl": ({}, {"kl_coef": 0.1}),
        "full kl": ({}, {"kl_coef": 0.1, "kl_estimator": "full"}),
        "high entropy": ({}, {"high_entropy_fraction": 0.5}),
        "small chunks": ({}, {"chunk": 8}),
    }
    if device_here() == "cpu":
        cases = {name: cases[name] for name in ("adapters", "filters", "full kl")}
    found: Figures = {name: _ending(model, rest) for name, (model, rest) in cases.items()}
    return {**found, "right": all(ending == "ok" for ending in found.values())}


def quantised(tiny: bool) -> Figures:
    """8-bit AdamW and a 4-bit base below adapters against float32."""
    if tiny:
        return {"skipped": "takes bitsandbytes and a larger model"}
    with tempfile.TemporaryDirectory() as folder:
        exact_base = make_loaded_policy(Path(folder), lora_rank=4)
        drawn = sample(exact_base, 4, 4, Sampling(max_tokens=16))
        batch = batch_of(exact_base, drawn.prompts, drawn.completions)
        wanted = gradient(exact_base, batch)
        four_bit = make_loaded_policy(Path(folder), lora_rank=4, load_in_4bit=True, precision="bfloat16")
        of_four = _distance(gradient(four_bit, batch_of(four_bit, drawn.prompts, drawn.completions)), wanted)
        moved = [_moved(make_loaded_policy(Path(folder)), name, drawn) for name in ("adamw", "adamw8bit")]
    return {"four bits": of_four, "eight bits": _distance(moved[1], moved[0]), "right": of_four < 0.6}


def learns(tiny: bool) -> Figures:
    """The arithmetic demo; then its second half again, resumed: on a CPU the same bits."""
    with tempfile.TemporaryDirectory() as folder:
        whole, half = Path(folder) / "whole", Path(folder) / "half"
        config = demo_config(tiny, Path(folder) / "cache")
        train(config, whole)
        lines = map(json.loads, (whole / "metrics.jsonl").read_text().splitlines())
        rewards = [line["sampled_reward_mean"] for line in lines if "sampled_reward_mean" in line]
        # Go back to the middle and come again
        shutil.copytree(whole, half)
        last = max((half / "checkpoints").iterdir())
        shutil.rmtree(last)
        (half / "summary.json").unlink()
        config.resume = str(half)
        train(config, half)
        files = [root / "checkpoints" / last.name / "policy" / "model.safetensors" for root in (whole, half)]
        is_same = files[0].read_bytes() == files[1].read_bytes()
    few = len(rewards) // 4 or 1
    first, final = sum(rewards[:few]) / few, sum(rewards[-few:]) / few
    return {"first": first, "last": final, "same bits": is_same, "right": is_same if tiny else final > first}


def demo_config(tiny: bool, cache: Path) -> Config:
    """The settings of `recipe=arithmetic` for 60 steps, or of a run of nothing for two."""
    config = Config(num_steps=60, groups_per_step=64, group_size=8)
    config.model = ModelConfig(precision="bfloat16", device=device_here(), deterministic=device_here() == "cuda")
    config.environment = ArithmeticConfig()
    config.sampling.max_tokens = 8
    config.optimizer.lr, config.optimizer.betas = 2e-4, [0.9, 0.99]
    config.cold_start.enabled, config.cold_start.num_steps, config.cold_start.target_accuracy = True, 400, 0.3
    config.cold_start.cache_dir = str(cache)
    config.evaluation.num_prompts, config.evaluation.num_samples, config.evaluation.k = 128, 1, [1]
    if tiny:
        config.num_steps, config.groups_per_step, config.group_size = 2, 2, 4
        config.model = ModelConfig(nano_hidden_size=16, nano_num_layers=1, nano_num_heads=2, device="cpu")
        config.environment = ArithmeticConfig(levels=[1], num_train=8, num_test=4)
        config.cold_start.enabled = config.preflight.enabled = False
        config.evaluation.num_prompts = 2
    config.output.save_every, config.output.progress = config.num_steps // 2, False
    config.output.keep_best = False
    return config


def decode(tiny: bool) -> Figures:
    """Milliseconds a decode step at few and at many rows, against reading weights and cache once."""
    size, prompt, length = ("tiny", 8, 8) if tiny else ("1.5B", 300, 1024)
    policy, found = make_policy(size), Figures()
    bandwidth = floor._bandwidth(device_here()) if not tiny else 1e10
    for rows in (4,) if tiny else (32, 64, 512):
        how, times = Sampling(max_tokens=length), 1 if tiny else 3
        drawn = sample(policy, max(1, rows // 8), min(8, rows), how, prompt, max_rows=rows, times=times)
        work = Workload(size, (prompt,) * max(1, rows // 8), length, min(8, rows))
        read = floor.decode_step(work, length // 2, "bfloat16")[1]
        steps = drawn.stats.sampled_tokens / rows
        seconds = drawn.seconds / steps
        found[f"{rows} rows"] = {
            "ms_a_step": round(1e3 * seconds, 2),
            "spread": [round(1e3 * each / steps, 2) for each in drawn.spread],
            "floor_ms": round(1e3 * read / bandwidth, 2),
            "of_the_floor": round(read / bandwidth / seconds, 3),
            "tokens_per_second": round(drawn.stats.sampled_tokens / drawn.seconds),
        }
    if not tiny:
        found["profile"] = _profile(lambda: sample(policy, 64, 8, Sampling(max_tokens=64), prompt))
        found["good"] = found["64 rows"]["of_the_floor"] >= 0.4 and found["512 rows"]["of_the_floor"] >= 0.5
    return found


def micro_batch_tokens() -> int:
    """Return the most tokens at once of a 1.5B model whose activations are kept in 80 GB, in powers of 2."""
    return 16384 if chooses_liger(KERNELS, is_half=True) else 8192


def training(tiny: bool) -> Figures:
    """A training step on shapes never seen against the same again, and its arithmetic against the peak."""
    size, lengths, prompt = ("tiny", (4, 20), 8) if tiny else ("1.5B", (200, 1000), 300)
    policy, found = make_policy(size), Figures()
    trainer = make_trainer(policy)
    weights = sum(weight.numel() for weight in policy.model.parameters())
    for seed in range(1 if tiny else 3):
        prompts, completions = given_completions(policy, 2 if tiny else 8, 8, lengths, prompt, seed)
        batch = batch_of(policy, prompts, completions, micro_batch_tokens=64 if tiny else micro_batch_tokens())
        new, again = (timed(lambda batch=batch: trainer.step(batch, 0)) for _ in range(2))
        tokens = sum(part.input_ids_BT.numel() for part in batch.micro_batches)
        flops = 6.0 * weights * tokens / again
        found[f"lengths {seed}"] = {"new": round(new, 3), "again": round(again, 3), "tflops": round(flops / 1e12, 1)}
    if not tiny:
        found["profile"] = _profile(lambda: trainer.step(batch, 0))
    last = found[f"lengths {0 if tiny else 2}"]
    peak = next((p for name, p in PEAK_FLOPS.items() if not tiny and name in torch.cuda.get_device_name()), None)
    if peak:
        found["of_peak"] = round(1e12 * last["tflops"] / peak, 3)
        found["good"] = found["of_peak"] >= 0.4 and last["new"] < 1.5 * last["again"] + 1
    return found


def memory(tiny: bool) -> Figures:
    """The bytes that `covey config` tells of a shape against the device's own count of a step."""
    if tiny or device_here() == "cpu":
        return {"skipped": "no GPU"}
    found: Figures = {}
    for again in (True, False):
        policy = make_policy("0.5B", gradient_checkpointing=again)
        shape = shape_of(ModelConfig(name=MODELS["0.5B"]))
        assert shape is not None
        by_liger = chooses_liger(KERNELS, is_half=True)
        load = Load("bfloat16", gradient_checkpointing=again, micro_batch_tokens=8192, fuses_layers=by_liger)
        told = (
            sum(kept_bytes(shape, load).values()) - kept_bytes(shape, load)["decode_copy"] + training_bytes(shape, load)
        )
        trainer = make_trainer(policy)
        batch = batch_of(policy, *given_completions(policy, 4, 8, (900, 1000), 300), micro_batch_tokens=8192)
        trainer.step(batch, 0)
        torch.cuda.reset_peak_memory_stats()
        trainer.step(batch, 1)
        taken = torch.cuda.max_memory_allocated()
        found[f"checkpointing {again}"] = {"told_GB": told / 1e9, "taken_GB": taken / 1e9, "ratio": taken / told}
        del trainer, policy, batch
        torch.cuda.empty_cache()
    return {**found, "good": all(0.9 < row["ratio"] < 1.1 for row in found.values())}


def step(tiny: bool) -> Figures:
    """A full step: sampling, scoring of the rollouts and the update."""
    found: Figures = {}
    for size in ("tiny",) if tiny else ("0.5B", "1.5B"):
        prompts, length, prompt = (2, 8, 8) if tiny else (64, 1024, 300)
        policy = make_policy(size)
        drawn = sample(policy, prompts, 8, Sampling(max_tokens=length), prompt)
        trainer = make_trainer(policy)
        batch = batch_of(
            policy, drawn.prompts, drawn.completions, micro_batch_tokens=64 if tiny else micro_batch_tokens()
        )
        trainer.step(batch, 0)
        trained = timed(lambda trainer=trainer, batch=batch: trainer.step(batch, 1))
        found[size] = {
            "sampling": round(drawn.seconds, 2),
            "training": round(trained, 2),
            "step": round(drawn.seconds + trained, 2),
            "rows": drawn.stats.peak_rows,
        }
    return found


def against_trl(tiny: bool) -> Figures:
    """A full step against TRL with transformers' generation."""
    if tiny:
        return {"skipped": "takes TRL in processes of its own; tests/benchmarks tries it"}
    from benchmarks.speed import gpu

    machine = gpu.Machine("cuda", torch.cuda.get_device_name(), ("0.5B",), {})
    with tempfile.TemporaryDirectory() as folder:
        row = gpu.full_step(machine, "0.5B", 1, Path(folder))
    return {"covey": row["figure"], "trl": row["bound"], "good": row["ratio"]["median"] >= 5}


def _of_trees(policy: Policy, drawn: Sampled) -> float:
    """Return how far the gradient of branching completions as trees of prefixes is from that of padded rows.

    Through varlen where it computes this policy: on a GPU in half precision, on a CPU by its reference.
    """
    attention = policy.attention if varlen_obstacle(policy.heads) else "varlen"
    made = branching(drawn)
    trees, rows = (
        batch_of(policy, drawn.prompts, made, packing, attention=attention) for packing in ("shared", "padded")
    )
    counts = [sum(part.input_ids_BT.numel() for part in batch.micro_batches) for batch in (trees, rows)]
    assert counts[0] < counts[1], "what they share is there once"
    return _distance(gradient(policy, trees), gradient(policy, rows))


def _gradient_on_cpu(policy: Policy, drawn: Sampled) -> torch.Tensor:
    other = make_policy(device="cpu", precision="float32")
    other.model.load_state_dict({name: weight.cpu() for name, weight in policy.model.state_dict().items()})
    return gradient(other, batch_of(other, drawn.prompts, drawn.completions, "shared", 64))


def _moved(policy: Policy, optimizer: str, drawn: Sampled) -> torch.Tensor:
    """Return what one step of an optimiser adds to the weights."""
    before = torch.cat([weight.detach().flatten().cpu() for weight in policy.model.parameters()])
    make_trainer(policy, optimizer=optimizer).step(batch_of(policy, drawn.prompts, drawn.completions), 0)
    return torch.cat([weight.detach().flatten().cpu() for weight in policy.model.parameters()]) - before


def _ending(model: Mapping[str, Any], rest: Mapping[str, Any]) -> str:
    try:
        policy = make_policy(**model)
        drawn = sample(policy, 3, 4, rest.get("sampling") or Sampling(max_tokens=16))
        metrics = make_trainer(policy, **rest).step(batch_of(policy, drawn.prompts, drawn.completions), 0)
    except Exception as error:  # whatever it is, it is what is looked for
        place = traceback.extract_tb(error.__traceback__)[-1]
        return (
            f"{type(error).__name__}: {str(error).splitlines()[0][:160]} ({Path(place.filename).name}:{place.lineno})"
        )
    return "ok" if metrics["skipped"] == 0 else "skipped"


def _waits(call: Callable[[], Any], times: int) -> Figures:
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        call()
    places = Counter(f"{Path(w.filename).name}:{w.lineno}" for w in seen if "synchroniz" in str(w.message))
    return {"waits": round(sum(places.values()) / times, 2), "places": places.most_common(8)}


def _profile(call: Callable[[], Any]) -> Figures:
    """Return what the GPU did: milliseconds and launches in all, and of the kernels that took longest."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        call()
    events = sorted(seen.key_averages(), key=lambda event: -event.self_device_time_total)
    longest = [(_short(event.key), event.count, round(event.self_device_time_total / 1e3, 2)) for event in events[:25]]
    spent, launches = sum(event.self_device_time_total for event in events), sum(event.count for event in events)
    return {"ms": round(spent / 1e3, 1), "launches": launches, "longest": longest}


def _short(kernel: str) -> str:
    """Return what tells a kernel from others: of torch's templates the function inside."""
    inside = re.findall(r"(\w*Functor\w*|\w+_kernel_cuda|direct_copy\w*)", kernel)
    name = kernel.removeprefix("void ").replace("at::native::", "")[:32]
    return f"{name} {' '.join(dict.fromkeys(inside))[:60]}".strip()


def _distance(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found - wanted).norm() / wanted.norm())


def _seconds(call: Callable[[], Any], times: int = 10) -> float:
    call()
    return timed(lambda: [call() for _ in range(times)]) / times
