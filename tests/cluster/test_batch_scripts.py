"""The batch scripts under odd but real conditions; the programs that they call are faked here."""

import os
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FAKE = r"""#!/bin/bash
name=${0##*/}
line=$name; for word in "$@"; do line+="|$word"; done; echo "$line" >> "$FAKE_LOG"
case $name in
  scontrol) printf '%s\n' $FAKE_NODES ;;
  hostname) echo "$FAKE_ADDRESSES" ;;
  ray) [[ $1 == start ]] || grep '^ray|start' "$FAKE_LOG" | sed 's/.*/ 1 node_n/' ;;
  srun)
    echo "cpus|${SRUN_CPUS_PER_TASK:-}" >> "$FAKE_LOG"
    while [[ $1 == --* ]]; do shift; done
    exec "$@" ;;
  covey) exit "${FAKE_CODE:-0}" ;;
esac
"""


@dataclass
class Job:
    """A start of a script on one node, or others by name."""

    folder: Path

    def __post_init__(self) -> None:
        programs = self.folder / "a venv" / "bin"
        programs.mkdir(parents=True)
        for name in ("covey", "ray", "srun", "scontrol", "hostname"):
            (programs / name).write_text(FAKE)
            (programs / name).chmod(0o755)

    @property
    def run(self) -> Path:
        return self.folder / "runs" / "7"

    def start(self, script: str, *words: str, restarts: int = 0, **variables: str) -> tuple[int, str, list[list[str]]]:
        """Return exit code, output and the calls of programs, each with its words."""
        log = self.folder / "log"
        log.write_text("")
        given = {
            **{"SLURM_SUBMIT_DIR": str(self.folder), "SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[1-2]"},
            **{"COVEY_VENV": str(self.folder / "a venv"), "SLURM_RESTART_COUNT": str(restarts)},
            **{"FAKE_LOG": str(log), "FAKE_NODES": "n1 n2", "FAKE_ADDRESSES": "10.0.0.3", "COVEY_RAY_WAIT": "25"},
        }
        done = subprocess.run(
            ["bash", str(ROOT / "examples" / "slurm" / f"{script}.sbatch"), *words],
            env={"PATH": os.environ["PATH"], **given, **variables},
            capture_output=True,
            text=True,
            timeout=30,
        )
        return done.returncode, done.stdout + done.stderr, [line.split("|") for line in log.read_text().splitlines()]


@pytest.fixture
def job(tmp_path: Path) -> Job:
    return Job(tmp_path / "a [1] folder (x)")


def trained(calls: list[list[str]]) -> list[str]:
    """Words of `covey train`."""
    (words,) = (call[2:] for call in calls if call[:2] == ["covey", "train"])
    return words


@pytest.mark.parametrize("script", ["sync", "async"])
def test_a_requeued_job_resumes_from_its_checkpoint_or_restarts(script: str, job: Job) -> None:
    code, said, calls = job.start(script, "recipe=arithmetic")
    assert (code, trained(calls)[-1]) == (0, f"hydra.run.dir='{job.run}'"), said
    job.run.mkdir(parents=True)
    assert trained(job.start(script, restarts=1)[2])[-1] == f"hydra.run.dir='{job.run}'"
    assert [path.name for path in job.run.parent.glob("7.start-*")] == ["7.start-1"]
    (job.run / "checkpoints" / "step-000003").mkdir(parents=True)
    (job.run / "checkpoints" / "step-000003" / "manifest.json").touch()
    assert trained(job.start(script, restarts=2)[2]) == [f"resume='{job.run}'"]


@pytest.mark.parametrize("script", ["sync", "async"])
def test_the_folder_of_another_job_is_left_where_it_is(script: str, job: Job) -> None:
    job.run.mkdir(parents=True)
    assert trained(job.start(script)[2])[-1] == f"hydra.run.dir='{job.run}'"
    assert job.run.is_dir()


@pytest.mark.parametrize("script", ["sync", "async"])
def test_steps_have_the_processors_that_the_job_was_given_for_a_task(script: str, job: Job) -> None:
    _, _, calls = job.start(script, SLURM_CPUS_PER_TASK="4")
    assert {call[1] for call in calls if call[0] == "cpus"} == {"4"}


@pytest.mark.parametrize(
    ("addresses", "nodes", "found"),
    [
        ("10.0.0.3", "n1 n2", "10.0.0.3"),
        ("fe80::21a:4aff:fe16:1 127.0.1.1 10.0.0.3 192.168.1.2", "n1 n2", "10.0.0.3"),
        ("::1 127.0.1.1", "n1", "127.0.1.1"),
    ],
)
def test_the_head_has_an_address_that_the_other_nodes_find(
    addresses: str, nodes: str, found: str, tmp_path: Path
) -> None:
    code, said, calls = Job(tmp_path).start("async", FAKE_ADDRESSES=addresses, FAKE_NODES=nodes)
    assert code == 0, said
    heads = [call for call in calls if "--head" in call and call[0] == "ray"]
    others = [call for call in calls if f"--address={found}:20007" in call and call[0] == "ray"]
    assert [f"--node-ip-address={found}" in call for call in heads] == [True]
    assert others == [["ray", "start", "--disable-usage-stats", "--block", f"--address={found}:20007"]] * len(others)
    assert len(others) == len(nodes.split()) - 1


@pytest.mark.long
def test_the_exit_code_is_the_runs_and_the_token_is_gone_with_the_job(job: Job) -> None:
    code, _, _ = job.start("async", FAKE_CODE="143", COVEY_RUN=f"{job.run}/")
    assert code == 143
    assert list(job.run.parent.glob("**/token")) == []
    assert (job.run.parent / "7.logs" / "ray-n2.log").exists()
