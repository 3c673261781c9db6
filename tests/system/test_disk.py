"""Files and folders that are written aside and renamed are whole or not there."""

import errno
import os
import time
from pathlib import Path

import pytest

from covey.system import disk
from covey.system.disk import WriteError, atomic_file, atomic_folder, put_back, read_regular
from covey.system.jsonl import plain_data, read_rows, write_json


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_folder_appears_whole_at_the_end_and_leaves_nothing_beside_it(tmp_path: Path) -> None:
    with atomic_folder(tmp_path / "made") as aside:
        (aside / "inner").mkdir()
        (aside / "inner" / "file").write_text("content")
        assert not (tmp_path / "made").exists()
    assert names(tmp_path) == ["made"]
    assert (tmp_path / "made" / "inner" / "file").read_text() == "content"


def test_a_folder_whose_making_is_interrupted_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="null byte"), atomic_folder(tmp_path / "made") as aside:
        (aside / "\0").touch()
    assert names(tmp_path) == []


def test_an_older_folder_stays_unless_it_is_to_be_replaced(tmp_path: Path) -> None:
    (tmp_path / "made").mkdir()
    (tmp_path / "made" / "old").touch()
    with pytest.raises(WriteError), atomic_folder(tmp_path / "made") as aside:
        (aside / "new").touch()
    assert names(tmp_path / "made") == ["old"]
    with atomic_folder(tmp_path / "made", replaces=True) as aside:
        (aside / "new").touch()
    assert (names(tmp_path), names(tmp_path / "made")) == (["made"], ["new"])


def test_leftovers_of_the_family_are_removed_once_they_are_old(tmp_path: Path) -> None:
    for name, age in (("one.tmp-old", 70), ("one.tmp-young", 50), ("two.tmp-old", 70)):
        (tmp_path / name).mkdir()
        os.utime(tmp_path / name, (time.time() - age,) * 2)
    with atomic_folder(tmp_path / "one-x", family="one", max_age=60):
        pass
    assert names(tmp_path) == ["one-x", "one.tmp-young", "two.tmp-old"]


def test_leftovers_from_the_future_are_removed_too(tmp_path: Path) -> None:
    (tmp_path / "one.tmp-left").mkdir()
    os.utime(tmp_path / "one.tmp-left", (time.time() + 3600,) * 2)
    with atomic_folder(tmp_path / "one"):
        pass
    assert names(tmp_path) == ["one"]


def test_a_file_is_replaced_at_the_end_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("old")
    with pytest.raises(TypeError), atomic_file(path) as file:
        file.writelines(["half", 0])  # type: ignore[list-item]
    assert (path.read_text(), names(tmp_path)) == ("old", ["file"])
    with atomic_file(path) as file:
        file.write("new")
        assert path.read_text() == "old"
    assert (path.read_text(), names(tmp_path)) == ("new", ["file"])


def test_numbers_that_json_cannot_hold_are_written_as_text(tmp_path: Path) -> None:
    write_json(tmp_path / "file.json", {"a": float("nan"), "b": [float("-inf"), 1.5], "c": Path("x")})
    assert (tmp_path / "file.json").read_text() == (
        '{\n  "a": "nan",\n  "b": [\n    "-inf",\n    1.5\n  ],\n  "c": "x"\n}\n'
    )
    assert plain_data((float("-inf"), True, 1.5)) == ["-inf", True, 1.5]


@pytest.mark.parametrize(("is_there", "content"), [(False, "old"), (True, "new")])
def test_a_folder_that_was_killed_in_its_replacement_comes_back(tmp_path: Path, is_there: bool, content: str) -> None:
    before = tmp_path / "saved.tmp-abc" / "before"
    before.mkdir(parents=True)
    (before / "file").write_text("old")
    if is_there:
        (tmp_path / "saved").mkdir()
        (tmp_path / "saved" / "file").write_text("new")
    put_back(tmp_path)
    assert (tmp_path / "saved" / "file").read_text() == content


def test_foreign_files_are_read_only_if_regular_and_within_the_limit(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"abc")
    (tmp_path / "link").symlink_to("file")
    os.mkfifo(tmp_path / "pipe")
    assert read_regular(tmp_path / "file", 3) == b"abc"
    faults = {
        "file": "has 3 bytes, at most 2 are read",
        "link": "is a link, not a file",
        "pipe": "is not a regular file",
    }
    for name, fault in faults.items():
        with pytest.raises(ValueError, match=f"^{name} {fault}$"):
            read_regular(tmp_path / name, 2)


def test_a_row_has_a_step_that_is_a_whole_number(tmp_path: Path) -> None:
    assert list(read_rows(tmp_path / "rows.jsonl")) == []
    (tmp_path / "rows.jsonl").write_text('{"step": 1}\n{"step": true}\n{"step": 2.0}\n{"loss": 1}\n[3]\n{"step": 4')
    assert list(read_rows(tmp_path / "rows.jsonl")) == [{"step": 1}]


def test_the_room_on_a_full_disk_is_that_of_the_failed_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk, "_free", lambda path: f"{len(list(path.parent.glob('*.tmp-*/*/*')))} files")

    def fill_the_disk() -> None:
        with atomic_folder(tmp_path / "made") as aside:
            (aside / "half").touch()
            raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(WriteError, match="1 files are free"):
        fill_the_disk()
