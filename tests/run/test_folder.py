"""A run's folder is refused in one line where it cannot be used, and tells the settings of every step."""

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from covey.run.folder import CHANGES, CONFIG, create_run_folder, last_settings, names_in, run_of

NOBODY = 65534


def as_nobody(work: Callable[[], object]) -> str:
    """What `work` raises in a process that may not do everything."""
    reading, writing = os.pipe()
    if (child := os.fork()) == 0:
        try:
            if os.geteuid() == 0:
                os.setuid(NOBODY)
            work()
        except Exception as error:
            os.write(writing, f"{type(error).__name__}: {error}".encode())
        finally:
            os._exit(0)
    os.close(writing)
    os.waitpid(child, 0)
    with os.fdopen(reading) as said:
        return said.read()


@pytest.fixture
def closed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A folder that only root may read or write, by a name that leads through none but the one around it."""
    tmp_path.chmod(0o755)
    folder = tmp_path / "closed"
    folder.mkdir(mode=0o111)
    monkeypatch.chdir(tmp_path)
    return Path("closed")


def test_a_run_folder_that_cannot_be_written_is_refused_with_what_to_do(closed: Path) -> None:
    said = as_nobody(lambda: create_run_folder(closed, "seed: 0\n", exact=True))
    assert said == "WriteError: cannot write closed/config.yaml: Permission denied; make its folder writable"


def test_a_run_folder_that_cannot_be_read_is_refused_with_what_to_do(closed: Path) -> None:
    said = as_nobody(lambda: names_in(closed))
    assert said == "ValueError: closed: the run folder cannot be read (Permission denied); name another"


def test_what_is_in_a_folder_is_known_where_there_is_one(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert names_in(tmp_path) == ["file"]
    assert names_in(tmp_path / "file") is None
    assert names_in(tmp_path / ("a" * 300)) is None


def test_a_named_folder_is_kept_despite_a_dangling_settings_link(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.yaml").symlink_to(tmp_path / "gone")
    with pytest.raises(ValueError, match=r"already holds a run \(config\.yaml\)"):
        create_run_folder(tmp_path / "run", "seed: 0\n", exact=True)
    assert not (tmp_path / "run-2").exists()


def test_the_settings_of_a_step_have_all_changes_up_to_it(tmp_path: Path) -> None:
    (tmp_path / CONFIG).write_text("seed: 0\nmodel: {name: nano, kind: causal}\n")
    changes = {2: {"seed": {"from": 0, "to": 1}}, 5: {"model": {"from": {}, "to": {"name": "other"}}}}
    lines = [json.dumps({"after_step": step, "changes": change}) for step, change in changes.items()]
    (tmp_path / CHANGES).write_text("\n".join(lines) + "\n")
    assert [last_settings(tmp_path, step)["seed"] for step in (1, 2, 5)] == [0, 1, 1]
    assert last_settings(tmp_path, 4)["model.kind"] == "causal"
    assert last_settings(tmp_path) == {"seed": 1, "model.name": "other"}


def test_a_policy_belongs_to_the_run_whose_checkpoint_it_is(tmp_path: Path) -> None:
    policy = tmp_path / "run" / "checkpoints" / "step-000003" / "policy"
    assert run_of(str(policy)) is None
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / CONFIG).touch()
    assert run_of(str(policy)) == tmp_path / "run"
    for other in (policy.parent, tmp_path / "run" / "kept" / "step-000003" / "policy"):
        assert run_of(str(other)) is None
    assert run_of("policy") is None
