"""Do attacks among the completions slow training down? python -m benchmarks.environments.attack_mix FILE [--size S]

FILE holds programs as JSON lines: `code`, `function`, `tests`, `reward` (the share of tests that is due), and `needs`
where the host must be prepared first; those are left out. Two runs sample and train alike, a step of each in turn, with
programs put in place of what their random policies wrote: in one all are honest, in the other every tenth comes from
FILE. Limits are equal, verdicts are not kept, and every reward is compared with what is due. Both train on the same
numbers, made from the completions: with the rewards themselves, the honest run would have nothing to learn.
"""

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from itertools import cycle
from pathlib import Path
from typing import Any

import torch

from benchmarks.speed.models import saved_model
from benchmarks.speed.workers.covey_steps import config_of, one_step
from benchmarks.speed.workers.worker import Meter
from benchmarks.speed.workloads import Job, Workload, reward_of, to_text
from covey.environments.base import Split
from covey.run.build import build_run
from covey.system.waits.timer import PhaseTimer
from covey.types import Failure, Prompt, Reward
from covey_sandbox import Sandbox
from covey_tasks.code.environment import Code
from covey_tasks.code.formats import problem_of
from covey_tasks.code.problems import Problem, generate_problems
from covey_tasks.code.settings import CodeConfig

EVERY = 10
PARTIAL_WEIGHT = 0.5


class Replaced:
    """Scores programs from a list instead of the completions, in turn, and notes those with a wrong reward."""

    def __init__(self, texts: Sequence[str], code: Code, programs: Sequence[tuple[Prompt, str, float]]) -> None:
        """programs: the prompt each belongs to, its text, the reward that is due."""
        self._texts, self._code, self._programs = texts, code, cycle(programs)
        self.wrong: list[tuple[str, object]] = []
        self.num_scored = 0

    def prompts(self, split: Split) -> list[Prompt]:
        texts = self._texts if split == "train" else self._texts[:1]
        return [Prompt(f"{split}-{index}", "replaced", text, {}) for index, text in enumerate(texts)]

    async def score(self, prompt: Prompt, completions: Sequence[str]) -> list[Reward | Failure]:
        await asyncio.gather(*(self._one() for _ in completions))
        return [Reward(reward_of(text), {}) for text in completions]

    async def _one(self) -> None:
        prompt, text, due = next(self._programs)
        (verdict,) = await self._code.score(prompt, [text])
        self.num_scored += 1
        if not isinstance(verdict, Reward) or verdict.value != due:
            self.wrong.append((text[:60], verdict))


def due_of(fraction: float) -> float:
    return 1.0 if fraction == 1.0 else PARTIAL_WEIGHT * fraction


def read_attacks(path: Path) -> list[tuple[Problem, str, float]]:
    cases: list[dict[str, Any]] = [json.loads(line) for line in path.read_text().splitlines()]
    usable = [case for case in cases if not case.get("needs")]
    return [(problem_of({**case, "prompt": case["name"]}), case["code"], due_of(case["reward"])) for case in usable]


def programs_of(attacks: Sequence[tuple[Problem, str, float]], num_programs: int) -> list[tuple[Problem, str, float]]:
    """Honest ones, with each of `attacks` at every tenth place, as long as there are any."""
    honest = generate_problems("starters", None, {"train": num_programs, "test": 1}, 0)["train"]
    programs = [(problem, problem.solution or "", 1.0) for problem in honest]
    for index, attack in zip(range(0, num_programs, EVERY), cycle(attacks), strict=False):
        programs[index] = attack
    return programs


class Arm:
    """One of the two runs."""

    def __init__(
        self, job: Job, sandbox: Sandbox, programs: Sequence[tuple[Problem, str, float]], how: CodeConfig
    ) -> None:
        code = Code({"train": [problem for problem, _, _ in programs]}, sandbox, how)
        rows = zip(code.prompts("train"), programs, strict=True)
        texts = [to_text(prompt) for prompt in job.workload.prompts()]
        self.environment = Replaced(texts, code, [(prompt, text, due) for prompt, (_, text, due) in rows])
        self._config, self._job = config_of(job), job
        self._run = build_run(self._config, self.environment, PhaseTimer())
        self._num_steps = 0
        self.seconds: list[float] = []

    def step(self, *, counts: bool) -> None:
        started = time.perf_counter()
        one_step(self._run, self._config, self._job, self._num_steps, Meter(None))
        self._num_steps += 1
        if counts:
            self.seconds.append(time.perf_counter() - started)


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.environments.attack_mix", description=__doc__)
    parser.add_argument("file", type=Path)
    parser.add_argument("--size", default="S")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--wall", type=float, default=2.0, help="seconds for a test; twice as many for a program")
    arguments = parser.parse_args(argv)
    how = CodeConfig(
        partial_weight=PARTIAL_WEIGHT,
        timeout=arguments.wall,
        total_seconds=2 * arguments.wall,
        recheck_rate=0.0,
        cache_size=0,
    )
    torch.manual_seed(0)
    workload = Workload(arguments.size, (256,) * 8)
    num_programs = workload.num_rollouts * (arguments.steps + 1)
    with tempfile.TemporaryDirectory() as folder, Sandbox() as sandbox:
        job = Job("covey", workload, model_dir=saved_model(workload, Path(folder)))
        attacks = read_attacks(arguments.file)
        arms = {"honest": Arm(job, sandbox, programs_of([], num_programs), how)}
        arms["one in ten attacks"] = Arm(job, sandbox, programs_of(attacks, num_programs), how)
        for step in range(arguments.steps + 1):
            for arm in arms.values():
                arm.step(counts=step > 0)
    report(arms)
    return 1 if any(arm.environment.wrong for arm in arms.values()) else 0


def report(arms: dict[str, Arm]) -> None:
    for name, arm in arms.items():
        seconds, scored = arm.seconds, arm.environment
        print(f"{name}: step {statistics.median(seconds):.3f} s ({min(seconds):.3f} to {max(seconds):.3f})")
        print(f"  {scored.num_scored} programs, {len(scored.wrong)} wrong rewards {scored.wrong[:3] or ''}")
    ratios = [attacked / honest for honest, attacked in zip(*(arm.seconds for arm in arms.values()), strict=True)]
    print(f"ratio: median {statistics.median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f})")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
