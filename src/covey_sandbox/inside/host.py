"""The judge's side of the zygote and its forks; trusted code alone."""

import contextlib
import json
import os
import select
import socket
import subprocess
import time
from dataclasses import dataclass, field
from typing import Any

from covey_sandbox.inside import codec, wire

ZYGOTE_SECONDS = 30.0
"""The kernel may take long to end a process on a busy machine; a zygote that takes longer is given up."""
_CHUNK = 1 << 16
_READ = 1 << 20


class Broken(Exception):
    """The sandbox itself failed: there is no verdict."""


class Unjudged(Exception):
    """A test's fault left this program without a verdict."""


class Violation(Exception):
    """The program broke the result channel's rules: all its tests fail."""


class TimedOut(Exception):
    pass


class Ended(Exception):
    pass


class TooMuch(Exception):
    """The program printed too much."""


def launch(
    command: list[str], bundle: bytes, environment: dict[str, str], kind: int
) -> tuple["subprocess.Popen[bytes]", socket.socket]:
    """Start an interpreter and send its code; return it with its socket. OSError."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, kind)
    read, write = os.pipe()
    try:
        process = subprocess.Popen(
            [*command, str(read), str(theirs.fileno())],
            pass_fds=(read, theirs.fileno()),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env=environment,
            cwd="/",
            start_new_session=True,
        )
    except OSError:
        ours.close()
        os.close(write)
        raise
    finally:
        theirs.close()
        os.close(read)
    with open(write, "wb") as pipe, contextlib.suppress(BrokenPipeError):
        pipe.write(bundle)
    return process, ours


class Zygote:
    """The process that forks programs, answering requests in order."""

    def __init__(self, command: list[str], bundle: bytes, config: dict[str, Any], environment: dict[str, str]) -> None:
        """Start it. Raises Broken with the reason where it cannot start."""
        try:
            self._process, self._channel = launch(command, bundle, environment, socket.SOCK_SEQPACKET)
        except OSError as error:
            raise Broken(f"the interpreter cannot be started: {error}") from error
        self._channel.settimeout(ZYGOTE_SECONDS)
        self._unanswered = 0
        ready = self.ask(config)
        self.version: str = ready["ready"]
        self.keeps_search: bool = ready["keep_search"]
        """Programs keep root's capability to read; Landlock bounds it."""

    @property
    def pid(self) -> int:
        return self._process.pid

    def ask(self, request: dict[str, Any], descriptors: tuple[int, ...] = ()) -> dict[str, Any]:
        """Return the answer to a request. Raises Broken on refusal or loss."""
        self.reap()
        self._send(request, descriptors)
        return self._answer()

    def end_soon(self, pid: int) -> None:
        """Kill a program without waiting for its end."""
        self._send({"end": pid}, ())
        self._unanswered += 1

    def reap(self) -> None:
        while self._unanswered:
            self._unanswered -= 1
            self._answer()

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        self._channel.close()

    def _send(self, request: dict[str, Any], descriptors: tuple[int, ...]) -> None:
        try:
            socket.send_fds(self._channel, [json.dumps(request).encode()], list(descriptors))
        except OSError as error:
            raise Broken(f"the zygote is gone: {error}") from error

    def _answer(self) -> dict[str, Any]:
        try:
            text = self._channel.recv(_CHUNK)
        except OSError as error:
            raise Broken(f"the zygote does not answer: {error}") from error
        if not text:
            raise Broken(f"the zygote is gone (status {self._process.wait()})")
        answer: dict[str, Any] = json.loads(text)
        if "failed" in answer:
            raise Broken(answer["failed"])
        return answer


@dataclass(frozen=True)
class Process:
    """A program's process, as the zygote made it, and its pipes."""

    pid: int
    folder: str | None
    job: int
    result: int
    stdin: int | None = None
    stdout: int | None = None

    @property
    def descriptors(self) -> list[int]:
        return [pipe for pipe in (self.job, self.result, self.stdin, self.stdout) if pipe is not None]

    def close(self) -> None:
        for descriptor in self.descriptors:
            os.close(descriptor)


@dataclass
class Program:
    """A process that runs one program: its input and output."""

    process: Process
    limits: dict[str, Any]
    num_calls: int = 0
    """Calls that test code has made."""
    outgoing: dict[int, memoryview] = field(default_factory=dict)
    incoming: bytearray = field(default_factory=bytearray)
    printed: bytearray = field(default_factory=bytearray)
    _open: set[int] = field(default_factory=set)
    _poll: select.poll = field(default_factory=select.poll)

    def __post_init__(self) -> None:
        self._open = set(self.process.descriptors)
        for descriptor in self._open:
            os.set_blocking(descriptor, False)
        self._poll.register(self.process.result, select.POLLIN)
        if self.process.stdout is not None:
            self._poll.register(self.process.stdout, select.POLLIN)

    @property
    def stdin(self) -> int | None:
        return self.process.stdin

    def send(self, content: bytes, descriptor: int | None = None) -> None:
        """Write to the job channel, or another descriptor, as it takes it."""
        descriptor = self.process.job if descriptor is None else descriptor
        self.outgoing[descriptor] = memoryview(bytes(self.outgoing.get(descriptor, b"")) + content)
        self._write(descriptor)

    def receive(self, deadline: float) -> dict[str, Any]:
        """Return the next frame. Raises TimedOut, Ended, TooMuch or Violation."""
        while True:
            frame = self._frame()
            if frame is not None:
                return frame
            self.pump(deadline)

    def pump(self, deadline: float) -> None:
        """Move bytes until one arrives. Raises TimedOut, Ended, TooMuch or Violation."""
        while True:
            left = deadline - time.monotonic()
            if left <= 0:
                raise TimedOut
            has_read = False
            for descriptor, _ in self._poll.poll(min(left, wire.MAX_WAIT) * 1000):
                if descriptor in self.outgoing:
                    self._write(descriptor)
                else:
                    has_read = True
                    self._read(descriptor)
            if has_read:
                return

    def finish_output(self, deadline: float) -> bytes:
        while self.process.stdout in self._open:
            with contextlib.suppress(Ended):
                self.pump(deadline)
        return bytes(self.printed)

    def close(self) -> None:
        while self._open:
            os.close(self._open.pop())

    @property
    def _max_frame(self) -> int:
        return int(self.limits["output_bytes"]) + _CHUNK

    def _frame(self) -> dict[str, Any] | None:
        # Wait for the whole frame; its length is bounded before its bytes are read
        if len(self.incoming) < wire.LENGTH:
            return None
        length = int.from_bytes(self.incoming[: wire.LENGTH], "big")
        if length > self._max_frame:
            raise Violation("a frame is too large")
        if len(self.incoming) < wire.LENGTH + length:
            return None
        text = bytes(self.incoming[wire.LENGTH : wire.LENGTH + length])
        del self.incoming[: wire.LENGTH + length]
        return decode_object(text)

    def _read(self, descriptor: int) -> None:
        try:
            found = os.read(descriptor, _READ)
        except BlockingIOError:
            return
        if descriptor == self.process.stdout:
            self.printed += found
            if len(self.printed) > self.limits["output_bytes"]:
                raise TooMuch
        else:
            self.incoming += found
            if len(self.incoming) > wire.LENGTH + self._max_frame + _READ:  # a frame that nobody waits for
                raise Violation("it said more than it was asked for")
        if not found:
            self._close(descriptor)
            if descriptor == self.process.result:
                raise Ended

    def _write(self, descriptor: int) -> None:
        content = self.outgoing.pop(descriptor, memoryview(b""))
        try:
            content = content[os.write(descriptor, content) :] if content else content
        except BlockingIOError:
            pass
        except BrokenPipeError:
            content = memoryview(b"")
        # Wait for room for the rest, or close stdin at its end
        with contextlib.suppress(KeyError):
            self._poll.unregister(descriptor)
        if content:
            self.outgoing[descriptor] = content
            self._poll.register(descriptor, select.POLLOUT)
        elif descriptor == self.stdin:
            self._close(descriptor)

    def _close(self, descriptor: int) -> None:
        with contextlib.suppress(KeyError):
            self._poll.unregister(descriptor)
        self._open.discard(descriptor)
        os.close(descriptor)


def decode_object(text: bytes) -> dict[str, Any]:
    """Return a frame's JSON object. Raises Violation where it is none."""
    try:
        found = codec.loads(text)
    except MemoryError:
        raise
    except codec.FOREIGN as error:
        raise Violation("a frame is not JSON") from error
    if type(found) is not dict:
        raise Violation("a frame is not an object")
    return found
