"""The sanity set: its judges pay for whole right answers alone, and faults of a running system are named."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.checks.doctor.__main__ import names_first
from benchmarks.real.sanity.faults import FAULTS
from benchmarks.real.sanity.problems import ATTEMPTS, mixed, num_solved, read
from benchmarks.real.sanity.table import SET, SHORT, is_named, is_right, row_of
from benchmarks.real.sanity.tasks import KINDS, SHOWN, candidates, solved
from covey.algorithm.credit.groups import CreditAssigner
from covey.engine.native.engine import NativeEngine
from covey.loop import train
from covey.rollouts.source import LocalSource
from covey.trainer import forward, trainer
from covey_report.doctor.health import health_of, read_for_doctor

from ..support.small import rows, scripted, small_config, use

RIGHT = {
    "number": (("7",), ["7", " 7.\n"]),
    "word": (("Rome",), ["Rome", "Rome."]),
    "sentence": (("owl",), ["An owl is a bird of the night."]),
    "object": (("sun", "name", "size"), ['{"name": "The sun", "size": "large"}', '{"size": 3, "name": "sun"}']),
}
WRONG = {
    "number": ["", "8", "7 or 8", "77", "4 + 3 = 7", "1 2 3 4 5 6 7"],
    "word": ["", "Rome, Paris", "The capital is Rome", "rome"],
    "sentence": [
        "",
        "owl owl owl owl.",
        "A bird of the night is what it is.",
        "An owl is a bird. It flies.",
        "An owl is a bird of the night",
        "An owl is a bird of the night that flies over the wide fields and hunts for mice.",
        "What is an owl?",
    ],
    "object": [
        "",
        "{}",
        '{"name": "sun"}',
        '{"name": "moon", "size": "large"}',
        '{"name": "sun", "size": "sun"}',
        '{"name": "sun", "size": ""}',
        '{"name": "sun", "size": "large", "age": 3}',
        'Here: {"name": "sun", "size": "large"}',
        '["sun", "large"]',
    ],
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_right_answer_is_paid_as_a_whole_and_nothing_else_is(kind: str) -> None:
    target, right = RIGHT[kind]
    answers = [*right, *WRONG[kind]]
    size = len(answers)
    assert solved(answers, [kind] * size, [target] * size) == [1.0] * len(right) + [0.0] * len(WRONG[kind])


@pytest.mark.parametrize("kind", SHOWN)
def test_what_is_shown_answers_no_candidate(kind: str) -> None:
    shown = SHOWN[kind][-1][1]
    rows = [row for row in candidates() if row["kind"] == kind]
    copied = [
        row["id"] for row in rows if num_solved(row, [shown]) and row["prompt"][-1]["content"] != SHOWN[kind][1][1]
    ]
    # A sum may be the one that is shown by another name, as 6 + 1 is
    assert len(copied) <= 0.2 * len(rows)


def test_candidates_are_the_same_each_time_and_no_two_alike() -> None:
    rows = candidates()
    assert rows == candidates()
    assert len({row["prompt"][-1]["content"] for row in rows}) == len(rows)
    assert len({row["id"] for row in rows}) == len(rows)


def test_the_set_is_of_problems_solved_sometimes_of_every_kind() -> None:
    rows = read(SET)
    assert all(0 < row["solved"] < ATTEMPTS for row in read(SHORT))
    assert all(0 < row["solved"] < ATTEMPTS for row in rows)
    assert {row["kind"] for row in rows} == set(KINDS)
    assert sorted(row["id"] for row in mixed(rows)) == sorted(row["id"] for row in rows)


def test_a_sound_run_must_learn_and_a_planted_fault_must_fail_by_name() -> None:
    run = {"fault": None, "problems": 8, "seed": 0}
    healthy = {**run, "before": 0.3, "after": 0.97, "curve": [0.3], "seconds": 1, "findings": []}
    assert is_right(healthy)
    assert not is_right({**healthy, "after": 0.94})
    flipped = {**healthy, "fault": "sign_flipped", "after": 0.0, "findings": ["sick: D37 updates go astray: ..."]}
    assert is_right(flipped)
    assert is_named(flipped)
    assert not is_right({**flipped, "after": 0.97})
    assert not is_right({**flipped, "findings": ["watch: D2 too hard: ..."]})
    hidden = {**flipped, "fault": "engine_raised", "after": 1.0, "findings": ["sick: D10 sampler is not ..."]}
    assert is_right(hidden)
    assert "D10" in row_of(hidden)
    refused = {**run, "fault": "engine_raised", "refused": "preflight: ..."}
    assert is_right(refused)
    assert "refused" in row_of(refused)


PATCHED = (
    *((NativeEngine, "generate_telling"), (NativeEngine, "_take_weights"), (LocalSource, "take")),
    *((forward, "score_tokens"), (CreditAssigner, "assign"), (trainer.Trainer, "_loss")),
    *((trainer, "build_optimizer"), (trainer, "clipped_step")),
)
"""All that the faults replace."""


def shown(folder: Path) -> list[list[float]]:
    train(small_config(num_steps=2, group_size=8, preflight__enabled=False), folder)
    return [
        [row[name] for name in ("mismatch", "loss", "grad_norm")] for row in rows(folder / "metrics.jsonl", "train")
    ]


@pytest.mark.long
def test_each_fault_is_in_what_a_run_of_two_steps_shows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, scripted())
    sound, same = shown(tmp_path / "sound"), []
    assert shown(tmp_path / "again") == sound
    for name, fault in FAULTS.items():
        with monkeypatch.context() as patch:
            for owner, replaced in PATCHED:
                patch.setattr(owner, replaced, getattr(owner, replaced))  # put back after
            fault.plant()
            same += [name] * (shown(tmp_path / name) == sound)
    assert same == []


# In a model so small matrices of a shape of their own keep their gradients, and it learns from them
@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", [name for name in FAULTS if name != "gradients_of_others"])
def test_the_doctor_names_each_fault(tmp_path: Path, name: str) -> None:
    command = [sys.executable, "-m", "benchmarks.real.sanity.toy", name, f"hydra.run.dir={tmp_path / 'run'}"]
    subprocess.run(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, check=True)
    found = health_of(read_for_doctor(tmp_path / "run")).findings
    assert names_first(FAULTS[name].named_by, found), [one.title for one in found]
