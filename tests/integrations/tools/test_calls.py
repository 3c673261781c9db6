"""Calls are read as the model writes them, and what cannot be read is said."""

import json
from dataclasses import replace
from typing import Any

import pytest

from covey_integrations.tools.calls import BadCall, Call, by_template, hermes, reader_for, reader_name

from ...support.models.chat_templates import qwen3
from ...support.tools import answer, call

RESPONSE = {
    "defaults": {"role": "assistant"},
    "start_anchor": "<|im_start|>assistant\n",
    "fields": {
        "reasoning_content": {"open": "<think>", "close_pattern": r"</think>\s*", "content": "text"},
        "tool_calls": {
            "open": "<tool_call>",
            "close_pattern": r"</tool_call>\s*",
            "repeats": True,
            "content": "json",
            "transform": {"type": "function", "function": "{content}"},
        },
        "content": {"close_pattern": r"<\|im_end\|>\s*", "content": "text"},
    },
}
"""A response template of the kind that Qwen3 has."""


def with_response_template() -> Any:
    tokenizer = qwen3()
    tokenizer.response_template = RESPONSE
    return tokenizer


def both(text: str) -> list[Any]:
    """What both readers make of an answer."""
    talk = ({"role": "user", "content": "?"},)
    return [hermes(answer(text, talk=talk)), by_template(with_response_template(), answer(text, talk=talk))]


def test_calls_come_in_order_with_the_words_around_them() -> None:
    for said in both(f"Let me see. {call('f', a=1)}\n{call('g')}"):
        assert said.calls == (Call("f", {"a": 1}), Call("g", {}))
        assert said.text == "Let me see."


def test_an_answer_without_calls_is_its_text() -> None:
    for said in both("It is 42."):
        assert (said.text, said.calls) == ("It is 42.", ())


def test_a_call_that_is_only_thought_of_is_none() -> None:
    for said in both(f"<think>\nI could {call('f')}\n</think>\n\nIt is 42."):
        assert (said.calls, said.text, said.reasoning) == ((), "It is 42.", f"I could {call('f')}")
    assert hermes(answer(f"<think>still {call('f')}")).calls == ()
    said = hermes(answer(f"<think>hm</think> So. <think>still {call('f')}"))
    assert (said.calls, said.text, said.reasoning) == ((), "So.", f"hm\nstill {call('f')}")
    assert hermes(answer("<think>\n42")).text == ""
    for said in both(f"<think>\nhm\n</think>\n\n{call('f')}"):
        assert said.calls == (Call("f", {}),)
        assert said.reasoning == "hm"


def test_a_thought_that_the_prompt_began_is_a_thought() -> None:
    tokenizer = with_response_template()
    begun = tokenizer("<|im_start|>user\n?<|im_end|>\n<|im_start|>assistant\n<think>\n")["input_ids"]
    given = replace(answer(f"I could {call('f')}\n</think>\n\nIt is 42."), prompt_ids=tuple(begun))
    said = by_template(tokenizer, given)
    assert (said.calls, said.text, said.reasoning) == ((), "It is 42.", f"I could {call('f')}")


def test_a_call_before_a_thought_or_with_its_tag_in_an_argument_is_meant() -> None:
    for said in (f"{call('f')}<think>still {call('g')}", f"<think>hm</think>{call('f')} <think>still {call('g')}"):
        assert hermes(answer(said)).calls == (Call("f", {}),)
    for tag in ("<think>", "</think>", "<think>a</think>", "a</think> b </think>"):
        meant = (Call("f", {"text": tag}),)
        assert hermes(answer(call("f", text=tag))).calls == meant
        assert hermes(answer(call("f", text=tag).removesuffix("</tool_call>"))).calls == meant
        said = hermes(answer(f"<think>or {call('g', text=tag)}?</think>So: {call('f', text=tag)}"))
        assert (said.calls, said.text, said.reasoning) == (
            meant,
            "So:",
            f"or {call('g', text=tag)}?".replace("<think>", ""),
        )
    assert hermes(answer(f"or <tool_call>{{</think>{call('f')}")).calls == (Call("f", {}),)


def test_tags_inside_of_an_argument_are_its_text() -> None:
    said = hermes(answer(call("write", text="</tool_call><tool_call>")))
    assert said.calls == (Call("write", {"text": "</tool_call><tool_call>"}),)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ('<tool_call>{"name": "f", "arguments": {}</tool_call>', "no valid JSON"),
        ('<tool_call>{"name": "f"} and more</tool_call>', "something follows"),
        ('<tool_call>{"name": "f", "argum', "not closed"),
        ("<tool_call></tool_call>", "no valid JSON"),
        ("<tool_call>[1]</tool_call>", 'must be {"name"'),
        ('<tool_call>{"name": 3}</tool_call>', 'must be {"name"'),
        ('<tool_call>{"name": "f", "arguments": [1]}</tool_call>', "must be an object"),
        ('<tool_call>{"name": "f", "arguments": "{"}</tool_call>', "must be an object"),
        ("<tool_call>" + "[" * 100_000, "not closed"),
        ('<tool_call>{"name": "f", "arguments": {"a": [NaN]}}</tool_call>', "no number in JSON"),
        ('<tool_call>{"name": "f", "arguments": "{\\"a\\": 1e999}"}</tool_call>', "no number in JSON"),
    ],
)
def test_what_is_wrong_with_a_call_is_said(text: str, problem: str) -> None:
    (bad,) = hermes(answer(text)).calls
    assert isinstance(bad, BadCall)
    assert problem in bad.problem
    (bad,) = by_template(with_response_template(), answer(text)).calls
    assert isinstance(bad, BadCall)
    assert "\n" not in bad.problem


@pytest.mark.parametrize("transform", [None, "{other}"])
def test_an_unparsable_response_is_reported_to_the_policy(transform: str | None) -> None:
    tokenizer, fields = with_response_template(), dict(RESPONSE["fields"])  # type: ignore[call-overload]
    fields["tool_calls"] = {**fields["tool_calls"], "transform": transform}
    tokenizer.response_template = {**RESPONSE, "fields": fields}
    (bad,) = by_template(tokenizer, answer("<tool_call>[1]</tool_call>")).calls
    assert isinstance(bad, BadCall)
    assert bad.problem.startswith("the call of a tool cannot be read: ")


def test_a_bad_call_leaves_the_others() -> None:
    calls = hermes(answer(f"<tool_call>{{</tool_call>{call('g')}")).calls
    assert isinstance(calls[0], BadCall)
    assert calls[1] == Call("g", {})


def test_arguments_may_be_json_in_text_and_a_missing_close_is_forgiven() -> None:
    assert hermes(answer('<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>')).calls == (
        Call("f", {"a": 1}),
    )
    assert hermes(answer('<tool_call>{"name": "f"}')).calls == (Call("f", {}),)


def test_no_turn_makes_more_calls_than_64() -> None:
    for said in both(call("f") * 64):
        assert said.calls == (Call("f", {}),) * 64
    for said in both(call("f") * 200):
        assert said.calls[:64] == (Call("f", {}),) * 64
        assert said.calls[64:] == (BadCall("a turn makes at most 64 calls, and the others were not made"),)


def test_halves_of_characters_are_no_arguments() -> None:
    for said in both('<tool_call>{"name": "f", "arguments": {"\\ud800": ["\\udfffx"]}}</tool_call>'):
        assert said.calls == (Call("f", {"?": ["?x"]}),)


def test_arguments_that_are_nested_too_deep_are_none() -> None:
    for reader in (hermes, reader_for(with_response_template())):
        (fine,) = reader(answer(call("f", a=json.loads("[" * 63 + "]" * 63))), ()).calls
        (deep,) = reader(answer(call("f", a=json.loads("[" * 64 + "]" * 64))), ()).calls
        assert isinstance(fine, Call)
        assert deep == BadCall("the arguments of the call are nested more than 64 deep", "f")


def test_the_tokenizer_says_who_reads() -> None:
    assert reader_for(qwen3()) is hermes
    assert reader_name(qwen3()) == "Hermes style (<tool_call>)"
    assert reader_name(with_response_template()) == "the tokenizer's response template"
    assert reader_for(with_response_template())(answer(call("f")), []).calls == (Call("f", {}),)


def test_arguments_are_typed_by_the_schema_where_the_template_holds_text() -> None:
    tokenizer = qwen3()
    tokenizer.response_template = {
        **RESPONSE,
        "fields": {
            **RESPONSE["fields"],  # type: ignore[dict-item]
            "tool_calls": {
                "open_pattern": r"<tool_call>\s*<function=(?P<name>[^\n>]+)>",
                "close_pattern": r"</tool_call>\s*",
                "repeats": True,
                "content": "xml-inline",
                "content_args": {
                    "tag_pattern": r"<parameter=(?P<key>[^>\n]+)>\s*(?P<value>.*?)\s*</parameter>",
                    "value_parser": {"name": "text"},
                },
                "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}},
            },
        },
    }
    text = "<tool_call>\n<function=f>\n<parameter=a>\n7\n</parameter>\n</function>\n</tool_call>"
    properties = {"a": {"type": "integer"}}
    schema = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": properties}}}
    assert by_template(tokenizer, answer(text), [schema]).calls == (Call("f", {"a": 7}),)
    schema["function"]["parameters"]["properties"] = {"a": {"type": "string"}}  # type: ignore[index]
    assert by_template(tokenizer, answer(text), [schema]).calls == (Call("f", {"a": "7"}),)


def test_a_message_of_an_answer_has_its_calls() -> None:
    message = hermes(answer(f"See: {call('f', a=1)}")).message
    assert message == {
        "role": "assistant",
        "content": "See:",
        "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": {"a": 1}}}],
    }
