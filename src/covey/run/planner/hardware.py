"""Machines a run is planned for: data sheets of GPUs, prices with their date, and what this machine measures."""

import os
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from covey.system.lookup import one_of


@dataclass(frozen=True, slots=True)
class Hardware:
    """One GPU, or a CPU."""

    name: str
    memory: float
    """Bytes."""
    flops: float
    """Of dense products a second, bfloat16 on a GPU, float32 on a CPU."""
    bandwidth: float
    """Bytes a second."""
    price: tuple[float, float] | None = None
    """Dollars an hour, low and high."""
    source: str = ""
    """Of the price, with its date."""
    is_gpu: bool = True

    def with_price(self, price: float | None) -> "Hardware":
        return self if price is None else replace(self, price=(price, price), source="as given")


MERCATUS, DEPLOYBASE = "mercatus-ai.com, May 2026", "deploybase, March 2026"
GPUS: dict[str, Hardware] = {
    "a100": Hardware("A100 80 GB", 80e9, 312e12, 2.0e12, (0.80, 3.00), MERCATUS),
    "h100": Hardware("H100 SXM 80 GB", 80e9, 989e12, 3.35e12, (1.99, 5.00), MERCATUS),
    "h200": Hardware("H200 141 GB", 141e9, 989e12, 4.8e12, (2.50, 7.00), MERCATUS),
    "b200": Hardware("B200 180 GB", 180e9, 2250e12, 8.0e12, (5.98, 10.57), f"RunPod by {DEPLOYBASE}"),
    "l40s": Hardware("L40S 48 GB", 48e9, 362e12, 0.864e12, (0.79, 1.40), DEPLOYBASE),
    "rtx4090": Hardware("RTX 4090 24 GB", 24e9, 165e12, 1.01e12, (0.34, 0.60), DEPLOYBASE),
    "rtx5090": Hardware("RTX 5090 32 GB", 32e9, 210e12, 1.79e12, (0.69, 1.22), DEPLOYBASE),
}
"""Memory, speed and bandwidth are those of data sheets; what is reached of them is in `seconds.py`."""
THIS = "here"
SECONDS, AT_LEAST = 0.15, 5
"""Of each of the two measurements of this machine."""


def named(name: str) -> Hardware:
    """Return a GPU of the table, or `here`, this machine. ValueError for another name."""
    return here() if one_of("--on", name, (*GPUS, THIS)) == THIS else GPUS[name]


def here() -> Hardware:
    """Return this machine: its first GPU by what it is called, else its CPU as it measures."""
    import torch

    if torch.cuda.is_available():
        found = torch.cuda.get_device_properties(0)
        letters = "".join(c for c in found.name.lower() if c.isalnum())
        sheet = next((gpu for key, gpu in GPUS.items() if key in letters), GPUS["a100"])
        return replace(sheet, name=f"{found.name}, here", memory=float(found.total_memory), price=None)
    cores = torch.get_num_threads()
    memory = float(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    label = f"this CPU, {cores} thread{'s' if cores > 1 else ''}"
    return Hardware(label, memory, _products(), _copies(), is_gpu=False)


def _products() -> float:
    """Return floating-point operations a second of a middling product, the best of several."""
    import torch

    left, right = torch.randn(256, 256), torch.randn(256, 256)
    return 2 * 256**3 / _fastest(lambda: left @ right)


def _copies() -> float:
    """Return bytes read and written a second of a copy that no cache holds."""
    import torch

    source = torch.zeros(1 << 22)
    target = torch.empty_like(source)
    return 2 * source.nbytes / _fastest(lambda: target.copy_(source))


def _fastest(work: Callable[[], object]) -> float:
    best, until, count = 1e9, time.perf_counter() + SECONDS, 0
    while time.perf_counter() < until or count < AT_LEAST:
        count += 1
        started = time.perf_counter()
        work()
        best = min(best, time.perf_counter() - started)
    return best
