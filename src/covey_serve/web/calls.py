"""A call with its service, and what handlers read of it."""

import json
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from covey_serve.limits import RequestRefused
from covey_serve.service import Service
from covey_serve.store.ledger import HostedModel
from covey_serve.web.server import HttpAnswer, HttpCall
from covey_serve.wire.messages import field, read_json

Kept = TypeVar("Kept")


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


def metadata_of(service: Service, body: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return a client's notes, which are kept in memory."""
    found: dict[str, Any] | None = field(body, "user_metadata", dict, None)
    if len(json.dumps(found)) > service.limits.metadata_bytes:
        raise RequestRefused(422, f"user_metadata must have at most {service.limits.metadata_bytes} bytes of JSON")
    return found


def find_named(table: Mapping[str, Kept], what: str, name: str, status: int = 404) -> Kept:
    """Return an entry of a table. RequestRefused for an unknown name."""
    if name not in table:
        raise RequestRefused(status, f"there is no {what} {name[:100]} (any more)")
    return table[name]


def model_of(service: Service, body: Mapping[str, Any]) -> HostedModel:
    return find_named(service.ledger.models, "model", field(body, "model_id", str))


def session_of(service: Service, body: Mapping[str, Any]) -> str:
    """Return a session that has room for a name more. RequestRefused."""
    name: str = field(body, "session_id", str)
    find_named(service.ledger.sessions, "session", name)
    if sum(one.header["session"] == name for one in service.ledger.owners()) >= service.limits.names:
        raise RequestRefused(429, f"a session has at most {service.limits.names} models and samplers")
    return name


def base_of(service: Service, name: str) -> str:
    if name not in service.bases.folders:
        raise RequestRefused(404, f"base model must be one of {', '.join(service.bases.folders)}, got {name[:100]}")
    return name
