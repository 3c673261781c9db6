"""One call of a user's reward function, from arguments to checked values.

Imports nothing heavy: this runs in the worker processes. A value is a finite real number, a bool, or None for "does not
apply". Anything else is an error of that completion, with function, index and value named; it is never broadcast and
never becomes a 0.
"""

import asyncio
import functools
import inspect
import math
import numbers
import os
import threading
import traceback
from collections.abc import Callable, Collection, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NotRequired, TypedDict

from covey.system.jsonl import as_lists, plain_data
from covey.system.lookup import attribute, near
from covey.system.workers.process import loader_of

RewardCallable = Callable[..., Any]
"""def reward(prompts, completions, **columns) -> list[float | None], plain or async."""

CALLED_WITH = ("prompts", "completions", "completion_ids")
"""Arguments of every call besides the hooks; the others are columns."""
HOOKS = ("trainer_state", "log_extra", "log_metric")
AT_TIMES = ("completion_ids", "environments")
"""Arguments of some calls: where tokens are known, and of attempts that have an object of their own."""
HIDDEN_COLUMNS = frozenset({"prompt", "completion", "completion_ids"})
"""Columns that TRL does not pass on either."""
RESERVED_COLUMNS = frozenset({"prompts", "completions", *HOOKS})

OF_TEXT = ("string ind", "'str' object")
"""Parts of Python's messages about text that was taken for a list or an object."""
TEXTS = "; completions are text where prompts are text, and messages where prompts are lists of messages"
LARGEST_REWARD = 3.4e38
"""Largest number of float32, the type of rewards in TRL; squares of it still fit into the float64 of statistics."""


class RewardOutcome(TypedDict):
    """The result of one call, as plain data for other processes."""

    values: list[float | None]
    """One for each completion; None where the function does not apply, or where there is a problem."""
    problems: dict[str, str]
    """Completion index (as text, for JSON) -> fault of its value."""
    metrics: list[tuple[str, float]]
    """Metrics that the function logged through `log_metric`."""
    extras: dict[str, list[Any]]
    """Columns that it logged through `log_extra`: a value for each completion."""
    excused: NotRequired[str]
    """The error for which the function does not apply: the row has no value in a column that it takes."""


@dataclass(frozen=True, slots=True)
class TrainerState:
    """The progress of training, in transformers' names.

    >>> TrainerState(global_step=3, max_steps=100, epoch=0.75)
    """

    global_step: int = 0
    """Finished steps."""
    max_steps: int = 1
    epoch: float = 0.0
    """Passes over the training prompts."""


AT_START = TrainerState()
"""State outside of training."""


@dataclass(frozen=True)
class _Hooks:
    """The logging hooks of a call, and their records."""

    count: int
    state: TrainerState
    metrics: list[tuple[str, float]] = field(default_factory=list)
    extras: dict[str, list[Any]] = field(default_factory=dict)

    def log_metric(self, name: str, value: float) -> None:
        self.metrics.append((str(name), float(value)))

    def log_extra(self, column: str, values: Iterable[Any]) -> None:
        """Record a value per completion; a column's last call counts."""
        listed = [plain_data(value) for value in values]
        if len(listed) != self.count:
            raise ValueError(f"log_extra({column!r}) needs {self.count} values, one a completion, got {len(listed)}")
        self.extras[str(column)] = listed

    def arguments(self) -> dict[str, Any]:
        return {"trainer_state": self.state, "log_extra": self.log_extra, "log_metric": self.log_metric}

    def add_to(self, outcome: RewardOutcome) -> RewardOutcome:
        """Add the logged values to an outcome, later calls winning."""
        metrics, extras = [*outcome["metrics"], *self.metrics], self.extras | outcome["extras"]
        return {**outcome, "metrics": metrics, "extras": extras}


def unwrap(function: RewardCallable) -> RewardCallable:
    """Return the function inside its partials."""
    while isinstance(function, functools.partial):
        function = function.func
    return function


def name_of(function: RewardCallable) -> str:
    """Return a function's or object's name for metrics."""
    inner = unwrap(function)
    return str(attribute(inner, "__name__", type(inner).__name__))


def is_async(function: RewardCallable) -> bool:
    """Return True for `async def`, its partials, and async `__call__`."""
    inner = unwrap(function)
    return inspect.iscoroutinefunction(inner if inspect.isroutine(inner) else type(inner).__call__)


def problem_with(value: Any) -> str | None:
    """Return why `value` is no reward, None where it is one."""
    if not isinstance(value, numbers.Real):
        return f"{type(value).__name__} {_shorten(value)}"
    try:
        number = float(value)
    except OverflowError:
        return f"{type(value).__name__} {_shorten(value)}"
    if not math.isfinite(number):
        return str(number)
    return f"{number}, beyond {LARGEST_REWARD:g}," if abs(number) > LARGEST_REWARD else None


def _shorten(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def check_values(returned: Any, count: int, *, nan_is_none: bool = False) -> RewardOutcome:
    values = as_lists(returned)
    if isinstance(values, (str, bytes, Mapping, set, frozenset)) or not isinstance(values, Iterable):
        return fail_all(f"returned {type(returned).__name__} {_shorten(returned)}, not a list of numbers", count)
    values = [as_lists(value) for value in values]
    if nan_is_none:
        values = [None if isinstance(value, float) and math.isnan(value) else value for value in values]
    if len(values) != count:
        return fail_all(f"returned {len(values)} values for {count} completions", count)
    problems = {i: problem_with(value) for i, value in enumerate(values) if value is not None}
    wrong = {str(i): f"returned {problem} for completion {i}" for i, problem in problems.items() if problem}
    accepted = [None if value is None or str(i) in wrong else float(value) for i, value in enumerate(values)]
    return RewardOutcome(values=accepted, problems=wrong, metrics=[], extras={})


def fail_all(reason: str, count: int) -> RewardOutcome:
    """Return no value for any of `count` completions."""
    problems = {str(index): reason for index in range(count)}
    return RewardOutcome(values=[None] * count, problems=problems, metrics=[], extras={})


def does_not_apply(count: int, error: str) -> RewardOutcome:
    """Return None for each of `count` completions, for an error."""
    return RewardOutcome(values=[None] * count, problems={}, metrics=[], extras={}, excused=error)


@dataclass(frozen=True)
class RewardCall:
    """A reward function made safe: it always ends in an Outcome.

    If it raises on several completions it is called again for each alone, so that one bad completion does not spoil
    the others, unless it needs whole groups. One that raises over a row without a value in a column of its own does not
    apply to that row.
    """

    function: RewardCallable
    nan_is_none: bool = False

    def prepare(self) -> None:
        loader_of(unwrap(self.function))()

    def __call__(self, count: int, keywords: Mapping[str, Any], state: TrainerState = AT_START) -> RewardOutcome:
        """Call it here, in a thread without a running event loop."""
        if is_async(self.function):
            call = self.awaited(count, keywords, state)
            return asyncio.run_coroutine_threadsafe(call, _loop_of(os.getpid())).result()
        return self._sync(count, keywords, state)

    def _sync(self, count: int, keywords: Mapping[str, Any], state: TrainerState) -> RewardOutcome:
        hooks = _Hooks(count, state)
        try:
            returned = self.function(**keywords, **hooks.arguments())
            outcome = check_values(returned, count, nan_is_none=self.nan_is_none)
        except (Exception, SystemExit) as error:
            outcome = self._after(error, count, keywords) or merge_outcomes(
                [self._sync(1, _only(keywords, index, count), state) for index in range(count)]
            )
        return hooks.add_to(outcome)

    async def awaited(self, count: int, keywords: Mapping[str, Any], state: TrainerState = AT_START) -> RewardOutcome:
        """Call an async function on the running event loop."""
        hooks = _Hooks(count, state)
        try:
            call: Coroutine[Any, Any, Any] = self.function(**keywords, **hooks.arguments())
            outcome = check_values(await call, count, nan_is_none=self.nan_is_none)
        except (Exception, SystemExit) as error:
            known = self._after(error, count, keywords)
            alone = () if known else (self.awaited(1, _only(keywords, i, count), state) for i in range(count))
            outcome = known or merge_outcomes(await asyncio.gather(*alone))
        return hooks.add_to(outcome)

    def _after(self, error: BaseException, count: int, keywords: Mapping[str, Any]) -> RewardOutcome | None:
        """Return the outcome of an error, None to retry one by one."""
        within = error.__traceback__ is not None and error.__traceback__.tb_next is not None
        wrong = None if within or not isinstance(error, TypeError) else misfit(self.function, keywords)
        if wrong is None and _row_lacks_argument(self.function, keywords):
            return does_not_apply(count, _describe_error(error, keywords))
        if count == 1 or attribute(unwrap(self.function), "needs_whole_groups", False):
            return fail_all(_describe_error(error, keywords) if wrong is None else f"cannot be called: {wrong}", count)
        return None


@functools.cache
def _loop_of(process: int) -> asyncio.AbstractEventLoop:
    """Return a process's event loop, to which module objects belong."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="covey-rewards", daemon=True).start()
    return loop


def check_columns(functions: Mapping[str, RewardCallable], columns: Sequence[str], prompt_column: str) -> None:
    """Refuse columns named like arguments, and missing ones. ValueError."""
    taken = RESERVED_COLUMNS.intersection(columns) - {prompt_column}
    if taken:
        raise ValueError(
            f"columns {', '.join(sorted(taken))} have names that reward functions get as arguments; rename"
        )
    passed = [name for name in columns if name != prompt_column and name not in HIDDEN_COLUMNS]
    for name, function in functions.items():
        both = sorted(set(function.keywords).intersection(columns)) if isinstance(function, functools.partial) else []
        if both:
            raise ValueError(f"rows have the column {both[0]!r}, which args of {name} set too; rename one")
        if wrong := misfit(function, ["prompts", "completions", *passed]):
            raise ValueError(f'reward function "{name}" cannot be called: {wrong}')


def misfit(function: RewardCallable, keywords: Collection[str]) -> str | None:
    """Return the missing or surplus argument, None if neither."""
    named, takes_any = named_parameters(function)
    given = (*keywords, *HOOKS)
    for name in (name for name, p in named.items() if p.default is p.empty and name not in (*given, *AT_TIMES)):
        columns = ", ".join(column for column in keywords if column not in CALLED_WITH) or "nothing"
        return f"rows have no column {name!r} (besides the prompt they have: {columns}){near(name, keywords)}"
    extra = [name for name in given if name not in named]
    return f"it takes no argument {extra[0]!r}; give it **columns" if extra and not takes_any else None


def _row_lacks_argument(function: RewardCallable, keywords: Mapping[str, Any]) -> bool:
    """Return True if the row lacks a value for a named column."""
    columns = {name: values for name, values in keywords.items() if name not in CALLED_WITH}
    named, _ = named_parameters(function)
    return any(name in columns and all(value is None for value in columns[name]) for name in named)


def named_parameters(function: RewardCallable) -> tuple[dict[str, inspect.Parameter], bool]:
    """Return the named parameters, and whether any other is taken."""
    try:
        parameters = inspect.signature(function).parameters
    except Exception:  # none to be had, or looking for it runs code of its own
        return {}, True
    named = {name: p for name, p in parameters.items() if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    return named, any(p.kind is p.VAR_KEYWORD for p in parameters.values())


def _describe_error(error: BaseException, keywords: Mapping[str, Any]) -> str:
    """Return type, message and place in the function's code, and a hint."""
    message = " ".join(str(error).split())[:300]
    what = f"raised {type(error).__name__}: {message}" if message else f"raised {type(error).__name__}"
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename != __file__]
    place = f" ({os.path.basename(frames[-1].filename)}:{frames[-1].lineno})" if frames else ""
    is_of_text = any(part in message for part in OF_TEXT) and all(isinstance(c, str) for c in keywords["completions"])
    return f"{what}{place}{TEXTS if is_of_text else ''}"


def _only(keywords: Mapping[str, Any], index: int, count: int) -> dict[str, Any]:
    assert all(len(values) == count for values in keywords.values())
    return {name: values[index : index + 1] for name, values in keywords.items()}


def merge_outcomes(outcomes: Sequence[RewardOutcome]) -> RewardOutcome:
    """Join the outcomes of single completions."""
    problems: dict[str, str] = {}
    for index, outcome in enumerate(outcomes):
        if "0" in outcome["problems"]:
            reason = outcome["problems"]["0"].removesuffix(" for completion 0")
            problems[str(index)] = f"{reason} for completion {index}"
    columns = dict.fromkeys(column for outcome in outcomes for column in outcome["extras"])
    return RewardOutcome(
        values=[outcome["values"][0] for outcome in outcomes],
        problems=problems,
        metrics=[metric for outcome in outcomes for metric in outcome["metrics"]],
        extras={column: [o["extras"].get(column, [None])[0] for o in outcomes] for column in columns},
    )
