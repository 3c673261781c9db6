"""What a folder claims of a run follows from its rows, and each step has its own."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from covey_report.verify.claims import claims_changed
from covey_report.verify.itself import look_at_folder, read_proof, rows_misplaced

from .test_verify import edit, trained, verified

Capture = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return trained(tmp_path_factory.mktemp("claimed"))


def as_older(run: Path) -> None:
    """Make a run one of the version before proof.jsonl."""
    (run / "proof.jsonl").unlink()
    claim(run / "versions.json", "format", 1)


def test_a_run_without_a_proof_is_compared_by_its_rows(run: Path, capsys: Capture) -> None:
    as_older(run)
    code, said = verified(run, capsys, "--steps", "1", "--most", "2")
    assert code == 0
    assert "(no proof.jsonl: rows of the 5 other steps are unchecked)" in said
    assert "rows of the 5 other steps" in json.loads((run / "verified.json").read_text())["reason"]
    edit(run / "rollouts.jsonl", 5, lambda row: {"reward": row["reward"] + 1})
    code, said = verified(run, capsys)
    assert "differs at step 5: rollouts.jsonl: reward of answer 1" in said
    assert code == 1


def test_a_proof_that_was_deleted_is_a_difference(run: Path, capsys: Capture) -> None:
    (run / "proof.jsonl").unlink()
    code, said = verified(run, capsys, "--steps", "1", "--most", "2")
    assert code == 1
    assert "differs: proof.jsonl is missing, which a run of this version writes" in said
    assert "a file is not what the run wrote (no proof.jsonl: rows of the 5 other steps are unchecked)" in said


def claim(file: Path, place: str, value: Any) -> None:
    """Write another value into a file of JSON."""
    found = inner = json.loads(file.read_text())
    *sections, name = place.split(".")
    for section in sections:
        inner = inner[section]
    inner[name] = value
    file.write_text(json.dumps(found))


CLAIMS = {
    "steps": 9,
    "seed": 5,
    "tokens": 1,
    "skipped_steps": 2,
    "dropped_groups": 3,
    "confidence": 0.5,
    "before.reward_mean.value": 0.9,
    "after.reward_mean.value": 0.9,
    "after.reward_mean.low": 0.9,
    "after.num_prompts": 999,
    "after.reward_parts.by_bytes.value": 0.9,
    "after.pass_at_k.99": {"value": 1.0},
    "gain.reward_mean.value": 0.9,
    "gain.reward_mean.low": 0.1,
    "gain.num_prompts": 999,
    "versions.torch": "9.9",
}


@pytest.mark.parametrize("place", CLAIMS)
def test_a_result_that_its_rows_do_not_say_is_named(place: str, run: Path) -> None:
    proof = read_proof(run)
    assert list(claims_changed(run, proof)) == []
    claim(run / "summary.json", place, CLAIMS[place])
    (said,) = (one.text for one in claims_changed(run, proof))
    assert said.startswith(f"summary.json: {place.removesuffix('.value').removeprefix('versions.')} is ")


def test_an_edited_result_is_not_confirmed(run: Path, capsys: Capture) -> None:
    claim(run / "summary.json", "after.reward_mean.value", 0.53)
    code, said = verified(run, capsys, "--steps", "1", "--most", "2")
    assert code == 1
    assert re.search(r"differs: summary.json: after.reward_mean is 0.53, its verdicts say 0\.\d+\n", said)
    assert "differs: a file is not what the run wrote" in said


def test_a_summary_that_cannot_be_read_is_a_difference(run: Path, capsys: Capture) -> None:
    (run / "summary.json").write_text('{"steps": ')
    code, said = verified(run, capsys, "--steps", "1", "--most", "2")
    assert code == 1
    assert "summary.json does not hold what a run writes there" in said


def test_versions_are_those_of_the_proof(run: Path) -> None:
    claim(run / "versions.json", "torch", "9.9")
    (one,) = claims_changed(run, read_proof(run))
    assert one.text == f"versions.json: torch is 9.9, proof.jsonl says {torch.__version__}"


def test_files_that_nothing_is_compared_with_are_named(run: Path, capsys: Capture) -> None:
    (run / "preflight.json").write_text("{}")
    (run / "report.html").write_text("53.0 %")
    said = verified(run, capsys, "--steps", "1", "--most", "2")[1]
    told = next(line for line in said.splitlines() if line.startswith("not covered: "))
    assert "preflight.json; report.html (made of the other files: covey report FOLDER makes it again)" in told
    assert json.loads((run / "verified.json").read_text())["not_covered"] == told[13:].split("; ")
    assert "metrics.jsonl" not in told


def change_lines(file: Path, change: Callable[[list[str]], list[str]]) -> None:
    file.write_text("".join(change(file.read_text().splitlines(keepends=True))))


def without(step: int) -> Callable[[list[str]], list[str]]:
    return lambda lines: [line for line in lines if json.loads(line)["step"] != step]


def forget(run: Path, step: int) -> None:
    """Remove a step from every log."""
    for name in ("metrics", "rollouts", "proof", "updates", "traces"):
        change_lines(run / f"{name}.jsonl", without(step))


def test_a_step_that_was_removed_everywhere_is_named(run: Path, capsys: Capture) -> None:
    forget(run, 6)
    code, said = verified(run, capsys)
    assert code == 1
    assert "differs: metrics.jsonl: step 6 is missing" in said
    assert "differs: proof.jsonl: step 6 is missing" in said
    assert json.loads((run / "verified.json").read_text())["verdict"] == "differs"


def test_the_last_step_cannot_be_removed(run: Path, capsys: Capture) -> None:
    forget(run, 7)
    code, said = verified(run, capsys)
    assert code == 1
    assert "differs: metrics.jsonl: step 7 is missing" in said


LINES = {
    "removed": lambda lines: lines[:2] + lines[3:],
    "doubled": lambda lines: lines[:3] + lines[2:],
    "swapped": lambda lines: [*lines[:2], lines[-1], *lines[3:-1], lines[2]],
}


@pytest.mark.parametrize("what", LINES)
@pytest.mark.parametrize("name", ["metrics", "rollouts", "evaluations", "traces", "updates", "verdicts"])
def test_a_row_out_of_its_place_is_found(name: str, what: str, run: Path) -> None:
    change_lines(run / f"{name}.jsonl", LINES[what])
    found = [*rows_misplaced(run), *look_at_folder(run, read_proof(run))]
    assert any(one.text.startswith(f"{name}.jsonl: ") for one in found)
    assert not any("None" in one.text for one in found)


@pytest.mark.parametrize(
    ("name", "change", "said"),
    [
        ("metrics", LINES["doubled"], "metrics.jsonl: step 2 has several rows of kind train"),
        ("metrics", LINES["swapped"], "metrics.jsonl: row 4 is of step 3, after one of step 7"),
        ("updates", LINES["doubled"], "updates.jsonl: step 3 has several rows of kind train"),
        ("updates", LINES["swapped"], "updates.jsonl: row 4 is of step 4, after one of step 7"),
        ("verdicts", lambda lines: [lines[0], lines[2]], "verdicts.jsonl: the evaluation after step 4 is missing"),
        ("metrics", without(3), "metrics.jsonl: step 3 is missing"),
        ("metrics", lambda lines: [], "metrics.jsonl: step 1 is missing, and 6 others"),
    ],
)
def test_rows_out_of_place_are_found_without_a_proof(
    name: str, change: Callable[[list[str]], list[str]], said: str, run: Path
) -> None:
    (run / "proof.jsonl").unlink()
    assert list(rows_misplaced(run)) == []
    change_lines(run / f"{name}.jsonl", change)
    assert said in [one.text for one in rows_misplaced(run)]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (without(3), "proof.jsonl: step 3 is missing"),
        (lambda lines: lines[1:], "proof.jsonl: its first row is missing"),
        (lambda lines: lines[:3] + lines[2:], "proof.jsonl: step 1 has several rows of kind train"),
    ],
)
def test_a_proof_has_a_row_for_each_step(change: Callable[[list[str]], list[str]], said: str, run: Path) -> None:
    change_lines(run / "proof.jsonl", change)
    assert said in [one.text for one in rows_misplaced(run)]


def test_a_torn_last_line_has_its_step(run: Path, capsys: Capture) -> None:
    file = run / "updates.jsonl"
    file.write_bytes(file.read_bytes()[:-200])
    code, said = verified(run, capsys, "--steps", "1", "--most", "2")
    assert code == 1
    assert "differs: updates.jsonl: line 7 (step 7) is not what was written" in said


def test_a_log_that_was_deleted_is_named(run: Path) -> None:
    (run / "updates.jsonl").unlink()
    (one,) = look_at_folder(run, read_proof(run))
    assert one.text == "updates.jsonl is missing, of which proof.jsonl has digests"
