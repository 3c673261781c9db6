"""Runs of the real command on a real Ray: equal to a local run, killed, frozen, stopped and resumed."""

import json
import os
import random
import signal
import time
from collections import defaultdict
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from covey.cli.main import main
from covey.cluster.settings import DevicesConfig
from covey.cluster.start import INLINE_BYTES, connect, disconnect, inline_bytes
from covey.run.checkpoints.checkpoint import newest_valid

from ...guarantees.runs import (
    Process,
    finish,
    finish_well,
    kill,
    new_run,
    num_trained,
    prepare,
    resume,
    saved_step,
    wait_until,
)
from ...support.processes import are_gone, descendants

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(900)]

SIZES = (
    *("preflight.enabled=false", "model.nano_hidden_size=16", "model.nano_num_layers=1", "model.nano_num_heads=2"),
    *("groups_per_step=4", "group_size=4", "evaluation.num_prompts=4", "evaluation.num_samples=2", "evaluation.k=[1]"),
    *("evaluation.every=0", "output.progress=false", "optimizer.lr=1e-3"),
)
SUMS = (*SIZES, "recipe=arithmetic", "cold_start.num_steps=40", "model.precision=float64", "num_steps=60")
ROWS = (
    *(*SIZES, "environment=reward_functions", "rewards=[varied_reward:varied]", "environment.num_workers=1"),
    *("data.path=rows.jsonl", "sampling.max_tokens=6", "output.save_every=10", "output.rollouts_per_step=64"),
)
"""Rewards of worker processes that take 50 ms each, so that a step takes long enough to be disturbed."""
MOST_STEPS = 400
WITHOUT_END = "num_steps=4000"
"""However long it takes this process to see how far a run is and to disturb it, the run is not over yet."""
SLOWLY = {"REWARD_SECONDS": 0.05}
ON_RAY = ("source=ray", "devices.sampler=2", "max_staleness=2", "devices.groups_per_sampler=4")
ROUNDING = 1e-12
"""Of statistics of differences that are 0 up to float64."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ray")
    prepare(folder)
    return folder


def train_rows(run: Path) -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [row for row in rows if row["kind"] == "train"]


def steps_taken(run: Path) -> int:
    """Steps whose groups have gone to the trainer, as of two seconds ago at most."""
    with suppress(FileNotFoundError):
        return int(json.loads((run / "status.json").read_text())["trainer"]["step"])
    return 0


def prompts_of_steps(run: Path) -> list[list[str]]:
    """Ids of the prompts of each step, in order."""
    of_step: dict[int, dict[str, None]] = defaultdict(dict)
    for line in (run / "rollouts.jsonl").read_text().splitlines():
        row = json.loads(line)
        of_step[row["step"]][row["prompt_id"]] = None
    return [list(of_step[step]) for step in sorted(of_step)]


def samplers(process: Process) -> set[int]:
    """Processes of samplers."""
    return actors(process, "SamplerActor")


def actors(process: Process, kind: str) -> set[int]:
    """Processes of Ray's actors of one class."""
    found = set()
    for pid in descendants(process.pid):
        with suppress(OSError):
            if kind in Path(f"/proc/{pid}/cmdline").read_text():
                found.add(pid)
    return found


def await_moment(run: Path, process: Process, rng: random.Random) -> None:
    """Wait until the run has saved ten steps more, and for a moment at random."""
    reached = saved_step(run) + 10
    assert wait_until(lambda: saved_step(run) >= reached, process)
    time.sleep(rng.uniform(0.0, 0.5))


def check_run(folder: Path, name: str, num_steps: int) -> None:
    """Every step is there once, within the bound, and of the prompts that it has in a local run."""
    rows = train_rows(folder / name)
    assert [row["step"] for row in rows] == list(range(1, num_steps + 1))
    assert max(row["staleness/max"] for row in rows) == 2.0
    assert all(row["num_groups"] == 4 for row in rows)
    if not (folder / "local").exists():
        finish_well(
            new_run(folder, "local", *ROWS, f"num_steps={MOST_STEPS}", settings=(), environment={"REWARD_SECONDS": 0})
        )
    assert prompts_of_steps(folder / name)[:MOST_STEPS] == prompts_of_steps(folder / "local")[:num_steps]


def check_end(status: int, output: str, line: str = "covey: ") -> None:
    """It says in one line why it has ended, and neither it nor Ray shows where in the code."""
    assert status == 2, output
    assert output.strip().splitlines()[-1].startswith(line), output
    assert not {"Traceback", "File"} & set(output.split()), output


def stop(run: Path, process: Process) -> int:
    """The step that a run has saved which trains ten more, and is stopped."""
    seen = num_trained(run)
    assert wait_until(lambda: num_trained(run) >= seen + 10, process)
    process.send_signal(signal.SIGTERM)
    status, output = finish(process)
    assert status == 143, output
    return saved_step(run)


def start(folder: Path, name: str, *words: str) -> Process:
    return new_run(folder, name, *ON_RAY, *words, settings=ROWS, environment=SLOWLY)


# ------------------------------------------------------------------------------------------------------- equality


def test_without_staleness_a_ray_run_equals_a_local_one(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    finish_well(new_run(folder, "sums-local", settings=SUMS))
    finish_well(new_run(folder, "sums-ray", "source=ray", "devices.sampler=2", settings=SUMS))
    files = [folder / name / "checkpoints/step-000060/policy/model.safetensors" for name in ("sums-local", "sums-ray")]
    assert files[0].read_bytes() == files[1].read_bytes()
    local, on_ray = train_rows(folder / "sums-local"), train_rows(folder / "sums-ray")
    assert len(local) == len(on_ray) == 60
    for own, other in zip(local, on_ray, strict=True):
        for name in own.keys() - {"time", "seconds", "tokens_per_second"}:
            assert other[name] == own[name] or abs(other[name] - own[name]) < ROUNDING, name
        assert other["staleness/max"] == 0.0
    assert main(["status", str(folder / "sums-ray")]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "this run has ended after 60 steps; its last word was at " in said
    assert said.count("ended") == 1 + 3, "the trainer and two samplers"


TAUGHT = ("algorithm.teacher=self", "algorithm.teacher_shows=[gold]", "algorithm.teacher_weights=ema", "num_steps=8")


def test_a_teacher_on_ray_teaches_as_in_one_process_and_late_groups_too(folder: Path) -> None:
    ways = {"here": (), "on-ray": ("source=ray", "devices.sampler=2"), "late": (*ON_RAY, "publish_every=1")}
    for name, way in ways.items():
        finish_well(new_run(folder, f"taught-{name}", *TAUGHT, *way, settings=SUMS))
    files = [folder / f"taught-{name}/checkpoints/step-000008/policy/model.safetensors" for name in ("here", "on-ray")]
    assert files[0].read_bytes() == files[1].read_bytes()
    late = train_rows(folder / "taught-late")
    assert max(row["staleness/max"] for row in late) > 0
    assert all(row["teacher/kl"] > 0 and row["teacher/token_fraction"] == 1.0 for row in late)


# ------------------------------------------------------------------------------------------------------- samplers


@pytest.mark.parametrize("num_kills", [8, pytest.param(20, marks=pytest.mark.slow)])
def test_samplers_killed_at_random_moments_lose_nothing(num_kills: int, folder: Path) -> None:
    rng = random.Random(num_kills)
    name = f"killed{num_kills}"
    process = start(folder, name, WITHOUT_END)
    run, killed = folder / name, 0
    while killed < num_kills:
        seen = num_trained(run)
        assert wait_until(lambda seen=seen: num_trained(run) > seen and len(samplers(process)) == 2, process)
        time.sleep(rng.uniform(0.0, 0.5))
        with suppress(ProcessLookupError, IndexError):
            os.kill(rng.choice(sorted(samplers(process))), signal.SIGKILL)
            killed += 1
    check_run(folder, name, stop(run, process))
    assert sum(row.get("samplers/lost", 0) for row in train_rows(run)) >= 0.75 * num_kills


def test_a_sampler_that_is_frozen_for_thirty_seconds_is_replaced_and_gone(folder: Path) -> None:
    process = start(folder, "frozen", WITHOUT_END, "timeouts.samplers=3")
    run = folder / "frozen"
    assert wait_until(lambda: num_trained(run) >= 5 and len(samplers(process)) == 2, process)
    frozen = min(samplers(process))
    os.kill(frozen, signal.SIGSTOP)
    stopped = time.monotonic()
    assert are_gone([frozen], seconds=30), "who froze it ends it, so that it cannot come back"
    assert time.monotonic() - stopped > 3
    check_run(folder, "frozen", stop(run, process))
    (line,) = (line for line in (run / "covey.log").read_text().splitlines() if " is lost and replaced: " in line)
    assert line.endswith(("it gave no sign of life for 3 s", "was not taken within 3 s"))


def test_workers_of_a_sampler_that_is_killed_end_with_it(folder: Path) -> None:
    process = start(folder, "orphans", WITHOUT_END)
    assert wait_until(lambda: num_trained(folder / "orphans") >= 5, process)
    victim = min(samplers(process))
    workers = descendants(victim)
    assert workers, "the workers of the reward are there"
    os.kill(victim, signal.SIGKILL)
    assert are_gone(workers, seconds=10)
    check_run(folder, "orphans", stop(folder / "orphans", process))


# ------------------------------------------------------------------------------------------------------- the whole


@pytest.mark.parametrize("num_kills", [2, pytest.param(5, marks=pytest.mark.slow)])
def test_a_killed_cluster_ends_the_run_in_one_line_and_it_resumes(num_kills: int, folder: Path) -> None:
    rng = random.Random(num_kills)
    name = f"cluster{num_kills}"
    run = folder / name
    process = start(folder, name, WITHOUT_END, "timeouts.samplers=4")
    for _ in range(num_kills):
        await_moment(run, process, rng)
        daemons = {pid for pid in descendants(process.pid) if is_of_ray(pid)}
        for pid in daemons:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        killed = time.monotonic()
        status, output = finish(process)
        assert time.monotonic() - killed < 45
        check_end(status, output)
        assert are_gone(daemons)
        assert newest_valid(run / "checkpoints") is not None
        process = resume(folder, name, environment=SLOWLY)
    check_run(folder, name, stop(run, process))


@pytest.mark.parametrize(
    "daemon", ["gcs_server", "raylet", pytest.param("ray::RuntimeEnvAgent", marks=pytest.mark.slow)]
)
def test_a_killed_ray_daemon_ends_the_run_in_one_line_and_it_resumes(daemon: str, folder: Path) -> None:
    process = start(folder, daemon, WITHOUT_END, "timeouts.samplers=4")
    assert wait_until(lambda: saved_step(folder / daemon) >= 10, process)
    daemons = {pid for pid in descendants(process.pid) if is_of_ray(pid)}
    (victim,) = (pid for pid in daemons if program_of(pid) == daemon)
    os.kill(victim, signal.SIGKILL)
    killed = time.monotonic()
    status, output = finish(process)
    assert time.monotonic() - killed < 45
    check_end(status, output)
    assert are_gone(daemons)
    assert saved_step(folder / daemon) == num_trained(folder / daemon), "the last step is saved"
    check_run(folder, daemon, stop(folder / daemon, resume(folder, daemon, environment=SLOWLY)))


def test_a_long_update_ends_in_one_line_where_the_cluster_is_lost(folder: Path) -> None:
    """Ray ends a process without a word that has not reached its GCS for a minute."""
    process = start(folder, "long", "num_steps=60", "timeouts.samplers=4", "updates_per_batch=1000000")
    assert wait_until(lambda: steps_taken(folder / "long") == 1, process)
    time.sleep(10)  # until the first of its optimiser steps is made, an update can be stopped
    daemons = {pid for pid in descendants(process.pid) if is_of_ray(pid)}
    (victim,) = (pid for pid in daemons if program_of(pid) == "gcs_server")
    os.kill(victim, signal.SIGKILL)
    killed = time.monotonic()
    code, output = finish(process)
    assert 25 < time.monotonic() - killed < 45
    silent = "covey: the Ray cluster gave no sign of life for 4 s, and what was under way did not end within 25 s"
    check_end(code, output, silent)
    assert are_gone(daemons)


def test_small_weights_travel_inside_of_calls_in_a_cluster_that_is_started_here() -> None:
    is_own = connect(DevicesConfig(sampler=1), 0)
    try:
        assert (is_own, inline_bytes()) == (True, INLINE_BYTES)
    finally:
        disconnect(is_own)


def test_sampling_ranks_save_their_last_step_when_a_ray_daemon_dies(folder: Path) -> None:
    """They need the cluster no more, and Ray would end them for its loss all the same."""
    run = folder / "alone"
    words = ("source=ray", "devices.sampler=0", "devices.trainer=2", WITHOUT_END, "output.save_every=0")
    process = new_run(folder, "alone", *words, settings=ROWS, environment=SLOWLY)
    assert wait_until(lambda: num_trained(run) >= 3, process)
    daemons = {pid for pid in descendants(process.pid) if is_of_ray(pid)}
    (victim,) = (pid for pid in daemons if program_of(pid) == "gcs_server")
    os.kill(victim, signal.SIGKILL)
    killed = time.monotonic()
    status, output = finish(process)
    assert time.monotonic() - killed < 45
    check_end(status, output, "covey: the Ray cluster gave no sign of life for 10 s")
    assert are_gone(daemons)
    done = saved_step(run)
    assert done == num_trained(run) >= 3
    # One process goes on with it, without Ray.
    more = ("devices.trainer=1", f"num_steps={done + 2}", "resume_changes=[devices.trainer,num_steps]")
    finish_well(resume(folder, "alone", *more))
    assert [row["step"] for row in train_rows(run)] == list(range(1, done + 3))


def program_of(pid: int) -> str:
    """Name of the program that a process runs."""
    with suppress(OSError):
        return Path(Path(f"/proc/{pid}/cmdline").read_text().split("\0")[0]).name
    return ""


@pytest.mark.parametrize("num_kills", [3, pytest.param(10, marks=pytest.mark.slow)])
def test_a_killed_trainer_rank_ends_the_run_in_one_line_and_it_resumes(num_kills: int, folder: Path) -> None:
    rng = random.Random(num_kills)
    name = f"ranks{num_kills}"
    run = folder / name
    process = start(folder, name, WITHOUT_END, "devices.trainer=2")
    for _ in range(num_kills):
        await_moment(run, process, rng)
        family = actors(process, "SamplerActor") | actors(process, "TrainerRank")
        victim = rng.choice([process.pid, *actors(process, "TrainerRank")])  # rank 0, which has the buffer, or rank 1
        killed = time.monotonic()
        os.kill(victim, signal.SIGKILL)
        status, output = finish(process)
        if victim != process.pid:
            check_end(status, output)
        assert time.monotonic() - killed < 60
        assert are_gone(family)
        process = resume(folder, name, environment=SLOWLY)
    last = stop(run, process)
    rows = train_rows(run)
    assert [row["step"] for row in rows] == list(range(1, last + 1))
    assert max(row["staleness/max"] for row in rows) <= 2.0


def is_of_ray(pid: int) -> bool:
    with suppress(OSError):
        return "watchdog" not in Path(f"/proc/{pid}/cmdline").read_text()
    return False


def test_a_stopped_or_killed_driver_leaves_no_sampler_and_its_run_resumes(folder: Path) -> None:
    name = "outputs/day/stopped"
    run = folder / name
    process = start(folder, name, WITHOUT_END)
    for number, expected in ((signal.SIGTERM, 143), (signal.SIGINT, 130)):
        before = saved_step(run)
        assert wait_until(lambda before=before: num_trained(run) >= before + 6, process)
        family = samplers(process)
        assert family
        if number == signal.SIGINT:
            os.killpg(process.pid, number)
        else:
            process.send_signal(number)
        status, output = finish(process)
        assert status == expected, output
        assert are_gone(family, seconds=10)
        assert saved_step(run) >= before + 6
        process = resume(folder, "latest", environment=SLOWLY)
    # SIGKILL: there is nothing to do but to be consistent.
    reached = saved_step(run) + 10
    assert wait_until(lambda: saved_step(run) >= reached, process)
    family = samplers(process)
    kill(process)
    assert are_gone(family, seconds=10)
    last = saved_step(run) + 10
    finish_well(resume(folder, name, f"num_steps={last}", "resume_changes=[num_steps]", environment=SLOWLY))
    check_run(folder, name, last)
