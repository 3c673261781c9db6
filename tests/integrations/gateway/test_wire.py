"""The OpenAI chat API, literally: what is read, what is written, what is refused."""

import copy
import json
from collections.abc import Iterator
from typing import Any

import pytest

from covey_integrations.gateway.messages import continuation, normal_messages
from covey_integrations.gateway.refused import Refused
from covey_integrations.gateway.tokens import generate_request
from covey_integrations.gateway.wire import (
    ChatRequest,
    RunSampling,
    Spoken,
    body_of,
    chat_request,
    completion_of,
    models,
    reward_of,
    stream_of,
)

from ...support.doors.agents import user

RUN = RunSampling(temperature=0.8, top_p=0.9, top_k=5, max_tokens=64)
CALL = {"id": "call00100", "type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
SPOKEN = Spoken({"role": "assistant", "content": "Hi"}, "stop", 1, (5, 6), (7, 2))
CALLING = Spoken({"role": "assistant", "content": "", "tool_calls": [CALL]}, "tool_calls", 2, (5,), (7,))


def asked(**more: Any) -> dict[str, Any]:
    return {"model": "m", "messages": [user("?")], **more}


def refused(**more: Any) -> Refused:
    with pytest.raises(Refused) as found:
        chat_request(asked(**more), RUN)
    return found.value


def test_an_answer_as_json() -> None:
    found = completion_of(SPOKEN, ChatRequest((), model="m"))
    assert isinstance(found.pop("created"), int)
    assert found == {
        "id": "chatcmpl-1",
        "object": "chat.completion",
        "model": "m",
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "Hi"},
                "finish_reason": "stop",
                "logprobs": None,
            }
        ],
        "usage": {"prompt_tokens": 2, "completion_tokens": 2, "total_tokens": 4},
    }


def test_an_answer_as_a_stream_ends_with_done() -> None:
    request = ChatRequest((), model="m", streams=True, with_usage=True, with_ids=True)
    events = stream_of(SPOKEN, request).decode().split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    chunks = [json.loads(event.removeprefix("data: ")) for event in events[:-2]]
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    assert [chunk["choices"] for chunk in chunks] == [
        [{"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}],
        [{"index": 0, "delta": {"content": "Hi"}, "finish_reason": None, "token_ids": [7, 2]}],
        [{"index": 0, "delta": {}, "finish_reason": "stop"}],
        [],
    ]
    assert chunks[0]["prompt_token_ids"] == [5, 6]
    assert chunks[3]["usage"]["total_tokens"] == 4


def test_calls_of_tools_are_written_with_arguments_as_text() -> None:
    written = {"id": "call00100", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    whole = completion_of(CALLING, ChatRequest(()))
    assert whole["choices"][0]["message"] == {"role": "assistant", "content": None, "tool_calls": [written]}
    events = stream_of(CALLING, ChatRequest(())).decode().split("\n\n")
    delta = json.loads(events[1].removeprefix("data: "))["choices"][0]["delta"]
    assert delta == {"content": None, "tool_calls": [{"index": 0, **written}]}


def test_the_models_say_how_long_a_conversation_may_be() -> None:
    assert models(RunSampling(max_model_len=512))["data"][0]["max_model_len"] == 512


def test_settings_that_are_the_runs_or_change_nothing_are_taken() -> None:
    same = {"temperature": 0.8, "top_p": 0.9, "top_k": 5, "min_p": 0, "n": 1, "presence_penalty": 0.0, "seed": None}
    neutral = {"logit_bias": {}, "tool_choice": "auto", "response_format": {"type": "text"}, "user": "me"}
    found = chat_request(asked(**same, **neutral, max_tokens=64, stop="\n", stream=True), RUN)
    assert [found.max_tokens, found.stop, found.streams] == [64, ("\n",), True]
    assert chat_request(asked(top_k=-1), RunSampling()).tools == ()


DIFFERENT: dict[str, Any] = {
    "temperature": 0.7,
    "top_p": 1,
    "top_k": 50,
    "min_p": 0.1,
    "n": 2,
    "logit_bias": {"7": -100},
    "logprobs": True,
    "presence_penalty": 0.5,
    "frequency_penalty": 1,
    "repetition_penalty": 1.1,
    "seed": 3,
    "max_tokens": 65,
    "max_completion_tokens": 65,
    "response_format": {"type": "json_object"},
    "tool_choice": "required",
    "parallel_tool_calls": False,
    "best_of": 2,
    "guided_json": {},
    "something_new": 1,
}


@pytest.mark.parametrize("name", DIFFERENT)
def test_settings_that_differ_are_refused_in_one_line_that_names_them(name: str) -> None:
    found = refused(**{name: DIFFERENT[name]})
    assert (found.status, found.param) == (400, name)
    assert name in found.message
    assert "\n" not in found.message
    assert found.body["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize("name", ["temperature", "top_p", "top_k", "seed", "max_tokens", "presence_penalty"])
def test_the_run_may_override_how_a_call_would_sample(name: str) -> None:
    found = chat_request(asked(**{name: DIFFERENT[name]}), RunSampling(max_tokens=64, overrides=True))
    assert found.max_tokens == (64 if name == "max_tokens" else None)


@pytest.mark.parametrize("name", ["n", "logit_bias", "response_format", "tool_choice", "logprobs", "something_new"])
def test_what_would_change_the_form_of_the_answer_is_refused_even_so(name: str) -> None:
    with pytest.raises(Refused, match=name):
        chat_request(asked(**{name: DIFFERENT[name]}), RunSampling(overrides=True))


BAD: list[dict[str, Any]] = [
    {"messages": None},
    {"messages": []},
    {"messages": ["hello"]},
    {"messages": [{"role": "king", "content": "?"}]},
    {"messages": [user("?"), {"role": "assistant", "content": "!"}]},
    {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
    {"messages": [{"role": "user", "content": 5}]},
    {"messages": [{"role": "assistant", "tool_calls": [{"id": "a"}]}, user("?")]},
    {"messages": [{"role": "assistant", "tool_calls": 5}, user("?")]},
    {"messages": [{"role": "assistant", "tool_calls": [5]}, user("?")]},
    {"messages": [{"role": []}]},
    {"messages": [user("?")] * 1001},
    {"tools": [{"type": "web_search"}]},
    {"tools": {}},
    {"stop": [""]},
    {"stop": 5},
    {"max_tokens": 0},
    {"max_tokens": True},
    {"stream": "yes"},
    {"temperature": True},
    {"n": True},
]


@pytest.mark.parametrize("more", BAD, ids=lambda more: json.dumps(more)[:50])
def test_what_cannot_be_read_is_refused(more: dict[str, Any]) -> None:
    assert refused(**more).status == 400


@pytest.mark.parametrize(
    "raw",
    [b"", b"[]", b"{", b"[" * 100_000, b"\xff\xfe", b'{"tools": ' + b"[" * 70 + b"]" * 70 + b"}", b'{"top_p": NaN}'],
)
def test_a_body_that_is_no_object_is_refused(raw: bytes) -> None:
    with pytest.raises(Refused) as found:
        body_of(raw)
    assert found.value.status == 400


WHOLE = {
    "model": "m",
    "messages": [
        {"role": "user", "content": [{"type": "text", "text": "?"}]},
        {"role": "assistant", "content": "", "tool_calls": [CALL], "reasoning_content": "so"},
        {"role": "tool", "content": "2", "tool_call_id": "call00100", "name": "add"},
    ],
    "tools": [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}],
    "stop": ["x"],
    "stream_options": {"include_usage": True},
    "max_tokens": 4,
    "token_ids": [1],
    "sampling_params": {"stop_token_ids": [1], "max_tokens": 4},
}
ANYTHING: list[Any] = [None, True, 5, -1, 10**30, 0.5, "", "x", [], [5], [[]], {}, {"a": 5}, {"function": 5}]


def others(value: Any) -> Iterator[Any]:
    """The value with something else in the place of each of its parts."""
    yield from ANYTHING
    parts = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for name, part in list(parts):
        for other in others(part):
            changed = copy.copy(value)
            changed[name] = other
            yield changed


def test_a_body_of_any_shape_is_taken_or_refused() -> None:
    said: list[int] = []
    chat = {name: part for name, part in WHOLE.items() if name not in ("token_ids", "sampling_params")}
    tokens = {name: WHOLE[name] for name in ("model", "token_ids", "sampling_params")}
    for reader, whole in ((chat_request, chat), (generate_request, tokens)):
        for body in others(whole):
            try:
                reader(body_of(json.dumps(body).encode()), RUN)
                said.append(200)
            except Refused as refused:
                said.append(refused.status)
    assert set(said) == {200, 400}
    assert min(said.count(200), said.count(400)) > 100


@pytest.mark.parametrize("value", [None, True, "1", float("nan"), float("inf"), 10**400, [1]])
def test_a_reward_is_a_finite_number(value: Any) -> None:
    with pytest.raises(Refused):
        reward_of({"reward": value})


def test_messages_are_brought_into_one_form() -> None:
    written = {**CALL, "function": {"name": "add", "arguments": '{"a": 1}'}}
    given = [
        {"role": "developer", "content": [{"type": "text", "text": "Be"}, {"type": "text", "text": "kind."}]},
        {"role": "assistant", "content": None, "tool_calls": [written], "refusal": None},
        {"role": "tool", "tool_call_id": "call00100", "content": "2"},
        {"role": "user", "content": "half \ud800", "name": "me"},
    ]
    body = body_of(json.dumps({"messages": given}).encode())
    assert normal_messages(body["messages"]) == (
        {"role": "system", "content": "Be\nkind."},
        {"role": "assistant", "content": "", "tool_calls": [CALL]},
        {"role": "tool", "content": "2", "name": "add", "tool_call_id": "call00100"},
        {"role": "user", "content": "half ?"},
    )


def test_messages_continue_or_rewrite_a_history() -> None:
    so_far = normal_messages([user("a"), {"role": "assistant", "content": "b"}, user("c")])
    assert continuation(so_far[:2], so_far) == (user("c"),)
    assert continuation(so_far[:2], so_far[:2]) is None
    assert continuation(so_far[:2], so_far[:1]) is None
    assert continuation(so_far[:2], (user("A"), *so_far[1:])) is None
    assert continuation(so_far[:2], (so_far[0], {"role": "assistant", "content": "B"}, so_far[2])) is None
    called = ({"role": "assistant", "content": "", "tool_calls": [CALL]},)
    other = {**CALL, "id": "x", "function": {"name": "add", "arguments": {"a": 1}}}
    assert continuation(called, ({**called[0], "tool_calls": [other]}, user("c"))) == (user("c"),)
    wrong = {**CALL, "function": {"name": "add", "arguments": {"a": 2}}}
    assert continuation(called, ({**called[0], "tool_calls": [wrong]}, user("c"))) is None


def test_the_result_of_another_call_does_not_continue_a_conversation() -> None:
    result, more = {"role": "tool", "content": "4", "tool_call_id": "a"}, {"role": "user", "content": "?"}
    assert continuation([result], [result, more]) == (more,)
    assert continuation([result], [result | {"tool_call_id": "b"}, more]) is None
    assert continuation([result], [result]) is None
