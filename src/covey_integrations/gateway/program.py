"""Run the user's agent program: a function here, or a command."""

import asyncio
import json
import os
import signal
import subprocess
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import IO, Any, Protocol

from covey.environments.reward_functions.call import is_async, name_of
from covey_integrations.gateway.endpoint import Endpoint
from covey_integrations.tools.calling import Begun, begun, without_exit

GRACE = 2.0
"""Seconds that a program has to end once its episode has."""
SHOWN = 300
"""Characters of a command's last output in the reason of a failure."""


class ProgramFailed(RuntimeError):
    """The program broke: a Failure of its attempt, never a reward."""


class Running(Protocol):
    """A program under way."""

    outcome: "asyncio.Future[Any]"
    """Return value of the program, or ProgramFailed."""

    async def stop(self) -> Begun | None:
        """End it. Returns the processes that could not be ended, and were left behind."""


class Program(Protocol):
    """Starts the agent of one episode."""

    @property
    def name(self) -> str: ...

    def start(self, endpoint: Endpoint, row: Mapping[str, Any]) -> Running: ...


@dataclass(frozen=True)
class Function:
    """A function `(base_url, api_key, row) -> reward | messages | None`, plain or async."""

    function: Callable[..., Any]

    @property
    def name(self) -> str:
        return name_of(self.function)

    def start(self, endpoint: Endpoint, row: Mapping[str, Any]) -> Running:
        """Start it: async in this event loop, else in a thread."""
        given = endpoint.url, endpoint.key, row
        if is_async(self.function):
            return _Called(self.name, asyncio.ensure_future(without_exit(self.function(*given))))
        return _Called(self.name, begun(lambda: self.function(*given)))


class _Called:
    """A running function; a thread that ignores its end is left behind."""

    def __init__(self, name: str, call: Begun) -> None:
        self._call = call
        self._result = asyncio.wrap_future(call)
        self.outcome: asyncio.Future[Any] = asyncio.ensure_future(self._whole(name))

    async def _whole(self, name: str) -> Any:
        try:
            return await asyncio.shield(self._result)
        except asyncio.CancelledError:
            if self._result.cancelled():
                raise ProgramFailed(f"the program {name} was cancelled") from None
            raise
        except BaseException as error:  # foreign code: whatever it raises fails its attempt
            told = " ".join(str(error).split())[:SHOWN]
            raise ProgramFailed(f"the program {name} raised {type(error).__name__}: {told}") from error

    async def stop(self) -> Begun | None:
        if isinstance(self._result, asyncio.Task):
            self._result.cancel()
        done, _ = await asyncio.wait({self._result}, timeout=GRACE)
        await _left(self.outcome)
        self._result.cancel()
        if self._result.done() and not self._result.cancelled():
            self._result.exception()  # has been heard of
        return None if done else self._call


@dataclass(frozen=True)
class Command:
    """A command line, run without a shell, with OPENAI_BASE_URL and OPENAI_API_KEY.

    COVEY_ROW holds the row as JSON, COVEY_REWARD_URL where a reward may be posted.
    """

    words: Sequence[str]

    @property
    def name(self) -> str:
        return self.words[0]

    def start(self, endpoint: Endpoint, row: Mapping[str, Any]) -> Running:
        """Start it, in a session and process group of its own."""
        own = {
            "OPENAI_BASE_URL": endpoint.url,
            "OPENAI_API_KEY": endpoint.key,
            "COVEY_REWARD_URL": endpoint.reward_url,
            "COVEY_ROW": json.dumps(dict(row), default=str),
        }
        said = tempfile.TemporaryFile()  # noqa: SIM115 # closed when the process has ended
        try:
            process = subprocess.Popen(
                list(self.words),
                env={**os.environ, **own},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=said,
                start_new_session=True,
            )
        except (OSError, ValueError) as error:
            said.close()
            raise ProgramFailed(f"environment.command={self.name} cannot be started: {error}") from error
        return _Process(self.name, process, said)


class _Process:
    """A command under way, with all that it starts in its group."""

    def __init__(self, name: str, process: "subprocess.Popen[bytes]", said: IO[bytes]) -> None:
        self._name, self._process, self._said = name, process, said
        self._call = begun(self._wait)
        self._ended = asyncio.wrap_future(self._call)
        self.outcome: asyncio.Future[Any] = asyncio.ensure_future(self._whole())

    def _wait(self) -> int:
        """Wait for the command, and end its group before its number is freed."""
        with suppress(ChildProcessError):
            os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOWAIT)
        self._kill()
        return self._process.wait()

    async def _whole(self) -> None:
        status = await asyncio.shield(self._ended)
        if status != 0:
            how = f"was ended by signal {-status}" if status < 0 else f"exited with status {status}"
            raise ProgramFailed(f"environment.command={self._name} {how}: {last_words(self._said)}")

    def _kill(self) -> None:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)

    async def stop(self) -> Begun | None:
        if not self._ended.done():
            self._kill()
        await asyncio.wait({self._ended}, timeout=GRACE)
        await _left(self.outcome)
        self._said.close()
        return None if self._ended.done() else self._call


def last_words(said: IO[bytes]) -> str:
    """Return the end of a program's output file, in one line."""
    if said.closed:
        return "it said nothing"
    size = said.seek(0, os.SEEK_END)
    said.seek(max(0, size - 4 * SHOWN))
    return " ".join(said.read().decode(errors="replace").split())[-SHOWN:] or "it said nothing"


async def _left(outcome: "asyncio.Future[Any]") -> None:
    outcome.cancel()
    await asyncio.gather(outcome, return_exceptions=True)
