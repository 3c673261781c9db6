"""Convert the policy's text to actions, and observations to text."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from covey_graders.tags import without_thoughts
from covey_integrations.openenv.wire import ActionRefused
from covey_integrations.tools.calls import plain_json
from covey_integrations.tools.mcp import result_text
from covey_integrations.tools.tool import schema_of

OF_TOOLS = ("Action", "CallToolAction", "ListToolsAction")
"""Titles of schemas whose actions are calls of tools."""
NOT_SHOWN = ("metadata", "done", "reward")
"""Fields of an observation that are not for the policy."""
OF_SYSTEM = ("transport_error", "timeout")
"""Errors of a call that say nothing about the call."""


def takes_calls(schema: Mapping[str, Any]) -> bool:
    """Return True if actions are calls of tools that the server lists."""
    return schema.get("title") in OF_TOOLS


def action_of(text: str, schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return the action that an answer stands for: JSON, JSON in a fence, or the value of the one field there must be.

    Thoughts (<think>) are left out. Raises ActionRefused, in words for the policy.

    >>> action_of("crane", {"required": ["guess"], "properties": {"guess": {"type": "string"}}})
    {'guess': 'crane'}
    """
    said = without_thoughts(text).strip()
    if said.startswith("```") and said.endswith("```"):
        said = "\n".join(said.splitlines()[1:-1]).strip()
    try:
        found = json.loads(said)
    except (ValueError, RecursionError):
        found = said
    if not isinstance(found, dict):
        required = schema.get("required") or []
        if len(required) != 1:
            raise ActionRefused(f"the action must be a JSON object with {', '.join(required) or 'the fields it needs'}")
        kind = schema.get("properties", {}).get(required[0], {}).get("type")
        found = {required[0]: said if kind == "string" and not isinstance(found, str) else found}
    try:
        return dict(plain_json(found))
    except ValueError as error:
        raise ActionRefused(f"the fields of the action {error}") from error


def shown(observation: Mapping[str, Any], name: str | None) -> str:
    """Return an observation as text: one field of it, the only field where that is text, else all of it as JSON.

    >>> shown({"text": "hot", "metadata": {}}, None), shown({"row": 1, "column": 2}, None)
    ('hot', '{"row": 1, "column": 2}')
    """
    fields = {key: value for key, value in observation.items() if key not in NOT_SHOWN}
    if name is not None:
        found = observation.get(name, "")
        return found if isinstance(found, str) else _json(found)
    only = next(iter(fields.values())) if len(fields) == 1 else None
    if isinstance(only, str):
        return only
    return _json(fields) if fields else ""


def call_of(name: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the action that calls a tool."""
    return {"type": "call_tool", "tool_name": name, "arguments": dict(arguments)}


def answer_of_call(observation: Mapping[str, Any]) -> tuple[str, bool, bool]:
    """Return a call's result as text, whether it is an error, and whether the system failed."""
    error = observation.get("error")
    if isinstance(error, Mapping):
        return _json({"error": error.get("message")}), True, error.get("error_type") in OF_SYSTEM
    result = observation.get("result")
    if isinstance(result, Mapping) and "content" in result:
        return result_text(result), bool(result.get("is_error")), False
    return (result if isinstance(result, str) else _json(result)), False, False


def schemas_of(tools: Sequence[Mapping[str, Any]]) -> tuple[Mapping[str, Any], ...]:
    """Return listed tools as chat templates want them."""
    return tuple(schema_of(str(tool["name"]), tool.get("description"), tool.get("input_schema")) for tool in tools)


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
