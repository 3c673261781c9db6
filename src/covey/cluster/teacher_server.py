"""A teacher behind a server, by log-probs of prompts (vLLM, SGLang)."""

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import compress
from typing import Any

import httpx
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from covey.policy.logprobs import AllowedTokens, Scoring
from covey.types import MicroBatch, Rollout, RunStopped

LOGGER = logging.getLogger(__name__)

SETTING = "algorithm.teacher"
KEY = "COVEY_TEACHER_KEY"
"""Variable of the environment with the server's key."""
SECONDS = httpx.Timeout(600.0, connect=20.0)
AT_ONCE = 8
"""Requests at the same time."""
PROBE = "Grüße: 3 + 4 = 7, naïve\n\tdef f(x):  return {x: 'ß'}  # 日本 🙂"
"""Text that tokenizers split differently."""
GENERATE = "/generate"
"""End of the address of an SGLang server."""


def is_address(name: str | None) -> bool:
    """Return True for the address of a server."""
    return name is not None and name.startswith(("http://", "https://"))


class TeacherServer:
    """Asks a server for the log-probs of tokens that the policy sampled."""

    def __init__(self, url: str, tokenizer: PreTrainedTokenizerBase) -> None:
        """Ask for the server's model. ValueError if absent, or of other tokens."""
        self._url, self._is_sglang = url.rstrip("/"), url.rstrip("/").endswith(GENERATE)
        key = os.environ.get(KEY)
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        self._client = httpx.Client(headers=headers, timeout=SECONDS, transport=httpx.HTTPTransport(retries=3))
        self._pool = ThreadPoolExecutor(AT_ONCE)
        self._model = self._ask_model()
        self._check_tokens(tokenizer)

    def logprobs(self, batch: MicroBatch, scoring: Scoring, kept: AllowedTokens | None) -> Callable[[], Tensor]:
        """Request log-probs, (L,); return a function that waits for them."""
        waiting = [
            self._pool.submit(self._of_sequence, one, start, end)
            for one in batch.rollouts
            for start, end in one.sequences
        ]
        like = batch.sampler_logprob_L
        return lambda: like.new_tensor([value for future in waiting for value in future.result()])

    def _of_sequence(self, rollout: Rollout, start: int, end: int) -> list[float]:
        tokens = [*rollout.input_ids[start:end], rollout.target_ids[end - 1]]
        body = self._body(tokens)
        try:
            answer = self._client.post(self._url if self._is_sglang else f"{self._url}/v1/completions", json=body)
            answer.raise_for_status()
            found = _read_sglang(answer.json()) if self._is_sglang else _read_openai(answer.json(), tokens)
        except (httpx.HTTPError, LookupError, TypeError, ValueError) as error:
            told = " ".join(str(error).split())[:200]
            raise RunStopped(f"{SETTING}={self._url} gave no log-probs: {type(error).__name__}: {told}") from error
        if len(found) != len(tokens):
            raise RunStopped(f"{SETTING}={self._url} must judge {len(tokens)} tokens, it judged {len(found)}")
        values = list(compress(found[1:], rollout.loss_mask[start:end]))
        if missing := sum(value is None for value in values):
            raise RunStopped(f"{SETTING}={self._url} gave no log-prob of {missing} tokens")
        return [float(value) for value in values if value is not None]

    def _body(self, tokens: Sequence[int]) -> dict[str, Any]:
        if self._is_sglang:
            sampling = {"max_new_tokens": 1, "temperature": 0.0}
            return {
                "input_ids": list(tokens),
                "sampling_params": sampling,
                "return_logprob": True,
                "logprob_start_len": 0,
            }
        return {"model": self._model, "prompt": list(tokens), "max_tokens": 1, "temperature": 0.0, "prompt_logprobs": 1}

    def _ask_model(self) -> str:
        base = self._url.removesuffix(GENERATE)
        try:
            answer = self._client.get(f"{base}/v1/models")
            answer.raise_for_status()
            return str(answer.json()["data"][0]["id"])
        except (httpx.HTTPError, httpx.InvalidURL, LookupError, TypeError, ValueError) as error:
            told = " ".join(str(error).split())[:200]
            raise ValueError(f"{SETTING}={self._url} must be a server that lists its model, got {told}") from error

    def _check_tokens(self, tokenizer: PreTrainedTokenizerBase) -> None:
        """Refuse a server whose tokenizer numbers others, where it tells."""
        body = {"model": self._model, "prompt": PROBE, "add_special_tokens": False}
        answer = self._client.post(f"{self._url.removesuffix(GENERATE)}/tokenize", json=body)
        if answer.status_code in (404, 405):
            LOGGER.warning("%s does not tell its tokens: %s must number them as the policy does", self._url, SETTING)
            return
        its, own = answer.json()["tokens"], tokenizer(PROBE, add_special_tokens=False)["input_ids"]
        if its != own:
            raise ValueError(
                f"{SETTING}={self._url} must have the policy's tokens, its {self._model} splits a text into {len(its)} "
                f"others, the policy into {len(own)}"
            )


def _read_openai(answer: Mapping[str, Any], tokens: Sequence[int]) -> list[float | None]:
    """Read each token's log-prob from vLLM's answer, None of the first."""
    found = answer["choices"][0].get("prompt_logprobs", answer.get("prompt_logprobs"))
    return [None if of is None else of[str(token)]["logprob"] for of, token in zip(found, tokens, strict=True)]


def _read_sglang(answer: Mapping[str, Any]) -> list[float | None]:
    """Read each token's log-prob from SGLang's answer, None of the first."""
    return [entry[0] for entry in answer["meta_info"]["input_token_logprobs"]]
