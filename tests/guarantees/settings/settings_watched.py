"""What settings of waits, stops, failing disks and several processes change, as `settings_observed` does it."""

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch.distributed as dist

from covey.cli.main import main
from covey.config.schema import Config
from covey.run.records import record
from covey.run.records.trackers import SERVICES, make_trackers
from covey.system.disk import WriteError
from covey.system.waits.signals import StopRequested
from covey.system.waits.watchdog import Watchdog
from covey_preflight import preflight

from .settings_observed import built, run_folder


def checks(config: Config) -> Any:
    """What the preflight finds and allows, but for the memory, which others take too, however slow the machine is."""
    with built(config) as run, pytest.MonkeyPatch.context() as patch:
        patch.setattr("covey_preflight.budget.SECONDS", 1e6)
        found = preflight.run_checks(preflight.PreflightContext(run, config))
    return [(check.name, check.figure, check.tolerance) for check in found if check.name != "memory"]


def waits(config: Config) -> dict[str, set[float]]:
    """The seconds that a run tells its guard, by what they are the limit of."""
    told: dict[str, set[float]] = {}
    make = Watchdog._wait

    def noted(watchdog: Watchdog, what: str, setting: str, seconds: float | None) -> Any:
        told.setdefault(setting, set()).add(watchdog._limits[setting])
        return make(watchdog, what, setting, seconds)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Watchdog, "_wait", noted)
        run_folder(config)
    return told


def patience_with_trackers(config: Config) -> bool:
    """Whether a service that takes a second to start is waited for."""

    class Slow:
        def log(self, step: int, metrics: Any, kind: str = "train") -> None:
            rows.append(step)

        def answers(self, *given: Any, **named: Any) -> None:
            return

        def close(self) -> None:
            return

    def start(*given: Any) -> Slow:
        time.sleep(1.0)
        return Slow()

    rows: list[int] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(SERVICES, "tensorboard", start)
        run_folder(config)
    return bool(rows)


def patience_with_ranks(config: Config) -> list[float]:
    """Seconds that the first of two processes waits for the other at most."""
    asked: list[float] = []

    def nobody_comes(*given: Any, **named: Any) -> None:
        asked.append(named["timeout"].total_seconds())
        raise ValueError("nobody came")

    with pytest.MonkeyPatch.context() as patch:
        for name, value in (("WORLD_SIZE", "2"), ("RANK", "0"), ("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", "1")):
            patch.setenv(name, value)
        patch.setattr(dist, "init_process_group", nobody_comes)
        words = ["recipe=arithmetic", f"timeouts.ranks={config.timeouts.ranks}", "hydra.run.dir=ranks"]
        assert main(["train", *words]) == 2
    return asked


def lost_file(config: Config) -> str:
    """What a run does whose metrics were moved away."""
    with TemporaryDirectory(dir=".") as made:
        folder = Path(made)
        tracker = make_trackers(config.output, folder, asdict(config), config.timeouts.tracker)
        moved = (folder / "metrics.jsonl").rename(folder / "moved.jsonl")
        try:
            tracker.log(1, {"loss": 0.5})
        except WriteError:
            return "stopped"
        moved.rename(folder / "metrics.jsonl")
        tracker.close()
        return (folder / "metrics.jsonl").read_text()


def end_of_a_stop(config: Config) -> int:
    """The exit status of a run that is told to stop while it begins a save of a second."""
    child = os.fork()
    if child == 0:
        save = record.save_checkpoint

        def slow(*given: Any, **named: Any) -> Path:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(1.0)
            return save(*given, **named)

        record.save_checkpoint = slow
        try:
            run_folder(config)
        except StopRequested as stop:
            os._exit(stop.status)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(status)


def layout_of_weights(config: Config) -> bool:
    """Whether the weights are shared out, where a launcher started this process (alone)."""
    with one_rank(), built(config) as run:
        return run.policy.sharded


@contextmanager
def one_rank() -> Iterator[None]:
    with TemporaryDirectory() as folder:
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
        try:
            yield
        finally:
            dist.destroy_process_group()
