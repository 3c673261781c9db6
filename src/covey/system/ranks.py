"""Ranks and world size, as torchrun, accelerate, mpirun and srun set them. Imports nothing heavy."""

import atexit
import os
import re
import socket
import sys
from collections.abc import Mapping
from typing import NoReturn

RANK = ("RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK")
WORLD_SIZE = ("WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE")
LOCAL_RANK = ("LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID")
"""Names under which launchers say it; the first that is set counts."""
SLURM_RANK, SLURM_SIZE, SLURM_LOCAL_RANK = "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID"
"""The same of a task of `srun`, where no launcher runs inside it. The second is set within steps only."""
FIRST_PORT, NUM_PORTS = 20000, 20000
"""Port range where tasks of `srun` meet: the port follows from job and step."""


def rank() -> int:
    """Return the number of this process, from 0."""
    return _number(RANK, SLURM_RANK, 0)


def world_size() -> int:
    """Count the processes that train together."""
    return _number(WORLD_SIZE, SLURM_SIZE, 1)


def local_rank() -> int:
    """Return this process's number on its machine: its GPU's."""
    return _number(LOCAL_RANK, SLURM_LOCAL_RANK, rank())


def check_ranks(environment: Mapping[str, str] = os.environ) -> None:
    """Refuse launches whose processes would not find each other. ValueError."""
    for name in (*RANK, *WORLD_SIZE, *LOCAL_RANK):
        if name in environment and not environment[name].isdecimal():
            raise _own(f"{name} must be a number, got {environment[name]!r}: a launcher such as torchrun sets it")
    size, number = world_size(), rank()
    if not 0 <= number < size:
        raise _own(f"the rank must be from 0 to {size - 1}, got {number}: a launcher sets RANK and WORLD_SIZE")
    if size > 1 and not any(name in environment for name in (*RANK, SLURM_RANK)):
        raise ValueError(f"WORLD_SIZE={size} needs RANK: a launcher such as torchrun sets both")
    # A Slurm task that does not know of the others would train a run of its own
    tasks = environment.get("SLURM_NTASKS", "1")
    if size == 1 and tasks.isdigit() and int(tasks) > 1 and SLURM_RANK in environment and not _is_launched(environment):
        raise ValueError(
            f"this is one of {tasks} tasks of a Slurm job, and nothing says that the others run it too: start it with "
            "`srun covey ...` or torchrun, or with WORLD_SIZE=1 to train in this process alone"
        )
    near = environment.get("OMPI_COMM_WORLD_LOCAL_SIZE", tasks)
    if "OMPI_COMM_WORLD_SIZE" in environment and near != str(size) and "MASTER_ADDR" not in environment:
        raise ValueError("mpirun over several machines needs MASTER_ADDR, the name of the first one")


def _own(text: str) -> ValueError:
    """Build an error that each process reports."""
    error = ValueError(text)
    error.add_note("on this process")
    return error


def meeting_place(environment: Mapping[str, str] = os.environ) -> tuple[str, str]:
    """Return the ranks' address and port, the launcher's or Slurm's."""
    address, port = "127.0.0.1", "29500"
    if _is_slurm_step(environment):
        nodes = environment.get("SLURM_STEP_NODELIST") or environment.get("SLURM_JOB_NODELIST", address)
        address = first_host(nodes)
        ids = (environment.get("SLURM_JOB_ID", "0"), environment.get("SLURM_STEP_ID", "0"))
        port = str(FIRST_PORT + (31 * int(ids[0]) + int(ids[1])) % NUM_PORTS)
    return environment.get("MASTER_ADDR", address), environment.get("MASTER_PORT", port)


def new_meeting_place(address: str) -> dict[str, str]:
    """Return a meeting place's variables, at a free local port."""
    with socket.socket() as free:
        free.bind((address, 0))
        port = free.getsockname()[1]
    return {"MASTER_ADDR": address, "MASTER_PORT": str(port)}


def check_address(address: str) -> None:
    """Refuse an address that this machine cannot resolve. ValueError."""
    try:
        socket.getaddrinfo(address, None)
    except (OSError, UnicodeError) as error:
        raise _own(
            f"the ranks meet at {address!r}, which has no address on this machine ({error}): set MASTER_ADDR to the "
            "address of the first one"
        ) from error


def first_host(nodes: str) -> str:
    """Return the first machine of a Slurm list.

    >>> first_host("gpu[03-05,9],login"), first_host("a1,a2"), first_host("rack[1-2]n[07-08]")
    ('gpu03', 'a1', 'rack1n07')
    """
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])*", nodes)
    return re.sub(r"\[([^\],-]*)[^\]]*\]", r"\1", first[0] if first else nodes)


def log_name(number: int) -> str:
    """Return the name of a rank's log in the run folder.

    >>> log_name(0), log_name(3)
    ('covey.log', 'covey-rank3.log')
    """
    return "covey.log" if number == 0 else f"covey-rank{number}.log"


def leave(status: int) -> NoReturn:
    """End this rank after exit handlers and output, skipping the interpreter's shutdown.

    Threads of torch's process groups may ask for the interpreter during shutdown, which ends in SIGABRT: a successful
    run would count as failed.
    """
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def _number(names: tuple[str, ...], of_slurm: str, default: int) -> int:
    """Return the first set variable, else Slurm's, else the default."""
    chosen = [name for name in names if name in os.environ]
    if not chosen and _is_slurm_step(os.environ) and of_slurm in os.environ:
        chosen = [of_slurm]
    text = os.environ[chosen[0]] if chosen else ""
    return int(text) if text.isdecimal() else default


def _is_launched(environment: Mapping[str, str]) -> bool:
    return any(name in environment for name in WORLD_SIZE)


def _is_slurm_step(environment: Mapping[str, str]) -> bool:
    """Return True for one of several `srun` tasks."""
    return SLURM_SIZE in environment and SLURM_RANK in environment and not _is_launched(environment)
