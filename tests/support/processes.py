"""Other processes, as Linux shows them: whose they are, and whether they still run. They may end while we look."""

import multiprocessing
import os
import socket
import time
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist


def on_two_ranks(
    work: Callable[[], Any], folder: Path, seconds: float = 60.0, backend: str = "gloo", **how: Any
) -> list[Any]:
    """What `work` returns on each of two ranks of a gloo group, which are forks of this process.

    `backend` and `how` are torch's own settings of the group.
    """
    forks = multiprocessing.get_context("fork")
    ranks = [forks.Process(target=_work_as, args=(work, rank, folder, backend, how)) for rank in range(2)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(seconds)
        process.kill()
    assert [process.exitcode for process in ranks] == [0, 0]
    return [torch.load(folder / f"rank{rank}.pt", weights_only=True) for rank in range(2)]


def as_job_steps(work: Callable[[], Any], seconds: float = 120.0) -> list[Any]:
    """What `work` returns in each of two forks of this process that have the variables of a job's two steps."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        place = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(listening.getsockname()[1])}
    return in_forks(work, [place | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(2)], seconds)


def in_forks(work: Callable[[], Any], variables: Sequence[Mapping[str, str]], seconds: float = 60.0) -> list[Any]:
    """What `work` returns in forks of this process that run side by side, each with variables of its own.

    RuntimeError with its traceback where it fails in one.
    """
    forks = [_fork(work, own) for own in variables]  # one after another: no thread of ours holds a lock meanwhile
    until = time.monotonic() + seconds
    answers = []
    for _, answer in forks:
        waited = answer.poll(max(0.0, until - time.monotonic()))
        answers.append(answer.recv() if waited else (True, f"no answer within {seconds:g} s"))
    for process, _ in forks:
        process.join(5)
        process.kill()
    if said := [text for failed, text in answers if failed]:
        raise RuntimeError(said[0])
    return [found for _, found in answers]


def in_a_fork(work: Callable[[], Any], variables: Mapping[str, str] = {}, seconds: float = 60.0) -> Any:
    """What `work` returns in a fork of this process that has these variables besides.

    Nothing of what it does to the process is left afterwards. RuntimeError with its traceback where it fails.
    """
    return in_forks(work, [variables], seconds)[0]


def _fork(work: Callable[[], Any], variables: Mapping[str, str]) -> tuple[BaseProcess, Connection]:
    ours, theirs = multiprocessing.Pipe(duplex=False)
    process = multiprocessing.get_context("fork").Process(target=_answer, args=(work, variables, theirs))
    process.start()
    theirs.close()
    return process, ours


def _answer(work: Callable[[], Any], variables: Mapping[str, str], answers: Connection) -> None:
    os.environ.update(variables)
    try:
        answers.send((False, work()))
    except BaseException:
        answers.send((True, traceback.format_exc()))


def _work_as(work: Callable[[], Any], rank: int, folder: Path, backend: str, how: dict[str, Any]) -> None:
    dist.init_process_group(backend, init_method=f"file://{folder}/store", rank=rank, world_size=2, **how)
    torch.save(work(), folder / f"rank{rank}.pt")
    dist.destroy_process_group()


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
