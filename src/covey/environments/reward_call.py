"""One call of a user's reward function: TRL's keyword arguments in, judged values out.

Imports nothing heavy: this runs in the worker processes. Every value passes one gate: a finite real number, or None for
"does not apply". Whatever else comes back is a problem of that completion, with function, index and value named; it is
never broadcast and never becomes a 0.
"""

import asyncio
import functools
import inspect
import math
import numbers
import os
import traceback
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypedDict, runtime_checkable

from covey.environments.worker_process import Prepares

RewardCallable = Callable[..., Any]
"""def reward(prompts, completions, **columns) -> list[float | None], plain or async."""

CALLED_WITH = ("prompts", "completions", "completion_ids")
"""Arguments of every call besides the hooks; the others are columns."""


class Outcome(TypedDict):
    """What one call came to; plain data, so that it can cross processes."""

    values: list[float | None]
    """One for each completion; None where the function does not apply, or where there is a problem."""
    problems: dict[str, str]
    """Completion index (as text, for JSON) to what is wrong with its value."""
    metrics: list[tuple[str, float]]
    """What the function logged through `log_metric`."""


@runtime_checkable
class _Array(Protocol):
    def tolist(self) -> Any: ...


@runtime_checkable
class _Named(Protocol):
    __name__: str


@runtime_checkable
class NeedsWholeGroups(Protocol):
    """A reward function that compares the completions of a prompt, so that it says nothing about one alone."""

    needs_whole_groups: bool


def unwrapped(function: RewardCallable) -> RewardCallable:
    """The function inside its partials."""
    while isinstance(function, functools.partial):
        function = function.func
    return function


def name_of(function: RewardCallable) -> str:
    """The name its metrics are logged under: its `__name__`, or its class where it is an object without one."""
    inner = unwrapped(function)
    return inner.__name__ if isinstance(inner, _Named) else type(inner).__name__


def is_async(function: RewardCallable) -> bool:
    """True for `async def`, partials of it, and objects whose `__call__` is."""
    inner = unwrapped(function)
    return inspect.iscoroutinefunction(inner) or inspect.iscoroutinefunction(type(inner).__call__)


def problem_with(value: Any) -> str | None:
    """Why `value` is not a reward; None where it is one."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        return f"{type(value).__name__} {_shortened(value)}"
    try:
        number = float(value)
    except OverflowError:
        return f"{type(value).__name__} {_shortened(value)}"
    return None if math.isfinite(number) else str(number)


def _shortened(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def judged(returned: Any, count: int) -> Outcome:
    """The values a function returned for `count` completions, each through the gate."""
    values = returned.tolist() if isinstance(returned, _Array) else returned
    if isinstance(values, (str, bytes, Mapping, set, frozenset)) or not isinstance(values, Iterable):
        return failed(f"returned {type(returned).__name__} {_shortened(returned)}, not a list of numbers", count)
    values = [value.tolist() if isinstance(value, _Array) else value for value in values]
    if len(values) != count:
        return failed(f"returned {len(values)} values for {count} completions", count)
    problems = {i: problem_with(value) for i, value in enumerate(values) if value is not None}
    wrong = {str(i): f"returned {problem} for completion {i}" for i, problem in problems.items() if problem}
    accepted = [None if value is None or str(i) in wrong else float(value) for i, value in enumerate(values)]
    return Outcome(values=accepted, problems=wrong, metrics=[])


def failed(reason: str, count: int) -> Outcome:
    """No value for any of `count` completions."""
    return Outcome(values=[None] * count, problems={str(i): reason for i in range(count)}, metrics=[])


@dataclass(frozen=True)
class RewardCall:
    """A reward function made safe to call: it always ends in an Outcome.

    Where it raises on several completions it is called once more for each alone (its contract allows that: it may not
    assume whole groups), so that one bad completion does not take the others with it. One that needs whole groups is
    not: its error is that of them all.
    """

    function: RewardCallable

    def prepare(self) -> None:
        """Have the function load what it needs."""
        inner = unwrapped(self.function)
        if isinstance(inner, Prepares):
            inner.prepare()

    def __call__(self, count: int, keywords: Mapping[str, Any]) -> Outcome:
        """Call it here, in a thread without a running event loop."""
        if is_async(self.function):
            return asyncio.run(self.awaited(count, keywords))
        return self._sync(count, keywords)

    def _sync(self, count: int, keywords: Mapping[str, Any]) -> Outcome:
        metrics: list[tuple[str, float]] = []
        try:
            outcome = judged(self.function(**_with_hooks(keywords, metrics)), count)
        except (Exception, SystemExit) as error:
            if count == 1 or isinstance(unwrapped(self.function), NeedsWholeGroups):
                outcome = failed(self._reason(error, keywords), count)
            else:
                outcome = merged([self._sync(1, _only(keywords, i, count)) for i in range(count)])
        outcome["metrics"].extend(metrics)
        return outcome

    async def awaited(self, count: int, keywords: Mapping[str, Any]) -> Outcome:
        """Call an async function on the running event loop."""
        metrics: list[tuple[str, float]] = []
        try:
            call: Coroutine[Any, Any, Any] = self.function(**_with_hooks(keywords, metrics))
            outcome = judged(await call, count)
        except (Exception, SystemExit) as error:
            if count == 1 or isinstance(unwrapped(self.function), NeedsWholeGroups):
                outcome = failed(self._reason(error, keywords), count)
            else:
                alone = (self.awaited(1, _only(keywords, i, count)) for i in range(count))
                outcome = merged(await asyncio.gather(*alone))
        outcome["metrics"].extend(metrics)
        return outcome

    def _reason(self, error: BaseException, keywords: Mapping[str, Any]) -> str:
        """What to do where it could not even be called, else what it raised."""
        within = error.__traceback__ is not None and error.__traceback__.tb_next is not None
        problem = None if within or not isinstance(error, TypeError) else _misfit(self.function, keywords)
        return _raised(error) if problem is None else f"cannot be called: {problem}"


def _misfit(function: RewardCallable, keywords: Mapping[str, Any]) -> str | None:
    """Which argument it lacks or does not take; None where that is not the trouble."""
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):  # some that are written in C have none
        return None
    given = _with_hooks(keywords, [])
    named = {name: p for name, p in parameters.items() if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    for name in (name for name, p in named.items() if p.default is p.empty and name not in given):
        columns = ", ".join(column for column in keywords if column not in CALLED_WITH) or "nothing"
        return f"rows have no column {name!r} (besides the prompt they have: {columns})"
    extra = [name for name in given if name not in named]
    if extra and not any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        return f"it takes no argument {extra[0]!r}; give it **columns"
    return None


def _with_hooks(keywords: Mapping[str, Any], metrics: list[tuple[str, float]]) -> dict[str, Any]:
    def log_metric(name: str, value: float) -> None:
        metrics.append((str(name), float(value)))

    def log_extra(column: str, values: list[Any]) -> None:
        """Accepted, as TRL passes it; covey keeps no table of completions to put it into."""

    return {**keywords, "trainer_state": None, "log_extra": log_extra, "log_metric": log_metric}


def _raised(error: BaseException) -> str:
    """The type, the message and the place in the function's code."""
    message = " ".join(str(error).split())[:300]
    what = f"raised {type(error).__name__}: {message}" if message else f"raised {type(error).__name__}"
    frames = traceback.extract_tb(error.__traceback__)[1:]  # the first is the call in here
    return f"{what} ({os.path.basename(frames[-1].filename)}:{frames[-1].lineno})" if frames else what


def _only(keywords: Mapping[str, Any], index: int, count: int) -> dict[str, Any]:
    """The arguments of one completion: all are lists of `count` entries."""
    assert all(len(values) == count for values in keywords.values())
    return {name: values[index : index + 1] for name, values in keywords.items()}


def merged(outcomes: Sequence[Outcome]) -> Outcome:
    """Outcomes of single completions as one."""
    problems: dict[str, str] = {}
    for index, outcome in enumerate(outcomes):
        if "0" in outcome["problems"]:
            reason = outcome["problems"]["0"].removesuffix(" for completion 0")
            problems[str(index)] = f"{reason} for completion {index}"
    return Outcome(
        values=[outcome["values"][0] for outcome in outcomes],
        problems=problems,
        metrics=[metric for outcome in outcomes for metric in outcome["metrics"]],
    )
