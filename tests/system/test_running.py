"""Deadlines within a process do not count the time for which it was stopped."""

import os
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from covey.system.waits.running import RunningClock, set_alarm

SCRIPT = """
import asyncio, os, signal, subprocess, time
from functools import partial
from covey.system.waits.signals import quiet_event_loop
from covey.system.workers.pool import WorkerPool, WorkerSettings

def stop():
    resumer = subprocess.Popen(["sh", "-c", f"sleep 4; kill -CONT {{os.getpid()}}"], start_new_session=True)
    os.kill(os.getpid(), signal.SIGSTOP)
    resumer.wait()

async def stopped_while(work):
    task = asyncio.ensure_future(work)
    await asyncio.sleep(0.3)
    stop()
    return await task

async def slow():
    async with asyncio.timeout(2.5):
        await asyncio.sleep({seconds})
    return "in time"

async def called():
    pool = WorkerPool([partial(time.sleep, 0), partial(time.sleep, {seconds})], WorkerSettings(1, timeout=2.5))
    await pool.call(0, {{}})
    try:
        return await stopped_while(pool.call(1, {{}}))
    finally:
        pool.close()

with asyncio.Runner(loop_factory=quiet_event_loop) as runner:
    try:
        print(runner.run({what}))
    except TimeoutError:
        print("too late")
"""


@pytest.mark.parametrize(
    ("what", "seconds", "said"),
    [
        ("called()", 5.5, "None"),
        ("called()", 60, "Failure(reason='took longer than 2.5 s'"),
        ("stopped_while(slow())", 2.0, "in time"),
        ("stopped_while(slow())", 60, "too late"),
    ],
)
def test_a_stop_is_on_nobodys_account_and_what_is_too_late_stays_so(
    tmp_path: Path, what: str, seconds: float, said: str
) -> None:
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(SCRIPT.format(what=what, seconds=seconds)))
    done = subprocess.run([sys.executable, script], env=os.environ, capture_output=True, text=True, timeout=60)
    assert done.stdout.startswith(said), done.stderr


def test_an_alarm_rings_in_time_and_not_once_it_is_cancelled() -> None:
    began, rung = time.monotonic(), list[float]()
    cancel, _ = [set_alarm(0.2, lambda: rung.append(time.monotonic() - began)) for _ in range(2)]
    cancel()
    time.sleep(1)
    assert len(rung) == 1
    assert 0.2 <= rung[0] < 2


def test_an_idle_clock_counts() -> None:
    clock = RunningClock()
    began = clock()
    time.sleep(2.5)
    assert clock() - began >= 2.4
