"""What do slow tools cost?

    python -m benchmarks.environments.tool_latency [--groups 4] [--delays uniform|heavy] [--tokens 0]

Episodes of 2 to 8 turns whose tools sleep for 200 ms on average: the seconds of one sampling step of covey, where no
episode waits for another's tools, against the same episodes in lockstep (before each turn all wait for the slowest tool
of the turn before), and against the loop of TRL's GRPOTrainer. A script says what the policy says, so that every way
makes the same calls, which is counted. `--tokens N` has each side sample N tokens a turn before the script speaks.

TRL's loop runs as it is. In its trainer `_generate_single_turn` is replaced by the script, and `_generate`, which holds
the loop, is timed: neither rewards nor the passes over the model after it. covey's step has its rewards.
"""

import argparse
import asyncio
import logging
import os
import platform
import re
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import version
from typing import Any

from transformers import PreTrainedTokenizerFast

from benchmarks.environments.slow_tools import (
    DELAYS,
    MAX_LENGTH,
    SIZE,
    Script,
    Tools,
    byte_tokenizer,
    draw,
    rows,
    same_for_all,
    saved_model,
    tiny_model,
)
from covey.engine.base import EngineStats, Session
from covey.engine.native.engine import NativeEngine
from covey.environments.reward_functions.environment import RewardFunctions, RewardSettings, reward_functions
from covey.policy.models.loading import load_policy
from covey.policy.settings import ModelConfig
from covey.rollouts.sampler import Sampler
from covey.rollouts.source import LocalSource
from covey.rollouts.stream import PromptStream
from covey.types import Completion, Sampling
from covey_integrations.tools.rows import RowTools

CACHE_BYTES = 2**28


# ---- covey


class ScriptedSession:
    """One attempt. What the engine below it samples is thrown away, and the script's words stand in its place."""

    re_encoded_tokens = 0

    def __init__(self, engine: "ScriptedEngine", attempt: int, below: Session | None) -> None:
        self._engine, self._attempt, self._below, self._turn = engine, attempt, below, 1

    async def first(self) -> Completion:
        if self._below is not None:
            await self._below.first()
        return self._engine.says(self._attempt, 1)

    async def extend(self, token_ids: Sequence[int], sampling: Sampling) -> Completion:
        self._turn += 1
        if self._engine.barriers:
            await self._engine.barriers[self._turn].wait()
        if self._below is not None:
            await self._below.extend(token_ids, self._engine.cut(sampling))
        return self._engine.says(self._attempt, self._turn)

    def close(self) -> None:
        if self._below is not None:
            self._below.close()


class ScriptedEngine:
    """An engine that says what the script says, on top of one that samples, where tokens are to be sampled."""

    version = 0

    def __init__(self, tokenizer: PreTrainedTokenizerFast, below: NativeEngine | None, tokens: int) -> None:
        self._tokenizer, self._below, self._tokens = tokenizer, below, tokens
        self.script = Script([])
        self.barriers: dict[int, asyncio.Barrier] = {}
        """Of turns 2, 3, ...; none where attempts do not wait for one another."""

    def begin(self, script: Script, *, lockstep: bool) -> None:
        """Take the script of a step."""
        self.script, self.barriers = script, {}
        for turn in range(2, max(map(len, script.seconds)) + 2) if lockstep else ():
            self.barriers[turn] = asyncio.Barrier(sum(len(calls) >= turn - 1 for calls in script.seconds))

    def says(self, attempt: int, turn: int) -> Completion:
        ids = tuple(self._tokenizer(self.script.text(attempt, turn), add_special_tokens=False)["input_ids"])
        return Completion(ids, (0.0,) * len(ids), "stop", 0)

    def cut(self, sampling: Sampling) -> Sampling:
        return Sampling(max_tokens=self._tokens, seed=sampling.seed)

    def open(self, prompt_ids: Sequence[int], n: int, sampling: Sampling) -> Sequence[Session]:
        found = re.findall(r"Task (\d+)", self._tokenizer.decode(list(prompt_ids)))
        below = self._below.open(prompt_ids, n, self.cut(sampling)) if self._below else [None] * n
        return [ScriptedSession(self, int(found[-1]) * n + index, session) for index, session in enumerate(below)]

    async def generate(self, prompt_ids: Sequence[int], n: int, sampling: Sampling) -> list[Completion]:
        raise NotImplementedError("episodes alone")

    def load_weights(self, version: int) -> None:
        raise NotImplementedError("nothing is trained")

    def take_stats(self) -> EngineStats:
        return self._below.take_stats() if self._below else EngineStats()


class Covey:
    """Takes sampling steps as a run does."""

    def __init__(self, tools: Tools, function: Callable[..., Any], groups: int, tokens: int, folder: str) -> None:
        self._tools, self._groups = tools, groups
        tokenizer = byte_tokenizer()
        below = None
        if tokens:
            policy = load_policy(ModelConfig(name=saved_model(folder)), seed=0)
            below = NativeEngine(policy, CACHE_BYTES, groups * SIZE)
        self._engine = ScriptedEngine(tokenizer, below, tokens)
        settings = RewardSettings(in_process=True)
        judged = RewardFunctions({"train": rows(groups), "test": []}, reward_functions([same_for_all]), settings)
        environment = RowTools(judged, [function])
        environment.read_with(tokenizer)
        stream = PromptStream(environment.prompts("train"), 0, shuffle=False)
        sampler = Sampler(self._engine, environment, tokenizer)
        self._source = LocalSource(sampler, stream, SIZE, Sampling(max_tokens=256))

    def step(self, script: Script, *, lockstep: bool) -> float:
        """Take a step, and return its seconds."""
        self._tools.script = script
        self._engine.begin(script, lockstep=lockstep)
        started = time.perf_counter()
        groups = self._source.take(self._groups)
        seconds = time.perf_counter() - started
        assert all(len(group.rollouts) == SIZE for group in groups), [group.failures for group in groups]
        script.check()
        return seconds


# ---- TRL


class Trl:
    """Takes TRL's sampling steps."""

    def __init__(self, tools: Tools, function: Callable[..., Any], groups: int, tokens: int, folder: str) -> None:
        # Seconds to import, and for this side alone
        from datasets import Dataset

        from trl import GRPOConfig, GRPOTrainer

        self._tools, self._tokens, self._script, self._seconds = tools, tokens, Script([]), 0.0
        args = GRPOConfig(
            output_dir=folder,
            per_device_train_batch_size=groups * SIZE,
            num_generations=SIZE,
            max_completion_length=MAX_LENGTH // 2,
            beta=0.0,
            bf16=False,
            use_cpu=True,
            gradient_checkpointing=False,
            report_to="none",
            disable_tqdm=True,
        )
        tokenizer = byte_tokenizer()
        self._inputs = [row for row in rows(groups) for _ in range(SIZE)]
        self._trainer = GRPOTrainer(
            model=tiny_model(tokenizer),
            reward_funcs=same_for_all,
            args=args,
            train_dataset=Dataset.from_list(rows(groups)),
            processing_class=tokenizer,
            tools=[function],
        )
        self._trainer.generation_config.max_new_tokens = tokens or 1
        self._trainer.generation_config.max_length = None
        self._samples = self._trainer._generate_single_turn
        self._generates = self._trainer._generate
        self._trainer._generate_single_turn = self._scripted
        self._trainer._generate = self._timed

    def step(self, script: Script) -> float:
        """Take a step, and return the seconds of `_generate`."""
        self._tools.script = self._script = script
        self._trainer._generate_and_score_completions([dict(row) for row in self._inputs])
        script.check()
        return self._seconds

    def _timed(self, prompts: list[Any]) -> Any:
        started = time.perf_counter()
        made = self._generates(prompts)
        self._seconds = time.perf_counter() - started
        return made

    def _scripted(self, prompt_ids: list[list[int]], *others: Any, **named: Any) -> tuple[list[list[int]], None]:
        """Stand in the place of `_generate_single_turn`: which attempt a prompt is of is written in its calls."""
        if self._tokens:
            self._samples(prompt_ids, *others, **named)
        tokenizer: Any = self._trainer.processing_class
        texts = []
        for place, ids in enumerate(prompt_ids):
            calls = re.findall(r'"attempt": (\d+), "turn": (\d+)', tokenizer.decode(ids))
            attempt, turn = map(int, calls[-1]) if calls else (place, 0)
            texts.append(self._script.text(attempt, turn + 1))
        return tokenizer(texts, add_special_tokens=False)["input_ids"], None


# ---- the measurement


def measure(groups: int, delays: str, tokens: int, repetitions: int) -> dict[str, list[float]]:
    """Return the seconds of each way, one number a repetition, and what the tools alone take."""
    found: dict[str, list[float]] = {}
    forms = {"sync": Tools.sync, "async": Tools.asynchronous}
    with tempfile.TemporaryDirectory() as folder:
        ways: dict[str, Callable[[Script], float]] = {}
        for name, form in forms.items():
            tools = Tools()
            ours = Covey(tools, form(tools), groups, tokens, folder)
            theirs = Trl(tools, form(tools), groups, tokens, folder)
            ways[f"covey, {name} tools"] = lambda script, ours=ours: ours.step(script, lockstep=False)
            ways[f"lockstep, {name} tools"] = lambda script, ours=ours: ours.step(script, lockstep=True)
            ways[f"TRL, {name} tools"] = theirs.step
        for repetition in range(-1, repetitions):
            drawn = draw(groups * SIZE, delays, repetition)
            # The first step of each way, with tools that take no time, is not counted
            seconds = drawn.seconds if repetition >= 0 else [[0.0] * len(calls) for calls in drawn.seconds]
            for name, way in ways.items():
                taken = way(Script(seconds))
                if repetition >= 0:
                    found.setdefault(name, []).append(taken)
            if repetition >= 0:
                found.setdefault("tools of the longest attempt", []).append(drawn.longest)
                found.setdefault("slowest tools of the turns", []).append(drawn.in_lockstep)
                found.setdefault("all tools", []).append(sum(map(sum, drawn.seconds)))
    return found


def spread(values: Sequence[float]) -> str:
    """Return the median, the smallest and the largest."""
    return f"{statistics.median(values):.2f} ({min(values):.2f} to {max(values):.2f})"


def table(found: Mapping[str, Sequence[float]]) -> str:
    """Return a row for each way: its seconds, and its ratio to covey's step with the same form of tool."""
    lines = ["| way | seconds | of covey's |", "|---|---|---|"]
    for name, seconds in found.items():
        own = found[f"covey, {'sync' if ', sync' in name else 'async'} tools"]
        lines.append(f"| {name} | {spread(seconds)} | {spread([s / o for s, o in zip(seconds, own, strict=True)])} |")
    return "\n".join(lines)


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.environments.tool_latency", description=__doc__)
    parser.add_argument("--groups", type=int, default=4, help=f"of {SIZE} attempts")
    parser.add_argument("--delays", choices=sorted(DELAYS), default="uniform")
    parser.add_argument("--tokens", type=int, default=0, help="that each side samples a turn")
    parser.add_argument("--repetitions", type=int, default=5)
    given = parser.parse_args(argv)
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    found = measure(given.groups, given.delays, given.tokens, given.repetitions)
    print(f"{given.groups * SIZE} attempts, {given.delays} delays, {given.tokens} tokens a turn")
    print(table(found))
    versions = ", ".join(f"{name} {version(name)}" for name in ("trl", "transformers", "torch"))
    print(f"python {platform.python_version()}, {versions}")
    print(f"load average {os.getloadavg()[0]:.2f} on {os.cpu_count()} processors")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
