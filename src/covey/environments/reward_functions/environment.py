"""Your own rows and your own reward functions: TRL's signature, unchanged.

A reward function is called with keyword arguments only, once for all completions of a prompt:

    def reward(prompts, completions, **columns) -> list[float | None]

`prompts` and `completions` are strings where the prompt is one, and lists of messages where the prompt is a
conversation; every other column of the rows comes as a list of equal length, None where a row lacks it, besides
`trainer_state`, `log_extra` and `log_metric`. `completion_ids` are the tokens that were sampled, the stop token
included. None means "does not apply to this completion".

Functions run in worker processes with a deadline (`workers`), or here (`in_process`), which is faster; one that takes
too long cannot be interrupted here, so that it ends the run.
"""

import asyncio
import copy
import logging
import math
from collections import defaultdict, deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from covey.environments.base import Environment, Split, own_containers, split_prefill
from covey.environments.reward_functions.call import (
    AT_START,
    HIDDEN_COLUMNS,
    RewardCall,
    RewardCallable,
    RewardOutcome,
    TrainerState,
    check_columns,
    fail_all,
    is_async,
    name_of,
    problem_with,
)
from covey.environments.reward_functions.rows import PromptFormat, Row, prompts_of, warn_of_silent_users
from covey.environments.reward_functions.specs import load_reward
from covey.environments.reward_functions.texts import final_text
from covey.environments.reward_functions.verl import adapt
from covey.system.waits.watchdog import Watchdog
from covey.system.workers.call_thread import CallThread
from covey.system.workers.pool import WorkerPool, WorkerSettings
from covey.types import Failure, Message, Prompt, Reward, RunStopped

LOGGER = logging.getLogger(__name__)

FAILURE_WINDOW = 1000
"""Rewards the failure rate is taken over."""
MIN_FAILURE_SAMPLE = 20
"""Rewards there must be before it is."""


class RewardFailureRate(RunStopped):
    """Too many rewards failed, so the run stops."""


@dataclass(frozen=True, slots=True)
class RewardFunction:
    """A reward function with its unique name and weight."""

    name: str
    function: RewardCallable
    weight: float = 1.0


@dataclass(frozen=True, slots=True)
class RewardSettings:
    """Settings of running reward functions, from `RewardFunctionsConfig`."""

    workers: WorkerSettings = field(default_factory=WorkerSettings)
    """`timeout` holds in process too."""
    in_process: bool = False
    max_failure_rate: float = 0.05
    nan_is_none: bool = False
    """Whether NaN means that a function does not apply, as in TRL, and no failure."""


def reward_functions(
    functions: Sequence[str | Mapping[str, Any] | RewardCallable], weights: Sequence[float] = ()
) -> tuple[RewardFunction, ...]:
    """Give functions weights (default 1) and unique names (`f_2`)."""
    if not functions:
        raise ValueError("environment=reward_functions needs rewards=[module:function], got none")
    if weights and len(weights) != len(functions):
        raise ValueError(f"reward_weights must have one entry for each of {len(functions)} rewards, got {len(weights)}")
    if not all(map(math.isfinite, weights)):
        raise ValueError(f"reward_weights must be finite, got {list(weights)}")
    loaded = [adapt(load_reward(entry) if isinstance(entry, str | Mapping) else entry) for entry in functions]
    # Names are unique: the second of equal ones gets a number
    seen: defaultdict[str, int] = defaultdict(int)
    result = []
    for function, weight in zip(loaded, weights or [1.0] * len(loaded), strict=True):
        name = name_of(function)
        seen[name] += 1
        unique = name if seen[name] == 1 else f"{name}_{seen[name]}"
        result.append(RewardFunction(unique, function, float(weight)))
    return tuple(result)


@dataclass(frozen=True, slots=True)
class Conversation:
    """An attempt of several turns, as reward functions get it."""

    asked: str | tuple[Message, ...]
    """Its prompt, with additions before the first turn."""
    messages: Sequence[Message]
    """All that was said since."""
    token_ids: Sequence[int]
    """Tokens that the policy sampled, over all turns."""
    environment: object | None = None
    """The attempt's own object."""


class RewardFunctions(Environment):
    """Environment of rows and reward functions, with a weighted sum.

    >>> RewardFunctions({"train": [{"prompt": "2+2=", "answer": 4}], "test": []}, reward_functions([exact]))
    """

    def __init__(
        self,
        rows: Mapping[Split, Sequence[Row]],
        functions: Sequence[RewardFunction],
        settings: RewardSettings | None = None,
        *,
        prompt_column: str = "prompt",
        prefill: bool = False,
    ) -> None:
        """Read the rows; `prefill` allows begun answers.

        Raises ValueError for rows without a prompt, reserved column names and functions that cannot be sent.
        """
        self.settings = settings or RewardSettings()
        self._functions = tuple(functions)
        columns = list(dict.fromkeys(name for of_split in rows.values() for row in of_split for name in row))
        check_columns({reward.name: reward.function for reward in self._functions}, columns, prompt_column)
        how = PromptFormat(prompt_column, prefill=prefill)
        self._prompts = {split: prompts_of(split, rows[split], columns, how) for split in rows}
        warn_of_silent_users(self._prompts)
        self._calls = [RewardCall(one.function, nan_is_none=self.settings.nan_is_none) for one in self._functions]
        self._pool: WorkerPool | None = None
        self._thread = CallThread()
        self._watchdog = Watchdog()
        if not self.settings.in_process:
            self._pool = WorkerPool(self._calls, self.settings.workers)
        else:
            for call in self._calls:
                call.prepare()
        self._state = AT_START
        self._recent: deque[bool] = deque(maxlen=FAILURE_WINDOW)
        self._has_applied = False
        self._num_without = 0
        """Completions before the first that a function had a value for."""
        self._metrics: defaultdict[str, list[float]] = defaultdict(list)
        self._excused: set[str] = set()
        """Functions whose first excused error was said."""

    def watched_by(self, watchdog: Watchdog) -> None:
        """Let late functions in this process end the run."""
        self._watchdog = watchdog

    def call(self, split: Split, names: Sequence[str]) -> None:
        """Name each prompt's data set, under which it is measured."""
        if names:
            pairs = zip(self._prompts[split], names, strict=True)
            self._prompts[split] = tuple(replace(prompt, environment=name) for prompt, name in pairs)

    def follow(self, step: int, max_steps: int, epoch: float) -> None:
        self._state = TrainerState(step, max_steps, epoch)

    def prompts(self, split: Split) -> list[Prompt]:
        return list(self._prompts[split])

    def demonstrations(self, split: Split) -> list[tuple[Prompt, str]]:
        """Return prompts with their rows' `completion`. ValueError without any."""
        shown = [(p, p.columns["completion"]) for p in self._prompts[split] if p.columns.get("completion") is not None]
        if not shown:
            raise ValueError("cold_start.enabled=true needs rows with a column 'completion', got none")
        return [(prompt, final_text(completion)) for prompt, completion in shown]

    @property
    def part_weights(self) -> dict[str, float]:
        return {reward.name: reward.weight for reward in self._functions}

    async def score(self, prompt: Prompt, completions: Sequence[str]) -> list[Reward | Failure]:
        """Judge without tokens: functions get no `completion_ids`."""
        return await self.judged(prompt, completions, {})

    async def score_tokens(
        self, prompt: Prompt, completions: Sequence[str], completion_ids: Sequence[Sequence[int]]
    ) -> list[Reward | Failure]:
        """Judge, or raise RewardFailureRate over max_failure_rate of recent rewards."""
        return await self.judged(prompt, completions, _tokens(completion_ids))

    async def score_conversations(
        self, prompt: Prompt, conversations: Sequence[Conversation], *, counts: bool = True
    ) -> list[Reward | Failure]:
        """Judge attempts by all their messages, in one call per function.

        Their objects come as `environments`, not to workers. Without `counts` nothing is counted or logged, as in a dry
        run.
        """
        said = [final_text(conversation.messages) for conversation in conversations]
        tokens = _tokens([conversation.token_ids for conversation in conversations])
        more = lambda: self._of_conversations(conversations)  # noqa: E731
        return await self.judged(prompt, said, tokens, more, counts=counts)

    def _of_conversations(self, conversations: Sequence[Conversation]) -> dict[str, list[Any]]:
        found: dict[str, list[Any]] = {"prompts": [], "completions": []}
        for conversation in conversations:
            if isinstance(conversation.asked, str):
                found["prompts"].append(conversation.asked)
                found["completions"].append(final_text(conversation.messages))
                continue
            asked, _ = split_prefill(conversation.asked)
            found["prompts"].append([copy.deepcopy(dict(message)) for message in asked])
            found["completions"].append([copy.deepcopy(dict(message)) for message in conversation.messages])
        objects = [c.environment for c in conversations]
        if self.settings.in_process and all(made is not None for made in objects):
            found["environments"] = objects
        return found

    def dry_run(self, prompt: Prompt) -> tuple[Environment, Prompt]:
        async def judge(asked: Prompt, completions: Sequence[str], ids: TokenIds | None) -> list[Reward | Failure]:
            return await self.judged(asked, completions, {} if ids is None else _tokens(ids), counts=False)

        return DryRun(self, judge), prompt

    async def judged(
        self,
        prompt: Prompt,
        completions: Sequence[str],
        tokens: Mapping[str, list[list[int]]],
        more: Callable[[], Mapping[str, list[Any]]] = dict,
        *,
        counts: bool = True,
    ) -> list[Reward | Failure]:
        """Return the weighted sums; without `counts` nothing is logged."""
        count = len(completions)
        keywords = [{**self._keywords(prompt, completions), **copy.deepcopy(tokens), **more()} for _ in self._functions]
        calls = (self._outcome(index, count, given) for index, given in enumerate(keywords))
        outcomes = await asyncio.gather(*calls)
        scores = [self._reward(index, outcomes) for index in range(count)]
        if not counts:
            return [Reward(0.0, {}) if score is _DOES_NOT_APPLY else score for score in scores]
        applied = [score for score in scores if score is not _DOES_NOT_APPLY]
        self._stop_where_nothing_applies(len(scores), len(applied))
        self._note(applied)
        for reward, outcome in zip(self._functions, outcomes, strict=True):
            for name, value in outcome["metrics"]:
                self._metrics[name].append(value)
            if "excused" in outcome and reward.name not in self._excused:
                self._excused.add(reward.name)
                LOGGER.warning('reward function "%s" %s: %s', reward.name, outcome["excused"], EXCUSED)
        return scores

    def metrics(self) -> dict[str, float]:
        means = {name: sum(values) / len(values) for name, values in self._metrics.items()}
        self._metrics.clear()
        return means

    def close(self) -> None:
        if self._pool is not None:
            self._pool.close()
        self._thread.close()

    def _keywords(self, prompt: Prompt, completions: Sequence[str]) -> dict[str, list[Any]]:
        """Return a function's arguments, copied as it may change them."""
        count = len(completions)
        shown = {name: value for name, value in prompt.columns.items() if name not in HIDDEN_COLUMNS}
        columns = {name: [own_containers(value) for _ in range(count)] for name, value in shown.items()}
        if isinstance(prompt.text, str):
            return {"prompts": [prompt.text] * count, "completions": list(completions), **columns}
        # A conversation; each completion gets a copy, since functions may change it
        asked, begun = split_prefill(prompt.text)
        return {
            "prompts": [[copy.deepcopy(dict(message)) for message in asked] for _ in range(count)],
            "completions": [[{"role": "assistant", "content": begun + text}] for text in completions],
            **columns,
        }

    async def _outcome(self, index: int, count: int, keywords: Mapping[str, Any]) -> RewardOutcome:
        # In a worker process: the pool keeps the deadline.
        if self._pool is not None:
            result = await self._pool.call(index, {"count": count, "keywords": keywords, "state": self._state})
            return fail_all(result.reason, count) if isinstance(result, Failure) else result
        call, state, seconds = self._calls[index], self._state, self.settings.workers.timeout
        if is_async(call.function):
            deadline = asyncio.timeout(seconds)
            try:
                async with deadline:
                    return await call.awaited(count, keywords, state)
            except TimeoutError:
                return fail_all(f"took longer than {seconds:g} s", count)

        # In a thread of this process, which cannot be interrupted: the watchdog ends the run.
        def watched() -> RewardOutcome:
            what = f"the reward function {self._functions[index].name}"
            with self._watchdog.deadline(what, "environment.timeout", seconds):
                return call(count, keywords, state)

        return await self._thread.call(watched)

    def _reward(self, index: int, outcomes: Sequence[RewardOutcome]) -> Reward | Failure:
        parts: dict[str, float] = {}
        extra: dict[str, Any] = {}
        total = 0.0
        for reward, outcome in zip(self._functions, outcomes, strict=True):
            if str(index) in outcome["problems"]:
                return Failure(f'reward function "{reward.name}" {outcome["problems"][str(index)]}')
            extra |= {column: values[index] for column, values in outcome["extras"].items()}
            value = outcome["values"][index]
            if value is not None:
                parts[reward.name] = value
                total += reward.weight * value
        if problem_with(total):
            return Failure(f"the weighted sum of the reward functions is {total:g}")
        return Reward(total, parts, extra) if parts else _DOES_NOT_APPLY

    def _stop_where_nothing_applies(self, num_scores: int, num_applied: int) -> None:
        """Raise RewardFailureRate where nothing applied to 1000 completions."""
        self._num_without += num_scores
        self._has_applied |= num_applied > 0
        if self._has_applied:
            return
        said = (
            f"no reward function applied to any of {self._num_without} completions: each returned None, or its "
            "column has no value in these rows"
        )
        if self._num_without >= FAILURE_WINDOW:
            raise RewardFailureRate(said)
        if self._num_without == num_scores:
            LOGGER.warning("%s", said)

    def _note(self, scores: Sequence[Reward | Failure]) -> None:
        failures = [score for score in scores if isinstance(score, Failure)]
        self._recent.extend(isinstance(score, Failure) for score in scores)
        num_seen, num_failed = len(self._recent), sum(self._recent)
        if failures and num_seen >= MIN_FAILURE_SAMPLE and num_failed > self.settings.max_failure_rate * num_seen:
            raise RewardFailureRate(
                f"{num_failed} of the last {num_seen} rewards failed "
                f"(max_failure_rate={self.settings.max_failure_rate:g}); last: {failures[-1].reason}"
            )


EXCUSED = "it does not apply to a row without a value in a column that it takes by name; said once"
_DOES_NOT_APPLY = Failure("no reward function applied", is_fault=False)
"""All functions returned None: left out of the group like a failure, but not counted as one."""


TokenIds = Sequence[Sequence[int]]


@dataclass(frozen=True)
class DryRun(Environment):
    """Judges like an environment, by a function that counts and logs nothing."""

    environment: Environment
    judge: Callable[[Prompt, Sequence[str], TokenIds | None], Awaitable[list[Reward | Failure]]]

    def prompts(self, split: Split) -> list[Prompt]:
        return self.environment.prompts(split)

    async def score(self, prompt: Prompt, completions: Sequence[str]) -> list[Reward | Failure]:
        return await self.judge(prompt, completions, None)

    async def score_tokens(
        self, prompt: Prompt, completions: Sequence[str], completion_ids: TokenIds
    ) -> list[Reward | Failure]:
        return await self.judge(prompt, completions, completion_ids)


def _tokens(completion_ids: Sequence[Sequence[int]]) -> dict[str, list[list[int]]]:
    return {"completion_ids": [list(ids) for ids in completion_ids]}
