"""Environment of programs: the policy writes a function, tests judge it.

The reward is 1 where all tests pass, else `partial_weight` times the share of tests that pass. If the policy has
several turns, some tests are told to it, and the share is that of the others.
"""

import asyncio
import hashlib
import json
import logging
import pickle
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

from covey.environments.base import Environment, Split
from covey.environments.data.rows import load_rows, row_settings
from covey.environments.settings import BuildSettings
from covey.types import Failure, Message, Prompt, Reward
from covey_graders.code.extract import extract_program
from covey_sandbox import Sandbox, Tier
from covey_sandbox.types import SUSPICIOUS, Limits, Report, Runner, SandboxFailed, Test
from covey_tasks.async_cache import AsyncCache
from covey_tasks.code.formats import PROMPTS, problem_of
from covey_tasks.code.problems import NUM_TESTS, Problem, generate_problems, with_tests
from covey_tasks.code.settings import CodeConfig
from covey_tasks.columns import of_verl

LOGGER = logging.getLogger(__name__)

UNSAFE = "unsafe_no_isolation"
NO_PROGRAM = "No program was found."
CORRECT_IT = "Write the corrected program."
NOT_TOLD = "A test that is not told fails ({kind})."
MAX_MESSAGE = 300
"""Characters of a failing test that go back to the policy."""
MAX_VERDICTS = 100
"""Tests whose verdicts are noted for the logs."""


class Code(Environment):
    """Environment of programming problems.

    >>> Code(generate_problems("fizzbuzz", 3, {"train": 8, "test": 4}, seed=0), Sandbox(), CodeConfig())
    """

    def __init__(
        self, problems: Mapping[Split, Sequence[Problem]], runner: Runner, settings: CodeConfig | None = None
    ) -> None:
        """Take problems and a runner, which `close` closes. ValueError for impossible settings."""
        self.settings = settings or CodeConfig()
        if not 0 <= self.settings.partial_weight <= 1:
            raise ValueError(f"partial_weight must be in [0, 1], got {self.settings.partial_weight}")
        if not 0 <= self.settings.recheck_rate <= 1:
            raise ValueError(f"recheck_rate must be in [0, 1], got {self.settings.recheck_rate}")
        self._limits = code_limits(self.settings)
        self._max_turns = self.settings.max_turns or 1
        self._runner = runner
        self._cache = CachedRunner(runner, self.settings.cache_size)
        self._prompts = {split: [_prompt(split, i, p) for i, p in enumerate(problems[split])] for split in problems}
        self._counts: Counter[str] = Counter()
        self._rewards = {"all": 0.0, "suspicious": 0.0}
        self._num_rechecks = 0
        notes = Counter(problem.left_out for found in problems.values() for problem in found if problem.left_out)
        for note, count in notes.items():
            LOGGER.warning("tests of %d problems are left out: %s", count, note)
        if self._is_unsafe:
            LOGGER.warning("environment.isolation=%s: programs the policy writes run WITHOUT ISOLATION", UNSAFE)

    def prompts(self, split: Split) -> list[Prompt]:
        return list(self._prompts[split])

    async def score(self, prompt: Prompt, completions: Sequence[str]) -> list[Reward | Failure]:
        return list(await asyncio.gather(*(self._score(prompt, completion) for completion in completions)))

    async def reply(self, prompt: Prompt, messages: Sequence[Message]) -> Message | None:
        """Return feedback on the first failed test, None if all pass."""
        problem: Problem = prompt.columns["problem"]
        program = extract_program(messages[-1]["content"], problem.entry_point, problem.opening)
        failed = _told_failure(await self._report(problem, program), self._num_told(problem)) if program else NO_PROGRAM
        if failed is None:
            return None
        self._counts["further_turns"] += 1
        return {"role": "user", "content": f"{failed[:MAX_MESSAGE]}\n{CORRECT_IT}"}

    @property
    def can_reply(self) -> bool:
        return self._max_turns > 1

    def max_turns(self, prompt: Prompt) -> int:
        return self._max_turns

    def gold(self, prompt: Prompt) -> str | None:
        problem: Problem = prompt.columns["problem"]
        return problem.solution

    def demonstrations(self, split: Split) -> list[tuple[Prompt, str]]:
        shown = [(prompt, self.gold(prompt)) for prompt in self._prompts[split]]
        return [(prompt, solution) for prompt, solution in shown if solution is not None]

    def difficulty(self, prompt: Prompt) -> float | None:
        problem: Problem = prompt.columns["problem"]
        return problem.difficulty if isinstance(problem.difficulty, int) else None

    def metrics(self) -> dict[str, float]:
        asked, run = self._cache.take_counts()
        found = {name: float(self._counts[name]) for name in COUNTS}
        won = self._rewards["suspicious"] / self._rewards["all"] if self._rewards["all"] > 0 else 0.0
        found |= {"programs": float(asked), "run_fraction": run / asked if asked else 0.0, "imports/reward_share": won}
        self._counts.clear()
        self._rewards = {"all": 0.0, "suspicious": 0.0}
        return found | ({UNSAFE: 1.0} if self._is_unsafe else {})

    def facts(self) -> dict[str, Any]:
        return self._runner.describe()

    def close(self) -> None:
        self._cache.close()

    @property
    def _is_unsafe(self) -> bool:
        return bool(self._runner.describe().get("tier") == UNSAFE)

    async def _score(self, prompt: Prompt, completion: str) -> Reward | Failure:
        problem: Problem = prompt.columns["problem"]
        program = extract_program(completion, problem.entry_point, problem.opening)
        if not program:
            self._counts["without_program"] += 1
            return Reward(0.0, {"solved": 0.0, "tests_passed": 0.0}, {"feedback": NO_PROGRAM})
        try:
            report = await self._report(problem, program)
        except SandboxFailed as error:
            return Failure(f"sandbox: {error}")
        reward = reward_of(report, self.settings.partial_weight, self._num_told(problem))
        self._note(report, reward)
        if reward.value == 1.0 and is_chosen(f"{prompt.id}/{program}", self.settings.recheck_rate):
            await self._recheck(prompt, problem, program)
        return reward

    def _num_told(self, problem: Problem) -> int | None:
        """Count the first tests used for feedback: a third, with several turns."""
        return len(problem.tests) // 3 if self.can_reply else None

    async def _report(self, problem: Problem, program: str) -> Report:
        return await self._cache.run(_whole(problem, program), problem.tests, problem.entry_point or None, self._limits)

    def _note(self, report: Report, reward: Reward) -> None:
        self._counts.update(f"imports/{name}" for name in report.suspicious_imports)
        self._counts["timeouts"] += any(result.kind == "timeout" for result in report.results)
        self._rewards["all"] += reward.value
        self._rewards["suspicious"] += reward.value * bool(report.suspicious_imports)

    async def _recheck(self, prompt: Prompt, problem: Problem, program: str) -> None:
        """Run a full-score program again, on unseen inputs if any; rewards stay."""
        self._counts["rechecked"] += 1
        self._num_rechecks += 1
        # New arguments, which a program that remembers the old ones does not know
        tests = problem.fresh_tests(f"recheck {self._num_rechecks}")
        try:
            report = await self._runner.run(_whole(problem, program), tests, problem.entry_point or None, self._limits)
        except SandboxFailed as error:
            LOGGER.warning("prompt %s: a program could not be run again: %s", prompt.id, error)
            return
        failed = _first_failure(report)
        if failed is not None:
            self._counts["recheck_disagreements"] += 1
            LOGGER.warning("prompt %s: full score, but run again: %s\n%s", prompt.id, failed, excerpt(program))


def build_code(settings: CodeConfig, config: BuildSettings) -> Environment:
    if config.data.path is not None:
        make = partial(problem_of, packages=settings.test_packages)
        how = row_settings(config.data, (), prompt=PROMPTS, make=make)
        rows = load_rows(config.data.path, replace(how, known=partial(of_verl, problem="prompt", answer="tests")))
        problems = with_tests(rows.splits, settings.tests_per_problem, settings.problem_seed)
    else:
        counts: dict[Split, int] = {"train": settings.num_train, "test": settings.num_test}
        num_tests = settings.tests_per_problem or NUM_TESTS
        which = settings.problem, settings.difficulty, counts, settings.problem_seed
        problems = generate_problems(*which, num_tests, settings.style)
    return Code(problems, code_runner(settings), settings)


def code_runner(settings: CodeConfig) -> Runner:
    """Build the runner of programs. ValueError if unable to isolate them."""
    try:
        return Sandbox(settings.num_slots, cast("Tier", settings.isolation))
    except SandboxFailed as error:
        raise ValueError(f"environment.isolation={settings.isolation}: {error}") from error


def _whole(problem: Problem, program: str) -> str:
    return problem.preamble + "\n" + program if problem.preamble and "__future__" not in program else program


def code_limits(settings: CodeConfig) -> Limits:
    """Return a program's limits. ValueError in the words of the settings."""
    try:
        return Limits(
            wall_seconds=settings.timeout,
            total_seconds=settings.total_seconds,
            cpu_seconds=settings.cpu_seconds,
            memory_bytes=settings.memory_bytes,
            output_bytes=settings.output_bytes,
        )
    except ValueError as error:
        raise ValueError(str(error).replace("wall_seconds", "timeout")) from error


def reward_of(report: Report, partial_weight: float, num_told: int | None = None) -> Reward:
    """Return 1 if all pass, else the weighted share of untold tests."""
    solved = all(result.passed for result in report.results)
    share = replace(report, results=report.results[num_told:]).fraction
    value = 1.0 if solved else partial_weight * share
    parts = {"solved": float(solved), "tests_passed": share}
    noted: dict[str, Any] = {"verdicts": [result.kind for result in report.results[:MAX_VERDICTS]]}
    failed, told = _first_failure(report), _told_failure(report, num_told)
    if failed is not None and told is not None:
        noted |= {"first_failure": failed[:MAX_MESSAGE], "feedback": told[:MAX_MESSAGE]}
    return Reward(value, parts, noted)


def is_chosen(text: str, rate: float) -> bool:
    """Return True for a fixed share `rate` of texts, by hash."""
    digest = hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "big") < rate * 2**64


def _first_failure(report: Report) -> str | None:
    for result in report.results:
        if not result.passed:
            return result.message or result.kind
    return None


def _told_failure(report: Report, num_told: int | None) -> str | None:
    """Describe the first failure: a shown test in full, others by kind."""
    failed = _first_failure(replace(report, results=report.results[:num_told]))
    kind = next((result.kind for result in report.results if not result.passed), None)
    return failed or (NOT_TOLD.format(kind=kind) if kind is not None else None)


def _prompt(split: Split, index: int, problem: Problem) -> Prompt:
    text: tuple[Message, ...] = ({"role": "user", "content": problem.statement},)
    return Prompt(f"{split}-{index}", "code", text, {"problem": problem})


COUNTS = (
    *("without_program", "timeouts", "further_turns", "rechecked", "recheck_disagreements"),
    *(f"imports/{name}" for name in sorted(SUSPICIOUS)),
)
"""Counts by program."""


def excerpt(text: str, max_lines: int = 20, max_characters: int = 2000) -> str:
    r"""Return a text's beginning, with a count of omitted lines.

    >>> excerpt("a\nb\nc", max_lines=2)
    'a\nb\n(1 of 3 lines left out)'
    """
    lines = text.split("\n")
    shown = "\n".join(lines[:max_lines])
    if len(shown) > max_characters:
        return f"{shown[:max_characters]}\n({len(text) - max_characters} of {len(text)} characters left out)"
    return text if len(lines) <= max_lines else f"{shown}\n({len(lines) - max_lines} of {len(lines)} lines left out)"


MAX_BYTES = 128 << 20
"""Maximum bytes of all kept verdicts: a policy decides how long their messages are."""
RESULT_BYTES = 200
"""Bytes of a result without its message, with its overhead in the cache."""


@dataclass(frozen=True, slots=True)
class _Verdict:
    report: Report
    num_agreed: int = 1
    """Consecutive runs with this result."""


class _Verdicts(AsyncCache[str, _Verdict]):
    """Keep at most MAX_BYTES of verdicts; timeouts count from the second time."""

    def is_final(self, value: _Verdict) -> bool:
        """Return False for a first timeout, as the machine may be busy."""
        return value.num_agreed > 1 or not any(result.kind in CLOCKED for result in value.report.results)

    def combined(self, before: _Verdict | None, value: _Verdict) -> _Verdict:
        agreed = before is not None and _passes(before.report) == _passes(value.report)
        return replace(value, num_agreed=before.num_agreed + 1) if before is not None and agreed else value

    def bytes_of(self, value: _Verdict) -> int:
        """Estimate the memory of a report, whose equal messages are one object."""
        results = value.report.results
        messages = {result.message for result in results}
        return sum(RESULT_BYTES + 4 * len(message) for message in messages) + RESULT_BYTES + 8 * len(results)

    def is_full(self) -> bool:
        return super().is_full() or self.num_bytes > MAX_BYTES


class CachedRunner:
    """Cache another Runner's verdicts; equal concurrent programs run once.

    A verdict belongs to the verifier (what it says of itself), the limits, the tests, the entry point and the code.
    """

    def __init__(self, runner: Runner, size: int) -> None:
        """Keep the last `size` verdicts, at most MAX_BYTES in total; 0: none.

        Takes over the runner: `close` closes it.
        """
        self._runner = runner
        self._identity = f"{type(runner).__name__} {json.dumps(runner.describe(), sort_keys=True, default=repr)}"
        self._verdicts = _Verdicts(size)
        self.take_counts = self._verdicts.take_counts

    async def run(
        self, code: str, tests: Sequence[Test], entry_point: str | None = None, limits: Limits | None = None
    ) -> Report:
        """Judge a program, or return its cached verdict; SandboxFailed is not cached."""

        async def judge() -> _Verdict:
            return _Verdict(await self._runner.run(code, tests, entry_point, limits))

        # A pickle, since `repr` has a limit for large integers, and JSON knows no tuples
        parts = pickle.dumps((self._identity, entry_point, limits, tuple(tests), code))
        return (await self._verdicts.get(hashlib.sha256(parts).hexdigest(), judge)).report

    def describe(self) -> dict[str, Any]:
        return self._runner.describe()

    def close(self) -> None:
        self._runner.close()


def _passes(report: Report) -> list[bool]:
    return [result.passed for result in report.results]


CLOCKED = frozenset({"timeout", "not_run"})
"""Kinds of results that another run might not repeat."""
