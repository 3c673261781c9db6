"""What every worker shares: the line protocol with the driver, and the meter around a step. Plain Python.

The driver writes one line for each step it wants; the worker answers with one JSON object. Workers wait in between, so
the driver can let two of them take turns.
"""

import json
import os
import resource
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

JIFFIES = os.sysconf("SC_CLK_TCK")


@dataclass
class Channel:
    """Standard output for the driver alone: whatever libraries print goes to standard error."""

    _out: Any = field(init=False)

    def __post_init__(self) -> None:
        self._out = os.fdopen(os.dup(1), "w", encoding="utf-8")
        os.dup2(2, 1)

    def wait(self) -> bool:
        """True when the driver wants a step, False when it has gone."""
        return bool(sys.stdin.readline().strip())

    def send(self, message: Mapping[str, Any]) -> None:
        self._out.write(json.dumps(message) + "\n")
        self._out.flush()


@dataclass
class Meter:
    """Seconds, memory and foreign load of one step."""

    accelerator_peak: Callable[[], int] | None = None
    """Bytes at most since the last call; None measures the resident memory of the process."""
    base_bytes: int = 0
    _started: float = 0.0
    _own: float = 0.0
    _all: float = 0.0
    _peak: int | None = None

    def __post_init__(self) -> None:
        self.base_bytes = self._peak_since_reset() if self.accelerator_peak else resident_bytes("VmRSS")

    def start(self) -> None:
        reset_peak()
        self._peak_since_reset()
        self._peak = None
        self._own, self._all = own_cpu_seconds(), machine_cpu_seconds()
        self._started = time.perf_counter()

    def mark_peak(self) -> None:
        """The peak is that of the step so far: what the optimiser allocates later is not counted."""
        self._peak = self._peak_since_reset()

    def stop(self, seconds: Mapping[str, float], num_tokens: int) -> dict[str, Any]:
        """`seconds` of the phases; the total is added."""
        total = time.perf_counter() - self._started
        own, machine = own_cpu_seconds() - self._own, machine_cpu_seconds() - self._all
        peak = self._peak if self._peak is not None else self._peak_since_reset()
        return {
            "seconds": {**seconds, "total": total},
            "num_tokens": num_tokens,
            "peak_bytes": max(0, peak - self.base_bytes),
            "process_bytes": resident_bytes("VmHWM"),
            "own_cores": own / total,
            "others_cores": max(0.0, machine - own) / total,
        }

    def _peak_since_reset(self) -> int:
        return self.accelerator_peak() if self.accelerator_peak else resident_bytes("VmHWM")


def serve(channel: Channel, step: Callable[[], Mapping[str, Any]]) -> None:
    """Answer until the driver goes."""
    channel.send({"ready": True})
    while channel.wait():
        channel.send(step())


def reset_peak() -> None:
    """Let VmHWM begin anew at what is resident now."""
    Path("/proc/self/clear_refs").write_text("5")


def resident_bytes(name: str) -> int:
    """VmRSS (now) or VmHWM (peak) of this process."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return 1024 * int(line.split()[1])
    raise AssertionError(f"/proc/self/status has no {name}")


def own_cpu_seconds() -> float:
    """Of this process and the children it has waited for."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(u.ru_utime + u.ru_stime for u in used)


def machine_cpu_seconds() -> float:
    """All cores, all processes; time the hypervisor took counts too. Idle time and waiting for disks do not."""
    user, nice, system, _, _, irq, softirq, steal, *_ = map(
        int, Path("/proc/stat").read_text().split("\n")[0].split()[1:]
    )
    return (user + nice + system + irq + softirq + steal) / JIFFIES
