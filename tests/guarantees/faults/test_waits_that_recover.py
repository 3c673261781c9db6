"""Promise 7, the other half: what can be given up is given up, by name, and the run goes on or stops in order."""

import ast
import asyncio
import itertools
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest

import covey
from covey.environments.base import Split
from covey.loop import train
from covey.run.versions import versions
from covey.system.workers.pool import WorkerPool, WorkerSettings
from covey.types import Failure, Prompt, Reward, RunStopped
from tests.support.scripted import Scripted

from ...support.small import rows, scripted, small_config, use
from ..runs import finish, new_run, prepare

SOURCE = Path(covey.__file__).parents[1]


@dataclass
class Silent:
    """An environment that never judges the completions of some prompts."""

    inner: Scripted
    silent: frozenset[str]

    def prompts(self, split: Split) -> list[Prompt]:
        return self.inner.prompts(split)

    async def score(self, prompt: Prompt, completions: Sequence[str]) -> list[Reward | Failure]:
        if prompt.id in self.silent:
            await asyncio.Event().wait()
        return await self.inner.score(prompt, completions)


@pytest.mark.long
def test_a_prompt_whose_scoring_hangs_is_dropped_counted_and_the_run_continues(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(monkeypatch, Silent(scripted(), frozenset({"train-1"})))
    train(small_config(num_steps=3, preflight__enabled=False, timeouts__scoring=1.5), tmp_path)
    trained = rows(tmp_path / "metrics.jsonl", "train")
    assert [row.get("dropped/unscored_groups", 0) for row in trained].count(1) == 1
    assert sum(row.get("dropped/unscored_rollouts", 0) for row in trained) == 4
    assert len(trained) == 3


@pytest.mark.long
def test_an_environment_that_judges_nothing_stops_the_run_with_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(monkeypatch, Silent(scripted(), frozenset(f"{split}-{i}" for split in ("train", "test") for i in range(6))))
    began = time.monotonic()
    reason = r"none of \d completions could be scored: scripted.score has not answered for 1 s \(timeouts.scoring=1\)"
    with pytest.raises(RunStopped, match=reason):
        train(small_config(preflight__enabled=False, timeouts__scoring=1), tmp_path)
    assert time.monotonic() - began < 30


@pytest.mark.slow
def test_a_git_that_hangs_costs_seconds_and_no_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    git = tmp_path / "git"
    git.write_text("#!/bin/sh\nexec sleep 600\n")
    git.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    began = time.monotonic()
    assert "git_commit" not in versions()
    assert time.monotonic() - began < 30


LEFT_BEHIND = """
import threading
from covey.cli import main
main.LEAVE_SECONDS = 1.0
threading.Thread(target=threading.Event().wait, name="somebodys-thread").start()
"""


@pytest.mark.slow
def test_a_thread_that_a_library_leaves_behind_does_not_keep_the_process(tmp_path: Path) -> None:
    prepare(tmp_path)
    reward = tmp_path / "varied_reward.py"
    reward.write_text(reward.read_text() + LEFT_BEHIND)
    status, output = finish(new_run(tmp_path, "left", "num_steps=1", "preflight.enabled=false"))
    assert status == 0, output
    assert "covey: shutdown took more than 1 s; forcing exit (threads still running: " in output
    assert "somebodys-thread" in output
    assert "completed · 1 steps" in output


# ------------------------------------------------------------------------------------------------ clocks that jump


def jump(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the wall clock go an hour back or forth at every look; the monotonic one goes on."""
    now, hours = time.time, itertools.cycle((-3600.0, 3600.0))
    monkeypatch.setattr(time, "time", lambda: now() + next(hours))


@pytest.mark.long
def test_a_clock_that_jumps_by_hours_changes_no_duration_and_no_deadline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(monkeypatch, Silent(scripted(), frozenset({"train-1"})))
    jump(monkeypatch)
    began = time.monotonic()
    train(small_config(num_steps=3, preflight__enabled=False, timeouts__scoring=1.5), tmp_path)
    assert 1.5 < time.monotonic() - began < 60
    trained = rows(tmp_path / "metrics.jsonl", "train")
    assert all(0 < row["seconds"] < 60 for row in trained)
    assert any(row["seconds"] >= 1.5 for row in trained)  # the step that waited for the judgement


@pytest.mark.long
def test_a_clock_jump_does_not_move_a_reward_workers_deadline(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    jump(monkeypatch)
    pool = WorkerPool([partial(time.sleep, 0), partial(time.sleep, 600)], WorkerSettings(num_workers=1, timeout=1.0))
    assert asyncio.run(pool.call(0, {})) is None  # it has started
    began = time.monotonic()
    assert asyncio.run(pool.call(1, {})) == Failure("took longer than 1 s")
    assert 0.9 < time.monotonic() - began < 20
    pool.close()


@pytest.mark.long
def test_no_duration_is_taken_from_the_wall_clock() -> None:
    """It is read for people (format.py), for other programs (`created` in wire.py) and for ages of files: leftovers,
    when the kernel last noted a read, and lines of the journal, which outlive the process (journal.py). A service
    keeps for days what clients made, over restarts, so ages there are those of the calendar."""
    found = [
        path.name
        for path in SOURCE.rglob("*.py")
        if "covey_serve" not in path.parts
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute)
        and ast.unparse(node) in ("time.time", "time.time_ns", "datetime.now", "datetime.datetime.now")
    ]
    imported = [path for path in SOURCE.rglob("*.py") if "from time import" in path.read_text()]
    assert sorted(found) == ["disk.py", "format.py", "journal.py", "library.py", "wire.py"]
    assert imported == []
