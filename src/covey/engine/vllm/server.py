"""A running vLLM server, over HTTP.

vLLM's key guards sampling alone: pausing and loading are open to every client of the port, so it belongs on the
loopback or a private network.
"""

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import httpx

from covey.engine.base import EngineLost, UpdateMode
from covey.engine.vllm.wire import ADAPTER, PROBE_PARAMS, RECEIVER, Labels, Sample
from covey.system.text.format import first_line
from covey.types import Span

KEY = "VLLM_API_KEY"
"""The environment variable that holds the server's key, for vLLM and here."""
CONNECT_SECONDS = 10.0
COMMAND = (
    "VLLM_SERVER_DEV_MODE=1 python -m vllm.entrypoints.openai.api_server --model FOLDER --enable-scale-out "
    f"--logprobs-mode processed_logprobs --worker-extension-cls {RECEIVER}"
)
"""Command that starts such a server, with covey installed beside vLLM."""


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A server's description of itself."""

    name: str
    max_length: int


def find_model(url: str) -> ServedModel:
    """Return the model at an address. ValueError where there is no vLLM."""
    try:
        answer = httpx.get(f"{url.rstrip('/')}/v1/models", headers=_headers(), timeout=CONNECT_SECONDS)
        answer.raise_for_status()
        (model, *_) = answer.json()["data"]
        return ServedModel(str(model["id"]), int(model["max_model_len"]))
    except (httpx.HTTPError, httpx.InvalidURL, LookupError, TypeError, ValueError) as error:
        raise ValueError(f"engine.url={url} is no vLLM server ({first_line(error)}); start one: {COMMAND}") from error


class Server:
    """See `Wire`."""

    def __init__(self, url: str, model: str) -> None:
        self._url = url.rstrip("/")
        self._model = model
        self._labels = Labels(name_of_server(url))
        # A completion takes as long as it takes: who calls has a deadline, and asks whether the server lives.
        timeout = httpx.Timeout(None, connect=CONNECT_SECONDS)
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=64)
        self._client = httpx.AsyncClient(base_url=self._url, headers=_headers(), timeout=timeout, limits=limits)

    async def sample(self, prompt_ids: Sequence[int], params: Mapping[str, Any]) -> Sample:
        answer = await self._generate(prompt_ids, params)
        with self._understood():
            (choice,) = answer["choices"]
            versions = choice["weight_versions"] or ()
            return Sample(
                token_ids=tuple(choice["token_ids"]),
                logprobs=tuple(float(token["logprob"]) for token in choice["logprobs"]["content"]),
                ended=choice["finish_reason"],
                spans=tuple(Span(self._labels.version(s["version"]), s["start"], s["end"]) for s in versions),
            )

    async def score(self, token_ids: Sequence[int]) -> list[float]:
        answer = await self._generate(token_ids, PROBE_PARAMS)
        with self._understood():
            found = answer["prompt_logprobs"]
            pairs = [(found[place], str(token_id)) for place, token_id in enumerate(token_ids) if place > 0]
            return [float(at[token_id]["logprob"]) for at, token_id in pairs]

    async def pause(self, how: UpdateMode) -> None:
        await self._post(f"/pause?mode={how}&clear_cache=true")

    async def resume(self) -> None:
        await self._post("/resume")

    async def sleep(self, level: int) -> None:
        await self._post(f"/sleep?level={level}")

    async def wake(self, tag: Literal["weights", "kv_cache"]) -> None:
        await self._post(f"/wake_up?tags={tag}")

    async def call(self, method: str, *arguments: Any) -> list[Any]:
        answer = await self._post("/collective_rpc", {"method": method, "args": list(arguments)})
        with self._understood():
            return list(answer.json()["results"])

    async def load_adapter(self, folder: Path) -> None:
        body = {"lora_name": ADAPTER, "lora_path": str(folder), "load_inplace": True}
        await self._post("/v1/load_lora_adapter", body)
        self._model = ADAPTER

    async def label(self, version: int) -> None:
        await self._post("/update_weight_version", {"new_version": self._labels.of(version)})

    async def ping(self) -> None:
        answer = await self._ask("GET", "/weight_info")
        with self._understood():
            self._labels.version(answer.json()["weight_version"])

    async def close(self) -> None:
        """Close the connections; the server keeps running."""
        await self._client.aclose()

    async def _generate(self, token_ids: Sequence[int], params: Mapping[str, Any]) -> dict[str, Any]:
        body = {"model": self._model, "token_ids": list(token_ids), "sampling_params": dict(params)}
        answer = await self._post("/inference/v1/generate", body)
        with self._understood():
            return dict(answer.json())

    @contextmanager
    def _understood(self) -> Iterator[None]:
        """Turn an answer that is not vLLM's into EngineLost."""
        try:
            yield
        except (LookupError, TypeError, ValueError) as error:
            said = f"{type(error).__name__}: {first_line(error)}"
            raise EngineLost(f"{name_of_server(self._url)} answers otherwise than vLLM 0.32 does ({said})") from None

    async def _post(self, path: str, body: Mapping[str, Any] | None = None) -> httpx.Response:
        return await self._ask("POST", path, body)

    async def _ask(
        self, method: Literal["GET", "POST"], path: str, body: Mapping[str, Any] | None = None
    ) -> httpx.Response:
        """Return the answer. EngineLost for an error or none."""
        try:
            answer = await self._client.request(method, path, json=body)
        except httpx.HTTPError as error:
            raise EngineLost(f"{name_of_server(self._url)} is gone: {first_line(error)}") from None
        if answer.is_error:
            said = " ".join(answer.text.split())[:200]
            raise EngineLost(f"{name_of_server(self._url)} answered {answer.status_code} to {path}: {said}")
        return answer


def name_of_server(url: str) -> str:
    """Return a server's name in errors."""
    return f"the vLLM server at {url.rstrip('/')}"


async def open_server(url: str, model: str) -> Server:
    """Return the connection to a server, opened by the first call."""
    return Server(url, model)


def _headers() -> dict[str, str]:
    key = os.environ.get(KEY)
    return {} if key is None else {"Authorization": f"Bearer {key}"}
