"""Frames over pipes and sockets: four bytes of length, big-endian, then JSON."""

import json
import os
import select
import time
from typing import Any

LENGTH = 4
MAX_TRUSTED = 1 << 30
"""Maximum bytes between processes that trust each other; a program's message is held to its own limit."""


MAX_WAIT = 1000.0
"""Seconds of one wait: the kernel counts milliseconds in 32 bits."""


def pack(payload: bytes) -> bytes:
    """Pack a payload with its length before it."""
    return len(payload).to_bytes(LENGTH, "big") + payload


def write_all(descriptor: int, content: bytes) -> None:
    view = memoryview(content)
    while view:
        view = view[os.write(descriptor, view) :]


def send(descriptor: int, message: Any) -> None:
    """Write one message to a trusted process. ValueError if too large."""
    payload = json.dumps(message).encode()
    if len(payload) > MAX_TRUSTED:
        raise ValueError(f"a program and its tests must be at most {MAX_TRUSTED} bytes, got {len(payload)}")
    write_all(descriptor, pack(payload))


def receive(descriptor: int, seconds: float | None = None) -> Any:
    """Read a trusted process's message. EOFError at its end, TimeoutError."""
    deadline = None if seconds is None else time.monotonic() + seconds
    length = int.from_bytes(read_exactly(descriptor, LENGTH, deadline), "big")
    assert length <= MAX_TRUSTED
    return json.loads(read_exactly(descriptor, length, deadline))


def read_exactly(descriptor: int, size: int, deadline: float | None = None) -> bytes:
    """Read `size` bytes, by that second of the monotonic clock."""
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
    """Wait for bytes. Raises TimeoutError at the deadline."""
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    while not poll.poll(min(max(0.0, deadline - time.monotonic()), MAX_WAIT) * 1000):
        if time.monotonic() >= deadline:
            raise TimeoutError
