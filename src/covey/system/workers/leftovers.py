"""Kill the processes that a worker's functions have started (Linux).

A process is a worker's if it descends from it, or if its environment carries the worker's mark: the first finds those
that dropped their environment, the second those whose worker has ended.
"""

import os
import signal
import time
from contextlib import suppress
from pathlib import Path

MARK = "COVEY_WORKER"
"""Variable of the environment that tells a worker's processes from all others."""
ROUNDS = 50
"""Maximum rounds: a process may start another while it is looked for."""
PAUSE_SECONDS = 0.01


def kill_with_all(pid: int, mark: str) -> None:
    """Kill a child and all it has started, before it is reaped."""
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGSTOP)
        kill_started(pid, mark)
        os.killpg(pid, signal.SIGKILL)


def kill_started(pid: int, mark: str) -> None:
    """Kill every process that the stopped worker `pid` has started."""
    for _ in range(ROUNDS):
        found = (descendants(pid) | find_marked(mark)) - {pid, os.getpid()}
        if not found:
            return
        for process in found:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(process, signal.SIGKILL)
        time.sleep(PAUSE_SECONDS)


def descendants(pid: int) -> set[int]:
    """Return the running processes below `pid`."""
    parents = {process: _parent(process) for process in _processes()}
    below = {pid}
    while more := {process for process, parent in parents.items() if parent in below} - below:
        below |= more
    return below - {pid}


def find_marked(mark: str) -> set[int]:
    """Return the running processes with this mark."""
    wanted = f"{MARK}={mark}".encode()
    return {process for process in _processes() if wanted in _environment(process) and _parent(process) is not None}


def _processes() -> list[int]:
    with suppress(OSError):
        return [int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit()]
    return []


def _parent(process: int) -> int | None:
    with suppress(OSError):
        state, parent = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[:2]
        return None if state in "ZX" else int(parent)
    return None


def _environment(process: int) -> list[bytes]:
    with suppress(OSError):  # of somebody else, or gone
        return Path(f"/proc/{process}/environ").read_bytes().split(b"\0")
    return []
