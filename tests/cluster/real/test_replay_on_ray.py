"""A run of two trainer ranks on a real Ray, one of whose samplers is killed, replayed by the real command."""

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from ...guarantees.runs import finish, finish_well, kill, num_trained, prepare, resume, start, wait_until
from ...support.forked import Forked
from ...support.processes import are_gone, descendants
from .test_runs_on_ray import ON_RAY, ROWS, SLOWLY, Process, samplers, train_rows

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]

STRATEGIES = [pytest.param("ddp", marks=pytest.mark.slow), "fsdp"]


def replaying(folder: Path, name: str) -> Process:
    own = {"COVEY_CACHE": str(folder / "cache"), "PYTHONUNBUFFERED": "1"}
    return Forked(["replay", name], folder, os.environ | own)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_ranks_on_ray_that_lost_a_sampler_replay_to_the_same_weights(strategy: str, tmp_path: Path) -> None:
    prepare(tmp_path)
    words = ("devices.trainer=2", f"parallel.strategy={strategy}", "num_steps=20", "hydra.run.dir=run")
    slowly = {"REWARD_SECONDS": 0.3}  # the second sampler may start seconds after the first
    process = start(tmp_path, *ROWS, *ON_RAY, *words, environment=slowly)
    assert wait_until(lambda: num_trained(tmp_path / "run") >= 5 and len(samplers(process)) == 2, process)
    os.kill(min(samplers(process)), signal.SIGKILL)
    finish_well(process)
    assert sum(row.get("samplers/lost", 0) for row in train_rows(tmp_path / "run")) == 1
    schedule = [json.loads(line) for line in (tmp_path / "run" / "schedule.jsonl").read_text().splitlines()]
    assert len(schedule) == 20
    # Every step is compared, and the last digest is told
    said = finish_well(replaying(tmp_path, "run"))
    assert "the same weights after each of 20 steps" in " ".join(said.split())
    assert said.split()[-1] == schedule[-1]["weights"]
    # A replay whose second rank is killed ends in one line, and leaves nobody
    process = replaying(tmp_path, "run")
    assert wait_until(lambda: len(ranks_of(process)) == 2 and has_threads(max(ranks_of(process))), process)
    family = descendants(process.pid)
    os.kill(max(ranks_of(process)), signal.SIGKILL)
    status, output = finish(process)
    assert status == 2
    assert output.splitlines()[-1] == "covey: rank 1: ended its process (signal 9)"
    assert are_gone(family, seconds=10)
    # So does one that is killed itself
    process = replaying(tmp_path, "run")
    assert wait_until(lambda: len(ranks_of(process)) == 2 and has_threads(max(ranks_of(process))), process)
    family = descendants(process.pid)
    kill(process)
    assert are_gone(family, seconds=10)


def test_a_stale_run_on_ray_that_is_killed_reads_its_groups_back_and_replays(tmp_path: Path) -> None:
    prepare(tmp_path)
    run, words = tmp_path / "run", ("num_steps=20", "output.save_every=0", "hydra.run.dir=run")
    process = start(tmp_path, *ROWS[:-2], *ON_RAY, *words, environment=SLOWLY)
    assert wait_until(lambda: num_trained(run) >= 8, process)
    kill(process)
    before = whole_rows(run / "schedule.jsonl")
    assert len(before) >= 7
    assert not list(run.glob("checkpoints/step-*")), "only the journal has what was sampled"
    said = finish_well(resume(tmp_path, "run", environment=SLOWLY))
    assert "they are not sampled again; " in said
    schedule = whole_rows(run / "schedule.jsonl")
    assert len(schedule) == 20
    assert schedule[: len(before)] == before, "groups, versions and weights of steps that were finished"
    assert finish_well(replaying(tmp_path, "run")).split()[-1] == schedule[-1]["weights"]


def whole_rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]


def ranks_of(process: Process) -> list[int]:
    """Processes of ranks that a replay has started, in the order of their start."""
    found = (pid for pid in descendants(process.pid) if b"rank_process.py" in command_of(pid))
    return sorted(found)


def command_of(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def has_threads(pid: int) -> bool:
    """Whether a process has come as far as torch's threads."""
    try:
        return len(list(Path(f"/proc/{pid}/task").iterdir())) > 1
    except OSError:
        return False
