"""The line of a model card that measures an exported policy again."""

import json
import re
import shutil
from pathlib import Path

import pytest

from covey.cli.main import main

pytestmark = pytest.mark.long
ROWS = [{"prompt": f"say {number}:"} for number in range(12)]


def test_the_line_of_a_card_measures_a_policy_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A stranger has the export, the rows and the reward; the run and the key that it was sealed with are gone."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "short_reward.py").write_text("def short(completions, **_):\n    return [0.0 for _ in completions]\n")
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    words = f"data.path={tmp_path}/rows.jsonl num_steps=1 group_size=2 groups_per_step=2 sampling.max_tokens=4"
    how = "environment=reward_functions rewards=[short_reward:short] evaluation.num_prompts=2 preflight.enabled=false"
    assert main(["train", "model.name=nano", *words.split(), *how.split(), "hydra.run.dir=run"]) == 0
    shown = capsys.readouterr().out
    assert "mean reward" in shown
    assert "accuracy, %" not in shown, "where nothing was rewarded it says nothing further"
    assert main(["export", "run", "--to", "mine"]) == 0
    card = Path("mine/README.md").read_text()
    assert "| base model | nano |" in card
    assert "accuracy" not in card
    assert str(tmp_path) not in card + Path("mine/measured_by.yaml").read_text()
    (line,) = [part for part in card.split("`") if part.startswith("covey evaluate")]
    assert "it runs short_reward:short, which must lie where covey is started" in card
    shutil.rmtree("run")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "another"))
    assert main(line.replace("FOLDER", "mine").split()[1:]) == 0
    assert re.search(r"mean reward +0\.000", capsys.readouterr().out)
