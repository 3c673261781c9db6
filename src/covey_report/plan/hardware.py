"""Hardware of plans: data sheets, dated prices, measurements of this machine."""

import os
import re
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from covey.system.lookup import one_of, read_table


@dataclass(frozen=True, slots=True)
class Hardware:
    """One GPU, or a CPU."""

    name: str
    memory: float
    """Bytes."""
    flops: float
    """Floating-point operations of dense products a second, bfloat16 on a GPU, float32 on a CPU."""
    bandwidth: float
    """Bytes a second."""
    price: tuple[float, float] | None = None
    """Dollars an hour, low and high."""
    source: str = ""
    """Source of the price, with its date."""
    is_gpu: bool = True

    def with_price(self, price: float | None) -> "Hardware":
        return self if price is None else replace(self, price=(price, price), source="as given")


def _listed(given: dict[str, Any]) -> Hardware:
    price = given.pop("price", None)
    return Hardware(**given, price=None if price is None else tuple(price))


GPUS = {key: _listed(dict(given)) for key, given in read_table(Path(__file__).with_name("gpus.yaml")).items()}
"""Memory, speed and bandwidth are those of data sheets; `seconds.py` has the reachable shares."""
THIS = "here"
SECONDS, AT_LEAST = 0.15, 5
"""Seconds and fewest repetitions of each of the two measurements of this machine."""
GIGABYTES = re.compile(r"(\d+(?:\.\d+)?)\s*(gb|gib|g)?", re.IGNORECASE)


def named(name: str) -> Hardware:
    """Find a GPU by name or size, or `here`. ValueError.

    >>> named("RTX 3080").memory, named("10 GB").memory
    (10000000000.0, 10000000000.0)
    """
    if found := GIGABYTES.fullmatch(name.strip()):
        size = float(found[1]) * (2**30 if (found[2] or "").lower() == "gib" else 1e9)
        like = min(GPUS.values(), key=lambda gpu: (abs(gpu.memory - size), gpu.flops))
        return replace(like, name=f"a GPU of {name.strip()}, as fast as {like.name}", memory=size, price=None)
    key = "".join(c for c in name.lower() if c.isalnum())
    return here() if one_of("--on", key, (*GPUS, THIS)) == THIS else GPUS[key]


def here() -> Hardware:
    """Describe this machine: its first GPU, else its measured CPU."""
    import torch

    if torch.cuda.is_available():
        found = torch.cuda.get_device_properties(0)
        letters = "".join(c for c in found.name.lower() if c.isalnum())
        sheet = next((gpu for key, gpu in GPUS.items() if key in letters), GPUS["a100"])
        return replace(sheet, name=f"{found.name}, here", memory=float(found.total_memory), price=None)
    cores = torch.get_num_threads()
    memory = float(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    label = f"this CPU, {cores} thread{'s' if cores > 1 else ''}"
    left, right = torch.randn(256, 256), torch.randn(256, 256)
    source = torch.zeros(1 << 22)  # larger than caches
    target = torch.empty_like(source)
    flops = 2 * 256**3 / _fastest(lambda: left @ right)
    bandwidth = 2 * source.nbytes / _fastest(lambda: target.copy_(source))
    return Hardware(label, memory, flops, bandwidth, is_gpu=False)


def _fastest(work: Callable[[], object]) -> float:
    best, until, count = 1e9, time.perf_counter() + SECONDS, 0
    while time.perf_counter() < until or count < AT_LEAST:
        count += 1
        started = time.perf_counter()
        work()
        best = min(best, time.perf_counter() - started)
    return best
