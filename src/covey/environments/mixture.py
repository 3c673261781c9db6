"""Several environments as one: their prompts take turns, and each judges its own."""

import logging
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

from covey.deadlines import Watchable, Watchdog
from covey.environments.base import (
    Closes,
    Demonstrates,
    Describes,
    Environment,
    Follows,
    Graded,
    HasGold,
    Logs,
    ReadsTokens,
    Replies,
    Split,
    Tries,
    Weighs,
)
from covey.types import Failure, Message, Prompt, Reward

LOGGER = logging.getLogger(__name__)

SPLITS: tuple[Split, ...] = ("train", "test")


class Mixture:
    """Environment made of others, its parts, each with a name that its prompts take on.

    `Prompt.environment` is that name, and the id begins with it. What a completion earns is logged under the name
    too, and below it in the environment's own terms: reward/sums, reward/sums/correct.
    """

    def __init__(self, parts: Mapping[str, Environment], weights: Mapping[str, float]) -> None:
        """`weights` say how often each part takes its turn in training; a part without one weighs 1."""
        self._parts = dict(parts)
        self._weights = {name: weights.get(name, 1.0) for name in parts}
        self._prompts: dict[Split, list[Prompt]] = {split: [] for split in SPLITS}
        self._own: dict[str, Prompt] = {}
        for split in SPLITS:
            for name, part in parts.items():
                self._prompts[split] += [self._adopted(name, prompt) for prompt in part.prompts(split)]

    @property
    def turn_weights(self) -> Mapping[str, float]:
        return self._weights

    @property
    def part_weights(self) -> Mapping[str, float]:
        """Of the environments' own terms. A whole reward, under the name of its part, is their sum: it weighs 0."""
        weights = dict.fromkeys(self._parts, 0.0)
        for name, part in self._parts.items():
            if isinstance(part, Weighs):
                weights |= {f"{name}/{own}": weight for own, weight in part.part_weights.items()}
        return weights

    def prompts(self, split: Split) -> list[Prompt]:
        """Those of one part after those of another; training takes them in turn."""
        return list(self._prompts[split])

    async def score(self, prompt: Prompt, completions: Sequence[str]) -> list[Reward | Failure]:
        part, own = self._of(prompt)
        return [_named(prompt.environment, verdict) for verdict in await part.score(own, completions)]

    async def score_tokens(
        self, prompt: Prompt, completions: Sequence[str], completion_ids: Sequence[Sequence[int]]
    ) -> list[Reward | Failure]:
        part, own = self._of(prompt)
        if not isinstance(part, ReadsTokens):
            return await self.score(prompt, completions)
        verdicts = await part.score_tokens(own, completions, completion_ids)
        return [_named(prompt.environment, verdict) for verdict in verdicts]

    def trial(self, prompt: Prompt) -> tuple[Environment, Prompt] | None:
        part, own = self._of(prompt)
        return part.trial(own) if isinstance(part, Tries) else None

    async def reply(self, prompt: Prompt, messages: Sequence[Message]) -> Message | None:
        part, own = self._of(prompt)
        return await part.reply(own, messages) if isinstance(part, Replies) else None

    def facts(self) -> dict[str, Any]:
        """Of each part that has some, by its name."""
        return {name: part.facts() for name, part in self._parts.items() if isinstance(part, Describes)}

    def demonstrations(self, split: Split) -> list[tuple[Prompt, str | Sequence[int]]]:
        """Of the parts that have some; ValueError where none has."""
        able = {name: part for name, part in self._parts.items() if isinstance(part, Demonstrates)}
        silent = [name for name in self._parts if name not in able]
        if not able:
            raise ValueError(f"cold_start.enabled=true needs a part with demonstrations, got {', '.join(silent)}")
        if silent:
            LOGGER.warning("nothing is demonstrated for %s: the cold start is about the other parts", ", ".join(silent))
        return [
            (self._adopted(name, prompt), text)
            for name, part in able.items()
            for prompt, text in part.demonstrations(split)
        ]

    def gold(self, prompt: Prompt) -> str | None:
        part, own = self._of(prompt)
        return part.gold(own) if isinstance(part, HasGold) else None

    def difficulty(self, prompt: Prompt) -> float | None:
        """Comparable within a part only."""
        part, own = self._of(prompt)
        return part.difficulty(own) if isinstance(part, Graded) else None

    def metrics(self) -> dict[str, float]:
        found = {name: part.metrics() for name, part in self._parts.items() if isinstance(part, Logs)}
        return {f"{name}/{metric}": value for name, metrics in found.items() for metric, value in metrics.items()}

    def follow(self, step: int, max_steps: int, epoch: float) -> None:
        for part in self._parts.values():
            if isinstance(part, Follows):
                part.follow(step, max_steps, epoch)

    def watched_by(self, watchdog: Watchdog) -> None:
        for part in self._parts.values():
            if isinstance(part, Watchable):
                part.watched_by(watchdog)

    def close(self) -> None:
        with ExitStack() as closing:  # all of them, also where one fails
            for part in self._parts.values():
                if isinstance(part, Closes):
                    closing.callback(part.close)

    def _adopted(self, name: str, own: Prompt) -> Prompt:
        """The prompt under the name of its part."""
        prompt = replace(own, id=f"{name}/{own.id}", environment=name)
        self._own[prompt.id] = own
        return prompt

    def _of(self, prompt: Prompt) -> tuple[Environment, Prompt]:
        """The part that judges it, and the prompt as that part made it."""
        return self._parts[prompt.environment], self._own[prompt.id]


def _named(name: str, verdict: Reward | Failure) -> Reward | Failure:
    """With the whole reward as a term of its own. What is no verdict at all stays what it is."""
    if not isinstance(verdict, Reward):
        return verdict
    own = verdict.parts or {"value": verdict.value}
    parts = {name: verdict.value, **{f"{name}/{term}": value for term, value in own.items()}}
    return replace(verdict, parts=parts)
