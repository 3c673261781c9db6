"""Promise 3: a run killed at any moment resumes, and ends with the same weights as a run that was never stopped."""

import os
import random
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from covey.checkpoint import (
    MANIFEST,
    Retention,
    complete_checkpoints,
    load_state,
    newest_valid,
    problem,
    read_manifest,
    retire,
    save_checkpoint,
)
from covey.config import ModelConfig
from covey.policy.loading import load_policy
from covey.policy.policy import Policy
from covey.resuming import alone_in, drop_rows_after

from .runs import fingerprint, finish, kill, new_run, prepare, rows, start, wait_for

TINY = ModelConfig(nano_hidden_size=16, nano_num_layers=1, nano_num_heads=2)


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which the run "whole" went through without a stop."""
    folder = tmp_path_factory.mktemp("runs")
    prepare(folder)
    status, output = finish(new_run(folder, "whole"))
    assert status == 0, output
    return folder


@pytest.fixture(scope="module")
def policy() -> Policy:
    return load_policy(TINY, seed=0)


def kill_and_resume(reference: Path, name: str, moments: list[float]) -> None:
    """Kill the run after so many seconds, again and again, then let it end."""
    process = new_run(reference, name, "output.save_every=1")
    wait_for(reference / name / "checkpoints" / "step-000001" / MANIFEST, process)
    for moment in moments:
        time.sleep(moment)
        kill(process)
        process = start(reference, f"resume={name}")
    finish(process)


def test_a_run_killed_at_random_moments_ends_with_the_same_weights_and_metrics(reference: Path) -> None:
    generator = random.Random(7)
    kill_and_resume(reference, "killed", [generator.uniform(0.0, 0.3), generator.uniform(2.0, 5.0)])
    assert fingerprint(reference / "killed") == fingerprint(reference / "whole")


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", range(20))
def test_twenty_runs_killed_at_random_moments_end_alike(reference: Path, seed: int) -> None:
    generator = random.Random(seed)
    moments = [generator.uniform(0.0, 1.0), *(generator.uniform(1.0, 8.0) for _ in range(2))]
    kill_and_resume(reference, f"killed-{seed}", moments)
    assert fingerprint(reference / f"killed-{seed}") == fingerprint(reference / "whole")
    shutil.rmtree(reference / f"killed-{seed}")


def test_no_step_is_counted_twice_in_the_logs(reference: Path) -> None:
    trained = [row["step"] for row in rows(reference / "whole") if row["kind"] == "train"]
    assert trained == list(range(8))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_saves_the_last_finished_step_and_the_run_goes_on_from_it(reference: Path, number: int) -> None:
    name = f"stopped-{number}"
    process = new_run(reference, name, "num_steps=400", "output.save_every=0")
    wait_for(reference / name / "metrics.jsonl", process)
    while (reference / name / "metrics.jsonl").read_text().count('"train"') < 3:
        time.sleep(0.01)
    asked = time.monotonic()
    process.send_signal(number)
    status, output = finish(process)
    assert status == 128 + number, output
    assert time.monotonic() - asked < 10
    (saved,) = complete_checkpoints(reference / name / "checkpoints")
    done = read_manifest(saved)["step"]
    assert done >= 3
    finished = [row["step"] for row in rows(reference / name) if row["kind"] == "train"]
    assert finished[-1] == done - 1
    status, output = finish(start(reference, f"resume={name}", f"num_steps={done + 2}", "resume_changes=[num_steps]"))
    assert status == 0, output
    assert f"resumed after step {done}" in (reference / name / "covey.log").read_text()
    trained = [row["step"] for row in rows(reference / name) if row["kind"] == "train"]
    assert trained == list(range(done + 2))


def test_resuming_a_finished_run_says_so(reference: Path) -> None:
    status, output = finish(start(reference, "resume=whole"))
    assert status == 2
    assert "covey: whole is finished (8 of 8 steps): there is nothing to resume\n" in output
    assert "step " not in output.replace("8 steps", "")


def test_resuming_with_another_setting_is_refused_by_name(reference: Path) -> None:
    status, output = finish(start(reference, "resume=whole", "optimizer.lr=0.5"))
    assert status == 2
    assert "optimizer.lr=0.5 differs from optimizer.lr=0.01 of whole" in output
    assert "resume_changes=[optimizer.lr]" in output


def test_two_runs_cannot_share_a_folder(tmp_path: Path) -> None:
    refusal = pytest.raises(ValueError, match=f"is in use by process {os.getpid()}, started")
    with alone_in(tmp_path), refusal, alone_in(tmp_path):
        pass
    with alone_in(tmp_path):  # free again
        pass


def test_the_lock_of_a_process_that_was_killed_is_free(tmp_path: Path) -> None:
    child = os.fork()
    if child == 0:
        with alone_in(tmp_path):
            os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(child, 0)
    with alone_in(tmp_path):
        pass


def save(folder: Path, step: int, policy: Policy, score: float | None = None) -> Path:
    facts = {} if score is None else {"score": score}
    return save_checkpoint(folder, step, policy, {"step": step, "numbers": torch.arange(3)}, facts)


def test_a_kill_at_every_sync_and_rename_of_a_save_leaves_the_old_or_the_new_checkpoint(
    tmp_path: Path, policy: Policy
) -> None:
    checkpoints = tmp_path / "checkpoints"
    save(checkpoints, 1, policy)
    points = killed = 0
    while True:
        points += 1
        child = os.fork()
        if child == 0:
            kill_at(points)
            save(checkpoints, 2, policy)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        found = newest_valid(checkpoints)
        assert found is not None
        assert found.name in ("step-000001", "step-000002")
        assert load_state(found)["step"] == int(found.name[-6:])
        if os.WIFEXITED(status):
            break
        killed += 1
        shutil.rmtree(checkpoints / "step-000002", ignore_errors=True)
    assert os.WEXITSTATUS(status) == 0
    assert killed >= 12
    retire(checkpoints, Retention(keep_last=3, keep_best=False))
    assert sorted(path.name for path in checkpoints.iterdir()) == ["step-000001", "step-000002"]


def kill_at(point: int) -> None:
    """Let this process die at its so-manieth sync or rename, before the even ones and after the odd ones."""
    counter = iter(range(1, 10_000))

    def deadly(function: Callable[..., None]) -> Callable[..., None]:
        def call(*arguments: object) -> None:
            if next(counter) == point:
                os.kill(os.getpid(), signal.SIGKILL)
            function(*arguments)
            if next(counter) == point:
                os.kill(os.getpid(), signal.SIGKILL)

        return call

    os.fsync, os.rename = deadly(os.fsync), deadly(os.rename)  # type: ignore[assignment]


def flip_a_bit(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(bytes(content))


DAMAGE: dict[str, Callable[[Path], object]] = {
    "truncated": lambda file: os.truncate(file, file.stat().st_size // 2),
    "flipped": flip_a_bit,
    "emptied": lambda file: file.write_bytes(b""),
    "deleted": lambda file: file.unlink(),
}


@pytest.mark.parametrize("damage", list(DAMAGE))
def test_a_torn_file_is_found_by_its_hash_and_the_checkpoint_before_is_taken(
    damage: str, tmp_path: Path, policy: Policy, caplog: pytest.LogCaptureFixture
) -> None:
    older, newest = save(tmp_path, 1, policy), save(tmp_path, 2, policy)
    spare = tmp_path / "spare"
    shutil.copytree(newest, spare)
    for name in [*read_manifest(newest)["files"], MANIFEST]:
        DAMAGE[damage](newest / name)
        assert newest_valid(tmp_path) == older, name
        shutil.rmtree(newest)
        shutil.copytree(spare, newest)
    assert newest_valid(tmp_path) == newest
    assert damage == "deleted" or "falling back to the one before" in caplog.text


def test_a_file_too_many_is_damage_too(tmp_path: Path, policy: Policy) -> None:
    saved = save(tmp_path, 1, policy)
    (saved / "policy" / "extra.bin").write_bytes(b"1")
    assert "missing or too many" in str(problem(saved))


def test_retention_keeps_the_last_and_the_best_and_never_deletes_the_only_good_one(
    tmp_path: Path, policy: Policy
) -> None:
    for step, score in ((1, 0.1), (2, 0.9), (3, 0.5), (4, 0.2)):
        save(tmp_path, step, policy, score)
    retire(tmp_path, Retention(keep_last=1, keep_best=True))
    assert [path.name for path in complete_checkpoints(tmp_path)] == ["step-000002", "step-000004"]
    (tmp_path / "step-000004" / "state.pt").write_bytes(b"torn")
    retire(tmp_path, Retention(keep_last=1, keep_best=False))
    assert newest_valid(tmp_path) == tmp_path / "step-000002"


def test_a_full_or_read_only_disk_leaves_the_last_good_checkpoint(tmp_path: Path, policy: Policy) -> None:
    good = save(tmp_path, 1, policy)
    child = os.fork()
    if child == 0:
        os.fsync = refuse  # type: ignore[assignment]
        try:
            save(tmp_path, 2, policy)
        except OSError as error:
            os._exit(error.errno or 1)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert os.WEXITSTATUS(status) == 28
    assert newest_valid(tmp_path) == good
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-000001"]


def refuse(descriptor: int) -> None:
    raise OSError(28, "No space left on device")


def test_rows_of_steps_that_will_be_done_again_leave_the_log(tmp_path: Path) -> None:
    log = tmp_path / "metrics.jsonl"
    log.write_text(
        '{"step": 0, "kind": "evaluate"}\n{"step": 0, "kind": "train"}\n{"step": 1, "kind": "train"}\n'
        '{"step": 2, "kind": "evaluate"}\n{"step": 2, "kind": "train"}\n{"step": 3, "ki'
    )
    drop_rows_after(log, 2)
    assert log.read_text() == (
        '{"step": 0, "kind": "evaluate"}\n{"step": 0, "kind": "train"}\n{"step": 1, "kind": "train"}\n'
        '{"step": 2, "kind": "evaluate"}\n'
    )
