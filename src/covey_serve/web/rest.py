"""REST calls on sessions, models and checkpoints."""

import time
from dataclasses import asdict
from typing import Any
from urllib.parse import parse_qs

from covey_serve.service import Service
from covey_serve.store.checkpoints import EXPIRES, describe, utc
from covey_serve.store.ledger import HostedModel
from covey_serve.web.calls import Content, Context, find_named, model_of
from covey_serve.wire.messages import field, number


def training_runs(context: Context) -> Content:
    models = list(context.service.ledger.models.values())
    page, cursor = _page(context, models)
    return {"training_runs": [_run(context.service, one) for one in page], "cursor": cursor}


def _page(context: Context, rows: list[Any]) -> tuple[list[Any], dict[str, int]]:
    query = parse_qs(context.call.query)
    found = {name: int(one) if one.isdecimal() and len(one) < 10 else one for name, (one, *_) in query.items()}
    offset, limit = number(found, "offset", 0, 10**9, 0), number(found, "limit", 1, 1000, 20)
    return rows[offset : offset + limit], {"offset": offset, "limit": limit, "total_count": len(rows)}


def _run(service: Service, model: HostedModel) -> dict[str, Any]:
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


def training_run(context: Context) -> Content:
    return _run(context.service, model_of(context.service, {"model_id": context.names["model"]}))


def checkpoints_of(context: Context) -> Content:
    found = context.service.checkpoints.of_model(context.names["model"])
    return {"checkpoints": [describe(one) for one in found]}


def all_checkpoints(context: Context) -> Content:
    page, cursor = _page(context, context.service.checkpoints.all())
    return {"checkpoints": [describe(one) for one in page], "cursor": cursor}


def _path(context: Context) -> str:
    path = f"tinker://{context.names['model']}/{context.names['checkpoint']}"
    return context.service.checkpoints.find(path).path


def delete_checkpoint(context: Context) -> None:
    context.service.checkpoints.delete(_path(context))


def set_ttl(context: Context) -> None:
    seconds = number(context.body, "ttl_seconds", 1, 10**10, None)
    context.service.checkpoints.change(_path(context), {EXPIRES: None if seconds is None else time.time() + seconds})


def publish(context: Context) -> None:
    context.service.checkpoints.change(_path(context), {"public": context.call.method == "POST"})


def weights_info(context: Context) -> Content:
    shape = context.service.checkpoints.find(field(context.body, "tinker_path", str)).shape
    flags = {name: value for name, value in asdict(shape).items() if name.startswith("train_")}
    return {"base_model": shape.base, "is_lora": shape.rank > 0, "lora_rank": shape.rank or None, **flags}


def get_session(context: Context) -> Content:
    service, name = context.service, context.names["session"]
    metadata = find_named(service.ledger.sessions, "session", name).header["metadata"]
    tables = (service.ledger.models, service.ledger.samplers)
    models, samplers = ([one.id for one in table.values() if one.header["session"] == name] for table in tables)
    return {"training_run_ids": models, "sampler_ids": samplers, "user_metadata": metadata}
