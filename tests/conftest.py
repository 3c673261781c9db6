"""What all tests share."""

import gc
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

from .support.composing import compose_faster

# Half a million objects of torch and of collected tests are no garbage: look through them seldom.
gc.set_threshold(100_000, 50, 100)

LONGEST = (
    *("settings/test_nothing_is_ignored", "test_several_processes", "docs/test_docs", "test_no_silent_hang"),
    *("attacks/test_attacks", "test_nothing_is_lost", "test_faults_of_signals", "test_faults_of_disks"),
    *("test_trust", "sandbox/test_runs", "test_update_is_invariant", "test_sampled_is_trained"),
    *("test_update_is_invariant_for_every_loss", "test_same_seed_same_rollouts", "infill/test_infill_run"),
    *("attacks/test_answers", "sandbox/test_failures", "test_watchdog", "test_update_is_invariant_over_ranks"),
    *("test_faults_of_resuming", "test_train", "test_config", "test_mathematics", "test_ranks", "test_resume"),
    *("test_commands", "test_early", "test_preflight_run", "test_worker_pool", "test_layers", "test_compiled"),
)
"""Files of tests that take longest, longest first: last ones would keep one process at work and the others waiting."""


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Run long files first; processes take a file at a time, in this order.

    What starts vLLM, which lives in an environment of its own, or a cluster is left out unless it is asked for.
    """
    for name in ("vllm", "cluster"):
        if name not in config.option.markexpr:
            left_out = [item for item in items if item.get_closest_marker(name)]
            items[:] = [item for item in items if item not in left_out]
            config.hook.pytest_deselected(items=left_out)
    order = {name: place for place, name in enumerate(LONGEST)}

    def place(item: pytest.Item) -> int:
        parts = item.path.with_suffix("").parts
        return min(order.get("/".join(parts[-length:]), len(order)) for length in (1, 2))

    items.sort(key=place)


def pytest_collection_finish() -> None:
    """Leave what all tests have out of what the collector looks through."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def _composed_faster() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        compose_faster(patch)
        yield


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
