"""Models in memory, and the effect of each request on them.

A model is read from its snapshot when it is needed, and the requests after it are computed again, to the same bits.
"""

import json
import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from covey.run.checkpoints.checkpoint import save_policy
from covey.run.memory.room import available_bytes
from covey_serve.limits import ServiceLimits
from covey_serve.model.models import Bases, ModelShape, TrainedModel
from covey_serve.model.sampling import Samplers
from covey_serve.model.training import check, forward_backward
from covey_serve.store.checkpoints import Checkpoints, check_folder, facts_of, own_folder, save_folder
from covey_serve.store.journal import Header
from covey_serve.wire.messages import read_training

LOGGER = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ModelRequest:
    """A request with the model that it is for."""

    model: str
    shape: ModelShape
    seed: int
    snapshot: int
    """Number of the last request in the model's snapshot, -1 for none."""
    header: Header
    body: bytes

    @property
    def seq(self) -> int:
        return int(self.header["seq"])


@dataclass(frozen=True, slots=True)
class Settled:
    """A result, as the journal keeps it."""

    kind: str
    """json, proto or error."""
    body: bytes
    metrics: Mapping[str, float] | None = None
    """Numbers of a training request for the model's run folder."""
    sampler: str | None = None
    """Name of a sampler whose weights were put aside."""


@dataclass(slots=True)
class _Loaded:
    model: TrainedModel
    applied: int
    """Number of the last request in the weights."""
    seconds: float = 0.0
    """Time of computing that no snapshot holds."""


class Compute:
    """Executes requests, one at a time."""

    def __init__(self, root: Path, bases: Bases, limits: ServiceLimits) -> None:
        self.bases, self.limits, self.root = bases, limits, root
        self.checkpoints = Checkpoints(root / "checkpoints")
        self.samplers = Samplers(bases, limits)
        self._loaded: OrderedDict[str, _Loaded] = OrderedDict()

    def run(self, work: ModelRequest, earlier: Sequence[ModelRequest]) -> Settled:
        """Execute a request, after the `earlier` ones that its weights lack."""
        try:
            loaded = self._load(work, earlier)
            started = time.perf_counter()
            outcome = OPERATIONS[work.header["op"]](self, loaded, work)
            loaded.seconds += time.perf_counter() - started
        except Exception as error:
            outcome = failure(work.header["id"], error)
            if work.header.get("stateful") and not isinstance(error, ValueError):
                self.unload(work.model)  # it may have half of what the journal says it has not
        if work.model in self._loaded:
            self._loaded[work.model].applied = max(self._loaded[work.model].applied, work.seq)
        return outcome

    def unsaved_seconds(self, model: str) -> float:
        """Return the seconds of computing that no snapshot holds."""
        return self._loaded[model].seconds if model in self._loaded else 0.0

    def save_snapshot(self, model: str, shape: ModelShape) -> int:
        """Save a model whole; return the number of its last request."""
        loaded = self._loaded[model]
        facts = facts_of(model, shape, loaded.applied, {})
        folder = self.snapshot_folder(model)
        save_folder(folder, facts, lambda aside: loaded.model.save(aside, optimizer=True, gradients=True))
        loaded.seconds = 0.0
        return loaded.applied

    def snapshot_folder(self, model: str) -> Path:
        return own_folder(self.root / "snapshots", model)

    def loaded_models(self) -> dict[str, int]:
        """Return the models in memory and their bytes, the longest unused first."""
        return {name: loaded.model.num_bytes for name, loaded in self._loaded.items()}

    def bytes_of(self, shape: ModelShape) -> int:
        """Return the bytes that a full model takes, 0 for adapters."""
        weights = self.bases.policy(shape.base).model.parameters() if shape.rank == 0 else ()
        return 4 * sum(each.numel() * each.element_size() for each in weights)

    def room(self) -> int:
        """Return the bytes that are free on the device."""
        return available_bytes(self.bases.policy(next(iter(self.bases.folders))).device)

    def unload(self, model: str) -> None:
        self._loaded.pop(model, None)

    def _load(self, work: ModelRequest, earlier: Sequence[ModelRequest]) -> _Loaded:
        if work.model in self._loaded:
            self._loaded.move_to_end(work.model)
            return self._loaded[work.model]
        model = TrainedModel(self.bases.make(work.shape, work.seed))
        applied = -1
        if work.snapshot >= 0:
            folder = self.snapshot_folder(work.model)
            applied = check_folder(folder)["seq"]
            model.load(folder, optimizer=True)
        loaded = _Loaded(model, applied)
        for each in earlier:
            if each.seq > applied:
                OPERATIONS[each.header["op"]](self, loaded, each)
                loaded.applied = each.seq
        self._loaded[work.model] = loaded
        return loaded


def failure(name: str, error: Exception) -> Settled:
    """Return a failed request's result; a ValueError is its client's fault."""
    reason, category = str(error), "user"
    if not isinstance(error, ValueError):
        LOGGER.error("request %s failed: %s", name, error, exc_info=None if isinstance(error, OSError) else error)
        reason, category = f"{type(error).__name__}: {error}", "server"
    return Settled("error", json.dumps({"error": " ".join(reason.split())[:500], "category": category}).encode())


def answer_with(content: Mapping[str, Any], **told: Any) -> Settled:
    return Settled("json", json.dumps(content).encode(), **told)


def create_model(compute: Compute, loaded: _Loaded, work: ModelRequest) -> Settled:
    return answer_with({"type": "create_model", "model_id": work.model})


def refuse(compute: Compute, loaded: _Loaded, work: ModelRequest) -> Settled:
    raise ValueError(work.header["reason"])


def load_model(compute: Compute, loaded: _Loaded, work: ModelRequest) -> Settled:
    """Load a checkpoint, with its optimiser or a fresh one."""
    saved = compute.checkpoints.load(work.header["path"])
    if saved.shape != work.shape:
        raise ValueError(f"{saved.path[:200]} is of another base, rank or layers than the model")
    loaded.model.load(saved.folder, optimizer=work.header["optimizer"])
    loaded.seconds = float("inf")  # a snapshot follows: the checkpoint may be deleted
    return answer_with({"type": "load_weights", "path": saved.path, "model_id": work.model})


def train(compute: Compute, loaded: _Loaded, work: ModelRequest) -> Settled:
    request = read_training(work.body, compute.limits)
    policy = loaded.model.policy
    check(request, policy)
    result, metrics = forward_backward(request, policy)
    return Settled("proto", result, None if request.forward_only else metrics)


def optim_step(compute: Compute, loaded: _Loaded, work: ModelRequest) -> Settled:
    metrics = loaded.model.step(work.header["adam"])
    return answer_with({"metrics": metrics}, metrics=metrics)


def save_weights(compute: Compute, loaded: _Loaded, work: ModelRequest) -> Settled:
    """Save a checkpoint under the name and kind that a request has."""
    header, kind = work.header, work.header["kind_of_path"]
    path = f"tinker://{work.model}/{kind}/{header['path']}"
    facts = facts_of(work.model, work.shape, work.seq, header)

    def write(folder: Path) -> None:
        if kind == "external_weights":
            save_policy(loaded.model.policy, folder)
        else:
            loaded.model.save(folder, optimizer=kind == "weights")

    compute.checkpoints.save(path, facts, write, overwrite=header["overwrite"])
    return answer_with({"type": header["op"], "path": path})


def save_for_sampler(compute: Compute, loaded: _Loaded, work: ModelRequest) -> Settled:
    """Save present weights for a sampler without a name."""
    if work.header.get("path") is not None:
        return save_weights(compute, loaded, work)
    name = work.header["sampler"]
    folder = own_folder(compute.root / "samplers", name)
    facts = facts_of(work.model, work.shape, work.seq, {})
    save_folder(folder, facts, lambda aside: loaded.model.save(aside, optimizer=False))
    told = {"type": "save_weights_for_sampler", "sampling_session_id": name}
    return answer_with(told, sampler=name)


OPERATIONS: dict[str, Callable[[Compute, _Loaded, ModelRequest], Settled]] = {
    "create_model": create_model,
    "refuse": refuse,
    "load_weights": load_model,
    "forward_backward": train,
    "optim_step": optim_step,
    "save_weights": save_weights,
    "save_weights_for_sampler": save_for_sampler,
    "save_weights_external": save_weights,
}
