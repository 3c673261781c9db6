"""A process of several ends with its own status, whatever threads torch left behind."""

import subprocess
import sys

LEAVING = """
import atexit, threading, time
from covey import launch
threading.Thread(target=time.sleep, args=(60,)).start()
atexit.register(print, "the exit handler ran", end="")
print("the last line,", end=" ")
launch.leave(3)
"""


def test_leaving_runs_exit_handlers_and_flushes_but_waits_for_no_thread() -> None:
    done = subprocess.run([sys.executable, "-c", LEAVING], capture_output=True, text=True, timeout=30, check=False)
    assert (done.returncode, done.stdout) == (3, "the last line, the exit handler ran")
