"""Requests and results of training and sampling on the wire.

Shapes: N positions of a datum, K targets of each, P tokens of a prompt.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from covey.types import Completion, Sampling
from covey_serve.limits import RequestRefused, ServiceLimits
from covey_serve.wire.protobuf import decode, encode

Array = npt.NDArray[Any]
DTYPES: dict[int, str] = {1: "<f4", 2: "<i8", 3: "<i4"}
FLOAT32 = 1
MOST_REAL, MIN_TEMPERATURE = 1e300, 1e-6
MAX_JSON = 8 << 20
"""Most bytes of JSON: a byte may become twenty of memory."""
NO_LOGPROB = -99999.0
"""Log-prob of a place in a table of alternatives that holds none."""


@dataclass(frozen=True, slots=True)
class Datum:
    """A sequence with the inputs of its loss."""

    token_ids: Array
    inputs: Mapping[str, Array]
    """target_tokens and what the loss reads, (N,) or (N, K) each."""


def check_ids(name: str, ids: Array | tuple[int, ...] | None, vocabulary: int) -> None:
    """Refuse what are no tokens. ValueError."""
    if ids is not None and len(ids) and (np.min(ids) < 0 or np.max(ids) >= vocabulary):
        raise ValueError(f"{name} must be token ids in [0, {vocabulary}), got {np.min(ids)} to {np.max(ids)}")


@dataclass(frozen=True, slots=True)
class TrainingRequest:
    """A forward pass, with or without gradients."""

    model_id: str
    seq_id: int
    data: tuple[Datum, ...]
    loss: str
    options: Mapping[str, float | str]
    forward_only: bool


def read_place(raw: bytes) -> tuple[str, int]:
    """Return a training request's model and number. RequestRefused without."""
    try:
        message = decode("RequestPlace", raw)
    except ValueError as error:
        raise RequestRefused(400, f"the body must be a ForwardBackwardRequest: {error}") from error
    return message["model_id"], message["seq_id"]


def read_training(raw: bytes, limits: ServiceLimits) -> TrainingRequest:
    """Read a training request. ValueError for one that cannot be computed."""
    message = decode("ForwardBackwardRequest", raw)
    options: dict[str, float | str] = {each["key"]: each["value"] for each in message["old_config"]}
    for each in message["config"]:
        value = each["value"] or {"number": 0.0, "text": ""}
        options[each["key"]] = value["text"] or value["number"]
    left = limits.request_values
    data = []
    for each in message["data"]:
        datum, left = _datum(each, left)
        data.append(datum)
    place = message["model_id"], message["seq_id"]
    return TrainingRequest(*place, tuple(data), message["loss_fn"], options, message["forward_only"])


def _datum(message: Mapping[str, Any], left: int) -> tuple[Datum, int]:
    """Read a datum; return what is left of the request's values, too."""
    pieces, inputs = [], {}
    for chunk in message["model_input"]:
        if chunk["encoded_text"] is None:
            raise ValueError("model_input must be encoded_text, got an image or audio")
        pieces.append(_array(chunk["encoded_text"]["tokens"], "<i4", "tokens"))
    ids = np.concatenate(pieces).astype(np.int64) if pieces else np.empty(0, np.int64)
    left -= len(ids)
    for each in message["loss_fn_inputs"]:  # a sparse one of a few bytes may be millions of values
        inputs[each["key"]] = _tensor(each["value"], each["key"][:40], left)
        left -= inputs[each["key"]].size
    if left < 0:
        raise ValueError("a request has too many tokens and values of inputs: send its datums in several")
    return Datum(ids, inputs), left


def _array(raw: bytes, dtype: str, name: str) -> Array:
    if len(raw) % np.dtype(dtype).itemsize:
        raise ValueError(f"{name} must be whole numbers of {np.dtype(dtype).itemsize} bytes, got {len(raw)} bytes")
    return np.frombuffer(raw, dtype)


def _tensor(message: Mapping[str, Any] | None, name: str, most: int) -> Array:
    if message is None or message["dtype"] not in DTYPES:
        raise ValueError(f"{name} must be float32, int64 or int32")
    dtype = DTYPES[message["dtype"]]
    if message["sparse"]:
        return _dense(message["sparse"][0], dtype, tuple(message["shape"]), name, most)
    values = _array(message["dense"], dtype, name)
    shape = tuple(message["shape"]) or values.shape
    if len(shape) > 2 or min(shape) < 0 or math.prod(shape) != values.size:
        raise ValueError(f"{name} must have the shape that it says, got {values.size} values for {list(shape)[:4]}")
    return values.reshape(shape)


def _dense(csr: Mapping[str, bytes], dtype: str, shape: tuple[int, ...], name: str, most: int) -> Array:
    """Return a sparse matrix with zeros. ValueError for a wrong one."""
    values, rows, columns = (
        _array(csr[key], kind, name) for key, kind in (("values", dtype), ("rows", "<i8"), ("columns", "<i8"))
    )
    if len(shape) != 2 or min(shape) < 0 or math.prod(shape) > most:
        raise ValueError(f"{name} must be a matrix of at most {most} values, got {list(shape)[:4]}")
    is_whole = len(rows) == shape[0] + 1 and len(columns) == len(values) == (rows[-1] if len(rows) else -1)
    if not is_whole or rows[0] != 0 or (np.diff(rows) < 0).any():
        raise ValueError(f"{name} must be a sparse matrix whose rows are in order")
    if len(columns) and (columns.min() < 0 or columns.max() >= shape[1]):
        raise ValueError(f"{name} must have columns within its shape")
    out = np.zeros(shape, dtype)
    out[np.repeat(np.arange(shape[0]), np.diff(rows)), columns] = values
    return out


def training_result(logprobs: Sequence[Array], metrics: Mapping[str, float]) -> bytes:
    """Write the log-probs of all datums, and metrics."""
    raws = [np.ascontiguousarray(each, "<f4").tobytes() for each in logprobs]
    offsets = np.cumsum([0, *map(len, raws)], dtype="<i8")  # in bytes
    trailing = logprobs[0].shape[1:] if logprobs else ()
    tensor = {"data": b"".join(raws), "offsets": offsets.tobytes(), "dtype": FLOAT32, "trailing_shape": trailing}
    fields = [{"key": "logprobs", "value": tensor}]
    record = {"tag": "ArrayRecord", "fields": fields, "num_datums": len(raws)}
    named = [{"key": key, "value": value} for key, value in metrics.items()]
    return encode("ForwardBackwardOutput", {"kind": "ArrayRecord", "records": [record], "metrics": named})


@dataclass(frozen=True, slots=True)
class SampleRequest:
    """A prompt with the samples and scores that are asked for."""

    prompt_ids: tuple[int, ...]
    num_samples: int
    sampling: Sampling
    stop_ids: frozenset[int] | None
    """Tokens that end a sample, in place of the model's own; None keeps those."""
    is_seeded: bool
    prompt_logprobs: bool
    last_n: int | None
    """Prompt tokens at the end that are scored; None scores all."""
    topk_prompt: int
    topk_sample: int
    targets: Array | None
    """Further tokens to score at each place of the prompt but its last, (P - 1, K)."""


def read_sample(body: Mapping[str, Any], limits: ServiceLimits, room: int) -> SampleRequest:
    """Read a sampling request. ValueError for one that cannot be computed.

    `room` is the longest sequence of the model.
    """
    params = body.get("sampling_params") or {}
    prompt = _prompt(body.get("prompt"))
    count = number(body, "num_samples", 1, limits.samples, 1)
    stop = params.get("stop")
    stops = [stop] if isinstance(stop, str) else [] if stop is None else stop
    if not isinstance(stops, list) or len(stops) > 64 or {type(each) for each in stops} not in (set(), {int}, {str}):
        raise ValueError("stop must be strings or token ids, at most 64")
    texts, ids = [s for s in stops if isinstance(s, str)], [s for s in stops if isinstance(s, int)]
    most = number(params, "max_tokens", 1, room, max(room - len(prompt), 1))
    topk_sample = number(body, "topk_sample_logprobs", 0, limits.top_k, 0)
    if count * most * max(topk_sample, 1) > limits.request_tokens:
        told = "num_samples x max_tokens x topk_sample_logprobs"
        raise ValueError(f"{told} must be at most {limits.request_tokens}, got {count} x {most} x {topk_sample}")
    temperature = float(number(params, "temperature", 0, MOST_REAL, 1.0, REAL))
    if 0 < temperature < MIN_TEMPERATURE:
        raise ValueError(f"temperature must be 0, for the likeliest tokens, or >= {MIN_TEMPERATURE}")
    sampling = Sampling(
        temperature=temperature,
        top_k=max(number(params, "top_k", -1, 2**31, -1), 0),
        top_p=float(number(params, "top_p", 0, 1, 1.0, REAL)),
        max_tokens=most,
        stop=tuple(texts),
        seed=number(params, "seed", -(2**63), 2**64, 0),
    )
    if body.get("prompt_alt_tokens_k"):
        raise ValueError("prompt_alt_tokens_k must be 0: drawn alternatives of a prompt are not served")
    if body.get("record_stability_info"):
        raise ValueError("record_stability_info must be false: take loss_fn=importance_sampling in its place")
    return SampleRequest(
        prompt_ids=prompt,
        num_samples=count,
        sampling=sampling,
        stop_ids=frozenset(ids) if stop is not None and not texts else None,
        is_seeded=params.get("seed") is not None,
        prompt_logprobs=bool(body.get("prompt_logprobs")),
        last_n=number(body, "prompt_logprobs_last_n", 1, len(prompt), None),
        topk_prompt=number(body, "topk_prompt_logprobs", 0, limits.top_k, 0),
        topk_sample=topk_sample,
        targets=_targets(body.get("target_prompt_logprobs"), len(prompt), limits),
    )


def _prompt(found: Any) -> tuple[int, ...]:
    chunks = found.get("chunks") if isinstance(found, dict) else None
    ids: list[int] = []
    for chunk in chunks if isinstance(chunks, list) else []:
        tokens = _ids(chunk.get("tokens")) if isinstance(chunk, dict) else None
        if tokens is None:
            raise ValueError("prompt must be chunks of encoded_text with token ids")
        ids += tokens
    if not ids:
        raise ValueError("prompt must hold at least one token, got none")
    return tuple(ids)


def _ids(found: Any) -> list[int] | None:
    """Return a list of ids of JSON, None for another value."""
    is_list = isinstance(found, list) and all(type(each) is int and -(2**31) <= each < 2**31 for each in found)
    return found if is_list else None


def _targets(found: Any, length: int, limits: ServiceLimits) -> Array | None:
    if found is None:
        return None
    is_dense = isinstance(found, dict) and found.get("sparse_crow_indices") is None
    data, shape = _ids(found.get("data")) if is_dense else None, _ids(found.get("shape")) if is_dense else None
    if data is None or shape is None or len(shape) != 2:
        raise ValueError("target_prompt_logprobs must be a dense matrix of token ids")
    if shape[0] != length - 1 or not 1 <= shape[1] <= limits.top_k or len(data) != shape[0] * shape[1]:
        raise ValueError(f"target_prompt_logprobs must be [{length - 1}, K], got {str(shape)[:40]}")
    return np.array(data, np.int64).reshape(shape)


@dataclass(frozen=True, slots=True)
class Alternatives:
    """The K most likely tokens of some positions, (length, K)."""

    ids: Array
    logprobs: Array

    def message(self) -> dict[str, Any]:
        length, k = self.ids.shape
        raws = self.ids.astype("<i4").tobytes(), self.logprobs.astype("<f4").tobytes()
        return {"ids": raws[0], "logprobs": raws[1], "k": k, "length": length}


@dataclass(frozen=True, slots=True)
class PromptScores:
    """Scores of a prompt, None where they were not asked for."""

    logprobs: Array | None = None
    """Log-prob of each token, NaN for those without one, (P,)."""
    topk: Alternatives | None = None
    targets: Array | None = None
    """Log-probs of the further targets, (P - 1, K)."""


def sample_result(
    completions: Sequence[Completion], topk: Sequence[Alternatives | None], scores: PromptScores
) -> bytes:
    sequences = [
        {
            "stop_reason": 0 if each.finish_reason == "stop" else 1,
            "tokens": np.array(each.token_ids, "<i4").tobytes(),
            "logprobs": np.array(each.logprobs, "<f4").tobytes(),
            "topk": None if own is None else own.message(),
        }
        for each, own in zip(completions, topk, strict=True)
    ]
    told: dict[str, Any] = {"sequences": sequences, "topk_prompt": scores.topk and scores.topk.message()}
    if scores.logprobs is not None:
        told["prompt_logprobs"] = scores.logprobs.astype("<f4").tobytes()
    if scores.targets is not None:
        raw = scores.targets.astype("<f4").tobytes()
        told["target_prompt_logprobs"] = {"dense": raw, "dtype": FLOAT32, "shape": scores.targets.shape}
    return encode("SampleResponse", told)


def field(body: Mapping[str, Any], name: str, kind: type | tuple[type, ...], default: Any = ...) -> Any:
    """Return a field of a body. RequestRefused for another type."""
    value = body.get(name)
    if value is None and default is not ...:
        return default
    kinds = kind if isinstance(kind, tuple) else (kind,)
    if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
        raise RequestRefused(422, f"{name} must be {' or '.join(one.__name__ for one in kinds)}, got {str(value)[:40]}")
    return value


def number(body: Mapping[str, Any], name: str, low: float, high: float, default: Any = ..., kind: Any = int) -> Any:
    """Return a number of a body within bounds. RequestRefused for another."""
    value = field(body, name, kind, default)
    if value is not None and not low <= value <= high:
        raise RequestRefused(422, f"{name} must be in [{low}, {high}], got {str(value)[:40]}")
    return value


REAL = (int, float)


def read_json(raw: bytes) -> dict[str, Any]:
    """Read the object of a body. RequestRefused where it is none."""

    def refuse(constant: str) -> None:
        raise ValueError(f"{constant} is no number of JSON")

    if len(raw) > MAX_JSON:
        raise RequestRefused(413, f"a body of JSON must have at most {MAX_JSON} bytes, got {len(raw)}")
    try:
        found = json.loads(raw, parse_constant=refuse) if raw.strip() else {}
    except (ValueError, RecursionError) as error:
        raise RequestRefused(400, f"the body must be JSON: {error}") from error
    if not isinstance(found, dict):
        raise RequestRefused(400, f"the body must be a JSON object, got {type(found).__name__}")
    return found
