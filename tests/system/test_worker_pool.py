"""Worker processes: deadlines, crashes, replacement, and that none is left behind."""

import asyncio
import os
import pickle
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from covey.system.workers import process
from covey.system.workers.pool import NO_ANSWER, NO_WORKER, WorkerPool, WorkerSettings
from covey.types import Failure

from ..support.processes import are_gone, is_running

MODULE = """
    import ctypes, os, subprocess, sys, threading, time

    def add(a, b): return a + b
    def sleep(): time.sleep(60)
    def spin():
        while True: pass
    def hold_gil(): ctypes.PyDLL(None).sleep(60)
    def deadlock():
        lock = threading.Lock(); lock.acquire(); lock.acquire()
    def leave(): os._exit(3)
    def segfault(): ctypes.string_at(0)
    def quit(): raise SystemExit(4)
    def fail(): raise ValueError("two\\nlines")
    def forge(): return {1, 2}
    def babble(said):
        for descriptor in range(3, 40):
            try: os.write(descriptor, said if type(said) is bytes else len(said).to_bytes(4, "big") + said.encode())
            except OSError: pass
        time.sleep(60)
    def later(said): threading.Timer(0.3, babble, [said]).start(); return 1
    def fork():
        if os.fork() == 0: time.sleep(0.2)
        return 1
    def double(n): time.sleep(0.6); return 2 * n
    def pid(): return os.getpid()
    def leak(held=[]): held.append(bytearray(1_000_000)); threading.Thread(target=sleep).start(); return len(held)
    def hoard(held=[]): held.append(b"x" * 60_000_000); return len(held)
    def shout(): print("x" * 100_000); return 1
    def tell(text): print("said:", text); print("and", file=sys.stderr); os.write(1, b"more"); return 1
    def tell_and_hang(): print("last words"); time.sleep(60)
    def child():
        process = subprocess.Popen(["sleep", "60"])
        open("child", "w").write(str(process.pid))
        process.wait()
    def large(text): return len(text)
    def daemon(clean=False, then="return", name="daemon"):
        # leaves a process in a session of its own, whose parent is gone
        if os.fork() == 0:
            os.setsid()
            if os.fork() == 0:
                with open(name, "w") as file: file.write(str(os.getpid()))
                os.execve("/bin/sleep", ["sleep", "60"], {} if clean else os.environ)
            os._exit(0)
        while not os.path.exists(name) or not open(name).read(): time.sleep(0.01)
        if then == "exit": os._exit(3)
        if then == "hang": time.sleep(60)
        return 1

    class Holds:
        def prepare(self): self.held = b"x" * 200_000_000
        def __call__(self): return os.getpid(), len(self.held)

    class CannotLoad(Holds):
        def prepare(self): raise OSError("no such model")
"""
NAMES = (
    *("add", "sleep", "spin", "hold_gil", "deadlock", "leave", "segfault", "quit", "fail", "forge", "pid", "leak"),
    *("shout", "tell", "tell_and_hang", "child", "large", "daemon", "babble", "later", "fork", "double", "hoard"),
)


@pytest.fixture
def functions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict]:
    (tmp_path / "worker_tasks.py").write_text(textwrap.dedent(MODULE))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "worker_tasks", raising=False)
    import worker_tasks

    yield {name: vars(worker_tasks)[name] for name in NAMES}
    monkeypatch.delitem(sys.modules, "worker_tasks", raising=False)


@pytest.fixture
def pool(functions: dict) -> Iterator[WorkerPool]:
    pool = WorkerPool(list(functions.values()), WorkerSettings(num_workers=2, timeout=1.0))
    yield pool
    pool.close()


async def call(pool: WorkerPool, name: str, **keywords: object) -> object:
    return await pool.call(NAMES.index(name), keywords)


def test_a_result_comes_back(pool: WorkerPool) -> None:
    assert asyncio.run(call(pool, "add", a=2, b=3)) == 5


def test_a_pool_serves_several_event_loops(pool: WorkerPool) -> None:
    assert [asyncio.run(call(pool, "add", a=n, b=1)) for n in range(3)] == [1, 2, 3]


@pytest.mark.long
@pytest.mark.parametrize("name", ["sleep", "spin", "hold_gil", "deadlock"])
def test_a_hanging_call_ends_at_its_deadline_and_its_worker_is_replaced(pool: WorkerPool, name: str) -> None:
    asyncio.run(call(pool, "add", a=1, b=1))
    began = time.monotonic()
    assert asyncio.run(call(pool, name)) == Failure("took longer than 1 s")
    assert 0.9 < time.monotonic() - began < 2.0
    assert asyncio.run(call(pool, "add", a=1, b=1)) == 2


@pytest.mark.long
def test_others_do_not_notice_a_hanging_call(pool: WorkerPool) -> None:
    async def run() -> tuple[object, float]:
        await call(pool, "add", a=0, b=0)
        hanging = asyncio.create_task(call(pool, "spin"))
        await asyncio.sleep(0.1)
        began = time.monotonic()
        assert await asyncio.gather(*(call(pool, "add", a=n, b=1) for n in range(50))) == list(range(1, 51))
        return await hanging, time.monotonic() - began

    result, seconds = asyncio.run(run())
    assert result == Failure("took longer than 1 s")
    assert seconds < 2.0


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("leave", "ended its process (exit status 3)"),
        ("segfault", "ended its process (signal 11)"),
        ("quit", "raised SystemExit: 4 (worker_tasks.py:"),
        ("fail", "raised ValueError: two lines (worker_tasks.py:"),
        ("forge", "raised TypeError: Object of type set is not JSON serializable"),
    ],
)
def test_a_call_that_ends_badly_is_a_failure_and_the_next_one_works(pool: WorkerPool, name: str, reason: str) -> None:
    failure = asyncio.run(call(pool, name))
    assert isinstance(failure, Failure)
    assert failure.reason.startswith(reason)
    assert asyncio.run(call(pool, "add", a=1, b=1)) == 2


NO_ANSWERS = ("no JSON", "[1]", "[" * 100_000, '{"result": ', "{}", '{"call": 1}', '{"call": 2, "result": 1}', "")
LENGTHS = tuple(b"\xff\xff\xff\xff" + size.to_bytes(8, "big") for size in (1 << 40, (1 << 63) - 1, (1 << 64) - 1))


@pytest.mark.parametrize("said", [*NO_ANSWERS, *LENGTHS, b"\x7f\xff\xff\xff", b"\xff\xff\xff\xf0"])
def test_a_worker_that_says_what_is_no_answer_is_replaced_at_once(pool: WorkerPool, said: str) -> None:
    began = time.monotonic()
    assert isinstance(asyncio.run(call(pool, "babble", said=said)), Failure)
    assert asyncio.run(call(pool, "add", a=1, b=1)) == 2
    assert time.monotonic() - began < 10
    # No alarm of it is left, which would end a worker later
    time.sleep(max(0.0, began + 1.2 - time.monotonic()))
    assert [asyncio.run(call(pool, "add", a=n, b=1)) for n in range(4)] == [1, 2, 3, 4]


@pytest.mark.parametrize("name", ["later", "fork"])
def test_what_a_function_leaves_answers_no_other_call(functions: dict, name: str) -> None:
    pool = WorkerPool(list(functions.values()), WorkerSettings(num_workers=1, timeout=5.0))
    for _ in range(2):
        assert asyncio.run(call(pool, name, **{"said": '{"result": 7}'} if name == "later" else {})) == 1
        first, *others = [asyncio.run(call(pool, "double", n=n)) for n in range(3)]
        assert first in (0, Failure(NO_ANSWER))
        assert others == [2, 4]
    pool.close()


def test_an_answer_has_a_limit(functions: dict, monkeypatch: pytest.MonkeyPatch) -> None:
    assert process.answer([lambda: 12], pickle.dumps((0, {}))) == {"result": 12}
    monkeypatch.setattr(process, "MAX_ANSWER", 1)
    said = process.answer([lambda: 12], pickle.dumps((0, {})))["error"]
    assert said.startswith("ValueError: result must be <= 1 bytes of JSON, got 2")


def test_an_idle_worker_that_died_costs_no_result(functions: dict) -> None:
    pool = WorkerPool(list(functions.values()), WorkerSettings(num_workers=1, timeout=2.0))
    first = asyncio.run(call(pool, "pid"))
    assert isinstance(first, int)
    os.kill(first, signal.SIGKILL)
    time.sleep(0.1)
    second = asyncio.run(call(pool, "pid"))
    pool.close()
    assert isinstance(second, int)
    assert second != first


def test_workers_are_recycled_so_that_leaks_are_bounded(functions: dict) -> None:
    pool = WorkerPool(list(functions.values()), WorkerSettings(num_workers=1, timeout=2.0, max_calls=3))
    held = [asyncio.run(call(pool, "leak")) for _ in range(7)]
    pool.close()
    assert held == [1, 2, 3, 1, 2, 3, 1]


def test_a_worker_whose_memory_grows_is_replaced(functions: dict) -> None:
    with closing(WorkerPool(list(functions.values()), WorkerSettings(num_workers=1, max_bytes=100_000_000))) as pool:
        assert [asyncio.run(call(pool, "hoard")) for _ in range(4)] == [1, 2, 1, 2]


def test_what_a_function_loads_at_the_start_does_not_wear_its_worker_out(functions: dict) -> None:
    """Otherwise a reward model larger than the limit would be loaded again for every call."""
    import worker_tasks

    pool = WorkerPool([worker_tasks.Holds()], WorkerSettings(num_workers=1, max_bytes=100 << 20))
    answers = [asyncio.run(pool.call(0, {})) for _ in range(3)]
    pool.close()
    assert answers[0][1] == 200_000_000
    assert answers == [answers[0]] * 3


def test_a_worker_whose_function_cannot_load_says_why(functions: dict) -> None:
    import worker_tasks

    pool = WorkerPool([worker_tasks.CannotLoad()], WorkerSettings(num_workers=1))
    failure = asyncio.run(pool.call(0, {}))
    pool.close()
    assert isinstance(failure, Failure)
    assert failure.reason.startswith(f"{NO_WORKER}: it did not start: OSError: no such model (worker_tasks.py:")


@pytest.mark.long
def test_what_functions_print_goes_line_by_line_through_the_stderr_of_this_process(
    pool: WorkerPool, capsys: pytest.CaptureFixture
) -> None:
    """A live panel moves aside for that. What the model wrote must not act on the terminal."""
    assert asyncio.run(call(pool, "tell", text="\x1b[2Jred\u202e")) == 1
    pool.close()
    assert capsys.readouterr().err.splitlines() == [r"said: \x1b[2Jred\u202e", "and", "more"]


@pytest.mark.long
def test_what_a_function_printed_before_it_hung_is_not_lost(pool: WorkerPool, capsys: pytest.CaptureFixture) -> None:
    assert asyncio.run(call(pool, "tell_and_hang")) == Failure("took longer than 1 s")
    pool.close()
    assert capsys.readouterr().err == "last words\n"


def test_what_functions_print_stays_off_the_result_channel(pool: WorkerPool, capfd: pytest.CaptureFixture) -> None:
    assert asyncio.run(call(pool, "shout")) == 1
    assert capfd.readouterr().out == ""


def test_large_arguments_pass(pool: WorkerPool) -> None:
    assert asyncio.run(call(pool, "large", text="a" * 10_000_000)) == 10_000_000


def test_arguments_that_cannot_be_sent_are_a_failure(pool: WorkerPool) -> None:
    failure = asyncio.run(call(pool, "add", a=lambda: 1, b=2))
    assert isinstance(failure, Failure)
    assert failure.reason.startswith("arguments cannot be sent to a worker process")


def test_a_call_that_the_pool_fails_at_itself_raises(pool: WorkerPool, monkeypatch: pytest.MonkeyPatch) -> None:
    assert asyncio.run(call(pool, "add", a=2, b=3)) == 5
    monkeypatch.setattr("covey.system.workers.pool._Process.exchange", lambda self, message, timeout: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        asyncio.run(asyncio.wait_for(call(pool, "add", a=2, b=3), 20))


def test_functions_that_cannot_be_sent_are_refused_at_once() -> None:
    with pytest.raises(ValueError, match=r"cannot be sent to a worker process .* set environment.in_process=true"):
        WorkerPool([lambda: 1])


WITHOUT_A_FILE = """
from covey.system.workers.pool import WorkerPool, WorkerSettings

def exact(completions): return [1.0 for _ in completions]

try:
    WorkerPool([exact], WorkerSettings())
except ValueError as error:
    print(error)

"""


@pytest.mark.parametrize("how", [["-"], ["-i", "-q"], ["-c", WITHOUT_A_FILE]], ids=["stdin", "a session", "-c"])
def test_functions_of_a_script_without_a_file_are_refused_with_the_remedy(how: list[str], tmp_path: Path) -> None:
    ended = subprocess.run([sys.executable, *how], input=WITHOUT_A_FILE, cwd=tmp_path, capture_output=True, text=True)
    assert ended.stdout.strip() == (
        "functions of an interactive session, a notebook or a script on stdin cannot be sent to a worker process; "
        "put them into a module or set environment.in_process=true"
    )


def test_a_worker_that_cannot_start_says_why(functions: dict, tmp_path: Path) -> None:
    (tmp_path / "worker_tasks.py").write_text("import no_such_module")
    pool = WorkerPool([functions["add"]], WorkerSettings(num_workers=1))
    failure = asyncio.run(pool.call(0, {"a": 1, "b": 1}))
    pool.close()
    assert isinstance(failure, Failure)
    assert failure.reason.startswith(
        f"{NO_WORKER}: it did not start: ModuleNotFoundError: No module named 'no_such_mod"
    )


def test_closing_ends_running_calls_and_refuses_new_ones(pool: WorkerPool) -> None:
    async def run() -> tuple[object, object, float]:
        await call(pool, "add", a=0, b=0)
        under_way = asyncio.create_task(call(pool, "spin"))
        await asyncio.sleep(0.1)
        began = time.monotonic()
        pool.close()
        return await under_way, await call(pool, "add", a=1, b=1), time.monotonic() - began

    under_way, refused, seconds = asyncio.run(run())
    assert under_way == refused == Failure(f"{NO_WORKER}: the pool is closed")
    assert seconds < 1.0


@pytest.mark.long
def test_children_of_a_hanging_function_are_killed_with_it(pool: WorkerPool, tmp_path: Path) -> None:
    assert asyncio.run(call(pool, "child")) == Failure("took longer than 1 s")
    assert are_gone({int((tmp_path / "child").read_text())}, seconds=5)


SCRIPT = """
    import asyncio, os, sys
    from covey.system.workers.pool import WorkerPool

    def hang():
        open("worker", "w").write(str(os.getpid()))
        while True: pass

    if __name__ == "__main__":
        asyncio.run(WorkerPool([hang]).call(0, {}))
"""


def test_no_worker_outlives_a_killed_parent_and_scripts_may_define_functions(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(textwrap.dedent(SCRIPT))
    parent = subprocess.Popen([sys.executable, "script.py"], cwd=tmp_path)
    worker = tmp_path / "worker"
    deadline = time.monotonic() + 60
    while not (worker.exists() and worker.read_text()):
        assert time.monotonic() < deadline
        assert parent.poll() is None
        time.sleep(0.05)
    parent.kill()
    parent.wait(timeout=10)
    assert are_gone({int(worker.read_text())}, seconds=5)


# Nothing tells a process that dropped its environment and lost its worker from others: (exit, True) is not here.
@pytest.mark.parametrize(
    ("then", "clean"), [("return", False), ("return", True), ("hang", False), ("hang", True), ("exit", False)]
)
def test_what_a_function_leaves_in_a_session_of_its_own_ends_with_its_worker(
    then: str, clean: bool, functions: dict
) -> None:
    pool = WorkerPool([functions["daemon"]], WorkerSettings(num_workers=1, timeout=3.0))
    found = asyncio.run(pool.call(0, {"clean": clean, "then": then}))
    assert found == 1 if then == "return" else isinstance(found, Failure)
    left = int(Path("daemon").read_text())
    pool.close()
    assert are_gone([left], seconds=5.0)


@pytest.mark.long
def test_a_replaced_workers_leftovers_end_and_other_workers_keep_theirs(functions: dict) -> None:
    settings = WorkerSettings(num_workers=1, timeout=10.0, max_calls=1)
    first, second = (WorkerPool([functions["daemon"]], settings) for _ in range(2))
    long = WorkerPool([functions["daemon"]], WorkerSettings(num_workers=1, timeout=10.0))
    try:
        assert asyncio.run(long.call(0, {"name": "kept"})) == 1
        for number, pool in enumerate((first, second)):
            assert asyncio.run(pool.call(0, {"name": f"left{number}"})) == 1
            assert are_gone([int(Path(f"left{number}").read_text())], seconds=5.0)
        assert is_running(int(Path("kept").read_text()))
    finally:
        for pool in (first, second, long):
            pool.close()
    assert are_gone([int(Path("kept").read_text())], seconds=5.0)
