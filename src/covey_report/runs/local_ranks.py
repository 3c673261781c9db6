"""Run a function on ranks of this machine that meet over torch.distributed.

The first failure ends all, and is raised. On Linux none outlives this process, even when it is killed, nor do their
children.
"""

import json
import os
import pickle
import secrets
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path
from typing import NamedTuple

from covey.system.ranks import new_meeting_place
from covey.system.waits.watchdog_process import EXPIRED
from covey.system.workers.leftovers import MARK, kill_with_all
from covey.types import RunStopped

WHY_SECONDS = 5.0
"""Seconds for a rank that failed to say why, once another has lost it."""

OF_LAUNCHERS = "TORCHELASTIC_"
"""Beginning of variables with which torchrun tells its own processes where they meet."""
ADDRESS = "127.0.0.1"

_CHILD = Path(__file__).with_name("rank_process.py")


MOST_STARTED = {"ranks": 64, "threads": 1024}
"""Most processes, and threads of each, that a run's records may ask for."""


def number_to_start(name: str, told: object) -> int:
    """Return a number of processes or threads. ValueError beyond the bounds, for a stranger's file may say it."""
    if type(told) is not int or not 1 <= told <= MOST_STARTED[name]:
        most = MOST_STARTED[name]
        raise ValueError(f"the {name} of a run must be 1 to {most} to compute it again, its records say {told!r:.40}")
    return told


class RankReply(NamedTuple):
    """The result of the function on one rank."""

    result: str = ""
    error: str | None = None
    """Reason why it failed, in one line."""
    is_mendable: bool = False
    """It failed for something that a user can fix."""
    is_lost: bool = False
    """It failed as it has lost another rank, which knows more."""


class _Rank:
    def __init__(self, work: bytes, variables: Mapping[str, str]) -> None:
        self.connection, theirs = Pipe()
        self._mark = secrets.token_hex(8)
        inherited = {name: value for name, value in os.environ.items() if not name.startswith(OF_LAUNCHERS)}
        self._process = subprocess.Popen(
            [sys.executable, "-P", str(_CHILD), str(theirs.fileno()), str(os.getpid())],
            pass_fds=(theirs.fileno(),),
            stdin=subprocess.DEVNULL,
            env={**inherited, **variables, MARK: self._mark},
            start_new_session=True,  # it can be killed with what it starts, and Ctrl-C is left to this process
        )
        theirs.close()
        with suppress(OSError):  # it has ended already: noticed when its answer is read
            self.connection.send_bytes(work)

    def answer(self) -> RankReply:
        """Return its answer, or how its process ended without one."""
        try:
            return RankReply(*json.loads(self.connection.recv_bytes()))
        except (EOFError, OSError):
            status = self.end()
        if status == -EXPIRED:
            return RankReply(error="ended at a deadline, which the line above names")
        return RankReply(error=f"ended its process ({f'signal {-status}' if status < 0 else f'exit status {status}'})")

    def end(self) -> int:
        """Kill it with all it has started, and return its exit status."""
        if self._process.returncode is None:
            kill_with_all(self._process.pid, self._mark)
        self.connection.close()
        return self._process.wait()


def run_on_ranks(work: Callable[[], str], threads: Sequence[int]) -> str:
    """Return rank 0's result once `work` has returned on all ranks.

    `threads` are those of each rank. `work` is sent by pickle, and joins the others by `collectives.process_group`.
    ValueError or RunStopped where it fails on a rank.
    """
    sent = pickle.dumps({"path": sys.path, "work": pickle.dumps(work)})
    number_to_start("ranks", len(threads))
    threads = [number_to_start("threads", one) for one in threads]
    place = {"WORLD_SIZE": str(len(threads)), **new_meeting_place(ADDRESS)}
    started: list[_Rank] = []
    try:
        for number, num_threads in enumerate(threads):
            own = {"RANK": str(number), "LOCAL_RANK": str(number), "OMP_NUM_THREADS": str(num_threads)}
            started.append(_Rank(sent, place | own))
        return _await_all(started)
    finally:
        for rank in started:
            rank.end()


def _await_all(started: Sequence[_Rank]) -> str:
    answers: dict[int, RankReply] = {}
    waiting = {rank.connection: number for number, rank in enumerate(started)}
    given_up: float | None = None
    while waiting:
        ready = wait(list(waiting), None if given_up is None else max(0.0, given_up - time.monotonic()))
        for connection in ready:
            assert isinstance(connection, Connection)
            number = waiting.pop(connection)
            answers[number] = started[number].answer()
        failed = [answer for answer in answers.values() if answer.error is not None]
        if any(not answer.is_lost for answer in failed) or (failed and not ready):
            break
        if failed and given_up is None:
            given_up = time.monotonic() + WHY_SECONDS
    # A rank's own failure, not the others' loss of it
    for number, answer in sorted(answers.items(), key=lambda one: (one[1].is_lost, one[0])):
        if answer.error is not None:
            kind = ValueError if answer.is_mendable else RunStopped
            raise kind(f"rank {number}: {answer.error}")
    return answers[0].result
