"""Tasksets of verifiers v1 by a worker process, with as much of the package as it asks for."""

import asyncio
import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from covey.engine.fake import FakeEngine
from covey.environments.registry import build
from covey.rollouts.rollout import roll_out
from covey.rollouts.sampler import EpisodeLimits, Sampler
from covey.types import Rollout, Sampling
from covey_integrations.settings import VerifiersConfig
from covey_integrations.verifiers.environment import Verifiers

from ..support.doors.agents import TOKENIZER, encoded
from ..support.doors.fake_verifiers_v1 import write_verifiers_v1
from ..support.small import small_config
from ..support.tools import call


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_verifiers_v1(tmp_path)
    monkeypatch.chdir(tmp_path)


def opened(name: str = "sums_v1", **options: Any) -> Verifiers:
    config = small_config(sampling__max_tokens=90)
    config.environment = VerifiersConfig(id=name, num_test=2, options=options)
    found = build(config)
    assert isinstance(found, Verifiers)
    return found


def played(policy: Callable[[str], str], max_turns: int | None = None) -> tuple[Rollout, list[str]]:
    """An attempt at the first task, three times four, and what the policy read before each turn."""
    read: list[str] = []

    def script(prompt_ids: Sequence[int], sample_index: int) -> list[int]:
        read.append(TOKENIZER.decode(list(prompt_ids)))
        return [*encoded(policy(read[-1])), TOKENIZER.eos_token_id]

    environment = opened()
    environment.read_with(TOKENIZER)
    limits = EpisodeLimits(max_turns=max_turns)
    sampler = Sampler(FakeEngine(script, len(TOKENIZER)), environment, TOKENIZER, limits=limits)
    try:
        group = asyncio.run(roll_out(sampler, environment.prompts("train")[0], 1, Sampling(max_tokens=90)))
    finally:
        environment.close()
    assert not group.failures
    return group.rollouts[0], read


def answers(text: str) -> list[str]:
    return re.findall(r"<tool_response>\s*(.*?)\s*</tool_response>", text, re.DOTALL)


def test_tools_are_called_with_the_task_and_its_state_and_its_rewards_are_added() -> None:
    def policy(text: str) -> str:
        found = answers(text)
        return f"It is {found[-1]}." if found else call("calculator_multiply", a=3)

    rollout, read = played(policy)
    assert "Use the tool." in read[0]
    assert answers(read[1]) == ["12"]
    assert (rollout.reward.value, len(rollout.turns), rollout.branches) == (1.125, 2, ())


@pytest.mark.long
def test_calls_that_cannot_be_are_words_for_the_policy() -> None:
    said = [call("divide", a=3), call("calculator_multiply", b=3), "I give up."]
    rollout, read = played(lambda text: said[len(answers(text))])
    first, second = answers(read[2])
    assert first == "error: unknown tool 'divide'"
    assert "unexpected keyword argument 'b'" in second
    assert rollout.reward.value == 0.0


def test_a_stop_of_the_task_ends_the_conversation() -> None:
    rollout, read = played(lambda text: "enough" + call("calculator_multiply", a=3))
    # The call of its last turn is still made, as by verifiers, which stops before the next turn
    assert len(read) == 1
    assert rollout.reward.value == 0.125


@pytest.mark.long
def test_a_conversation_that_the_run_ends_is_worth_what_it_has_earned() -> None:
    rollout, read = played(lambda text: call("calculator_multiply", a=3), max_turns=3)
    assert len(read) == 3
    assert (rollout.reward.value, rollout.stop_reason) == (0.375, "max_turns")


def test_the_tasks_are_the_prompts() -> None:
    environment = opened()
    try:
        assert environment.facts()["verifiers_api"] == "v1"
        asked = [environment.prompts(split) for split in ("train", "test")]
        said = [[json.loads(json.dumps(prompt.text))[-1]["content"] for prompt in found] for found in asked]
        assert said == [[f"3 times {n}?" for n in range(4, 9)], ["3 times 9?"]]
    finally:
        environment.close()


@pytest.mark.parametrize(
    ("name", "options", "said"),
    [
        ("sums_v1", {"kind": "boxed"}, "sums_v1 needs a container (NEEDS_CONTAINER)"),
        ("sums_v1", {"kind": "rooted"}, "sums_v1.right asks for a runtime"),
        ("sums_v1", {"kind": "shared"}, "sums_v1 has tools that all its tasks share"),
        ("sums_v1", {"asks": False}, "the task has no prompt"),
        ("led_v1", {}, "led_v1 has an Env of its own (Env)"),
        ("nowhere", {}, "this version of verifiers knows tasksets alone, and ModuleNotFoundError"),
    ],
)
def test_what_cannot_be_played_in_a_process_is_refused_by_name(name: str, options: Any, said: str) -> None:
    with pytest.raises(ValueError) as found:
        opened(name, **options)
    assert said in str(found.value)
