"""Two steps of training with an agent program, on the smallest model."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from covey.environments.data.settings import DataConfig
from covey_integrations.settings import AgentConfig

from ...support.doors.agents import at_work
from ...support.doors.training import trained
from ...support.small import small_config

MODULE = """
import json
import urllib.request


def chat(base_url, messages, **more):
    body = json.dumps({"model": "policy", "messages": messages, **more}).encode()
    request = urllib.request.Request(base_url + "/chat/completions", body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request) as answer:
        return json.load(answer)["choices"][0]["message"]


def agent(base_url, api_key, row):
    messages = row["prompt"]
    said = []
    for word in ("More", "Last"):
        message = chat(base_url, messages)
        said.append(message["content"])
        messages = [*messages, message, {"role": "user", "content": word}]
    return sum(sum(text.encode()) % 5 for text in said) / 8
"""


@pytest.fixture(autouse=True)
def _module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with at_work(tmp_path, monkeypatch, "my_agent", MODULE, "Number {n}."):
        yield


@pytest.mark.long
def test_an_agent_program_trains_and_its_reward_is_the_one_it_gave() -> None:
    environment = AgentConfig(program="my_agent:agent", in_process=True)
    for rollout in trained(environment, sampling__max_tokens=4, data=DataConfig("rows.jsonl")):
        said = [message["content"] for message in rollout["completion"] if message["role"] == "assistant"]
        assert len(said) == 2
        assert rollout["reward"] == sum(sum(text.encode()) % 5 for text in said) / 8


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({}, "environment=agent needs environment.program=module:function or command=[...], got none"),
        ({"program": "my_agent:agent", "command": ["python"]}, "got both"),
        ({"program": "my_agent"}, "environment.program must be module:function, got my_agent"),
    ],
)
def test_one_program_is_needed(settings: dict[str, object], said: str) -> None:
    from covey.config.validate import validate

    config = small_config(data=DataConfig("rows.jsonl"))
    config.environment = AgentConfig(**settings)  # type: ignore[arg-type]
    with pytest.raises(ValueError) as found:
        validate(config)
    assert said in str(found.value)
