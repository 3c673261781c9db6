"""Which of several processes this one is: what torchrun, accelerate launch and mpirun say in the environment.

Imports nothing heavy: the command asks before torch is needed.
"""

import atexit
import os
import sys
from typing import NoReturn

RANK = ("RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK")
WORLD_SIZE = ("WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE")
LOCAL_RANK = ("LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID")
"""Names under which launchers say it; the first that is set counts."""


def rank() -> int:
    """This process among all, from 0."""
    return _number(RANK, 0)


def world_size() -> int:
    """How many processes train together."""
    return _number(WORLD_SIZE, 1)


def local_rank() -> int:
    """This process among those of its machine, which is also the GPU it takes."""
    return _number(LOCAL_RANK, rank())


def log_name(number: int) -> str:
    """The log of a rank in the run folder.

    >>> log_name(0), log_name(3)
    ('covey.log', 'covey-rank3.log')
    """
    return "covey.log" if number == 0 else f"covey-rank{number}.log"


def leave(status: int) -> NoReturn:
    """End this process of several with `status`, once exit handlers have run and what was printed is out.

    Threads that torch's process groups leave behind may ask for the interpreter while it shuts down; Python ends such
    a thread, C++ answers with SIGABRT, and a run that succeeded counts as failed. So the shutdown is left out.
    """
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def _number(names: tuple[str, ...], default: int) -> int:
    for name in names:
        if name in os.environ:
            return int(os.environ[name])
    return default
