"""What all tests share."""

import os
import tempfile

# Before torch is imported: many small tests are faster on one thread, and threads that spin slow their neighbours.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("GOMP_SPINCOUNT", "2000")
# No test needs the hub; without a network its client tries again and again.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
# The key that seals runs of tests is not that of the person who runs them.
os.environ["XDG_STATE_HOME"] = os.path.join(tempfile.gettempdir(), f"covey-tests-{os.getuid()}")

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder of shared reference material (golden values, data); tests that need it skip where it is absent."""
    default = Path(__file__).resolve().parents[2] / "shared"
    folder = Path(os.environ.get("COVEY_SHARED", default))
    if not (folder / "golden").is_dir():
        pytest.skip(f"shared reference material is not at {folder}; set COVEY_SHARED")
    return folder


@pytest.fixture
def own_threads() -> Iterator[None]:
    """The number of threads is a test's own; it is set back."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)
