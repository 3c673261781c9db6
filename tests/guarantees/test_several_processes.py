"""Training on several processes, by the real command, torchrun and accelerate launch: same run, one writer."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from covey.cli.main import main

from ..support.builders import saved_model
from ..support.processes import are_gone, children
from ..support.small import logging_as_it_was
from .runs import (
    CURRICULUM,
    MASKED,
    SETTINGS,
    TIMES,
    Process,
    fingerprint,
    finish,
    finish_well,
    num_trained,
    prepare,
    saved_step,
    wait_until,
)
from .runs import start as start_alone

TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "covey")
ACCELERATE = (sys.executable, "-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2", "-m", "covey")
UNEVEN = ("groups_per_step=3", "num_steps=12", "evaluation.every=6", "model.precision=float64")
"""Three groups a step for two ranks, in the arithmetic in which small differences show."""

NOT_COMPARED = ("kind", "num_micro_batches")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Rows, reward, and the run "alone" that one process made."""
    made = tmp_path_factory.mktemp("ranks")
    prepare(made)
    finish_well(start_alone(made, *SETTINGS, *UNEVEN, "hydra.run.dir=alone"))
    return made


@pytest.fixture(scope="module")
def filled(folder: Path) -> Path:
    """The run of one process whose policy fills in masked tokens."""
    finish_well(start_alone(folder, *SETTINGS, *UNEVEN, *MASKED, "hydra.run.dir=filled"))
    return folder / "filled"


@pytest.fixture(scope="module")
def unbroken(folder: Path) -> str:
    """What two processes come to that nothing stops."""
    finish_well(launch(folder, *SETTINGS, "hydra.run.dir=unbroken"))
    return fingerprint(folder / "unbroken")


def launch(folder: Path, *words: str, launcher: Sequence[str] = TORCHRUN, **variables: Any) -> Process:
    own = {"OMP_NUM_THREADS": "1", "COVEY_CACHE": str(folder / "cache"), "PYTHONUNBUFFERED": "1"}
    return subprocess.Popen(
        [*launcher, "train", *words],
        cwd=folder,
        env=os.environ | own | {name: str(value) for name, value in variables.items()},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def weights(run: Path) -> torch.Tensor:
    last = sorted((run / "checkpoints").glob("step-??????"))[-1]
    tensors = load_file(last / "policy" / "model.safetensors")
    return torch.cat([tensors[name].flatten().double() for name in sorted(tensors)])


def rows(run: Path) -> list[dict[str, Any]]:
    """The numbers of metrics.jsonl that do not depend on how they were computed."""
    lines = (run / "metrics.jsonl").read_text().splitlines()
    return [{k: v for k, v in json.loads(line).items() if k not in (*TIMES, *NOT_COMPARED)} for line in lines]


def wait_for_step(process: Process, run: Path, step: int) -> None:
    until = time.monotonic() + 120
    while num_trained(run) < step:
        assert process.poll() is None, finish(process)[1]
        assert time.monotonic() < until
        time.sleep(0.01)


EITHER = pytest.mark.parametrize("strategy", [pytest.param("ddp", marks=pytest.mark.slow), "fsdp"], scope="module")


@pytest.fixture(scope="module")
def said(folder: Path, strategy: str) -> str:
    """What two processes say that make the run of one, started as a cluster's job steps are."""
    words = (*SETTINGS, *UNEVEN, f"parallel.strategy={strategy}", f"hydra.run.dir={strategy}")
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
    place = {"WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    both = [start_alone(folder, *words, environment=place | {"RANK": n, "LOCAL_RANK": n}) for n in range(2)]
    return "".join(finish_well(rank) for rank in both)


@EITHER
@pytest.mark.usefixtures("said")
def test_two_processes_make_the_run_of_one(folder: Path, strategy: str) -> None:
    expected, got = weights(folder / "alone"), weights(folder / strategy)
    assert float((got - expected).norm() / expected.norm()) < 1e-10
    ours, theirs = rows(folder / strategy), rows(folder / "alone")
    assert len(ours) == len(theirs) == 12 + 3
    for mine, other in zip(ours, theirs, strict=True):
        assert mine == pytest.approx(other, rel=1e-8, abs=1e-10)


@EITHER
def test_rank_0_alone_writes_and_speaks(folder: Path, strategy: str, said: str) -> None:
    assert said.count(f"run folder: {strategy}") == 1
    assert said.count("checks passed") == 1
    assert len(rows(folder / strategy)) == 12 + 3
    names = {path.name for path in (folder / strategy).iterdir()}
    assert {"covey.log", "covey-rank1.log", "summary.json", "versions.json"} <= names
    assert not [name for name in names if "rank0" in name]


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_two_processes_make_the_run_of_one_that_fills_in(folder: Path, filled: Path, strategy: str) -> None:
    run = folder / f"filled-{strategy}"
    words = (*SETTINGS, *UNEVEN, *MASKED, f"parallel.strategy={strategy}", f"hydra.run.dir={run.name}")
    finish_well(launch(folder, *words))
    expected, got = weights(filled), weights(run)
    assert float((got - expected).norm() / expected.norm()) < 1e-10
    for mine, other in zip(rows(run), rows(filled), strict=True):
        assert mine == pytest.approx(other, rel=1e-8, abs=1e-10)


@pytest.mark.slow
def test_two_processes_with_a_curriculum_draw_the_prompts_of_one(folder: Path) -> None:
    uneven = [word for word in UNEVEN if not word.startswith("num_steps")]
    finish_well(start_alone(folder, *CURRICULUM, *uneven, "hydra.run.dir=taught"))
    finish_well(launch(folder, *CURRICULUM, *uneven, "hydra.run.dir=taught-by-two"))
    expected, got = weights(folder / "taught"), weights(folder / "taught-by-two")
    assert float((got - expected).norm() / expected.norm()) < 1e-10
    for mine, other in zip(rows(folder / "taught-by-two"), rows(folder / "taught"), strict=True):
        assert mine == pytest.approx(other, rel=1e-8, abs=1e-10)


@pytest.mark.slow
def test_accelerate_launch_makes_the_run_of_one(folder: Path) -> None:
    finish_well(launch(folder, *SETTINGS, *UNEVEN, "hydra.run.dir=accelerated", launcher=ACCELERATE))
    expected, got = weights(folder / "alone"), weights(folder / "accelerated")
    assert float((got - expected).norm() / expected.norm()) < 1e-10


@pytest.mark.slow
def test_a_run_resumes_with_another_number_of_processes_and_reports_it(folder: Path) -> None:
    words = (*SETTINGS, *UNEVEN, "output.save_every=6", "parallel.strategy=fsdp", "hydra.run.dir=changing")
    process = launch(folder, *words)
    wait_for_step(process, folder / "changing", 8)
    process.send_signal(signal.SIGTERM)
    finish(process)
    assert 8 <= saved_step(folder / "changing") < 12
    output = finish_well(start_alone(folder, "resume=changing"))
    assert "processes was 2 and is 1" in output
    expected, got = weights(folder / "alone"), weights(folder / "changing")
    assert float((got - expected).norm() / expected.norm()) < 1e-10
    assert [row["step"] for row in rows(folder / "changing")] == [row["step"] for row in rows(folder / "alone")]


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_two_processes_stopped_by_a_signal_resume_to_the_same_bits(
    folder: Path, strategy: str, request: pytest.FixtureRequest
) -> None:
    words = (*SETTINGS, f"parallel.strategy={strategy}")
    if strategy == "ddp":
        expected = request.getfixturevalue("unbroken")
    else:
        finish_well(launch(folder, *words, "hydra.run.dir=unbroken-fsdp"))
        expected = fingerprint(folder / "unbroken-fsdp")
    run = folder / f"stopped-{strategy}"
    process = launch(folder, *words, f"hydra.run.dir={run.name}", REWARD_SECONDS=0.1)
    wait_for_step(process, run, 7)
    process.send_signal(signal.SIGINT)
    finish(process)
    assert 7 <= saved_step(run) < 40
    finish_well(launch(folder, f"resume={run.name}"))
    assert fingerprint(run) == expected


@pytest.mark.slow
def test_adapters_on_shared_4_bits_resume_to_the_same_bits(folder: Path) -> None:
    pytest.importorskip("bitsandbytes")
    name = saved_model(folder / "qwen2", "qwen2", hidden_size=64, intermediate_size=128, num_hidden_layers=2)
    words = [word for word in SETTINGS if not word.startswith("model.nano")]
    words += [f"model.name={name}", "model.load_in_4bit=true", "model.lora_rank=4", "parallel.strategy=fsdp"]
    finish_well(launch(folder, *words, "num_steps=12", "hydra.run.dir=whole-4bit"))
    finish_well(launch(folder, *words, "num_steps=5", "hydra.run.dir=cut-4bit"))
    finish_well(launch(folder, "resume=cut-4bit", "num_steps=12", "resume_changes=[num_steps]"))
    last = [folder / run / "checkpoints" / "step-000012" / "policy" for run in ("whole-4bit", "cut-4bit")]
    whole, cut = (load_file(policy / "adapter_model.safetensors") for policy in last)
    assert len(whole) == 28
    assert all(torch.equal(cut[name], weight) for name, weight in whole.items())
    assert any(weight.abs().max() > 0 for name, weight in whole.items() if "lora_B" in name), "they have learnt"


@pytest.mark.slow
def test_a_killed_rank_stops_the_other_and_the_run_resumes_exactly(folder: Path, unbroken: str) -> None:
    """By hand, without a launcher that would end the other: what a cluster's job steps look like."""
    words = (*SETTINGS, "output.save_every=1", "hydra.run.dir=killed")
    both = [
        launch(folder, *words, launcher=(sys.executable, "-m", "covey"), RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=2,
               MASTER_ADDR="127.0.0.1", MASTER_PORT=29611)
        for rank in range(2)
    ]  # fmt: skip
    wait_for_step(both[0], folder / "killed", 3)
    both[1].send_signal(signal.SIGKILL)
    killed_at = time.monotonic()
    status, output = finish(both[0])
    both[1].communicate()
    assert time.monotonic() - killed_at < 30
    assert status == 2
    assert "lost the other ranks" in output
    assert "Traceback" not in output
    assert saved_step(folder / "killed") >= 2  # the row of step 3 is written before its checkpoint
    finish_well(launch(folder, "resume=killed"))
    assert fingerprint(folder / "killed") == unbroken


@pytest.mark.slow
def test_a_rank_that_does_not_come_is_named_within_the_deadline(folder: Path) -> None:
    (folder / "sleepy_reward.py").write_text(
        "import os, time\n"
        "def sleepy(prompts, completions, **columns):\n"
        "    time.sleep(60 if os.environ['RANK'] == '1' else 0)\n"
        "    return [0.0] * len(completions)\n"
    )
    words = ["rewards=[sleepy_reward:sleepy]" if w.startswith("rewards=") else w for w in SETTINGS]
    process = launch(
        folder, *words, "evaluation.num_prompts=1", "preflight.enabled=false", "timeouts.ranks=4", "hydra.run.dir=late"
    )
    started = time.monotonic()
    status, output = finish(process)
    assert status != 0
    assert time.monotonic() - started < 60
    assert "rank 0 has waited 4 s for rank 1 to come to the end of sampling" in output


def test_what_ends_one_rank_ends_all_and_is_said_once(folder: Path) -> None:
    (folder / "failing_reward.py").write_text(
        "import os\n"
        "def failing(prompts, completions, **columns):\n"
        "    if os.environ['RANK'] == '1': raise OSError('the judge of rank 1 is away')\n"
        "    return [0.0] * len(completions)\n"
    )
    words = ["rewards=[failing_reward:failing]" if w.startswith("rewards=") else w for w in SETTINGS]
    process = launch(folder, *words, "preflight.enabled=false", "hydra.run.dir=failing")
    assert wait_until(lambda: len(children(process.pid)) >= 2, process)
    ranks = children(process.pid)
    status, output = finish(process)
    assert status != 0
    assert output.count("covey: ") == 1, output
    assert "covey: rank 1: " in output
    assert "the judge of rank 1 is away" in output
    assert are_gone(ranks)


@pytest.mark.slow
def test_a_setting_that_is_wrong_is_said_once(folder: Path) -> None:
    status, output = finish(launch(folder, *SETTINGS, "optimizer.lr=-1"))
    assert status != 0
    assert output.count("optimizer.lr must be > 0, got -1") == 1


@pytest.mark.parametrize("setting", ["optimizer.name=adamw8bit", "model.precision=float16"])
def test_what_cannot_be_sharded_is_refused(
    folder: Path, setting: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(folder)
    with logging_as_it_was():
        assert main(["train", *SETTINGS, "parallel.strategy=fsdp", setting]) == 2
    assert f"{setting} needs parallel.strategy = ddp, got parallel.strategy=fsdp" in capsys.readouterr().err
