"""Kernels are other code where vectors hold eight floats: what is tested of them holds there too."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
KERNELS = (
    *("engine/native/test_panels", "engine/native/test_compiled", "policy/kernels/test_elementwise"),
    "policy/kernels/test_adamw",
    *("policy/recurrence/test_scan", "policy/recurrence/test_conv", "policy/recurrence/test_compiled"),
)
SLOWER = ("policy/attention/test_compiled", "policy/kernels/test_gradient")
MODELS = ("engine/native/test_fused", "policy/kernels/test_layers")


def has_wide_vectors() -> bool:
    try:
        return "avx512f" in Path("/proc/cpuinfo").read_text()
    except OSError:
        return False


@pytest.mark.skipif(not has_wide_vectors(), reason="all tests run with narrow vectors here")
@pytest.mark.parametrize(
    "modules", [KERNELS, pytest.param(SLOWER, marks=pytest.mark.slow), pytest.param(MODELS, marks=pytest.mark.slow)]
)
def test_all_that_is_tested_holds_with_vectors_of_eight(modules: tuple[str, ...]) -> None:
    run_tests(modules, "haswell")


@pytest.mark.slow
@pytest.mark.skipif(not has_wide_vectors(), reason="needs AVX-512")
@pytest.mark.parametrize("modules", [KERNELS, SLOWER, MODELS])
def test_all_that_is_tested_holds_with_wide_vectors_that_multiply_no_bfloat16(modules: tuple[str, ...]) -> None:
    run_tests(modules, "skylake-avx512")


def run_tests(modules: tuple[str, ...], processor: str) -> None:
    files = [f"tests/{module}.py" for module in modules]
    plugins = ("-p", "tests.support.narrow_vectors", "-p", "no:cacheprovider")
    command = [sys.executable, "-m", "pytest", "-q", *plugins, *files]
    environment = {**os.environ, "COVEY_TEST_PROCESSOR": processor}
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=600, env=environment)
    assert run.returncode == 0, run.stdout[-3000:] + run.stderr[-1000:]
