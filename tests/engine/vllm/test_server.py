"""A vLLM server at an address, against a fake of its routes: what is asked, what comes back, what ends in one line."""

import asyncio
import json
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch

from covey.engine.base import EngineLost
from covey.engine.vllm.engine import Served, VLLMEngine
from covey.engine.vllm.server import ServedModel, Server, find_model, name_of_server, open_server
from covey.engine.vllm.wire import Sample
from covey.types import Sampling, Span

from .fake_wire import pushed

CHOICE = {
    "token_ids": [8, 2],
    "logprobs": {"content": [{"token_id": 8, "logprob": -0.5}, {"token_id": 2, "logprob": -0.25}]},
    "finish_reason": "stop",
    "weight_versions": [{"version": "run-6", "start": 0, "end": 1}, {"version": "run-7", "start": 1, "end": 2}],
}
GENERATED = {"choices": [CHOICE], "prompt_logprobs": [None, {"6": {"logprob": -1.5}}, {"7": {"logprob": -2.5}}]}
ANSWERS: dict[str, Any] = {
    "/v1/models": {"data": [{"id": "policy", "max_model_len": 512}]},
    "/inference/v1/generate": GENERATED,
    "/collective_rpc": {"results": [""]},
    "/weight_info": {"weight_version": "run-7"},
}


@dataclass
class Fake:
    """What a server answers, and what it was asked."""

    url: str = ""
    answers: dict[str, Any] = field(default_factory=lambda: dict(ANSWERS))
    fails: set[str] = field(default_factory=set)
    hangs: set[str] = field(default_factory=set)
    goes_on: threading.Event = field(default_factory=threading.Event)
    asked: list[tuple[str, str, Any, str | None]] = field(default_factory=list)
    """Method, path, body and key."""


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[Fake]:
    found = Fake()

    class Routes(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.answer("GET")

        def do_POST(self) -> None:
            self.answer("POST")

        def answer(self, method: str) -> None:
            length = int(self.headers.get("Content-Length") or 0)
            body = json.loads(self.rfile.read(length)) if length else None
            found.asked.append((method, self.path, body, self.headers.get("Authorization")))
            path = self.path.partition("?")[0]
            if path in found.hangs:
                found.goes_on.wait(30)
            text = b"boom\nat line 3" if path in found.fails else json.dumps(found.answers.get(path, {})).encode()
            self.send_response(500 if path in found.fails else 200)
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Routes)
    found.url = f"http://127.0.0.1:{server.server_address[1]}"
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    monkeypatch.setenv("VLLM_API_KEY", "secret")
    monkeypatch.setattr("covey.engine.vllm.wire.secrets.token_hex", lambda length: "run")
    yield found
    found.goes_on.set()
    server.shutdown()
    server.server_close()


def ask(fake: Fake, call: str, *arguments: Any) -> Any:
    async def run() -> Any:
        server = Server(f"{fake.url}/", "policy")
        try:
            return await getattr(server, call)(*arguments)
        finally:
            await server.close()

    return asyncio.run(run())


def test_a_completion_comes_back_with_the_version_of_each_token(fake: Fake) -> None:
    wanted = Sample((8, 2), (-0.5, -0.25), "stop", (Span(6, 0, 1), Span(7, 1, 2)))
    assert ask(fake, "sample", (5, 6), {"top_k": 3}) == wanted
    body = {"model": "policy", "token_ids": [5, 6], "sampling_params": {"top_k": 3}}
    assert fake.asked == [("POST", "/inference/v1/generate", body, "Bearer secret")]


def test_once_an_adapter_is_loaded_it_is_what_is_sampled_on(fake: Fake) -> None:
    async def run() -> None:
        server = Server(fake.url, "policy")
        await server.load_adapter(Path("/a"))
        await server.sample((5, 6), {})
        await server.close()

    asyncio.run(run())
    assert fake.asked[-1][2] == {"model": "covey", "token_ids": [5, 6], "sampling_params": {}}


def test_a_text_is_scored_from_its_second_token_on(fake: Fake) -> None:
    assert ask(fake, "score", (5, 6, 7)) == [-1.5, -2.5]


@pytest.mark.parametrize(
    ("call", "arguments", "asked"),
    [
        ("pause", ("keep",), ("POST", "/pause?mode=keep&clear_cache=true", None)),
        ("resume", (), ("POST", "/resume", None)),
        ("call", ("covey_load", "/x"), ("POST", "/collective_rpc", {"method": "covey_load", "args": ["/x"]})),
        ("label", (7,), ("POST", "/update_weight_version", {"new_version": "run-7"})),
        ("ping", (), ("GET", "/weight_info", None)),
        ("sleep", (2,), ("POST", "/sleep?level=2", None)),
        ("wake", ("kv_cache",), ("POST", "/wake_up?tags=kv_cache", None)),
        (
            "load_adapter",
            (Path("/a"),),
            ("POST", "/v1/load_lora_adapter", {"lora_name": "covey", "lora_path": "/a", "load_inplace": True}),
        ),
    ],
)
def test_each_call_goes_to_its_route(fake: Fake, call: str, arguments: tuple[Any, ...], asked: Any) -> None:
    ask(fake, call, *arguments)
    assert [found[:3] for found in fake.asked] == [asked]


def test_a_server_error_or_a_dead_server_is_a_lost_engine(fake: Fake) -> None:
    fake.fails.add("/resume")
    with pytest.raises(EngineLost, match=f"^the vLLM server at {fake.url} answered 500 to /resume: boom at line 3$"):
        ask(fake, "resume")
    with pytest.raises(EngineLost, match=r"^the vLLM server at http://127\.0\.0\.1:9 is gone: "):
        ask(Fake("http://127.0.0.1:9"), "resume")


def test_a_servers_model_is_found_or_one_line_says_how_to_start_one(fake: Fake) -> None:
    assert find_model(fake.url) == ServedModel("policy", 512)
    fake.answers["/v1/models"] = {"data": []}
    for url in (fake.url, "http://127.0.0.1:9", "nonsense"):
        with pytest.raises(
            ValueError, match=f"^engine.url={url} is no vLLM server .*; start one: VLLM_SERVER_DEV_MODE=1"
        ):
            find_model(url)


# ------------------------------------------------------------------------------------------------ faults


@pytest.fixture
def engine(fake: Fake) -> Iterator[VLLMEngine]:
    """The engine over the fake, which is on version 7."""
    served = Served(64, frozenset(), torch.float32, max_rows=4, name=name_of_server(fake.url), deadline=0.5)
    built = VLLMEngine(partial(open_server, fake.url, "policy"), served, version=7)
    yield built
    fake.goes_on.set()
    built.close()


def lost(engine: VLLMEngine) -> str:
    """The line that sampling ends with, in a few deadlines at most."""
    started = time.monotonic()
    with pytest.raises(EngineLost) as error:
        asyncio.run(engine.generate((5, 6), 1, Sampling(max_tokens=4)))
    assert time.monotonic() - started < 5
    return str(error.value)


def test_a_server_that_hangs_is_named_within_its_deadline(fake: Fake, engine: VLLMEngine) -> None:
    fake.hangs |= {"/inference/v1/generate", "/weight_info"}
    assert lost(engine) == f"the vLLM server at {fake.url} did not answer a ping within 0.5 s"


def test_a_server_that_hangs_in_a_push_is_named_within_its_deadline(fake: Fake, engine: VLLMEngine) -> None:
    fake.hangs.add("/collective_rpc")
    with pytest.raises(EngineLost, match=f"^the vLLM server at {fake.url} did not check weights within 0.5 s$"):
        asyncio.run(engine.update(pushed(8, 1.0, 2.0), "keep"))


def test_a_restarted_server_at_the_same_address_is_named(fake: Fake, engine: VLLMEngine) -> None:
    fake.answers["/inference/v1/generate"] = {
        "choices": [CHOICE | {"weight_versions": [{"version": "default", "start": 0, "end": 2}]}]
    }
    assert lost(engine) == (
        f"the vLLM server at {fake.url} answers from weights 'default', which this run did not push: it was started "
        "anew, or somebody else pushes to it too"
    )


def test_a_server_that_another_run_pushes_to_is_found_by_a_ping(fake: Fake, engine: VLLMEngine) -> None:
    fake.hangs.add("/inference/v1/generate")
    fake.answers["/weight_info"] = {"weight_version": "other-7"}
    assert "answers from weights 'other-7', which this run did not push" in lost(engine)


def test_a_server_that_says_the_new_version_and_is_on_old_weights_is_named(fake: Fake, engine: VLLMEngine) -> None:
    scored = {"prompt_logprobs": [None, {"2": {"logprob": -0.75}}, {"3": {"logprob": -0.75}}]}
    fake.answers["/inference/v1/generate"] = scored
    with pytest.raises(
        EngineLost, match=f"^after the push of version 8 the vLLM server at {fake.url} differs .* by up to 2.2 nats"
    ):
        asyncio.run(engine.update(pushed(8, 1.0, 2.0), "keep"))


OWN = [{"version": "run-7", "start": 0, "end": 2}]
NO_NUMBER = {"content": [{"logprob": -0.5}, {"logprob": None}]}
WRONG: list[tuple[Any, str]] = [
    ({"detail": "maintenance"}, "answers otherwise than vLLM 0.32 does (KeyError: 'choices')"),
    ({"token_ids": [8]}, "gave 1 tokens and 2 log-probs where at most 4 of each are due"),
    ({"token_ids": [], "logprobs": {"content": []}}, "gave 0 tokens and 0 log-probs where at most 4 of each are due"),
    ({"token_ids": [8] * 5, "logprobs": {"content": [{"logprob": -0.5}] * 5}}, "gave 5 tokens and 5 log-probs where"),
    ({"weight_versions": None}, "gave 2 tokens whose versions are []"),
    ({"weight_versions": [OWN[0] | {"end": 1}]}, "gave 2 tokens whose versions are [(7, 0, 1)]"),
    ({"finish_reason": "error"}, "ended a completion after 2 tokens by 'error'"),
    ({"logprobs": NO_NUMBER}, "answers otherwise than vLLM 0.32 does (TypeError: float() argument"),
    ({"weight_versions": [OWN[0] | {"version": 7}]}, "answers from weights 7, which this run did not push"),
]


@pytest.mark.parametrize(("answer", "line"), WRONG)
def test_an_answer_that_is_none_of_vllms_is_one_line(answer: Any, line: str, fake: Fake, engine: VLLMEngine) -> None:
    choices = {"choices": [CHOICE | {"weight_versions": OWN} | answer]}
    fake.answers["/inference/v1/generate"] = answer if "detail" in answer else choices
    assert lost(engine).startswith(f"the vLLM server at {fake.url} {line}")
