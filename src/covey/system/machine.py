"""Settings of threads and memory that must precede the heavy imports."""

import ctypes
import gc
import logging
import mmap
import os
from collections.abc import Iterator, Mapping, MutableMapping
from contextlib import contextmanager, suppress
from pathlib import Path

SPIN_COUNT = "2000"
"""OpenMP threads that spin long slow small operations tenfold where a core is busy; without spinning, a quiet machine
is half as fast."""
TRIM_THRESHOLD, TOP_PAD, MMAP_MAX = -1, -2, -4
"""Names of glibc's mallopt."""
ALLOCATOR = {"PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"}
"""Settings of torch's GPU allocator, under old and new names. Expandable segments leave no holes where the key-value
cache grows."""
NVIDIA = "/dev/nvidiactl"
"""There where a driver for GPUs is."""
NEVER = -1
"""A pass frees more than the 2 GiB that mallopt can name."""
TOP_PAD_BYTES = 2**28
LARGE_PAGE = 2**21
SET_THP_DISABLE, GET_THP_DISABLE = 41, 42
"""Names of Linux's prctl."""
KEPT_MEMORY = {
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TRIM_THRESHOLD_": str(2**62),
    "MALLOC_TOP_PAD_": str(TOP_PAD_BYTES),
    "MALLOC_ARENA_MAX": "1",
}
"""The variables of `keep_memory` for a new process. One arena: glibc returns other threads' memory to the kernel
whatever the threshold."""


KEPT_FREE, HEAP_GROWTH = 2**30, 1.5
"""Bytes always allowed free after a step, and the factor by which those may grow."""
RELEASED_PER_SECOND = 2**27
"""Bytes per second of a step; the kernel clears them in 1/30 of it (measured: 0.27 s for 1 GiB)."""
LOOK_EVERY = 1.0
"""Seconds of steps between looks at the heap: glibc walks all its free blocks."""


def prepare(environment: MutableMapping[str, str] = os.environ) -> None:
    """Set variables that the user has not set, before importing torch."""
    if "OMP_WAIT_POLICY" not in environment:
        environment.setdefault("GOMP_SPINCOUNT", SPIN_COUNT)
    if keeps_memory(environment):
        keep_memory()
    if ALLOCATOR.isdisjoint(environment) and has_gpu():
        environment["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"


def has_gpu() -> bool:
    """Return True where a GPU may be present, without importing torch."""
    return Path(NVIDIA).exists()


def is_intel() -> bool:
    """Return True for Intel, whose MKL is fast, or unknown processors."""
    try:
        return "GenuineIntel" in Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return True


@contextmanager
def heavy_imports() -> Iterator[None]:
    """Import without garbage collection, and freeze the imported objects.

    Modules of torch and transformers are a million objects: collecting them takes a quarter of the import.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def silence_bitsandbytes() -> None:
    """Silence its warning about a missing kernel that covey does not use."""
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)


def keeps_memory(environment: Mapping[str, str]) -> bool:
    """Return True unless the user has configured how memory is kept."""
    return not any(name.startswith("MALLOC_") for name in environment)


def keep_memory() -> bool:
    """Keep freed memory; return False without glibc.

    glibc returns large blocks to the kernel, which clears them for every pass.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False
    settings = {MMAP_MAX: 0, TRIM_THRESHOLD: NEVER, TOP_PAD: TOP_PAD_BYTES}
    return all(mallopt(name, value) == 1 for name, value in settings.items())


def ask_for_large_pages() -> None:
    """Let the heap grow into large pages, for work of minutes.

    A processor has few places for addresses of pages and fetches ahead within a page only; but in a virtual machine a
    large page is cleared seven times as slowly at first. A block of half the machine is allocated and freed untouched:
    later ones lie there.
    """
    with suppress(OSError, AttributeError, ValueError):
        libc, size = ctypes.CDLL(None), os.sysconf("SC_PHYS_PAGES") * mmap.PAGESIZE // 2
        libc.malloc.restype = ctypes.c_void_p
        if (block := libc.malloc(ctypes.c_size_t(size))) is not None:
            first, end = (at // LARGE_PAGE * LARGE_PAGE for at in (block + LARGE_PAGE, block + size))
            libc.madvise(ctypes.c_void_p(first), ctypes.c_size_t(end - first), mmap.MADV_HUGEPAGE)
            libc.free(ctypes.c_void_p(block))


@contextmanager
def small_pages() -> Iterator[None]:
    """Take new memory in small pages, for work of seconds."""
    prctl = getattr(ctypes.CDLL(None), "prctl", lambda *of: 0)  # of Linux alone
    before = prctl(GET_THP_DISABLE, 0, 0, 0, 0)
    prctl(SET_THP_DISABLE, 1, 0, 0, 0)
    try:
        yield
    finally:
        prctl(SET_THP_DISABLE, before, 0, 0, 0)


class Heap:
    """The heap between steps: tensors of varying sizes leave growing holes."""

    def __init__(self) -> None:
        self._usual = 0
        """Bytes that were free after the first step since memory was released."""
        self._seconds = 0.0
        """Seconds of steps since the last look."""

    def after_step(self, seconds: float) -> None:
        """Release memory beyond KEPT_FREE if it grew, or if that is cheap."""
        self._seconds += seconds
        if self._seconds < LOOK_EVERY:
            return
        seconds, self._seconds, free = self._seconds, 0.0, free_bytes()
        has_grown = 0 < HEAP_GROWTH * self._usual < free
        if free > KEPT_FREE and (has_grown or free < RELEASED_PER_SECOND * seconds):
            release_memory()
            self._usual = 0
        else:
            self._usual = self._usual or free


def release_memory() -> None:
    """Return free heap memory to the kernel after a large phase."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
        ask_for_large_pages()


class _MallocStatistics(ctypes.Structure):
    """glibc's mallinfo2."""

    _fields_ = (("before", ctypes.c_size_t * 8), ("free", ctypes.c_size_t), ("top", ctypes.c_size_t))


def free_bytes() -> int:
    """Count the freed bytes between others; 0 if unknown."""
    try:
        statistics = ctypes.CDLL(None).mallinfo2
    except (OSError, AttributeError):
        return 0
    statistics.restype = _MallocStatistics
    found = statistics()
    return int(found.free - found.top)
