"""The checker's way to the judge that supervises it, and what they say to each other.

From the checker: verdicts as they are reached, and by when it will have said the next thing. From the judge: programs
to check, and the descriptors of processes it was asked for.
"""

import socket
from typing import Any

from covey_sandbox.inside import wire

CHECK_SECONDS = 1.0
"""For looking at an answer that came just in time."""
REFUSED = b"-"
"""In place of descriptors."""
MAX_MESSAGE = 300
"""Characters of a verdict's message."""

Verdict = dict[str, Any]
"""passed, kind, message."""
PASSED: Verdict = {"passed": True, "kind": "passed", "message": ""}


def failed(kind: str, message: str) -> Verdict:
    """Return a test that did not pass. Its message is a short line without control characters, which terminals obey."""
    line = " ".join(message[: 2 * MAX_MESSAGE].split())[:MAX_MESSAGE]
    return {"passed": False, "kind": kind, "message": "".join(c if c.isprintable() else "?" for c in line)}


class Link:
    """Messages go out together as long as nothing happens between them that could end the checker."""

    def __init__(self, channel: socket.socket) -> None:
        self._channel = channel
        self._verdicts: list[Verdict] = []
        """Not yet sent."""

    def add(self, verdict: Verdict) -> None:
        """Give the verdict on the next test."""
        self._verdicts.append(verdict)

    def begin(self, until: float, *, is_charged: bool, **more: Any) -> None:
        """Announce the next message by that second of the monotonic clock, or else the checker is to be killed.

        `is_charged`: if the checker ends before it, the test fails; otherwise there is no verdict.
        """
        self.send(until=until, is_charged=is_charged, **more)

    def send(self, **message: Any) -> None:
        """Send one message, and the verdicts before it."""
        verdicts, self._verdicts = self._verdicts, []
        wire.send(self._channel.fileno(), {"verdicts": verdicts, **message})

    def receive_descriptors(self) -> list[int]:
        """Return the descriptors that the judge was asked for, or none where it refuses."""
        found, descriptors, _, _ = socket.recv_fds(self._channel, 1, 4)
        if not found:
            raise EOFError
        return descriptors
