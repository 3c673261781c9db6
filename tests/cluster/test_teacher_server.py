"""A teacher behind a server: the wires of vLLM and SGLang, answered by a model that computes them plainly."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
import torch
from torch import Tensor

from covey.cluster.teacher_server import PROBE, TeacherServer
from covey.policy.attention.base import DENSE
from covey.policy.logprobs import Scoring
from covey.policy.models.nano import nano_tokenizer
from covey.policy.policy import Policy
from covey.policy.reference import Reference
from covey.policy.teacher import Teacher
from covey.types import RunStopped, Sampling
from tests.support.builders import logprobs, make, make_policy, random_groups
from tests.trainer.test_teacher import hinted, moved, rewarded, settings_of, trainer_of

PROBED = nano_tokenizer()(PROBE, add_special_tokens=False)["input_ids"]
"""Tokens that the first question is about."""


def judged(policy: Policy, tokens: list[int]) -> Tensor:
    """Return the log-probs at the places of all tokens but the first, (T - 1, V)."""
    if tokens == PROBED:  # more entries than the small model has
        return torch.zeros(len(tokens) - 1, max(tokens) + 1).log_softmax(-1)
    ids = torch.tensor([tokens[:-1]])
    with torch.no_grad():
        return policy.logits(ids, torch.arange(ids.shape[1])[None], DENSE).log_softmax(-1)


class Handler(BaseHTTPRequestHandler):
    policy: Policy
    spoils = ""
    tokens: Any = None

    def do_GET(self) -> None:
        self.say({"data": [{"id": "teacher"}]}, 200 if self.path == "/v1/models" else 404)

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path.endswith("/tokenize"):
            assert asked["prompt"] == PROBE
            status = 401 if self.spoils == "tokens" else 200
            return self.say({"tokens": PROBED if self.tokens is None else self.tokens}, status)
        ids = asked["input_ids"] if self.path.endswith("/generate") else asked["prompt"]
        if asked.get("prompt_logprobs", 0) > 20:
            return self.say({"error": "at most 20"}, 400)
        spoils = "" if ids == PROBED else self.spoils
        if spoils == "error":
            return self.say({"error": "no"}, 500)
        all_TV = judged(self.policy, ids)
        values = [
            None if spoils == "missing" else float(of_V[token]) for of_V, token in zip(all_TV, ids[1:], strict=True)
        ]
        if self.path.endswith("/generate"):
            pairs = zip([None, *values], ids, strict=True)
            told: dict[str, Any] = {"input_token_logprobs": [[value, token, None] for value, token in pairs]}
            if k := asked["top_logprobs_num"]:
                best = [[[float(of_V[one]), int(one), None] for one in of_V.topk(k).indices] for of_V in all_TV]
                told["input_top_logprobs"] = [None, *best]
            return self.say({"meta_info": told})
        listed = []
        for of_V, token, value in zip(all_TV, ids[1:], values, strict=True):
            best = {int(one): float(of_V[one]) for one in of_V.topk(asked["prompt_logprobs"]).indices}
            listed.append({str(one): {"logprob": own} for one, own in ({token: value} | best | {token: value}).items()})
        return self.say({"choices": [{"prompt_logprobs": [None, *listed][: len(ids) - (spoils == "short")]}]})

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


@pytest.mark.parametrize("end", ["/", "/generate/"])
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
        ("missing", "gave no log-probs: ValueError: it tells none of token"),
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


@pytest.mark.parametrize("changes", [{"spoils": "tokens"}, {"tokens": 3}])
def test_a_server_whose_tokens_cannot_be_read_is_refused_in_one_line(changes: dict[str, Any]) -> None:
    with serving(make_policy("llama"), **changes) as url, pytest.raises(ValueError, match="must tell its") as told:
        TeacherServer(url, nano_tokenizer())
    assert "\n" not in str(told.value)


def test_an_address_without_a_server_is_refused() -> None:
    with pytest.raises(ValueError, match="must be a server that lists its model"):
        TeacherServer("http://127.0.0.1:9", nano_tokenizer())


def test_more_likeliest_tokens_than_a_server_tells_are_refused_before_the_first_step() -> None:
    with serving(make_policy("llama")) as url, pytest.raises(ValueError, match=r"HTTPStatusError.*at most 20"):
        TeacherServer(url, nano_tokenizer(), 21)


@pytest.mark.parametrize("end", ["", "/generate"])
@pytest.mark.parametrize(
    "options",
    [{"beta": 0.0}, {"beta": 1.0}, {"beta": 0.5, "tail": "renormalise"}, {"beta": 0.0, "tail": "none"}],
)
@pytest.mark.parametrize("shown", [True, False])
def test_an_update_by_a_servers_likeliest_tokens_is_that_of_the_model_behind_it(
    shown: bool, options: dict[str, Any], end: str
) -> None:
    chosen = settings_of(teacher_term="divergence", teacher_options={"top_k": 5, "support": "teacher", **options},
                         teacher_temperature=1.0)  # fmt: skip
    teacher, found = make_policy("llama", torch.float64, seed=8), {}
    with serving(teacher) as url:
        server = TeacherServer(url + end, nano_tokenizer(), 5)
        for name, model in {"here": Reference(teacher, None, is_own=True), "server": server}.items():
            judge = Teacher(model, temperature=1.0)
            trainer = trainer_of(make_policy("llama", torch.float64), judge, chosen, hinted if shown else None, chunk=5)
            found[name] = moved(trainer, rewarded(), "shared", 30)
    gaps = {name: float((found["server"][name] - here).abs().max()) for name, here in found["here"].items()}
    assert max(float(here.abs().max()) for here in found["here"].values()) > 1e-3
    assert max(gaps.values()) < 1e-9, gaps
