"""Functions become tools, and arguments are held against their schemas."""

from typing import Any, Literal

import pytest

from covey_integrations.tools.tool import methods_of, problem_with_arguments, tool_of, tools_of

from ...support.tools import multiply, say


def test_a_function_becomes_a_schema() -> None:
    found = tool_of(multiply)
    assert found.name == "multiply"
    assert found.schema["function"]["description"] == "Multiply two numbers."
    assert found.parameters == {
        "type": "object",
        "properties": {
            "a": {"type": "integer", "description": "The first."},
            "b": {"type": "integer", "description": "The second."},
        },
        "required": ["a", "b"],
    }


def test_a_function_without_hints_or_docstring_is_refused_in_one_line() -> None:
    def no_hints(a):  # type: ignore[no-untyped-def] # noqa: ANN001, ANN202
        """
        Do.

        Args:
            a: Something.
        """

    def no_docstring(a: int) -> int:
        return a

    for function in (no_hints, no_docstring):
        with pytest.raises(ValueError, match=rf"tool {function.__name__} needs type hints and a docstring") as raised:
            tool_of(function)
        assert "\n" not in str(raised.value)


class Counter:
    def __init__(self) -> None:
        self.count = 0

    @property
    def trap(self) -> int:
        raise AssertionError("nobody asks for it")

    def reset(self, **row: Any) -> str | None:
        return None

    def get_reward(self) -> float:
        return float(self.count)

    def _private(self) -> None: ...

    def add(self, number: int) -> int:
        """
        Add to the count.

        Args:
            number: How much.
        """
        self.count += number
        return self.count


def test_public_methods_of_a_state_are_tools() -> None:
    (method,) = methods_of(Counter())
    assert method.__name__ == "add"
    add, product = sorted(tools_of([multiply], Counter()), key=lambda tool: tool.name)
    assert (add.is_stateful, product.is_stateful) == (True, False)
    assert list(add.parameters["properties"]) == ["number"]


def test_two_tools_of_one_name_are_refused() -> None:
    with pytest.raises(ValueError, match="two are called multiply"):
        tools_of([multiply, multiply])


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ({"word": "a"}, None),
        ({"word": "a", "times": 2.0, "how": "loud"}, None),
        ({"word": "a", "how": None}, None),
        ({}, "the argument word is missing"),
        ({"word": "a", "tims": 2}, "there is no argument tims; there is word, times, how"),
        ({"word": 3}, "word must be of type string, got 3"),
        ({"word": "a", "times": "2"}, "times must be of type integer, got '2'"),
        ({"word": "a", "times": True}, "times must be of type integer, got True"),
        ({"word": "a", "times": 2.5}, "times must be of type integer, got 2.5"),
        ({"word": "a", "how": "soft"}, "how must be one of loud, low, got 'soft'"),
        ({"word": None}, "word must be of type string, got None"),
    ],
)
def test_arguments_are_held_against_the_schema(arguments: dict[str, Any], problem: str | None) -> None:
    assert problem_with_arguments(tool_of(say).parameters, arguments) == problem


@pytest.mark.parametrize(("more", "is_taken"), [({}, True), (True, True), ({"type": "string"}, True), (False, False)])
def test_a_schema_says_whether_it_takes_arguments_that_it_does_not_name(more: Any, is_taken: bool) -> None:
    schema = {"properties": {"a": {"type": "integer"}}, "additionalProperties": more}
    assert (problem_with_arguments(schema, {"a": 1, "b": "x"}) is None) == is_taken


def test_arguments_are_held_against_what_is_inside() -> None:
    def book(days: list[int], how: Literal["sea", "air"], seat: int | str) -> None:
        """
        Book.

        Args:
            days: When.
            how: By what.
            seat: Where.
        """

    schema = tool_of(book).parameters
    good = {"days": [1, 2], "how": "sea", "seat": "4a"}
    assert problem_with_arguments(schema, good) is None
    assert problem_with_arguments(schema, good | {"days": [1, "x"]}) == "days[1] must be of type integer, got 'x'"
    assert problem_with_arguments(schema, good | {"how": "rail"}) == "how must be one of sea, air, got 'rail'"
    assert problem_with_arguments(schema, good | {"seat": []}) == "seat must be of type integer or string, got []"


def test_schemas_of_servers_say_more() -> None:
    point = {"type": "object", "properties": {"x": {"type": "number", "minimum": 0, "maximum": 9}}, "required": ["x"]}
    schema = {"properties": {"point": point, "kind": {"const": "a"}}, "additionalProperties": False}
    assert problem_with_arguments(schema, {"point": {"x": 3}}) is None
    assert problem_with_arguments(schema, {"point": {}}) == "in point: the argument x is missing"
    assert problem_with_arguments(schema, {"point": {"x": -1}}) == "in point: x must be at least 0, got -1"
    assert problem_with_arguments(schema, {"point": {"x": 10}}) == "in point: x must be at most 9, got 10"
    assert problem_with_arguments(schema, {"kind": "b"}) == "kind must be one of a, got 'b'"
    assert problem_with_arguments({"additionalProperties": True, "properties": {}}, {"z": 1}) is None
    assert problem_with_arguments({}, {"z": 1}) is None
