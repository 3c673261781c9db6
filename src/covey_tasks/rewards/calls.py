"""A reward for the right calls of tools, on rows of `environment=tools`."""

from collections.abc import Mapping, Sequence
from typing import Any

from covey.environments.reward_functions.texts import Completion
from covey.types import CutText
from covey_graders.calls import same_calls


def tool_calls(
    completions: Sequence[Completion],
    calls: Sequence[Sequence[Mapping[str, Any]] | None],
    tools: Sequence[Sequence[Mapping[str, Any]] | None],
    **columns: Any,
) -> list[float | None]:
    """Return 1 for the calls of the row, in any order.

    An answer in words is right for a row without calls.
    """
    asked = zip(completions, calls, tools, strict=True)
    return [None if due is None else float(_is_right(said, due, shown or ())) for said, due, shown in asked]


def _is_right(completion: Completion, due: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]) -> bool:
    message = completion[-1] if completion and not isinstance(completion, str) else {}
    functions, text = [tool["function"] for tool in tools], message.get("content") or ""
    made = [call["function"] for call in message.get("tool_calls") or ()]
    if message.get("unread_calls") or isinstance(text, CutText):
        return False
    if not due and not made:
        # A call in another form than the model's is no answer in words
        marks = [mark for function in functions for mark in (f'"{function["name"]}"', f"{function['name']}(")]
        return bool(text.strip()) and not any(mark in text for mark in marks)
    return same_calls(
        made, due, {function["name"]: _defaults(function.get("parameters", {})) for function in functions}
    )


def _defaults(parameters: Mapping[str, Any]) -> dict[str, Any]:
    properties = parameters.get("properties", {}).items()
    return {name: schema["default"] for name, schema in properties if "default" in schema}
