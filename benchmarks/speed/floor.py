"""What the machine itself allows: rates measured here, operations and bytes counted from the shape of the model.

`python -m benchmarks.speed.floor [cuda]` measures in a process of its own and prints JSON.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks.speed.contest import ROOT, SPIN
from benchmarks.speed.workloads import SHAPES, Job, Shape, Workload

BYTES = {"float32": 4, "bfloat16": 2}
DECODE_ROWS, TRAINING_ROWS = 64, 1024
SECONDS_A_MEASUREMENT = 0.3
CPU_SIZES, CUDA_SIZES = ("XS", "S", "M"), ("0.5B", "1.5B")
STREAM_BYTES = {"cpu": 2**28, "cuda": 2**32}
"""Far more than caches hold."""


@dataclass(frozen=True)
class Rates:
    """Of one model shape in one precision."""

    decode_flops: float
    """Operations a second of its largest products at 64 rows."""
    training_flops: float
    """The same at 1024 rows."""
    bandwidth: float
    """Bytes a second read from memory."""


def body_parameters(shape: Shape) -> int:
    """Entries of the weight matrices that every token is multiplied with, the output head aside."""
    attention = 2 * shape.hidden * shape.head_width * (shape.heads + shape.key_value_heads)
    return shape.layers * (attention + 3 * shape.hidden * shape.intermediate)


def head_parameters(shape: Shape) -> int:
    return shape.vocabulary * shape.hidden


def training_flops(work: Workload, *, only_adapters: bool = False) -> float:
    """Forward and backward: each prompt once, the head on completions only; attention over what a token sees.

    Frozen weights need no gradient: a third of their products. Adapters' own are not counted.
    """
    shape, length = work.shape, work.completion_length
    num_prompt_tokens = sum(work.prompt_lengths)
    seen = sum(p * p / 2 + work.group_size * length * (p + length / 2) for p in work.prompt_lengths)
    factor = 4 if only_adapters else 6
    body = factor * body_parameters(shape) * (num_prompt_tokens + work.num_tokens)
    return body + factor * head_parameters(shape) * work.num_tokens + 3 * _attention_flops(shape, seen)


def decode_step(work: Workload, position: int, precision: str) -> tuple[float, float]:
    """(operations, bytes read) for the next token of every row, which has `position` own tokens by now."""
    shape = work.shape
    parameters = body_parameters(shape) + head_parameters(shape)
    seen = work.group_size * sum(p + position for p in work.prompt_lengths)
    cached = sum(work.prompt_lengths) + work.num_rollouts * position
    width = 2 * shape.layers * shape.head_width * shape.key_value_heads
    operations = 2 * parameters * work.num_rollouts + _attention_flops(shape, seen)
    return operations, BYTES[precision] * (parameters + width * cached)


def sampling_seconds(work: Workload, precision: str, rates: Rates) -> float:
    """Encode each prompt once, then one decode step for each token but the first."""
    seen = sum(p * p / 2 for p in work.prompt_lengths)
    prefill = 2 * body_parameters(work.shape) * sum(work.prompt_lengths) + _attention_flops(work.shape, seen)
    steps = (decode_step(work, position, precision) for position in range(1, work.completion_length))
    decode = sum(max(flops / rates.decode_flops, read / rates.bandwidth) for flops, read in steps)
    return prefill / rates.training_flops + decode


def training_seconds(work: Workload, rates: Rates, *, only_adapters: bool = False) -> float:
    return training_flops(work, only_adapters=only_adapters) / rates.training_flops


def _attention_flops(shape: Shape, seen: float) -> float:
    """Scores and weighted sum of `seen` pairs of a token and one it looks at, in all layers."""
    return 4 * shape.layers * shape.heads * shape.head_width * seen


def shares(job: Job, seconds: dict[str, Any], rates: Rates) -> dict[str, float]:
    """Floor / measured, of the phases the job has."""
    found = {}
    if job.phase != "training":
        spent = seconds["total" if job.phase == "sampling" else "sampling"]["median"]
        found["sampling"] = sampling_seconds(job.workload, job.precision, rates) / spent
    if job.phase != "sampling":
        found["training"] = (
            training_seconds(job.workload, rates, only_adapters=job.lora_rank > 0) / seconds["training"]["median"]
        )
    return found


# ------------------------------------------------------------------------------------------------ measuring


def measured(device: str = "cpu", sizes: tuple[str, ...] = CPU_SIZES) -> dict[str, Rates]:
    """Rates by "size/precision", taken in a fresh process."""
    words = [sys.executable, "-m", "benchmarks.speed.floor", device, *sizes]
    found = subprocess.run(words, check=True, capture_output=True, text=True, cwd=ROOT, env={**SPIN, **os.environ})
    return {name: Rates(**values) for name, values in json.loads(found.stdout).items()}


def main(device: str, sizes: list[str]) -> None:
    import torch

    bandwidth = _bandwidth(device)
    rates = {}
    for size in sizes:
        shape, flops = SHAPES[size], [0.0, 0.0]
        for precision, dtype in (("float32", torch.float32), ("bfloat16", torch.bfloat16)):
            # A bfloat16 can be multiplied as the float that it is, where there is no instruction for it
            found = [_best_rate(shape, rows, dtype, device) for rows in (DECODE_ROWS, TRAINING_ROWS)]
            flops = [max(each) for each in zip(flops, found, strict=True)]
            rates[f"{size}/{precision}"] = asdict(Rates(flops[0], flops[1], bandwidth))
    print(json.dumps(rates))


def _best_rate(shape: Shape, rows: int, dtype: Any, device: str) -> float:
    """The best library at the best of the model's own products: nothing of the pass can be faster."""
    outputs = (shape.intermediate, shape.hidden, shape.vocabulary)
    return max(_rate(rows, shape.hidden, width, dtype, device) for width in outputs)


def _rate(rows: int, inputs: int, outputs: int, dtype: Any, device: str) -> float:
    import torch

    x_NI, w_OI = (torch.randn(n, inputs, dtype=dtype, device=device) for n in (rows, outputs))
    products: list[Callable[[], Any]] = [lambda: torch.nn.functional.linear(x_NI, w_OI)]
    known = torch.backends.mkldnn.is_available() and (
        dtype == torch.float32 or torch.ops.mkldnn._is_mkldnn_bf16_supported()
    )
    if device == "cpu" and known:
        products.append(lambda: torch.ops.mkldnn._linear_pointwise(x_NI, w_OI, None, "none", [], ""))
    with torch.no_grad():
        return 2 * rows * inputs * outputs / min(_seconds(product, device) for product in products)


def _bandwidth(device: str) -> float:
    """Bytes a second of summing a large tensor."""
    import torch

    data = torch.ones(STREAM_BYTES[device] // 4, device=device)
    return STREAM_BYTES[device] / _seconds(data.sum, device)


def _seconds(call: Callable[[], Any], device: str) -> float:
    """Of the fastest of several calls, by the mean of as many as fill the time of a clock tick well."""
    import torch

    def wait() -> None:
        if device == "cuda":
            torch.cuda.synchronize()

    call()
    wait()
    best, ends = float("inf"), time.perf_counter() + SECONDS_A_MEASUREMENT
    while time.perf_counter() < ends:
        started = time.perf_counter()
        for _ in range(4):
            call()
        wait()
        best = min(best, (time.perf_counter() - started) / 4)
    return best


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
