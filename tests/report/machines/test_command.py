"""`covey machines`: machines in files, and the best of a run."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("mujoco", reason="needs covey[machines]")

from covey.cli.main import main
from covey_report.machines.command import best_of_run, tree_of_row
from covey_tasks.machines.design.compact import write_compact
from covey_tasks.machines.design.global_form import write_global
from covey_tasks.machines.design.tree import canonical, write_json
from covey_tasks.machines.design.types import ROOT, Tree
from covey_tasks.machines.physics.constants import physics_version

from ...tasks.machines.designs import CAR, ROTOR_CATAPULT, SMALL_CAR


@pytest.fixture
def car(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    path = Path("car.json")
    path.write_text(write_json(SMALL_CAR))
    return path


@pytest.mark.long
def test_show_says_what_a_machine_is_made_of_and_draws_it(car: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["machines", "show", str(car)]) == 0
    first, second = capsys.readouterr().out.splitlines()
    assert first == "4 blocks, 2.75 kg, 2 x 2 x 3.5 m: 2 Powered Wheel, 1 Starting Block, 1 Wooden Block"
    assert second == "picture: car.png"
    assert Path("car.png").stat().st_size > 10_000


def test_simulate_says_where_it_goes_and_what_that_is_worth(car: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["machines", "simulate", str(car), "--out", "way.png", "--film=way.gif"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].split() == ["time", "root", "x", "y", "z"]
    assert lines[2].split()[0] == "0.00"
    assert lines[27].split()[0] == "5.00"
    assert lines[28].startswith("the starting block moved 30.")
    paper, repo, strict = (float(word) for word in lines[29].split()[1::2])
    assert paper == strict == pytest.approx(repo, abs=0.06)
    assert lines[30] == f"physics {physics_version()}"
    assert lines[31] == "picture: way.png"
    assert Path("way.png").exists()
    assert lines[32] == "film: way.gif"
    assert Path("way.gif").read_bytes()[:3] == b"GIF"


@pytest.mark.long
def test_a_catapult_is_known_by_its_boulder(car: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("throw.txt").write_text(f"A catapult.\n```json\n{write_json(ROTOR_CATAPULT)}\n```\n")
    assert main(["machines", "simulate", "throw.txt"]) == 0
    out = capsys.readouterr().out
    assert "the boulder rose from 6.95 to 11." in out
    assert "m and landed 27." in out
    assert "the starting block rose by 0.4" in out
    assert "film: " not in out


@pytest.mark.long
def test_positions_are_read_too(car: Path, capsys: pytest.CaptureFixture[str]) -> None:
    car.write_text(write_global(canonical(SMALL_CAR)))
    assert main(["machines", "show", str(car)]) == 0
    assert capsys.readouterr().out.startswith("4 blocks, 2.75 kg")


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ([], "covey machines needs what to do (show, simulate, gallery) and a file, got 0 words"),
        (["fly", "car.json"], "covey machines must be one of show, simulate, gallery, got fly"),
        (["show", "car.json", "--film", "a.gif"], "covey machines show does not read --film"),
        (["show", "car.json", "--size", "3"], 'no flag "--size"; flags: --out, --task, --film, --best'),
        (["show", "car.json", "--out"], "--out needs a value"),
        (["show", "car.json", "--out", "a.pdf"], "--out must be a .png file, got a.pdf"),
        (["simulate", "car.json", "--task", "boat"], "--task must be one of car, catapult, got boat"),
        (
            ["show", "none.json"],
            "no file none.json; it must hold a machine as JSON (docs/tasks/machines.md has one)",
        ),
        (["show", "twice.json"], "twice.json: block 2: face 0 of block 0 is already occupied (occupied)"),
        (["gallery", "."], "no rollouts.jsonl in .; covey train writes one"),
        (["gallery", ".", "--best", "0"], "--best must be a number from 1 to 48, got 0"),
    ],
)
def test_a_mistake_is_one_line(words: list[str], line: str, car: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = json.loads(car.read_text())
    Path("twice.json").write_text(json.dumps([*rows[:2], rows[1] | {"id": 2}]))
    assert main(["machines", *words]) == 2
    assert capsys.readouterr().err == f"covey: {line}\n"


def test_help_names_every_action_and_flag(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["machines", "--help"]) == 0
    shown = capsys.readouterr().out
    for word in ("show FILE", "simulate FILE", "gallery FOLDER", "--out", "--film", "--task", "--best"):
        assert word in shown


@pytest.mark.parametrize(("missing", "verb"), [("mujoco", "simulate"), ("matplotlib", "show")])
def test_without_its_extra_the_remedy_is_one_line(missing: str, verb: str, car: Path) -> None:
    code = f"import sys; sys.modules[{missing!r}] = None; from covey.cli.main import main; sys.exit(main())"
    done = subprocess.run(
        [sys.executable, "-c", code, "machines", verb, str(car)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert f"needs {missing}: pip install 'covey[machines]'" in done.stderr


# ------------------------------------------------------------------------------------------------ of a run


def row(step: int, tree: Tree, score: float, *, compact: bool) -> dict:
    prompt = "car 48:" if compact else [{"role": "user", "content": "Build a car."}]
    completion = write_compact(tree) if compact else f"An idea.\n```json\n{write_json(tree)}\n```"
    return {"step": step, "prompt": prompt, "completion": completion, "parts": {"score": score}}


def test_the_best_machines_of_a_run_are_each_there_once_in_order(tmp_path: Path) -> None:
    rows = [
        row(1, SMALL_CAR, 30.5, compact=True),
        row(2, CAR, 35.8, compact=False),
        row(3, SMALL_CAR, 30.5, compact=False),
        row(4, (ROOT,), 0.0, compact=True),
        {"step": 5, "prompt": "car 48:", "completion": "no machine", "parts": {"score": 0.0}},
    ]
    (tmp_path / "rollouts.jsonl").write_text("".join(json.dumps(one) + "\n" for one in rows))
    found = best_of_run(tmp_path, 5)
    assert [(one.score, one.step) for one in found] == [(35.8, 2), (30.5, 1)]
    assert found[0].tree == canonical(CAR)
    assert len(best_of_run(tmp_path, 1)) == 1


def test_the_machine_of_a_row_is_the_one_that_was_judged() -> None:
    thought = row(1, CAR, 0.0, compact=False)["completion"]
    answered = {"prompt": [], "completion": f"<think>{thought}</think>{write_json(SMALL_CAR)}"}
    assert tree_of_row(answered) == SMALL_CAR
    begun = {"prompt": "Build: a car 7:" + write_compact(SMALL_CAR[:2]), "completion": write_compact(SMALL_CAR)[3:]}
    assert tree_of_row(begun) == SMALL_CAR


def test_a_gallery_of_a_run_is_drawn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [row(1, SMALL_CAR, 30.5, compact=True), row(2, CAR, 35.8, compact=True)]
    (tmp_path / "rollouts.jsonl").write_text("".join(json.dumps(one) + "\n" for one in rows))
    assert main(["machines", "gallery", str(tmp_path)]) == 0
    assert capsys.readouterr().out == f"picture: {tmp_path / 'machines.png'}\n"
    assert (tmp_path / "machines.png").stat().st_size > 10_000


@pytest.mark.slow
def test_the_best_machine_of_a_run_is_filmed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [row(1, CAR, 35.8, compact=True), row(2, ROTOR_CATAPULT, 121.5, compact=True)]
    (tmp_path / "rollouts.jsonl").write_text("".join(json.dumps(one) + "\n" for one in rows))
    assert main(["machines", "gallery", str(tmp_path), "--best", "1", f"--film={tmp_path}/best.gif"]) == 0
    assert capsys.readouterr().out == f"picture: {tmp_path}/machines.png\nfilm: {tmp_path}/best.gif\n"
    assert (tmp_path / "best.gif").read_bytes()[:3] == b"GIF"


def test_a_run_without_machines_says_so(tmp_path: Path) -> None:
    (tmp_path / "rollouts.jsonl").write_text(json.dumps(row(1, CAR, 0.0, compact=True)) + "\n")
    with pytest.raises(ValueError, match="no machine with a score in"):
        best_of_run(tmp_path, 3)
