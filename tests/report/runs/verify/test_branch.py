"""Children of a checkpoint share every random number with their parent; what differs is the settings."""

import json
import math
import re
import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file

from covey.algorithm.intervals import Estimate
from covey.environments.reward_functions.settings import RewardFunctionsConfig
from covey.loop import train
from covey_report.branch.command import check_arms, checkpoint_of, read_words, run_branch
from covey_report.branch.paired import PairedGap, difference_of, groups_after, line_of, over_runs, pair
from covey_report.compare import comparison
from covey_report.logs.read import read_run

from ....support.small import equal, rows, small_config, timeless

Capture = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of eight steps with checkpoints after every second."""
    folder = tmp_path_factory.mktemp("parents")
    (folder / "rows.jsonl").write_text("".join(json.dumps({"prompt": f"number {n}: "}) + "\n" for n in range(12)))
    chosen = small_config(
        num_steps=8,
        environment=RewardFunctionsConfig(in_process=True),
        rewards=["tests.support.byte_rewards:by_bytes"],
        data__path=str(folder / "rows.jsonl"),
        output__save_every=2,
        output__keep_last=9,
        evaluation__every=0,
        preflight__enabled=False,
        sampling__max_tokens=6,
    )
    train(chosen, folder / "run")
    return folder / "run"


def test_a_child_without_changes_is_its_parent_to_the_bit(made: Path, tmp_path: Path, capsys: Capture) -> None:
    words = [str(made), "--at", "4", "--steps", "2", "optimizer.lr=0.01", "--", "optimizer.lr=0.1"]
    run_branch([*words, "--out", str(tmp_path / "out")])
    said = capsys.readouterr().out
    parent, same, other = (tmp_path / "out" / name for name in ("parent", "optimizer.lr=0.01", "optimizer.lr=0.1"))
    at = "checkpoints/step-000006/policy/model.safetensors"
    policies = [load_file(folder / at) for folder in (made, parent, same, other)]
    assert equal(policies[0], policies[1])
    assert equal(policies[0], policies[2])
    assert not equal(policies[0], policies[3])
    recorded = [timeless(rows(folder / "metrics.jsonl", "train")[:6]) for folder in (made, parent)]
    assert recorded[0] == recorded[1]
    assert (
        "optimizer.lr=0.1 against parent, 1 prompt, a run each: other seeds may differ by more: too few to tell" in said
    )
    assert "mean reward of step 6 +0.000" in said
    assert "stopped after step 6: the last of the branch" in said
    assert re.search(r"mean reward [+-]0\.\d{3}.*, 0\.\d{3} → 0\.\d{3}\n", said)
    assert "2 pairs of groups" in said
    assert json.loads((other / "changes.jsonl").read_text())["changes"]["optimizer.lr"]["to"] == 0.1


def test_a_report_takes_branches_together_in_pairs(made: Path, tmp_path: Path, capsys: Capture) -> None:
    run_branch([str(made), "--at", "4", "--steps", "3", "optimizer.lr=0.1", "--out", str(tmp_path / "out")])
    folders = [tmp_path / "out" / name for name in ("parent", "optimizer.lr=0.1")]
    runs = [read_run(folder) for folder in folders]
    found = pair(*runs)
    assert found is not None
    assert (found.number, found.steps) == (4, (6, 7))
    (gain,) = comparison(runs, ["parent", "child"])["gains"]
    assert gain["lines"][-1].startswith("mean reward of steps 6 to 7 ")
    assert pair(read_run(made), runs[1]) is None


@pytest.mark.parametrize(
    ("word", "why"),
    [
        ("seed=3", "other prompts would be drawn"),
        ("data.path=other.jsonl", "other prompts would be drawn"),
        ("environment.timeout=3", "it would be measured otherwise"),
        ("model.lora_rank=4", "the weights are those of the checkpoint"),
        ("num_steps=9", "--steps says how many are trained"),
        ("source=ray", "tokens would depend on the clock"),
    ],
)
def test_settings_that_break_the_pairing_are_refused_by_name(word: str, why: str) -> None:
    with pytest.raises(ValueError, match=f"covey branch must leave {word.partition('=')[0]} as it was \\({why}\\)"):
        check_arms([["optimizer.lr=1"], [word]])


def test_the_step_must_have_a_checkpoint(made: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"--at must be a step of a kept checkpoint of .* \(2, 4, 6\), got 5"):
        run_branch([str(made), "--at", "5", "optimizer.lr=0.1", "--out", str(tmp_path / "out")])
    with pytest.raises(ValueError, match=r"before its last step \(2, 4, 6\), got 8"):
        run_branch([str(made), "--at", "8", "optimizer.lr=0.1", "--out", str(tmp_path / "out")])


@pytest.mark.parametrize("at", [2, 8])
def test_a_run_with_its_last_checkpoint_alone_says_how_to_get_another(at: int, made: Path, tmp_path: Path) -> None:
    checkpoint = tmp_path / "run/checkpoints/step-000008"
    shutil.copytree(made / "checkpoints/step-000008", checkpoint)
    said = r"run has no kept checkpoint before its last step \(8\) to branch from; train again with output\.save_every"
    with pytest.raises(ValueError, match=said):
        checkpoint_of(tmp_path / "run", at, 8)


def test_each_child_has_its_settings_between_dashes(made: Path) -> None:
    asked = read_words([str(made), "--at", "4", "optimizer.lr=1", "a=2", "--", "optimizer.lr=3", "--steps", "2"])
    assert (asked.runs, asked.at, asked.steps) == ((made,), 4, 2)
    assert asked.arms == (("optimizer.lr=1", "a=2"), ("optimizer.lr=3",))
    for wrong in ([str(made), "--at", "4"], [str(made), "a=1"], [str(made), "--at", "4", "a=1", "--", "b"]):
        with pytest.raises(ValueError, match="covey branch needs a run, --at STEP and the settings of each child"):
            read_words(wrong)


def test_pairs_have_the_interval_of_their_differences() -> None:
    base = {(2, f"p{n}", 1): float(n % 2) for n in range(40)}
    other = {key: value * 0.9 + 0.1 for key, value in base.items()}
    found = difference_of(base, other)
    assert found is not None
    assert math.isclose(found.difference.value, 0.05)
    assert found.difference.high - found.difference.low < found.unpaired.high - found.unpaired.low
    assert difference_of({(2, "a", 1): 1.0}, {(2, "b", 1): 1.0}) is None


def test_both_intervals_are_written_alike_and_a_vain_pairing_is_said() -> None:
    found = PairedGap(Estimate(0.1, 0.05, 0.15), Estimate(0.1, -0.1, 0.3), 8, (3, 6))
    said = "mean reward of steps 3 to 6 +0.100 [+0.050, +0.150], 8 pairs of groups (unpaired [-0.100, +0.300])"
    assert line_of(found) == said
    for low, high in ((-0.2, 0.4), (-0.1, 0.3)):
        vain = PairedGap(Estimate(0.1, low, high), Estimate(0.1, -0.1, 0.3), 8, (3, 6))
        assert line_of(vain).endswith("8 pairs of groups (unpaired [-0.100, +0.300]; pairing gains nothing here)")


def test_a_prompt_that_was_drawn_twice_has_two_pairs() -> None:
    groups = [{"prompt_id": "a", "rewards": [reward]} for reward in (0.0, 1.0)]
    found = dict(groups_after([{"step": 4, "groups": groups}, {"step": 5, "groups": groups[:1]}], at=2))
    assert found == {(4, "a", 1): 0.0, (4, "a", 2): 1.0, (5, "a", 1): 0.0}


def test_parents_are_the_units_where_there_are_several() -> None:
    found = over_runs([0.1, 0.2, 0.3])
    assert math.isclose(found.value, 0.2)
    assert math.isclose(found.high - found.value, 4.302652729911275 * 0.1 / math.sqrt(3), rel_tol=1e-6)
