"""Samples of saved weights, by covey's engine, and scores of prompts.

Requests that wait for the same weights share batches; those of one prompt share its encoding. The answer to a
request depends on none of the others. All functions here are called by the one thread that computes.

Shapes: L positions of a micro-batch, K alternatives of each.
"""

import asyncio
import json
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

from covey.algorithm.softmax import log_softmax
from covey.engine.build import build_native
from covey.engine.settings import EngineConfig
from covey.policy.logprobs import logits_of
from covey.policy.policy import Policy, inference
from covey.run.checkpoints.checkpoint import load_weights
from covey.types import Completion, Sampling
from covey_serve.limits import ServiceLimits
from covey_serve.model.models import Bases, ModelShape
from covey_serve.model.training import logprobs_of, pack, rows_of, vocabulary_of
from covey_serve.store.checkpoints import check_folder, read_facts
from covey_serve.store.journal import Header
from covey_serve.wire.messages import (
    NO_LOGPROB,
    Alternatives,
    Array,
    PromptScores,
    SampleRequest,
    check_ids,
    read_sample,
    sample_result,
)

MAX_ENGINES = 2
"""Engines that are kept: each has the weights in the form that decoding reads."""


@dataclass(frozen=True, slots=True)
class SampledWeights:
    """Weights to sample from: the base's own, or of a folder."""

    name: str
    shape: ModelShape
    folder: Path | None


@dataclass(frozen=True, slots=True)
class Draw:
    """A sampling request with its place in the random numbers."""

    request: SampleRequest
    seed: int
    first: int
    """Sample index of its first sample."""


def read_draw(header: Header, body: bytes, policy: Policy, limits: ServiceLimits) -> Draw:
    """Read a sampling request. ValueError for one that cannot be computed."""
    request = read_sample(json.loads(body), limits, policy.max_length)
    check_ids("prompt", request.prompt_ids, vocabulary_of(policy))
    check_ids("target_prompt_logprobs", request.targets, vocabulary_of(policy))
    is_seeded = request.is_seeded
    return Draw(request, request.sampling.seed if is_seeded else header["seed"], 0 if is_seeded else header["first"])


class _Slot:
    """An engine with a place for weights of one shape."""

    def __init__(self, policy: Policy, kernels: str) -> None:
        self.policy = policy
        self.name = ""
        self.engine = build_native(policy, EngineConfig(), kernels, own_weights=True)


class Samplers:
    """Samples from any weights, through few engines."""

    def __init__(self, bases: Bases, limits: ServiceLimits) -> None:
        self._bases, self._limits = bases, limits
        self._slots: OrderedDict[ModelShape | str, _Slot] = OrderedDict()
        self._version = 0

    def run(self, weights: SampledWeights, requests: Sequence[tuple[Header, bytes]]) -> list[bytes | Exception]:
        """Answer requests for the same weights, each on its own."""
        slot = self._slot(weights)
        answers: list[bytes | Exception] = [b""] * len(requests)
        draws: dict[int, Draw] = {}
        for place, (header, body) in enumerate(requests):
            try:
                draws[place] = read_draw(header, body, slot.policy, self._limits)
            except Exception as error:
                answers[place] = error
        found = asyncio.run(self._run(slot, list(draws.values())))
        for place, answer in zip(draws, found, strict=True):
            answers[place] = answer
        return answers

    def _slot(self, weights: SampledWeights) -> _Slot:
        # A model that is trained whole has the shape of its base
        base, plain = weights.shape.base, weights.folder is None
        key: ModelShape | str = base if plain else weights.shape
        slot = self._slots.get(key)
        if slot is None:
            while len(self._slots) >= MAX_ENGINES:
                self._slots.popitem(last=False)
            policy = self._bases.policy(base) if plain else self._bases.make(weights.shape, seed=0)
            slot = self._slots[key] = _Slot(policy, self._bases.folders[base].kernels)
        self._slots.move_to_end(key)
        facts = None if weights.folder is None else read_facts(weights.folder)
        name = f"{weights.name} {facts and facts['time']}"  # a path may be overwritten
        if slot.name != name:
            slot.name = ""
            if weights.folder is not None:
                check_folder(weights.folder)
                load_weights(slot.policy, weights.folder)
            self._version += 1
            slot.engine.load_weights(self._version)
            slot.engine.refresh_weights()
            slot.name = name
        return slot

    async def _run(self, slot: _Slot, draws: Sequence[Draw]) -> list[bytes | Exception]:
        merged = _merge(draws)
        calls = [slot.engine.generate(prompt, n, sampling) for prompt, n, sampling, _ in merged]
        found = await asyncio.gather(*calls, return_exceptions=True)
        samples: dict[int, list[Completion] | BaseException] = {}
        for (_, _, _, places), result in zip(merged, found, strict=True):
            begin = 0
            for place in places:
                n = draws[place].request.num_samples
                samples[place] = result if isinstance(result, BaseException) else result[begin : begin + n]
                begin += n
        return [_answer(slot.policy, draw.request, samples[place]) for place, draw in enumerate(draws)]


Merged = tuple[tuple[int, ...], int, Sampling, list[int]]


def _merge(draws: Sequence[Draw]) -> list[Merged]:
    """Join requests that continue one another's sample indices: prompt, count, sampling, places."""
    merged: list[Merged] = []
    open_at: dict[tuple[tuple[int, ...], Sampling], int] = {}
    for place, draw in sorted(enumerate(draws), key=lambda found: found[1].first):
        request = draw.request
        sampling = replace(request.sampling, seed=draw.seed, first_sample=draw.first, stop_ids=request.stop_ids)
        found = open_at.pop((request.prompt_ids, sampling), None)
        if found is None:
            found = len(merged)
            merged.append((request.prompt_ids, request.num_samples, sampling, [place]))
        else:
            prompt, n, first, places = merged[found]
            merged[found] = prompt, n + request.num_samples, first, [*places, place]
        after = replace(sampling, first_sample=draw.first + request.num_samples)
        open_at[request.prompt_ids, after] = found
    return merged


def _answer(policy: Policy, request: SampleRequest, found: list[Completion] | BaseException) -> bytes | Exception:
    try:
        if isinstance(found, BaseException):
            raise found
        with inference(policy.model):
            topk = [_of_sample(policy, request, each) for each in found]
            return sample_result(found, topk, _of_prompt(policy, request))
    except Exception as error:
        return error


def _of_prompt(policy: Policy, request: SampleRequest) -> PromptScores:
    """Score the prompt as asked, at temperature 1."""
    if not request.prompt_logprobs and not request.topk_prompt and request.targets is None:
        return PromptScores()
    ids = np.array(request.prompt_ids)
    logprobs = np.full(len(ids), np.nan, np.float32)
    targets = request.targets
    if len(ids) > 1:
        logprobs[1:] = _scores(policy, ids, ids[1:])
        targets = None if targets is None else _scores(policy, ids, targets)
    logprobs[: len(ids) - (request.last_n or len(ids))] = np.nan
    topk = None
    if k := request.topk_prompt:
        topk = Alternatives(np.zeros((len(ids), k), np.int32), np.full((len(ids), k), NO_LOGPROB, np.float32))
        if len(ids) > 1:
            found = _most_likely(policy, ids[:-1], k)
            topk.ids[1:], topk.logprobs[1:] = found.ids, found.logprobs
    return PromptScores(logprobs if request.prompt_logprobs else None, topk, targets)


def _scores(policy: Policy, ids: Array, targets: Array) -> Array:
    """Score targets at all tokens of a text but its last."""
    (batch,) = pack([ids[:-1]], policy)
    return logprobs_of(policy, batch, torch.from_numpy(targets).to(policy.device)).float().cpu().numpy()


def _of_sample(policy: Policy, request: SampleRequest, completion: Completion) -> Alternatives | None:
    if not request.topk_sample:
        return None
    ids = np.array([*request.prompt_ids, *completion.token_ids])[:-1]
    found = _most_likely(policy, ids, request.topk_sample)
    begin = len(request.prompt_ids) - 1
    return Alternatives(found.ids[begin:], found.logprobs[begin:])


def _most_likely(policy: Policy, ids: Array, k: int) -> Alternatives:
    """Return the K most likely tokens after each of a text's."""
    (batch,) = pack([ids], policy)
    pieces = [torch.topk(log_softmax(logits_of(policy, rows)), k) for rows in rows_of(policy, batch)]
    values, tokens = (torch.cat(part).cpu().numpy() for part in zip(*pieces, strict=True))
    return Alternatives(tokens, values)
