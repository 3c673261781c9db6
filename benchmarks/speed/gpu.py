"""One CUDA GPU: decoding against its memory bandwidth, training against its arithmetic, a full step against TRL."""

import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.speed import floor
from benchmarks.speed.cases import best_trl
from benchmarks.speed.contest import contest
from benchmarks.speed.ratios import Repetition
from benchmarks.speed.report import circumstances, save
from benchmarks.speed.table import figures
from benchmarks.speed.workloads import Job, Workload

PEAK_FLOPS = {"H100": 989e12, "H200": 989e12, "A100": 312e12}
"""bf16 without sparsity, as the makers state it; an unknown device is held against its own fastest product."""


@dataclass(frozen=True)
class Machine:
    """What it is measured on."""

    device: str
    name: str
    sizes: tuple[str, ...]
    rates: Mapping[str, floor.Rates]

    def peak_flops(self, size: str) -> float:
        known = [flops for name, flops in PEAK_FLOPS.items() if name in self.name]
        return known[0] if known else self.rates[f"{size}/bfloat16"].training_flops


def run(device: str, *, tiny: bool, num_repetitions: int, say: Callable[[str], None]) -> None:
    """ValueError where there is no such GPU. `tiny` tries the whole path on a model of nothing and keeps no result."""
    machine = look(device, tiny=tiny)
    rows: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        for size in machine.sizes:
            for name, measure in MEASURES.items():
                rows[f"{name}-{size}"] = measure(machine, size, num_repetitions, Path(folder))
                say(f"{name}-{size}: {rows[f'{name}-{size}']['figure']}, {rows[f'{name}-{size}']['bound']}")
    if not tiny:
        save("gpu", {"circumstances": circumstances(), "device": machine.name, "rows": rows})


def look(device: str, *, tiny: bool) -> Machine:
    """The device in words, and its rates."""
    import torch

    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError("benchmarks gpu needs a CUDA GPU and there is none")
    sizes = ("tiny",) if tiny else floor.CUDA_SIZES
    name = torch.cuda.get_device_name() if device == "cuda" else device
    return Machine(device, name, sizes, floor.measured(device, sizes))


def job(machine: Machine, size: str, phase: Any) -> Job:
    """64 rollouts in bf16: eight prompts, groups of eight."""
    prompt, completion = (8, 8) if size == "tiny" else (256, 256)
    work = Workload(size, (prompt,) * 8, completion)
    return Job("covey", work, phase, "bfloat16", micro_batch_rollouts=16, device=machine.device)


def decode(machine: Machine, size: str, num_repetitions: int, folder: Path) -> dict[str, Any]:
    """Tokens a second of sampling, prefill included, against reading weights and cache once a step."""
    own = job(machine, size, "sampling")
    found = _contest({"covey": own, "trl": best_trl(own)}, num_repetitions, folder)
    spent = found["contestants"]["covey"]["tokens_per_second"]["median"]
    rates = machine.rates[f"{size}/bfloat16"]
    limit = own.workload.num_tokens / floor.sampling_seconds(own.workload, "bfloat16", rates)
    bound = f"{spent / limit:.0%} of the floor ({limit:.0f} tokens/s at {rates.bandwidth / 1e9:.0f} GB/s)"
    figure = f"{spent:.0f} tokens/s, {found['ratio']['median']:.2f}x TRL"
    return {"what": f"sampling, {size}, 64 rows, bf16", "figure": figure, "bound": bound, **found}


def training(machine: Machine, size: str, num_repetitions: int, folder: Path) -> dict[str, Any]:
    """MFU of forward and backward; prompts count once, attention counts, recomputed activations do not."""
    own = job(machine, size, "training")
    found = _contest({"covey": own, "trl": best_trl(own)}, num_repetitions, folder)
    spent = found["contestants"]["covey"]["seconds"]["training"]["median"]
    flops, peak = floor.training_flops(own.workload) / spent, machine.peak_flops(size)
    figure = f"{flops / 1e12:.1f} TFLOP/s, {found['ratio']['median']:.2f}x TRL"
    bound = f"{flops / peak:.0%} MFU of {peak / 1e12:.0f} TFLOP/s"
    return {"what": f"training pass, {size}, bf16", "figure": figure, "bound": bound, **found}


def full_step(machine: Machine, size: str, num_repetitions: int, folder: Path) -> dict[str, Any]:
    """Against TRL with transformers' generation."""
    own = job(machine, size, "step")
    found = _contest({"covey": own, "trl": best_trl(own)}, num_repetitions, folder)
    spread = found["ratio"]
    seconds = {name: figures["seconds"]["total"]["median"] for name, figures in found["contestants"].items()}
    return {
        "what": f"full step, {size}, bf16",
        "figure": f"{seconds['covey']:.2f} s",
        "bound": f"TRL {seconds['trl']:.2f} s: {spread['median']:.2f}x ({spread['low']:.2f} to {spread['high']:.2f})",
        **found,
    }


def _contest(jobs: Mapping[str, Job], num_repetitions: int, folder: Path) -> dict[str, Any]:
    repetitions: list[Repetition] = contest(jobs, num_repetitions, folder / "models", folder / "logs")
    return {**figures(repetitions, "seconds"), "raw": repetitions}


MEASURES: dict[str, Callable[[Machine, str, int, Path], dict[str, Any]]] = {
    "decode": decode,
    "training": training,
    "step": full_step,
}
