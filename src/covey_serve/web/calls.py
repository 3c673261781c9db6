"""A call with its service, and what handlers read of it."""

import json
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

from covey_serve.refused import RequestRefused
from covey_serve.service import Service
from covey_serve.store.checkpoints import Saved
from covey_serve.store.ledger import HostedModel
from covey_serve.web.server import HttpAnswer, HttpCall
from covey_serve.wire.messages import read_json


@dataclass(frozen=True, slots=True)
class Context:
    """A call with the values of its path."""

    service: Service
    call: HttpCall
    names: Mapping[str, str]

    @property
    def body(self) -> dict[str, Any]:
        return read_json(self.call.body)


Content = dict[str, Any] | Awaitable[HttpAnswer] | None
"""JSON of an answer, or one that takes time; None for an answer without content."""
Handler = Callable[[Context], Content]


def field(body: Mapping[str, Any], name: str, kind: type | tuple[type, ...], default: Any = ...) -> Any:
    """Return a field of a body. RequestRefused for another type."""
    value = body.get(name)
    if value is None and default is not ...:
        return default
    kinds = kind if isinstance(kind, tuple) else (kind,)
    if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
        raise RequestRefused(422, f"{name} must be {' or '.join(one.__name__ for one in kinds)}, got {str(value)[:40]}")
    return value


def number(body: Mapping[str, Any], name: str, low: int, high: int, default: Any = ...) -> int:
    value: int = field(body, name, int, default)
    if value is not None and not low <= value <= high:
        raise RequestRefused(422, f"{name} must be in [{low}, {high}], got {value}")
    return value


def metadata_of(service: Service, body: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return a client's notes, which are kept in memory."""
    found: dict[str, Any] | None = field(body, "user_metadata", dict, None)
    if len(json.dumps(found)) > service.limits.metadata_bytes:
        raise RequestRefused(422, f"user_metadata must have at most {service.limits.metadata_bytes} bytes of JSON")
    return found


def path_of(service: Service, body: Mapping[str, Any], name: str) -> str:
    """Return a tinker path, whether or not there is a checkpoint yet."""
    path: str = field(body, name, str)
    try:
        service.checkpoints.folder(path)
    except ValueError as error:
        raise RequestRefused(404, str(error)) from error
    return path


def model_of(service: Service, body: Mapping[str, Any]) -> HostedModel:
    name = field(body, "model_id", str)
    if name not in service.ledger.models:
        raise RequestRefused(404, f"there is no model {name[:100]}")
    return service.ledger.models[name]


def session_of(service: Service, body: Mapping[str, Any]) -> str:
    name: str = field(body, "session_id", str)
    if name not in service.ledger.sessions:
        raise RequestRefused(404, f"there is no session {name[:100]}")
    if len(service.ledger.models_of(name)) + len(service.ledger.samplers_of(name)) >= service.limits.names:
        raise RequestRefused(429, f"a session has at most {service.limits.names} models and samplers")
    return name


def base_of(service: Service, name: str) -> str:
    if name not in service.bases.folders:
        raise RequestRefused(404, f"base model must be one of {', '.join(service.bases.folders)}, got {name[:100]}")
    return name


def find_saved(service: Service, path: str) -> Saved:
    try:
        return service.checkpoints.find(path)
    except ValueError as error:
        raise RequestRefused(404, str(error)) from error
