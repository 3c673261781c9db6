"""What settings of environment=code may change: programs that reach each limit, judged as a run would judge them."""

import asyncio
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from covey.config.schema import Config
from covey.types import Failure
from covey_tasks.code.environment import Code

from .settings_observed import environment_of

CODE: dict[str, Any] = {
    "environment.name": "code",
    "environment.num_train": 4,
    "environment.num_test": 2,
    "environment.problem": "line",
}
ROWS = {"environment.name": "code", "data.path": "programs.jsonl", "data.bad_rows": "skip"}
PATIENT = CODE | {"environment.timeout": 60.0, "environment.total_seconds": 60.0}
HASTY = CODE | {"environment.timeout": 1.0, "environment.total_seconds": 20.0}
PROGRAMS: Mapping[str, str] = {
    "right": "return ANSWER",
    "half": "return ANSWER if n > 0 else None",
    "slow": "import time; time.sleep(0.4); return ANSWER",
    "busy": "import time; t = time.process_time()\n"
    "    while n == FIRST and time.process_time() - t < 2.8: pass\n"
    "    return ANSWER",
    "large": "x = bytearray(200 << 20); return ANSWER",
    "long": "return 'x' * 100_000",
}


@contextmanager
def code_of(config: Config) -> Iterator[Code]:
    with environment_of(config) as environment:
        assert isinstance(environment, Code)
        yield environment


def text_of(code: Code, name: str) -> str:
    """The program of that name for the first problem, whose solution is one line."""
    prompt = code.prompts("train")[0]
    head, _, answer = (code.gold(prompt) or "").partition(" return ")
    (first,) = prompt.columns["problem"].tests[0].args
    return f"{head}\n    {PROGRAMS[name].replace('ANSWER', f'({answer})').replace('FIRST', str(first))}\n"


def judged(config: Config, *names: str) -> list[float | str]:
    """Rewards of these programs, one after the other."""
    with code_of(config) as code:
        prompt = code.prompts("train")[0]
        found = [asyncio.run(code.score(prompt, [text_of(code, name)]))[0] for name in names]
    return [verdict.reason if isinstance(verdict, Failure) else verdict.value for verdict in found]


def rewards(config: Config) -> list[float | str]:
    return judged(config, "right", "half")


def tests(config: Config) -> list[int]:
    """How many tests judge each problem."""
    with code_of(config) as code:
        return [len(prompt.columns["problem"].tests) for prompt in code.prompts("train")]


def slow(config: Config) -> list[float | str]:
    return judged(config, "slow")


def busy(config: Config) -> list[float | str]:
    return judged(config, "busy")


def large(config: Config) -> list[float | str]:
    return judged(config, "large")


def told(config: Config) -> Any:
    """What goes back to the policy after an answer that is too long for the channel, or not."""
    with code_of(config) as code:
        prompt = code.prompts("train")[0]
        messages = [{"role": "assistant", "content": text_of(code, "long")}]
        return asyncio.run(code.reply(prompt, messages))


def counts(config: Config) -> dict[str, float]:
    """Of runs and re-runs of a program that is written twice."""
    with code_of(config) as code:
        prompt = code.prompts("train")[0]
        for _ in range(2):
            asyncio.run(code.score(prompt, [text_of(code, "right")]))
        return code.metrics()


def isolation(config: Config) -> Any:
    with code_of(config) as code:
        return code.facts()["tier"]
