"""covey.train with tools: functions and a class of a program, and names."""

import json
from pathlib import Path
from typing import Any

import pytest

import covey
from covey.api.request import Arguments, make_request
from covey_integrations.tools.settings import ToolsConfig

from ..support.tools import multiply
from .test_training import NANO

ROWS = [{"prompt": [{"role": "user", "content": f"Number {n}."}], "thing": f"cow {n}"} for n in range(8)]


class Shelf:
    """An attempt's own object, which rewards what is said of it nothing, and itself a quarter."""

    def reset(self, thing: str, **row: Any) -> str:
        self.thing = thing
        return f" We want {thing}."

    def put(self, thing: str) -> str:
        """
        Put a thing on the shelf.

        Args:
            thing: Which.
        """
        return f"there is {thing}"

    def get_reward(self) -> float:
        return 0.25


def kept(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "rollouts.jsonl").read_text().splitlines()]


@pytest.mark.long
def test_functions_and_a_class_are_tools_and_rewards_compare_the_attempts_of_a_group(tmp_path: Path) -> None:
    heard: list[int] = []

    def rank(completions: Any, environments: Any, **columns: Any) -> list[float]:
        heard.append(len(completions))
        assert len({id(shelf) for shelf in environments}) == len(completions)
        lengths = [len(messages[-1]["content"]) for messages in completions]
        return [float(sorted(lengths).index(length)) for length in lengths]

    result = covey.train("nano", rank, ROWS, tools=[multiply, Shelf], folder=tmp_path / "run", **NANO)
    assert result.status == "completed"
    settings = result.config.environment
    assert isinstance(settings, ToolsConfig)
    assert (settings.tools, settings.in_process) == (["tests.support.tools:multiply"], True)
    # A group has four attempts, and a look at test prompts one greedy and two sampled ones
    assert set(heard) <= {1, 2, 4}
    assert 4 in heard
    rollouts = kept(tmp_path / "run")
    assert all(rollout["reward"] == rollout["parts"]["rank"] + 0.25 for rollout in rollouts)
    assert any(rollout["parts"]["rank"] > 0 for rollout in rollouts)


@pytest.mark.long
def test_a_class_that_rewards_needs_no_reward_functions(tmp_path: Path) -> None:
    covey.train("nano", data=ROWS, tools=Shelf, folder=tmp_path / "run", **NANO)
    assert {rollout["reward"] for rollout in kept(tmp_path / "run")} == {0.25}


def test_tools_are_given_by_name_or_as_functions() -> None:
    def local(word: str) -> str:
        """
        Say a word.

        Args:
            word: Which.
        """
        return word

    def flat(completions: Any, **columns: Any) -> list[float]:
        return [0.0] * len(completions)

    asked = Arguments("nano", flat, ROWS, None, {"num_steps": 1}, ["tests.support.tools:multiply", local])
    request = make_request(asked, None)
    assert request.config.environment.tools == ["tests.support.tools:multiply", "covey.api.objects:tool"]
    assert "local" in "".join(request.notes)
    assert request.given.environment is not None
    environment = request.given.environment(request.config)
    names = [schema["function"]["name"] for schema in environment.tool_schemas(environment.prompts("train")[0])]
    assert names == ["multiply", "local"]
    environment.close()


@pytest.mark.parametrize(
    ("tools", "data", "said"),
    [
        ([3], ROWS, "tools must be functions, a class or their names, got 3"),
        ("calculator", ROWS, "tools must be functions, a class or their names, got 'calculator'"),
        ([lambda a: a], ROWS, "tool <lambda> needs type hints and a docstring with an `Args:` section"),
        ([Shelf, Shelf], ROWS, "tools may hold one class"),
        ([multiply], ROWS, "rows in memory need rewards"),
    ],
)
def test_what_is_no_tool_is_refused(tools: Any, data: Any, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        covey.train("nano", data=data, tools=tools)
