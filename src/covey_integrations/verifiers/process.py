"""Talk to the process that plays environments of verifiers, by lines of JSON."""

import asyncio
import itertools
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from typing import Any

from covey_integrations.gateway.endpoint import Endpoint
from covey_integrations.gateway.program import GRACE, ProgramFailed, Running, last_words
from covey_integrations.settings import VerifiersConfig

SCRIPT = Path(__file__).with_name("worker.py")


class WorkerProgram:
    """The worker as the program of an agent: it plays an attempt and reports its reward."""

    def __init__(self, settings: VerifiersConfig) -> None:
        """Keep the settings. The process starts when something is asked of it, and again after one that ended."""
        self._settings = settings
        self._process: _Process | None = None
        self._lock = threading.Lock()

    @property
    def name(self) -> str:
        return self._settings.id

    def load(self) -> tuple[str, Mapping[str, Sequence[Any]]]:
        """Return its version, v0 or v1, and the prompts of each split.

        Raises ValueError, with the setting, where it cannot be loaded.
        """
        settings = self._settings
        about = f"environment.id={settings.id} cannot be loaded by {settings.python or sys.executable}"
        try:
            found = self._running().loaded.result(settings.load_timeout)
        except TimeoutError as error:
            self.close()
            raise ValueError(f"{about} in environment.load_timeout={settings.load_timeout:g} s") from error
        except ProgramFailed as error:
            raise ValueError(f"{about}: {error}") from error
        return str(found["kind"]), found["prompts"]

    def start(self, endpoint: Endpoint, row: Mapping[str, Any]) -> Running:
        request = {"do": "play", "split": row["split"], "index": row["index"]}
        return _Playing(self._running(), {**request, "base_url": endpoint.url, "api_key": endpoint.key})

    def close(self) -> None:
        with self._lock:
            process, self._process = self._process, None
        if process is not None:
            process.close()

    def _running(self) -> "_Process":
        with self._lock:
            if self._process is None or self._process.has_ended:
                if self._process is not None:
                    self._process.close()
                self._process = _Process(self._settings)
            return self._process


class _Process:
    """One process, whose first message names the environment to load."""

    def __init__(self, settings: VerifiersConfig) -> None:
        self._id = settings.id
        self._numbers = itertools.count(1)
        self._waiting: dict[int, Future[Any]] = {}
        self._lock = threading.Lock()
        self.has_ended = False
        self._said = tempfile.TemporaryFile()  # noqa: SIM115 # closed with the process
        python = settings.python or sys.executable
        no_proxy = ",".join(filter(None, (os.environ.get("NO_PROXY"), "127.0.0.1")))
        try:
            self._process = subprocess.Popen(
                [python, str(SCRIPT)],
                env={**os.environ, "NO_PROXY": no_proxy, "no_proxy": no_proxy},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._said,
                text=True,
                errors="replace",
                start_new_session=True,
            )
        except (OSError, ValueError) as error:
            self._said.close()
            raise ProgramFailed(f"environment.python={python} cannot be started: {error}") from error
        threading.Thread(target=self._listen, name="covey-verifiers", daemon=True).start()
        counts = {"train": settings.num_train, "test": settings.num_test}
        request = {"do": "load", "name": settings.id, "options": settings.options, "counts": counts}
        _, self.loaded = self.ask(request)

    def ask(self, request: Mapping[str, Any]) -> tuple[int, "Future[Any]"]:
        """Send a request. Returns its number and its answer, which may be ProgramFailed."""
        answer: Future[Any] = Future()
        with self._lock:
            number = next(self._numbers)
            self._waiting[number] = answer
            ended = self.has_ended
        if ended:
            self._fail_all()
        else:
            self._send({"id": number, **request})
        return number, answer

    def stop(self, number: int) -> None:
        self._send({"id": 0, "do": "stop", "play": number})

    def close(self) -> None:
        """End the process, with all that it started."""
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def _send(self, message: Mapping[str, Any]) -> None:
        assert self._process.stdin is not None
        # A process that ended is heard of by who listens
        with self._lock, suppress(OSError, ValueError):
            self._process.stdin.write(json.dumps(message, default=str) + "\n")
            self._process.stdin.flush()

    def _listen(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            try:
                found = json.loads(line)
                number = found["id"]
            except (ValueError, LookupError, TypeError, RecursionError):  # a line that is not the worker's
                continue
            with self._lock:
                answer = self._waiting.pop(number, None)
            if answer is None:
                continue
            if "error" in found:
                answer.set_exception(ProgramFailed(f"{self._id}: {found['error']}"))
            else:
                answer.set_result(found["result"])
        self._process.wait()
        self._fail_all()
        for pipe in (self._process.stdin, self._process.stdout, self._said):
            if pipe is not None:
                with suppress(OSError):
                    pipe.close()

    def _fail_all(self) -> None:
        with self._lock:
            self.has_ended = True
            left, self._waiting = list(self._waiting.values()), {}
        for answer in left:
            answer.set_exception(ProgramFailed(f"the worker of {self._id} ended: {last_words(self._said)}"))


class _Playing:
    """One attempt under way."""

    def __init__(self, process: _Process, request: Mapping[str, Any]) -> None:
        self._process = process
        self._number, answer = process.ask(request)
        self.outcome: asyncio.Future[Any] = asyncio.wrap_future(answer)

    async def stop(self) -> None:
        """End it. Nothing of this process is left behind, whatever the worker does."""
        if not self.outcome.done():
            self._process.stop(self._number)
            await asyncio.wait({self.outcome}, timeout=GRACE)
        self.outcome.cancel()
        await asyncio.gather(self.outcome, return_exceptions=True)
