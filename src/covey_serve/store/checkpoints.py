"""Checkpoints on disk, by tinker path, and their descriptions.

A checkpoint is a folder: weights in transformers' or peft's format below `policy/`, moments of the optimiser beside
it, and facts with the digests of all files. Names come from clients: they never hold a separator.
"""

import re
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from covey.run.checkpoints.manifest import file_digests
from covey.system.disk import atomic_folder
from covey.system.jsonl import read_object, write_json
from covey_serve.limits import RequestRefused
from covey_serve.model.models import ModelShape

KINDS = {"weights": "training", "sampler_weights": "sampler", "external_weights": "external"}
"""Middle part of a tinker path -> type of checkpoint."""
NAME = re.compile(r"(?!.*\.tmp-)[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}")
"""Names of checkpoints; `.tmp-` marks folders that a save leaves when it is killed."""
MODEL = re.compile(r"[0-9a-f]{8,64}:train:\d{1,9}")
FACTS = "covey.json"
MAX_FACTS = 1 << 20
EXPIRES, META = "expires_at", "user_metadata"


@dataclass(frozen=True, slots=True)
class Saved:
    """A checkpoint of a tinker path."""

    path: str
    folder: Path
    facts: Mapping[str, Any]

    @property
    def shape(self) -> ModelShape:
        return ModelShape(**self.facts["shape"])


class Checkpoints:
    """The folder of all checkpoints."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def folder(self, path: str) -> Path:
        """Return the folder of a tinker path. RequestRefused for a wrong one."""
        model, _, rest = path.removeprefix("tinker://").partition("/")
        kind, _, name = rest.partition("/")
        is_named = path.startswith("tinker://") and kind in KINDS and MODEL.fullmatch(model)
        if not is_named or not NAME.fullmatch(name):
            raise RequestRefused(404, f"path must be tinker://MODEL/weights/NAME of a checkpoint, got {path[:80]}")
        return own_folder(self._root, model) / kind / name

    def find(self, path: str) -> Saved:
        """Return a checkpoint. RequestRefused where it is missing or expired."""
        folder = self.folder(path)
        facts = read_facts(folder)
        if facts is None or (facts.get(EXPIRES) or time.time() + 1) < time.time():
            raise RequestRefused(404, f"there is no checkpoint {path[:200]}")
        return Saved(path, folder, facts)

    def load(self, path: str) -> Saved:
        """Return a checkpoint whose files are as they were written. ValueError."""
        saved = self.find(path)
        check_folder(saved.folder)
        return saved

    def save(self, path: str, facts: Mapping[str, Any], write: Callable[[Path], None], *, overwrite: bool) -> Saved:
        """Write a checkpoint. ValueError where the name is taken by another request."""
        folder = self.folder(path)
        before = read_facts(folder)
        if before is not None and not overwrite and before.get("seq") != facts["seq"]:
            raise ValueError(f"checkpoint {path[:200]} exists: name another, or overwrite it")
        folder.parent.mkdir(parents=True, exist_ok=True)
        save_folder(folder, facts, write)
        return self.find(path)

    def change(self, path: str, facts: Mapping[str, Any]) -> None:
        saved = self.find(path)
        write_json(saved.folder / FACTS, {**saved.facts, **facts})

    def delete(self, path: str) -> None:
        shutil.rmtree(self.find(path).folder)

    def of_model(self, model: str) -> list[Saved]:
        """Return a model's checkpoints, oldest first."""
        paths = [f"tinker://{model}/{kind}" for kind in KINDS] if MODEL.fullmatch(model) else []
        below = {path: self.folder(f"{path}/x").parent.glob("[A-Za-z0-9_]*") for path in paths}
        found = [f"{path}/{folder.name}" for path, folders in below.items() for folder in folders]
        return sorted(self._valid(found), key=lambda saved: saved.facts["time"])

    def all(self) -> list[Saved]:
        models = [f"{a}:train:{b}" for a, _, b in (one.name.partition("-train-") for one in self._root.glob("*"))]
        found = [saved for model in models for saved in self.of_model(model)]
        return sorted(found, key=lambda saved: saved.facts["time"])

    def _valid(self, paths: list[str]) -> Iterator[Saved]:
        for path in paths:
            with suppress(ValueError):
                yield self.find(path)


def own_folder(root: Path, owner: str) -> Path:
    return root / owner.replace(":", "-")


def save_folder(folder: Path, facts: Mapping[str, Any], write: Callable[[Path], None]) -> None:
    """Write a folder of weights whole, replacing one before."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with atomic_folder(folder, replaces=True) as aside:
        write(aside)
        write_json(aside / FACTS, {**facts, "time": time.time(), "files": file_digests(aside)})


def check_folder(folder: Path) -> Mapping[str, Any]:
    """Return the facts of undamaged weights. ValueError for others."""
    facts = read_facts(folder)
    if facts is None or {name: row for name, row in file_digests(folder).items() if name != FACTS} != facts["files"]:
        raise ValueError(f"the weights in {folder.name} are gone, or not those that were saved")
    return facts


def read_facts(folder: Path) -> dict[str, Any] | None:
    """Return the facts of weights, None where there are none."""
    found = read_object(folder / FACTS, MAX_FACTS)
    return found if "files" in found and "shape" in found else None


def describe(saved: Saved) -> dict[str, Any]:
    """Describe a checkpoint as the REST calls do."""
    _, kind, name = saved.path.removeprefix("tinker://").split("/")
    expires = saved.facts.get(EXPIRES)
    return {
        "checkpoint_id": f"{kind}/{name}",
        "checkpoint_type": KINDS[kind],
        "time": utc(saved.facts["time"]),
        "tinker_path": saved.path,
        "size_bytes": sum(row["bytes"] for row in saved.facts["files"].values()),
        "public": bool(saved.facts.get("public")),
        "user_metadata": saved.facts.get(META),
        "expires_at": None if expires is None else utc(expires),
    }


def utc(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat()


def facts_of(model: str, shape: ModelShape, seq: int, header: Mapping[str, Any]) -> dict[str, Any]:
    """Return the facts of a checkpoint that a request asks for."""
    seconds = header.get("ttl_seconds")
    return {
        "model": model,
        "shape": asdict(shape),
        "seq": seq,
        META: header.get("user_metadata"),
        EXPIRES: None if seconds is None else time.time() + seconds,
    }
