"""What all tests share."""

import contextlib
import gc
import importlib
import logging
import os
import re
import tempfile
import tomllib

# Before torch is imported: many small tests are faster on one thread, and threads that spin slow their neighbours.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("GOMP_SPINCOUNT", "2000")
# No test needs the hub; without a network its client tries again and again.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
# Kernels in Triton, where it is installed, run on a CPU.
os.environ.setdefault("TRITON_INTERPRET", "1")
# The key that seals runs of tests is not that of the person who runs them.
os.environ["XDG_STATE_HOME"] = os.path.join(tempfile.gettempdir(), f"covey-tests-{os.getuid()}")

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from .support.composing import compose_faster
from .support.diagonal import mark_beside_diagonal
from .support.probing import probe_once

# Half a million objects of torch and of collected tests are no garbage: look through them seldom.
gc.set_threshold(100_000, 50, 100)

OF_ONE_RUN = (
    *("test_nothing_is_lost", "faults/test_faults_of_disks", "faults/test_faults_of_resuming"),
    *("faults/test_faults_of_signals", "test_several_processes", "faults/test_faults_of_numbers"),
    "faults/test_no_silent_hang",
)
"""Files of tests/guarantees that fork from one warm process and most of which compare with one run of it."""
LONGEST = (
    *(name.rpartition("/")[2] for name in OF_ONE_RUN),
    *("settings/test_nothing_is_ignored", "docs/test_docs", "runs/test_replay_ranks", "cli/test_commands"),
    *("update/test_update_is_invariant", "config/test_config", "guarantees/test_source_ray", "gpu/test_host_waits"),
    *("runs/test_replay", "update/test_update_is_invariant_for_every_loss", "native/test_sessions"),
    *("sandbox/test_failures", "run/test_cold_start", "run/test_trust", "attacks/test_attacks"),
    *("config/test_shelves", "update/test_update_is_invariant_over_ranks", "math/test_linear_time"),
    *("checkpoints/test_resume", "api/test_training", "memory/test_memory_model"),
    *("preflight/test_preflight_plain", "attacks/test_answers", "faults/test_faults_of_rewards"),
    *("system/test_watchdog", "config/test_early", "gpu/test_one_device", "math/test_answers"),
    *("attention/test_attention_variants", "tests/test_loop", "memory/test_memory_plan", "sandbox/test_runs"),
    *("models/test_loading", "faults/test_faults_of_checkpoints", "models/test_architectures", "cli/test_measuring"),
    *("records/test_traces", "trainer/test_forward", "native/test_own_weights"),
    *("system/test_section", "preflight/test_preflight_run", "system/test_worker_pool", "native/test_joined"),
    *("update/test_same_seed_same_rollouts", "attention/test_compiled", "update/test_formulas_at_the_edge"),
)
"""Files of tests that take longest, longest first: last ones would keep one process at work and the others waiting."""


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Give a process a file at a time, but all of `OF_ONE_RUN` to one, which makes their run once."""
    if config.option.dist != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling

    class Scheduling(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = str(super()._split_scope(nodeid))
            return "of one run" if file.removesuffix(".py").endswith(OF_ONE_RUN) else file

    return Scheduling(config, log)


def pytest_sessionstart(session: pytest.Session) -> None:
    """Begin each process with another part of the tests: what one has compiled, with its asserts, the others read."""
    options = getattr(session.config, "workerinput", None)
    if options is None:
        return
    here = Path(__file__).parent
    number = int(options["workerid"].removeprefix("gw"))
    for file in sorted(here.rglob("test_*.py"))[number :: options["workercount"]]:
        # What is wrong with it is said when it is collected
        with contextlib.suppress(Exception, pytest.skip.Exception):
            importlib.import_module(".".join((here.name, *file.relative_to(here).with_suffix("").parts)))


def mark_slow(session: pytest.Session, items: list[pytest.Item]) -> None:
    """Mark as slow what `slow_cases.toml` moves to `make test-slow`.

    UsageError where it names what there is not, once all is collected without an error.
    """
    option = session.config.option
    moved = tomllib.loads(Path(__file__).with_name("slow_cases.toml").read_text(encoding="utf-8"))
    unseen = {(test, kept) for test, of_test in moved.items() for kept in (of_test or [""])}
    for item in items:
        test, _, case = item.nodeid.partition("[")
        if test not in moved:
            continue
        found = [kept for kept in moved[test] if case and re.search(kept, case.removesuffix("]"))]
        unseen -= {(test, kept) for kept in (found or [""])}
        if not found:
            item.add_marker(pytest.mark.slow)
    if unseen and not (session.testsfailed or option.file_or_dir or option.keyword):
        raise pytest.UsageError(f"tests/slow_cases.toml names what no test has: {sorted(unseen)}")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(session: pytest.Session, config: pytest.Config, items: list[pytest.Item]) -> None:
    """Run long files first; processes take a file at a time, in this order.

    What needs vLLM or other people's environments, which live apart from covey, a cluster or a real model is left out
    unless it is asked for.
    """
    mark_slow(session, items)
    mark_beside_diagonal(items)
    for name in ("vllm", "cluster", "doors", "real"):
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


@pytest.fixture(scope="module", autouse=True)
def _probed_once(request: pytest.FixtureRequest) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        if not {"policy", "gpu"} & set(request.path.parts):
            probe_once(patch)
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
def caplog(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    """What is logged, but for asyncio's lines: what other tests left behind may be collected at any time."""

    def is_kept(record: logging.LogRecord) -> bool:
        return record.name != "asyncio"

    caplog.handler.addFilter(is_kept)
    yield caplog
    caplog.handler.removeFilter(is_kept)


@pytest.fixture
def own_threads() -> Iterator[None]:
    """The number of threads is a test's own; it is set back."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)
