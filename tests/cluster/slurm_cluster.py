"""A real SLURM of two nodes on this machine: one munged, one slurmctld, two slurmd, all files in one folder."""

import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol", "scancel")
INSTALL = "apt-get install -y --no-install-recommends slurm-wlm munge"
SETTINGS = """\
ClusterName=mini
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.sock
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/log/slurmctld.log
SlurmdLogFile={folder}/log/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
MpiDefault=none
ReturnToService=2
SlurmdParameters=config_overrides
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
KillWait=5
SlurmdTimeout=20
NodeName=node1 NodeHostname={host} NodeAddr=127.0.0.1 Port={first} CPUs=2 RealMemory=4000 State=UNKNOWN
NodeName=node2 NodeHostname={host} NodeAddr=127.0.0.1 Port={second} CPUs=2 RealMemory=4000 State=UNKNOWN
PartitionName=main Nodes=node1,node2 Default=YES MaxTime=INFINITE State=UP
"""


def is_possible() -> bool:
    """Whether SLURM is installed and may be started by this user."""
    return os.geteuid() == 0 and all(shutil.which(program) for program in PROGRAMS)


@dataclass(frozen=True)
class SlurmCluster:
    """A cluster that runs, and the commands that talk to it."""

    folder: Path
    environment: Mapping[str, str]

    def command(self, *words: str, seconds: float = 60.0) -> subprocess.CompletedProcess[str]:
        """Run a command of SLURM. Its output is text."""
        return subprocess.run(
            words, env=dict(self.environment), cwd=self.folder, capture_output=True, text=True, timeout=seconds
        )

    def submit(self, *words: str, **variables: str) -> int:
        """Submit a job by sbatch and return its number."""
        environment = {**self.environment, **variables}
        done = subprocess.run(
            ["sbatch", "--parsable", *words],
            env=environment,
            cwd=self.folder,
            capture_output=True,
            text=True,
            timeout=30,
        )
        assert done.returncode == 0, done.stderr
        return int(done.stdout.strip())

    def job(self, number: int) -> dict[str, str]:
        """Return what scontrol says of a job."""
        said = self.command("scontrol", "--oneliner", "show", "job", str(number)).stdout
        return dict(word.split("=", 1) for word in said.split() if "=" in word)

    def wait(self, number: int, seconds: float, *states: str) -> dict[str, str]:
        """Wait until a job is in one of the states. TimeoutError where it does not come to that."""
        until = time.monotonic() + seconds
        while (job := self.job(number))["JobState"] not in states:
            if time.monotonic() > until:
                raise TimeoutError(f"job {number} is {job['JobState']}\n{self.output(number)}")
            time.sleep(0.2)
        return job

    def wait_for_no_process(self, number: int, seconds: float) -> None:
        """Wait until no process of a job is left. TimeoutError where one stays.

        A job that is requeued is PENDING before its script's end is told to slurmctld: a start in between would be
        taken for ended with that script's exit code. Slurm's own delay of two minutes keeps them apart.
        """
        until = time.monotonic() + seconds
        while left := _commands_with(f"slurmstepd: [{number}."):
            if time.monotonic() > until:
                raise TimeoutError(f"job {number} still has {', '.join(left)}\n{self.output(number)}")
            time.sleep(0.2)

    def output(self, number: int) -> str:
        """Return what the job has printed."""
        return "\n".join(path.read_text() for path in self.folder.glob(f"*-{number}.out"))


@contextmanager
def slurm_cluster(folder: Path) -> Iterator[SlurmCluster]:
    """Start the daemons, wait for two idle nodes, and end everything afterwards."""
    for name in ("state", "log"):
        (folder / name).mkdir(parents=True)
    ports = [_free_port() for _ in range(3)]
    host = socket.gethostname()
    settings = SETTINGS.format(folder=folder, host=host, port=ports[0], first=ports[1], second=ports[2])
    (folder / "slurm.conf").write_text(settings)
    (folder / "munge.key").write_bytes(os.urandom(128))
    (folder / "munge.key").chmod(0o600)
    environment = {**os.environ, "SLURM_CONF": str(folder / "slurm.conf")}
    munge = [f"--{name}={folder}/munge.{suffix}" for name, suffix in MUNGE_FILES.items()]
    daemons = (
        ["munged", *munge, f"--log-file={folder}/log/munged.log", "--force"],
        ["slurmctld", "-f", environment["SLURM_CONF"], "-c"],
        ["slurmd", "-f", environment["SLURM_CONF"], "-N", "node1"],
        ["slurmd", "-f", environment["SLURM_CONF"], "-N", "node2"],
    )
    cluster = SlurmCluster(folder, environment)
    try:
        for words in daemons:
            subprocess.run(words, env=environment, check=True, capture_output=True, timeout=30)
        until = time.monotonic() + 30
        while cluster.command("sinfo", "--noheader", "--Node", "--format=%T").stdout.split() != ["idle", "idle"]:
            assert time.monotonic() < until, cluster.command("sinfo", "--Node", "--long").stdout
            time.sleep(0.2)
        yield cluster
    finally:
        cluster.command("scancel", "--full", "--signal=KILL", "--user=root")
        for path in (*folder.glob("slurmd-*.pid"), folder / "slurmctld.pid", folder / "munge.pid"):
            _end(path)


MUNGE_FILES = {"socket": "sock", "pid-file": "pid", "seed-file": "seed", "key-file": "key"}


def _end(pid_file: Path) -> None:
    """End a daemon by the number it wrote down."""
    if not pid_file.exists():
        return
    pid = int(pid_file.read_text())
    for number in (signal.SIGTERM, signal.SIGKILL):
        for _ in range(50):
            try:
                os.kill(pid, number if _ == 0 else 0)
            except ProcessLookupError:
                return
            time.sleep(0.1)


def _commands_with(beginning: str) -> list[str]:
    """Return the command lines of processes that begin so."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):  # it has ended since
            found.append(path.read_bytes().replace(b"\0", b" ").decode(errors="replace").strip())
    return [line for line in found if line.startswith(beginning)]


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])
