"""Programs that bring tokens and take tokens, and sessions that a header names."""

import json
import urllib.error
import urllib.request
from collections.abc import Sequence
from typing import Any

import pytest

from covey.types import Group
from covey_integrations.gateway.refused import Refused
from covey_integrations.gateway.tokens import generate_request, generation_of
from covey_integrations.gateway.wire import RunSampling, Spoken

from ...support.doors.agents import RUN, TOKENIZER, encoded, play, said_by, send, user

END = TOKENIZER.eos_token_id


def generated(base_url: str, ids: Sequence[int], **parameters: Any) -> dict[str, Any]:
    """The choice of a call. Raises RuntimeError where it is refused."""
    body = {"model": "policy", "token_ids": list(ids), "sampling_params": parameters, "stream": False}
    status, said = send(f"{base_url.removesuffix('/v1')}/inference/v1/generate", body)
    found: dict[str, Any] = json.loads(said)
    if status != 200:
        raise RuntimeError(f"{status}: {found['error']['message']}")
    assert found["prompt_token_ids"] == list(ids)
    choice: dict[str, Any] = found["choices"][0]
    return choice


def begin(question: str = "How many?") -> list[int]:
    return encoded(f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n")


def failed(program: Any) -> str:
    (failure,) = play(program, lambda text: "Two")[0].failures
    return failure.reason


def one(found: tuple[Group, Any]) -> Any:
    (rollout,) = found[0].rollouts
    return rollout


# ---- what is asked and answered


def test_a_request_is_tokens_and_what_the_run_does_anyway() -> None:
    body = {"model": "m", "token_ids": [5, 7], "sampling_params": {"temperature": 1.0, "max_tokens": 9, "logprobs": 1}}
    found = generate_request(body | {"priority": 0, "features": None, "cache_salt": "x"}, RunSampling(max_tokens=9))
    assert (found.token_ids, found.max_tokens, found.messages) == ((5, 7), 9, ())


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"token_ids": []}, "token_ids must be a list of at least one token"),
        ({"token_ids": "text"}, "token_ids must be a list of tokens"),
        ({"token_ids": [1, -1]}, "token_ids must be a list of tokens"),
        ({"token_ids": [True]}, "token_ids must be a list of tokens"),
        ({"prompt": "text"}, "prompt is not supported"),
        ({"stream": True}, "stream must be left out"),
        ({"features": {"image": 1}}, "features must be left out"),
        ({"sampling_params": [1]}, "sampling_params must be an object"),
        ({"sampling_params": {"temperature": 0.5}}, "the run samples with sampling.temperature=1, got temperature=0.5"),
        ({"sampling_params": {"n": 4}}, "n must be left out or 1"),
        ({"sampling_params": {"max_tokens": 10}}, "a turn has sampling.max_tokens=9 at most"),
        ({"sampling_params": {"bad_words": ["x"]}}, "bad_words is not supported"),
        ({"sampling_params": {"stop_token_ids": [0.5]}}, "stop_token_ids must be a list of tokens"),
    ],
)
def test_what_the_run_does_not_do_is_refused(more: dict[str, Any], said: str) -> None:
    with pytest.raises(Refused, match=said):
        generate_request({"token_ids": [5], **more}, RunSampling(max_tokens=9))


def test_an_answer_is_tokens_with_the_log_prob_of_each() -> None:
    request = generate_request({"token_ids": [5]}, RunSampling())
    spoken = Spoken({"role": "assistant", "content": "Hi"}, "tool_calls", 3, (5,), (9, 2), (-0.5, -0.25))
    assert generation_of(spoken, request)["choices"] == [
        {
            "index": 0,
            "token_ids": [9, 2],
            "finish_reason": "stop",
            "logprobs": {
                "content": [{"token": "token_id:9", "logprob": -0.5}, {"token": "token_id:2", "logprob": -0.25}]
            },
        }
    ]


# ---- episodes


def test_continued_tokens_are_one_row_of_read_and_sampled_tokens() -> None:
    odd = encoded("T") + encoded("w") + encoded("o")  # no tokenizer writes it so

    def program(base_url: str, key: str, row: Any) -> float:
        first = generated(base_url, begin(), stop_token_ids=[END], logprobs=1)
        assert first["token_ids"] == [*odd, END]
        assert [entry["token"] for entry in first["logprobs"]["content"]] == [f"token_id:{i}" for i in (*odd, END)]
        more = encoded("\n<|im_start|>user\nSure?<|im_end|>\n<|im_start|>assistant\n")
        generated(base_url, [*begin(), *first["token_ids"], *more])
        return 0.5

    found = play(program, lambda text: odd)
    rollout, read = one(found), found[1]
    assert read[0] == tuple(begin())
    assert read[1][: len(read[0]) + len(odd) + 1] == (*begin(), *odd, END)
    assert (rollout.reward.value, rollout.branches, len(rollout.turns)) == (0.5, (), 2)
    assert sum(rollout.loss_mask) == 2 * (len(odd) + 1)


def test_tokens_that_rewrite_what_was_read_begin_a_branch() -> None:
    def program(base_url: str, key: str, row: Any) -> float:
        generated(base_url, begin())
        generated(base_url, begin("In short: how many?"))
        return 1.0

    found = play(program, lambda text: "Two")
    # Inputs are shifted: the last token sampled is predicted, and not read
    assert one(found).branches == (0, len(begin()) + len(encoded("Two")))
    assert found[1][1] == tuple(begin("In short: how many?"))


def test_reward_functions_judge_what_was_sampled() -> None:
    def program(base_url: str, key: str, row: Any) -> None:
        generated(base_url, begin())

    def length(completions: Any, **columns: Any) -> list[float]:
        return [float(len(messages[-1]["content"])) for messages in completions]

    assert one(play(program, lambda text: "Two", length)).reward.value == 3.0


def test_a_call_that_stops_where_the_run_does_not_fails_its_attempt() -> None:
    (two,) = encoded("w")

    def program(base_url: str, key: str, row: Any) -> float:
        generated(base_url, begin(), stop_token_ids=[two])
        return 1.0

    (failure,) = play(program, lambda text: [*encoded("T"), two, *encoded("o")])[0].failures
    assert f"stops at token {two}, at which the run does not" in failure.reason


def test_a_token_that_there_is_not_fails_its_attempt() -> None:
    def first(base_url: str, key: str, row: Any) -> float:
        generated(base_url, [len(TOKENIZER)])
        return 1.0

    def later(base_url: str, key: str, row: Any) -> float:
        generated(base_url, begin())
        generated(base_url, [len(TOKENIZER)])
        return 1.0

    said = f"token {len(TOKENIZER)} is none of the {len(TOKENIZER)} of the tokenizer"
    assert said in failed(first)
    assert said in failed(later)


def test_an_episode_is_led_by_messages_or_by_tokens() -> None:
    def program(base_url: str, key: str, row: Any) -> float:
        said_by(base_url, [user("How many?")])
        generated(base_url, begin())
        return 1.0

    assert "an episode is led by messages or by tokens, not by both" in failed(program)


# ---- sessions


def by_header(base_url: str, route: str, session: str, body: Any) -> tuple[int, Any]:
    """What a call at the address without a key is answered."""
    root = base_url.split("/e/")[0]
    headers = {"Content-Type": "application/json", "X-Session-ID": session}
    request = urllib.request.Request(f"{root}/{route}", json.dumps(body).encode(), headers)
    try:
        with urllib.request.urlopen(request, timeout=20) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.load(error)


def test_a_session_is_named_by_a_header_as_by_the_url() -> None:
    heard: list[Any] = []

    def program(base_url: str, key: str, row: Any) -> None:
        heard.append(by_header(base_url, "v1/chat/completions", key, {"messages": [user("How many?")]}))
        heard.append(by_header(base_url, "v1/chat/completions", "guessed", {"messages": [user("?")]}))
        heard.append(by_header(base_url, "reward", key, {"reward": 0.75}))

    assert one(play(program, lambda text: "Two")).reward.value == 0.75
    assert [status for status, _ in heard] == [200, 404, 200]
    assert heard[0][1]["choices"][0]["message"]["content"] == "Two"


def test_a_session_key_may_come_as_header_and_never_overrides_the_urls() -> None:
    def program(base_url: str, key: str, row: Any) -> float:
        status, found = by_header(base_url, "inference/v1/generate", key, {"token_ids": begin()})
        assert status == 200
        path = base_url.split("/", 3)[3].removesuffix("v1") + "inference/v1/generate"
        status, _ = by_header(
            base_url, path, "my own name", {"token_ids": [*begin(), *found["choices"][0]["token_ids"]]}
        )
        return float(status)

    assert one(play(program, lambda text: "Two", run=RUN)).reward.value == 200.0
