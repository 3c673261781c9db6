"""The state of the service, rebuilt from its journal after a kill.

Each record is applied by one function, when it is written and when it is read again. Weights are in no record: they
follow from a model's last snapshot and the requests after it.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

from covey_serve.limits import ServiceLimits
from covey_serve.model.models import ModelShape
from covey_serve.store.journal import Header, RecordPlace, RequestJournal

LOGGER = logging.getLogger(__name__)
CREATED = 0
"""Number of the request that makes a model; the client's begin at 1."""


@dataclass(slots=True)
class _Recorded:
    """An entry of the journal."""

    header: Header

    @property
    def id(self) -> str:
        return str(self.header["id"])


@dataclass(slots=True)
class ServedSession(_Recorded):
    """A client's session."""

    place: RecordPlace
    seen: float = field(default_factory=time.time)
    """Time of its last sign of life."""


@dataclass(slots=True)
class HostedModel(_Recorded):
    """A model with the requests that its weights follow from."""

    place: RecordPlace
    shape: ModelShape
    done: int = -1
    """Number of the last request with a result."""
    snapshot: int = -1
    """Number of the last request in its snapshot."""
    requests: dict[int, str] = field(default_factory=dict)
    """Promises by number: without a result, or after the snapshot and part of the weights."""
    seen: float = field(default_factory=time.time)

    @property
    def next(self) -> str | None:
        """Return the next promise, None if it has not arrived."""
        return self.requests.get(self.done + 1)


@dataclass(slots=True)
class ServedSampler(_Recorded):
    """Weights that are sampled from."""

    place: RecordPlace
    shape: ModelShape
    copies: dict[str, int] = field(default_factory=lambda: {"0": 0})
    """Ranks of the client's copies of the sampler, by what their numbers begin with."""
    pending: dict[str, None] = field(default_factory=dict)
    """Promises without a result, in order of arrival."""
    used: float = field(default_factory=time.time)


Owner = HostedModel | ServedSampler


@dataclass(slots=True)
class Promise(_Recorded):
    """A request with its result, once there is one."""

    place: RecordPlace | None
    """The request's record, None once it is not needed."""
    size: int = 0
    result: RecordPlace | None = None
    kind: str = ""
    """Kind of result: json, proto or error."""
    fetched: float | None = None
    """Time when the result was first fetched."""
    event: asyncio.Event | None = None


class Ledger:
    """Sessions, models, samplers and promises."""

    def __init__(self, journal: RequestJournal) -> None:
        self._journal = journal
        self.sessions: dict[str, ServedSession] = {}
        self.models: dict[str, HostedModel] = {}
        self.samplers: dict[str, ServedSampler] = {}
        self.promises: dict[str, Promise] = {}
        self.waiting = 0
        """Promises without a result."""
        self.waiting_bytes = 0
        for place, header in journal.records():
            self._apply(header, place)

    def commit(self, header: Header, body: bytes = b"") -> None:
        """Write a record and apply it. OSError changes nothing."""
        self._apply(header, self._journal.append(header, body))

    def _apply(self, header: Header, place: RecordPlace) -> None:
        try:
            APPLY[header["kind"]](self, header, place)
        except KeyError:
            LOGGER.warning("a %s of %s has no effect: what it is of has ended", header["kind"], header.get("id"))

    def owners(self) -> "list[Owner]":
        return [*self.models.values(), *self.samplers.values()]

    def body(self, promise: Promise) -> bytes:
        assert promise.place is not None, "a request is kept until its result"
        return self._journal.read(promise.place)[1]

    def result(self, promise: Promise) -> bytes:
        assert promise.result is not None, "a result is there"
        return self._journal.read(promise.result)[1]

    def forget_results(self, limits: ServiceLimits) -> None:
        """Drop results that are too old or too many, fetched ones first."""
        kept = [one for one in reversed(self.promises.values()) if one.result is not None and one.place is None]
        before = time.time() - limits.result_seconds
        size = 0
        for count, one in enumerate(sorted(kept, key=lambda one: one.fetched is not None)):
            assert one.result is not None, "it was chosen so"
            size += one.result.length
            is_old = one.fetched is not None and one.fetched < before
            if is_old or count >= limits.results or size > limits.results_bytes:
                self.promises.pop(one.id)

    def compact(self) -> None:
        """Rewrite the journal with what is still needed."""
        rows = list(self._needed_rows())
        places = self._journal.compact((header, old) for header, old, _ in rows)
        for place, (_, _, put) in zip(places, rows, strict=True):
            put(place)

    def _needed_rows(self) -> Iterator[tuple[Header, RecordPlace, Callable[[RecordPlace], None]]]:
        for session in self.sessions.values():
            yield session.header, session.place, _setter(session, "place")
        for model in self.models.values():
            model.header |= {"done": model.done, "snapshot": model.snapshot}
            yield model.header, model.place, _setter(model, "place")
        for sampler in self.samplers.values():
            sampler.header = {**sampler.header, "kind": "sampler", "copies": sampler.copies}
            yield sampler.header, sampler.place, _setter(sampler, "place")
        needed = {name for model in self.models.values() for name in model.requests.values()}
        for promise in self.promises.values():
            if promise.place is not None and (promise.result is None or promise.id in needed):
                yield promise.header | {"kind": "request"}, promise.place, _setter(promise, "place")
            if promise.result is not None and promise.id not in needed:
                header = {"kind": "result", "id": promise.id, "type": promise.kind, "of": promise.header}
                yield header, promise.result, _setter(promise, "result")
        for promise in self.promises.values():
            if promise.result is not None and promise.id in needed:
                header = {"kind": "result", "id": promise.id, "type": promise.kind}
                yield header, promise.result, _setter(promise, "result")


def _setter(owner: Any, name: str) -> Callable[[RecordPlace], None]:
    return lambda place: setattr(owner, name, place)


def model_header(name: str, session: str, shape: ModelShape, seed: int, metadata: Any) -> Header:
    return {"kind": "model", "id": name, "session": session, "shape": asdict(shape), "seed": seed, "metadata": metadata}


def _session(ledger: Ledger, header: Header, place: RecordPlace) -> None:
    ledger.sessions[header["id"]] = ServedSession(header, place)


def _model(ledger: Ledger, header: Header, place: RecordPlace) -> None:
    done, snapshot = header.get("done", -1), header.get("snapshot", -1)
    ledger.models[header["id"]] = HostedModel(header, place, ModelShape(**header["shape"]), done, snapshot)


def _sampler(ledger: Ledger, header: Header, place: RecordPlace) -> None:
    shape, copies = ModelShape(**header["shape"]), header.get("copies", {"0": 0})
    ledger.samplers[header["id"]] = ServedSampler(header, place, shape, dict(copies))


def _request(ledger: Ledger, header: Header, place: RecordPlace) -> None:
    promise = ledger.promises[header["id"]] = Promise(header, place, place.length)
    if header["owner"] in ledger.models:
        ledger.models[header["owner"]].requests[header["seq"]] = promise.id
    else:
        sampler = ledger.samplers[header["owner"]]
        sampler.pending[promise.id] = None
        if "copy" in header:
            sampler.copies[header["copy"]] = header["rank"]
    ledger.waiting += 1
    ledger.waiting_bytes += promise.size


def _result(ledger: Ledger, header: Header, place: RecordPlace) -> None:
    if "of" in header:  # compacted, without its request
        ledger.promises[header["id"]] = Promise(header["of"], None, 0, place, header["type"])
        return
    promise = ledger.promises[header["id"]]
    is_new, promise.result, promise.kind = promise.result is None, place, header["type"]
    if is_new:
        ledger.waiting -= 1
        ledger.waiting_bytes -= promise.size
    owner, seq = promise.header["owner"], promise.header["seq"]
    if owner in ledger.models:
        model, has_failed = ledger.models[owner], header["type"] == "error"
        model.done = max(model.done, seq)
        if has_failed and seq == CREATED:
            model.header["broken"] = True
        if has_failed or not promise.header["stateful"]:
            model.requests.pop(seq, None)
            promise.place = None
    else:
        ledger.samplers[owner].pending.pop(promise.id, None)
        promise.place = None
    if "sampler" in header:
        _sampler(ledger, header["sampler"], place)
    if promise.event is not None:
        promise.event.set()


def _snapshot(ledger: Ledger, header: Header, place: RecordPlace) -> None:
    model = ledger.models[header["id"]]
    model.snapshot = header["seq"]
    for seq in [seq for seq in model.requests if seq <= model.snapshot]:
        ledger.promises[model.requests.pop(seq)].place = None


def _end(ledger: Ledger, header: Header, place: RecordPlace) -> None:
    """Drop a session with all that it owns."""
    session = header["id"]
    ledger.sessions.pop(session, None)
    for name in [name for name, promise in ledger.promises.items() if promise.header["owner"].split(":")[0] == session]:
        promise = ledger.promises.pop(name)
        if promise.result is None:
            ledger.waiting -= 1
            ledger.waiting_bytes -= promise.size
            if promise.event is not None:
                promise.event.set()
    for table in (ledger.models, ledger.samplers):
        for name in [name for name, one in table.items() if one.header["session"] == session]:
            del table[name]


APPLY: dict[str, Callable[[Ledger, Header, RecordPlace], object]] = {
    "session": _session,
    "model": _model,
    "sampler": _sampler,
    "request": _request,
    "result": _result,
    "snapshot": _snapshot,
    "end": _end,
    "drop sampler": lambda ledger, header, place: ledger.samplers.pop(header["id"], None),
}
