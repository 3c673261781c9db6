"""Normalise a program's messages; detect continuations of a conversation."""

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from covey.types import Message
from covey_integrations.gateway.refused import Refused
from covey_integrations.tools.calls import plain_json

ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
"""Roles of the API to those of chat templates."""
MAX_MESSAGES = 1000
"""Maximum messages of one call: to encode them holds the event loop of all episodes."""


def normal_messages(given: Any) -> tuple[Message, ...]:
    """Return messages with text contents, argument objects, and tools' names.

    Raises Refused where there are none, one cannot be read, or the policy has spoken last.
    """
    if not isinstance(given, list) or not 0 < len(given) <= MAX_MESSAGES:
        raise Refused(400, f"messages must be a list of 1 to {MAX_MESSAGES} messages", "messages")
    found: list[Message] = []
    names: dict[str, str] = {}
    for place, message in enumerate(given):
        if not isinstance(message, Mapping) or message.get("role") not in tuple(ROLES):
            raise Refused(400, f"messages[{place}].role must be one of {', '.join(ROLES)}", "messages")
        found.append(_normal(message, names, f"messages[{place}]"))
    if found[-1]["role"] == "assistant":
        raise Refused(400, "the last message is the assistant's own, which cannot be gone on from", "messages")
    return tuple(found)


def _normal(message: Mapping[str, Any], names: dict[str, str], where: str) -> Message:
    role = ROLES[message["role"]]
    found: dict[str, Any] = {"role": role, "content": _text(message.get("content"), where)}
    if role == "assistant":
        if isinstance(message.get("reasoning_content"), str) and message["reasoning_content"]:
            found["reasoning_content"] = message["reasoning_content"]
        given = message.get("tool_calls") or []
        if not isinstance(given, list):
            raise Refused(400, f"{where}.tool_calls must be a list", "messages")
        calls = [_call(call, f"{where}.tool_calls") for call in given]
        names.update({call["id"]: call["function"]["name"] for call in calls})
        return found | ({"tool_calls": calls} if calls else {})
    if role == "tool":
        call_id = str(message.get("tool_call_id") or "")
        name = message.get("name") or names.get(call_id, "tool")
        found |= {"name": str(name)[:80], "tool_call_id": call_id}
    return found


def _text(content: Any, where: str) -> str:
    """Return the text of a content, whose parts must be text."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list) else [content]
    texts = [part.get("text") if isinstance(part, Mapping) else None for part in parts]
    known = [text for text in texts if isinstance(text, str)]
    if len(known) < len(texts):
        raise Refused(400, f"{where}.content must be text, or a list of parts of text", "messages")
    return "\n".join(known)


def _call(call: Any, where: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise Refused(400, f'{where} must be {{"id": ..., "function": {{"name": ..., "arguments": ...}}}}', "messages")
    # Arguments come as JSON text or as an object
    arguments = function.get("arguments", "")
    if isinstance(arguments, str):
        with suppress(ValueError, RecursionError):
            read = plain_json(json.loads(arguments))
            arguments = read if isinstance(read, dict) else arguments
    said = {"name": function["name"], "arguments": arguments}
    return {"id": str(call.get("id") or ""), "type": "function", "function": said}


def continuation(so_far: Sequence[Message], given: Sequence[Message]) -> tuple[Message, ...] | None:
    """Return messages that continue a conversation, None where they rewrite it.

    The policy's messages are recognised by text and calls: ids of calls and reasoning may have been left out.
    """
    length = len(so_far)
    if len(given) <= length or any(_same(a) != _same(b) for a, b in zip(so_far, given, strict=False)):
        return None
    return tuple(given[length:])


def _same(message: Message) -> Any:
    calls = [
        (call["function"]["name"], json.dumps(call["function"]["arguments"], sort_keys=True))
        for call in message.get("tool_calls", ())
    ]
    return message["role"], message["content"], calls, message.get("tool_call_id")
