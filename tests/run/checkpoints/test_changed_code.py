"""Code of the user's that changed between a save and a resume: named, with its file."""

import json
import logging
import shutil
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import covey
from covey.rollouts.saved.journal import RolloutJournal
from covey.run import stages
from covey.run.records.facts import changed_code
from covey.system.custom import source_hashes

from ...support.small import rewrite

FIRST = "from scale_of_{0} import SCALE\n\ndef r(completions, **columns):\n    return [SCALE(c) for c in completions]\n"
HELPER = "def SCALE(text):\n    return {0} * float(len(text))\n"
SMALL: dict[str, Any] = {
    **{"num_steps": 1, "groups_per_step": 1, "group_size": 2, "sampling__max_tokens": 2, "evaluation__num_prompts": 1},
    **{"preflight__enabled": False, "doctor__enabled": False, "output__report": False, "output__progress": False},
    "environment__in_process": True,
}


def write_reward(folder: Path, name: str, scale: int) -> None:
    (folder / f"{name}.py").write_text(FIRST.format(name))
    (folder / f"scale_of_{name}.py").write_text(HELPER.format(scale))


def warnings_of_resuming(folder: Path, name: str, caplog: pytest.LogCaptureFixture) -> list[str]:
    """What is warned of where a run of one step trains for another, its modules imported again."""
    for module in (name, f"scale_of_{name}"):
        sys.modules.pop(module, None)
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        covey.train(resume=folder, num_steps=2, resume_changes=["num_steps"])
    return [record.message for record in caplog.records if record.levelname == "WARNING"]


@pytest.fixture
def begun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> tuple[Path, str]:
    """The folder of a run of one step, and the module of its reward."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    name = f"own_{abs(hash(request.node.name))}"
    write_reward(tmp_path, name, 1)
    Path("rows.jsonl").write_text("".join(json.dumps({"prompt": f"{number}+1="}) + "\n" for number in range(4)))
    return covey.train("nano", f"{name}:r", "rows.jsonl", folder="run", **SMALL).folder, name


def test_a_reward_whose_helper_changed_is_named_with_the_file_at_resume(
    begun: tuple[Path, str], caplog: pytest.LogCaptureFixture
) -> None:
    folder, name = begun
    write_reward(Path(), name, 2)
    assert warnings_of_resuming(folder, name, caplog) == [
        f"rewards {name}:r is not the one that step 1 was saved with (scale_of_{name}.py changed): "
        "rewards before and after it are not comparable"
    ]


def test_an_unchanged_reward_and_a_run_saved_without_hashes_pass(
    begun: tuple[Path, str], caplog: pytest.LogCaptureFixture
) -> None:
    folder, name = begun
    shutil.copytree(folder, "before")
    assert warnings_of_resuming(folder, name, caplog) == []
    rewrite(Path("before/checkpoints/step-000001/manifest.json"), lambda old: {"user_code": {}})
    write_reward(Path(), name, 2)
    assert warnings_of_resuming(Path("before"), name, caplog) == []


def test_answers_in_the_journal_are_of_the_same_code(
    begun: tuple[Path, str], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, name = begun
    identities: list[str] = []

    def journal(folder: Path, identity: str, *place: Any, **more: Any) -> RolloutJournal:
        identities.append(identity)
        return RolloutJournal(folder, identity, *place, **more)

    monkeypatch.setattr(stages, "RolloutJournal", journal)
    for scale in (1, 1, 2):
        copy = shutil.copytree(folder, Path(f"copy-{len(identities)}"))
        write_reward(Path(), name, scale)
        warnings_of_resuming(copy, name, caplog)
    assert identities[0] == identities[1] != identities[2]


def test_only_files_that_both_have_are_compared() -> None:
    now = {"rewards a:r": {"a.py": "1", "b.py": "2"}, "rewards c:r": {"c.py": "3"}}
    then = {"rewards a:r": {"a.py": "0", "b.py": "2", "gone.py": "4"}, "rewards c:r": ["c.py"]}
    assert changed_code(then, now) == {"rewards a:r": ["a.py"]}
    assert changed_code(None, now) == changed_code(["rewards a:r"], now) == {}


def test_a_function_of_a_program_counts_with_what_it_uses(tmp_path: Path) -> None:
    def hashes(scale: int) -> list[dict[str, str]]:
        program = tmp_path / f"program_{scale}.py"
        program.write_text(
            f"def scale():\n    return {scale}\n\ndef r(completions):\n    return [scale() for _ in completions]\n"
        )
        found: dict[str, Any] = {"__name__": "__main__"}
        exec(compile(program.read_text(), str(program), "exec"), found)
        return [source_hashes([one]) for one in (found["r"], partial(found["r"]), partial(print, found["r"]))]

    (one, inner, given), (other, *_) = hashes(1), hashes(2)
    assert list(one) == ["r", "scale"]
    assert one == inner == given
    assert (one["r"] == other["r"], one["scale"] == other["scale"]) == (True, False)
