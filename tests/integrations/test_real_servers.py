"""OpenEnv and verifiers themselves, each with an interpreter of its own: `make test-doors` makes their environments.

Each trains two steps offline, and gives the reward that its own client or runner gives.
"""

import asyncio
import json
import os
import re
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from covey.engine.fake import FakeEngine
from covey.environments.base import Environment
from covey.environments.registry import build
from covey.rollouts.rollout import roll_out
from covey.rollouts.sampler import EpisodeLimits, Sampler
from covey.types import Sampling
from covey_integrations.gateway.program import Command
from covey_integrations.settings import OpenEnvConfig, VerifiersConfig

from ..support.doors.agents import TOKENIZER, encoded
from ..support.doors.agents import play as played_by
from ..support.doors.training import earned, free_port, trained
from ..support.small import small_config
from ..support.tools import call, play, run

pytestmark = [pytest.mark.doors, pytest.mark.timeout(900)]
START_SECONDS = 300
"""A server imports half a gigabyte of packages before it listens, for the first time without their bytecode."""
ROOT = Path(__file__).parents[2]
OPENENV, VERIFIERS, VERIFIERS0 = (
    str(ROOT / f".venv-{name}" / "bin" / "python") for name in ("openenv", "verifiers", "verifiers0")
)
LETTERS = [*"aeimostx "]
SERVER = '''
import random
import sys

import uvicorn
from fastmcp import FastMCP
from openenv.core.env_server import Environment, create_fastapi_app
from openenv.core.env_server.mcp_environment import MCPEnvironment
from openenv.core.env_server.types import Action, Observation, State


class Word(Action):
    guess: str


class Said(Observation):
    text: str = ""


class Words(Environment):
    """Rewards the letters that a guess shares with a hidden word, and ends with the third."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, seed=None, episode_id=None, **more):
        self.word = "".join(random.Random(seed).sample("abcdefghij", 5))
        self.steps = 0
        return Said(text=f"Five letters, game {seed}.")

    def step(self, action, timeout_s=None, **more):
        self.steps += 1
        shared = len(set(action.guess) & set(self.word))
        return Said(text=f"{shared} are right.", reward=shared / 5, done=self.steps == 3)

    @property
    def state(self):
        return State(step_count=self.steps)


class Echo(MCPEnvironment):
    """Echoes through a tool, as OpenEnv's own example does, and counts what was said."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self):
        server = FastMCP("echo")

        @server.tool
        def echo_with_length(message: str) -> dict:
            """Echo a message."""
            return {"message": message, "length": len(message)}

        super().__init__(server)

    def reset(self, seed=None, episode_id=None, **more):
        return Observation(metadata={"status": "ready"})

    def step(self, action, timeout_s=None, **more):
        return self._rewarded(super().step(action, timeout_s=timeout_s, **more))

    async def step_async(self, action, timeout_s=None, **more):
        return self._rewarded(await super().step_async(action, timeout_s=timeout_s, **more))

    def _rewarded(self, seen):
        if getattr(seen, "tool_name", None) and seen.error is None:
            seen.reward = 0.25
        return seen

    def _step_impl(self, action, timeout_s=None, **more):
        return Observation(reward=0.0)

    @property
    def state(self):
        return State()


if sys.argv[1] == "words":
    app = create_fastapi_app(Words, Word, Said, max_concurrent_envs=64)
else:
    app = create_fastapi_app(Echo, Action, Observation, max_concurrent_envs=64)
uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[2]), log_level="warning")
'''
CLIENT = """
import json
import sys

from openenv.core.generic_client import GenericEnvClient

found = []
for seed, actions in json.loads(sys.argv[2]):
    with GenericEnvClient(base_url=sys.argv[1]).sync() as env:
        env.reset(seed=seed)
        steps = []
        for action in actions:
            steps.append(env.step(action))
            if steps[-1].done:
                break
        found.append(sum(step.reward or 0.0 for step in steps))
print(json.dumps(found))
"""
V1 = '''
import verifiers.v1 as vf
from verifiers.v1.mcp import Toolset, ToolsetConfig


class Sum(vf.TaskData):
    answer: int


class Calls(vf.State):
    count: int = 0


class Calculator(Toolset[ToolsetConfig, Calls]):
    @vf.tool
    async def multiply(self, a: int, b: int) -> int:
        """Multiply two numbers."""
        self.state.count += 1
        return a * b


class Task(vf.Task[Sum, Calls]):
    @classmethod
    def toolsets(cls, config):
        return [Calculator(ToolsetConfig())]

    @vf.reward
    async def right(self, trace: vf.Trace) -> float:
        return float(str(self.data.answer) in trace.last_reply)

    @vf.reward(weight=0.5)
    async def used(self, trace: vf.Trace) -> float:
        return float(trace.state.count)

    @vf.reward(weight=0.125)
    async def long(self, trace: vf.Trace) -> float:
        return float(sum(len(m.content or "") for m in trace.assistant_messages))

    @vf.metric
    async def turns(self, trace: vf.Trace) -> float:
        return float(trace.num_turns)


class Sums(vf.Taskset[Task, vf.TasksetConfig]):
    def load(self):
        for n in range(12):
            data = Sum(prompt=f"What is {n} * 7?", system_prompt="Use the tool.", answer=7 * n)
            yield Task(data, self.config.task)


__all__ = ["Sums"]
if __name__ == "__main__":
    Calculator.run()
'''
V1_RUNNER = """
import asyncio
import json
import os
import urllib.request

from verifiers.v1.clients import ModelContext
from verifiers.v1.configs.client import EvalClientConfig
from verifiers.v1.utils.loaders import load_environment, resolve_env_config

agent = {"harness": {"id": "null"}, "runtime": {"type": "subprocess"}}
env = load_environment(resolve_env_config({"taskset": {"id": "sums_v1"}, "agent": agent}))


async def main():
    async with env.serving():
        task = next(iter(env.taskset))
        client = EvalClientConfig(base_url=os.environ["OPENAI_BASE_URL"], api_key_var="OPENAI_API_KEY")
        episode = await env.run_episode(task, ModelContext(model="policy", client=client))
    (trace,) = episode.traces
    if trace.errors:
        raise RuntimeError(trace.errors)
    body = json.dumps({"reward": trace.reward}).encode()
    headers = {"Content-Type": "application/json"}
    urllib.request.urlopen(urllib.request.Request(os.environ["COVEY_REWARD_URL"], body, headers)).read()


asyncio.run(main())
"""
V0 = '''
import verifiers as vf
from datasets import Dataset


def multiply(a: int, b: int) -> int:
    """Multiply two numbers.

    Args:
        a: The first.
        b: The second.
    """
    return a * b


def text_of(message):
    return (message["content"] if isinstance(message, dict) else message.content) or ""


def load_environment(num=12):
    rows = [{"question": f"What is {n} * 7?", "answer": str(7 * n)} for n in range(num)]

    def right(completion, answer, **more):
        return float(answer in text_of(completion[-1]))

    def long(completion, **more):
        return float(sum(len(text_of(message)) for message in completion))

    rubric = vf.Rubric(funcs=[right, long], weights=[1.0, 0.125])
    return vf.ToolEnv(dataset=Dataset.from_list(rows), tools=[multiply], rubric=rubric, max_turns=4)
'''
V0_RUNNER = """
import asyncio
import json
import os
import urllib.request

import verifiers as vf
from verifiers.types import ClientConfig

env = vf.load_environment("sums_v0")
client = ClientConfig(api_base_url=os.environ["OPENAI_BASE_URL"], api_key_var="OPENAI_API_KEY")
found = asyncio.run(env.generate([dict(env.get_dataset()[0])], client=client, model="policy", sampling_args={}))
body = json.dumps({"reward": found["outputs"][0]["reward"]}).encode()
headers = {"Content-Type": "application/json"}
urllib.request.urlopen(urllib.request.Request(os.environ["COVEY_REWARD_URL"], body, headers)).read()
"""


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = {"server": SERVER, "client": CLIENT, "sums_v1": V1, "sums_v0": V0, "own_v1": V1_RUNNER, "own_v0": V0_RUNNER}
    for name, text in files.items():
        (tmp_path / f"{name}.py").write_text(text)
    monkeypatch.chdir(tmp_path)
    # Their programs look for modules where they are started
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))


# ---- OpenEnv


@contextmanager
def served(kind: str) -> Iterator[str]:
    """The address of a server of OpenEnv's own."""
    port = free_port()
    process = subprocess.Popen([OPENENV, "server.py", kind, str(port)], stderr=subprocess.PIPE, text=True)
    url = f"http://127.0.0.1:{port}"
    try:
        deadline = time.monotonic() + START_SECONDS
        while True:
            assert process.poll() is None, process.communicate()[1]
            assert time.monotonic() < deadline, "the server does not begin"
            try:
                httpx.get(f"{url}/health").raise_for_status()
                break
            except httpx.HTTPError:
                time.sleep(0.1)
        yield url
    finally:
        process.kill()
        process.communicate()


def by_their_client(url: str, games: Sequence[tuple[int, Sequence[Any]]]) -> list[float]:
    """What their own client says that games earn."""
    said = subprocess.run(
        [OPENENV, "client.py", url, json.dumps(games)], capture_output=True, text=True, timeout=START_SECONDS
    )
    assert said.returncode == 0, said.stderr
    found: list[float] = json.loads(said.stdout)
    return found


def test_an_openenv_server_gives_what_its_own_client_gets_and_trains() -> None:
    games = [["abc", "defgh", "aeiou", "never"], ["a", "b"], ["jihgf", '{"guess": "abcde"}', "x"]]
    with served("words") as url:
        config = small_config()
        config.environment = OpenEnvConfig(url=url, num_train=3, num_test=1, problem_seed=5)
        environment = build(config)
        here = [earned(environment, p, texts) for p, texts in zip(environment.prompts("train"), games, strict=True)]
        actions = [[{"guess": "abcde" if "{" in text else text} for text in texts] for texts in games]
        assert here == pytest.approx(by_their_client(url, list(zip((5, 6, 7), actions, strict=True))))
        assert len(set(here)) > 1
        environment = OpenEnvConfig(url=url, num_train=4, num_test=2, max_turns=3)  # type: ignore[assignment]
        rollouts = trained(environment, sampling__stop=LETTERS, sampling__max_tokens=40)  # type: ignore[arg-type]
    finished = [rollout for rollout in rollouts if rollout["stop_reason"] == "completed"]
    assert finished
    for rollout in finished:
        said = [m["content"] for m in rollout["completion"] if m["role"] == "user"]
        shares = [int(found[1]) / 5 for text in said if (found := re.match(r"(\d) are right", text))]
        assert rollout["reward"] == pytest.approx(sum(shares))


def test_tools_of_an_openenv_server_earn_what_its_own_client_gets() -> None:
    with served("echo") as url:
        config = small_config()
        config.environment = OpenEnvConfig(url=url, num_train=1, num_test=1)
        environment = build(config)
        (prompt,) = environment.prompts("train")
        (schema,) = environment.tool_schemas(prompt)
        assert schema["function"]["parameters"]["required"] == ["message"]
        texts = [call("echo_with_length", message="hi"), call("fly"), call("echo_with_length", message="you"), "Done."]
        said = run(play(environment.episode(prompt, 0), texts))  # type: ignore[arg-type]
        assert json.loads(said[1].messages[0]["content"]) == {"message": "hi", "length": 2}  # type: ignore[index,arg-type]
        assert "fly" in said[2].messages[0]["content"]  # type: ignore[index,operator]
        names = ["echo_with_length", "fly", "echo_with_length"]
        asked = [{"message": "hi"}, {}, {"message": "you"}]
        calls = [
            {"type": "call_tool", "tool_name": name, "arguments": given}
            for name, given in zip(names, asked, strict=True)
        ]
        assert [earned(environment, prompt, texts)] == by_their_client(url, [(0, calls)]) == [0.5]


# ---- verifiers


def policy(tool: str) -> Callable[[str], str]:
    """Calls the tool, and says what it answered."""

    def said(text: str) -> str:
        found = re.findall(r"<tool_response>\s*(\d+)", text)
        return f"It is {found[-1]}." if found else call(tool, a=0, b=7)

    return said


def by_covey(environment: Environment, said: Callable[[str], str]) -> tuple[float, list[str]]:
    """What an attempt at the first task earns, and what the policy read before each turn."""
    read: list[str] = []

    def script(prompt_ids: Sequence[int], sample_index: int) -> list[int]:
        read.append(TOKENIZER.decode(list(prompt_ids)))
        return [*encoded(said(read[-1])), TOKENIZER.eos_token_id]

    environment.read_with(TOKENIZER)
    sampler = Sampler(FakeEngine(script, len(TOKENIZER)), environment, TOKENIZER, limits=EpisodeLimits())
    group = asyncio.run(roll_out(sampler, environment.prompts("train")[0], 1, Sampling(max_tokens=60)))
    assert not group.failures
    return group.rollouts[0].reward.value, read


@pytest.mark.parametrize(
    ("api", "python", "tool"), [("v1", VERIFIERS, "calculator_multiply"), ("v0", VERIFIERS0, "multiply")]
)
def test_an_environment_of_verifiers_gives_what_its_own_runner_gives(api: str, python: str, tool: str) -> None:
    config = small_config(sampling__max_tokens=60)
    config.environment = VerifiersConfig(id=f"sums_{api}", python=python)
    environment = build(config)
    try:
        assert environment.facts()["verifiers_api"] == api
        mine, read = by_covey(environment, policy(tool))
    finally:
        environment.close()
    # Their own runner is an agent program, whose base_url is the gateway's
    group, theirs = played_by(Command([python, f"own_{api}.py"]), policy(tool))
    assert not group.failures
    assert mine == group.rollouts[0].reward.value > 1
    assert read == [TOKENIZER.decode(list(ids)) for ids in theirs]


@pytest.mark.parametrize(("api", "python"), [("v1", VERIFIERS), ("v0", VERIFIERS0)])
def test_an_environment_of_verifiers_trains(api: str, python: str) -> None:
    rollouts = trained(VerifiersConfig(id=f"sums_{api}", python=python, num_train=8), sampling__max_tokens=4)
    for rollout in rollouts:
        said = [m["content"] for m in rollout["completion"] if m["role"] == "assistant"]
        assert len(said) == 1
        asked = next(iter(re.findall(r"What is (\d+) \* 7", json.dumps(rollout))), "")
        right = float(str(7 * int(asked)) in said[-1])
        assert rollout["reward"] == pytest.approx(right + len(said[-1]) / 8)


def test_their_interpreters_are_there() -> None:
    assert all(os.access(python, os.X_OK) for python in (OPENENV, VERIFIERS, VERIFIERS0))
