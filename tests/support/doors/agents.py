"""Agent programs of tests, which speak HTTP by the standard library, and episodes that they lead."""

import asyncio
import json
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from covey.engine.fake import FakeEngine
from covey.environments.base import Split
from covey.environments.reward_functions.build import no_reward
from covey.environments.reward_functions.environment import RewardFunctions, RewardSettings, reward_functions
from covey.rollouts.rollout import roll_out
from covey.rollouts.sampler import EpisodeLimits, Sampler
from covey.types import Group, Sampling
from covey_integrations.gateway.environment import AgentEnvironment
from covey_integrations.gateway.program import Function, Program
from covey_integrations.gateway.wire import RunSampling

from ..models.chat_templates import qwen25

TOKENIZER = qwen25()
RUN = RunSampling(max_tokens=60)


def send(url: str, body: Any = None, method: str | None = None) -> tuple[int, bytes]:
    """The status and the body of an answer; a body of bytes is sent as it is."""
    data = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"}, method=method)
    try:
        with urllib.request.urlopen(request, timeout=20) as answer:
            return answer.status, answer.read()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read()


def chat(base_url: str, messages: Sequence[Any], **more: Any) -> dict[str, Any]:
    """The answer to a call, as a JSON object. Raises RuntimeError where it is refused."""
    status, said = send(f"{base_url}/chat/completions", {"model": "policy", "messages": list(messages), **more})
    found: dict[str, Any] = json.loads(said)
    if status != 200:
        raise RuntimeError(f"{status}: {found['error']['message']}")
    return found


def said_by(base_url: str, messages: Sequence[Any], **more: Any) -> dict[str, Any]:
    """The policy's message."""
    found: dict[str, Any] = chat(base_url, messages, **more)["choices"][0]["message"]
    return found


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def encoded(text: str) -> list[int]:
    found: list[int] = TOKENIZER(text, add_special_tokens=False)["input_ids"]
    return found


def agent_environment(
    program: Program | Callable[..., Any], *functions: Any, run: RunSampling = RUN
) -> AgentEnvironment:
    """An environment of two rows, whose rewards are these functions or the program's own."""
    rows: dict[Split, Sequence[Mapping[str, Any]]] = {
        "train": [{"prompt": [user(f"Number {n}.")], "thing": f"cow {n}", "own": [n]} for n in range(2)],
        "test": [],
    }
    judged = RewardFunctions(rows, reward_functions(functions or [no_reward]), RewardSettings(in_process=True))
    led = program if not callable(program) else Function(program)
    return AgentEnvironment(judged, led, run, has_rewards=bool(functions))


def play(
    program: Program | Callable[..., Any],
    policy: Callable[[str], str | Sequence[int]],
    *functions: Any,
    num_samples: int = 1,
    run: RunSampling = RUN,
    limits: EpisodeLimits | None = None,
) -> tuple[Group, list[tuple[int, ...]]]:
    """The group of a program whose policy answers what it reads (as text), and what it read before each turn."""
    read: list[tuple[int, ...]] = []

    def script(prompt_ids: Sequence[int], sample_index: int) -> list[int]:
        read.append(tuple(prompt_ids))
        said = policy(TOKENIZER.decode(list(prompt_ids)))
        return [*(encoded(said) if isinstance(said, str) else said), TOKENIZER.eos_token_id]

    environment = agent_environment(program, *functions, run=run)
    environment.read_with(TOKENIZER)
    sampler = Sampler(FakeEngine(script, len(TOKENIZER)), environment, TOKENIZER, limits=limits or EpisodeLimits())
    sampling = Sampling(max_tokens=run.max_tokens)
    try:
        return asyncio.run(roll_out(sampler, environment.prompts("train")[0], num_samples, sampling)), read
    finally:
        environment.close()


@contextmanager
def at_work(folder: Path, monkeypatch: pytest.MonkeyPatch, name: str, module: str, question: str) -> Iterator[None]:
    """Make the folder the current one, with a program in a module of this name and eight rows that ask `question`."""
    (folder / f"{name}.py").write_text(module)
    rows = [{"prompt": [{"role": "user", "content": question.format(n=n)}]} for n in range(8)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(str(folder))
    yield
    sys.modules.pop(name, None)
