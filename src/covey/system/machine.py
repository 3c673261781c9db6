"""What a process asks of the machine before the heavy imports: threads that don't spin long, memory that stays."""

import ctypes
import gc
import logging
import os
from collections.abc import Iterator, Mapping, MutableMapping
from contextlib import contextmanager, suppress
from pathlib import Path

SPIN_COUNT = "2000"
"""OpenMP threads that spin long while they wait make small operations ten times slower where a core is busy
otherwise; not spinning at all halves the speed of a quiet machine."""
TRIM_THRESHOLD, TOP_PAD, MMAP_MAX = -1, -2, -4
"""Names of glibc's mallopt."""
ALLOCATOR = {"PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"}
"""What torch's allocator on a GPU reads, under its old and its new name. Segments that grow leave no holes where the
cache of keys and values grows: each time it would need another, larger piece of memory."""
NVIDIA = "/dev/nvidiactl"
"""There where a driver for GPUs is."""
KEEP_BYTES = 2**31 - 1
TOP_PAD_BYTES = 2**28
KEPT_MEMORY = {
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TRIM_THRESHOLD_": str(KEEP_BYTES),
    "MALLOC_TOP_PAD_": str(TOP_PAD_BYTES),
    "MALLOC_ARENA_MAX": "1",
}
"""What `keep_memory` sets, as variables of a process to be started. One arena: glibc gives what threads other than the
first one free back to the kernel whatever the threshold is."""


KEPT_FREE, HEAP_GROWTH = 2**30, 1.25
"""Bytes that may be free after a step whatever they were, and the factor by which those may grow."""
RELEASED_PER_SECOND = 2**27
"""Bytes a second of a step, which the kernel clears anew in a thirtieth of that time: 0.27 s for 1 GiB was measured."""


def prepare(environment: MutableMapping[str, str] = os.environ) -> None:
    """Set what the user has not set. Call it before torch is imported: OpenMP reads its variables once."""
    if "OMP_WAIT_POLICY" not in environment:
        environment.setdefault("GOMP_SPINCOUNT", SPIN_COUNT)
    if keeps_memory(environment):
        keep_memory()
    if ALLOCATOR.isdisjoint(environment) and has_gpu():
        environment["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"


def has_gpu() -> bool:
    """Tell whether a GPU may be here, without importing torch."""
    return Path(NVIDIA).exists()


@contextmanager
def heavy_imports() -> Iterator[None]:
    """Import without looking for garbage, and leave what was imported out of every later search.

    Modules of torch and transformers are a million objects: searches during the import and at the end of the process
    take as long as a quarter of the import.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def silence_bitsandbytes() -> None:
    """Have it say nothing of a missing kernel that nobody asked for, as it does on some CPUs once it is imported."""
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)


def keeps_memory(environment: Mapping[str, str]) -> bool:
    """Tell whether a process may keep freed memory: the user has not said how it is kept."""
    return not any(name.startswith("MALLOC_") for name in environment)


def keep_memory() -> bool:
    """Keep freed memory for the next tensor: glibc gives large blocks back to the kernel, which then has to clear them
    anew in every pass. False where the C library is another one."""
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False
    settings = {MMAP_MAX: 0, TRIM_THRESHOLD: KEEP_BYTES, TOP_PAD: TOP_PAD_BYTES}
    return all(mallopt(name, value) == 1 for name, value in settings.items())


class Heap:
    """The heap between steps: tensors of ever other sizes leave holes, which grow from step to step."""

    def __init__(self) -> None:
        self._usual = 0
        """Bytes that were free after the first step since memory was released."""

    def after_step(self, seconds: float) -> None:
        """Release more than KEPT_FREE where it has grown, or clearing it anew is little beside a step of `seconds`."""
        free = free_bytes()
        has_grown = 0 < HEAP_GROWTH * self._usual < free
        if free > KEPT_FREE and (has_grown or free < RELEASED_PER_SECOND * seconds):
            release_memory()
            self._usual = 0
        else:
            self._usual = self._usual or free


def release_memory() -> None:
    """Give the kernel what is free in the heap, once a phase is over that needed more than the next ones will."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


class _MallocStatistics(ctypes.Structure):
    """glibc's mallinfo2."""

    _fields_ = (("before", ctypes.c_size_t * 8), ("free", ctypes.c_size_t), ("top", ctypes.c_size_t))


def free_bytes() -> int:
    """Count the bytes that glibc has freed and not given back; 0 where it does not say."""
    try:
        statistics = ctypes.CDLL(None).mallinfo2
    except (OSError, AttributeError):
        return 0
    statistics.restype = _MallocStatistics
    return int(statistics().free)
