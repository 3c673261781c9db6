"""Your own rows and your own reward functions: TRL's signature, unchanged.

A reward function is called with keyword arguments only, once for all completions of a prompt:

    def reward(prompts, completions, **columns) -> list[float | None]

`prompts` and `completions` are strings where the prompt is one, and lists of messages where the prompt is a
conversation; every other column of the row comes as a list of equal length, besides `trainer_state` (None),
`log_extra` and `log_metric`. `completion_ids` are the tokens that were sampled, the stop token included. None means
"does not apply to this completion".

Functions run in worker processes with a deadline (`workers`), or here (`in_process`), which is faster; one that takes
too long cannot be interrupted here, so that it ends the run.
"""

import asyncio
import copy
import functools
from collections import defaultdict, deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from covey.deadlines import Watchdog
from covey.environments.base import Environment, RunStopped, Split
from covey.environments.call_thread import CallThread
from covey.environments.reward_call import Outcome, RewardCall, RewardCallable, failed, is_async, name_of
from covey.environments.reward_specs import load_reward
from covey.environments.workers import WorkerPool, WorkerSettings
from covey.rewards.texts import final_text
from covey.types import Failure, Message, Prompt, Reward

Row = Mapping[str, Any]

HIDDEN_COLUMNS = frozenset({"prompt", "completion", "completion_ids"})
"""Columns that TRL does not pass on either."""
RESERVED_COLUMNS = frozenset({"prompts", "completions", "trainer_state", "log_extra", "log_metric"})
ROLES = ("system", "developer", "user", "assistant", "tool")
"""Who speaks in a conversation. Many chat templates drop the words of any other without a sound."""
FAILURE_WINDOW = 1000
"""Rewards the failure rate is taken over."""
MIN_FAILURE_SAMPLE = 20
"""Rewards there must be before it is."""


class RewardFailureRate(RunStopped):
    """Too many rewards failed: the run must stop, for its reward no longer measures what it should."""


@dataclass(frozen=True, slots=True)
class RewardFunction:
    """A reward function, its name (unique, for metrics) and its weight in the sum."""

    name: str
    function: RewardCallable
    weight: float = 1.0


@dataclass(frozen=True, slots=True)
class RewardSettings:
    """How reward functions are run; what `RewardFunctionsConfig` explains."""

    workers: WorkerSettings = field(default_factory=WorkerSettings)
    """`timeout` holds in process too."""
    in_process: bool = False
    max_failure_rate: float = 0.05

    def __post_init__(self) -> None:
        if not 0 <= self.max_failure_rate <= 1:
            raise ValueError(f"max_failure_rate must be in [0, 1], got {self.max_failure_rate}")


def reward_functions(
    functions: Sequence[str | Mapping[str, Any] | RewardCallable], weights: Sequence[float] = ()
) -> tuple[RewardFunction, ...]:
    """Functions, or entries that name them, with weights (all 1 where none are given) and unique names: the second `f`
    is `f_2`."""
    if not functions:
        raise ValueError("environment=reward_functions needs rewards=[module:function], got none")
    if weights and len(weights) != len(functions):
        raise ValueError(f"reward_weights must have one entry for each of {len(functions)} rewards, got {len(weights)}")
    loaded = [load_reward(entry) if isinstance(entry, str | Mapping) else entry for entry in functions]
    seen: defaultdict[str, int] = defaultdict(int)
    result = []
    for function, weight in zip(loaded, weights or [1.0] * len(loaded), strict=True):
        name = name_of(function)
        seen[name] += 1
        unique = name if seen[name] == 1 else f"{name}_{seen[name]}"
        result.append(RewardFunction(unique, function, float(weight)))
    return tuple(result)


class RewardFunctions:
    """Environment made of rows and reward functions. The reward is the weighted sum of the values that apply.

    >>> RewardFunctions({"train": [{"prompt": "2+2=", "answer": 4}], "test": []}, reward_functions([exact]))
    """

    def __init__(
        self,
        rows: Mapping[Split, Sequence[Row]],
        functions: Sequence[RewardFunction],
        settings: RewardSettings | None = None,
        *,
        prompt_column: str = "prompt",
    ) -> None:
        """Raises ValueError for rows without a prompt, reserved column names and functions that cannot be sent."""
        self.settings = settings or RewardSettings()
        self._functions = tuple(functions)
        self._prompts = {split: _prompts(split, rows[split], prompt_column) for split in rows}
        _check_arguments(self._functions, {name for some in rows.values() for row in some for name in row})
        self._calls = [RewardCall(reward.function) for reward in self._functions]
        self._pool: WorkerPool | None = None
        self._thread = CallThread()
        self._watchdog = Watchdog()
        if not self.settings.in_process:
            self._pool = WorkerPool(self._calls, self.settings.workers)
        else:
            for call in self._calls:
                call.prepare()
        self._recent: deque[bool] = deque(maxlen=FAILURE_WINDOW)
        self._metrics: defaultdict[str, list[float]] = defaultdict(list)

    def watched_by(self, watchdog: Watchdog) -> None:
        """Have functions that run here end the run where they take too long."""
        self._watchdog = watchdog

    def prompts(self, split: Split) -> list[Prompt]:
        return list(self._prompts[split])

    def demonstrations(self, split: Split) -> list[tuple[Prompt, str]]:
        """Prompts with the column `completion` of their rows, as in TRL's data for supervised training.

        Raises ValueError where no row has one.
        """
        shown = [(p, p.columns["completion"]) for p in self._prompts[split] if p.columns.get("completion") is not None]
        if not shown:
            raise ValueError("cold_start.enabled=true needs rows with a column 'completion', got none")
        return [(prompt, final_text(completion)) for prompt, completion in shown]

    @property
    def part_weights(self) -> dict[str, float]:
        """Weight of each reward function, by the name of its part."""
        return {reward.name: reward.weight for reward in self._functions}

    async def score(self, prompt: Prompt, completions: Sequence[str]) -> list[Reward | Failure]:
        """`score_tokens` where the tokens are not known; functions then get no `completion_ids`."""
        return await self._score(prompt, completions, {})

    async def score_tokens(
        self, prompt: Prompt, completions: Sequence[str], completion_ids: Sequence[Sequence[int]]
    ) -> list[Reward | Failure]:
        """Raises RewardFailureRate when more than max_failure_rate of the last 1000 rewards failed (of at least 20)."""
        return await self._score(prompt, completions, _tokens(completion_ids))

    def trial(self, prompt: Prompt) -> tuple[Environment, Prompt]:
        return _Trial(self), prompt

    async def _score(
        self, prompt: Prompt, completions: Sequence[str], tokens: Mapping[str, list[list[int]]]
    ) -> list[Reward | Failure]:
        scores, outcomes = await self.judged(prompt, completions, tokens)
        self._note([score for score in scores if score is not _DOES_NOT_APPLY])
        for outcome in outcomes:
            for name, value in outcome["metrics"]:
                self._metrics[name].append(value)
        return scores

    async def judged(
        self, prompt: Prompt, completions: Sequence[str], tokens: Mapping[str, list[list[int]]]
    ) -> tuple[list[Reward | Failure], list[Outcome]]:
        """What the functions come to together and what each says; nothing is counted or logged."""
        count = len(completions)
        keywords = [{**self._keywords(prompt, completions), **copy.deepcopy(tokens)} for _ in self._functions]
        calls = (self._outcome(index, count, given) for index, given in enumerate(keywords))
        outcomes = await asyncio.gather(*calls)
        return [self._reward(index, outcomes) for index in range(count)], outcomes

    def metrics(self) -> dict[str, float]:
        """Means of what functions logged through `log_metric` since this was last asked."""
        means = {name: sum(values) / len(values) for name, values in self._metrics.items()}
        self._metrics.clear()
        return means

    def close(self) -> None:
        """End the workers. Also done when the environment is collected, and at exit."""
        if self._pool is not None:
            self._pool.close()
        self._thread.close()

    def _keywords(self, prompt: Prompt, completions: Sequence[str]) -> dict[str, list[Any]]:
        """What one function is called with, besides the hooks. Made anew for each: it may change its arguments."""
        count = len(completions)
        columns = {name: [value] * count for name, value in prompt.columns.items() if name not in HIDDEN_COLUMNS}
        if isinstance(prompt.text, str):
            return {"prompts": [prompt.text] * count, "completions": list(completions), **columns}
        return {
            "prompts": [[dict(message) for message in prompt.text] for _ in range(count)],
            "completions": [[{"role": "assistant", "content": text}] for text in completions],
            **columns,
        }

    async def _outcome(self, index: int, count: int, keywords: Mapping[str, Any]) -> Outcome:
        if self._pool is not None:
            result = await self._pool.call(index, {"count": count, "keywords": keywords})
            return failed(result.reason, count) if isinstance(result, Failure) else result
        call, seconds = self._calls[index], self.settings.workers.timeout
        if is_async(call.function):
            deadline = asyncio.timeout(seconds)
            try:
                async with deadline:
                    return await call.awaited(count, keywords)
            except TimeoutError:
                return failed(f"took longer than {seconds:g} s", count)

        def watched() -> Outcome:
            what = f"the reward function {self._functions[index].name}"
            with self._watchdog.waiting(what, "environment.timeout", seconds):
                return call(count, keywords)

        return await self._thread.call(watched)

    def _reward(self, index: int, outcomes: Sequence[Outcome]) -> Reward | Failure:
        """The judgement of one completion from what all functions say of it."""
        parts: dict[str, float] = {}
        total = 0.0
        for reward, outcome in zip(self._functions, outcomes, strict=True):
            if str(index) in outcome["problems"]:
                return Failure(f'reward function "{reward.name}" {outcome["problems"][str(index)]}')
            value = outcome["values"][index]
            if value is not None:
                parts[reward.name] = value
                total += reward.weight * value
        return Reward(total, parts) if parts else _DOES_NOT_APPLY

    def _note(self, scores: Sequence[Reward | Failure]) -> None:
        failures = [score for score in scores if isinstance(score, Failure)]
        self._recent.extend(isinstance(score, Failure) for score in scores)
        num_seen, num_failed = len(self._recent), sum(self._recent)
        if failures and num_seen >= MIN_FAILURE_SAMPLE and num_failed > self.settings.max_failure_rate * num_seen:
            raise RewardFailureRate(
                f"{num_failed} of the last {num_seen} rewards failed "
                f"(max_failure_rate={self.settings.max_failure_rate:g}); last: {failures[-1].reason}"
            )


_DOES_NOT_APPLY = Failure("no reward function applied")
"""All functions said None: left out of the group like a failure, but nobody's fault, so not counted as one."""


@dataclass(frozen=True)
class _Trial:
    """The same functions, tried out."""

    environment: RewardFunctions

    def prompts(self, split: Split) -> list[Prompt]:
        return self.environment.prompts(split)

    async def score(self, prompt: Prompt, completions: Sequence[str]) -> list[Reward | Failure]:
        return await self._score(prompt, completions, {})

    async def score_tokens(
        self, prompt: Prompt, completions: Sequence[str], completion_ids: Sequence[Sequence[int]]
    ) -> list[Reward | Failure]:
        return await self._score(prompt, completions, _tokens(completion_ids))

    async def _score(
        self, prompt: Prompt, completions: Sequence[str], tokens: Mapping[str, list[list[int]]]
    ) -> list[Reward | Failure]:
        scores, _ = await self.environment.judged(prompt, completions, tokens)
        return [Reward(0.0, {}) if score is _DOES_NOT_APPLY else score for score in scores]


def _tokens(completion_ids: Sequence[Sequence[int]]) -> dict[str, list[list[int]]]:
    return {"completion_ids": [list(ids) for ids in completion_ids]}


def _check_arguments(functions: Sequence[RewardFunction], columns: Collection[str]) -> None:
    """A column would silently take the place of an argument of the same name."""
    for reward in functions:
        function = reward.function
        both = sorted(set(function.keywords).intersection(columns)) if isinstance(function, functools.partial) else []
        if both:
            raise ValueError(f"rows have the column {both[0]!r}, which args of {reward.name} set too; rename one")


def _prompts(split: Split, rows: Sequence[Row], prompt_column: str) -> tuple[Prompt, ...]:
    names = list(dict.fromkeys(name for row in rows for name in row))
    taken = RESERVED_COLUMNS.intersection(names) - {prompt_column}
    if taken:
        raise ValueError(
            f"columns {', '.join(sorted(taken))} have names that reward functions get as arguments; rename"
        )
    columns = [name for name in names if name != prompt_column]
    return tuple(
        Prompt(
            id=f"{split}-{index}",
            environment="reward_functions",
            text=_prompt_text(row, prompt_column, f"{split} row {index}"),
            columns={name: row.get(name) for name in columns},
        )
        for index, row in enumerate(rows)
    )


def _prompt_text(row: Row, prompt_column: str, place: str) -> str | tuple[Message, ...]:
    """The prompt of a row: text, or messages that each have a role and a content."""
    if prompt_column not in row:
        raise ValueError(f"{place} has no column {prompt_column!r} (has: {', '.join(row)})")
    prompt = row[prompt_column]
    if prompt in ("", []):
        raise ValueError(f"{place} has an empty prompt")
    if isinstance(prompt, str):
        return prompt
    if isinstance(prompt, Sequence) and prompt and all(_is_message(message) for message in prompt):
        unknown = [message["role"] for message in prompt if message["role"] not in ROLES]
        if unknown:
            raise ValueError(f"{place}: prompt has the unknown role {unknown[0]!r} (known: {', '.join(ROLES)})")
        return tuple(dict(message) for message in prompt)
    raise ValueError(f"{place}: prompt must be text or a list of messages with role and content, got {prompt!r:.80}")


def _is_message(message: Any) -> bool:
    return isinstance(message, Mapping) and "role" in message and "content" in message
