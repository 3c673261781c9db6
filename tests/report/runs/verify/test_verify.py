"""A run that is computed again is confirmed; what was changed in its folder is found and named."""

import hashlib
import json
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from covey.environments.reward_functions.settings import RewardFunctionsConfig
from covey.loop import train
from covey.run import trust
from covey.run.checkpoints.manifest import MANIFEST, digest_of_file, file_digests
from covey_report.verify.command import Asked, config_at, run_verify
from covey_report.verify.proof import pack, saved_checks

from ....support.small import rewrite, small_config

STEPS, AT = 7, "step-000003"
DATA = [{"prompt": f"number {place}: "} for place in range(12)]


def trained(folder: Path, **changes: Any) -> Path:
    """A run with two checkpoints on the way, three evaluations and a file of rows."""
    folder.mkdir(exist_ok=True)
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in DATA))
    usual = {
        "num_steps": STEPS,
        "environment": RewardFunctionsConfig(in_process=True),
        "rewards": ["tests.support.byte_rewards:by_bytes"],
        "data__path": str(folder / "rows.jsonl"),
        "output__save_every": 3,
        "output__keep_last": 9,
        "evaluation__every": 4,
        "preflight__enabled": False,
        "sampling__max_tokens": 6,
    }
    train(small_config(**usual | changes), folder / "run")
    return folder / "run"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return trained(tmp_path_factory.mktemp("verified"))


Capture = pytest.CaptureFixture[str]


def verified(run: Path, capsys: Capture, *words: str) -> tuple[int, str]:
    """The exit code, and what was said."""
    code = run_verify([str(run), "--seed", "0", *words])
    return code, capsys.readouterr().out


def edit(file: Path, step: int, change: Callable[[dict[str, Any]], dict[str, Any]], kind: str | None = None) -> None:
    """Change the first row of a step."""
    lines = file.read_text().splitlines()
    place = next(
        n
        for n, line in enumerate(lines)
        if (row := json.loads(line))["step"] == step and kind in (None, row.get("kind"))
    )
    lines[place] = json.dumps(json.loads(lines[place]) | change(json.loads(lines[place])), ensure_ascii=False)
    file.write_text("\n".join(lines) + "\n")


def forge_proof(run: Path) -> None:
    """Make the digests of logs and checkpoints anew, as somebody who knows of them would."""
    lines = [json.loads(line) for line in (run / "proof.jsonl").read_text().splitlines()]
    for row in lines:
        for name in row.get("logs", {}):
            number = row["logs"][name][0]
            content = b"".join((run / name).read_bytes().splitlines(keepends=True)[:number])
            row["logs"][name] = [number, hashlib.sha256(content).hexdigest()[:32]]
        checkpoint = run / "checkpoints" / f"step-{row['step']:06d}"
        if row["kind"] == "save":
            row["manifest"] = digest_of_file(checkpoint / MANIFEST)
            row["tensors"] = pack(b"".join(check for _, check in saved_checks(checkpoint)))
    (run / "proof.jsonl").write_text("".join(json.dumps(row) + "\n" for row in lines))


def flip(run: Path, *, is_sealed: bool) -> str:
    """Flip the lowest bit of one weight of a checkpoint; return its tensor."""
    file = run / "checkpoints" / AT / "policy" / "model.safetensors"
    tensors = load_file(file)
    name = sorted(tensors)[2]
    tensors[name].view(torch.int32).flatten()[5] ^= 1
    save_file(tensors, file, metadata={"format": "pt"})
    if is_sealed:
        rewrite(file.parents[1] / MANIFEST, lambda old: {"files": file_digests(file.parents[1])})
    return name


def test_a_run_is_confirmed_to_the_bit(run: Path, capsys: Capture) -> None:
    code, said = verified(run, capsys)
    assert code == 0
    assert "confirmed: the same numbers to the bit; the same: 7 steps, 3 evaluations, 3 checkpoints" in said
    assert all(f"step {step} of 7 is computed again" in said for step in range(1, 8))


def test_a_flipped_bit_of_a_checkpoint_is_found_and_its_tensor_named(run: Path, capsys: Capture) -> None:
    name = flip(run, is_sealed=False)
    code, said = verified(run, capsys)
    assert code == 1
    assert f"differs: {AT}: policy/model.safetensors is not what was written; tensor {name} differs" in said


def test_a_flipped_bit_is_found_under_a_new_manifest(run: Path, capsys: Capture) -> None:
    name = flip(run, is_sealed=True)
    code, said = verified(run, capsys)
    assert code == 1
    assert f"tensor {name} differs" in said


def test_a_flipped_bit_is_found_by_computing_where_every_digest_was_forged(run: Path, capsys: Capture) -> None:
    name = flip(run, is_sealed=True)
    forge_proof(run)
    code, said = verified(run, capsys)
    assert code == 1
    assert f"differs at step 3: {AT}: tensor {name}: element 5 is" in said
    assert "; 1 of " in said


def test_an_edited_reward_is_found_with_its_line_and_its_value(run: Path, capsys: Capture) -> None:
    edit(run / "rollouts.jsonl", 5, lambda row: {"reward": row["reward"] + 1})
    code, said = verified(run, capsys, "--steps", "1", "--most", "2")
    assert code == 1
    assert "differs: rollouts.jsonl: one of lines 33 to 40 (step 5) is not what was written" in said
    assert re.search(
        r"differs at step 5: rollouts.jsonl: reward of answer 1, to prompt \S+, is \S+, computed \S+", said
    )


def test_an_edited_reward_is_found_where_its_digest_was_forged(run: Path, capsys: Capture) -> None:
    edit(run / "rollouts.jsonl", 5, lambda row: {"reward": row["reward"] + 1})
    forge_proof(run)
    code, said = verified(run, capsys)
    assert code == 1
    assert "not what was written" not in said
    assert "differs at step 5: rollouts.jsonl: reward of answer 1" in said
    assert "a file was changed, or other settings made the run" in said


def test_an_edited_line_of_metrics_is_found_with_its_column(run: Path, capsys: Capture) -> None:
    edit(run / "metrics.jsonl", 6, lambda row: {"sampled_reward_mean": 0.99}, "train")
    code, said = verified(run, capsys)
    assert code == 1
    assert "differs: metrics.jsonl: line 8 (step 6) is not what was written" in said
    assert "differs at step 6: metrics.jsonl: sampled_reward_mean is 0.99, computed " in said


def test_an_edited_evaluation_is_found_by_computing_it(run: Path, capsys: Capture) -> None:
    edit(run / "metrics.jsonl", 4, lambda row: {"reward_mean": 0.99}, "evaluate")
    forge_proof(run)
    code, said = verified(run, capsys)
    assert code == 1
    assert "differs at step 4: metrics.jsonl: reward_mean is 0.99, computed " in said


def test_a_line_that_was_added_is_found(run: Path, capsys: Capture) -> None:
    with (run / "rollouts.jsonl").open("a") as file:
        file.write(json.dumps({"step": 7, "reward": 1.0}) + "\n")
    code, said = verified(run, capsys)
    assert code == 1
    assert "differs: rollouts.jsonl: 1 line at its end were not written by the run" in said


def test_a_changed_setting_is_found_and_named(run: Path, capsys: Capture) -> None:
    change_setting(run / "config.yaml")
    code, said = verified(run, capsys)
    assert code == 1
    assert "differs: config.yaml says optimizer.lr=0.02, after step 0 the run had 0.01" in said
    assert f"differs: config.yaml says optimizer.lr=0.02, {AT} was saved with 0.01" in said


def change_setting(file: Path) -> None:
    text = file.read_text()
    assert "  lr: 0.01\n" in text
    file.write_text(text.replace("  lr: 0.01\n", "  lr: 0.02\n"))


def test_a_setting_that_was_changed_everywhere_is_found_by_computing(run: Path, capsys: Capture) -> None:
    change_setting(run / "config.yaml")
    for checkpoint in (run / "checkpoints").iterdir():
        change_setting(checkpoint / "settings.yaml")
        rewrite(checkpoint / MANIFEST, lambda old, checkpoint=checkpoint: {"files": file_digests(checkpoint)})
    proof = (run / "proof.jsonl").read_text()
    (run / "proof.jsonl").write_text(proof.replace("  lr: 0.01\\n", "  lr: 0.02\\n"))
    forge_proof(run)
    trust.seal(run)
    code, said = verified(run, capsys)
    assert code == 1
    assert "differs at step 1: metrics.jsonl: learning_rate is 0.01, computed 0.02" in said


def test_another_row_of_the_data_is_found_and_named(run: Path, capsys: Capture) -> None:
    other = run / "other.jsonl"
    other.write_text("".join(json.dumps(row) + "\n" for row in [*DATA[:4], {"prompt": "number 40: "}, *DATA[5:]]))
    code, said = verified(run, capsys, f"data.path={other}")
    assert code == 1
    assert re.search(r"differs at step 0: data: prompt \S+ is not the row that step \d was trained on", said)


def test_the_same_rows_elsewhere_are_the_same_data(run: Path, made: Path, capsys: Capture) -> None:
    elsewhere = shutil.copy(made.parent / "rows.jsonl", run / "elsewhere.jsonl")
    assert verified(run, capsys, f"data.path={elsewhere}")[0] == 0


def test_other_settings_are_no_words_of_verify(run: Path) -> None:
    with pytest.raises(ValueError, match="as settings, got seed=3"):
        run_verify([str(run), "seed=3"])


def test_a_summary_is_sealed_and_its_steps_can_be_looked_at_again(run: Path, capsys: Capture) -> None:
    assert verified(run, capsys, "--steps", "2", "--out", str(run / "said.json"))[0] == 0
    said = json.loads((run / "said.json").read_text())
    assert said["verdict"] == "confirmed"
    assert len(said["drawn"]) == 2
    code, told = verified(run, capsys, "--again", str(run / "said.json"))
    assert code == 0
    assert "says confirmed, and so does this machine" in told
    edit(run / "metrics.jsonl", 6, lambda row: {"sampled_reward_mean": 0.99}, "train")
    code, told = verified(run, capsys, "--again", str(run / "said.json"))
    assert code == 1
    assert "speaks of other files than" in told
    (run / "said.json").write_text((run / "said.json").read_text().replace("confirmed", "certified"))
    with pytest.raises(ValueError, match=r"its seal is of another content"):
        run_verify([str(run), "--again", str(run / "said.json")])


def test_a_foreign_run_runs_no_code_of_its_own(run: Path) -> None:
    (run / "run.seal").unlink()
    with pytest.raises(ValueError, match="was not created by you here, and its settings run code"):
        run_verify([str(run)])


def test_settings_that_a_foreign_run_changed_later_run_no_code(run: Path) -> None:
    (run / "run.seal").unlink()
    change = {"from": ["os:system"], "to": ["think_format"]}
    (run / "changes.jsonl").write_text(json.dumps({"after_step": 4, "changes": {"rewards": change}}) + "\n")
    asked = Asked(run, (), 1, 1, 0, run / "said.json")
    assert config_at(asked, 1).rewards == ["think_format"]
    with pytest.raises(ValueError, match=r"its settings run code .*byte_rewards:by_bytes; review"):
        config_at(asked, 0)
    assert config_at(replace(asked, typed=("trust_run=true",)), 0).rewards == ["tests.support.byte_rewards:by_bytes"]


@pytest.mark.parametrize(("name", "told"), [("ranks", 10**6), ("ranks", 0), ("threads", 10**9), ("threads", "x")])
def test_the_records_of_a_stranger_start_few_processes(name: str, told: Any, run: Path) -> None:
    lines = [json.loads(line) for line in (run / "proof.jsonl").read_text().splitlines()]
    lines[0]["machine"][name] = told
    (run / "proof.jsonl").write_text("".join(json.dumps(row) + "\n" for row in lines))
    with pytest.raises(ValueError, match=rf"the {name} of a run must be 1 to \d+ to compute it again"):
        run_verify([str(run)])
