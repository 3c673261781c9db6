"""Folders that hostile programs leave: bounded by looking, removed without following anything."""

import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from covey_sandbox.inside.isolation import folders


@pytest.fixture
def hostile(tmp_path: Path) -> Iterator[Path]:
    """Links out, a folder nobody may enter, names that look like what removal uses, and a depth of 1500."""
    outside = tmp_path / "outside"
    (outside / "kept").mkdir(parents=True)
    (outside / "kept" / "file").write_text("kept")
    inside = tmp_path / "inside"
    inside.mkdir()
    (inside / "to_folder").symlink_to(outside)
    (inside / "to_file").symlink_to(outside / "kept" / "file")
    (inside / "shut").mkdir()
    (inside / "shut" / "within").mkdir()
    (inside / "shut").chmod(0)
    (inside / ".up-0").write_text("x")
    at = os.open(inside, os.O_RDONLY)
    for _ in range(1500):
        os.mkdir("d", dir_fd=at)
        below = os.open("d", os.O_RDONLY, dir_fd=at)
        os.close(at)
        at = below
    os.close(at)
    yield inside
    if inside.exists():  # what pytest clears up with would not get through
        folders.remove(str(inside))


@pytest.mark.long
def test_everything_goes_and_nothing_outside(hostile: Path) -> None:
    folders.remove(str(hostile))
    assert not hostile.exists()
    assert (hostile.parent / "outside" / "kept" / "file").read_text() == "kept"


def test_a_folder_that_is_a_link_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "real" / "file").write_text("kept")
    (tmp_path / "link").symlink_to(tmp_path / "real")
    with pytest.raises(OSError):
        folders.remove(str(tmp_path / "link"))
    assert (tmp_path / "real" / "file").read_text() == "kept"


def test_what_is_moved_while_it_is_removed_leads_nowhere_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A program that is being ended moves the folder that is just being cleared, so that ".." is another."""
    program, victim = tmp_path / "program", tmp_path / "victim"
    for folder in (program / "empty" / "moved", program / "victim", tmp_path / "empty", victim):
        folder.mkdir(parents=True)
    (victim / "file").write_text("kept")
    list_names, moved = os.listdir, program / "empty" / "moved"

    def while_it_is_moved(at: int) -> list[str]:
        if moved.exists() and os.path.samestat(os.fstat(at), moved.stat()):
            moved.rename(program / "moved")
        return sorted(list_names(at), reverse=True)  # the last comes first

    monkeypatch.setattr(folders.os, "listdir", while_it_is_moved)
    with pytest.raises(OSError, match="changes while it is removed"):
        folders.remove(str(program))
    assert (victim / "file").read_text() == "kept"
    assert (tmp_path / "empty").is_dir()
    monkeypatch.undo()
    folders.remove(str(program))


def test_a_link_that_takes_the_place_of_a_folder_changes_no_mode(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program, victim = tmp_path / "program", tmp_path / "victim"
    (program / "shut").mkdir(parents=True, mode=0o700)
    (program / "shut").chmod(0o500)
    victim.mkdir(mode=0o755)
    look = os.lstat

    def before_it_is_changed(name: str, dir_fd: int) -> os.stat_result:
        found = look(name, dir_fd=dir_fd)
        if stat.S_ISDIR(found.st_mode):
            (program / "shut").rmdir()
            (program / "shut").symlink_to(victim)
        return found

    monkeypatch.setattr(folders.os, "lstat", before_it_is_changed)
    with pytest.raises(OSError):
        folders.remove(str(program))
    assert victim.stat().st_mode & 0o777 == 0o755


def test_no_descriptor_is_closed_twice_where_a_folder_cannot_be_entered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another thread may have been given its number meanwhile."""
    (tmp_path / "program" / "gone").mkdir(parents=True)
    close, closed = os.close, []
    monkeypatch.setattr(folders.os, "close", lambda descriptor: (closed.append(descriptor), close(descriptor)))
    monkeypatch.setattr(folders, "_clear", lambda at: ["never there"])
    with pytest.raises(FileNotFoundError, match="never there"):
        folders.remove(str(tmp_path / "program"))
    assert len(closed) == 1


@pytest.mark.long
def test_bytes_entries_and_depth_count_as_too_much(tmp_path: Path, hostile: Path) -> None:
    small = tmp_path / "small"
    small.mkdir()
    assert not folders.is_over(str(small), 100_000)
    (small / "file").write_bytes(b"x" * 90_000)
    assert not folders.is_over(str(small), 100_000)
    (small / "below").mkdir()
    (small / "below" / "file").write_bytes(b"x" * 90_000)
    assert folders.is_over(str(small), 100_000)
    assert folders.is_over(str(hostile), 1 << 40), "too deep"
    many = tmp_path / "many"
    many.mkdir()
    for index in range(folders.MAX_ENTRIES + 1):
        (many / str(index)).touch()
    assert folders.is_over(str(many), 1 << 40)


def test_what_cannot_be_looked_at_counts_as_too_much(tmp_path: Path) -> None:
    """As an ordinary user; root may look everywhere."""
    shut = tmp_path / "shut"
    shut.mkdir(0o300)
    pid = os.fork()
    if pid == 0:
        if os.getuid() == 0:
            os.chown(shut, 65534, 65534)
            os.chmod(tmp_path, 0o755)
            at = os.open(tmp_path, os.O_RDONLY)
            os.setresuid(65534, 65534, 65534)
            os.fchdir(at)
        else:
            os.chdir(tmp_path)
        os._exit(7 if folders.is_over(".", 1 << 40) else 0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7


def test_what_lies_behind_a_path_that_is_too_long_is_counted(tmp_path: Path) -> None:
    at = os.open(tmp_path, os.O_RDONLY)
    for _ in range(20):
        os.mkdir("n" * 250, dir_fd=at)
        below = os.open("n" * 250, os.O_RDONLY, dir_fd=at)
        os.close(at)
        at = below
    assert not folders.is_over(str(tmp_path), 200_000)
    os.write(os.open("file", os.O_CREAT | os.O_WRONLY, dir_fd=at), b"x" * 200_000)
    assert folders.is_over(str(tmp_path), 200_000)
    os.close(at)
    folders.remove(str(tmp_path / ("n" * 250)))


def test_what_is_gone_is_neither_over_nor_has_threads(tmp_path: Path) -> None:
    assert not folders.is_over(str(tmp_path / "gone"), 0)
    assert folders.num_threads(2**22 + 1) == 0
    assert folders.num_threads(os.getpid()) >= 1
