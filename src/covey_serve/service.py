"""The service: its promises, and the order of keeping them.

Everything here runs on the event loop; the requests themselves are executed by one thread (`compute`). Requests of a
model are executed in the order of their numbers, models and samplers take turns.
"""

import asyncio
import hmac
import logging
import shutil
import time
import uuid
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from covey.system.disk import put_back
from covey_serve.limits import RequestRefused, ServiceLimits
from covey_serve.model.compute import Compute, ModelRequest, Settled, failure
from covey_serve.model.models import Bases, ModelShape
from covey_serve.model.sampling import SampledWeights
from covey_serve.runs import RunFolders
from covey_serve.store.checkpoints import own_folder
from covey_serve.store.journal import Header, RequestJournal
from covey_serve.store.ledger import HostedModel, Ledger, Owner, Promise, ServedSampler
from covey_serve.web.server import JSON, PROTOBUF, HttpAnswer, HttpCall

LOGGER = logging.getLogger(__name__)
LINGER, MOST_LINGER = 0.03, 0.5
"""Seconds to wait for more requests of a sampler after the last one, and after the first."""
MOST_DRAWS = 4096
"""Most samples of one batch."""
SNAPSHOT_SECONDS = 30.0
"""Computing that a kill may cost a model."""
SNAPSHOT_REQUESTS = 256
"""Requests of a model after which a snapshot is due however little they took."""
MIN_COMPACTION = 64 << 20
TIDY_SECONDS = 5.0
OWN_FOLDERS = ("snapshots", "samplers")
"""Folders of weights that end with their model or sampler."""


class Service:
    """Holds the ledger, and executes what it promises."""

    def __init__(self, root: Path, bases: Bases, key: str, limits: ServiceLimits | None = None) -> None:
        self.limits = limits or ServiceLimits()
        self.root, self._key = root, key.encode()
        self.journal = RequestJournal(root / "journal")
        self.ledger = Ledger(self.journal)
        self.compute = Compute(root, bases, self.limits)
        self.checkpoints = self.compute.checkpoints
        self.runs = RunFolders(root / "runs")
        self._thread = ThreadPoolExecutor(1, "covey-serve")
        self._wake = asyncio.Event()
        self._turns: dict[str, None] = {}
        """Models and samplers with something to do, in order of their turns."""
        self._room = self.compute.room() // 2
        self._put_in_order()

    @property
    def bases(self) -> Bases:
        return self.compute.bases

    def check_head(self, call: HttpCall) -> None:
        """Refuse callers without the key, before their body is read."""
        if call.path not in ("/healthz", "/api/v1/healthz") and not hmac.compare_digest(
            call.headers.get("x-api-key", "").encode("utf-8", "replace"), self._key
        ):
            raise RequestRefused(
                401, "the key (header X-API-Key) is not this server's: set TINKER_API_KEY to what it printed"
            )

    def commit(self, header: Header, body: bytes = b"") -> None:
        """Write a record. RequestRefused where the disk is full."""
        try:
            self.ledger.commit(header, body)
        except OSError as error:
            LOGGER.warning("the journal cannot be written: %s", error.strerror)
            raise RequestRefused(503, f"the journal cannot be written ({error.strerror})") from error

    def new_session(self, facts: Mapping[str, Any]) -> str:
        if len(self.ledger.sessions) >= self.limits.sessions:
            raise RequestRefused(429, f"there are {self.limits.sessions} sessions; finish some")
        name = uuid.uuid4().hex
        self.commit({"kind": "session", "id": name, **facts})
        return name

    def promise(self, owner: Owner, header: Header, body: bytes = b"") -> Promise:
        """Return the promise of a request, the same for a repeated one."""
        name = f"{owner.id}:{header['seq']}"
        if name in self.ledger.promises:
            return self.ledger.promises[name]
        if isinstance(owner, HostedModel) and not owner.done < header["seq"] <= owner.done + self.limits.ahead:
            what = "was answered before" if header["seq"] <= owner.done else f"is too far ahead of {owner.done}"
            raise RequestRefused(409, f"request {header['seq']} of {owner.id} {what}")
        if self.ledger.waiting >= self.limits.waiting or self.ledger.waiting_bytes > self.limits.waiting_bytes:
            raise RequestRefused(429, "too many requests wait; send again")
        self.commit({"kind": "request", "id": name, "owner": owner.id, "stateful": False, **header}, body)
        self._queue(owner)
        return self.ledger.promises[name]

    def drop_session(self, session: str) -> None:
        """End a session: its models and samplers go, its checkpoints stay."""
        owners = [one.id for one in self.ledger.owners() if one.header["session"] == session]
        self.commit({"kind": "end", "id": session})
        for name in owners:
            self._clear(name)

    def _clear(self, name: str) -> None:
        """Remove memory and files of an ended model or sampler."""
        self.compute.unload(name)
        self.runs.close(name)
        for kind in OWN_FOLDERS:
            shutil.rmtree(own_folder(self.root / kind, name), ignore_errors=True)

    def _put_in_order(self) -> None:
        """Take up what a killed process left."""
        for folder in ((self.root / kind) for kind in OWN_FOLDERS):
            put_back(folder)
            owned = {own_folder(folder, one.id) for one in self.ledger.owners()}
            for left in {*folder.glob("*")} - owned:
                shutil.rmtree(left, ignore_errors=True)
        for folder in (self.root / "checkpoints").glob("*/*"):
            put_back(folder)
        for owner in self.ledger.owners():
            self._queue(owner)

    async def retrieve(self, name: str) -> HttpAnswer:
        """Answer a poll, held until there is a result."""
        promise = self.ledger.promises.get(name)
        if promise is None:
            raise RequestRefused(410, f"there is no promise {name[:100]}")
        if promise.result is None:
            promise.event = promise.event or asyncio.Event()
            with suppress(TimeoutError):
                async with asyncio.timeout(self.limits.hold_seconds):
                    await promise.event.wait()
        if name not in self.ledger.promises:
            raise RequestRefused(410, f"there is no promise {name[:100]} any more: its session has ended")
        if promise.result is None:
            return HttpAnswer.of({"type": "try_again", "request_id": name, "queue_state": "active"})
        promise.fetched = promise.fetched or time.time()
        return HttpAnswer(200, self.ledger.result(promise), PROTOBUF if promise.kind == "proto" else JSON)

    async def work(self) -> None:
        """Execute promises for ever."""
        while True:
            self._wake.clear()
            owner = next((found for name in list(self._turns) if (found := self._owner(name))), None)
            if owner is None:
                await self._wake.wait()
                continue
            self._turns.pop(owner.id)
            names = [owner.next] if isinstance(owner, HostedModel) else list(owner.pending)
            try:
                await (self._run_model(owner) if isinstance(owner, HostedModel) else self._run_sampler(owner))
            except Exception as error:  # of the disk, mostly
                for name in filter(None, names):
                    await self._settle(name, failure(name, error))
            self._queue(owner)

    async def tidy(self) -> None:
        """Bound what is kept, for ever."""
        while True:
            await asyncio.sleep(TIDY_SECONDS)
            self.tidy_now()

    def tidy_now(self) -> None:
        """Drop old results, sessions and weights, and shorten the journal."""
        self.ledger.forget_results(self.limits)
        before = time.time() - self.limits.session_seconds
        with suppress(OSError, RequestRefused):
            for name in [name for name, session in self.ledger.sessions.items() if session.seen < before]:
                self.drop_session(name)
            self._drop_samplers()
            if self.journal.size > 2 * self.journal.compacted + MIN_COMPACTION:
                self.ledger.compact()
            self.journal.sync()

    def close(self) -> None:
        self._thread.shutdown(cancel_futures=True)
        self.runs.close_all()
        self.journal.close()

    def _owner(self, name: str) -> Owner | None:
        found = self.ledger.models.get(name) or self.ledger.samplers.get(name)
        if found is None:  # its session has ended
            self._turns.pop(name)
        return found

    def _queue(self, owner: Owner) -> None:
        if owner.next if isinstance(owner, HostedModel) else owner.pending:
            self._turns[owner.id] = None
            self._wake.set()

    async def _run_model(self, model: HostedModel) -> None:
        assert model.next is not None, "a model without a request has no turn"
        promise = self.ledger.promises[model.next]
        if model.header.get("broken"):
            raise ValueError(f"model {model.id} could not be made")
        await self._make_room(model)
        done = [seq for seq in sorted(model.requests) if model.snapshot < seq <= model.done]
        earlier = [self._work(model, self.ledger.promises[model.requests[seq]]) for seq in done]
        outcome = await self._in_thread(self.compute.run, self._work(model, promise), earlier)
        await self._settle(promise.id, outcome)
        if model.id not in self.ledger.models:  # its session ended meanwhile
            self._clear(model.id)
            self._clear(outcome.sampler or model.id)
            return
        model.seen = time.time()
        if outcome.kind != "error":
            self.runs.log(model, promise.header["op"], outcome.metrics)
        is_due = self.compute.unsaved_seconds(model.id) > SNAPSHOT_SECONDS or len(done) > SNAPSHOT_REQUESTS
        if is_due and model.id in self.ledger.models:
            await self._save(model)

    def _work(self, model: HostedModel, promise: Promise) -> ModelRequest:
        body = self.ledger.body(promise)
        return ModelRequest(model.id, model.shape, model.header["seed"], model.snapshot, promise.header, body)

    async def _make_room(self, model: HostedModel) -> None:
        """Put the longest unused models aside, until one more fits."""
        others = self.compute.loaded_models()
        own = others.pop(model.id, 0) or self.compute.bytes_of(model.shape)
        while others and (len(others) >= self.limits.loaded or sum(others.values()) + own > self._room):
            name = next(iter(others))
            others.pop(name)
            if name in self.ledger.models:
                await self._save(self.ledger.models[name])
            self.compute.unload(name)
            self.runs.close(name)

    async def _save(self, model: HostedModel) -> None:
        try:
            seq = await self._in_thread(self.compute.save_snapshot, model.id, model.shape)
            if model.id not in self.ledger.models:
                self._clear(model.id)
                return
            self.commit({"kind": "snapshot", "id": model.id, "seq": seq})
        except (OSError, RequestRefused) as error:
            LOGGER.warning("no snapshot of %s was saved: %s", model.id, error)

    async def _run_sampler(self, sampler: ServedSampler) -> None:
        await self._linger(sampler)
        promises = [self.ledger.promises[name] for name in sampler.pending]
        taken: list[Promise] = []
        num_samples = 0
        for promise in promises:
            num_samples += promise.header["n"]
            if taken and num_samples > MOST_DRAWS:
                break
            taken.append(promise)
        for promise, outcome in zip(taken, await self._sample(sampler, taken), strict=True):
            await self._settle(promise.id, outcome)

    async def _sample(self, sampler: ServedSampler, promises: Sequence[Promise]) -> list[Settled]:
        draws = [(promise.header, self.ledger.body(promise)) for promise in promises]
        sampler.used = time.time()
        folder = self._folder_of(sampler)
        weights = SampledWeights(str(folder or sampler.shape.base), sampler.shape, folder)
        found = await self._in_thread(self.compute.samplers.run, weights, draws)
        return [
            Settled("proto", one) if isinstance(one, bytes) else failure(promise.id, one)
            for promise, one in zip(promises, found, strict=True)
        ]

    def _folder_of(self, sampler: ServedSampler) -> Path | None:
        """Return the folder of a sampler's weights, None for the base's own."""
        if sampler.header["is_own"]:
            return own_folder(self.root / "samplers", sampler.id)
        path = sampler.header["path"]
        return None if path is None else self.checkpoints.find(path).folder

    async def _linger(self, sampler: ServedSampler) -> None:
        """Wait while more requests for the same weights arrive."""
        until = time.monotonic() + MOST_LINGER
        count = -1
        while count != len(sampler.pending) and time.monotonic() < until:
            count = len(sampler.pending)
            await asyncio.sleep(LINGER)

    async def _settle(self, name: str, outcome: Settled) -> None:
        """Write a result, unless there is one, or its session has ended."""
        while (promise := self.ledger.promises.get(name)) is not None and promise.result is None:
            header: Header = {"kind": "result", "id": promise.id, "type": outcome.kind}
            if outcome.sampler is not None:
                model = self.ledger.models[promise.header["owner"]]
                header["sampler"] = sampler_header(outcome.sampler, model.header["session"], model.shape, is_own=True)
            try:
                self.ledger.commit(header, outcome.body)
            except OSError as error:
                LOGGER.warning("a result waits for the disk: %s", error.strerror)
                await asyncio.sleep(1.0)

    def _drop_samplers(self) -> None:
        """Remove the longest unused weights without a name, beyond the bound."""
        total = 0
        for sampler in sorted(self.ledger.samplers.values(), key=lambda one: one.used, reverse=True):
            size = sum(path.stat().st_size for path in own_folder(self.root / "samplers", sampler.id).rglob("*"))
            total += max(size, self.limits.samplers_bytes // self.limits.samplers)
            if total > self.limits.samplers_bytes and not sampler.pending:
                self.commit({"kind": "drop sampler", "id": sampler.id})
                self._clear(sampler.id)

    async def _in_thread(self, function: Any, *arguments: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._thread, function, *arguments)


def sampler_header(
    name: str, session: str, shape: ModelShape, *, is_own: bool = False, path: str | None = None
) -> Header:
    told = {"kind": "sampler", "id": name, "session": session, "shape": asdict(shape)}
    return {**told, "is_own": is_own, "path": path}
