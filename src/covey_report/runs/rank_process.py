"""The program of a rank's process: `python -P rank_process.py DESCRIPTOR PARENT`.

The parent sends its path of imports and a pickled function, and gets back the fields of an `Answer` as JSON.
"""

import io
import json
import os
import pickle
import sys
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection


def main(descriptor: int, parent: int) -> None:
    os.set_inheritable(descriptor, False)
    connection = Connection(descriptor)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True)  # once it has answered the process may be killed
    given = pickle.loads(connection.recv_bytes())
    sys.path[:] = given["path"]  # before it nothing of covey can be imported

    from covey.system.ranks import leave
    from covey.system.workers.process import die_with_parent

    die_with_parent(parent)
    connection.send_bytes(json.dumps(answer_of(given["work"])).encode())
    leave(0)


def answer_of(work: bytes) -> tuple[str, str | None, bool, bool]:
    """Return the fields of the `Answer`: the function's result, or its error."""
    from covey.system.collectives import PeerRankFailed, RanksLost
    from covey.system.machine import heavy_imports
    from covey.types import RunStopped

    try:
        with heavy_imports():
            function: Callable[[], str] = pickle.loads(work)
        return function(), None, False, False
    except Exception as error:
        is_mendable = isinstance(error, ValueError | OSError | ImportError)
        text = " ".join(str(error).split())
        if not is_mendable and not isinstance(error, RunStopped):  # a defect, of which one line is not enough
            traceback.print_exc()
            text = f"{type(error).__name__}: {text}"
        return "", text, is_mendable, isinstance(error, PeerRankFailed | RanksLost)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
