"""Choose the next prompts: by success rate, by difficulty, or round-robin.

Each order is a `PromptSampler` (stream.py). Its draws follow from the seed, the position and the outcomes of
earlier groups, which every rank learns in the same order: any number of processes draws the same prompts, and a run
that resumes from a checkpoint draws those it would have drawn.
"""

import heapq
import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import floor
from statistics import fmean
from typing import Any

from covey.rollouts.group_checks import Outcome
from covey.rollouts.stream import AdaptiveSampler, PromptSampler, PromptStream, check_state
from covey.types import Prompt

LOGGER = logging.getLogger(__name__)

COOLDOWN = 10.0
"""Passes over all buckets for which a success rate rests that is outside its window by 1; by 0.1, for one."""


@dataclass(frozen=True, slots=True)
class Window:
    """The success rates to train at, and their measurement."""

    low: float
    high: float
    decay: float = 0.5
    """Weight of an earlier rate when there is a new one."""
    explore: float = 0.25
    """Share of draws in plain order, at any success rate."""

    def distance(self, success: float) -> float:
        """Return the distance outside of it, 0 inside."""
        return max(self.low - success, success - self.high, 0.0)

    def renewed(self, before: float | None, success: float) -> float:
        """Return the rate after one more group: an exponential moving average."""
        return success if before is None else self.decay * before + (1 - self.decay) * success


@dataclass(slots=True)
class Bucket:
    """Prompts that share one success rate."""

    stream: PromptStream
    success: float | None = None
    """None until a group was scored."""
    drawn_at: int = -1
    """Position at which one of them was drawn last."""


class SuccessRateCurriculum:
    """Takes buckets inside the window often; others rest longer the farther outside.

    So solved and hopeless buckets come rarely, but they come: their rates may have changed. If no bucket has rested
    enough, new ones are tried; without any, the bucket whose rest is over first comes early. A share of the
    draws goes through all buckets in plain order instead. No prompt comes twice in one draw of several while there are
    others.
    """

    def __init__(self, buckets: Mapping[str, Sequence[Prompt]], window: Window, seed: int, *, shuffle: bool) -> None:
        """Set the prompts by bucket: single ones, or a difficulty's."""
        self.prompts: Sequence[Prompt] = [prompt for members in buckets.values() for prompt in members]
        self.seed, self.position = seed, 0
        self._members, self._window, self._shuffle = buckets, window, shuffle
        self._bucket_of = {prompt.id: name for name, members in buckets.items() for prompt in members}
        self._exploration = PromptStream([members[0] for members in buckets.values()], seed, shuffle)
        self._buckets: dict[str, Bucket] = {}
        self._successes: list[float] = []

    def draw(self, n: int) -> list[tuple[Prompt, int]]:
        """Return the next n prompts, each with its pass number."""
        rates = {name: bucket.success for name, bucket in self._buckets.items() if bucket.success is not None}
        rests = {name: COOLDOWN * len(rates) * self._window.distance(success) for name, success in rates.items()}
        rested = [(self._buckets[name].drawn_at + rest, rest, name) for name, rest in rests.items()]
        heapq.heapify(rested)
        taken: Counter[str] = Counter()
        drawn = []
        for _ in range(n):
            name = self._next(rested, taken)
            taken[name] += 1
            bucket = self._bucket(name)
            bucket.drawn_at = self.position
            self.position += 1
            drawn += bucket.stream.draw(1)
        return drawn

    def learn(self, outcomes: Sequence[Outcome]) -> None:
        for outcome in outcomes:
            bucket = self._bucket(self._bucket_of[outcome.prompt_id])
            bucket.success = self._window.renewed(bucket.success, outcome.success)
            self._successes.append(outcome.success)

    def take_metrics(self) -> dict[str, float]:
        """Return recent success, and shares of buckets measured and, of these, inside."""
        rates = [bucket.success for bucket in self._buckets.values() if bucket.success is not None]
        inside = [self._window.distance(rate) == 0 for rate in rates]
        metrics = {"explored": len(inside) / len(self._members)}
        metrics |= {"in_window": fmean(inside)} if inside else {}
        metrics |= {"success": fmean(self._successes)} if self._successes else {}
        self._successes.clear()
        return metrics

    def state_dict(self) -> dict[str, Any]:
        lanes = {name: [lane.stream.position, lane.success, lane.drawn_at] for name, lane in self._buckets.items()}
        # The keys are those of checkpoints: they keep the names they were first written under.
        return {"position": self.position, "tour": self._exploration.position, "lanes": lanes}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        check_state(state, self.state_dict())
        _check_names("prompts or difficulties", state["lanes"].keys() - self._members.keys())
        self.position, self._exploration.position = state["position"], state["tour"]
        self._buckets.clear()
        for name, (position, success, drawn_at) in state["lanes"].items():
            bucket = self._bucket(name)
            bucket.stream.position, bucket.success, bucket.drawn_at = position, success, drawn_at

    def _next(self, rested: list[tuple[float, float, str]], taken: Counter[str]) -> str:
        """Return the next prompt's bucket from a heap of (end, rest, name)."""
        if is_scheduled(self.position, self._window.explore):
            return self._explore(taken)
        while rested and taken[rested[0][2]] >= len(self._members[rested[0][2]]):
            heapq.heappop(rested)
        all_are_known = self._exploration.position >= len(self._members)
        if not rested or (rested[0][0] > self.position and not all_are_known):
            return self._explore(taken)
        _, rest, name = rested[0]
        heapq.heapreplace(rested, (self.position + rest, rest, name))
        return name

    def _explore(self, taken: Counter[str]) -> str:
        """Return the next bucket in plain order that was not drawn yet."""
        if taken.total() >= len(self.prompts):  # all have come: once more
            taken.clear()
        while True:
            ((prompt, _),) = self._exploration.draw(1)
            name = self._bucket_of[prompt.id]
            if taken[name] < len(self._members[name]):
                return name

    def _bucket(self, name: str) -> Bucket:
        if name not in self._buckets:
            self._buckets[name] = Bucket(PromptStream(self._members[name], self.seed, self._shuffle))
        return self._buckets[name]


@dataclass(frozen=True, slots=True)
class Promotion:
    """Condition for the next level."""

    promote_at: float
    """Mean success from which on it does."""
    num_groups: int
    """Number of last groups of the present level that the mean covers."""
    demote_below: float | None = None
    """Mean success below which the previous level returns; None: never."""
    earlier_share: float = 0.0
    """Share of draws from the levels before the present one, which take turns."""


class EasyToHard:
    """One difficulty after the other, each until it is mostly solved."""

    def __init__(
        self, prompts: Sequence[Prompt], difficulties: Sequence[float], rule: Promotion, seed: int, *, shuffle: bool
    ) -> None:
        """Set each prompt's difficulty; equal ones form a level."""
        self.prompts = prompts
        self.seed, self.position = seed, 0
        self._rule = rule
        self._levels = sorted(set(difficulties))
        pairs = list(zip(prompts, difficulties, strict=True))
        self._level_of = {prompt.id: difficulty for prompt, difficulty in pairs}
        self._buckets = [PromptStream([p for p, d in pairs if d == level], seed, shuffle) for level in self._levels]
        self._present = 0
        self._recent: list[float] = []

    def draw(self, n: int) -> list[tuple[Prompt, int]]:
        drawn = []
        for _ in range(n):
            drawn += self._buckets[self._bucket_of_turn(self.position)].draw(1)
            self.position += 1
        return drawn

    def learn(self, outcomes: Sequence[Outcome]) -> None:
        """Count groups of the current level alone."""
        for outcome in outcomes:
            if self._level_of[outcome.prompt_id] == self._levels[self._present]:
                self._judge(outcome.success)

    def take_metrics(self) -> dict[str, float]:
        """Return the current level, and its recent success."""
        success = {"success": fmean(self._recent)} if self._recent else {}
        return {"level": float(self._levels[self._present])} | success

    def state_dict(self) -> dict[str, Any]:
        return {
            "position": self.position,
            "level": self._levels[self._present],
            "recent": list(self._recent),
            "levels": {str(level): bucket.position for level, bucket in zip(self._levels, self._buckets, strict=True)},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        own = self.state_dict()
        check_state(state, own)
        _check_names("difficulties", state["levels"].keys() ^ own["levels"].keys())
        self.position, self._recent = state["position"], list(state["recent"])
        self._present = self._levels.index(state["level"])
        for level, bucket in zip(self._levels, self._buckets, strict=True):
            bucket.position = state["levels"][str(level)]

    def _bucket_of_turn(self, position: int) -> int:
        share = self._rule.earlier_share
        if self._present == 0 or not is_scheduled(position, share):
            return self._present
        return floor(position * share) % self._present

    def _judge(self, success: float) -> None:
        rule = self._rule
        self._recent = [*self._recent, success][-rule.num_groups :]
        if len(self._recent) < rule.num_groups:
            return
        mean, top = fmean(self._recent), len(self._levels) - 1
        if mean >= rule.promote_at and self._present < top:
            self._move(self._present + 1, mean)
        elif rule.demote_below is not None and mean < rule.demote_below and self._present > 0:
            self._move(self._present - 1, mean)

    def _move(self, to: int, mean: float) -> None:
        before, after = self._levels[self._present], self._levels[to]
        LOGGER.info("curriculum: mean success %.3f at difficulty %g, on to difficulty %g", mean, before, after)
        self._present, self._recent = to, []


class WeightedRoundRobin:
    """Several streams in turn by weight, at most about one draw ahead (Webster's method)."""

    def __init__(self, streams: Mapping[str, PromptSampler], weights: Mapping[str, float], seed: int) -> None:
        """Take `streams` and their weights by the `Prompt.environment` of their prompts."""
        self.prompts: Sequence[Prompt] = [prompt for stream in streams.values() for prompt in stream.prompts]
        self.seed = seed
        self._streams, self._weights = dict(streams), dict(weights)

    @property
    def position(self) -> int:
        return sum(stream.position for stream in self._streams.values())

    def draw(self, n: int) -> list[tuple[Prompt, int]]:
        counts = {name: stream.position for name, stream in self._streams.items()}
        turns = []
        for _ in range(n):
            name = min(counts, key=lambda each: (counts[each] + 0.5) / self._weights[each])
            counts[name] += 1
            turns.append(name)
        shares = Counter(turns)
        drawn = {name: iter(stream.draw(shares[name])) for name, stream in self._streams.items()}
        return [next(drawn[name]) for name in turns]

    def learn(self, outcomes: Sequence[Outcome]) -> None:
        for name, stream in self._streams.items():
            if isinstance(stream, AdaptiveSampler):
                stream.learn([outcome for outcome in outcomes if outcome.environment == name])

    def take_metrics(self) -> dict[str, float]:
        found = {name: s.take_metrics() for name, s in self._streams.items() if isinstance(s, AdaptiveSampler)}
        return {f"{name}/{metric}": value for name, metrics in found.items() for metric, value in metrics.items()}

    def state_dict(self) -> dict[str, Any]:
        return {"parts": {name: stream.state_dict() for name, stream in self._streams.items()}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        check_state(state, self.state_dict())
        _check_names("parts of a mixture", state["parts"].keys() ^ self._streams.keys())
        for name, stream in self._streams.items():
            stream.load_state_dict(state["parts"][name])


def is_scheduled(position: int, share: float) -> bool:
    """Return True for a `share` of positions, evenly spread.

    >>> [is_scheduled(position, 0.25) for position in range(8)]
    [False, False, False, True, False, False, False, True]
    """
    return floor((position + 1) * share) > floor(position * share)


def _check_names(what: str, different: set[str]) -> None:
    """Refuse a saved state with other prompts. ValueError."""
    if different:
        names = ", ".join(sorted(different)[:3])
        raise ValueError(f"the checkpoint's curriculum and this run have different {what}, first: {names}")
