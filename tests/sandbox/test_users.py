"""Slots do not share a user, nor see when another's programs read a file."""

import os
import time
from pathlib import Path

import pytest

from covey_sandbox import CallTest, Sandbox
from covey_sandbox.inside.isolation import library, users


def test_no_number_is_given_twice_or_to_a_user_that_has_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(users, "FIRST_UID", 70_000)  # nobody's: other tests run beside this one
    monkeypatch.setattr(users, "NUM_UIDS", 3)
    monkeypatch.setattr(users, "owners", lambda: {users.FIRST_UID + 1})
    given = [users.reserve(), users.reserve()]
    assert {uid for uid, _ in given} == {users.FIRST_UID, users.FIRST_UID + 2}
    with pytest.raises(OSError, match="the users 70000 to 70002 are all taken"):
        users.reserve()
    uid, reservation = given.pop()
    reservation.close()
    again, reservation = users.reserve()
    assert again == uid
    reservation.close()
    given[0][1].close()


def test_owners_are_those_of_running_processes() -> None:
    assert os.getuid() in users.owners()


@pytest.mark.long
@pytest.mark.skipif(os.getuid() != 0, reason="an ordinary user stays who it is")
def test_slots_that_run_at_the_same_time_have_different_users() -> None:
    code = "import os, time\ndef f(n):\n    time.sleep(0.5)\n    return os.getuid()"
    with Sandbox(3, "landlock") as sandbox:
        waiting = [sandbox._submit(code, [CallTest((1,), expected=0)], "f", None) for _ in range(3)]
        messages = {future.result().results[0].message for future in waiting}
    assert len(messages) == 3
    assert all(message.startswith("f(1) should be 0, got 6") for message in messages)


def test_reads_of_a_file_are_not_noted_after_freshening(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "below").mkdir()
    paths = [tmp_path / "one.py", tmp_path / "below" / "other.py"]
    for path in paths:
        path.write_text("x")
        os.utime(path, (0, time.time() - 5))
    monkeypatch.setattr(library, "exact_paths", lambda: [str(tmp_path)])
    library.freshen()
    noted = [path.stat().st_atime_ns for path in paths]
    if os.statvfs(tmp_path).f_flag & os.ST_RELATIME:
        assert all(path.stat().st_atime > path.stat().st_mtime for path in paths)
    for path in paths:
        path.read_text()
    assert [path.stat().st_atime_ns for path in paths] == noted
