"""Environments of verifiers by a worker process, with a package of a few lines in its stead."""

import asyncio
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from covey.config.validate import validate
from covey.engine.fake import FakeEngine
from covey.environments.registry import build
from covey.rollouts.rollout import roll_out
from covey.rollouts.sampler import EpisodeLimits, Sampler
from covey.types import Group, Sampling
from covey_integrations.settings import VerifiersConfig
from covey_integrations.verifiers.environment import Verifiers, rows_of
from covey_integrations.verifiers.process import WorkerProgram

from ..support.doors.agents import TOKENIZER, encoded
from ..support.doors.fake_verifiers import write_verifiers
from ..support.doors.training import trained
from ..support.small import small_config


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_verifiers(tmp_path)
    monkeypatch.chdir(tmp_path)


def opened(**settings: Any) -> Verifiers:
    config = small_config(sampling__max_tokens=60)
    config.environment = VerifiersConfig(id="sums", **settings)
    found = build(config)
    assert isinstance(found, Verifiers)
    return found


def played(environment: Verifiers, index: int, policy: Callable[[str], str] = lambda text: "ab") -> Group:
    """The group of one attempt at a task."""

    def script(prompt_ids: Sequence[int], sample_index: int) -> list[int]:
        return [*encoded(policy(TOKENIZER.decode(list(prompt_ids)))), TOKENIZER.eos_token_id]

    sampler = Sampler(FakeEngine(script, len(TOKENIZER)), environment, TOKENIZER, limits=EpisodeLimits())
    prompt = environment.prompts("train")[index]
    return asyncio.run(roll_out(sampler, prompt, 1, Sampling(max_tokens=60)))


def test_the_environment_plays_and_its_own_reward_is_the_reward() -> None:
    environment = opened()
    try:
        said = ["Hello", "you"]
        (rollout,) = played(environment, 0, lambda text: said[text.count("More.")]).rollouts
        assert rollout.reward.value == (sum(b"Hello") % 5 + sum(b"you") % 5) / 8
        assert len(rollout.turns) == 2
        assert environment.facts()["verifiers_api"] == "v0"
    finally:
        environment.close()


def test_a_system_error_is_a_failure_a_policy_error_a_reward() -> None:
    environment = opened(options={"how": "broken"})
    try:
        (failure,) = played(environment, 2).failures
        assert "the disk is gone" in failure.reason
        assert played(environment, 3).rollouts[0].reward.value == 0.25
    finally:
        environment.close()


def test_a_worker_that_dies_fails_its_attempt_and_another_takes_its_place() -> None:
    environment = opened(options={"how": "broken"})
    try:
        (failure,) = played(environment, 1).failures
        assert "the worker of sums ended: printed by the environment" in failure.reason
        assert len(played(environment, 0).rollouts) == 1
    finally:
        environment.close()


def test_a_call_that_asks_for_other_sampling_fails_or_is_overridden() -> None:
    environment = opened(options={"how": "bent"})
    try:
        assert "HTTP Error 400" in played(environment, 0).failures[0].reason
    finally:
        environment.close()
    environment = opened(options={"how": "bent"}, program_sampling="override")
    try:
        assert played(environment, 0).rollouts[0].reward.value == 1.0
    finally:
        environment.close()


def test_no_worker_outlives_its_environment() -> None:
    environment = opened()
    process = environment._worker._running()._process
    environment.close()
    assert process.returncode == -signal.SIGKILL


def test_tasks_are_held_out_where_a_package_has_no_test_tasks() -> None:
    environment = opened(num_test=3)
    try:
        splits = [environment.prompts(split) for split in ("train", "test")]
        assert [len(found) for found in splits] == [11, 1]
        assert not {str(p.text) for p in splits[0]} & {str(p.text) for p in splits[1]}
    finally:
        environment.close()


def test_tasks_for_tests_that_are_trained_on_are_left_out() -> None:
    environment = opened(options={"apart": True})
    try:
        (prompt,) = environment.prompts("test")
        assert prompt.text == ({"role": "user", "content": "Apart?"},)
        assert len(environment.prompts("train")) == 12
    finally:
        environment.close()
    with pytest.raises(ValueError, match=r"environment.id=sums has no tasks of its own for split test"):
        rows_of({"train": ["a"], "test": ["a"]}, "sums")


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"options": {"compares": True}}, "sums rewards the attempts of a group by comparing them"),
        ({"options": {"size": 3}}, "unexpected keyword argument 'size'"),
        ({"options": {"sleeps": 60}, "load_timeout": 0.5}, "in environment.load_timeout=0.5 s"),
        ({"python": "/nowhere/python"}, "environment.python=/nowhere/python cannot be started"),
    ],
)
def test_what_cannot_be_loaded_is_named_before_anything_is_played(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError) as found:
        opened(**settings)
    assert str(found.value).startswith("environment.id=sums cannot be loaded by ")
    assert said in str(found.value)


def test_lines_that_are_not_the_workers_are_passed_over(tmp_path: Path) -> None:
    script = tmp_path / "python"
    script.write_text(
        "#!/bin/sh\necho loading...\nprintf '[1]\\n\\377\\n'\nread asked\n"
        """echo '{"id": 1, "result": {"kind": "v0", "prompts": {}}}'\nexec cat > /dev/null\n"""
    )
    script.chmod(0o700)
    worker = WorkerProgram(VerifiersConfig(id="sums", python=str(script), load_timeout=20.0))
    assert worker.load() == ("v0", {})
    worker.close()


def test_an_environment_has_a_name() -> None:
    config = small_config()
    config.environment = VerifiersConfig()
    with pytest.raises(ValueError, match=r"environment=verifiers needs environment.id=NAME .*, got none"):
        validate(config)


@pytest.mark.long
def test_it_trains_and_its_rewards_are_those_of_its_own_runner() -> None:
    environment = VerifiersConfig(id="sums", python=sys.executable, options={"num": 6})
    for rollout in trained(environment, sampling__max_tokens=4):
        said = [message["content"] for message in rollout["completion"] if message["role"] == "assistant"]
        assert len(said) == 2
        assert rollout["reward"] == sum(sum(text.encode()) % 5 for text in said) / 8
