"""Processes that were started together train together, however they were started, or are told that they will not."""

import importlib.util
import json
import os
import re
import socket
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from covey.cli.main import main
from covey.system import accelerate_launch, ranks
from covey.system.ranks import check_address, check_ranks, first_host, meeting_place

from ..support.processes import in_forks

LEAVING = """
import atexit, threading, time
from covey.system import ranks as launch
threading.Thread(target=time.sleep, args=(60,)).start()
atexit.register(print, "the exit handler ran", end="")
print("the last line,", end=" ")
launch.leave(3)
"""
SCRIPT = """
from covey.config.schema import Config; from covey.policy.settings import ModelConfig
from covey.environments.settings import ArithmeticConfig
from covey.loop import train
config = Config(environment=ArithmeticConfig(num_train=16, num_test=8), num_steps=1, groups_per_step=2, group_size=2)
config.model = ModelConfig(nano_hidden_size=16, nano_num_layers=1, nano_num_heads=2)
config.sampling.max_tokens, config.preflight.enabled, config.evaluation.num_prompts = 2, False, 2
config.output.progress, config.timeouts.ranks = False, 60.0
train(config, "run")
train(config, "again")
"""
TASK = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "1", "SLURM_STEP_NODELIST": "localhost", "SLURM_NTASKS": "2"}
LAUNCHERS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_", "SLURM_", "OMPI_", "PMI_", "MPI_", "ACCELERATE_")


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in list(os.environ):
        if name.startswith(LAUNCHERS):
            monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)


def put(monkeypatch: pytest.MonkeyPatch, environment: Mapping[str, str]) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)


def start(*command: str, **environment: str) -> "subprocess.Popen[str]":
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    return subprocess.Popen(command, text=True, env=os.environ | environment, **pipes)  # type: ignore[call-overload]


def assert_trained_together(*processes: "subprocess.Popen[str]") -> None:
    for process in processes:
        output, _ = process.communicate(timeout=240)
        assert process.returncode == 0, output
    assert_trained_on_two_ranks()


def assert_trained_on_two_ranks() -> None:
    for run in ("run", "again"):
        (manifest,) = Path(run).glob("checkpoints/*/manifest.json")
        assert json.loads(manifest.read_text())["num_ranks"] == 2


def test_leaving_runs_exit_handlers_and_flushes_but_waits_for_no_thread() -> None:
    done = subprocess.run([sys.executable, "-c", LEAVING], capture_output=True, text=True, timeout=30, check=False)
    assert (done.returncode, done.stdout) == (3, "the last line, the exit handler ran")


@pytest.mark.slow
def test_a_program_that_torchrun_starts_trains_on_all_its_ranks() -> None:
    Path("script.py").write_text(SCRIPT)
    launcher = ("torch.distributed.run", "--nproc-per-node", "2")
    assert_trained_together(start(sys.executable, "-m", *launcher, "script.py"))


JOINS_TWICE = """
import time
from covey.system import collectives, ranks

for _ in range(2):
    time.sleep(1.5 * (ranks.rank() == 0))
    with collectives.process_group(20.0):
        assert list(collectives.all_sum_ints(1)) == [2]
"""


def test_an_early_rank_waits_at_a_programs_second_process_group() -> None:
    Path("twice.py").write_text(JOINS_TWICE)
    process = start(sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "twice.py")
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 0, output


@pytest.mark.long
def test_a_program_that_srun_starts_without_a_launcher_trains_on_all_its_ranks() -> None:
    step = TASK | {"SLURM_STEP_NUM_TASKS": "2"}
    tasks = [step | {"SLURM_PROCID": n, "SLURM_LOCALID": n} for n in "01"]
    in_forks(lambda: exec(SCRIPT, {}), tasks, seconds=240.0)
    assert_trained_on_two_ranks()


def test_ranks_are_what_the_launcher_says_first(monkeypatch: pytest.MonkeyPatch) -> None:
    assert (ranks.rank(), ranks.world_size(), ranks.local_rank()) == (0, 1, 0)
    put(monkeypatch, TASK | {"SLURM_PROCID": "5", "SLURM_STEP_NUM_TASKS": "8", "SLURM_LOCALID": "1"})
    assert (ranks.rank(), ranks.world_size(), ranks.local_rank()) == (5, 8, 1)
    put(monkeypatch, {"OMPI_COMM_WORLD_RANK": "2", "OMPI_COMM_WORLD_SIZE": "4"})
    assert (ranks.rank(), ranks.world_size(), ranks.local_rank()) == (2, 4, 2)
    put(monkeypatch, {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "0"})
    assert (ranks.rank(), ranks.world_size(), ranks.local_rank()) == (1, 2, 0)


def test_the_shell_of_a_job_is_one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    put(monkeypatch, {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "8"})  # salloc: no task yet
    check_ranks()
    put(monkeypatch, {"SLURM_PROCID": "0", "SLURM_NTASKS": "1"})
    check_ranks()
    put(monkeypatch, {"SLURM_NTASKS": "8", "WORLD_SIZE": "1"})
    check_ranks()
    assert ranks.world_size() == 1


APART: dict[str, tuple[dict[str, str], str]] = {
    "a batch script, or a task that does not say so": (
        {"SLURM_NTASKS": "8", "SLURM_PROCID": "0"},
        "this is one of 8 tasks of a Slurm job, and nothing says that the others run it too: start it with "
        "`srun covey ...` or torchrun, or with WORLD_SIZE=1 to train in this process alone",
    ),
    "no rank": ({"WORLD_SIZE": "8"}, "WORLD_SIZE=8 needs RANK: a launcher such as torchrun sets both"),
    "a rank too high": (
        {"WORLD_SIZE": "2", "RANK": "2"},
        "the rank must be from 0 to 1, got 2: a launcher sets RANK and WORLD_SIZE",
    ),
    "a rank of nothing": ({"RANK": "3"}, "the rank must be from 0 to 0, got 3: a launcher sets RANK and WORLD_SIZE"),
    "no number": ({"WORLD_SIZE": "two"}, "WORLD_SIZE must be a number, got 'two': a launcher such as torchrun sets it"),
    "below 0": ({"RANK": "-1"}, "RANK must be a number, got '-1': a launcher such as torchrun sets it"),
    "several machines": (
        {"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_LOCAL_SIZE": "2"},
        "mpirun over several machines needs MASTER_ADDR, the name of the first one",
    ),
}


@pytest.mark.parametrize("how", APART)
def test_processes_that_would_train_apart_are_told_so_before_anything_is_made(
    how: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    environment, line = APART[how]
    put(monkeypatch, environment)
    assert main(["train", "recipe=arithmetic"]) == 2
    assert capsys.readouterr().err.endswith(f"{line}\n")
    assert list(Path().iterdir()) == []


@pytest.mark.parametrize(
    ("nodes", "host"),
    [
        ("node1", "node1"),
        ("gpu[03-05,9],login", "gpu03"),
        ("a1,b2", "a1"),
        ("r[1-2]n[07-08,11]x", "r1n07x"),
        ("h[5]", "h5"),
        ("10.0.0.1", "10.0.0.1"),
    ],
)
def test_the_first_machine_of_a_list_of_slurms(nodes: str, host: str) -> None:
    assert first_host(nodes) == host


def test_all_tasks_of_a_step_meet_at_one_place_and_other_jobs_at_another() -> None:
    step = TASK | {"SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_NODELIST": "gpu[1-2]"}
    places = {meeting_place(step | {"SLURM_PROCID": n, "SLURM_LOCALID": "0"}) for n in "01"}
    assert places == {("gpu1", str(20000 + 31 * 7 + 1))}
    assert meeting_place(step | {"SLURM_PROCID": "0", "SLURM_JOB_ID": "8"})[1] != "20218"
    assert meeting_place(step | {"SLURM_PROCID": "0", "MASTER_ADDR": "me", "MASTER_PORT": "1"}) == ("me", "1")
    assert meeting_place({"RANK": "0", "WORLD_SIZE": "2"}) == ("127.0.0.1", "29500")


# ------------------------------------------------------------------------------------------------ accelerate


ASKED: dict[str, tuple[dict[str, str], str | None]] = {
    "nothing": ({"ACCELERATE_MIXED_PRECISION": "no", "ACCELERATE_DYNAMO_BACKEND": "NO"}, None),
    "the same precision": ({"ACCELERATE_MIXED_PRECISION": "bf16", "model.precision": "bfloat16"}, None),
    "another precision": (
        {"ACCELERATE_MIXED_PRECISION": "fp16"},
        "accelerate launch --mixed_precision fp16 needs model.precision=float16, got float32; leave the switch out, "
        "or set both",
    ),
    "eight bits": (
        {"ACCELERATE_MIXED_PRECISION": "fp8"},
        "accelerate launch --mixed_precision fp8 needs model.precision=float32, float16 or bfloat16, got float32; "
        "leave the switch out, or set both",
    ),
    "shards": (
        {"ACCELERATE_USE_FSDP": "true"},
        "accelerate launch --use_fsdp is not read: leave it out (parallel.strategy=fsdp shards weights)",
    ),
    "deepspeed": (
        {"ACCELERATE_USE_DEEPSPEED": "true"},
        "accelerate launch --use_deepspeed is not read: leave it out (parallel.strategy=fsdp shards weights)",
    ),
    "accumulation": ({"ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "4"}, accelerate_launch.ACCUMULATION),
    "clipping": (
        {"ACCELERATE_GRADIENT_CLIPPING": "1.0"},
        "accelerate launch --gradient_clipping is not read: leave it out (optimizer.max_grad_norm clips)",
    ),
    "a compiler": (
        {"ACCELERATE_DYNAMO_BACKEND": "INDUCTOR"},
        "accelerate launch --dynamo_backend is not read: leave it out (nothing is compiled by torch)",
    ),
    "debugging": (
        {"ACCELERATE_DEBUG_MODE": "true"},
        "accelerate launch --debug is not read: leave it out (timeouts.ranks ends a wait for other ranks, and says for "
        "what)",
    ),
    "a TPU": (
        {"XLA_USE_BF16": "1"},
        "accelerate launch --tpu is not read: leave it out (there are CPUs and CUDA GPUs)",
    ),
    "a device": (
        {"ACCELERATE_TORCH_DEVICE": "cuda:1"},
        "accelerate launch with ACCELERATE_TORCH_DEVICE is not read: leave it out (model.device chooses)",
    ),
    "the CPU": ({"ACCELERATE_USE_CPU": "True"}, None),
    "the CPU and not": (
        {"ACCELERATE_USE_CPU": "True", "model.device": "cuda"},
        "accelerate launch --cpu needs model.device=cpu, got model.device=cuda",
    ),
}


@pytest.mark.parametrize("what", ASKED)
def test_what_accelerate_was_asked_for_is_obeyed_or_refused(
    what: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked, line = ASKED[what]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    put(monkeypatch, {"ACCELERATE_MIXED_PRECISION": "no"} | {k: v for k, v in asked.items() if k.isupper()})
    assert main(["config", *(f"{k}={v}" for k, v in asked.items() if not k.isupper())]) == (2 if line else 0)
    assert capsys.readouterr().err == (f"covey: {line}\n" if line else "")
    assert os.environ["CUDA_VISIBLE_DEVICES"] == ("" if what.startswith("the CPU") and not line else "0")


@pytest.mark.parametrize(
    ("typed", "line"),
    [
        (["--gradient_accumulation_steps", "4"], accelerate_launch.ACCUMULATION),
        (["--gradient-accumulation-steps=2"], accelerate_launch.ACCUMULATION),
        (["--gradient_accumulation_steps", "1", "--num_processes", "1", "--cpu", "--rdzv_backend", "c10d"], None),
        (["--ipex"], "accelerate launch --ipex is not read: leave it out"),
        (["--debug"], "accelerate launch --debug is not read: leave it out"),
        (["--downcast_bf16"], "accelerate launch --downcast_bf16 is not read: leave it out"),
        (["--fsdp-offload-params", "true"], "accelerate launch --fsdp_offload_params is not read: leave it out"),
    ],
)
@pytest.mark.parametrize("start", [["/bin/accelerate", "launch"], ["python", "-m", "accelerate.commands.launch"]])
def test_switches_that_do_not_arrive_are_read_off_the_launchers_own_line(
    start: list[str], typed: list[str], line: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for tail in (["my/script.py", "--lr", "3"], ["-m", "covey", "train", "--multirun"]):
        own = accelerate_launch.launcher_words([*start, *typed, *tail], "script.py")
        assert own == typed
        monkeypatch.setattr(accelerate_launch, "_read_words", lambda own=own: own)
        if line is None:
            accelerate_launch.check("float32", "auto", {"ACCELERATE_MIXED_PRECISION": "no"})
            continue
        with pytest.raises(ValueError) as refusal:
            accelerate_launch.check("float32", "auto", {"ACCELERATE_MIXED_PRECISION": "no"})
        assert str(refusal.value) == line


def test_only_lines_of_the_own_rank_are_read() -> None:
    assert accelerate_launch.launcher_words(["bash", "-c", "--fsdp"], "script.py") == []
    assert accelerate_launch.launcher_words(["python", "launch.py", "--use_fsdp"], "script.py") == []


@pytest.mark.slow
def test_the_real_launcher_is_heard() -> None:
    Path("script.py").write_text("import sys\nfrom covey.cli.main import main\nsys.exit(main(['config']))\n")
    command = [sys.executable, "-m", "accelerate.commands.accelerate_cli", "launch", "--cpu", "--num_processes=1"]
    typed = ["--gradient_accumulation_steps", "4", "script.py"]
    done = subprocess.run([*command, *typed], capture_output=True, text=True, timeout=240, check=False)
    assert f"covey: {accelerate_launch.ACCUMULATION}" in done.stderr.splitlines()
    assert done.returncode != 0


def test_a_place_to_meet_without_an_address_is_refused_before_anybody_waits_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def unknown(name: str, port: object) -> None:
        raise socket.gaierror(-2, "Name or service not known")

    check_address("127.0.0.1")
    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    with pytest.raises(ValueError, match=r"^the ranks meet at 'gpu03', .*not known\): set MASTER_ADDR"):
        check_address("gpu03")


def test_a_name_that_no_machine_can_have_is_refused_as_well() -> None:
    with pytest.raises(ValueError, match="set MASTER_ADDR"):
        check_address("a" * 70 + ".b")


@pytest.mark.parametrize("kind", accelerate_launch.KINDS)
def test_an_accelerate_shard_configuration_is_refused_on_cpus_too(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "accelerate.yaml"
    file.write_text(f"distributed_type: {kind}\nuse_cpu: true\nmixed_precision: 'no'\n")
    monkeypatch.setattr(accelerate_launch, "_read_words", lambda: ["--config_file", str(file)])
    said = {"ACCELERATE_MIXED_PRECISION": "no", "ACCELERATE_USE_CPU": "True"}
    with pytest.raises(ValueError, match=rf"--config_file {file}: distributed_type={kind} is not read: leave it out"):
        accelerate_launch.check("float32", "auto", said)
    file.write_text("distributed_type: MULTI_GPU\nmixed_precision: 'no'\n")
    accelerate_launch.check("float32", "auto", said)


FOLLOW = (*(f"ACCELERATE_{kind}_" for kind in ("DYNAMO", "DEEPSPEED", "FP8")), "FSDP_", "MEGATRON_LM_", "PARALLELISM_")
"""Variables that mean something beside another alone, which is looked at."""
OF_PLACING = ("VISIBLE_", "ZE_AFFINITY", "MASTER_", "KMP_", "OMP_", "PYTHONPATH", "ACCELERATE_CONFIG_DS_FIELDS")
OBEYED = ("ACCELERATE_MIXED_PRECISION", "ACCELERATE_USE_CPU", "ACCELERATE_GRADIENT_ACCUMULATION_STEPS")


def test_every_variable_that_accelerates_launcher_sets_is_obeyed_refused_or_about_places() -> None:
    accelerate = importlib.util.find_spec("accelerate")
    assert accelerate is not None
    source = (Path(accelerate.submodule_search_locations[0]) / "utils" / "launch.py").read_text()  # type: ignore[index]
    names = set(re.findall(r'current_env\["([A-Z0-9_]+)"\] =', source))
    assert len(names) > 30
    known = {*accelerate_launch.REFUSED, *OBEYED}
    unknown = {name for name in names - known if not name.startswith(FOLLOW) and not any(p in name for p in OF_PLACING)}
    assert unknown == set()
