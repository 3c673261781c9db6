"""One judge with its zygote: one program at a time, replaced on failure."""

import contextlib
import os
import socket
import struct
import subprocess
import threading
from typing import Any

from covey_sandbox import boot
from covey_sandbox.inside import host, wire
from covey_sandbox.inside.isolation import folders
from covey_sandbox.types import Tier

START_SECONDS = 120.0
GRACE_SECONDS = 60.0
"""Seconds for judging, beyond the time of the program's own tests, and for taking an order."""
CLOSE_SECONDS = 1.0
"""Seconds for clearing up; a judge that waits for a program is killed, and takes zygote and program with it."""


class SlotLost(Exception):
    """The slot failed or could not start; the message is the reason."""


class Slot:
    """A judge process, used by one thread at a time; `close` from any."""

    def __init__(self, tier: Tier, omit: tuple[str, ...], *, proves: bool) -> None:
        """Start a judge. Raises SlotLost where a layer does not hold.

        `proves` judges programs of known outcome first, in some tenths of a second.
        """
        self.tier = tier
        self._lock = threading.Lock()
        self._is_closed = False
        self._folder: str | None = None
        self._process, self._channel, interpreter = launch()
        start = {
            "tier": tier,
            "omit": omit,
            "proves": proves,
            "command": boot.command(interpreter, "zygote"),
            "bundle": boot.bundle().decode(),
        }
        try:
            self.described: dict[str, Any] = self._ask(start, START_SECONDS)
            self._folder = self.described.pop("folder")
        except SlotLost:
            self.close()
            raise

    def run(self, order: dict[str, Any], seconds: float) -> dict[str, Any]:
        """Run an order and return its answer. Raises SlotLost."""
        return self._ask(order, seconds + GRACE_SECONDS)

    def close(self) -> None:
        """End the judge with all that it has started; idempotent."""
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
        # Hanging up ends the judge; kill it where it does not
        with contextlib.suppress(OSError):
            self._channel.shutdown(socket.SHUT_RDWR)
        try:
            self._process.wait(CLOSE_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._channel.close()
        if self._folder is not None and os.path.isdir(self._folder):  # the judge had no time to do it
            folders.remove_when_still(self._folder)

    def _ask(self, message: dict[str, Any], seconds: float) -> dict[str, Any]:
        try:
            wire.send(self._channel.fileno(), message)
            answer: dict[str, Any] = wire.receive(self._channel.fileno(), seconds)
        except (TimeoutError, BlockingIOError) as error:
            self._process.kill()
            raise SlotLost(f"the judge has not answered for {seconds:g} s") from error
        except (OSError, EOFError) as error:
            raise SlotLost("the judge is gone") from error
        if "failed" in answer:
            raise SlotLost(answer["failed"])
        return answer


def launch() -> tuple["subprocess.Popen[bytes]", socket.socket, str]:
    """Start a judge; return it, its socket, and the interpreter."""
    environment = {"LANG": "C.UTF-8", **{name: os.environ[name] for name in ("TMPDIR",) if name in os.environ}}
    errors = []
    for interpreter in boot.interpreters():
        command = boot.command(interpreter, "judge")
        try:
            process, ours = host.launch(command, boot.bundle(), environment, socket.SOCK_STREAM)
        except OSError as error:
            errors.append(f"{interpreter}: {error.strerror}")
            continue
        seconds = struct.pack("ll", *divmod(int(GRACE_SECONDS * 1e6), 10**6))
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, seconds)
        return process, ours, interpreter
    raise SlotLost(f"no Python can be started: {'; '.join(errors)}")
