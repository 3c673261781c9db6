"""Pairwise rewards: a judge compares every pair of a group.

The reward of a completion is the mean of what it earned against its siblings, w_i of the pairwise advantage (Pref-GRPO,
arXiv 2508.20751). With algorithm.advantage=group_center the advantage is w_i - 1/2, with group_zscore its z-score.
Judges rank more reliably than they grade, and a win rate has no scale that drifts.
"""

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from numbers import Real
from typing import Any

from covey.environments.reward_functions.call import AT_TIMES, HOOKS
from covey.environments.reward_functions.texts import Completion, final_text
from covey.system.lookup import resolve

Judge = Callable[..., float | Awaitable[float]]
"""judge(prompt, first, second, **columns) -> probability that the first of two texts is better; plain or async."""

NO_COLUMNS = (*HOOKS, *AT_TIMES)
"""Arguments of a reward function that are not columns of the data."""


class Pairwise:
    """Mean outcome within the group: win 1, tie 1/2, defeat 0.

    A judge often prefers what it reads first, so each pair is shown in both orders and the outcomes are averaged;
    `first_wins` is logged, 0.5 for a judge without that habit. One order costs half as much. A group is a run of equal
    prompts. The only completion of a group gets 1/2.
    """

    __name__ = "pairwise"
    needs_whole_groups = True

    def __init__(self, judge: str | Judge, *, both_orders: bool = True) -> None:
        """Set a judge, or its name module:function. ValueError if unknown."""
        self.judge = resolve(judge, {}) if isinstance(judge, str) else judge
        self.both_orders = both_orders

    def __call__(
        self,
        prompts: Sequence[Any],
        completions: Sequence[Completion],
        log_metric: Callable[[str, float], None] | None = None,
        **columns: Any,
    ) -> list[float]:
        """Return win rates. ValueError for an outcome outside of [0, 1]."""
        texts = [final_text(completion) for completion in completions]
        rows = {name: values for name, values in columns.items() if name not in NO_COLUMNS}
        places = [pair for group in groups(prompts) for pair in self._pairs(group)]
        outcomes = dict(zip(places, self._judge(prompts, texts, rows, places), strict=True))
        if log_metric is not None and outcomes:
            log_metric("first_wins", sum(outcomes.values()) / len(outcomes))
        return [value for group in groups(prompts) for value in win_rates(group, outcomes)]

    def _pairs(self, group: range) -> Iterator[tuple[int, int]]:
        return ((i, j) for i in group for j in group if i < j or (self.both_orders and i != j))

    def _judge(
        self,
        prompts: Sequence[Any],
        texts: Sequence[str],
        rows: Mapping[str, Sequence[Any]],
        places: Sequence[tuple[int, int]],
    ) -> list[float]:
        calls = [
            self.judge(prompts[i], texts[i], texts[j], **{name: values[i] for name, values in rows.items()})
            for i, j in places
        ]
        return [_check_outcome(outcome) for outcome in _await_all(calls)]


def groups(prompts: Sequence[Any]) -> list[range]:
    """Return the places of each prompt's completions, which must be adjacent.

    >>> groups(["a", "a", "b"])
    [range(0, 2), range(2, 3)]
    """
    starts = [i for i, prompt in enumerate(prompts) if i == 0 or prompt != prompts[i - 1]]
    return [range(start, end) for start, end in zip(starts, [*starts[1:], len(prompts)], strict=True)]


def win_rates(group: range, outcomes: Mapping[tuple[int, int], float]) -> list[float]:
    """Return each member's mean outcome, both orders counting alike."""

    def against(i: int, j: int) -> float:
        seen = [outcomes[i, j]] if (i, j) in outcomes else []
        seen += [1 - outcomes[j, i]] if (j, i) in outcomes else []
        return sum(seen) / len(seen)

    if len(group) == 1:
        return [0.5]
    return [sum(against(i, j) for j in group if j != i) / (len(group) - 1) for i in group]


def _await_all(calls: Sequence[float | Awaitable[float]]) -> list[float]:
    """Return a judge's outcomes, awaiting async ones together."""

    async def gathered() -> list[float]:
        return await asyncio.gather(*(_value(call) for call in calls))

    if any(inspect.isawaitable(call) for call in calls):
        return asyncio.run(gathered())
    return [call for call in calls if not inspect.isawaitable(call)]


async def _value(call: float | Awaitable[float]) -> float:
    return await call if inspect.isawaitable(call) else call


def _check_outcome(outcome: float) -> float:
    if not isinstance(outcome, Real) or not 0 <= outcome <= 1:
        raise ValueError(f"a judge must return a probability from 0 to 1, got {outcome!r:.80}")
    return float(outcome)
