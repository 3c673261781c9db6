"""A teacher behind a server: the wires of vLLM and SGLang, answered by a model that computes them plainly."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
import torch

from covey.cluster.teacher_server import PROBE, TeacherServer
from covey.policy.attention.base import DENSE
from covey.policy.logprobs import Scoring
from covey.policy.models.nano import nano_tokenizer
from covey.policy.policy import Policy
from covey.types import RunStopped, Sampling
from tests.support.builders import logprobs, make, make_policy, random_groups


def judged(policy: Policy, tokens: list[int]) -> list[float]:
    """Return the log-prob of each token but the first."""
    ids = torch.tensor([tokens[:-1]])
    with torch.no_grad():
        all_TV = policy.logits(ids, torch.arange(ids.shape[1])[None], DENSE).log_softmax(-1)
    return [float(all_TV[place, token]) for place, token in enumerate(tokens[1:])]


class Handler(BaseHTTPRequestHandler):
    policy: Policy
    spoils = ""
    tokens: Any = None

    def do_GET(self) -> None:
        self.say({"data": [{"id": "teacher"}]})

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path.endswith("/tokenize"):
            assert asked["prompt"] == PROBE
            own = nano_tokenizer()(PROBE, add_special_tokens=False)["input_ids"]
            return self.say({"tokens": own if self.tokens is None else self.tokens})
        if self.spoils == "error":
            return self.say({"error": "no"}, 500)
        ids = asked["input_ids"] if self.path.endswith("/generate") else asked["prompt"]
        values = [None if self.spoils == "missing" else value for value in judged(self.policy, ids)]
        if self.path.endswith("/generate"):
            pairs = zip([None, *values], ids, strict=True)
            return self.say({"meta_info": {"input_token_logprobs": [[value, token, None] for value, token in pairs]}})
        told = [
            {str(token): {"logprob": value, "rank": 1}, "0": {"logprob": -9.0}} if token else {"0": {"logprob": value}}
            for token, value in zip(ids[1:], values, strict=True)
        ]
        return self.say({"choices": [{"prompt_logprobs": [None, *told][: len(ids) - (self.spoils == "short")]}]})

    def say(self, answer: Any, status: int = 200) -> None:
        body = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *arguments: Any) -> None:
        return


@contextmanager
def serving(policy: Policy, **changes: Any) -> Iterator[str]:
    kind = type("Told", (Handler,), {"policy": policy, **changes})
    server = ThreadingHTTPServer(("127.0.0.1", 0), kind)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        thread.join()


@pytest.mark.parametrize("end", ["", "/generate"])
@pytest.mark.parametrize("packing", ["shared", "padded"])
def test_a_server_judges_tokens_as_the_model_behind_it_does(end: str, packing: str) -> None:
    policy, groups = make_policy("llama"), random_groups()
    batch = make(groups, packing, 40)
    expected = logprobs(policy, batch.micro_batches, Scoring(Sampling(), 0)).double()
    with serving(policy) as url:
        teacher = TeacherServer(url + end, nano_tokenizer())
        asked = [teacher.logprobs(one, Scoring(Sampling(), 0), None) for one in batch.micro_batches]
        found = torch.cat([ask() for ask in asked])
    assert found.shape == expected.shape
    assert float((found - expected).abs().max()) < 1e-4


@pytest.mark.parametrize(
    ("spoils", "said"),
    [
        ("missing", "gave no log-prob of"),
        ("error", "gave no log-probs: HTTPStatusError"),
        ("short", "gave no log-probs"),
    ],
)
def test_a_server_that_fails_to_judge_ends_the_run_in_one_line(spoils: str, said: str) -> None:
    (batch,) = make(random_groups()).micro_batches
    with serving(make_policy("llama"), spoils=spoils) as url:
        ask = TeacherServer(url, nano_tokenizer()).logprobs(batch, Scoring(Sampling(), 0), None)
        with pytest.raises(RunStopped, match=said) as stopped:
            ask()
    assert "\n" not in str(stopped.value)


def test_a_server_of_other_tokens_is_refused_by_name() -> None:
    with serving(make_policy("llama"), tokens=[1, 2]) as url, pytest.raises(ValueError, match="the policy's tokens"):
        TeacherServer(url, nano_tokenizer())


def test_an_address_without_a_server_is_refused() -> None:
    with pytest.raises(ValueError, match="must be a server that lists its model"):
        TeacherServer("http://127.0.0.1:9", nano_tokenizer())
