"""Other processes, as Linux shows them: whose they are, and whether they still run. They may end while we look."""

import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path


def children(pid: int) -> set[int]:
    """Processes that a process has started; none of one that has ended."""
    while Path(f"/proc/{pid}/task").exists():
        with suppress(OSError):  # a thread has just ended, and another one has its children now: look again
            tasks = list(Path(f"/proc/{pid}/task").iterdir())
            return {int(child) for task in tasks for child in (task / "children").read_text().split()}
    return set()


def descendants(pid: int) -> set[int]:
    """Processes that a process has started, and those that they have."""
    own = children(pid)
    return own.union(*(descendants(child) for child in own))


def are_gone(pids: Iterable[int], seconds: float = 30.0) -> bool:
    """Whether none of the processes runs any more, now or soon."""
    pids, until = set(pids), time.monotonic() + seconds
    while any(is_running(pid) for pid in pids):
        if time.monotonic() > until:
            return False
        time.sleep(0.02)
    return True


def is_running(pid: int) -> bool:
    """Not where it has ended, or only waits for somebody to ask how."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
