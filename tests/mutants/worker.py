"""Run tests in forks of a process that has imported the libraries named to it once, and nothing of covey.

It reads lines of JSON, each a list of arguments of pytest, and answers each with its exit status and its output.
"""

import gc
import importlib
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress

DEADLINE = 300.0
"""Seconds after which tests that hang are killed."""
HUNG = 124


def serve(libraries: Sequence[str]) -> None:
    for name in libraries:
        with suppress(ImportError):
            importlib.import_module(name)
    gc.freeze()
    for line in sys.stdin:
        status, output = run_apart(json.loads(line))
        print(json.dumps({"status": status, "output": output}), flush=True)


def run_apart(arguments: Sequence[str]) -> tuple[int, str]:
    """Return the exit status and the output of pytest in a fork, which takes all that it started with it."""
    with tempfile.TemporaryFile() as output:
        child = os.fork()
        if child == 0:
            os.setsid()
            for stream in (1, 2):
                os.dup2(output.fileno(), stream)
            os._exit(_run_tests(arguments))
        status = _wait(child)
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(child, signal.SIGKILL)
        output.seek(0)
        return status, output.read().decode(errors="replace")[-20_000:]


def _run_tests(arguments: Sequence[str]) -> int:
    import pytest

    sys.path.insert(0, os.getcwd())
    try:
        return int(pytest.main(list(arguments)))
    finally:
        sys.stdout.flush()
        sys.stderr.flush()


def _wait(child: int) -> int:
    end = time.monotonic() + DEADLINE
    while time.monotonic() < end:
        found, status = os.waitpid(child, os.WNOHANG)
        if found:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.02)
    os.killpg(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return HUNG


if __name__ == "__main__":
    serve(sys.argv[1:])
