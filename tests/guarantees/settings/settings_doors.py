"""What settings of tools and of other people's environments may change."""

import asyncio
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from covey.config.schema import Config
from covey.environments.episode import Answer

from ...support.doors.fake_verifiers import write_verifiers
from ...support.doors.openenv_server import PAIR, openenv_server
from ...support.tools import play as played
from .settings_observed import environment_of

MODULE = '''
import json
import time
import urllib.request


def double(number: int) -> int:
    """
    Double a number.

    Args:
        number: Which.
    """
    return 2 * number


def nap() -> str:
    """Sleep a little."""
    time.sleep(0.03)
    return "rested"


def agent(base_url, api_key, row, word="Go."):
    body = {"temperature": 0.5, "messages": [{"role": "user", "content": word}]}
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(base_url + "/chat/completions", json.dumps(body).encode(), headers)
    urllib.request.urlopen(request).read()
    return 1.0


def other_agent(base_url, api_key, row):
    return agent(base_url, api_key, row, "Stay.")


class Shelf:
    def reset(self, **row):
        return " Go."

    def put(self, thing: str) -> str:
        """
        Put a thing on the shelf.

        Args:
            thing: Which.
        """
        return thing

    def get_reward(self):
        return 1.0


class Game:
    """Speaks as Gymnasium, and as TextArena where it is begun so."""

    def __init__(self, words="seen"):
        self.words = words

    def reset(self, seed=None, num_players=None):
        self.is_arena = num_players is not None
        self.seed = seed
        return self.words, {}

    def get_observation(self):
        return 0, "arena"

    def step(self, action):
        return (False, {}) if self.is_arena else (f"{self.words} {self.seed}", 0.5, False, False, {})

    def close(self):
        return {0: 0.0}, {}
'''
SERVER = """
import json, sys
count = 0
TOOL = {"name": "nap", "inputSchema": {"type": "object", "properties": {}}}
for line in sys.stdin:
    message = json.loads(line)
    method = message["method"]
    if method == "tools/call":
        count += 1
    results = {"tools/list": {"tools": [TOOL]}, "tools/call": {"content": [{"type": "text", "text": str(count)}]}}
    if "id" in message:
        print(json.dumps({"jsonrpc": "2.0", "id": message["id"], "result": results.get(method, {})}), flush=True)
"""
AGENT_COMMAND = """
import os, sys
from observed_tools import agent
agent(os.environ["OPENAI_BASE_URL"], os.environ["OPENAI_API_KEY"], {}, sys.argv[1])
"""
SERVED = f"{sys.executable} observed_server.py"
REASONING = {
    "__init__": """
from . import factory

class Data:
    def __init__(self, name, size, seed, step):
        self.name, self.seed, self.step = name, seed, step

    def __getitem__(self, index):
        return {"question": f"{self.name} {self.seed + self.step * index}", "answer": "1", "metadata": {}}

    def score_answer(self, answer, entry):
        return float(answer == entry["answer"])

def create_dataset(name, size, seed, step=1):
    return Data(name, size, seed, step)
""",
    "factory": 'DATASETS = {"chain_sum": None, "leg_counting": None}',
}
TOOLS: dict[str, Any] = {
    "environment.name": "tools",
    "environment.tools": ["observed_tools:double", "observed_tools:nap"],
    "data.path": "rows.jsonl",
    "rewards": ["observed_rewards:varied"],
}
WITH_SERVER = TOOLS | {"environment.tools": ["observed_tools:double"], "environment.servers": [SERVED]}
STEPS: dict[str, Any] = {
    "environment.name": "steps",
    "environment.factory": "observed_tools:Game",
    "environment.num_train": 3,
    "environment.num_test": 2,
}
STEPS_OF_ROWS = {
    "environment.name": "steps",
    "environment.factory": "observed_tools:Game",
    "environment.protocol": "skyrl",
    "data.path": "rows.jsonl",
}
AGENT: dict[str, Any] = {
    "environment.name": "agent",
    "environment.program": "observed_tools:agent",
    "data.path": "rows.jsonl",
    "sampling.temperature": 0.5,
}
AGENT_OTHERWISE = AGENT | {"sampling.temperature": 1.0}
AGENT_OF_COMMAND = AGENT | {
    "environment.program": None,
    "environment.command": [sys.executable, "observed_agent.py", "Go."],
}
OPENENV: dict[str, Any] = {
    "environment.name": "openenv",
    "environment.url": "http://pairs",
    "environment.num_train": 3,
    "environment.num_test": 2,
}
VERIFIERS: dict[str, Any] = {
    "environment.name": "verifiers",
    "environment.id": "sums",
    "environment.num_train": 3,
    "environment.num_test": 2,
}
REASONS: dict[str, Any] = {
    "environment.name": "reasoning_gym",
    "environment.num_train": 3,
    "environment.num_test": 2,
}
CALLS = [("double", {"number": 3}), ("nap", {})]


def make_doors(folder: Path) -> None:
    """Write what stands for other people's modules."""
    (folder / "observed_tools.py").write_text(MODULE)
    (folder / "observed_server.py").write_text(SERVER)
    (folder / "observed_agent.py").write_text(AGENT_COMMAND)
    write_verifiers(folder)
    (folder / "reasoning_gym").mkdir()
    for name, text in REASONING.items():
        (folder / "reasoning_gym" / f"{name}.py").write_text(text)


def shown(config: Config) -> Any:
    """The tools that the policy is shown."""
    with environment_of(config) as environment:
        return list(environment.tool_schemas(environment.prompts("train")[0]))


def heard_twice(config: Config) -> Any:
    """What two episodes say, one after the other."""

    async def play() -> Any:
        with environment_of(config) as environment:
            found = []
            for seed in (1, 2):
                episode = environment.episode(environment.prompts("train")[0], seed)
                assert episode is not None
                text = '<tool_call>{"name": "nap", "arguments": {}}</tool_call>'
                found.append((await episode.reply(Answer(text, (), "stop", 1, ()))).messages)
                await episode.close()
            return found

    return asyncio.run(play())


def called(config: Config) -> Any:
    """What an agent program says first, or why it could not."""

    async def play() -> Any:
        with environment_of(config) as environment:
            episode = environment.episode(environment.prompts("train")[0], 0)
            assert episode is not None
            try:
                return (await episode.reset()).conversation
            except RuntimeError as error:
                return str(error)
            finally:
                await episode.close()

    return asyncio.run(play())


def heard(config: Config) -> Any:
    """What an episode says from its begin, to two turns of two calls."""

    async def play() -> Any:
        with environment_of(config) as environment:
            episode = environment.episode(environment.prompts("train")[0], seed=3)
            assert episode is not None
            found: list[Any] = [(await episode.reset()).messages]
            for turn in (1, 2):
                text = "".join(
                    f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"
                    for name, arguments in CALLS
                )
                said = await episode.reply(Answer(text, (), "stop", turn, ()))
                found.append((said.messages, said.reward, said.done, said.stop_reason))
            return found

    try:
        return asyncio.run(play())
    except RuntimeError as error:
        return str(error)


def served(config: Config) -> Any:
    """What an episode of an OpenEnv server says, of which there are two, or that it says nothing in time."""
    with openenv_server(schema=PAIR) as pairs, openenv_server() as words:
        url = {"http://pairs": pairs.url, "http://words": words.url}[config.environment.url]
        there = replace(config, environment=replace(config.environment, url=url))
        try:
            with environment_of(there) as environment:
                episode = environment.episode(environment.prompts("train")[0], 0)
                assert episode is not None
                said = asyncio.run(played(episode, ['{"row": 1, "column": 2}']))
                return [turn.messages for turn in said], pairs.heard[:2], words.heard[:2]
        except (RuntimeError, ValueError):
            return "nothing"


def loaded(config: Config) -> Any:
    """What an environment of verifiers asks, or why it cannot be loaded."""
    try:
        with environment_of(config) as environment:
            return [prompt.text for split in ("train", "test") for prompt in environment.prompts(split)]
    except ValueError as error:
        return str(error)
