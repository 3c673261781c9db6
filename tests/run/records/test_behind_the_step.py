"""What a step leaves is written beside the next one, and changes no number."""

import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from covey import loop
from covey.loop import train
from covey.run import stages
from covey.run.checkpoints import checkpoint
from covey.run.given import RunObjects
from covey.run.records.callbacks import Callback
from covey.system.disk import WriteError
from covey.types import Failure, Prompt, Reward
from covey_report.verify import proof

from ...support.scripted import Scripted
from ...support.small import rows, scripted, small_config, use

FILES = ("metrics", "rollouts", "evaluations", "verdicts", "traces", "updates", "proof")


class Counting(Scripted):
    """Tells the verdicts since it was last asked."""

    num_scored = 0

    async def score(self, prompt: Prompt, completions: Sequence[str]) -> list[Reward | Failure]:
        self.num_scored += len(completions)
        return await super().score(prompt, completions)

    def metrics(self) -> Mapping[str, float]:
        found, self.num_scored = self.num_scored, 0
        return {"scored": float(found)}


def noted(monkeypatch: pytest.MonkeyPatch, module: Any, name: str) -> list[str]:
    """Note the threads that call a function."""
    threads, work = list[str](), getattr(module, name)

    def call(*given: Any, **named: Any) -> Any:
        threads.append(threading.current_thread().name.partition("_")[0])
        return work(*given, **named)

    monkeypatch.setattr(module, name, call)
    return threads


def follow(monkeypatch: pytest.MonkeyPatch, module: Any, name: str, done: list[str]) -> None:
    """Note the name of a function at each call of it."""
    work = getattr(module, name)

    def call(*given: Any, **named: Any) -> Any:
        done.append(name)
        return work(*given, **named)

    monkeypatch.setattr(module, name, call)


def finished(folder: Path, *callbacks: Callback, **more: Any) -> dict[str, list[dict[str, Any]]]:
    """Train, and return the rows without what follows the clock."""
    changes: dict[str, Any] = {"num_steps": 5, "evaluation__every": 2, "output__save_every": 3, **more}
    train(small_config(preflight__enabled=False, **changes), folder, RunObjects(callbacks=callbacks))
    timed = {"seconds", "tokens_per_second", "time", "logs", "manifest"}
    return {
        name: [{key: value for key, value in row.items() if key not in timed} for row in rows(folder / f"{name}.jsonl")]
        for name in FILES
    }


def test_digests_rows_and_checkpoints_are_made_beside_the_next_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(monkeypatch, scripted())
    hashed = noted(monkeypatch, proof, "weight_checks")
    sealed = noted(monkeypatch, checkpoint, "file_digests")
    encoded = noted(monkeypatch, proof, "group_row")
    finished(tmp_path / "run")
    assert hashed == [*["MainThread"] * 2, *["behind"] * 5]  # the first two before the run
    assert sealed == ["behind", "MainThread"]  # the last is needed at once
    assert set(encoded) == {"behind"}


def test_the_first_step_begins_before_the_evaluation_and_all_numbers_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(monkeypatch, Counting(scripted().texts, scripted().verdict))
    done = list[str]()
    for module, name in ((loop, "take"), (stages, "answer"), (loop, "update")):
        follow(monkeypatch, module, name, done)
    beside = finished(tmp_path / "beside")
    assert done[:5] == ["take", "answer", "update", "take", "update"]
    done.clear()
    alone = finished(tmp_path / "alone", Callback())  # who listens is told of the evaluation before the step
    assert done[:3] == ["answer", "take", "update"]
    assert [row["step"] for row in beside["verdicts"]] == [0, 2, 4, 5]
    of_steps = [row["environment/scored"] for row in beside["metrics"] if row["kind"] == "train"]
    assert of_steps == [8.0] * 5  # those of an evaluation are in its own row
    assert beside == alone


def test_a_full_disk_beside_a_step_stops_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, scripted())

    def refuse(*given: Any) -> None:
        raise WriteError("rows cannot be written: no space")

    monkeypatch.setattr(proof.ProofLog, "step", refuse)
    with pytest.raises(WriteError, match=r"no space; .* continues with the answers in its journal"):
        finished(tmp_path / "run")
    assert len(rows(tmp_path / "run" / "metrics.jsonl", "train")) == 1
