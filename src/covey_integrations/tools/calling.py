"""Call tools with a deadline, beside the event loop, and sort errors.

A tool's own error, and arguments that it does not take, are messages to the policy. A tool that is late or whose system
is gone raises, and the attempt is a Failure.
"""

import asyncio
import concurrent.futures
import copy
import json
import threading
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from covey.environments.episode import maybe_await
from covey.environments.reward_functions.call import is_async
from covey.types import Message, RunStopped
from covey_integrations.tools.calls import BadCall, Call
from covey_integrations.tools.tool import Tool, problem_with_arguments

MAX_HUNG = 64
"""Calls of tools that were given up and still run, before the run ends."""
MAX_CHARACTERS = 100_000
"""Maximum characters of one answer of a tool; the rest is left out."""
UNKNOWN = "unknown"
"""Stands for the names of tools that there are not, in metrics."""


Begun = concurrent.futures.Future[Any] | asyncio.Future[Any]
"""A call in a thread, or in the event loop."""


class ToolServerLost(RuntimeError):
    """A tool's system is gone or late: the attempt is a Failure."""


class TookTooLong(ToolServerLost):
    """A call did not return before its deadline."""

    def __init__(self, message: str, call: "Begun") -> None:
        super().__init__(message)
        self.call = call


class EpisodeOver(Exception):  # no error: a tool says so
    """A tool ends the episode, after its message.

    >>> raise EpisodeOver("the order is placed")
    """


@dataclass(frozen=True, slots=True)
class ToolAnswer:
    """The result of a call."""

    name: str
    content: str
    is_error: bool = False
    ends: bool = False
    """Whether the tool ended the episode."""


@dataclass
class ToolLedger:
    """Counts each tool's calls, errors and seconds since the last query."""

    calls: defaultdict[str, int] = field(default_factory=lambda: defaultdict(int))
    errors: defaultdict[str, int] = field(default_factory=lambda: defaultdict(int))
    seconds: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    left_behind: list[Begun] = field(default_factory=list)
    """Calls that were given up in this run, without those that have ended since."""

    def note(self, name: str, seconds: float, is_error: bool) -> None:
        self.calls[name] += 1
        self.errors[name] += is_error
        self.seconds[name] += seconds

    async def called_in_time(self, function: Callable[..., Any], what: str, seconds: float, /, **arguments: Any) -> Any:
        """Call as the function below; too many abandoned calls end the run."""
        try:
            return await called_in_time(function, what, seconds, **arguments)
        except TookTooLong as error:
            self.left_behind = left = [call for call in (*self.left_behind, error.call) if not call.done()]
            if len(left) >= MAX_HUNG:
                told = f"{error}, and {len(left)} calls of tools that were given up still run"
                raise RunStopped(f"{told}: let the tool end by itself, or raise the timeout") from error
            raise

    def metrics(self) -> dict[str, float]:
        """Return tool/NAME/calls, /errors and /seconds (mean), and reset them."""
        found: dict[str, float] = {}
        for name, calls in sorted(self.calls.items()):
            found[f"tool/{name}/calls"] = float(calls)
            found[f"tool/{name}/errors"] = float(self.errors[name])
            found[f"tool/{name}/seconds"] = self.seconds[name] / calls
        for counts in (self.calls, self.errors, self.seconds):
            counts.clear()
        return found


@dataclass(frozen=True)
class Caller:
    """Calls tools by name."""

    tools: Mapping[str, Tool]
    seconds: float = 30.0
    """Deadline of a call (environment.tool_timeout)."""
    ledger: ToolLedger = field(default_factory=ToolLedger)
    written: Callable[[Any], str] = field(default_factory=lambda: as_text)
    """Makes text of a tool's result."""

    async def answers(self, calls: tuple[Call | BadCall, ...]) -> list[ToolAnswer]:
        """Return an answer per call, in order; stateful tools run sequentially."""
        kept = [call for call in calls if self._is_stateful(call)]
        free = [asyncio.ensure_future(self.answer(call)) for call in calls if not self._is_stateful(call)]
        try:
            in_order: list[ToolAnswer] = []
            for call in kept:
                is_over = any(answer.ends for answer in in_order)
                in_order.append(_error(call.name, "the episode is over") if is_over else await self.answer(call))
            beside = await asyncio.gather(*free)
        except BaseException:
            for task in free:
                task.cancel()
            raise
        stateful, others = iter(in_order), iter(beside)
        return [next(stateful if self._is_stateful(call) else others) for call in calls]

    def _is_stateful(self, call: Call | BadCall) -> bool:
        return isinstance(call, Call) and call.name in self.tools and self.tools[call.name].is_stateful

    async def answer(self, call: Call | BadCall) -> ToolAnswer:
        """Return the result of one call. Raises ToolServerLost after its deadline."""
        begin = time.monotonic()
        answer = await self._answer(call)
        name = answer.name if answer.name in self.tools else UNKNOWN
        self.ledger.note(name, time.monotonic() - begin, answer.is_error)
        return answer

    async def _answer(self, call: Call | BadCall) -> ToolAnswer:
        if isinstance(call, BadCall):
            return _error(call.name, call.problem)
        tool = self.tools.get(call.name)
        if tool is None:
            there = ", ".join(self.tools) or "none"
            return _error(call.name, f"there is no tool {call.name[:80]}; there is {there}")
        problem = problem_with_arguments(tool.parameters, call.arguments)
        if problem is not None:
            return _error(call.name, problem)
        given, what = copy.deepcopy(dict(call.arguments)), f"the tool {tool.name}"
        try:
            said = await maybe_await(await self.ledger.called_in_time(tool.function, what, self.seconds, **given))
            return ToolAnswer(call.name, shortened(self.written(said)))
        except EpisodeOver as over:
            return ToolAnswer(call.name, shortened(str(over)), ends=True)
        except (ToolServerLost, RunStopped):
            raise
        except (Exception, SystemExit) as error:
            return _error(call.name, f"{type(error).__name__}: {error}")


async def called_in_time(function: Callable[..., Any], what: str, seconds: float, /, **arguments: Any) -> Any:
    """Call a user's function with a deadline, synchronous ones in a thread.

    Raises TookTooLong; a thread cannot be ended, so it is left behind.
    """
    call: Begun
    if is_async(function):
        call = asyncio.ensure_future(without_exit(function(**arguments)))
    else:
        call = begun(lambda: function(**arguments))
    waiting = asyncio.wrap_future(call)
    try:
        # Not `wait_for`, which waits for a task that takes no notice of its end.
        done, _ = await asyncio.wait({waiting}, timeout=seconds)
    except asyncio.CancelledError:
        waiting.cancel()
        raise
    if not done:
        waiting.cancel()
        raise TookTooLong(f"{what} took longer than environment.tool_timeout={seconds:g} s", call)
    if waiting.cancelled():
        raise ToolServerLost(f"{what} was cancelled")
    return waiting.result()


async def without_exit(call: Awaitable[Any]) -> Any:
    """Await a call; SystemExit in a task would end the event loop."""
    try:
        return await call
    except SystemExit as error:
        raise RuntimeError(f"SystemExit: {error}") from error


def in_thread(function: Callable[[], Any]) -> "asyncio.Future[Any]":
    """Start a function in a thread, and return an awaitable."""
    return asyncio.wrap_future(begun(function))


def begun(function: Callable[[], Any]) -> "concurrent.futures.Future[Any]":
    """Start a function in a daemon thread."""
    answer: concurrent.futures.Future[Any] = concurrent.futures.Future()
    answer.set_running_or_notify_cancel()  # who waits no more does not end it

    def run() -> None:
        try:
            answer.set_result(function())
        except (StopIteration, asyncio.CancelledError, concurrent.futures.CancelledError) as error:
            answer.set_exception(RuntimeError(f"a tool raised {type(error).__name__}"))  # no future holds these
        except BaseException as error:  # whoever waits must hear of it
            answer.set_exception(error)

    threading.Thread(target=run, name="covey-tool", daemon=True).start()
    return answer


def as_text(result: Any) -> str:
    """Return text as it is and everything else as JSON.

    >>> as_text("48"), as_text({"sum": 48}), as_text(None)
    ('48', '{"sum": 48}', '')
    """
    if result is None:
        return ""
    return result if isinstance(result, str) else json.dumps(result, ensure_ascii=False, default=str)


def shortened(text: str) -> str:
    """Cut very long text, and make it readable for every tokenizer."""
    left_out = len(text) - MAX_CHARACTERS
    kept = text if left_out <= 0 else f"{text[:MAX_CHARACTERS]}... ({left_out} characters left out)"
    return kept.encode("utf-8", "replace").decode("utf-8")


def tool_message(name: str, content: str, turn: int, place: int) -> Message:
    """Return a tool's answer to a call as a message."""
    return {"role": "tool", "name": shortened(name[:80]), "content": content, "tool_call_id": call_id(turn, place)}


def call_id(turn: int, place: int) -> str:
    """Name a call by nine letters and digits, as Mistral's template requires."""
    return f"call{turn % 1000:03}{place % 100:02}"


def _error(name: str, problem: str) -> ToolAnswer:
    return ToolAnswer(name, shortened(json.dumps({"error": problem}, ensure_ascii=False)), is_error=True)
