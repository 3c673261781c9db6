"""Frames over pipes and sockets: four bytes of length, most significant first, then JSON."""

import json
import os
import select
import time
from typing import Any

LENGTH = 4
MAX_TRUSTED = 1 << 30
"""Between processes that trust each other; what a program sends is held to its own limit."""


def pack(payload: bytes) -> bytes:
    """A payload with its length before it."""
    return len(payload).to_bytes(LENGTH, "big") + payload


def write_all(descriptor: int, content: bytes) -> None:
    """Blocks until all is written."""
    view = memoryview(content)
    while view:
        view = view[os.write(descriptor, view) :]


def send(descriptor: int, message: Any) -> None:
    """One message to a process that is trusted."""
    write_all(descriptor, pack(json.dumps(message).encode()))


def receive(descriptor: int, seconds: float | None = None) -> Any:
    """One message from a process that is trusted; raises EOFError where it has ended, TimeoutError after `seconds`."""
    deadline = None if seconds is None else time.monotonic() + seconds
    length = int.from_bytes(read_exactly(descriptor, LENGTH, deadline), "big")
    assert length <= MAX_TRUSTED
    return json.loads(read_exactly(descriptor, length, deadline))


def read_exactly(descriptor: int, size: int, deadline: float | None = None) -> bytes:
    """So many bytes, by that second of the monotonic clock."""
    found = bytearray()
    while len(found) < size:
        if deadline is not None:
            wait_readable(descriptor, deadline)
        part = os.read(descriptor, min(size - len(found), 1 << 20))
        if not part:
            raise EOFError
        found += part
    return bytes(found)


def wait_readable(descriptor: int, deadline: float) -> None:
    """TimeoutError where there is nothing to read by then."""
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    if not poll.poll(max(0.0, deadline - time.monotonic()) * 1000):
        raise TimeoutError
