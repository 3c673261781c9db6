"""End a run from another process when a wait outlasts its deadline.

A thread could not do it: C code that holds the interpreter (a regular expression, a sum over a long range) stops all
Python threads, and a file system that hangs stops whoever touches it. Imports the standard library only, and starts in
tens of milliseconds. Run as `python -I -S watchdog_process.py PARENT WHO LOG`; it ends with its parent, at the latest.

`faulthandler.dump_traceback_later(seconds, exit=True)` does not replace it: a process has one such timer, which the
shutdown after a signal takes (signals.py), and it names no wait, spares no run that was stopped by Ctrl-Z, and exits 1.

Reads a JSON line for every change of what a thread of the run waits for:

    [thread, since, seconds, what, limit]     it waits, since that second of the monotonic clock, at most so long
    [thread]                                  it does not wait
"""

import json
import os
import select
import signal
import sys
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, field

EXPIRED = signal.SIGVTALRM
"""Signal that ends the run, so that shells see 128 + 26. In C, it first writes the stacks of all threads to the log."""
LOOK_SECONDS = 0.5
"""Longest sleep between two looks at whether the parent lives."""
STOPPED_SECONDS = 5.0
"""Least oversleep that shows a stop of watchdog and run (Ctrl-Z, a suspended machine): that is no waiting."""
LAST_WORDS_SECONDS = 2.0
"""Seconds of grace for a terminal or a log that hangs as well."""
GRACE_SECONDS = 5.0
"""Seconds from the signal to SIGKILL, where the stacks cannot be written."""


@dataclass(slots=True)
class Wait:
    """A wait of one thread of the run."""

    since: float
    seconds: float
    what: str
    limit: str
    """The setting and its value."""


@dataclass(slots=True)
class Guard:
    """The waits of one run, by thread."""

    parent: int
    who: str
    log: str
    waits: dict[int, Wait] = field(default_factory=dict)
    unread: bytes = b""

    def watch(self) -> None:
        """Watch until the run is over, or a deadline has passed."""
        looked = time.monotonic()
        while os.getppid() == self.parent:
            ends = [wait.since + wait.seconds - looked for wait in self.waits.values()]
            pause = max(0.0, min([LOOK_SECONDS, *ends]))
            is_readable, _, _ = select.select([0], [], [], pause)
            now = time.monotonic()
            overslept = now - looked - pause
            if overslept > STOPPED_SECONDS or self.is_stopped():
                for wait in self.waits.values():
                    wait.since += overslept if overslept > STOPPED_SECONDS else now - looked
            if is_readable and not self.read():
                return
            expired = [wait for wait in self.waits.values() if now - wait.since >= wait.seconds]
            if expired:
                self.end(expired[0], now)
                return
            looked = now

    def is_stopped(self) -> bool:
        """Return True where the run was stopped (Ctrl-Z), if the system tells."""
        with suppress(OSError, IndexError), open(f"/proc/{self.parent}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] in "Tt"
        return False

    def read(self) -> bool:
        """Read the run's reports; return False when it has closed its end."""
        found = os.read(0, 1 << 16)
        *lines, self.unread = (self.unread + found).split(b"\n")
        for line in lines:
            thread, *wait = json.loads(line)
            self.waits.pop(thread, None)
            if wait:
                self.waits[thread] = Wait(*wait)
        return bool(found)

    def end(self, wait: Wait, now: float) -> None:
        """Report the overdue wait, then end the run."""
        line = f"{self.who} has waited {round(now - wait.since, 1):g} s for {wait.what} ({wait.limit}) and ends here"
        tellers = [
            threading.Thread(
                target=tell_terminal, args=(f"covey: {line}; all stacks are in {relative_path(self.log)}\n",)
            ),
            threading.Thread(target=tell_log, args=(self.log, line)),
        ]
        for teller in tellers:
            teller.daemon = True
            teller.start()
        for teller in tellers:
            teller.join(LAST_WORDS_SECONDS)
        for number in (EXPIRED, signal.SIGKILL):
            if os.getppid() == self.parent:
                os.kill(self.parent, number)
            given_up = time.monotonic() + GRACE_SECONDS
            while os.getppid() == self.parent and time.monotonic() < given_up:
                time.sleep(0.01)


def relative_path(path: str) -> str:
    """Return a path relative to the current folder, where it lies below."""
    relative = os.path.relpath(path)
    return path if relative.startswith("..") else relative


def tell_terminal(text: str) -> None:
    """Write to stderr, showing the cursor again."""
    show_cursor = "\x1b[?25h" if os.isatty(2) else ""
    os.write(2, (show_cursor + text).encode())


def tell_log(log: str, line: str) -> None:
    """Write a line as logging would have written it."""
    with open(log, "a", encoding="utf-8") as file:
        file.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')},000 ERROR covey.system.waits.watchdog: {line}\n")


def main(parent: int, who: str, log: str) -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # the run decides when it is over; its end closes the pipe
    Guard(parent, who, log).watch()
    os._exit(0)  # not waiting for a terminal or a log that hangs


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], sys.argv[3])
