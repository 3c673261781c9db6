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


Place = Mapping[int, Any]
"""Log-probs at one place of a text, by token."""
Told = list[tuple[int, float]]
"""Tokens with their log-probs."""


class TeacherServer:
    """Asks a server for the log-probs of tokens that the policy sampled."""

    def __init__(self, url: str, tokenizer: PreTrainedTokenizerBase, num_likeliest: int = 0) -> None:
        """Ask for the server's model, and for log-probs of a text.

        ValueError if absent, of other tokens, or without `num_likeliest` tokens at each place.
        """
        self._num_likeliest = num_likeliest
        self._url, self._is_sglang = url.rstrip("/"), url.rstrip("/").endswith(GENERATE)
        key = os.environ.get(KEY)
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        self._client = httpx.Client(headers=headers, timeout=SECONDS, transport=httpx.HTTPTransport(retries=3))
        self._pool = ThreadPoolExecutor(AT_ONCE)
        self._model = self._ask_model()
        self._check_tokens(tokenizer)
        try:
            self._told_of(tokenizer(PROBE, add_special_tokens=False)["input_ids"])
        except RunStopped as error:
            raise ValueError(str(error)) from error

    def logprobs(self, batch: MicroBatch, scoring: Scoring, kept: AllowedTokens | None) -> Callable[[], Tensor]:
        """Request log-probs, (L,); return a function that waits for them."""
        told = self.likeliest(batch)
        return lambda: told()[1][:, -1]

    def likeliest(self, batch: MicroBatch) -> Callable[[], tuple[Tensor, Tensor]]:
        """Request the likeliest tokens, and last the sampled one.

        Return a function that waits for their entries and log-probs, (L, K + 1) each.
        """
        sequences = [(one, start, end) for one in batch.rollouts for start, end in one.sequences]
        waiting = [self._pool.submit(self._of_sequence, *one) for one in sequences]
        like = batch.sampler_logprob_L

        def wait() -> tuple[Tensor, Tensor]:
            found = like.new_tensor([place for future in waiting for place in future.result()])
            return found[..., 0].long(), found[..., 1]

        return wait

    def _of_sequence(self, rollout: Rollout, start: int, end: int) -> list[Told]:
        told = self._told_of([*rollout.input_ids[start:end], rollout.target_ids[end - 1]])
        return list(compress(told, rollout.loss_mask[start:end]))

    def _told_of(self, tokens: Sequence[int]) -> list[Told]:
        """Return the told tokens at each place but the first. RunStopped."""
        body, k = self._body(tokens), self._num_likeliest
        try:
            answer = self._client.post(self._url if self._is_sglang else f"{self._url}/v1/completions", json=body)
            answer.raise_for_status()
            found = _read_sglang(answer.json()) if self._is_sglang else _read_openai(answer.json())
            told = [_entries(place, token, k) for place, token in zip(found[1:], tokens[1:], strict=True)]
        except (httpx.HTTPError, LookupError, TypeError, ValueError) as error:
            said = f"{error} {error.response.text if isinstance(error, httpx.HTTPStatusError) else ''}"
            said = " ".join(said.split())[:400]
            raise RunStopped(f"{SETTING}={self._url} gave no log-probs: {type(error).__name__}: {said}") from error
        return told

    def _body(self, tokens: Sequence[int]) -> dict[str, Any]:
        if self._is_sglang:
            sampling = {"max_new_tokens": 1, "temperature": 0.0}
            asked = {"return_logprob": True, "logprob_start_len": 0, "top_logprobs_num": self._num_likeliest}
            return {"input_ids": list(tokens), "sampling_params": sampling, **asked}
        asked = {"max_tokens": 1, "prompt_logprobs": max(1, self._num_likeliest)}
        return {"model": self._model, "prompt": list(tokens), "temperature": 0.0, **asked}

    def _ask_model(self) -> str:
        base = self._url.removesuffix(GENERATE)
        try:
            answer = self._client.get(f"{base}/v1/models").raise_for_status()
            return str(answer.json()["data"][0]["id"])
        except (httpx.HTTPError, httpx.InvalidURL, LookupError, TypeError, ValueError) as error:
            told = " ".join(str(error).split())[:200]
            raise ValueError(f"{SETTING}={self._url} must be a server that lists its model, got {told}") from error

    def _check_tokens(self, tokenizer: PreTrainedTokenizerBase) -> None:
        """Refuse a server whose tokenizer numbers others, where it tells."""
        body = {"model": self._model, "prompt": PROBE, "add_special_tokens": False}
        own = tokenizer(PROBE, add_special_tokens=False)["input_ids"]
        try:
            answer = self._client.post(f"{self._url.removesuffix(GENERATE)}/tokenize", json=body)
            if answer.status_code in (404, 405):
                LOGGER.warning("%s tells no tokens: %s must number them as the policy does", self._url, SETTING)
                return
            its = list(answer.raise_for_status().json()["tokens"])
        except (httpx.HTTPError, LookupError, TypeError, ValueError) as error:
            told = " ".join(str(error).split())[:200]
            raise ValueError(f"{SETTING}={self._url} must tell its tokens or that it does not, got {told}") from error
        if its != own:
            raise ValueError(
                f"{SETTING}={self._url} must have the policy's tokens, its {self._model} splits a text into {len(its)} "
                f"others, the policy into {len(own)}"
            )


def _entries(place: Place, token: int, k: int) -> Told:
    """Return the k likeliest tokens of a place, and last its own."""
    if place.get(token) is None:
        raise ValueError(f"it tells none of token {token}")
    best = sorted(((name, float(value)) for name, value in place.items()), key=lambda one: -one[1])[:k]
    if len(best) < k:
        raise ValueError(f"{k} tokens at each place were asked for, it tells {len(best)}")
    return [*best, (token, float(place[token]))]


def _read_openai(answer: Mapping[str, Any]) -> list[Place]:
    """Read each place from vLLM's answer, nothing of the first."""
    found = answer["choices"][0].get("prompt_logprobs", answer.get("prompt_logprobs"))
    return [{int(name): value["logprob"] for name, value in (of or {}).items()} for of in found]


def _read_sglang(answer: Mapping[str, Any]) -> list[Place]:
    """Read each place from SGLang's answer, nothing of the first."""
    told = answer["meta_info"]
    own = told["input_token_logprobs"]
    others = told.get("input_top_logprobs") or [None] * len(own)
    return [{name: value for value, name, *_ in [*(best or ()), one]} for best, one in zip(others, own, strict=True)]
