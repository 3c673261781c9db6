"""Rows of tool calls as others publish them.

Read are xLAM and APIGen (`tools` and `answers` as JSON text), OpenAI's `tool_calls`, Hermes (`<tool_call>`), ToolACE
(`[name(key="value")]`, tools in the system message) and BFCL (`function`, `ground_truth`). The prompt is what comes
before the first answer.
"""

import ast
import json
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import takewhile
from typing import Any

from covey.environments.base import text_of
from covey.environments.data.columns import VERLS, Row, as_messages, from_text, value_in
from covey.system.jsonl import plain_data
from covey_integrations.tools.settings import NEEDS
from covey_integrations.tools.tool import schema_of

TOOLS = ("tools", "functions", "function")
ANSWERS = ("calls", "answers", "tool_calls", "ground_truth", VERLS)
"""Columns of the tools, and of the right calls."""
KINDS = {
    **dict.fromkeys(("str", "string", "text"), "string"),
    **dict.fromkeys(("int", "integer", "long"), "integer"),
    **dict.fromkeys(("float", "number", "double"), "number"),
    **dict.fromkeys(("bool", "boolean"), "boolean"),
    **dict.fromkeys(("list", "array", "tuple", "set"), "array"),
    **dict.fromkeys(("dict", "object", "hashmap"), "object"),
    "null": "null",
}
"""Types as they are written, in JSON's words; any other type takes anything."""
TAGGED = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)


def with_calls(row: Row, column: str) -> Row:
    """Return a row with messages as prompt, `tools`, and the right `calls`. ValueError."""
    messages = _messages(row, column)
    asked = list(takewhile(lambda message: message.get("role") != "assistant", messages))
    tools = next((found for name in TOOLS if (found := from_text(row.get(name)))), None)
    kept = [message for message in asked if message.get("role") != "system" or not _tool_list(message)]
    told = [tool for message in asked if message not in kept for tool in _tool_list(message)]
    tools = told if tools is None else [tools] if isinstance(tools, Mapping) else tools
    if not isinstance(tools, list) or not tools:
        raise ValueError(f"has no tools (has: {', '.join(row)}); {NEEDS}")
    schemas = [_schema(from_text(tool)) for tool in plain_data(tools)]
    answer: Any = next((found for name in ANSWERS if (found := value_in(row, name)) is not None), None)
    answer = answer if answer is not None or len(asked) == len(messages) else messages[len(asked)]
    if answer is None:
        raise ValueError(f"has no right calls in {', '.join(ANSWERS)}, nor an answer in {column}")
    calls = _calls(plain_data(answer), [schema["function"]["name"] for schema in schemas])
    return {**row, column: kept, "tools": schemas, "calls": calls}


def _messages(row: Row, column: str) -> list[dict[str, Any]]:
    found = as_messages(from_text(row[column]))
    if isinstance(found, list) and len(found) == 1 and isinstance(found[0], list):  # BFCL's turns are lists
        found = found[0]
    if isinstance(found, str):
        found = [{"role": "user", "content": found}]
    if not isinstance(found, list | tuple) or not all(isinstance(message, Mapping) for message in found):
        raise ValueError(f"column {column!r} must be text or messages, got {found!r:.80}")
    system = row.get("system")
    first = [{"role": "system", "content": system}] if isinstance(system, str) and system.strip() else []
    return first + [{key: value for key, value in message.items() if value is not None} for message in found]


def _tool_list(message: Mapping[str, Any]) -> list[Any]:
    """Return the tools that a system message lists in JSON."""
    text = text_of(message)
    for begin in re.finditer(r"\[\s*\{", text):
        with suppress(ValueError, RecursionError):
            found, _ = json.JSONDecoder().raw_decode(text, begin.start())
            if all(isinstance(tool, Mapping) and not tool.keys().isdisjoint(("name", "function")) for tool in found):
                return list(found)
    return []


def _schema(tool: Any) -> dict[str, Any]:
    """Return a tool's schema in OpenAI's form. ValueError."""
    function = tool.get("function", tool) if isinstance(tool, Mapping) else tool
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise ValueError(f"has a tool without a name: {tool!r:.80}")
    given = from_text(
        next((function[name] for name in ("parameters", "arguments", "input_schema") if name in function), {})
    )
    given = given if isinstance(given, Mapping) else {}
    if "properties" not in given:  # xLAM's, by name
        given = {name: value for name, value in given.items() if isinstance(value, Mapping)}
        needed = [name for name, v in given.items() if "default" not in v and "optional" not in str(v.get("type"))]
        given = {"properties": given, "required": needed}
    return schema_of(function["name"], function.get("description"), {**_in_json(given), "type": "object"})


def _in_json(schema: Any) -> Any:
    """Return a schema with JSON's names of types, without nulls."""
    if isinstance(schema, list):
        return list(map(_in_json, schema))
    if not isinstance(schema, Mapping):
        return schema
    found = {key: _in_json(value) for key, value in schema.items() if value is not None}
    if isinstance(kind := found.get("type"), str):
        known = KINDS.get(re.split(r"\W", kind.strip().lower())[0])
        found = {key: value for key, value in found.items() if key != "type"} | ({"type": known} if known else {})
    return found


def _calls(answer: Any, names: Sequence[str]) -> list[dict[str, Any]]:
    """Return an answer's calls, from any of the forms. ValueError."""
    found = from_text(answer)
    if isinstance(found, Mapping) and "role" in found:
        return _calls(found.get("tool_calls") or text_of(found), names)
    if isinstance(found, str):
        tagged = TAGGED.findall(found)
        found = [from_text(text) for text in tagged] if tagged else _in_python(found, names)
    listed = found if isinstance(found, list) else [found]
    return [_call(call) for one in listed for call in (one if isinstance(one, list) else [one])]


def _call(found: Any) -> dict[str, Any]:
    call = found.get("function", found) if isinstance(found, Mapping) else found
    if isinstance(call, Mapping) and isinstance(call.get("name"), str):
        given = from_text(call.get("arguments", call.get("parameters"))) or {}
        if isinstance(given, Mapping):
            return {"name": call["name"], "arguments": dict(given)}
    elif isinstance(call, Mapping) and len(call) == 1:  # BFCL's
        ((name, choices),) = call.items()
        if isinstance(choices, Mapping) and all(isinstance(values, list) for values in choices.values()):
            return {"name": name, "any_of": dict(choices)}
    raise ValueError(f"has a right call that cannot be read: {found!r:.80}")


def _in_python(text: str, names: Sequence[str]) -> list[dict[str, Any]]:
    """Return the calls of `[name(key="value")]`, none for words alone."""
    ordered = sorted(names, key=len, reverse=True)
    calling = re.compile(rf"(?<![\w.])(?:{'|'.join(map(re.escape, ordered))})(?=\()")
    written = calling.sub(lambda name: f"_{ordered.index(name[0])}", text.strip())
    try:
        tree = ast.parse(written, mode="eval").body
        calls = tree.elts if isinstance(tree, ast.List | ast.Tuple) else [tree]
        return [_of_python(call, ordered) for call in calls]
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError) as error:
        if written != text.strip():
            raise ValueError(f"has a right call that cannot be read: {text!r:.80}") from error
        return []


def _of_python(call: ast.expr, names: Sequence[str]) -> dict[str, Any]:
    if not isinstance(call, ast.Call) or call.args:
        raise ValueError
    place = ast.unparse(call.func).removeprefix("_")
    given = {str(keyword.arg): ast.literal_eval(keyword.value) for keyword in call.keywords}
    return {"name": names[int(place)] if place.isdigit() else place, "arguments": given}
