"""A checkpoint is whole or not there: kills inside a save, torn files, power cuts, retention."""

import os
import shutil
import signal
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from transformers.utils.logging import disable_progress_bar

from covey.loop import run_train
from covey.policy.models.loading import load_policy
from covey.policy.policy import Policy
from covey.policy.settings import ModelConfig
from covey.run.checkpoints.checkpoint import (
    MANIFEST,
    complete_checkpoints,
    load_state,
    newest_valid,
    problem,
    prune_checkpoints,
    read_manifest,
    save_checkpoint,
)
from covey.run.checkpoints.resume import resume_point
from covey.run.folder import create_run_folder

from ...support.small import scripted, small_config, use
from .syscalls import Call, can_trace, follow

TINY = ModelConfig(nano_hidden_size=16, nano_num_layers=1, nano_num_heads=2)
traced = pytest.mark.skipif(not can_trace(), reason="system calls can be followed on Linux x86-64 only")


@pytest.fixture(scope="module")
def policy() -> Policy:
    disable_progress_bar()  # as runs do; its lock is shared with children, and one that is killed may hold it
    return load_policy(TINY, seed=0)


def save(folder: Path, step: int, policy: Policy, score: float | None = None) -> Path:
    facts = {} if score is None else {"score": score}
    return save_checkpoint(folder, step, policy, {"step": step, "numbers": torch.arange(3)}, facts)


def assert_old_or_new(checkpoints: Path) -> None:
    """The newest checkpoint that verifies is that of step 1 or of step 2, and what looks whole is whole."""
    found = newest_valid(checkpoints)
    assert found is not None
    assert found.name in ("step-000001", "step-000002")
    assert load_state(found)["step"] == int(found.name[-6:])
    assert [problem(path) for path in complete_checkpoints(checkpoints)] == [None] * len(
        complete_checkpoints(checkpoints)
    )


# ------------------------------------------------------------------------------------------------ kills inside a save


def save_killed_at(point: int, checkpoints: Path, policy: Policy) -> bool:
    """Save step 2 in a child that is killed at its so-manieth stop; whether there were so many."""
    stops = iter(range(1, 10_000))
    status = follow(lambda: save(checkpoints, 2, policy), lambda call: next(stops) == point)
    assert status == 0 or os.WTERMSIG(status) == signal.SIGKILL
    return status != 0


@traced
def test_a_kill_at_any_write_of_a_save_leaves_a_whole_checkpoint(tmp_path: Path, policy: Policy) -> None:
    checkpoints = tmp_path / "checkpoints"
    save(checkpoints, 1, policy)
    num_killed = 0
    while save_killed_at(num_killed + 1, checkpoints, policy):
        num_killed += 1
        assert_old_or_new(checkpoints)
        shutil.rmtree(checkpoints / "step-000002", ignore_errors=True)
    assert num_killed >= 54
    assert sorted(path.name for path in checkpoints.iterdir()) == ["step-000001", "step-000002"]


@pytest.mark.long
def test_a_kill_at_any_sync_or_rename_leaves_a_whole_checkpoint(tmp_path: Path, policy: Policy) -> None:
    checkpoints = tmp_path / "checkpoints"
    save(checkpoints, 1, policy)
    num_killed = 0
    while True:
        child = os.fork()
        if child == 0:
            kill_at(num_killed + 1)
            save(checkpoints, 2, policy)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        assert_old_or_new(checkpoints)
        if os.WIFEXITED(status):
            break
        num_killed += 1
        shutil.rmtree(checkpoints / "step-000002", ignore_errors=True)
    assert os.WEXITSTATUS(status) == 0
    assert num_killed >= 24


@pytest.mark.long
def test_a_checkpoint_that_is_replaced_outlives_a_kill_at_every_sync_and_rename(tmp_path: Path, policy: Policy) -> None:
    """It may be the only one: of a run that was stopped in its last evaluation, which a resume makes up for."""
    folder = tmp_path / "checkpoints"
    save(folder, 1, policy)
    config = small_config(resume=str(tmp_path))
    for point in range(1, 10_000):
        child = os.fork()
        if child == 0:
            kill_at(point)
            save(folder, 1, policy, score=0.5)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        found = resume_point(config, tmp_path)
        assert found is not None
        assert found.name == "step-000001"
        if os.WIFEXITED(status):
            break
    assert read_manifest(found)["score"] == 0.5
    assert point > 24
    assert [path.name for path in folder.iterdir()] == ["step-000001"]


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


# ------------------------------------------------------------------------------------------------------- power cuts


@dataclass
class Platter:
    """What of a folder would outlive a power cut: contents of files and names in folders as of their last sync."""

    root: Path
    contents: dict[int, bytes] = field(default_factory=dict)
    names: dict[int, dict[str, int]] = field(default_factory=dict)
    folders: set[int] = field(default_factory=set)

    def take_all(self) -> None:
        for path in [self.root, *self.root.rglob("*")]:
            self.take(path)

    def take(self, path: Path) -> None:
        """This path was synced."""
        inode = path.stat().st_ino
        if not path.is_dir():
            self.contents[inode] = path.read_bytes()
            return
        self.names[inode] = {child.name: child.stat().st_ino for child in path.iterdir()}
        self.folders |= {inode} | {child.stat().st_ino for child in path.iterdir() if child.is_dir()}

    def after_a_cut(self, image: Path) -> Path:
        """The folder as it was synced: names that were not are not there, contents that were not are empty."""
        shutil.rmtree(image, ignore_errors=True)
        self._restore(image, self.root.stat().st_ino)
        return image

    def with_names_first(self, image: Path) -> Path:
        """The worse order, which disks are free to take: all names are there, contents that were not synced are not."""
        shutil.rmtree(image, ignore_errors=True)
        shutil.copytree(self.root, image, copy_function=self._copy)
        return image

    def _restore(self, place: Path, inode: int) -> None:
        if inode not in self.folders:
            place.write_bytes(self.contents.get(inode, b""))
            return
        place.mkdir()
        for name, child in self.names.get(inode, {}).items():
            self._restore(place / name, child)

    def _copy(self, source: str, target: str) -> str:
        Path(target).write_bytes(self.contents.get(os.stat(source).st_ino, b""))
        return target


@pytest.mark.long
@traced
def test_a_power_cut_during_a_save_leaves_a_whole_checkpoint(tmp_path: Path, policy: Policy) -> None:
    run = tmp_path / "run"
    run.mkdir()
    save(run / "checkpoints", 1, policy)
    platter = Platter(run)
    platter.take_all()
    cuts = []

    def look(call: Call) -> bool:
        if call.is_done and call.name == "fsync" and call.path is not None:
            platter.take(call.path)
        if call.is_done:
            for image in (platter.after_a_cut(tmp_path / "image"), platter.with_names_first(tmp_path / "image")):
                assert_old_or_new(image / "checkpoints")
            cuts.append(call.name)
        return False

    assert follow(lambda: save(run / "checkpoints", 2, policy), look) == 0
    assert len(cuts) >= 27
    found = newest_valid(platter.after_a_cut(tmp_path / "image") / "checkpoints")
    assert found is not None
    assert found.name == "step-000002", "a save that has returned outlives a power cut"


@traced
def test_every_file_and_folder_of_a_checkpoint_is_synced_before_it_gets_its_name(
    tmp_path: Path, policy: Policy
) -> None:
    calls: list[Call] = []

    def look(call: Call) -> bool:
        if call.is_done:
            calls.append(call)
        return False

    assert follow(lambda: save(tmp_path / "checkpoints", 1, policy), look) == 0
    names = [call.name for call in calls]
    given_its_name = names.index("rename")
    synced = [call.path for call in calls[:given_its_name] if call.name == "fsync" and call.path is not None]
    (aside,) = {path.parent for path in synced if path.name == MANIFEST}
    saved = tmp_path / "checkpoints" / "step-000001"
    assert {path.relative_to(aside) for path in synced if path.is_relative_to(aside)} == {
        path.relative_to(saved) for path in [saved, *saved.rglob("*")]
    }
    last_written = max(
        i for i, call in enumerate(calls) if call.name == "write" and aside in (call.path or aside).parents
    )
    assert calls[last_written].path == aside / MANIFEST, "the manifest is written last"
    assert [call.path for call in calls[given_its_name:] if call.name == "fsync"] == [tmp_path / "checkpoints"]


def synced_by(action: Callable[[], object]) -> list[Path]:
    """What a child that does this syncs, in order."""
    synced: list[Path] = []

    def look(call: Call) -> bool:
        if call.is_done and call.name == "fsync" and call.path is not None:
            synced.append(call.path)
        return False

    assert follow(action, look) == 0
    return synced


@pytest.mark.long
@traced
def test_the_rows_before_a_checkpoint_are_synced_before_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, scripted())
    config = small_config(num_steps=1, preflight__enabled=False)
    synced = synced_by(lambda: run_train(config, tmp_path))
    assert {tmp_path / f"{name}.jsonl" for name in ("metrics", "rollouts", "evaluations")} == set(synced[:3])
    assert synced[-2:] == [tmp_path / "checkpoints", tmp_path / "summary.json.partial"]


@traced
def test_a_runs_settings_and_folder_name_are_synced_before_it_begins(tmp_path: Path) -> None:
    folder = tmp_path / "outputs" / "date" / "time"
    synced = synced_by(lambda: create_run_folder(folder, "seed: 0", exact=True))
    written = [folder / "config.yaml", folder / "run.seal.partial"]
    assert synced == [*written, folder, folder.parent, folder.parent.parent, tmp_path]


# ------------------------------------------------------------------------------------------------------- torn files


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
    for step, score in ((1, 0.9), (2, 0.9), (3, 0.5), (4, 0.2)):
        save(tmp_path, step, policy, score)
    prune_checkpoints(tmp_path, keep_last=1, keep_best=True)
    assert [path.name for path in complete_checkpoints(tmp_path)] == ["step-000002", "step-000004"]
    (tmp_path / "step-000004" / "state.pt").write_bytes(b"torn")
    prune_checkpoints(tmp_path, keep_last=1, keep_best=False)
    assert newest_valid(tmp_path) == tmp_path / "step-000002"
