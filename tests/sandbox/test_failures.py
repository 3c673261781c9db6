"""A failure of the sandbox is never a verdict; the next program runs."""

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from covey_sandbox import CallTest, Limits, Sandbox, SandboxFailed, Tier, slot
from covey_sandbox.inside import wire
from covey_sandbox.inside.judge import Host
from covey_sandbox.inside.supervisor import Checker

from .attacks import attack_run

HONEST = "def f(n): return n"
TESTS = [CallTest((n,), expected=n) for n in range(3)]
TIERS: tuple[Tier, ...] = ("namespace", "landlock")


def opened(tier: Tier, num_slots: int = 1) -> Sandbox:
    try:
        return Sandbox(num_slots, tier)
    except SandboxFailed as error:
        pytest.skip(str(error))


@pytest.fixture
def others() -> set[int]:
    """Processes that this one had started before."""
    return set(attack_run.descendants(os.getpid()))


def judges(others: set[int]) -> list[int]:
    """That this process has started since."""
    return attack_run.named("covey-judge", set(attack_run.descendants(os.getpid())) - others)


@pytest.mark.long
@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize("which", ["judge", "zygote", "checker"])
def test_a_slot_whose_processes_died_is_replaced(tier: Tier, which: str, others: set[int]) -> None:
    with opened(tier) as sandbox:
        assert sandbox.run_blocking(HONEST, TESTS, "f").fraction == 1.0
        (judge,) = judges(others)
        killed = attack_run.named(f"covey-{which}", {judge, *attack_run.descendants(judge)})
        os.kill(min(killed), signal.SIGKILL)  # what a zygote has just forked still has its name
        assert sandbox.run_blocking(HONEST, TESTS, "f").fraction == 1.0
        assert judges(others) != [judge]
    assert judges(others) == []


@pytest.mark.long
def test_a_judge_killed_again_and_again_is_a_failure_of_the_sandbox(others: set[int]) -> None:
    with opened("landlock") as sandbox:
        is_over = threading.Event()

        def kill() -> None:
            while not is_over.wait(0.01):
                for judge in judges(others):
                    with suppress(ProcessLookupError):
                        os.kill(judge, signal.SIGKILL)

        killer = threading.Thread(target=kill)
        killer.start()
        try:
            with pytest.raises(SandboxFailed, match=r"the judge is gone"):
                sandbox.run_blocking("import time\ndef f(n): time.sleep(9)", TESTS, "f", Limits(wall_seconds=10))
        finally:
            is_over.set()
            killer.join()
        assert sandbox.run_blocking(HONEST, TESTS, "f").fraction == 1.0


@pytest.mark.long
def test_a_judge_that_does_not_answer_is_given_up(monkeypatch: pytest.MonkeyPatch, others: set[int]) -> None:
    with opened("landlock") as sandbox:
        (judge,) = judges(others)
        os.kill(judge, signal.SIGSTOP)
        monkeypatch.setattr(slot, "GRACE_SECONDS", 0.5)
        order = {"code": HONEST, "entry_point": "f", "tests": [], "limits": {}}
        with pytest.raises(slot.SlotLost, match=r"the judge has not answered for 1 s"):
            next(iter(sandbox._slots)).run(order, 0.5)
        monkeypatch.undo()
        assert sandbox.run_blocking(HONEST, TESTS, "f").fraction == 1.0
        assert judges(others) != [judge]


@pytest.mark.long
def test_a_judge_that_takes_no_order_is_given_up(monkeypatch: pytest.MonkeyPatch, others: set[int]) -> None:
    monkeypatch.setattr(slot, "GRACE_SECONDS", 2.0)
    with opened("landlock") as sandbox:
        (judge,) = judges(others)
        os.kill(judge, signal.SIGSTOP)
        order = {"code": "#" * (4 << 20), "entry_point": "f", "tests": [], "limits": {}}  # more than a socket holds
        with pytest.raises(slot.SlotLost, match=r"the judge has not answered for 3 s"):
            next(iter(sandbox._slots)).run(order, 1.0)


@pytest.mark.long
def test_a_program_that_cannot_be_sent_takes_no_slot_with_it(monkeypatch: pytest.MonkeyPatch, others: set[int]) -> None:
    with opened("landlock") as sandbox:
        monkeypatch.setattr(wire, "MAX_TRUSTED", 100)
        with pytest.raises(ValueError, match=r"a program and its tests must be at most 100 bytes"):
            sandbox.run_blocking(HONEST, TESTS, "f")
        monkeypatch.undo()
        assert sandbox.run_blocking(HONEST, TESTS, "f").fraction == 1.0
        assert len(judges(others)) == len(sandbox._idle) == 1


@pytest.mark.long
def test_a_full_disk_for_a_programs_files_is_a_sandbox_failure() -> None:
    with opened("landlock") as sandbox:
        with pytest.raises(
            SandboxFailed, match=r"has no room for the 1152921504606846976 bytes of a program; make some"
        ):
            sandbox.run_blocking(HONEST, TESTS, "f", Limits(file_bytes=1 << 60))
        assert sandbox.run_blocking(HONEST, TESTS, "f").fraction == 1.0


def test_a_disk_that_states_no_size_is_not_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    of_no_size = os.statvfs_result((4096, 4096, 0, 0, 0, 9, 9, 9, 0, 255))  # of tmpfs with size=0
    monkeypatch.setattr(os, "statvfs", lambda path: of_no_size)
    folder = Host.make_folder(cast(Host, SimpleNamespace(base=str(tmp_path), uid=None)), 1 << 20)
    assert list(tmp_path.iterdir()) == [Path(folder)]


@pytest.mark.long
def test_a_machine_without_threads_left_is_a_failure_of_the_sandbox(monkeypatch: pytest.MonkeyPatch) -> None:
    def start(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with opened("landlock") as sandbox:
        monkeypatch.setattr(threading.Thread, "start", start)
        with pytest.raises(SandboxFailed, match=r"^the sandbox cannot start a thread: can't start new thread$"):
            sandbox.run_blocking(HONEST, TESTS, "f")
        monkeypatch.undo()
        assert sandbox.run_blocking(HONEST, TESTS, "f").fraction == 1.0


@pytest.mark.long
def test_a_closed_sandbox_runs_nothing_and_has_no_processes(others: set[int]) -> None:
    sandbox = opened("landlock", 2)
    sandbox.run_blocking(HONEST, TESTS, "f")
    assert judges(others) != []
    sandbox.close()
    sandbox.close()
    assert set(attack_run.descendants(os.getpid())) <= others
    with pytest.raises(SandboxFailed, match="closed"):
        sandbox.run_blocking(HONEST, TESTS, "f")


@pytest.mark.long
@pytest.mark.parametrize("tier", TIERS)
def test_closing_ends_what_is_running_and_leaves_no_folder(tier: Tier, others: set[int]) -> None:
    sandbox = opened(tier, 2)
    folders = attack_run.own_folders(sandbox)
    assert len(folders) == (tier == "landlock")
    code = "import os\nwhile True: open(os.urandom(4).hex(), 'w').close()"

    def run() -> None:
        with pytest.raises(SandboxFailed):
            sandbox.run_blocking(code, TESTS, "f")

    running = threading.Thread(target=run)
    running.start()
    (judge,) = judges(others)
    while len(attack_run.descendants(judge)) < 3:  # zygote, checker and program
        time.sleep(0.01)
    started = {judge, *attack_run.descendants(judge)}
    sandbox.close()
    running.join(30)
    assert not running.is_alive()
    deadline = time.monotonic() + 30
    while living(started) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert living(started) == []
    assert [folder for folder in folders if folder.exists()] == []


CALLER = """
import os, signal, sys
sys.path.insert(0, sys.argv[1])
import attack_run
from covey_sandbox import CallTest, Sandbox
sandbox = Sandbox(1, "auto")
sandbox.run_blocking("def f(n): return n", [CallTest((1,), expected=1)], "f")
print(*attack_run.descendants(os.getpid()), flush=True)
signal.pause()
"""


@pytest.mark.long
def test_a_caller_that_is_killed_leaves_no_process() -> None:
    command = [sys.executable, "-c", CALLER, str(Path(__file__).parent / "attacks")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as caller:
        assert caller.stdout is not None
        children = [int(child) for child in caller.stdout.readline().split()]
        caller.kill()
    deadline = time.monotonic() + 60
    while living(children) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert len(children) >= 2
    assert living(children) == []


BUSY_CALLER = CALLER.replace("signal.pause()", "").replace(
    "print(",
    """
import threading
code = "import time\\ndef f(n):\\n    while True: time.sleep(0.01)"
threading.Thread(target=sandbox.run_blocking, args=(code, [CallTest((1,), expected=1)], "f"), daemon=True).start()
while len(attack_run.descendants(os.getpid())) < 4: pass
print(""",
)


@pytest.mark.long
def test_a_program_does_not_outlive_a_caller_that_is_killed() -> None:
    command = [sys.executable, "-c", BUSY_CALLER + "\nsignal.pause()", str(Path(__file__).parent / "attacks")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as caller:
        assert caller.stdout is not None
        children = [int(child) for child in caller.stdout.readline().split()]
        caller.kill()
    killed = time.monotonic()
    while living(children) and time.monotonic() < killed + 19:
        time.sleep(0.02)
    assert len(children) >= 4, "judge, checker, zygote and program"
    assert living(children) == []
    assert time.monotonic() - killed < 4, "not when its time is over"


def living(pids: Iterable[int]) -> list[int]:
    return [pid for pid in pids if Path(f"/proc/{pid}").exists()]


@pytest.mark.long
def test_a_process_that_is_forked_off_cannot_use_or_close_what_it_inherits() -> None:
    with opened("auto") as sandbox:
        pid = os.fork()
        if pid == 0:
            try:
                sandbox.run_blocking(HONEST, TESTS, "f")
            except SandboxFailed as error:
                sandbox.close()
                os._exit(7 if "forked" in str(error) else 1)
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
        assert sandbox.run_blocking(HONEST, TESTS, "f").fraction == 1.0


def test_a_checker_waiting_for_a_processor_counts_as_working_a_stopped_one_not() -> None:
    def spin(_channel: socket.socket) -> None:
        while True:
            pass

    others = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(4)]
    checker = Checker(spin)
    try:
        for pid in (checker.pid, *(other.pid for other in others)):
            os.sched_setaffinity(pid, {min(os.sched_getaffinity(0))})
        started, before = time.monotonic(), checker.busy_seconds()
        time.sleep(1)
        assert checker.busy_seconds() - before > 0.6 * (time.monotonic() - started), "one of five on a processor"
        os.kill(checker.pid, signal.SIGSTOP)
        time.sleep(0.1)
        before = checker.busy_seconds()
        time.sleep(0.3)
        assert checker.busy_seconds() - before < 0.05
    finally:
        checker.close()
        for other in others:
            other.kill()
            other.wait()
