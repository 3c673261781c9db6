"""What is asked of the machine."""

import sys

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
