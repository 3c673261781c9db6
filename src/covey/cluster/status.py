"""The state of trainer and samplers in a file for `covey status`."""

import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from covey.rollouts.buffer import GroupBuffer
from covey.system.disk import WriteError
from covey.system.jsonl import write_json
from covey.system.text.format import timestamp

STATUS_SECONDS = 2.0
"""Seconds between two writings of the status."""


def status_of(
    buffer: GroupBuffer, version: int, is_waiting: bool, samplers: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """Return the state of trainer and samplers; `version` is the samplers' newest."""
    trainer = {
        "step": buffer.step,
        "state": "waiting for groups" if is_waiting else "training",
        "version": version,
        "groups_finished": len(buffer.finished),
        "groups_pending": len(buffer.pending),
    }
    return {"time": timestamp(), "trainer": trainer, "samplers": list(samplers)}


class StatusFile:
    """A file written every two seconds, once it has a path."""

    def __init__(self) -> None:
        self.path: Path | None = None
        self._told = 0.0

    @property
    def is_due(self) -> bool:
        return self.path is not None and time.monotonic() - self._told >= STATUS_SECONDS

    def write(self, status: Mapping[str, Any]) -> None:
        """Write the status, ignoring a full disk."""
        self._told = time.monotonic()
        if self.path is not None:
            with suppress(WriteError):
                write_json(self.path, status)
