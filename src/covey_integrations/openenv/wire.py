"""Speak OpenEnv's own wire: JSON over a websocket, an environment of its own for every connection.

-> {"type": "reset", "data": {"seed": 3}}    <- {"type": "observation", "data": {"observation": {}, "reward", "done"}}
-> {"type": "step", "data": {ACTION}}        <- the same
-> {"type": "close"}                         errors: {"type": "error", "data": {"message", "code", "errors"}}
"""

import asyncio
import json
from collections.abc import Coroutine, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any
from urllib.parse import urlsplit

import httpx

from covey.environments.reward_functions.call import problem_with
from covey_integrations.tools.calling import ToolServerLost

MAX_BYTES = 64 * 2**20
"""Maximum bytes of one message."""
FULL, REFUSED = "CAPACITY_REACHED", "VALIDATION_ERROR"
"""Codes of errors: no seat is free, the action is none."""
FIRST_PAUSE, LONGEST_PAUSE = 0.05, 1.0
"""Seconds between two tries to get a seat."""
LONGEST_GOODBYE = 5.0
"""Seconds that the end of a connection may take."""
MISSING = "environment=openenv needs the package websockets: pip install 'covey[openenv]'"


class ActionRefused(ValueError):
    """The action does not fit its schema: words for the policy."""


class NoSeat(ToolServerLost):
    """The server has as many sessions as it takes."""


@dataclass(frozen=True, slots=True)
class Seen:
    """Reply of the environment to `reset` and to `step`."""

    observation: Mapping[str, Any] = field(default_factory=dict)
    reward: float = 0.0
    done: bool = False


class Session:
    """One environment of a server, for one attempt. Every wait ends after `seconds`."""

    def __init__(self, url: str, seconds: float) -> None:
        """Name the server by its address. The first request opens the connection."""
        self._url = addresses(url)[1]
        self._seconds = seconds
        self._socket: Any = None
        self._full = ""

    async def reset(self, arguments: Mapping[str, Any]) -> Seen:
        """Begin. If no seat is free, wait for one: a session that ended leaves its own a little later.

        Raises ToolServerLost where the server broke, or said nothing in time.
        """
        return await self._in_time(self._seated({"type": "reset", "data": dict(arguments)}))

    async def step(self, action: Mapping[str, Any]) -> Seen:
        """Act. Raises ActionRefused where the action is none, ToolServerLost as `reset`."""
        return await self._in_time(self._asked({"type": "step", "data": dict(action)}))

    async def close(self) -> None:
        socket, self._socket = self._socket, None
        if socket is None:
            return
        with suppress(Exception):  # the attempt is over, whatever becomes of its end
            async with asyncio.timeout(min(self._seconds, LONGEST_GOODBYE)):
                await socket.send(json.dumps({"type": "close"}))
                await socket.close()

    async def _in_time(self, waiting: Coroutine[Any, Any, Seen]) -> Seen:
        try:
            return await asyncio.wait_for(waiting, self._seconds)
        except TimeoutError as error:
            said = self._full or f"the server {self._url} has not answered"
            told = f"{said}, for {self._seconds:g} s (environment.server_timeout={self._seconds:g})"
            raise ToolServerLost(told) from error

    async def _seated(self, message: Mapping[str, Any]) -> Seen:
        """Ask until there is a seat."""
        pause = FIRST_PAUSE
        while True:
            try:
                return await self._asked(message)
            except NoSeat as error:
                self._full = f"the server {self._url} has no free seat ({error})"
                await self.close()
            await asyncio.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE)

    async def _asked(self, message: Mapping[str, Any]) -> Seen:
        from websockets.exceptions import ConnectionClosed, WebSocketException

        try:
            socket = await self._opened()
            # Without a free seat the server says so and hangs up, before it hears anything
            with suppress(ConnectionClosed):
                await socket.send(json.dumps(message))
            raw = await socket.recv()
        except (OSError, WebSocketException) as error:
            raise ToolServerLost(f"the server {self._url} is gone: {error}") from error
        return _seen(raw, self._url)

    async def _opened(self) -> Any:
        from websockets.asyncio.client import connect

        if self._socket is None:
            is_here = (urlsplit(self._url).hostname or "") in ("localhost", "127.0.0.1", "::1")
            no_proxy: dict[str, Any] = {"proxy": None} if is_here else {}
            self._socket = await connect(self._url, open_timeout=None, max_size=MAX_BYTES, **no_proxy)
        return self._socket


def addresses(url: str) -> tuple[str, str]:
    """Return where a server is asked by HTTP, and where by websocket.

    >>> addresses("https://HOST/env/")
    ('https://HOST/env', 'wss://HOST/env/ws')
    """
    scheme, _, rest = url.rstrip("/").partition("://")
    letter = "s" if scheme in ("https", "wss") else ""
    return f"http{letter}://{rest}", f"ws{letter}://{rest}/ws"


def action_schema(url: str, seconds: float) -> Mapping[str, Any]:
    """Return the JSON schema of the actions that a server takes.

    Raises ValueError, with the setting, where nothing answers so, and where the package of the wire is not there.
    """
    if find_spec("websockets") is None:
        raise ValueError(MISSING)
    try:
        answer = httpx.get(f"{addresses(url)[0]}/schema", timeout=seconds)
        answer.raise_for_status()
        found = answer.json()["action"]
        if not isinstance(found, Mapping):
            raise TypeError("its schema of actions is no object")
    except (httpx.HTTPError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise ValueError(f"environment.url={url} does not answer as a server of OpenEnv: {error}") from error
    return dict(found)


def _seen(raw: str | bytes, url: str) -> Seen:
    """Return an answer's content. Raises the exception that an error stands for."""
    try:
        found = json.loads(raw)
        kind, data = found["type"], found["data"]
        observation = data.get("observation") or {}
        if not isinstance(observation, Mapping):
            raise TypeError("an observation is an object")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ToolServerLost(f"the server {url} speaks something else: {raw[:80]!r}") from error
    if kind == "error":
        raise _error(data, url)
    reward = data.get("reward")
    if reward is not None and (problem := problem_with(reward)):
        raise ToolServerLost(f"the server {url} gave a reward that is {problem}")
    return Seen(observation, float(reward or 0.0), data.get("done") is True)


def _error(data: Mapping[str, Any], url: str) -> Exception:
    """Return the exception for an error: only an action that does not fit is the policy's."""
    code, message = data.get("code"), str(data.get("message"))
    if code == FULL:
        return NoSeat(message)
    if code == REFUSED:
        faults = [f"{'.'.join(map(str, fault.get('loc', ())))}: {fault.get('msg')}" for fault in data.get("errors", ())]
        return ActionRefused("; ".join(faults) or message)
    return ToolServerLost(f"the server {url} broke ({code}): {message}")
