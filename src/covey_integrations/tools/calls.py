"""Read tool calls out of the policy's text.

A tokenizer with a response template knows how its model writes them, and transformers reads them by it. Without one
they are read as its chat template writes them, or where that writes none as Hermes and Qwen do:
<tool_call>{"name": ..., "arguments": {...}}</tool_call>.
"""

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

from covey.environments.episode import Answer
from covey_integrations.tools.styles import ARGUMENTS, SCHEMA, TOOL, Style, pattern, styles, turns

Schemas = Sequence[Mapping[str, Any]]
HERMES = "Hermes style (<tool_call>)"
TEMPLATE = "the tokenizer's response template"
MAX_NESTED = 64
"""Levels of arguments. Deeper ones cannot be copied for the reward functions, for which the group would fail."""

MAX_CALLS = 64
"""Maximum calls of one turn: each takes a thread, and chat templates that escape results take quadratic time."""


@dataclass(frozen=True, slots=True)
class Call:
    """A call that the policy made.

    >>> Call("multiply", {"a": 6, "b": 7})
    """

    name: str
    arguments: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class BadCall:
    """An unreadable call, with its error for the policy."""

    problem: str
    name: str = "unknown"


@dataclass(frozen=True, slots=True)
class Said:
    """The policy's text of one turn, without its calls."""

    text: str
    calls: tuple[Call | BadCall, ...] = ()
    reasoning: str = ""

    @property
    def message(self) -> dict[str, Any]:
        """Return it as a message with `tool_calls`, for reward functions."""
        calls = [
            {"type": "function", "function": {"name": call.name, "arguments": dict(call.arguments)}}
            for call in self.calls
            if isinstance(call, Call)
        ]
        message: dict[str, Any] = {"role": "assistant", "content": self.text}
        if unread := sum(isinstance(call, BadCall) for call in self.calls):
            message["unread_calls"] = unread
        if self.reasoning:
            message["reasoning_content"] = self.reasoning
        return message | ({"tool_calls": calls} if calls else {})


Reader = Callable[[Answer, Sequence[Mapping[str, Any]]], Said]
"""Reads an answer, given the schemas of the tools that were shown."""


def reader_for(tokenizer: Any) -> Reader:
    """Return the reader of a model's calls. ValueError for an unknown style."""
    return _reading(tokenizer)[0]


def reader_name(tokenizer: Any) -> str:
    """Return the reader's name, for the preflight."""
    return _reading(tokenizer)[1]


def _reading(tokenizer: Any) -> tuple[Reader, str]:
    if getattr(tokenizer, "response_template", None) is not None:
        return partial(by_template, tokenizer), TEMPLATE
    one, two, none = turns(tokenizer)
    known = Call(TOOL, ARGUMENTS)
    wanted = [(turn, (call,) * turn.count(TOOL)) for turn, call in ((one, known), (two, known), (none, Call(TOOL, {})))]
    for style in styles(one, two, none):
        read = InStyle(style)
        if all(read(Answer(turn, (), "stop", 1, ()), [SCHEMA]).calls == calls for turn, calls in wanted if turn):
            own = f"the chat template's style ({style.opening or style.body.form})"
            return (hermes, HERMES) if read == hermes else (read, own)
    if one:
        raise ValueError(
            f"the chat template must write calls of tools so that they can be read back, got {one!r:.120}; give the "
            "tokenizer a response template"
        )
    return hermes, HERMES


@dataclass(frozen=True)
class InStyle:
    """Reads calls in a model's style, outside of thoughts (<think>)."""

    style: Style

    def __call__(self, answer: Answer, schemas: Schemas = ()) -> Said:
        whole = answer.marked or answer.text
        begin_spoken = self._end_of_thoughts(whole, schemas)
        thought, spoken = whole[:begin_spoken].removesuffix("</think>"), whole[begin_spoken:]
        reasoning = thought.replace("<think>", "").strip()
        calls: list[Call | BadCall] = []
        words: list[str] = []
        place = 0
        while (mark := self._opening.search(spoken, place)) is not None:
            words.append(spoken[place : mark.start()])
            if "<think>" in words[-1]:  # not in an argument
                break
            more: re.Match[str] | None = mark
            while more is not None:
                call, place = self._call_at(spoken, more.end(), schemas)
                calls.append(call)
                more = self._more.match(spoken, place)
        # Without calls it is the answer without special tokens and reasoning
        whole_text = answer.text.rpartition("</think>")[2] if answer.text else spoken
        text = "".join(words) if calls else whole_text
        # Nor does a thought that never ends say anything
        text, _, unended = text.partition("<think>")
        return Said(text.strip(), _first(calls), f"{reasoning}\n{unended}".strip())

    @cached_property
    def _opening(self) -> re.Pattern[str]:
        """Return the pattern before calls; without words it begins the answer."""
        found = pattern(self.style.opening)
        return re.compile(
            found if re.search(r"\w", self.style.opening) else rf"\A\s*{found}(?={self.style.body.begins})"
        )

    @cached_property
    def _more(self) -> re.Pattern[str]:
        is_listed = self.style.between is not None
        parting = rf"\s*{pattern(self.style.between or '')}[\s;,]*(?={self.style.body.begins})"
        return re.compile(parting if is_listed else r"(?!)")

    @cached_property
    def _closed(self) -> re.Pattern[str]:
        return re.compile(rf"\s*{pattern(self.style.closing)}")

    def _end_of_thoughts(self, text: str, schemas: Schemas) -> int:
        """Return the end of the last `</think>` outside of arguments."""
        end = place = 0
        last, last_closing = text.rfind("</think>"), text.rfind(self.style.closing)
        marks = re.compile(f"</think>|{self._opening.pattern}")
        while place <= last and (mark := marks.search(text, place)) is not None:
            place = mark.end()
            if mark[0] == "</think>":
                end = place
            else:
                place = self._end_of_call(text, place, last_closing, schemas) or place + (not mark[0])
        return end

    def _end_of_call(self, text: str, place: int, last_closing: int, schemas: Schemas) -> int | None:
        """Return the end of the call at a place, None without one."""
        try:
            _, end = self.style.body(text, place, schemas)
        except (ValueError, RecursionError):
            return None
        closed = self._closed.match(text, end)
        if closed is not None:
            return closed.end()
        return end if last_closing < end else None

    def _call_at(self, text: str, place: int, schemas: Schemas) -> tuple[Call | BadCall, int]:
        """Return the call at a place, and its end."""
        closing = self.style.closing
        begin_closing = text.find(closing, place) if closing else -1
        behind = len(text) if begin_closing < 0 else begin_closing + len(closing)
        try:
            # Not up to the closing tag, which may stand in an argument.
            found, end = self.style.body(text, place, schemas)
        except (ValueError, RecursionError) as error:
            what = "is not closed" if begin_closing < 0 and closing else f"is no valid {self.style.body.form}"
            detail = error.msg if isinstance(error, json.JSONDecodeError) else str(error)[:80]
            return BadCall(f"the call of a tool {what}: {detail}"), behind
        after = self._closed.match(text, end)
        if after is None and begin_closing >= 0:
            return BadCall(f"the call of a tool {f'is no valid {self.style.body.form}'}: something follows it"), behind
        return call_of(found), len(text) if after is None else after.end()


hermes = InStyle(Style())
"""Reads calls between <tool_call> and </tool_call>."""


def call_of(found: Any) -> Call | BadCall:
    """Make a call of {"name": ..., "arguments": {...}}, or JSON arguments."""
    if not isinstance(found, Mapping) or not isinstance(found.get("name"), str):
        return BadCall('the call of a tool must be {"name": "...", "arguments": {...}}')
    name, arguments = found["name"], found.get("arguments", found.get("parameters", {}))
    if isinstance(arguments, str):
        with suppress(ValueError, RecursionError):
            arguments = json.loads(arguments)
    if arguments is None:
        arguments = {}
    if not isinstance(arguments, Mapping) or not all(isinstance(key, str) for key in arguments):
        return BadCall('the arguments of the call must be an object, as in {"a": 6}', name)
    try:
        return Call(name, plain_json(arguments))
    except ValueError as error:
        return BadCall(f"the arguments of the call {error}", name)


def _first(calls: Sequence[Call | BadCall]) -> tuple[Call | BadCall, ...]:
    """Return a turn's first calls, and errors for surplus ones."""
    problem = f"a turn makes at most {MAX_CALLS} calls, and the others were not made"
    return (*calls[:MAX_CALLS], *([BadCall(problem)] if len(calls) > MAX_CALLS else []))


def plain_json(value: Any, depth: int = 0) -> Any:
    """Return the policy's JSON with replaced surrogates, for every receiver.

    ValueError for what only Python reads: numbers that are none, such as NaN and 1e999, and deep nesting.

    >>> plain_json({"a": [1, "\\ud800"]})
    {'a': [1, '?']}
    """
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode("utf-8")
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"hold {value}, which is no number in JSON")
    if not isinstance(value, Mapping | list):
        return value
    if depth >= MAX_NESTED:
        raise ValueError(f"are nested more than {MAX_NESTED} deep")
    if isinstance(value, Mapping):
        return {plain_json(key): plain_json(item, depth + 1) for key, item in value.items()}
    return [plain_json(item, depth + 1) for item in value]


def by_template(tokenizer: Any, answer: Answer, schemas: Sequence[Mapping[str, Any]] = ()) -> Said:
    """Read an answer by the tokenizer's response template."""
    # Templates, and prefilled answers, often write the begin of it (<think>)
    whole, prefix = answer.marked or answer.text, tokenizer.decode(list(answer.prompt_ids))
    try:
        found = tokenizer.parse_response(whole, prefix=prefix, tools=[dict(s) for s in schemas])
        calls = _first([call_of(call.get("function", call)) for call in found.get("tool_calls") or ()])
    except Exception as error:  # foreign code, that takes apart what the policy wrote
        reason = " ".join(str(error).split())[:200]
        return Said(answer.text, (BadCall(f"the call of a tool cannot be read: {reason}"),))
    reasoning = found.get("reasoning_content") or found.get("thinking") or ""
    return Said(str(found.get("content") or ""), calls, str(reasoning))
