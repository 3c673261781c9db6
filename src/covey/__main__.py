"""`covey` and `python -m covey`: Ctrl-C is one line from here on, also while the command is imported."""

import _signal  # what `signal` is made of, without the milliseconds that its enumerations take
import os
import sys


def leave(number: int, frame: object) -> None:
    """Say it and end. Nothing is imported yet that would have to be closed."""
    os.write(2, b"covey: interrupted\n")
    os._exit(130)


def run() -> int:
    """Import and run the command. Return its exit code."""
    usual = _signal.default_int_handler
    is_heard = _signal.getsignal(_signal.SIGINT) is usual  # in the background it may be ignored
    if is_heard:
        _signal.signal(_signal.SIGINT, leave)
    from covey.cli.main import main

    if is_heard:
        _signal.signal(_signal.SIGINT, usual)
    return main()


if __name__ == "__main__":
    sys.exit(run())
