"""A service in this process, and what a client sends it."""

import asyncio
import itertools
import json
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np

from covey.policy.settings import ModelConfig
from covey_serve.limits import ServiceLimits
from covey_serve.model.models import Bases
from covey_serve.service import Service
from covey_serve.web.routes import answer
from covey_serve.web.server import HttpCall
from covey_serve.wire.protobuf import decode, encode

NAME = "Qwen/Qwen3-8B"
KEY = "tml-test"
ADAM = {"learning_rate": 1e-2, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.0, "grad_clip_norm": 0.0}
SIZES = {"nano_hidden_size": 32, "nano_num_layers": 2, "nano_num_heads": 2}


def bases(**settings: Any) -> Bases:
    full = settings.pop("full", False)
    return Bases({NAME: ModelConfig(name="nano", **SIZES | settings)}, full=full)


def datum(ids: Sequence[int], **inputs: Sequence[float]) -> dict[str, Any]:
    """Return a datum of the wire that predicts each next token."""
    tensors = {"target_tokens": np.array(ids[1:], "<i8")}
    tensors |= {name: np.array(values, "<f4") for name, values in inputs.items()}
    dtype = {"i": 2, "f": 1}
    return {
        "model_input": [{"encoded_text": {"tokens": np.array(ids[:-1], "<i4").tobytes()}}],
        "loss_fn_inputs": [
            {"key": name, "value": {"dense": found.tobytes(), "dtype": dtype[found.dtype.kind], "shape": found.shape}}
            for name, found in tensors.items()
        ],
    }


def cross_entropy(ids: Sequence[int]) -> dict[str, Any]:
    return datum(ids, weights=[1.0] * (len(ids) - 1))


def training_body(
    model: str, seq: int, data: Sequence[Mapping[str, Any]], loss: str = "cross_entropy", **options: Any
) -> bytes:
    forward_only = options.pop("forward_only", False)
    config = [{"key": name, "value": {"number": value}} for name, value in options.items()]
    message = {"model_id": model, "seq_id": seq, "data": data, "loss_fn": loss, "config": config}
    return encode("ForwardBackwardRequest", {**message, "forward_only": forward_only})


def read_output(raw: bytes) -> tuple[dict[str, float], list[Any]]:
    """Return metrics and log-probs of each datum."""
    message = decode("ForwardBackwardOutput", raw)
    (record,) = message["records"]
    tensor = record["fields"][0]["value"]
    offsets = np.frombuffer(tensor["offsets"], "<i8")
    values = [np.frombuffer(tensor["data"][a:b], "<f4") for a, b in itertools.pairwise(offsets)]
    return {each["key"]: each["value"] for each in message["metrics"]}, values


class Client:
    """Calls a service as the official client does."""

    def __init__(self, service: Service) -> None:
        self.service = service
        self.seq = 0
        self.session = ""

    async def call(self, path: str, body: Any = None, method: str = "POST") -> Any:
        """Return the answer's JSON. RequestRefused as the service raises it."""
        raw = body if isinstance(body, bytes) else b"" if body is None else json.dumps(body).encode()
        path, _, query = path.partition("?")
        found = await answer(self.service, HttpCall(method, f"/api/v1/{path}", query, {}, raw))
        return json.loads(found.body) if found.body else None

    async def result(self, promise: str) -> Any:
        """Return a promise's result: metrics and log-probs, bytes of samples, or JSON."""
        while (found := await self.service.retrieve(promise)).kind == "application/json":
            content = json.loads(found.body)
            if content.get("type") != "try_again":
                return content
        return found.body if ":sample:" in promise else read_output(found.body)

    async def begin(self) -> None:
        self.session = (await self.call("create_session", {"sdk_version": "0.38.0", "tags": []}))["session_id"]

    async def make(self, place: int = 0, rank: int = 4, **lora: Any) -> str:
        body = {"session_id": self.session, "model_seq_id": place, "base_model": NAME}
        made = await self.call("create_model", {**body, "lora_config": {"rank": rank, **lora}})
        return str((await self.result(made["request_id"]))["model_id"])

    async def train(
        self, model: str, data: Sequence[Mapping[str, Any]], loss: str = "cross_entropy", **more: Any
    ) -> Any:
        self.seq += 1
        promise = await self.call("forward_backward", training_body(model, self.seq, data, loss, **more))
        return await self.result(promise["request_id"])

    async def ordered(self, route: str, model: str, **body: Any) -> Any:
        """Send a request of a model's sequence; return its result."""
        self.seq += 1
        promise = await self.call(route, {"model_id": model, "seq_id": self.seq, **body})
        return await self.result(promise["request_id"])

    async def step(self, model: str, **adam: float) -> Any:
        return await self.ordered("optim_step", model, adam_params=ADAM | adam)

    async def sampler(self, model: str, place: int = 0) -> str:
        found = await self.ordered("save_weights_for_sampler", model, sampling_session_seq_id=place)
        return str(found["sampling_session_id"])

    async def sample(self, sampler: str, seq: int, ids: Sequence[int], **body: Any) -> Any:
        params = {"max_tokens": body.pop("max_tokens", 5), **body.pop("params", {})}
        prompt = {"chunks": [{"type": "encoded_text", "tokens": list(ids)}]}
        told = {"sampling_session_id": sampler, "seq_id": seq, "prompt": prompt, "sampling_params": params, **body}
        found = await self.call("asample", told)
        raw = await self.result(found["request_id"])
        return decode("SampleResponse", raw) if isinstance(raw, bytes) else raw


@asynccontextmanager
async def serving(root: Path, of: Bases | None = None, limits: ServiceLimits | None = None) -> AsyncIterator[Client]:
    """Run a service on a folder, and end it as a kill would: nothing is saved at the end."""
    service = Service(root, of or bases(), KEY, limits)
    work = asyncio.create_task(service.work())
    try:
        client = Client(service)
        yield client
    finally:
        work.cancel()
        with suppress(asyncio.CancelledError):
            await work
        service.close()
