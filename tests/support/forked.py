"""The command in a process forked from one that has imported torch and transformers, so that it starts in a moment.

All else is as in a process of `python -m covey`: a session, a folder, variables and an end of its own.
"""

import atexit
import multiprocessing
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path

SERVER = multiprocessing.get_context("forkserver")
SERVER.set_forkserver_preload(["covey.loop", "covey.cli.job", "transformers.modeling_utils"])


class Forked:
    """What tests ask of a `subprocess.Popen[str]`."""

    def __init__(self, words: Sequence[str], folder: Path, variables: Mapping[str, str]) -> None:
        """Start `covey WORDS` in the folder, with these variables alone; what it prints comes through a pipe."""
        self._printed, theirs = SERVER.Pipe(duplex=False)
        self._process = SERVER.Process(target=_run, args=(list(words), str(folder), dict(variables), theirs))
        self._process.start()
        theirs.close()
        assert self._process.pid is not None
        self.pid: int = self._process.pid

    def poll(self) -> int | None:
        """The exit status, or minus the number of the signal that ended it; None while it runs."""
        return self._process.exitcode

    @property
    def returncode(self) -> int | None:
        return self.poll()

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        if self.poll() is None:
            self._process.kill()

    def communicate(self, timeout: float = 600.0) -> tuple[str, None]:
        """All that it prints until nobody holds its output open any more."""
        until, parts = time.monotonic() + timeout, []
        while select.select([self._printed], [], [], max(0.0, until - time.monotonic()))[0]:
            part = os.read(self._printed.fileno(), 1 << 16)
            if not part:
                self._printed.close()
                self._process.join()
                return b"".join(parts).decode(), None
            parts.append(part)
        raise subprocess.TimeoutExpired("covey", timeout, b"".join(parts))


def _run(words: list[str], folder: str, variables: Mapping[str, str], output: Connection) -> None:
    """Become what `python -m covey WORDS` is, run, and end as an interpreter does."""
    os.setsid()
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # whatever the tests were started by
    for number in (1, 2):
        os.dup2(output.fileno(), number)
    output.close()
    sys.stdout, sys.stderr = (os.fdopen(number, "w", buffering=1, closefd=False) for number in (1, 2))
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(variables)
    sys.path.insert(0, folder)
    sys.argv[:] = ["covey", *words]

    from covey.__main__ import run

    code = run()
    vars(threading)["_shutdown"]()
    vars(atexit)["_run_exitfuncs"]()
    sys.stdout.flush()
    os._exit(code)
