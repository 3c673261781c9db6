"""Check tools before a run: reading of calls, schemas, answers."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from covey.environments.base import naming
from covey.environments.episode import Answer, maybe_await
from covey.types import Prompt
from covey_integrations.tools.calling import Caller, ToolServerLost
from covey_integrations.tools.calls import Call, plain_json
from covey_integrations.tools.environment import ToolEnvironment
from covey_integrations.tools.episode import Talk
from covey_integrations.tools.styles import turn_of

EXAMPLES: Mapping[str, Any] = {
    "string": "a",
    "integer": 1,
    "number": 1.0,
    "boolean": True,
    "null": None,
    "array": [],
    "object": {},
}


@dataclass(frozen=True, slots=True)
class ToolFacts:
    """The facts about a prompt's tools.

    >>> ToolFacts("Hermes style (<tool_call>)", {"multiply": "1", "search": "ToolServerLost: ..."}, ("search",))
    """

    read_by: str
    answers: Mapping[str, str]
    """Answer of each tool to a call with made-up arguments of the right types; error messages count as answers."""
    silent: tuple[str, ...]
    """Tools that did not answer in time, or whose system is gone."""


async def check_tools(environment: ToolEnvironment, prompt: Prompt, tokenizer: Any) -> ToolFacts:
    """Call every tool once, and read a call in the template's form.

    ValueError where a tool has no sound schema or its call is not read, EnvironmentFault where no attempt can begin.
    """
    state = environment.state(prompt, 0)
    tools = environment.tools(prompt, state)
    with naming(environment, "opening"):
        await maybe_await(environment.opening(prompt, state))
    caller = Caller({tool.name: tool for tool in tools}, environment.tool_timeout)
    answers: dict[str, str] = {}
    silent: list[str] = []
    for tool in tools:
        every = example({**tool.parameters, "required": list(tool.parameters.get("properties", {}))})
        given = plain_json({name: value for name, value in every.items() if value is not None})
        turn = turn_of(tokenizer, tool.schema, [given])
        said = environment.rules.read(Answer(turn, (), "stop", 1, ()), [tool.schema]).calls
        if turn and said != (Call(tool.name, given),):
            raise ValueError(
                f"a call of the tool {tool.name} is not read as the chat template writes it: {turn!r:.160}"
            )
        try:
            answers[tool.name] = (await caller.answer(Call(tool.name, example(tool.parameters)))).content
        except ToolServerLost as error:
            answers[tool.name] = f"{type(error).__name__}: {error}"
            silent.append(tool.name)
    await maybe_await(environment.release(prompt, Talk(state, is_broken=bool(silent))))
    return ToolFacts(environment.facts()["tool_calls_read_by"], answers, tuple(silent))


def example(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Make arguments that obey a schema, as small as possible.

    >>> example({"properties": {"a": {"type": "integer"}}, "required": ["a"]})
    {'a': 1}
    """
    properties = schema.get("properties", {})
    return {name: _value(properties.get(name, {})) for name in schema.get("required", ())}


def _value(schema: Any) -> Any:
    if not isinstance(schema, Mapping):
        return "a"
    if "default" in schema:
        return schema["default"]
    if schema.get("enum"):
        return schema["enum"][0]
    others = schema.get("anyOf") or schema.get("oneOf")
    if others:
        return _value(others[0])
    kind = schema.get("type", "string")
    kind = kind if isinstance(kind, str) else kind[0]
    if kind == "object":
        return example(schema)
    if kind in ("integer", "number") and "minimum" in schema:
        return schema["minimum"]
    return EXAMPLES.get(kind, "a")
