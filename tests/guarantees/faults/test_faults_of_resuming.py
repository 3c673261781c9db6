"""Going on with other settings, other code, other processes, or beside another run: refused, or said loudly."""

import errno
import fcntl
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from covey.loop import train
from covey.run.checkpoints.checkpoint import load_state, newest_valid
from covey.run.checkpoints.manifest import MANIFEST
from covey.run.checkpoints.resume import run_lock, truncate_jsonl
from covey.system.disk import WriteError

from ...support.small import equal, rewrite, rows, saved_weights, scripted, small_config, use
from ..runs import fingerprint, finish, finish_well, kill, new_run, num_trained, resume, saved_step, wait_until

# --------------------------------------------------------------------------------------------- other settings or code


@pytest.mark.long
def test_resuming_a_finished_run_says_so_and_changes_nothing(reference: Path) -> None:
    before = fingerprint(reference / "whole")
    status, output = finish(resume(reference, "whole"))
    assert status == 2
    assert "covey: whole is finished (40 of 40 steps): there is nothing to resume; " in output
    assert fingerprint(reference / "whole") == before


@pytest.mark.long
def test_resuming_with_another_setting_is_refused_by_name(reference: Path) -> None:
    status, output = finish(resume(reference, "whole", "optimizer.lr=0.5"))
    assert status == 2
    assert "optimizer.lr=0.5 differs from optimizer.lr=0.01 of whole" in output
    assert "resume_changes=[optimizer.lr]" in output


SAVED: dict[str, Any] = {"num_steps": 2, "output__save_every": 1, "preflight__enabled": False}


def half_way(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run of two steps of which the first is saved, as a kill would leave it; the path of its manifest."""
    use(monkeypatch, scripted())
    train(small_config(**SAVED), folder)
    found = folder / "checkpoints" / "step-000002"
    for path in sorted(found.rglob("*"), reverse=True):
        path.unlink() if path.is_file() else path.rmdir()
    found.rmdir()
    saved = newest_valid(folder / "checkpoints")
    assert saved is not None
    return saved / MANIFEST


def go_on(folder: Path) -> None:
    train(small_config(**SAVED, resume=str(folder)), folder)


@pytest.mark.long
@pytest.mark.parametrize(
    ("facts", "said"),
    [
        ({"versions": {"torch": "1.0"}}, "torch was 1.0 and is "),
        ({"versions": {"git_commit": "0123456789"}}, "git_commit was 0123456789 and is "),
        ({"num_ranks": 4}, "processes was 4 and is 1"),
        ({"num_threads": 4096}, "threads was 4096 and is "),
    ],
    ids=["another torch", "another commit", "fewer processes", "fewer threads"],
)
def test_resuming_with_other_code_or_processes_warns_of_inexactness(
    facts: dict[str, object],
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    manifest = half_way(tmp_path, monkeypatch)
    for name, value in facts.items():
        rewrite(manifest, lambda old, name=name, new=value: {name: old[name] | new if isinstance(new, dict) else new})
    go_on(tmp_path)
    warnings = [record.message for record in caplog.records if record.levelname == "WARNING"]
    assert [line.startswith(said) for line in warnings] == [True]
    assert warnings[0].endswith(": the run is no longer bit-for-bit reproducible")


def test_resuming_unchanged_is_silent_and_exact(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    half_way(tmp_path / "stopped", monkeypatch)
    go_on(tmp_path / "stopped")
    assert [record.message for record in caplog.records if record.levelname == "WARNING"] == []
    train(small_config(**SAVED), tmp_path / "whole")
    assert equal(saved_weights(tmp_path / "stopped"), saved_weights(tmp_path / "whole"))


@pytest.mark.long
def test_a_run_that_is_refused_keeps_the_rows_it_had(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    half_way(tmp_path, monkeypatch)
    rows = [tmp_path / name for name in ("metrics.jsonl", "rollouts.jsonl")]
    before = [path.read_text() for path in rows]
    assert '"step":2' in before[0].replace(" ", "")
    use(monkeypatch, scripted(num_prompts=7))
    with pytest.raises(ValueError, match=r"are not those that .* was trained on"):
        go_on(tmp_path)
    assert [path.read_text() for path in rows] == before


COMPARED: dict[str, Any] = SAVED | {"evaluation__num_prompts": 1, "algorithm__kl_coef": 0.1}


@pytest.mark.long
@pytest.mark.parametrize("lora_rank", [0, 2])
def test_a_reference_that_was_refreshed_is_not_forgotten_by_settings_that_refresh_none(
    lora_rank: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(monkeypatch, scripted())
    settings = COMPARED | {"num_steps": 1, "model__lora_rank": lora_rank}
    train(small_config(**settings, algorithm__reference_refresh_every=1), tmp_path)
    named = ["num_steps", "algorithm.reference_refresh_every"]
    more = {"resume": str(tmp_path), "num_steps": 2, "resume_changes": named}
    with pytest.raises(ValueError, match=r"reference_refresh_every=null would forget it: set it above num_steps"):
        train(small_config(**settings | more), tmp_path)
    train(small_config(**settings | more, algorithm__reference_refresh_every=3), tmp_path)
    kept = [load_state(tmp_path / "checkpoints" / f"step-00000{step}")["trainer"]["reference"] for step in (1, 2)]
    assert kept[0]
    assert equal(*kept)


@pytest.mark.long
@pytest.mark.parametrize("lora_rank", [0, 2])
def test_another_seed_does_not_change_what_a_policy_built_from_nothing_began_with(
    lora_rank: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its base model is the run's, under adapters; else the reference would be another policy."""
    use(monkeypatch, scripted())
    settings = COMPARED | {"num_steps": 1, "model__lora_rank": lora_rank, "optimizer__lr": 1e-12}
    train(small_config(**settings), tmp_path)
    more = {"num_steps": 2, "seed": 5, "resume": str(tmp_path), "resume_changes": ["num_steps", "seed"]}
    other = small_config(**settings | more)
    if lora_rank:
        train(other, tmp_path)
        assert abs(rows(tmp_path / "metrics.jsonl", "train")[1]["kl"]) < 1e-9
    else:
        with pytest.raises(
            ValueError, match=r"^the reference of this run was nano of seed=0, .* make it nano of seed=5"
        ):
            train(other, tmp_path)


# ------------------------------------------------------------------------------------------------ two runs, one folder


@pytest.mark.slow
def test_a_folder_is_locked_while_its_run_lives(reference: Path) -> None:
    run = reference / "shared"
    process = new_run(reference, run.name, environment={"REWARD_SECONDS": 0.05})
    assert wait_until(lambda: saved_step(run) > 0, process)
    process.send_signal(signal.SIGSTOP)  # it lives, and does not come to its end meanwhile
    before = num_trained(run)
    status, output = finish(resume(reference, run.name))
    assert status == 2
    assert f"covey: {run.name} is in use by process {process.pid}, started 20" in output
    status, output = finish(new_run(reference, run.name))
    assert status == 2
    assert "already holds a run" in output
    assert process.poll() is None
    assert num_trained(run) == before
    kill(process)
    finish_well(resume(reference, run.name))
    assert fingerprint(run) == fingerprint(reference / "whole")


def test_two_runs_cannot_share_a_folder(tmp_path: Path) -> None:
    refusal = pytest.raises(ValueError, match=f"is in use by process {os.getpid()}, started")
    with run_lock(tmp_path), refusal, run_lock(tmp_path):
        pass
    with run_lock(tmp_path):  # free again
        pass
    refusal = pytest.raises(WriteError, match=r"^cannot write /proc/run\.lock: No such file or directory; ")
    with refusal, run_lock(Path("/proc")):
        pass


def test_the_lock_of_a_process_that_was_killed_is_free(tmp_path: Path) -> None:
    child = os.fork()
    if child == 0:
        with run_lock(tmp_path):
            os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(child, 0)
    with run_lock(tmp_path):
        pass


def test_a_disk_without_locks_is_not_said_to_hold_another_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def flock(file: object, how: int) -> None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))  # of Lustre that is mounted without flock

    monkeypatch.setattr(fcntl, "flock", flock)
    with run_lock(tmp_path):
        pass
    said = f"{tmp_path} cannot be locked (Function not implemented): see to it that no other run writes there"
    assert caplog.messages == [said]


# ----------------------------------------------------------------------------------------------------- rows of the log

PAST = (
    '{"step": 0, "kind": "evaluate"}\n{"step": 1, "kind": "train"}\n{"step": 2, "kind": "train"}\n'
    '{"step": 2, "kind": "evaluate"}\n'
)
ENDS = {
    "later rows": b'{"step": 3, "kind": "train"}\n{"step": 4, "kind": "train"}\n',
    "a row cut off": b'{"step": 3, "kind": "train"}\n{"step": 4, "ki',
    "a character cut off": '{"step": 3, "text": "é'.encode()[:-1],
    "zeros of a power cut": b"\0" * 100 + b'\n{"step": 4}\n' + b"\0" * 100,
}


@pytest.mark.parametrize("name", list(ENDS))
def test_rows_of_steps_that_will_be_done_again_leave_the_log(name: str, tmp_path: Path) -> None:
    log = tmp_path / "metrics.jsonl"
    log.write_bytes(PAST.encode() + ENDS[name])
    truncate_jsonl(log, 2)
    assert log.read_text() == PAST
    truncate_jsonl(log, 2, evaluated=False)
    assert log.read_text() == PAST.replace('{"step": 2, "kind": "evaluate"}\n', "")
