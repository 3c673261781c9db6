"""Calls of tools beside the right ones."""

from typing import Any

import pytest

from covey_graders.calls import same_calls

RAIN = {"name": "weather", "arguments": {"city": "Rome", "days": 3}}
SUN = {"name": "weather", "arguments": {"city": "Oslo", "days": 3}}


def call(**arguments: Any) -> dict[str, Any]:
    return {"name": "weather", "arguments": arguments}


@pytest.mark.parametrize(
    ("given", "is_right"),
    [
        ([call(days=3, city="Rome")], True),
        ([call(city=" Rome ", days=3.0)], True),
        ([call(city="Rome", days=3, unit=None)], True),
        ([], False),
        ([RAIN, RAIN], False),
        ([RAIN, SUN], False),
        ([call(city="Rome")], False),
        ([call(city="Rome", days=3, unit="C")], False),
        ([call(town="Rome", days=3)], False),
        ([call(city="Rome", days="3")], False),
        ([call(city="Rome", days=True)], False),
        ([call(city="rome", days=3)], False),
        ([call(city=["Rome"], days=3)], False),
        ([{"name": "Weather", "arguments": RAIN["arguments"]}], False),
        ([{"name": "weather", "arguments": '{"city": "Rome", "days": 3}'}], False),
        ([{"name": "weather"}], False),
    ],
)
def test_a_call_is_right_by_its_name_and_all_of_its_arguments(given: list[dict[str, Any]], is_right: bool) -> None:
    assert same_calls(given, [RAIN]) is is_right


def test_calls_beside_one_another_have_no_order() -> None:
    assert same_calls([SUN, RAIN], [RAIN, SUN])
    assert not same_calls([SUN, SUN], [RAIN, SUN])
    assert not same_calls([SUN], [RAIN, SUN])
    assert same_calls([], [])


def test_an_argument_of_its_default_may_be_absent() -> None:
    defaults = {"weather": {"days": 3}}
    assert same_calls([call(city="Rome")], [RAIN], defaults)
    assert same_calls([RAIN], [call(city="Rome")], defaults)
    assert not same_calls([call(city="Rome", days=4)], [RAIN], defaults)


def test_nested_arguments_are_compared_as_json() -> None:
    due = [call(place={"at": [1, {"x": None}], "is": False})]
    assert same_calls([call(place={"is": False, "at": [1.0, {"x": None}]})], due)
    assert not same_calls([call(place={"is": 0, "at": [1, {"x": None}]})], due)
    assert not same_calls([call(place={"is": False, "at": [1]})], due)


@pytest.mark.parametrize(
    ("arguments", "is_right"),
    [
        ({"city": "New York, NY", "days": 3}, True),
        ({"city": "new york ny"}, True),
        ({"city": "NYC", "days": 3, "unit": {"t": "C"}}, True),
        ({"city": "Rome"}, False),
        ({"days": 3}, False),
        ({"city": "NYC", "days": 4}, False),
        ({"city": "NYC", "days": ""}, False),
        ({"city": "NYC", "unit": {"t": "K"}}, False),
        ({"city": "NYC", "wind": 1}, False),
    ],
)
def test_a_right_call_may_list_what_each_argument_can_be(arguments: dict[str, Any], is_right: bool) -> None:
    choices = {"city": ["New York, NY", "NYC"], "days": [3, ""], "unit": [{"t": ["C", "F"]}, ""]}
    assert same_calls([call(**arguments)], [{"name": "weather", "any_of": choices}]) is is_right
