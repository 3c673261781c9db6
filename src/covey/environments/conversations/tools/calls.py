"""Read tool calls out of what the policy said.

A tokenizer with a response template knows how its model writes them, and transformers reads them by it. Without one
they are read as Hermes and Qwen write them: <tool_call>{"name": ..., "arguments": {...}}</tool_call>.
"""

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from covey.environments.episode import Answer

OPENING, CLOSING = "<tool_call>", "</tool_call>"
BLANKS, CLOSED = re.compile(r"\s*"), re.compile(r"\s*" + CLOSING)
_MARK = re.compile(f"{OPENING}|</think>")
HERMES = "Hermes style (<tool_call>)"
TEMPLATE = "the tokenizer's response template"
MAX_NESTED = 64
"""Levels of arguments. Deeper ones cannot be copied for the reward functions, for which the group would fail."""

MAX_CALLS = 64
"""Of one turn: each takes a thread, and the time of chat templates that escape what tools say grows by the square."""


@dataclass(frozen=True, slots=True)
class Call:
    """A call that the policy made.

    >>> Call("multiply", {"a": 6, "b": 7})
    """

    name: str
    arguments: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class BadCall:
    """A call that cannot be read, with what is wrong with it in words for the policy."""

    problem: str
    name: str = "unknown"


@dataclass(frozen=True, slots=True)
class Said:
    """What the policy said in one turn, its calls apart."""

    text: str
    calls: tuple[Call | BadCall, ...] = ()
    reasoning: str = ""

    @property
    def message(self) -> dict[str, Any]:
        """Return it as a message with `tool_calls`, as reward functions expect it."""
        calls = [
            {"type": "function", "function": {"name": call.name, "arguments": dict(call.arguments)}}
            for call in self.calls
            if isinstance(call, Call)
        ]
        message: dict[str, Any] = {"role": "assistant", "content": self.text}
        if self.reasoning:
            message["reasoning_content"] = self.reasoning
        return message | ({"tool_calls": calls} if calls else {})


Reader = Callable[[Answer, Sequence[Mapping[str, Any]]], Said]
"""Reads an answer, given the schemas of the tools that were shown."""


def reader_for(tokenizer: Any) -> Reader:
    """Return what reads the calls of a tokenizer's model."""
    if getattr(tokenizer, "response_template", None) is None:
        return hermes
    return lambda answer, schemas: by_template(tokenizer, answer, schemas)


def reader_name(tokenizer: Any) -> str:
    """Return which reader that is, for the preflight."""
    return HERMES if getattr(tokenizer, "response_template", None) is None else TEMPLATE


def hermes(answer: Answer, schemas: Sequence[Mapping[str, Any]] = ()) -> Said:
    """Read calls between <tool_call> and </tool_call>. What is only thought (<think>) is neither call nor answer."""
    # Leave reasoning out: calls in it are not meant
    whole = answer.marked or answer.text
    begin_spoken = _end_of_thoughts(whole)
    thought, spoken = whole[:begin_spoken].removesuffix("</think>"), whole[begin_spoken:]
    reasoning = thought.replace("<think>", "").strip()
    # Separate the calls from the words between them
    calls: list[Call | BadCall] = []
    words: list[str] = []
    place = 0
    while (begin := spoken.find(OPENING, place)) >= 0:
        words.append(spoken[place:begin])
        if "<think>" in words[-1]:  # not in an argument
            break
        call, place = _call_at(spoken, begin + len(OPENING))
        calls.append(call)
    text = "".join(words) if calls else _without_marks(answer, spoken)
    # Nor does a thought that never ends say anything
    text, _, unended = text.partition("<think>")
    return Said(text.strip(), _first(calls), f"{reasoning}\n{unended}".strip())


def _end_of_thoughts(text: str) -> int:
    """Return where the last `</think>` ends, but for those that stand in the arguments of calls."""
    end = place = 0
    last, last_closing = text.rfind("</think>"), text.rfind(CLOSING)
    while place <= last and (mark := _MARK.search(text, place)) is not None:
        place = mark.end()
        if mark[0] == OPENING:
            place = _end_of_call(text, place, last_closing) or place
        else:
            end = place
    return end


def _end_of_call(text: str, place: int, last_closing: int) -> int | None:
    """Return where the JSON at a place ends, with the closing tag that follows. None where there is no such call."""
    try:
        _, end = json.JSONDecoder().raw_decode(text, BLANKS.match(text, place).end())  # type: ignore[union-attr]
    except (ValueError, RecursionError):
        return None
    closed = CLOSED.match(text, end)
    if closed is not None:
        return closed.end()
    return end if last_closing < end else None


def _without_marks(answer: Answer, spoken: str) -> str:
    """Return the words of an answer without calls: those without special tokens, the reasoning left out."""
    return answer.text.rpartition("</think>")[2].strip() if answer.text else spoken.strip()


def _call_at(text: str, place: int) -> tuple[Call | BadCall, int]:
    """Return the call that begins at a place, and where it ends."""
    begin = BLANKS.match(text, place).end()  # type: ignore[union-attr] # matches always
    closing = text.find(CLOSING, place)
    try:
        # Not up to the closing tag, which may stand in an argument.
        found, end = json.JSONDecoder().raw_decode(text, begin)
    except (ValueError, RecursionError) as error:
        what = "the call of a tool is no valid JSON" if closing >= 0 else "the call of a tool is not closed"
        detail = error.msg if isinstance(error, json.JSONDecodeError) else "it cannot be read"
        return BadCall(f"{what}: {detail}"), len(text) if closing < 0 else closing + len(CLOSING)
    after = CLOSED.match(text, end)
    if after is None and closing >= 0:
        return BadCall("the call of a tool is no valid JSON: something follows it"), closing + len(CLOSING)
    return call_of(found), len(text) if after is None else after.end()


def call_of(found: Any) -> Call | BadCall:
    """Make a call of {"name": ..., "arguments": {...}}, whose arguments may be JSON in a string."""
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
    """Return the calls of a turn, and in place of those that are too many what the policy is told."""
    problem = f"a turn makes at most {MAX_CALLS} calls, and the others were not made"
    return (*calls[:MAX_CALLS], *([BadCall(problem)] if len(calls) > MAX_CALLS else []))


def plain_json(value: Any, depth: int = 0) -> Any:
    """Return what the policy wrote as JSON that every receiver reads: halves of characters become question marks.

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
