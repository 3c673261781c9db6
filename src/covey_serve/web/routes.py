"""Paths of the Tinker API, and what each does."""

import hashlib
import json
import math
import re
import time
from collections.abc import Awaitable, Callable
from typing import Any
from urllib.parse import unquote

from covey_serve.limits import RequestRefused
from covey_serve.model.models import ModelShape
from covey_serve.service import Service, sampler_header
from covey_serve.store.checkpoints import NAME
from covey_serve.store.ledger import CREATED, HostedModel, Promise, model_header
from covey_serve.web import rest
from covey_serve.web.calls import Content, Context, Handler, base_of, find_named, metadata_of, model_of, session_of
from covey_serve.web.server import HttpAnswer, HttpCall
from covey_serve.wire.messages import MOST_REAL, REAL, field, number, read_place

PREFIX = "/api/v1/"
TESTED = "0.38"
"""Versions of the client that this was tested with begin so."""
CLIENT_CONFIG = {"sample_enable_stuck_detection": False, "parallel_fwdbwd_chunks": False, "pjwt_auth_enabled": False}
"""Flags of the client: a CPU may take hours for what it asks, and chunks need not overtake one another."""
BELOW_ONE = math.nextafter(1.0, 0.0)
ADAM = {
    **{"learning_rate": (1e-4, MOST_REAL), "beta1": (0.9, BELOW_ONE), "beta2": (0.95, BELOW_ONE)},
    **{"eps": (1e-12, MOST_REAL), "weight_decay": (0.0, MOST_REAL), "grad_clip_norm": (0.0, MOST_REAL)},
}
"""Settings of the optimiser: defaults and upper bounds."""
MAX_LORA_RANK = 512
MAX_SEQ = 2**31 - 1
COPY_STRIDE = 10**9
"""A pickled copy of a sampler numbers its requests from a random multiple of this."""


async def answer(service: Service, call: HttpCall) -> HttpAnswer:
    """Answer a call. RequestRefused for what is wrong with it."""
    path = unquote(call.path).removeprefix(PREFIX)
    for (method, pattern), handler in ROUTES.items():
        names = re.fullmatch(pattern, path) if method == call.method else None
        if names:
            found = handler(Context(service, call, names.groupdict()))
            if isinstance(found, Awaitable):
                return await found
            return HttpAnswer(204) if found is None else HttpAnswer.of(found)
    raise RequestRefused(404, f"there is no {call.method[:10]} {call.path[:100]}")


def capabilities(context: Context) -> Content:
    told = {"trainable": True, "sampleable": True}
    bases = context.service.bases
    lengths = {name: bases.policy(name).max_length for name in bases.folders}
    return {"supported_models": [{"model_name": a, "max_context_length": b, **told} for a, b in lengths.items()]}


def create_session(context: Context) -> Content:
    body = context.body
    version = field(body, "sdk_version", str, "")
    session = context.service.new_session({"metadata": metadata_of(context.service, body), "sdk": version[:40]})
    told: dict[str, Any] = {"type": "create_session", "session_id": session}
    if not version.startswith(TESTED):
        told["warning_message"] = f"covey serve was tested with tinker {TESTED}, this is {version[:40] or 'unknown'}"
    elif context.service.bases.full:
        told["warning_message"] = "covey serve trains all weights (--full): learning rates are a tenth of LoRA's"
    return told


def heartbeat(context: Context) -> Content:
    find_named(
        context.service.ledger.sessions, "session", field(context.body, "session_id", str), 410
    ).seen = time.time()
    return {"type": "session_heartbeat"}


def finish(context: Context) -> Content:
    if context.names["session"] in context.service.ledger.sessions:
        context.service.drop_session(context.names["session"])
    return None


def create_model(context: Context) -> Content:
    service, body = context.service, context.body
    session = session_of(service, body)
    place = number(body, "model_seq_id", 0, 10**9)
    lora = field(body, "lora_config", dict, None)
    kind = field(body, "optimizer_config", dict, {}).get("type", "adamw")
    if kind not in ("adamw", "adam"):
        raise RequestRefused(422, f"optimizer must be adamw, got {str(kind)[:40]}")
    base = base_of(service, field(body, "base_model", str))
    shape, seed = ModelShape(base), place
    if lora is not None and not service.bases.full:
        flags = {name: field(lora, name, bool, True) for name in ("train_attn", "train_mlp", "train_unembed")}
        shape = ModelShape(base, number(lora, "rank", 1, MAX_LORA_RANK, 32), **flags)
        seed = number(lora, "seed", 0, 2**63 - 1, place)
    name = f"{session}:train:{place}"
    header = model_header(name, session, shape, seed, metadata_of(service, body))
    return _make(service, header, {"op": "create_model"})


def _make(service: Service, header: dict[str, Any], request: dict[str, Any]) -> Content:
    if header["id"] not in service.ledger.models:
        service.commit(header)
    model = service.ledger.models[header["id"]]
    return _answer_promise(service.promise(model, {"seq": CREATED, "stateful": True, **request}))


def get_info(context: Context) -> Content:
    service = context.service
    model = model_of(service, context.body)
    data = {"arch": "covey", "model_name": model.shape.base, "tokenizer_id": service.bases.tokenizer(model.shape.base)}
    is_lora = model.shape.rank > 0
    told = {"type": "get_info", "model_id": model.id, "model_name": model.shape.base, "model_data": data}
    return {**told, "is_lora": is_lora, "lora_rank": model.shape.rank if is_lora else None}


def forward_backward(context: Context) -> Content:
    name, seq = read_place(context.call.body)
    model = model_of(context.service, {"model_id": name})
    number({"seq_id": seq}, "seq_id", 1, MAX_SEQ)
    request = {"op": "forward_backward", "seq": seq, "stateful": True}
    return _answer_promise(context.service.promise(model, request, context.call.body))


def _answer_promise(promise: Promise) -> Content:
    return {"request_id": promise.id, "model_id": promise.header["owner"]}


def _in_order(context: Context, read: Callable[[HostedModel, dict[str, Any]], dict[str, Any]]) -> Content:
    """Promise a request of a model.

    A refusal by `read` comes in its turn: later requests would wait for the number for ever.
    """
    body = context.body
    model = model_of(context.service, body)
    seq = number(body, "seq_id", 1, MAX_SEQ)
    try:
        request = read(model, body)
    except RequestRefused as refused:
        request = {"op": "refuse", "reason": str(refused)}
    return _answer_promise(context.service.promise(model, {**request, "seq": seq}))


def optim_step(context: Context) -> Content:
    def read(model: HostedModel, body: dict[str, Any]) -> dict[str, Any]:
        given = field(body, "adam_params", dict, None) or field(body, "optimizer_params", dict, {})
        if given.get("type", "adamw") not in ("adam", "adamw"):
            raise RequestRefused(422, f"optimizer must be adamw, got {str(given['type'])[:40]}")
        adam = {name: float(number(given, name, 0, high, default, REAL)) for name, (default, high) in ADAM.items()}
        return {"op": "optim_step", "stateful": True, "adam": adam}

    return _in_order(context, read)


def save_weights(context: Context) -> Content:
    op = context.call.path.rpartition("/")[2]
    kind = {"save_weights": "weights", "save_weights_external": "external_weights"}.get(op, "sampler_weights")

    def read(model: HostedModel, body: dict[str, Any]) -> dict[str, Any]:
        request: dict[str, Any] = {"op": op, "kind_of_path": kind, "path": field(body, "path", str, None)}
        if request["path"] is None and kind == "sampler_weights":
            place = number(body, "sampling_session_seq_id", 0, MAX_SEQ)
            request["sampler"] = f"{model.header['session']}:sample:{place}"
        elif not NAME.fullmatch(request["path"] or ""):
            raise RequestRefused(
                422, f"path must be a name of letters, digits, . - and _, got {str(request['path'])[:80]}"
            )
        request["overwrite"] = field(body, "overwrite", bool, False)
        request["ttl_seconds"] = number(body, "ttl_seconds", 1, 10**10, None)
        request["user_metadata"] = metadata_of(context.service, body)
        return request

    return _in_order(context, read)


def load_weights(context: Context) -> Content:
    def read(model: HostedModel | None, body: dict[str, Any]) -> dict[str, Any]:
        path, optimizer = field(body, "path", str), field(body, "optimizer", bool, False)
        context.service.checkpoints.folder(path)  # whether or not there is a checkpoint yet
        return {"op": "load_weights", "path": path, "optimizer": optimizer, "stateful": True}

    service, body = context.service, context.body
    if body.get("model_id") is not None:
        return _in_order(context, read)
    request = read(None, body)
    session = session_of(service, body)
    place = number(body, "model_seq_id", 0, 10**9)
    shape = service.checkpoints.find(request["path"]).shape
    base_of(service, shape.base)
    header = model_header(f"{session}:train:{place}", session, shape, place, metadata_of(service, body))
    return _make(service, header, request)


def create_sampling_session(context: Context) -> Content:
    service, body = context.service, context.body
    session = session_of(service, body)
    name = f"{session}:sample:{number(body, 'sampling_session_seq_id', 0, 2**31)}"
    path = field(body, "model_path", str, None)
    if name not in service.ledger.samplers:
        shape = ModelShape(field(body, "base_model", str)) if path is None else service.checkpoints.find(path).shape
        base_of(service, shape.base)
        service.commit(sampler_header(name, session, shape, path=path))
    return {"type": "create_sampling_session", "sampling_session_id": name}


def get_sampler(context: Context) -> Content:
    sampler = find_named(context.service.ledger.samplers, "sampler", context.names["sampler"])
    return {"sampler_id": sampler.id, "base_model": sampler.shape.base, "model_path": sampler.header["path"]}


def asample(context: Context) -> Content:
    service, body = context.service, context.body
    sampler = find_named(service.ledger.samplers, "sampler", field(body, "sampling_session_id", str))
    seq = number(body, "seq_id", 0, 2**63 - 1)
    count = number(body, "num_samples", 1, service.limits.samples, 1)
    field(body, "sampling_params", dict, None)
    # Which samples a request without a seed gets follows from what it asks and its number, never from when it arrives
    copy, index = divmod(seq, COPY_STRIDE)
    rank = sampler.copies.get(str(copy), len(sampler.copies))
    asked = [body.get("prompt"), body.get("sampling_params"), None if count == 1 else index]
    read = [sampler.id.partition(":")[2], rank, asked]
    digest = hashlib.sha256(json.dumps(read, sort_keys=True).encode()).digest()
    first, seed = index if count == 1 else 0, int.from_bytes(digest[:8], "big") >> 1
    place = {"copy": str(copy), "rank": rank, "first": first, "seed": seed, "n": count}
    promise = service.promise(sampler, {"op": "asample", "seq": seq, **place}, context.call.body)
    ids = [f"{promise.id}:{index}" for index in range(count)]
    return {"request_id": promise.id, "sample_sequence_ids": ids}


def retrieve_future(context: Context) -> Content:
    return context.service.retrieve(field(context.body, "request_id", str))


RUN = "training_runs/(?P<model>[^/]+)"
CHECKPOINT = RUN + "/checkpoints/(?P<checkpoint>[^/]+/[^/]+)"
ROUTES: dict[tuple[str, str], Handler] = {
    ("POST", "client/config"): lambda context: CLIENT_CONFIG,
    ("POST", "client/dynamic_config"): lambda context: {"refresh_interval_sec": 300, "sample_cancel_enabled": False},
    ("GET", "/?healthz"): lambda context: {"status": "ok"},
    ("GET", "get_server_capabilities"): capabilities,
    ("POST", "create_session"): create_session,
    ("POST", "session_heartbeat"): heartbeat,
    ("POST", "telemetry"): lambda context: {"status": "accepted"},
    ("POST", "sessions/(?P<session>[^/]+)/finish"): finish,
    ("GET", "sessions/(?P<session>[^/]+)"): rest.get_session,
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
    ("GET", "training_runs"): rest.training_runs,
    ("GET", RUN): rest.training_run,
    ("GET", RUN + "/checkpoints"): rest.checkpoints_of,
    ("GET", "checkpoints"): rest.all_checkpoints,
    ("DELETE", CHECKPOINT): rest.delete_checkpoint,
    ("PUT", CHECKPOINT + "/ttl"): rest.set_ttl,
    ("POST", CHECKPOINT + "/publish"): rest.publish,
    ("DELETE", CHECKPOINT + "/publish"): rest.publish,
    ("POST", "weights_info"): rest.weights_info,
}
"""(method, pattern below /api/v1/) -> handler; everything else is 404."""
