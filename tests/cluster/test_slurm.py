"""The batch scripts on a real SLURM of two nodes; both are this machine."""

import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from covey.run.checkpoints.checkpoint import newest_valid
from tests.cluster.slurm_cluster import INSTALL, SlurmCluster, is_possible, slurm_cluster

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.xdist_group("nodes"),
    pytest.mark.timeout(400),
    pytest.mark.skipif(not is_possible(), reason=f"needs SLURM, as root: {INSTALL}"),
]
COVEY = Path(sys.executable).parent / "covey"
ROOT = Path(__file__).resolve().parents[2]
SMALL = (
    *("recipe=arithmetic", "preflight.enabled=false", "cold_start.num_steps=5", "cold_start.target_accuracy=null"),
    *("num_steps=3", "groups_per_step=4", "group_size=4", "evaluation.num_prompts=8", "evaluation.every=0"),
    *("output.progress=false", "output.save_every=1"),
)
LONG = (*SMALL, "num_steps=2000", "output.save_every=10")
SCRIPTS = {"sync": (), "async": ("max_staleness=2",)}


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmCluster]:
    with slurm_cluster(tmp_path_factory.mktemp("slurm") / "c") as cluster:
        yield cluster


def submit(slurm: SlurmCluster, script: str, words: tuple[str, ...]) -> int:
    variables = {
        "COVEY_VENV": str(COVEY.parent.parent),
        "COVEY_CACHE": str(slurm.folder / "cache"),
        "COVEY_NODE_IPS": "127.0.0.2 127.0.0.3",
        "MASTER_ADDR": "127.0.0.1",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(ROOT / "src"),
    }
    return slurm.submit("--cpus-per-task=2", str(ROOT / "examples" / "slurm" / f"{script}.sbatch"), *words, **variables)


def wait_for_checkpoint(run: Path, seconds: float = 120.0) -> None:
    until = time.monotonic() + seconds
    while not list(run.glob("checkpoints/step-*/manifest.json")):
        assert time.monotonic() < until, "no checkpoint was written"
        time.sleep(0.2)


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_script_runs_to_the_end(script: str, slurm: SlurmCluster) -> None:
    number = submit(slurm, script, (*SMALL, *SCRIPTS[script]))
    job = slurm.wait(number, 150, "COMPLETED", "FAILED", "CANCELLED")
    run = slurm.folder / "runs" / str(number)
    assert (job["JobState"], job["ExitCode"]) == ("COMPLETED", "0:0"), slurm.output(number)
    assert json.loads((run / "summary.json").read_text())["status"] == "completed"
    assert (run / "checkpoints" / "step-000003" / "manifest.json").exists()
    assert (run / "covey-rank1.log").exists() is (script == "sync")
    assert not list(run.parent.glob("*/token"))


def test_a_run_that_is_told_to_stop_saves_and_ends_with_143(slurm: SlurmCluster) -> None:
    number = submit(slurm, "async", (*LONG, "max_staleness=2"))
    run = slurm.folder / "runs" / str(number)
    wait_for_checkpoint(run)
    slurm.command("scancel", "--batch", "--signal=TERM", str(number))
    job = slurm.wait(number, 60, "FAILED", "COMPLETED", "CANCELLED")
    assert job["ExitCode"] == "143:0", slurm.output(number)
    last = (run / "metrics.jsonl").read_text().splitlines()[-1]
    steps = max(int(path.name[5:]) for path in run.glob("checkpoints/step-*"))
    assert json.loads(last)["step"] == steps > 0
    assert not (slurm.folder / "runs" / f"{number}.logs" / "token").exists()


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_requeued_slurm_job_resumes_from_its_checkpoint(script: str, slurm: SlurmCluster) -> None:
    number = submit(slurm, script, (*LONG, "num_steps=150", *SCRIPTS[script]))
    run = slurm.folder / "runs" / str(number)
    wait_for_checkpoint(run)
    requeued = slurm.command("scontrol", "requeue", str(number))
    assert requeued.returncode == 0, requeued.stderr
    slurm.wait(number, 60, "PENDING")
    slurm.wait_for_no_process(number, 60)
    time.sleep(1.1)  # a credential of the second in which the last one was revoked is refused
    slurm.command("scontrol", "update", f"JobId={number}", "StartTime=now")
    job = slurm.wait(number, 240, "COMPLETED", "FAILED", "CANCELLED")
    assert (job["JobState"], job["Restarts"]) == ("COMPLETED", "1"), slurm.output(number)
    assert "start 1" in slurm.output(number)
    assert f"resume='{run}'" in slurm.output(number)
    assert json.loads((run / "summary.json").read_text())["status"] == "completed"


def test_a_program_on_one_of_several_tasks_without_srun_is_refused(slurm: SlurmCluster) -> None:
    variables = {"PYTHONPATH": str(ROOT / "src")}
    words = ["--nodes=2", "--ntasks-per-node=1", "--wrap", f"{COVEY} train recipe=arithmetic"]
    number = slurm.submit(*words, **variables)
    job = slurm.wait(number, 60, "FAILED", "COMPLETED")
    assert job["ExitCode"] == "2:0"
    assert "this is one of 2 tasks of a Slurm job" in (slurm.folder / f"slurm-{number}.out").read_text()


def plain_srun(slurm: SlurmCluster, run: Path, words: tuple[str, ...], **variables: str) -> int:
    """Submit a job that is one plain `srun covey train ...` over two nodes."""
    given = {"PYTHONPATH": str(ROOT / "src"), "COVEY_CACHE": str(slurm.folder / "cache"), "OMP_NUM_THREADS": "1"}
    command = " ".join(("srun", str(COVEY), "train", *words, f"hydra.run.dir={run}"))
    return slurm.submit("--nodes=2", "--ntasks-per-node=1", "--wrap", command, **given, **variables)


def test_a_plain_srun_that_is_cancelled_saves_the_last_finished_step(slurm: SlurmCluster) -> None:
    run = slurm.folder / "runs" / "plain"
    number = plain_srun(slurm, run, LONG, MASTER_ADDR="127.0.0.1")
    wait_for_checkpoint(run)
    slurm.command("scancel", str(number))
    slurm.wait(number, 60, "CANCELLED", "COMPLETED", "FAILED")
    until = time.monotonic() + 30
    while json.loads((run / "summary.json").read_text())["status"] == "running":
        assert time.monotonic() < until, slurm.output(number)
        time.sleep(0.2)
    steps = max(int(path.name[5:]) for path in run.glob("checkpoints/step-*"))
    assert json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])["step"] == steps > 0
    assert newest_valid(run / "checkpoints") is not None


def test_a_first_node_without_an_address_ends_the_ranks_in_one_line(slurm: SlurmCluster) -> None:
    """The nodes of this cluster are called node1 and node2, and nothing resolves that."""
    number = plain_srun(slurm, slurm.folder / "runs" / "unresolved", SMALL)
    job = slurm.wait(number, 120, "FAILED", "COMPLETED", "CANCELLED")
    assert job["ExitCode"] == "2:0", slurm.output(number)
    assert "covey: the ranks meet at 'node1', which has no address on this machine" in slurm.output(number)


@pytest.mark.parametrize(
    ("says", "line"),
    [
        ("exit 1", 'the name of node1 has no address there: set COVEY_NODE_IPS="IP IP ..."'),
        ("echo 127.0.1.1", "the name of node1 is 127.0.1.1 there, where no other node finds it"),
    ],
)
def test_nodes_that_do_not_know_their_address_end_the_script_in_one_line(
    says: str, line: str, slurm: SlurmCluster
) -> None:
    programs = slurm.folder / "programs"
    programs.mkdir(exist_ok=True)
    (programs / "hostname").write_text(f"#!/bin/bash\n{says}\n")
    (programs / "hostname").chmod(0o755)
    venv = slurm.folder / "venv" / "bin"
    venv.mkdir(parents=True, exist_ok=True)
    for path in (COVEY, COVEY.parent / "ray", programs / "hostname"):
        (venv / path.name).unlink(missing_ok=True)
        (venv / path.name).symlink_to(path)
    number = slurm.submit(str(ROOT / "examples" / "slurm" / "async.sbatch"), *SMALL, COVEY_VENV=str(venv.parent))
    job = slurm.wait(number, 60, "FAILED", "COMPLETED", "CANCELLED")
    assert job["ExitCode"] == "2:0", slurm.output(number)
    assert line in slurm.output(number)
