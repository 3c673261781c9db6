"""Full, read-only and vanished disks: one line that says which, checkpoints as they were, the same run afterwards."""

import os
import resource
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from covey.run.checkpoints.checkpoint import complete_checkpoints, newest_valid, problem
from covey.system.disk import WriteError
from covey.system.jsonl import JsonlWriter

from ..runs import (
    NUM_STEPS,
    PATIENCE,
    SAVE_EVERY,
    SETTINGS,
    fingerprint,
    finish,
    finish_well,
    new_run,
    num_trained,
    resume,
    rows,
    saved_step,
)
from .disks import can_mount, file_on_small_disk, size_kilobytes, small_disk

mounted = pytest.mark.skipif(not can_mount(), reason="mounting is not allowed here; the limit of file sizes stands in")
NO_SPACE = "No space left on device; make room on its disk"


def line_of(output: str) -> str:
    """The line a run that could not write ends with; there is no traceback."""
    assert "Traceback" not in output, output
    (line,) = [line for line in output.splitlines() if line.startswith("covey: ")]
    return line


def assert_undamaged(run: Path) -> None:
    """Every checkpoint that looks whole is whole, and no half one lies about."""
    saved = complete_checkpoints(run / "checkpoints")
    assert [problem(path) for path in saved] == [None] * len(saved)
    assert list((run / "checkpoints").glob("*.tmp-*")) == []


# ------------------------------------------------------------------------------------------- a disk for one thing only


@pytest.fixture(scope="module")
def checkpoint_size(reference: Path) -> int:
    """Kilobytes of one checkpoint."""
    found = newest_valid(reference / "whole" / "checkpoints")
    assert found is not None
    return size_kilobytes(found)


@mounted
def test_a_full_checkpoint_disk_stops_the_run_and_it_resumes_with_room(reference: Path, checkpoint_size: int) -> None:
    run = reference / "full-checkpoints"
    with small_disk(run / "checkpoints", checkpoint_size * 3 // 2) as make_room:
        status, output = finish(new_run(reference, run.name))
        assert status == 2
        assert f"cannot write {run}/checkpoints/step-000010: {NO_SPACE}" in line_of(output)
        assert f"covey train resume={run.name} continues after step {SAVE_EVERY}" in line_of(output)
        assert saved_step(run) == SAVE_EVERY
        assert_undamaged(run)
        make_room()
        finish_well(resume(reference, run.name))
        assert fingerprint(run) == fingerprint(reference / "whole")


@mounted
def test_a_full_journal_disk_stops_the_run_and_its_answers_are_read_with_room(reference: Path) -> None:
    run = reference / "full-journal"
    with small_disk(run / "journal", 64) as make_room:
        status, output = finish(new_run(reference, run.name, "output.save_every=0"))
        assert status == 2
        assert f"cannot write {run}/journal/step-" in line_of(output)
        assert NO_SPACE in line_of(output)
        make_room()
        output = finish_well(resume(reference, run.name))
        assert " groups whole (an evaluated prompt has two): they are not sampled again; " in output
        assert fingerprint(run) == fingerprint(reference / "whole")


@mounted
@pytest.mark.slow
def test_a_run_told_to_continue_over_a_full_disk_names_missing_checkpoints(
    reference: Path, checkpoint_size: int
) -> None:
    run = reference / "full-on"
    with small_disk(run / "checkpoints", checkpoint_size * 3 // 2) as make_room:
        status, output = finish(new_run(reference, run.name, "output.on_write_error=continue"))
        assert status == 2
        assert output.count("the run continues (output.on_write_error=continue) without this checkpoint") == 6
        assert f"cannot write {run}/checkpoints/step-000040: {NO_SPACE}" in line_of(output)
        assert num_trained(run) == NUM_STEPS
        assert saved_step(run) == SAVE_EVERY
        assert_undamaged(run)
        make_room()
        finish_well(resume(reference, run.name))
        assert fingerprint(run) == fingerprint(reference / "whole")


@mounted
@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "kilobytes"), [("metrics.jsonl", 16), ("rollouts.jsonl", 16), ("evaluations.jsonl", 4)]
)
def test_a_full_disk_stops_the_run_in_one_line_without_losing_rows(reference: Path, name: str, kilobytes: int) -> None:
    run = reference / f"full-{name}"
    with file_on_small_disk(run / name, kilobytes) as make_room:
        status, output = finish(new_run(reference, run.name))
        assert status == 2
        assert f"cannot write {run}/{name}: {NO_SPACE}" in line_of(output)
        assert_undamaged(run)
        step = saved_step(run)
        assert 0 < step < NUM_STEPS
        assert f"covey train resume={run.name} continues after step {step}" in line_of(output)
        make_room()
        finish_well(resume(reference, run.name))
        assert fingerprint(run) == fingerprint(reference / "whole")
        for file in ("rollouts.jsonl", "evaluations.jsonl"):
            assert rows(run, file) == rows(reference / "whole", file)


@mounted
@pytest.mark.slow
def test_a_log_that_cannot_be_written_is_said_once_and_stops_nothing(reference: Path) -> None:
    run = reference / "full-log"
    with file_on_small_disk(run / "covey.log", 4):
        output = finish_well(new_run(reference, run.name))
        assert output.count(f"cannot write {run}/covey.log: {NO_SPACE}") == 1
        assert fingerprint(run) == fingerprint(reference / "whole")


@pytest.mark.parametrize("sink", [pytest.param("/dev/full", marks=pytest.mark.slow), "| head -n 1"])
def test_a_terminal_that_takes_nothing_more_stops_nothing(sink: str, reference: Path) -> None:
    run = reference / f"ignore_stdout_errors-{len(sink)}"
    command = f"{sys.executable} -m covey train {shlex.join(SETTINGS)} hydra.run.dir={run.name} output.progress=true"
    pipe = sink if sink.startswith("|") else f"> {sink}"
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "COVEY_CACHE": str(reference / "cache")}
    words = ["bash", "-c", f"set -o pipefail; {command} {pipe}"]
    done = subprocess.run(words, cwd=reference, env=environment, capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    assert done.stderr.count("standard output cannot be written (No space left on device)") == (sink == "/dev/full")
    assert fingerprint(run) == fingerprint(reference / "whole")


@pytest.mark.slow
@mounted
def test_a_resume_on_a_disk_that_is_still_full_says_so_and_harms_nothing(reference: Path, checkpoint_size: int) -> None:
    run = reference / "still-full"
    with small_disk(run, checkpoint_size * 5 // 2) as make_room:
        shutil.copy(reference / "rows.jsonl", run)
        status, output = finish(new_run(reference, run.name))
        assert status == 2
        assert NO_SPACE in line_of(output)
        before = saved_step(run)
        assert before > 0
        status, output = finish(resume(reference, run.name))
        assert status == 2
        assert NO_SPACE in line_of(output)
        assert saved_step(run) >= before
        assert_undamaged(run)
        make_room()
        finish_well(resume(reference, run.name))
        assert fingerprint(run) == fingerprint(reference / "whole")


# ---------------------------------------------------------------------------------------------- rows wait for the disk


def with_room_for(num_bytes: int, action: Callable[[Callable[[], None]], None]) -> None:
    """Do this in a child whose files can take only so much until it makes room; fails where the child does."""
    child = os.fork()
    if child == 0:
        try:
            resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, resource.RLIM_INFINITY))
            action(lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2))
            os._exit(0)
        except BaseException as error:
            os.write(2, repr(error).encode())
        finally:
            os._exit(1)
    assert os.waitpid(child, 0)[1] == 0


def test_rows_wait_in_memory_while_the_disk_is_full(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"

    def write(make_room: Callable[[], None]) -> None:
        lines = JsonlWriter(path, wait=True)
        for step in range(10):
            lines.write({"step": step})
        assert path.read_text() == '{"step": 0}\n{"step": 1}\n{"'
        make_room()
        lines.write({"step": 10})
        lines.close()

    with_room_for(26, write)
    assert path.read_text() == "".join(f'{{"step": {step}}}\n' for step in range(11))


def test_rows_that_are_left_at_the_end_are_an_error(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"

    def write(make_room: Callable[[], None]) -> None:
        lines = JsonlWriter(path, wait=True)
        lines.write({"step": 0})
        lines.write({"step": 1})
        with pytest.raises(WriteError, match=rf"^cannot write {path}: File too large; .*; its last rows are lost$"):
            lines.close()

    with_room_for(20, write)


def test_a_deleted_log_file_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    lines = JsonlWriter(path)
    lines.write({"step": 0})
    path.unlink()
    with pytest.raises(WriteError, match="No such file or directory; it was moved or deleted while the run was going"):
        lines.write({"step": 1})
    lines.close()  # has been said


def test_rows_of_a_file_that_was_moved_away_and_back_are_all_there(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    lines = JsonlWriter(path, wait=True)
    lines.write({"step": 0})
    path.rename(tmp_path / "elsewhere")
    lines.write({"step": 1})
    (tmp_path / "elsewhere").rename(path)
    lines.write({"step": 2})
    lines.close()
    assert path.read_text() == '{"step": 0}\n{"step": 1}\n{"step": 2}\n'


# ------------------------------------------------------------------------------------------- read-only and vanished

STRIKE_AT = 44
"""Call of the reward at which the run strikes itself: in step 18, when no checkpoint is being written."""


def struck(reference: Path, name: str, command: str, *words: str) -> tuple[int, str]:
    """A run in the midst of which the command is carried out: its status and output."""
    (reference / "strike").write_text(command)
    return finish(new_run(reference, name, *words, environment={"STRIKE_AT": STRIKE_AT}))


LIMIT = "{python} -c 'import resource as r, sys; r.prlimit(int(sys.argv[1]), r.RLIMIT_FSIZE, (80_000, -1))' $PPID"
"""Less than a checkpoint's largest file, and more than the rows up to there; $PPID is the run."""


@pytest.mark.slow
def test_checkpoints_without_room_stop_the_run_without_mounts(reference: Path) -> None:
    run = reference / "limited"
    status, output = struck(reference, run.name, LIMIT.format(python=sys.executable))
    assert status == 2
    before = saved_step(run)
    assert 0 < before < NUM_STEPS
    assert f"cannot write {run}/checkpoints/step-{before + SAVE_EVERY:06}: File too large" in line_of(output)
    assert f"raise the limit of file sizes (ulimit -f); covey train resume=limited continues after step {before}" in (
        line_of(output)
    )
    assert_undamaged(run)
    finish_well(resume(reference, run.name))
    assert fingerprint(run) == fingerprint(reference / "whole")


@mounted
@pytest.mark.slow
def test_checkpoints_that_become_read_only_stop_the_run_and_are_as_they_were(reference: Path) -> None:
    run = reference / "read-only"
    with small_disk(run / "checkpoints", 10_000):
        status, output = struck(reference, run.name, f"mount -o remount,ro {run}/checkpoints")
        assert status == 2
        assert "Read-only file system; make its folder writable; covey train resume=read-only" in line_of(output)
        before = saved_step(run)
        assert f"continues after step {before}" in line_of(output)
        assert 0 < before < NUM_STEPS
        assert_undamaged(run)
        status, output = finish(resume(reference, run.name))
        assert status == 2
        assert "Read-only file system; make its folder writable" in line_of(output)
        subprocess.run(["mount", "-o", "remount,rw", run / "checkpoints"], check=True)
        finish_well(resume(reference, run.name))
        assert fingerprint(run) == fingerprint(reference / "whole")


@pytest.mark.slow
@mounted
def test_a_run_told_to_continue_saves_again_once_checkpoints_are_writable(reference: Path) -> None:
    run = reference / "read-only-for-a-while"
    with small_disk(run / "checkpoints", 10_000):
        command = f"mount -o remount,ro {run}/checkpoints; (sleep 1; mount -o remount,rw {run}/checkpoints) & true"
        (reference / "strike").write_text(command)
        words = ("output.on_write_error=continue", "output.save_every=1")
        slowly = {"STRIKE_AT": STRIKE_AT, "REWARD_SECONDS": 0.1}
        output = finish_well(new_run(reference, run.name, *words, environment=slowly))
        assert "the run continues (output.on_write_error=continue) without this checkpoint" in output
        assert fingerprint(run) == fingerprint(reference / "whole")


@pytest.mark.slow
def test_a_moved_run_folder_stops_the_run_and_nothing_is_lost(reference: Path) -> None:
    run = reference / "moved"
    status, output = struck(reference, run.name, "mv moved elsewhere")
    assert status == 2
    # Whichever is written first says so: rows, the journal or a checkpoint
    assert f"cannot write {run}/" in line_of(output)
    assert "No such file or directory; it was moved or deleted while the run was going; put it back" in line_of(output)
    assert "covey train resume=moved continues when it is back" in line_of(output)
    assert not run.exists(), "no stump of a folder"
    (reference / "elsewhere").rename(run)
    assert_undamaged(run)
    finish_well(resume(reference, run.name))
    assert fingerprint(run) == fingerprint(reference / "whole")


DELETE = "until rm -rf deleted; do true; done"
"""Again where a checkpoint was being written meanwhile."""


@pytest.mark.slow
def test_a_run_folder_that_is_deleted_stops_the_run(reference: Path) -> None:
    status, output = struck(reference, "deleted", DELETE, "output.on_write_error=continue")
    assert status == 2
    assert "cannot write" in line_of(output)
    assert "No such file or directory; it was moved or deleted while the run was going; put it back" in line_of(output)
    assert not (reference / "deleted").exists()


@pytest.mark.slow
def test_checkpoints_that_are_deleted_are_missed_and_the_next_is_saved_all_the_same(reference: Path) -> None:
    status, output = struck(reference, "bereft", "rm -r bereft/checkpoints")
    assert status == 0
    assert f"the checkpoints in {reference}/bereft/checkpoints were deleted while the run was going" in output
    assert fingerprint(reference / "bereft") == fingerprint(reference / "whole")
