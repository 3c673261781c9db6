"""A tool: a function with its schema, and checks of arguments."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

NOT_TOOLS = ("reset", "get_reward")
"""Public methods of an attempt's own object that the policy never sees."""


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that the policy may call.

    >>> tool_of(multiply).schema["function"]["parameters"]["required"]
    ['a', 'b']
    """

    name: str
    schema: Mapping[str, Any]
    """Schema for chat templates: {"type": "function", "function": {"name", "description", "parameters"}}."""
    function: Callable[..., Any]
    is_stateful: bool = False
    """Whether it belongs to one attempt: such tools are called one after the other, in the order of the calls."""

    @property
    def parameters(self) -> Mapping[str, Any]:
        return self.schema["function"].get("parameters") or {}


def tool_of(function: Callable[..., Any], is_stateful: bool = False) -> Tool:
    """Make a tool of a function with type hints and docstring. ValueError."""
    from transformers.utils.chat_template_utils import (
        DocstringParsingException,
        TypeHintParsingException,
        get_json_schema,
    )

    name = getattr(function, "__name__", type(function).__name__)
    try:
        schema = get_json_schema(function)
    except (DocstringParsingException, TypeHintParsingException, ValueError, TypeError, AttributeError) as error:
        said = " ".join(str(error).split())
        raise ValueError(f"tool {name} needs type hints and a docstring with an `Args:` section: {said}") from error
    return Tool(schema["function"]["name"], schema, function, is_stateful)


def schema_of(name: str, description: object, parameters: object) -> dict[str, Any]:
    """Return the schema of a server's tool for chat templates."""
    takes = parameters or {"type": "object", "properties": {}}
    return {"type": "function", "function": {"name": name, "description": str(description or ""), "parameters": takes}}


def tools_of(functions: Sequence[Callable[..., Any]], state: object | None = None) -> tuple[Tool, ...]:
    """Make tools of functions and of an object's methods. ValueError for duplicates."""
    tools = [*map(tool_of, functions), *(tool_of(method, is_stateful=True) for method in methods_of(state))]
    return named_once(tools)


def named_once(tools: Sequence[Tool]) -> tuple[Tool, ...]:
    """Return the tools. ValueError for duplicate names."""
    names = [tool.name for tool in tools]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ValueError(f"tools need names of their own, two are called {twice[0]}")
    return tuple(tools)


def methods_of(state: object | None) -> list[Callable[..., Any]]:
    """Return an object's public methods by name, without `reset` and `get_reward`."""
    if state is None:
        return []
    # On the class: on the object, properties would be evaluated.
    found = inspect.getmembers(type(state), predicate=inspect.isfunction)
    return [getattr(state, name) for name, _ in found if not name.startswith("_") and name not in NOT_TOOLS]


TYPES: Mapping[str, Callable[[Any], bool]] = {
    "string": lambda value: isinstance(value, str),
    "integer": lambda value: not isinstance(value, bool) and (isinstance(value, int) or _is_whole(value)),
    "number": lambda value: isinstance(value, int | float) and not isinstance(value, bool),
    "boolean": lambda value: isinstance(value, bool),
    "null": lambda value: value is None,
    "array": lambda value: isinstance(value, list | tuple),
    "object": lambda value: isinstance(value, Mapping),
}


def problem_with_arguments(schema: Mapping[str, Any], arguments: Mapping[str, Any]) -> str | None:
    """Return the error in a call's arguments, None without one.

    Keywords checked: type, nullable, enum, const, anyOf, oneOf, required, properties, additionalProperties, items,
    minimum and maximum. Others of JSON schema are the tool's own to check.

    >>> problem_with_arguments(tool_of(multiply).parameters, {"a": 6})
    'the argument b is missing'
    """
    properties = schema.get("properties", {})
    missing = [name for name in schema.get("required", ()) if name not in arguments]
    if missing:
        return f"the argument {missing[0]} is missing"
    unknown = [name for name in arguments if name not in properties]
    if unknown and schema.get("additionalProperties", "properties" not in schema) is False:  # {} allows all
        takes = f"there is {', '.join(properties)}" if properties else "it takes none"
        return f"there is no argument {unknown[0]}; {takes}"
    found = (_problem(properties[name], value, name) for name, value in arguments.items() if name in properties)
    return next((problem for problem in found if problem), None)


def _problem(schema: Any, value: Any, name: str) -> str | None:
    """Return the error in a value inside of the arguments."""
    if not isinstance(schema, Mapping) or (value is None and schema.get("nullable")):
        return None
    others = schema.get("anyOf") or schema.get("oneOf")
    if others and all(_problem(other, value, name) for other in others):
        return _problem(others[0], value, name)
    types = schema.get("type", ())
    types = [types] if isinstance(types, str) else list(types)
    if types and not any(kind not in TYPES or TYPES[kind](value) for kind in types):
        return f"{name} must be of type {' or '.join(types)}, got {_shown(value)}"
    choices = schema.get("enum") or ([schema["const"]] if "const" in schema else None)
    if choices and value not in choices:
        return f"{name} must be one of {', '.join(map(str, choices))}, got {_shown(value)}"
    return _problem_with_size(schema, value, name) or _problem_inside(schema, value, name)


def _problem_with_size(schema: Mapping[str, Any], value: Any, name: str) -> str | None:
    if not TYPES["number"](value):
        return None
    if "minimum" in schema and value < schema["minimum"]:
        return f"{name} must be at least {schema['minimum']}, got {_shown(value)}"
    if "maximum" in schema and value > schema["maximum"]:
        return f"{name} must be at most {schema['maximum']}, got {_shown(value)}"
    return None


def _problem_inside(schema: Mapping[str, Any], value: Any, name: str) -> str | None:
    if isinstance(value, list | tuple):
        items = schema.get("items")
        found = (_problem(items, item, f"{name}[{index}]") for index, item in enumerate(value))
        return next((problem for problem in found if problem), None)
    if isinstance(value, Mapping) and "properties" in schema:
        problem = problem_with_arguments(schema, value)
        return f"in {name}: {problem}" if problem else None
    return None


def _is_whole(value: Any) -> bool:
    return isinstance(value, float) and value.is_integer()


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
