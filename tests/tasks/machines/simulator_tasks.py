"""What stands for the physics in a worker process, by the number of blocks."""

import os
import signal
import sys
import time
from collections.abc import Sequence
from typing import Any

from covey_tasks.machines.physics import simulate
from covey_tasks.machines.physics.trajectory import Outcome


def act(rows: Sequence[Sequence[int | None]], world: str) -> dict[str, Any]:
    """1 block: fine. 2: a crash in C. 3: a hang. 4: an error."""
    if len(rows) == 2:
        os.kill(os.getpid(), signal.SIGSEGV)
    if len(rows) == 3:
        time.sleep(3600)
    if len(rows) == 4:
        raise RuntimeError("no such world")
    return Outcome("complete", float(len(rows)), 0.0, 0.0, None, ()).to_data()


def modules(rows: Sequence[Sequence[Any]], world: str) -> dict[str, Any]:
    """How many of the heavy modules the process holds besides the physics."""
    simulate.run(rows, "open")
    heavy = {"torch", "transformers", "hydra", "matplotlib"} & set(sys.modules)
    return Outcome("complete", float(len(heavy)), 0.0, 0.0, None, ()).to_data()
