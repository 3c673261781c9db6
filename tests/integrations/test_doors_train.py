"""Two steps of training through each endpoint, on the smallest model, with rewards as the other side gives them."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from covey.environments.data.settings import DataConfig
from covey.environments.registry import build
from covey_integrations.settings import StepsConfig
from covey_integrations.tools.settings import ToolsConfig

from ..support.doors.training import trained
from ..support.small import small_config

MODULE = '''
class Words:
    """Rewards each step by the length of the action, and ends after the third."""

    def reset(self, seed=None):
        self.steps = 0
        return f"seed {seed}", {}

    def step(self, action):
        self.steps += 1
        return f"step {self.steps} <turn>assistant", len(action) / 10, self.steps == 3, False, {}


class Shelf:
    def reset(self, thing, **row):
        self.thing = thing
        return f" We want {thing}."

    def put(self, thing: str) -> str:
        """
        Put a thing on the shelf.

        Args:
            thing: Which.
        """
        return f"there is {thing}"

    def get_reward(self):
        return 0.25


def longer(completions, thing, **columns):
    return [len(messages[-1]["content"]) for messages in completions]
'''


@pytest.fixture(autouse=True)
def _module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    (tmp_path / "other_peoples.py").write_text(MODULE)
    rows = [{"prompt": [{"role": "user", "content": f"Number {n}."}], "thing": "a cow"} for n in range(8)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield
    sys.modules.pop("other_peoples", None)


@pytest.mark.long
def test_steps_of_a_foreign_environment_train() -> None:
    environment = StepsConfig(factory="other_peoples:Words", num_train=4, num_test=2, max_turns=3)
    rollouts = trained(environment, sampling__stop=[*"aeimostx "], sampling__max_tokens=60)
    finished = [rollout for rollout in rollouts if rollout["stop_reason"] == "completed"]
    assert finished
    for rollout in finished:
        said = [message["content"] for message in rollout["completion"] if message["role"] == "assistant"]
        assert len(said) == 3
        assert rollout["reward"] == pytest.approx(sum(map(len, said)) / 10)


@pytest.mark.long
def test_rows_with_tools_and_both_kinds_of_rewards_train() -> None:
    environment = ToolsConfig(toolset="other_peoples:Shelf", in_process=True)
    rollouts = trained(environment, data=DataConfig("rows.jsonl"), rewards=["other_peoples:longer"])
    assert rollouts
    assert all(set(rollout["parts"]) == {"longer", "Shelf"} for rollout in rollouts)
    assert {rollout["parts"]["Shelf"] for rollout in rollouts} == {0.25}
    assert {rollout["stop_reason"] for rollout in rollouts} <= {"completed", "max_tokens"}


def test_options_that_do_not_fit_are_refused_before_anything_is_made() -> None:
    config = small_config()
    config.environment = StepsConfig(factory="other_peoples:Words", options={"size": 3})
    with pytest.raises(ValueError, match=r"environment.options=.* do not fit other_peoples:Words"):
        build(config)
