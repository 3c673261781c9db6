"""Runs of a user's own rewards: what functions learn of the training, and what they note of completions."""

import json
import re
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

from covey.environments.reward_functions.settings import RewardFunctionsConfig
from covey.environments.settings import MixtureConfig
from covey.loop import train
from covey.types import RunStopped

from ...support.small import rows, small_config

MODULE = """
    def anneals(completions, trainer_state, log_metric, log_extra, **columns):
        seen = [trainer_state.global_step, trainer_state.max_steps, trainer_state.epoch]
        log_metric("step", seen[0])
        log_extra("seen", [seen] * len(completions))
        log_extra("reward", [len(text) for text in completions])
        return [sum(text.encode()) % 5 == 0 for text in completions]

    def exact(completions, answer, **columns):
        return [sum((text + gold).encode()) % 5 / 4 for text, gold in zip(completions, answer)]

    def nothing(completions, **columns):
        return [None] * len(completions)
"""


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "noting_rewards.py").write_text(textwrap.dedent(MODULE))
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps({"prompt": f"{n}: "}) + "\n" for n in range(5)))
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "noting_rewards", raising=False)


def run(**settings: Any) -> list[dict[str, Any]]:
    """The rollouts of three steps of two groups, from four prompts."""
    usual = {"environment": RewardFunctionsConfig(in_process=True), "rewards": ["noting_rewards:anneals"]}
    config = small_config(
        **{"num_steps": 3, "data__path": "rows.jsonl", "preflight__enabled": False, **usual, **settings}
    )
    train(config, Path("run"))
    return rows(Path("run/rollouts.jsonl"))


@pytest.mark.long
@pytest.mark.parametrize("in_process", [True, False])
def test_functions_are_told_the_step_and_their_columns_are_in_the_rollouts(in_process: bool) -> None:
    shown = run(environment=RewardFunctionsConfig(in_process=in_process))
    assert {row["step"]: row["seen"] for row in shown} == {1: [0, 3, 0.0], 2: [1, 3, 0.5], 3: [2, 3, 1.0]}
    assert all(row["extra/reward"] == len(row["completion"]) for row in shown)
    assert {row["reward"] for row in shown} <= {0.0, 1.0}
    assert [row["environment/step"] for row in rows(Path("run/metrics.jsonl"), "train")] == [0.0, 1.0, 2.0]


@pytest.mark.long
def test_a_resumed_run_continues_its_counts() -> None:
    run(num_steps=1)
    shown = run(num_steps=3, resume="run", resume_changes=["num_steps"])
    assert {row["step"]: row["seen"] for row in shown} == {1: [0, 1, 0.0], 2: [1, 3, 0.5], 3: [2, 3, 1.0]}


def write_rows(split: str, rows_: list[dict[str, Any]]) -> None:
    Path("some").mkdir(exist_ok=True)
    Path(f"some/{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows_))


def test_rows_without_the_rewards_column_are_unscored_and_end_no_run() -> None:
    """Both where they are trained on alone in a step, and where they are held out."""
    write_rows("train", [{"prompt": f"{n}: ", "answer": "x"} if n % 2 else {"prompt": f"{n}: "} for n in range(4)])
    write_rows("test", [{"prompt": "a: ", "answer": "y"}, {"prompt": "b: "}])
    shown = run(data__path="some", rewards=["noting_rewards:exact"], groups_per_step=1, num_steps=4, shuffle=False)
    assert {row["prompt"] for row in shown} == {"1: ", "3: "}
    steps = rows(Path("run/metrics.jsonl"), "train")
    assert [row.get("num_groups", 0) for row in steps] == [0, 1, 0, 1]
    looks = rows(Path("run/metrics.jsonl"), "evaluate")
    assert [row["num_unscored"] for row in looks] == [3, 3]  # one greedy, two sampled
    assert {row["accuracy"] for row in looks} <= {0.0, 1.0}  # of one prompt, not of two


def test_held_out_rows_that_nothing_is_said_about_give_no_figure() -> None:
    write_rows("train", [{"prompt": f"{n}: ", "answer": "x"} for n in range(4)])
    write_rows("test", [{"prompt": "b: "}])
    run(data__path="some", rewards=["noting_rewards:exact"], num_steps=1)
    looks = rows(Path("run/metrics.jsonl"), "evaluate")
    assert [row["reward_mean"] for row in looks] == [None, None]
    assert not [name for row in looks for name in ("accuracy", "pass_at_1") if name in row]
    summary = json.loads(Path("run/summary.json").read_text())
    assert "accuracy" not in summary["gain"]
    assert json.loads(Path("run/checkpoints/step-000001/manifest.json").read_text())["score"] == -1e30


def test_completions_to_which_nothing_applies_are_told_at_once_and_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("WARNING"):
        run(rewards=["noting_rewards:nothing"], num_steps=2, group_size=4)
    said = [message for message in caplog.messages if "no reward function applied" in message]
    assert len(said) == 1
    assert said[0].startswith("no reward function applied to any of 4 completions: each returned None")


@pytest.mark.long
def test_a_function_that_never_applies_ends_the_run_after_a_thousand_completions() -> None:
    with pytest.raises(RunStopped) as stopped:
        run(rewards=["noting_rewards:nothing"], num_steps=40, group_size=16)
    assert re.match(
        r"no reward function applied to any of 10\d\d completions: each returned None, or its column has no value in",
        str(stopped.value),
    )


def test_a_part_of_a_mixture_is_told_too() -> None:
    part = RewardFunctionsConfig(in_process=True)
    shown = run(environment=MixtureConfig(parts={"mine": part, "more": RewardFunctionsConfig(in_process=True)}))
    assert {row["step"]: row["seen"][:2] for row in shown} == {1: [0, 3], 2: [1, 3], 3: [2, 3]}
