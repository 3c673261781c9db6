"""Run folders of models, for `covey watch` and `covey report`."""

import fcntl
import os
import time
from collections.abc import Mapping
from pathlib import Path

import yaml

from covey.run.folder import CONFIG, LOCK, METRICS
from covey.system.jsonl import JsonlWriter
from covey_serve.store.ledger import HostedModel


class RunFolders:
    """Writes a row for each optimiser step of each model."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._open: dict[str, _Run] = {}

    def log(self, model: HostedModel, op: str, metrics: Mapping[str, float] | None) -> None:
        """Log a finished request."""
        if metrics is None:
            return
        run = self._open.get(model.id)
        if run is None:
            run = self._open[model.id] = _Run(self._root / model.id.replace(":", "-"), model)
        run.log(op, metrics)

    def close(self, name: str) -> None:
        if (run := self._open.pop(name, None)) is not None:
            run.close()

    def close_all(self) -> None:
        for name in list(self._open):
            self.close(name)


class _Run:
    def __init__(self, folder: Path, model: HostedModel) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        shape = model.shape
        settings = {
            "model": {"name": shape.base, "lora_rank": shape.rank},
            "environment": {"name": str((model.header["metadata"] or {}).get("recipe", "tinker"))},
            "seed": model.header["seed"],
            "served": True,
        }
        if not (folder / CONFIG).exists():
            (folder / CONFIG).write_text(yaml.safe_dump(settings), encoding="utf-8")
        self._lock = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        self._rows = JsonlWriter(folder / METRICS, wait=True)
        self._since = time.monotonic()
        self._clear()

    def log(self, op: str, metrics: Mapping[str, float]) -> None:
        """Add a training request, or write the row of a step."""
        if op != "optim_step":
            self._loss += metrics["loss:sum"]
            self._tokens += metrics["tokens:sum"]
            return
        seconds = max(time.monotonic() - self._since, 1e-9)
        told = {"loss": self._loss, "num_tokens": self._tokens, "seconds": seconds}
        told |= {"tokens_per_second": self._tokens / seconds}
        stamp = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        row = {name: value for name, value in metrics.items() if name != "step"}
        self._rows.write({"step": int(metrics["step"]), "kind": "train", "time": stamp, **told, **row})
        self._clear()

    def close(self) -> None:
        self._rows.close()
        os.close(self._lock)

    def _clear(self) -> None:
        self._loss = self._tokens = 0.0
        self._since = time.monotonic()
