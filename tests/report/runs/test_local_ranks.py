"""Ranks on this machine: they meet, the one that fails is named, and none is left behind."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from covey.system import collectives, ranks
from covey.types import RunStopped
from covey_report.runs.local_ranks import run_on_ranks

from ...support.processes import are_gone, is_running

WAIT_SECONDS = 100.0
"""For other ranks, far beyond what any test waits."""


def together(work: Callable[[int], str], folder: Path) -> str:
    """Leave the number of this process, join the others, and work as a rank."""
    (folder / f"pid{ranks.rank()}").write_text(str(os.getpid()))
    with collectives.process_group(WAIT_SECONDS, "cpu"):
        return work(collectives.rank())


def tell_all(number: int) -> str:
    return str(collectives.all_gather((number, os.environ["OMP_NUM_THREADS"])))


def fail_on_rank_1(folder: Path, number: int) -> str:
    if number == 1:
        child = subprocess.Popen(["sleep", "100"], start_new_session=True)
        (folder / "pid-child").write_text(str(child.pid))
        raise ValueError("the data\nis gone")
    return tell_all(number)


def end_on_rank_1(number: int) -> str:
    if number == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return tell_all(number)


def wait_for_ever(number: int) -> str:
    time.sleep(1000)
    return ""


def numbers(folder: Path) -> list[int]:
    return [int(path.read_text()) for path in folder.glob("pid*") if path.read_text()]


@pytest.mark.long
def test_ranks_meet_each_with_its_number_of_threads(tmp_path: Path) -> None:
    assert run_on_ranks(partial(together, tell_all, tmp_path), [2, 1]) == "[(0, '2'), (1, '1')]"
    assert are_gone(numbers(tmp_path))


@pytest.mark.long
@pytest.mark.parametrize(
    ("work", "kind", "said"),
    [
        (fail_on_rank_1, ValueError, "rank 1: the data is gone"),
        pytest.param(end_on_rank_1, RunStopped, r"rank 1: ended its process \(signal 9\)", marks=pytest.mark.slow),
    ],
)
def test_a_rank_that_fails_ends_all_with_its_own_reason(
    work: Callable[..., str], kind: type[Exception], said: str, tmp_path: Path
) -> None:
    own = partial(work, tmp_path) if work is fail_on_rank_1 else work
    started = time.monotonic()
    with pytest.raises(kind, match=f"^{said}$"):
        run_on_ranks(partial(together, own, tmp_path), [1, 1])
    assert time.monotonic() - started < WAIT_SECONDS / 2
    assert len(numbers(tmp_path)) >= 2
    assert are_gone(numbers(tmp_path), seconds=5), "with what they have started"


@pytest.mark.long
def test_ranks_end_with_a_process_that_is_killed(tmp_path: Path) -> None:
    program = (
        "from functools import partial; from pathlib import Path; from tests.report.runs import test_local_ranks as t; "
        f"t.run_on_ranks(partial(t.together, t.wait_for_ever, Path({str(tmp_path)!r})), [1, 1])"
    )
    root = Path(__file__).parents[3]
    parent = subprocess.Popen([sys.executable, "-c", program], cwd=root)
    until = time.monotonic() + 60
    while len(numbers(tmp_path)) < 2 and time.monotonic() < until:
        time.sleep(0.05)
    found = numbers(tmp_path)
    assert len(found) == 2
    assert all(map(is_running, found))
    parent.kill()
    parent.wait()
    assert are_gone(found, seconds=5)
