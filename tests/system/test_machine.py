"""What is asked of the machine."""

import gc
import subprocess
import sys
from pathlib import Path

import pytest

from covey.system import machine

LARGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def test_openmp_threads_spin_only_shortly_unless_the_user_has_said_otherwise() -> None:
    environment = {"MALLOC_ARENA_MAX": "1"}
    machine.prepare(environment)
    assert environment["GOMP_SPINCOUNT"] == "2000"
    chosen = {"OMP_WAIT_POLICY": "ACTIVE", "MALLOC_ARENA_MAX": "1"}
    machine.prepare(chosen)
    assert "GOMP_SPINCOUNT" not in chosen


@pytest.mark.skipif(sys.platform != "linux", reason="glibc is the C library of Linux")
def test_glibc_keeps_freed_memory() -> None:
    assert machine.keep_memory()


def test_garbage_is_collected_again_after_heavy_imports() -> None:
    with machine.heavy_imports():
        assert not gc.isenabled()
    assert gc.isenabled()


def test_gpu_memory_uses_expandable_segments_unless_the_user_configures_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(machine, "NVIDIA", str(tmp_path / "nvidiactl"))
    without = {"MALLOC_ARENA_MAX": "1"}
    machine.prepare(without)
    assert not any("ALLOC_CONF" in name for name in without)
    (tmp_path / "nvidiactl").touch()
    own, chosen = {"MALLOC_ARENA_MAX": "1"}, {"MALLOC_ARENA_MAX": "1", "PYTORCH_ALLOC_CONF": "max_split_size_mb:64"}
    machine.prepare(own)
    machine.prepare(chosen)
    assert own["PYTORCH_CUDA_ALLOC_CONF"] == "expandable_segments:True"
    assert "PYTORCH_CUDA_ALLOC_CONF" not in chosen


@pytest.mark.skipif(sys.platform != "linux", reason="glibc is the C library of Linux")
def test_a_heap_that_grows_from_step_to_step_is_released(monkeypatch: pytest.MonkeyPatch) -> None:
    free, released = [3.0, 3.5, 4.6, 2.9, 5.0, 5.5, 6.5, 0.1, 0.9], []
    heap = machine.Heap()
    for step, gigabytes in enumerate(free):
        monkeypatch.setattr(machine, "free_bytes", lambda found=gigabytes: int(found * 2**30))
        monkeypatch.setattr(machine, "release_memory", lambda at=step: released.append(at))
        heap.after_step(seconds=5.0)
    assert released == [2, 4]


@pytest.mark.parametrize(("gigabytes", "seconds", "is_released"), [(7, 60, True), (7, 50, False), (0.5, 600, False)])
def test_memory_is_released_after_a_step_that_is_long_beside_the_clearing(
    gigabytes: float, seconds: float, is_released: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    released: list[bool] = []
    monkeypatch.setattr(machine, "free_bytes", lambda: int(gigabytes * 2**30))
    monkeypatch.setattr(machine, "release_memory", lambda: released.append(True))
    machine.Heap().after_step(seconds)
    assert bool(released) is is_released


@pytest.mark.skipif(sys.platform != "linux", reason="glibc is the C library of Linux")
@pytest.mark.skipif("[never]" in LARGE_PAGES.read_text(), reason="the kernel has large pages switched off")
def test_the_heap_lies_in_large_pages_but_during_short_work() -> None:
    script = (
        "import ctypes, re, sys\nfrom pathlib import Path\nfrom covey.system import machine\n"
        "libc = ctypes.CDLL(None)\nlibc.malloc.restype = ctypes.c_void_p\n"
        "def touched():\n"
        "    block = ctypes.c_void_p(libc.malloc(ctypes.c_size_t(2**26)))\n"
        "    ctypes.memset(block, 1, 2**26)\n"
        "    found = re.findall(r'AnonHugePages: +(\\d+)', Path('/proc/self/smaps').read_text())\n"
        "    libc.free(block)\n"
        "    return sum(map(int, found)) / 1024\n"
        "machine.keep_memory()\nmachine.ask_for_large_pages()\nfirst = touched()\n"
        "machine.release_memory()\nsecond = touched()\n"
        "assert min(first, second) >= 60, (first, second)\n"
        "machine.release_memory()\nwith machine.small_pages():\n    small = touched()\n"
        "machine.release_memory()\nthird = touched()\n"
        "assert small < 4 and third >= 60, (small, third)\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True)


@pytest.mark.skipif(sys.platform != "linux", reason="glibc is the C library of Linux")
def test_bytes_that_are_freed_and_kept_are_counted() -> None:
    script = (
        "import ctypes\nfrom covey.system import machine\nmachine.keep_memory()\n"
        "libc = ctypes.CDLL(None)\nlibc.malloc.restype = ctypes.c_void_p\n"
        "held = [libc.malloc(ctypes.c_size_t(2**20)) for _ in range(64)]\nbefore = machine.free_bytes()\n"
        "for pointer in held[:-1]:\n    libc.free(ctypes.c_void_p(pointer))\n"
        "assert 63 * 2**20 - 2**16 <= machine.free_bytes() - before < 64 * 2**20\n"
        "machine.release_memory()\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True)
