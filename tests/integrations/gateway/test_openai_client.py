"""The client of OpenAI itself: `make test-doors` installs it in an environment of its own."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from covey.environments.data.settings import DataConfig
from covey_integrations.settings import AgentConfig

from ...support.doors.agents import RUN, at_work, play
from ...support.doors.training import trained
from ...support.tools import call

pytestmark = pytest.mark.doors
MODULE = '''
from openai import OpenAI

TOOLS = [{"type": "function", "function": {"name": "multiply", "description": "Multiply.", "parameters": {
    "type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}, "required": ["a", "b"]}}}]


def runner(base_url, api_key, row):
    """A tool loop as people write it, and the reward that its own runner gives."""
    import json

    client = OpenAI(base_url=base_url, api_key=api_key)
    assert [model.id for model in client.models.list()] == ["policy"]
    messages = [*row["prompt"]]
    called = 0
    for _ in range(3):
        answer = client.chat.completions.create(model="policy", messages=messages, tools=TOOLS).choices[0].message
        messages.append(answer)
        if not answer.tool_calls:
            break
        for call in answer.tool_calls:
            found = json.loads(call.function.arguments)
            called += 1
            messages.append({"role": "tool", "tool_call_id": call.id, "content": str(found["a"] * found["b"])})
    return called + sum((answer.content or "").encode()) % 5 / 4


def streaming(base_url, api_key, row):
    client = OpenAI(base_url=base_url, api_key=api_key)
    stream = client.chat.completions.create(
        model="policy", messages=row["prompt"], stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    return len(text) + chunks[-1].usage.completion_tokens / 1000


def bent(base_url, api_key, row):
    OpenAI(base_url=base_url, api_key=api_key).chat.completions.create(
        model="policy", messages=row["prompt"], temperature=0.2
    )
'''


@pytest.fixture(autouse=True)
def _module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with at_work(tmp_path, monkeypatch, "client_agent", MODULE, "What is {n} * 7?"):
        yield


def client_agent(name: str) -> Any:
    import client_agent as module

    return getattr(module, name)


def test_a_tool_loop_of_the_client_earns_what_its_runner_gives() -> None:
    def policy(text: str) -> str:
        return "It is 42." if "<tool_response>" in text else call("multiply", a=6, b=7)

    group, read = play(client_agent("runner"), policy)
    (rollout,) = group.rollouts
    assert rollout.reward.value == 1 + sum(b"It is 42.") % 5 / 4
    assert rollout.branches == ()
    assert read[1][: len(read[0])] == read[0]


def test_the_client_reads_the_stream() -> None:
    (rollout,) = play(client_agent("streaming"), lambda text: "Hello")[0].rollouts
    assert rollout.reward.value == pytest.approx(5 + sum(rollout.loss_mask) / 1000)


def test_the_client_hears_which_setting_differs_and_does_not_ask_again() -> None:
    (failure,) = play(client_agent("bent"), lambda text: "Hello", run=RUN)[0].failures
    assert "BadRequestError" in failure.reason
    assert "sampling.temperature=1, got temperature=0.2" in failure.reason


def test_an_agent_of_the_client_trains() -> None:
    environment = AgentConfig(program="client_agent:runner", in_process=True)
    for rollout in trained(environment, sampling__max_tokens=4, data=DataConfig("rows.jsonl")):
        last = rollout["completion"][-1]["content"]
        assert rollout["reward"] == sum(last.encode()) % 5 / 4
