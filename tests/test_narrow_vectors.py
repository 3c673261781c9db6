"""Kernels are other code where vectors hold eight floats: what is tested of them holds there too."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
KERNELS = ("engine/test_panels", "engine/test_compiled", "policy/test_compiled_elementwise")
SLOWER = ("policy/test_compiled_attention", "policy/test_compiled_gradient")
MODELS = ("engine/test_fused", "policy/test_compiled_parts")


def has_wide_vectors() -> bool:
    try:
        return "avx512f" in Path("/proc/cpuinfo").read_text()
    except OSError:
        return False


@pytest.mark.skipif(not has_wide_vectors(), reason="all tests run with narrow vectors here")
@pytest.mark.parametrize("modules", [KERNELS, SLOWER, pytest.param(MODELS, marks=pytest.mark.slow)])
def test_all_that_is_tested_holds_with_vectors_of_eight(modules: tuple[str, ...]) -> None:
    files = [f"tests/{module}.py" for module in modules]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "tests.narrow_vectors", "-p", "no:cacheprovider", *files]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=600)
    assert run.returncode == 0, run.stdout[-3000:] + run.stderr[-1000:]
