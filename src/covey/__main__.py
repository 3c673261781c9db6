"""`covey` and `python -m covey`, with Ctrl-C in one line."""

import _signal  # what `signal` is made of, without the milliseconds that its enumerations take
import os
import sys


def leave(number: int, frame: object) -> None:
    """Print it and exit, before anything needs closing."""
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
