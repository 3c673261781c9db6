"""The watchdog and its guard, in processes small enough to be ended; and what prompts under way wait for."""

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from covey.system.waits.watchdog import PromptWaits, ScoringTimeout, Watchdog
from covey.system.waits.watchdog_process import EXPIRED

from ..support.processes import are_gone

START = """
    import os, signal, subprocess, sys, threading, time
    from pathlib import Path
    from covey.system.waits.watchdog import Watchdog

    watchdog = Watchdog({"timeouts.saving": 0.6, "timeouts.loading": 60.0}, Path("log"))
    waiting = watchdog.deadline
"""
FILL = """
os.set_blocking(2, False)
try:
    while True: os.write(2, b"x" * 65536)
except BlockingIOError: pass
os.set_blocking(2, True)
"""
"""Leaves no room in the pipe that stderr is."""


def run(folder: Path, code: str) -> tuple[int, str, float]:
    """Exit status, stderr and seconds of a script in which `watchdog` is entered."""
    body = textwrap.indent(textwrap.dedent(code), "    ")
    (folder / "script.py").write_text(textwrap.dedent(START) + f"with watchdog:\n{body}\n")
    began = time.monotonic()
    process = subprocess.Popen(
        [sys.executable, "script.py"], cwd=folder, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    _, said = process.communicate(timeout=120)
    return process.returncode, said, time.monotonic() - began


def waited(said: str) -> list[tuple[float, str]]:
    """Seconds and what for, of each line that ends a run."""
    found = re.findall(
        r"^covey: the run has waited ([\d.]+) s for (.*) and ends here; all stacks are in log$", said, re.M
    )
    return [(float(seconds), what) for seconds, what in found]


def test_a_wait_that_outlasts_its_deadline_ends_the_process_with_its_name(tmp_path: Path) -> None:
    status, said, seconds = run(tmp_path, 'with waiting("a disk", "timeouts.saving"): time.sleep(60)')
    assert status == -EXPIRED == -26
    ((waited_for, what),) = waited(said)
    assert what == "a disk (timeouts.saving=0.6)"
    assert 0.6 <= waited_for < 20
    assert seconds < 40
    assert 'File "script.py"' in (tmp_path / "log").read_text() or 'script.py"' in (tmp_path / "log").read_text()


@pytest.mark.long
def test_a_wait_that_ends_in_time_and_an_idle_process_end_nothing(tmp_path: Path) -> None:
    status, said, _ = run(
        tmp_path,
        """
        for _ in range(3):
            with waiting("a disk", "timeouts.saving", seconds=2.0): time.sleep(0.05)
        time.sleep(2.5)
        """,
    )
    assert (status, said) == (0, "")


@pytest.mark.long
def test_progress_restarts_the_deadline(tmp_path: Path) -> None:
    status, said, _ = run(
        tmp_path,
        """
        with waiting("a model", "timeouts.saving", seconds=2.0):
            for _ in range(30):
                time.sleep(0.1)
                watchdog.progress()
        """,
    )
    assert (status, said) == (0, "")


@pytest.mark.long
def test_the_innermost_wait_counts_and_its_end_is_progress_of_the_outer_one(tmp_path: Path) -> None:
    status, said, _ = run(
        tmp_path,
        """
        with waiting("the outer one", "timeouts.saving", seconds=2.0):
            for _ in range(3):
                with waiting("the inner one", "timeouts.loading"): time.sleep(1.2)
            with waiting("the last one", "timeouts.saving"): time.sleep(60)
        """,
    )
    assert status == -EXPIRED
    assert [what for _, what in waited(said)] == ["the last one (timeouts.saving=0.6)"]


def test_each_thread_has_its_own_wait(tmp_path: Path) -> None:
    status, said, _ = run(
        tmp_path,
        """
        def hang():
            with waiting("a function", "environment.timeout", seconds=0.5): time.sleep(60)
        threading.Thread(target=hang, daemon=True).start()
        with waiting("a model", "timeouts.loading"):
            while True:
                time.sleep(0.05)
                watchdog.progress()
        """,
    )
    assert status == -EXPIRED
    assert [what for _, what in waited(said)] == ["a function (environment.timeout=0.5)"]


def test_what_a_wait_is_for_can_change(tmp_path: Path) -> None:
    code = """
        with waiting("tokens", "timeouts.loading"):
            watchdog.now_for("a judgement", "timeouts.saving")
            time.sleep(60)
    """
    _, said, _ = run(tmp_path, code)
    assert [what for _, what in waited(said)] == ["a judgement (timeouts.saving=0.6)"]


@pytest.mark.long
def test_c_code_that_blocks_the_interpreter_is_ended_with_its_stack_logged(tmp_path: Path) -> None:
    status, said, _ = run(tmp_path, 'with waiting("a sum", "timeouts.saving"): sum(range(10**14))')
    assert status == -EXPIRED
    assert [what for _, what in waited(said)] == ["a sum (timeouts.saving=0.6)"]
    assert re.search(r'File ".*script.py", line \d+ in <module>', (tmp_path / "log").read_text())


def test_a_process_that_was_stopped_alone_is_not_punished_for_it(tmp_path: Path) -> None:
    status, said, seconds = run(
        tmp_path,
        """
        with waiting("a disk", "timeouts.saving", seconds=1.0):
            resumer = subprocess.Popen(["sh", "-c", f"sleep 2; kill -CONT {os.getpid()}"])
            os.kill(os.getpid(), signal.SIGSTOP)
        resumer.wait()
        """,
    )
    assert (status, said) == (0, "")
    assert seconds > 2


@pytest.mark.slow
def test_a_process_that_was_stopped_for_long_is_not_punished_for_it(tmp_path: Path) -> None:
    status, said, seconds = run(
        tmp_path,
        """
        with waiting("a terminal", "timeouts.saving", seconds=4.0):
            time.sleep(0.5)
            # Ctrl-Z and fg: all processes of the group are stopped, then go on
            resumer = subprocess.Popen(["sh", "-c", f"sleep 7; kill -CONT -{os.getpid()}"], start_new_session=True)
            os.killpg(0, signal.SIGSTOP)
            time.sleep(0.5)
        resumer.wait()
        """,
    )
    assert (status, said) == (0, "")
    assert seconds > 7


@pytest.mark.long
def test_a_guard_that_was_killed_is_replaced_by_one_that_knows_the_waits(tmp_path: Path) -> None:
    status, said, _ = run(
        tmp_path,
        """
        with waiting("a disk", "environment.timeout", seconds=2.0):
            watchdog._guard.kill()
            watchdog._guard.wait()
            with waiting("nothing", "timeouts.loading"): pass
            time.sleep(60)
        """,
    )
    assert status == -EXPIRED
    assert [what for _, what in waited(said)] == ["a disk (environment.timeout=2)"]


@pytest.mark.long
def test_a_guard_ends_with_its_process_however_that_ends(tmp_path: Path) -> None:
    code = """
        print(watchdog._guard.pid, file=sys.stderr, flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    """
    status, said, _ = run(tmp_path, code)
    assert status == -signal.SIGKILL
    until = time.monotonic() + 20
    while Path(f"/proc/{int(said)}").exists() and time.monotonic() < until:
        time.sleep(0.05)
    assert not Path(f"/proc/{int(said)}").exists()


@pytest.mark.long
def test_a_log_and_a_terminal_that_hang_do_not_save_the_run(tmp_path: Path) -> None:
    """Nobody reads the pipe that stderr is, which is full, and the log is a pipe that nobody has opened."""
    os.mkfifo(tmp_path / "fifo")
    script = textwrap.dedent(START).replace('Path("log")', 'Path("fifo")')
    wait = 'with watchdog, waiting("a disk", "timeouts.saving"): time.sleep(100)\n'
    reader = os.open(tmp_path / "fifo", os.O_RDONLY | os.O_NONBLOCK)
    (tmp_path / "script.py").write_text(script + FILL + wait)
    process = subprocess.Popen([sys.executable, "script.py"], cwd=tmp_path, stderr=subprocess.PIPE)
    assert process.wait(timeout=60) == -EXPIRED
    os.close(reader)
    assert process.stderr is not None
    process.stderr.close()


def test_a_finished_process_exits_with_its_status_though_its_output_is_unread(tmp_path: Path) -> None:
    """Its stderr is full, and a library has left a thread and a process behind."""
    leave = textwrap.dedent("""
        import os, subprocess, threading
        from covey.system.waits.watchdog import exit_within
        print(subprocess.Popen(["sleep", "600"]).pid, flush=True)
        threading.Thread(target=threading.Event().wait).start()
        exit_within(0.2, 7)
    """)
    (tmp_path / "script.py").write_text(leave + FILL)
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "script.py"], cwd=tmp_path, text=True, **pipes) as process:
        try:
            assert process.wait(timeout=30) == 7
        finally:
            process.kill()
        assert process.stdout is not None
        child = int(process.stdout.read())
    assert are_gone({child})


def test_a_watchdog_that_is_not_entered_watches_nothing() -> None:
    watchdog = Watchdog()
    with watchdog.deadline("anything", "no such setting"):
        watchdog.progress()


class Listing(Watchdog):
    """Its guard is a list of what it is told: (seconds, what for), () for no wait."""

    def _start(self) -> None:
        self.told: list[tuple[object, ...]] = []
        self._guard = object()  # type: ignore[assignment]

    def _stop(self) -> None:
        self._guard = None

    def _send(self, guard: object, line: bytes) -> bool:
        self.told.append(tuple(json.loads(line)[2:4]))
        return True


def test_the_watchdog_is_told_each_nested_waits_deadline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("covey.system.waits.watchdog.REPEAT_SECONDS", 60.0)
    with Listing({"timeouts.saving": 900.0}, tmp_path / "log") as watchdog:
        with watchdog.deadline("a disk", "timeouts.saving"):
            with watchdog.deadline("a model", "timeouts.loading", seconds=700.0):
                watchdog.progress()  # so soon that it is not passed on
            watchdog.now_for("a score", "timeouts.scoring", seconds=600.0)
            watchdog.now_for("a score", "timeouts.scoring", seconds=600.0)
        assert watchdog.told == [
            (900.0, "a disk"),
            (700.0, "a model"),
            (900.0, "a disk"),
            *[(600.0, "a score")] * 2,
            (),
        ]


def test_a_setting_without_a_limit_is_a_mistake(tmp_path: Path) -> None:
    refusal = pytest.raises(KeyError, match=r"timeouts\.tea")
    with Watchdog({}, tmp_path / "log") as watchdog, refusal, watchdog.deadline("tea", "timeouts.tea"):
        pass


def test_an_environment_that_judges_nothing_is_given_up() -> None:
    async def judge(waits: PromptWaits) -> None:
        async with waits.scoring("slow_judge"):
            await asyncio.sleep(60)

    with pytest.raises(ScoringTimeout) as refusal:
        asyncio.run(judge(PromptWaits(scoring_seconds=0.2)))
    assert str(refusal.value) == "slow_judge.score has not answered for 0.2 s (timeouts.scoring=0.2)"


@pytest.mark.long
def test_an_environment_that_judges_one_after_the_other_is_not_given_up() -> None:
    """Eight judgements of a fifth of a second, one at a time, with a deadline of one second for each step forward."""

    async def judge(waits: PromptWaits, turn: asyncio.Lock) -> bool:
        async with waits.scoring("judge"), turn:
            await asyncio.sleep(0.2)
        return True

    async def judge_all() -> list[bool]:
        waits, turn = PromptWaits(scoring_seconds=1.0), asyncio.Lock()
        return await asyncio.gather(*(judge(waits, turn) for _ in range(8)))

    assert asyncio.run(judge_all()) == [True] * 8


@pytest.mark.long
def test_after_one_scoring_timeout_the_environment_gets_no_more_time() -> None:
    async def judge(waits: PromptWaits, delay: float) -> None:
        await asyncio.sleep(delay)
        async with waits.scoring("slow_judge"):
            await asyncio.sleep(60)

    async def judge_all() -> list[BaseException | None]:
        waits = PromptWaits(scoring_seconds=2.0)
        return await asyncio.gather(*(judge(waits, 0.5 * n) for n in range(4)), return_exceptions=True)

    began = time.monotonic()
    assert [type(error) for error in asyncio.run(judge_all())] == [ScoringTimeout] * 4
    assert time.monotonic() - began < 6  # 3.5 s; 8 s if each began anew


def test_a_timeout_of_the_environment_itself_stays_its_own() -> None:
    async def judge(waits: PromptWaits) -> None:
        async with waits.scoring("judge"):
            raise TimeoutError("no route to the judge")

    with pytest.raises(TimeoutError, match="no route to the judge"):
        asyncio.run(judge(PromptWaits(scoring_seconds=60)))
