"""Worker processes with a deadline per call.

A worker that takes too long is killed (SIGKILL, so a loop in C ends too, with all it has started) and replaced. Workers
are started fresh: forking a process with torch's threads can deadlock. They run the user's own, trusted code; this
isolates accidents, not attacks.
"""

import asyncio
import contextlib
import os
import pickle
import secrets
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from multiprocessing.connection import Pipe
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import IO, Any

from covey.system.jsonl import object_of
from covey.system.text.escaping import escape
from covey.system.waits.running import set_alarm
from covey.system.workers.leftovers import MARK, kill_with_all
from covey.system.workers.process import MAX_ANSWER, resident_bytes
from covey.types import Failure

NO_WORKER = "no worker process"
"""Beginning of a Failure's reason that is not the function's doing."""
TOO_LONG = "took longer than"
"""Beginning of the reason where a call was ended for its time."""
NO_ANSWER = "wrote to the connection of its worker what is no answer"

MAX_LINE = 16384
"""Bytes of a printed line after which it is broken."""
PRINT_SECONDS = 0.5
"""Seconds for the last lines of an ended worker, where something that it started holds its stderr open."""

_CHILD = Path(__file__).with_name("process.py")


@dataclass(frozen=True, slots=True)
class WorkerSettings:
    """The number of workers and their lifetime."""

    num_workers: int = 2
    timeout: float = 30.0
    """Seconds one call may take, counted from when a worker begins it."""
    start_timeout: float = 120.0
    """Seconds a worker may take to start and to import its functions' modules."""
    max_calls: int = 500
    """Calls after which a worker is replaced, so that leaks of threads and descriptors stay bounded."""
    max_bytes: int = 2 << 30
    """Resident memory above which a worker is replaced after its call (Linux), without that which functions loaded
    before their first call."""
    address_bytes: int | None = None
    """Address space a worker may have: beyond it a call raises MemoryError or ends its process. None: no limit."""
    preload: tuple[str, ...] = ()
    """Modules that functions import when they are called, imported at the start instead: it takes no call's time."""


@dataclass(frozen=True, slots=True)
class _Job:
    future: "Future[Any]"
    index: int
    keywords: Mapping[str, Any]


class _Process:
    """A worker process and its connection, whose waits end with it."""

    def __init__(self, setup: bytes) -> None:
        self._connection, theirs = Pipe()
        self._mark = secrets.token_hex(8)
        self._process = subprocess.Popen(
            [sys.executable, "-P", str(_CHILD), str(theirs.fileno()), str(os.getpid())],
            pass_fds=(theirs.fileno(),),
            stdin=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            env=os.environ | {MARK: self._mark},
            start_new_session=True,  # its children can be killed with it, and Ctrl-C is left to the parent
        )
        theirs.close()
        self._printed = threading.Thread(target=_pass_on, args=(self._process.stderr,), daemon=True)
        self._printed.start()
        # State that caller and thread share
        self._lock = threading.Lock()
        self._is_reaped = False
        self.num_calls = 0
        self.held_bytes = 0
        """Bytes that its functions loaded at the start."""
        with contextlib.suppress(OSError):  # it has ended already: noticed when its answer is read
            self._connection.send_bytes(setup)

    def exchange(self, message: bytes | None, timeout: float) -> dict[str, Any]:
        """Send (unless None) and receive; {"failure": reason} on any failure."""
        # Send and receive under an alarm: killing the process ends a read that hangs
        cancel = set_alarm(timeout, self.kill)
        heard: bytes | None = None
        with contextlib.suppress(EOFError, OSError):
            if message is not None:
                self._connection.send_bytes(message)
            heard = self._connection.recv_bytes(MAX_ANSWER)
        is_in_time = cancel()
        # A function may write to descriptors that are not its own: what is no answer ends its worker
        said = object_of(heard or b"")
        if said.get("call") == self.num_calls and len(said) > 1 and is_in_time:
            return said
        self.kill()
        if not is_in_time:
            return {"failure": f"{TOO_LONG} {timeout:g} s"}
        return {"failure": self._how_it_ended() if heard is None else NO_ANSWER}

    def _how_it_ended(self) -> str:
        """Describe how the process ended; call it after `kill` only."""
        status = self._reap()
        return f"ended its process (signal {-status})" if status < 0 else f"ended its process (exit status {status})"

    def is_alive(self) -> bool:
        """Return True while it waits for a call."""
        return not self._is_reaped and not self._connection.poll(0)

    def resident_bytes(self) -> int:
        """Return its memory beyond that of loaded functions, 0 if unknown."""
        return max(0, resident_bytes(self._process.pid) - self.held_bytes)

    def kill(self) -> None:
        """Kill the process with all it has started, before it is reaped."""
        with self._lock:
            if not self._is_reaped:
                kill_with_all(self._process.pid, self._mark)

    def end(self) -> None:
        self.kill()
        self._reap()
        self._connection.close()
        self._printed.join(PRINT_SECONDS)

    def _reap(self) -> int:
        if not self._is_reaped:  # wait for the end first, without the lock: `kill` needs it
            os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOWAIT)
        with self._lock:
            self._is_reaped = True
            return self._process.wait()


def _pass_on(printed: IO[bytes]) -> None:
    with printed:
        while line := printed.readline(MAX_LINE):
            text = escape(line.decode(errors="replace").removesuffix("\n"), keep="\t")
            with contextlib.suppress(OSError, ValueError):  # nobody listens any more: the worker must go on
                sys.stderr.write(f"{text}\n")
                sys.stderr.flush()


class _Worker:
    """A slot for one process, kept filled by its parent thread."""

    def __init__(self, jobs: "SimpleQueue[_Job | None]", setup: bytes, settings: WorkerSettings) -> None:
        self._jobs = jobs
        self._setup = setup
        self._settings = settings
        self._process: _Process | None = None
        self._is_ready = False
        self._is_closed = False
        self.thread = threading.Thread(target=self._serve, name="covey-reward-worker", daemon=True)
        self.thread.start()

    def close(self) -> None:
        self._is_closed = True
        process = self._process
        if process is not None:
            process.kill()

    def _serve(self) -> None:
        self._replace()
        while (job := self._jobs.get()) is not None:
            if not job.future.set_running_or_notify_cancel():
                continue
            try:
                job.future.set_result(self._run(job))
            except Exception as error:  # whoever waits for the call must hear of it
                job.future.set_exception(error)
        if self._process is not None:
            self._process.end()

    def _run(self, job: _Job) -> Any:
        # Pickle here: an error in arguments is the caller's, not the worker's
        try:
            request = pickle.dumps((job.index, dict(job.keywords)))
        except Exception as error:
            return Failure(f"arguments cannot be sent to a worker process: {error}")
        answer = self._prepare() or self._exchange(request, self._settings.timeout)
        if self._is_closed:
            return Failure(f"{NO_WORKER}: the pool is closed")
        if "failure" in answer or self._is_worn():
            self._replace()
        if "failure" in answer:
            return Failure(answer["failure"])
        return Failure(f"raised {answer['error']}") if "error" in answer else answer["result"]

    def _prepare(self) -> dict[str, Any] | None:
        if self._process is None or (self._is_ready and not self._process.is_alive()):
            self._replace()
        if self._process is None:
            return {"failure": f"{NO_WORKER}: it could not be started"}
        if self._is_ready:
            return None
        answer = self._exchange(None, self._settings.start_timeout)
        self._is_ready = answer.get("result") == "ready"
        if self._is_ready:
            self._process.held_bytes = answer["held"]
            return None
        return {"failure": f"{NO_WORKER}: it did not start: {answer.get('error') or answer.get('failure')}"}

    def _exchange(self, message: bytes | None, timeout: float) -> dict[str, Any]:
        assert self._process is not None
        self._process.num_calls += message is not None
        return self._process.exchange(message, timeout)

    def _is_worn(self) -> bool:
        process, settings = self._process, self._settings
        if process is None:
            return False
        return process.num_calls >= settings.max_calls or process.resident_bytes() > settings.max_bytes

    def _replace(self) -> None:
        if self._process is not None:
            self._process.end()
        self._process, self._is_ready = None, False
        if not self._is_closed:
            with contextlib.suppress(OSError):  # no room for a process just now: the next call tries again
                self._process = _Process(self._setup)
        if self._is_closed and self._process is not None:  # closed while it was starting
            self._process.kill()


class WorkerPool:
    """Runs functions in worker processes: `await pool.call(0, {"prompts": [...]})`.

    Functions are sent by pickle, so they must be importable (module functions, instances of module classes, partials
    of those); their results must be JSON data. Calls may come from any event loop. On Linux no worker outlives
    this process, even when it is killed.
    """

    def __init__(self, functions: Sequence[Callable[..., Any]], settings: WorkerSettings | None = None) -> None:
        """Pickle the functions. ValueError where one cannot be pickled."""
        settings = settings or WorkerSettings()
        setup = _setup(functions, settings)
        self._jobs: SimpleQueue[_Job | None] = SimpleQueue()
        self._workers = [_Worker(self._jobs, setup, settings) for _ in range(settings.num_workers)]
        self.close = weakref.finalize(self, _close, self._jobs, self._workers)
        """Kills all workers; calls in flight end in a Failure. Also done when the pool is collected, and at exit."""

    async def call(self, index: int, keywords: Mapping[str, Any]) -> Any:
        """Return the result of function number `index`.

        A Failure where it raised, timed out, ended its process or returned no JSON data.
        """
        if not self.close.alive:
            return Failure(f"{NO_WORKER}: the pool is closed")
        job = _Job(Future(), index, keywords)
        self._jobs.put(job)
        return await asyncio.wrap_future(job.future)


def _setup(functions: Sequence[Callable[..., Any]], settings: WorkerSettings) -> bytes:
    for function in functions:
        try:
            pickle.dumps(function)
        except Exception as error:
            raise ValueError(
                f"{function!r} cannot be sent to a worker process ({error}); "
                "define it at the top level of a module or set environment.in_process=true"
            ) from error
    pickled = pickle.dumps(list(functions))
    main = _main_module() if b"__main__" in pickled else None
    instructions = {"path": sys.path, "main": main, "preload": settings.preload, "functions": pickled}
    return pickle.dumps(instructions | {"address_bytes": settings.address_bytes})


def _main_module() -> tuple[str, str | None]:
    """Return file and module name of the running script, for its functions."""
    main = vars(sys.modules["__main__"])
    spec = main.get("__spec__")
    # A script read from a pipe calls its file "<stdin>".
    if spec is None and not Path(main.get("__file__", "")).is_file():
        raise ValueError(
            "functions of an interactive session, a notebook or a script on stdin cannot be sent to a worker process; "
            "put them into a module or set environment.in_process=true"
        )
    return main["__file__"], spec.name if spec is not None else None


def _close(jobs: "SimpleQueue[_Job | None]", workers: list[_Worker]) -> None:
    for worker in workers:
        worker.close()
    with contextlib.suppress(Empty):
        while True:
            job = jobs.get_nowait()
            if job is not None and job.future.set_running_or_notify_cancel():
                job.future.set_result(Failure(f"{NO_WORKER}: the pool is closed"))
    for _ in workers:
        jobs.put(None)
    for worker in workers:
        worker.thread.join(timeout=5.0)
