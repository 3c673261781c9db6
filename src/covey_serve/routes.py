"""Paths of the Tinker API, and what each does."""

import hashlib
import json
import math
import re
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any
from urllib.parse import parse_qs, unquote

from covey_serve.checkpoints import EXPIRES, NAME, describe, utc
from covey_serve.http import Answer, Call
from covey_serve.ledger import CREATED, Model, Promise, Sampler, model_header
from covey_serve.models import Shape
from covey_serve.refused import Refused
from covey_serve.service import Service, sampler_header
from covey_serve.wire import read_json, read_place

PREFIX = "/api/v1/"
TESTED = "0.38"
"""Versions of the client that this was tested with begin so."""
CLIENT_CONFIG = {"sample_enable_stuck_detection": False, "parallel_fwdbwd_chunks": False, "pjwt_auth_enabled": False}
"""Flags of the client: a CPU may take hours for what it asks, and chunks need not overtake one another."""
ADAM = {
    "learning_rate": 1e-4,
    "beta1": 0.9,
    "beta2": 0.95,
    "eps": 1e-12,
    "weight_decay": 0.0,
    "grad_clip_norm": 0.0,
}
MAX_LORA_RANK = 512
MAX_SEQ = 2**31 - 1


@dataclass(frozen=True, slots=True)
class Context:
    """A call with the values of its path."""

    service: Service
    call: Call
    names: Mapping[str, str]

    @property
    def body(self) -> dict[str, Any]:
        return read_json(self.call.body)


Handler = Callable[[Context], Awaitable[Answer]]


async def answer(service: Service, call: Call) -> Answer:
    """Answer a call. Refused for what is wrong with it."""
    path = unquote(call.path)
    if path.startswith(PREFIX):
        for (method, pattern), handler in ROUTES.items():
            found = re.fullmatch(pattern, path[len(PREFIX) :]) if method == call.method else None
            if found:
                return await handler(Context(service, call, found.groupdict()))
    raise Refused(404, f"there is no {call.method[:10]} {call.path[:100]}")


def field(body: Mapping[str, Any], name: str, kind: type | tuple[type, ...], default: Any = ...) -> Any:
    """Return a field of a body. Refused if it is missing or of another type."""
    value = body.get(name)
    if value is None and default is not ...:
        return default
    kinds = kind if isinstance(kind, tuple) else (kind,)
    if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
        raise Refused(422, f"{name} must be {' or '.join(one.__name__ for one in kinds)}, got {str(value)[:40]}")
    return value


def number(body: Mapping[str, Any], name: str, low: int, high: int, default: Any = ...) -> int:
    value: int = field(body, name, int, default)
    if value is not None and not low <= value <= high:
        raise Refused(422, f"{name} must be in [{low}, {high}], got {value}")
    return value


def model_of(service: Service, body: Mapping[str, Any]) -> Model:
    name = field(body, "model_id", str)
    if name not in service.ledger.models:
        raise Refused(404, f"there is no model {name[:100]}")
    return service.ledger.models[name]


def session_of(service: Service, body: Mapping[str, Any]) -> str:
    name: str = field(body, "session_id", str)
    if name not in service.ledger.sessions:
        raise Refused(404, f"there is no session {name[:100]}")
    owned = sum(
        one.header["session"] == name for one in (*service.ledger.models.values(), *service.ledger.samplers.values())
    )
    if owned >= service.limits.names:
        raise Refused(429, f"a session has at most {service.limits.names} models and samplers")
    return name


def base_of(service: Service, name: str) -> str:
    if name not in service.bases.folders:
        raise Refused(404, f"base model must be one of {', '.join(service.bases.folders)}, got {name[:100]}")
    return name


async def client_config(context: Context) -> Answer:
    return Answer.of(CLIENT_CONFIG)


async def dynamic_config(context: Context) -> Answer:
    return Answer.of({"refresh_interval_sec": 300, "sample_cancel_enabled": False})


async def healthz(context: Context) -> Answer:
    return Answer.of({"status": "ok"})


async def capabilities(context: Context) -> Answer:
    facts = context.service.bases.lengths()
    told = {"trainable": True, "sampleable": True}
    return Answer.of(
        {
            "supported_models": [
                {"model_name": name, "max_context_length": length, **told} for name, length in facts.items()
            ]
        }
    )


async def create_session(context: Context) -> Answer:
    body = context.body
    version = field(body, "sdk_version", str, "")
    metadata = field(body, "user_metadata", dict, None)
    session = context.service.new_session({"metadata": metadata, "sdk": version[:40]})
    told: dict[str, Any] = {"type": "create_session", "session_id": session}
    if not version.startswith(TESTED):
        told["warning_message"] = f"covey serve was tested with tinker {TESTED}, this is {version[:40] or 'unknown'}"
    elif context.service.bases.full:
        told["warning_message"] = "covey serve trains all weights (--full): learning rates are a tenth of LoRA's"
    return Answer.of(told)


async def heartbeat(context: Context) -> Answer:
    name = field(context.body, "session_id", str)
    if name not in context.service.ledger.sessions:
        raise Refused(410, f"there is no session {name[:100]}")
    context.service.ledger.sessions[name].seen = time.time()
    return Answer.of({"type": "session_heartbeat"})


async def telemetry(context: Context) -> Answer:
    return Answer.of({"status": "accepted"})


async def finish(context: Context) -> Answer:
    if context.names["session"] in context.service.ledger.sessions:
        context.service.drop_session(context.names["session"])
    return Answer(204)


async def create_model(context: Context) -> Answer:
    service, body = context.service, context.body
    session = session_of(service, body)
    place = number(body, "model_seq_id", 0, 10**9)
    lora = field(body, "lora_config", dict, None)
    kind = field(body, "optimizer_config", dict, {}).get("type", "adamw")
    if kind not in ("adamw", "adam"):
        raise Refused(422, f"optimizer must be adamw, got {str(kind)[:40]}")
    base = base_of(service, field(body, "base_model", str))
    shape, seed = Shape(base), place
    if lora is not None and not service.bases.full:
        flags = {name: field(lora, name, bool, True) for name in ("train_attn", "train_mlp", "train_unembed")}
        shape = Shape(base, number(lora, "rank", 1, MAX_LORA_RANK, 32), **flags)
        seed = number(lora, "seed", 0, 2**63 - 1, place)
    name = f"{session}:train:{place}"
    metadata = field(body, "user_metadata", dict, None)
    return _make(service, model_header(name, session, shape, seed, metadata), {"op": "create_model"})


def _make(service: Service, header: dict[str, Any], request: dict[str, Any]) -> Answer:
    if header["id"] not in service.ledger.models:
        service.commit(header)
    model = service.ledger.models[header["id"]]
    return _promised(service.promise(model, {"seq": CREATED, "stateful": True, **request}))


async def get_info(context: Context) -> Answer:
    service = context.service
    model = model_of(service, context.body)
    data = {"arch": "covey", "model_name": model.shape.base, "tokenizer_id": service.bases.tokenizer(model.shape.base)}
    is_lora = model.shape.rank > 0
    told = {"type": "get_info", "model_id": model.id, "model_name": model.shape.base, "model_data": data}
    return Answer.of({**told, "is_lora": is_lora, "lora_rank": model.shape.rank if is_lora else None})


async def forward_backward(context: Context) -> Answer:
    name, seq = read_place(context.call.body)
    model = model_of(context.service, {"model_id": name})
    number({"seq_id": seq}, "seq_id", 1, MAX_SEQ)
    request = {"op": "forward_backward", "seq": seq, "stateful": True}
    return _promised(context.service.promise(model, request, context.call.body))


def _promised(promise: Promise) -> Answer:
    return Answer.of({"request_id": promise.id, "model_id": promise.header["owner"]})


def _in_order(context: Context, read: Callable[[Model, dict[str, Any]], dict[str, Any]]) -> Answer:
    """Promise a request of a model. What `read` refuses fails in its turn, or later ones would wait for it."""
    body = context.body
    model = model_of(context.service, body)
    seq = number(body, "seq_id", 1, MAX_SEQ)
    try:
        request = read(model, body)
    except Refused as refused:
        request = {"op": "refuse", "reason": str(refused)}
    return _promised(context.service.promise(model, {**request, "seq": seq}))


async def optim_step(context: Context) -> Answer:
    def read(model: Model, body: dict[str, Any]) -> dict[str, Any]:
        given = field(body, "adam_params", dict, None) or field(body, "optimizer_params", dict, {})
        if given.get("type", "adamw") not in ("adam", "adamw"):
            raise Refused(422, f"optimizer must be adamw, got {str(given['type'])[:40]}")
        adam = {name: float(field(given, name, (int, float), default)) for name, default in ADAM.items()}
        if (
            not all(math.isfinite(value) and value >= 0 for value in adam.values())
            or max(adam["beta1"], adam["beta2"]) >= 1
        ):
            raise Refused(422, "adam_params must be finite numbers >= 0, with betas below 1")
        return {"op": "optim_step", "stateful": True, "adam": adam}

    return _in_order(context, read)


async def save_weights(context: Context) -> Answer:
    op = context.call.path.rpartition("/")[2]
    kind = {"save_weights": "weights", "save_weights_external": "external_weights"}.get(op, "sampler_weights")

    def read(model: Model, body: dict[str, Any]) -> dict[str, Any]:
        request: dict[str, Any] = {"op": op, "kind_of_path": kind, "path": field(body, "path", str, None)}
        if request["path"] is None and kind == "sampler_weights":
            place = number(body, "sampling_session_seq_id", 0, MAX_SEQ)
            request["sampler"] = f"{model.header['session']}:sample:{place}"
        elif not NAME.fullmatch(request["path"] or ""):
            raise Refused(422, f"path must be a name of letters, digits, . - and _, got {str(request['path'])[:80]}")
        request["overwrite"] = field(body, "overwrite", bool, False)
        request["ttl_seconds"] = number(body, "ttl_seconds", 1, 10**10, None)
        request["user_metadata"] = field(body, "user_metadata", dict, None)
        return request

    return _in_order(context, read)


async def load_weights(context: Context) -> Answer:
    def read(model: Model | None, body: dict[str, Any]) -> dict[str, Any]:
        path, optimizer = field(body, "path", str), field(body, "optimizer", bool, False)
        return {"op": "load_weights", "path": path, "optimizer": optimizer, "stateful": True}

    service, body = context.service, context.body
    if body.get("model_id") is not None:
        return _in_order(context, read)
    request = read(None, body)
    session = session_of(service, body)
    place = number(body, "model_seq_id", 0, 10**9)
    shape = _saved(service, request["path"]).shape
    base_of(service, shape.base)
    metadata = field(body, "user_metadata", dict, None)
    return _make(service, model_header(f"{session}:train:{place}", session, shape, place, metadata), request)


def _saved(service: Service, path: str) -> Any:
    try:
        return service.checkpoints.find(path)
    except ValueError as error:
        raise Refused(404, str(error)) from error


async def create_sampling_session(context: Context) -> Answer:
    service, body = context.service, context.body
    session = session_of(service, body)
    name = f"{session}:sample:{number(body, 'sampling_session_seq_id', 0, 2**31)}"
    path = field(body, "model_path", str, None)
    if name not in service.ledger.samplers:
        shape = Shape(base_of(service, field(body, "base_model", str))) if path is None else _saved(service, path).shape
        service.commit(sampler_header(name, session, shape, path=path))
    return Answer.of({"type": "create_sampling_session", "sampling_session_id": name})


def _sampler(service: Service, name: str) -> Sampler:
    if name not in service.ledger.samplers:
        raise Refused(404, f"there is no sampler {name[:100]}: it was never made, or gave way to newer ones")
    return service.ledger.samplers[name]


async def get_sampler(context: Context) -> Answer:
    sampler = _sampler(context.service, context.names["sampler"])
    told = {"sampler_id": sampler.id, "base_model": sampler.shape.base, "model_path": sampler.header["path"]}
    return Answer.of(told)


async def asample(context: Context) -> Answer:
    service, body = context.service, context.body
    sampler = _sampler(service, field(body, "sampling_session_id", str))
    seq = number(body, "seq_id", 0, 2**63 - 1)
    count = number(body, "num_samples", 1, service.limits.samples, 1)
    field(body, "sampling_params", dict, None)
    # Which samples a request without a seed gets follows from what it asks, and how often that was asked before
    read = [sampler.id.partition(":")[2], body.get("prompt"), body.get("sampling_params")]
    digest = hashlib.sha256(json.dumps(read, sort_keys=True).encode()).digest()
    key, seed = digest[:12].hex(), int.from_bytes(digest[12:20], "big") >> 1
    place = {"key": key, "first": sampler.counts.get(key, 0), "seed": seed, "n": count}
    promise = service.promise(sampler, {"op": "asample", "seq": seq, **place}, context.call.body)
    ids = [f"{promise.id}:{index}" for index in range(count)]
    return Answer.of({"request_id": promise.id, "sample_sequence_ids": ids})


async def retrieve_future(context: Context) -> Answer:
    return await context.service.retrieve(field(context.body, "request_id", str))


async def training_runs(context: Context) -> Answer:
    models = list(context.service.ledger.models.values())
    page, cursor = _page(context, models)
    return Answer.of({"training_runs": [_run(context.service, one) for one in page], "cursor": cursor})


def _page(context: Context, rows: list[Any]) -> tuple[list[Any], dict[str, int]]:
    query = parse_qs(context.call.query)
    try:
        offset, limit = int(query.get("offset", ["0"])[0]), int(query.get("limit", ["20"])[0])
    except ValueError as error:
        raise Refused(422, "offset and limit must be whole numbers") from error
    if not (offset >= 0 and 0 < limit <= 1000):
        raise Refused(422, "offset must be >= 0 and limit in [1, 1000]")
    return rows[offset : offset + limit], {"offset": offset, "limit": limit, "total_count": len(rows)}


def _run(service: Service, model: Model) -> dict[str, Any]:
    saved = service.checkpoints.of_model(model.id)
    last = {kind: next((describe(one) for one in reversed(saved) if f"/{kind}/" in one.path), None) for kind in LAST}
    return {
        "training_run_id": model.id,
        "base_model": model.shape.base,
        "model_owner": "local",
        "is_lora": model.shape.rank > 0,
        "lora_rank": model.shape.rank or None,
        "last_request_time": utc(model.seen),
        "user_metadata": model.header["metadata"],
        **{LAST[kind]: found for kind, found in last.items()},
    }


LAST = {"weights": "last_checkpoint", "sampler_weights": "last_sampler_checkpoint"}


async def training_run(context: Context) -> Answer:
    return Answer.of(_run(context.service, model_of(context.service, {"model_id": context.names["model"]})))


async def checkpoints_of(context: Context) -> Answer:
    found = context.service.checkpoints.of_model(context.names["model"])
    return Answer.of({"checkpoints": [describe(one) for one in found]})


async def all_checkpoints(context: Context) -> Answer:
    page, cursor = _page(context, context.service.checkpoints.all())
    return Answer.of({"checkpoints": [describe(one) for one in page], "cursor": cursor})


def _path(context: Context) -> str:
    path = f"tinker://{context.names['model']}/{context.names['checkpoint']}"
    return str(_saved(context.service, path).path)


async def delete_checkpoint(context: Context) -> Answer:
    context.service.checkpoints.delete(_path(context))
    return Answer(204)


async def set_ttl(context: Context) -> Answer:
    seconds = number(context.body, "ttl_seconds", 1, 10**10, None)
    context.service.checkpoints.change(_path(context), {EXPIRES: None if seconds is None else time.time() + seconds})
    return Answer(204)


async def publish(context: Context) -> Answer:
    context.service.checkpoints.change(_path(context), {"public": context.call.method == "POST"})
    return Answer(204)


async def weights_info(context: Context) -> Answer:
    shape = _saved(context.service, field(context.body, "tinker_path", str)).shape
    flags = {name: value for name, value in asdict(shape).items() if name.startswith("train_")}
    told = {"base_model": shape.base, "is_lora": shape.rank > 0, "lora_rank": shape.rank or None, **flags}
    return Answer.of(told)


async def get_session(context: Context) -> Answer:
    service, name = context.service, context.names["session"]
    if name not in service.ledger.sessions:
        raise Refused(404, f"there is no session {name[:100]}")
    models = [one.id for one in service.ledger.models.values() if one.header["session"] == name]
    samplers = [one.id for one in service.ledger.samplers.values() if one.header["session"] == name]
    metadata = service.ledger.sessions[name].header["metadata"]
    return Answer.of({"training_run_ids": models, "sampler_ids": samplers, "user_metadata": metadata})


RUN = "training_runs/(?P<model>[^/]+)"
CHECKPOINT = RUN + "/checkpoints/(?P<checkpoint>[^/]+/[^/]+)"
ROUTES: dict[tuple[str, str], Handler] = {
    ("POST", "client/config"): client_config,
    ("POST", "client/dynamic_config"): dynamic_config,
    ("GET", "healthz"): healthz,
    ("GET", "get_server_capabilities"): capabilities,
    ("POST", "create_session"): create_session,
    ("POST", "session_heartbeat"): heartbeat,
    ("POST", "telemetry"): telemetry,
    ("POST", "sessions/(?P<session>[^/]+)/finish"): finish,
    ("GET", "sessions/(?P<session>[^/]+)"): get_session,
    ("POST", "create_model"): create_model,
    ("POST", "get_info"): get_info,
    ("POST", "forward_backward"): forward_backward,
    ("POST", "optim_step"): optim_step,
    ("POST", "save_weights(_external|_for_sampler)?"): save_weights,
    ("POST", "load_weights"): load_weights,
    ("POST", "create_sampling_session"): create_sampling_session,
    ("GET", "samplers/(?P<sampler>[^/]+)"): get_sampler,
    ("POST", "asample"): asample,
    ("POST", "retrieve_future"): retrieve_future,
    ("GET", "training_runs"): training_runs,
    ("GET", RUN): training_run,
    ("GET", RUN + "/checkpoints"): checkpoints_of,
    ("GET", "checkpoints"): all_checkpoints,
    ("DELETE", CHECKPOINT): delete_checkpoint,
    ("PUT", CHECKPOINT + "/ttl"): set_ttl,
    ("POST", CHECKPOINT + "/publish"): publish,
    ("DELETE", CHECKPOINT + "/publish"): publish,
    ("POST", "weights_info"): weights_info,
}
"""(method, pattern below /api/v1/) -> handler; everything else is 404."""
