"""Messages between the checker and its supervising judge.

From the checker: verdicts, and the deadline of its next message. From the judge: programs, and descriptors of requested
processes.
"""

import socket
from typing import Any

from covey_sandbox.inside import wire

CHECK_SECONDS = 1.0
"""Seconds for looking at an answer that came just in time."""
REFUSED = b"-"
"""Reply in place of descriptors."""
MAX_MESSAGE = 300
"""Characters of a verdict's message."""

Verdict = dict[str, Any]
"""passed, kind, message."""
PASSED: Verdict = {"passed": True, "kind": "passed", "message": ""}


def failed_verdict(kind: str, message: str) -> Verdict:
    """Return a failed test with a short message without control characters."""
    line = " ".join(message[: 2 * MAX_MESSAGE].split())[:MAX_MESSAGE]
    return {"passed": False, "kind": kind, "message": "".join(c if c.isprintable() else "?" for c in line)}


class Link:
    """Sends messages together while nothing between them could end the checker."""

    def __init__(self, channel: socket.socket) -> None:
        self._channel = channel
        self._verdicts: list[Verdict] = []
        """Not yet sent."""

    def add(self, verdict: Verdict) -> None:
        self._verdicts.append(verdict)

    def begin(self, until: float, *, is_charged: bool, **more: Any) -> None:
        """Announce the deadline of the next message (monotonic seconds).

        `is_charged`: if the checker ends before it, the test fails; otherwise there is no verdict.
        """
        self.send(until=until, is_charged=is_charged, **more)

    def send(self, **message: Any) -> None:
        verdicts, self._verdicts = self._verdicts, []
        wire.send(self._channel.fileno(), {"verdicts": verdicts, **message})

    def receive_descriptors(self) -> list[int]:
        """Return the requested descriptors, none on refusal."""
        found, descriptors, _, _ = socket.recv_fds(self._channel, 1, 4)
        if not found:
            raise EOFError
        return descriptors
