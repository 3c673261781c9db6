"""What is asked of the machine."""

import sys
from pathlib import Path

import pytest

from covey.system import machine


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


def test_memory_of_a_gpu_grows_in_place_where_there_is_one_unless_the_user_has_said_otherwise(
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
