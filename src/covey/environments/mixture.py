"""Mix environments: prompts round-robin, each judged by its own."""

import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from covey.environments.base import (
    SPLITS,
    Demonstration,
    Environment,
    EnvironmentLike,
    Split,
    adapt,
    close_environment,
    facts_of,
    follow,
    metrics_of,
    naming,
)
from covey.environments.episode import maybe_await
from covey.system.waits.watchdog import Watchdog
from covey.types import UNREWARDED, Failure, Prompt, Reward

LOGGER = logging.getLogger(__name__)


def _of_part(name: str) -> Callable[..., Any]:
    """Return a method that is the judging part's own."""

    def call(self: "Mixture", prompt: Prompt, *given: Any) -> Any:
        part, own = self.part_of(prompt)
        with naming(part, name):
            return getattr(part, name)(own, *given)

    return call


def _async_of_part(name: str, adds_term: bool = False) -> Callable[..., Any]:
    """Return such a method for one that may be async."""

    async def call(self: "Mixture", prompt: Prompt, *given: Any) -> Any:
        part, own = self.part_of(prompt)
        said = await maybe_await(getattr(part, name)(own, *given))
        return [_add_term(prompt.environment, verdict) for verdict in said] if adds_term else said

    return call


class Mixture(Environment):
    """Environment of named parts.

    `Prompt.environment` is that name, and the id begins with it. Rewards are logged under the name too, and
    below it in the environment's own terms: reward/sums, reward/sums/correct.
    """

    def __init__(self, parts: Mapping[str, EnvironmentLike], weights: Mapping[str, float]) -> None:
        """Adopt the parts' prompts; `weights` are relative, by default 1."""
        self._parts = {name: adapt(part) for name, part in parts.items()}
        self._weights = {name: weights.get(name, 1.0) for name in parts}
        self._prompts: dict[Split, list[Prompt]] = {split: [] for split in SPLITS}
        self._own: dict[str, Prompt] = {}
        for split in SPLITS:
            for name, part in self._parts.items():
                with naming(part, "prompts"):
                    self._prompts[split] += [self._adopted(name, prompt) for prompt in part.prompts(split)]

    @property
    def sampling_weights(self) -> Mapping[str, float]:
        return self._weights

    @property
    def part_weights(self) -> Mapping[str, float]:
        """Return the weights of parts' own terms; their totals weigh 0."""
        weights = dict.fromkeys(self._parts, 0.0)
        for name, part in self._parts.items():
            weights |= {f"{name}/{own}": weight for own, weight in part.part_weights.items()}
        return weights

    def prompts(self, split: Split) -> list[Prompt]:
        """Return the parts' prompts in order; training draws round-robin."""
        return list(self._prompts[split])

    score = _async_of_part("score", adds_term=True)
    score_tokens = _async_of_part("score_tokens", adds_term=True)
    reply = _async_of_part("reply")
    score_group = _async_of_part("score_group")
    dry_run = _of_part("dry_run")
    episode = _of_part("episode")
    judges_groups = _of_part("judges_groups")
    max_turns = _of_part("max_turns")
    tool_schemas = _of_part("tool_schemas")
    gold = _of_part("gold")
    gold_turn = _of_part("gold_turn")
    difficulty = _of_part("difficulty")  # comparable within a part only

    @property
    def can_reply(self) -> bool:
        return any(part.can_reply for part in self._parts.values())

    def facts(self) -> dict[str, Any]:
        return {name: facts for name, part in self._parts.items() if (facts := facts_of(part))}

    def demonstrations(self, split: Split) -> list[Demonstration]:
        """Return the parts' demonstrations. ValueError without any."""
        shown = {name: part.demonstrations(split) for name, part in self._parts.items()}
        silent = [name for name, found in shown.items() if not found]
        if len(silent) == len(shown):
            raise ValueError(f"cold_start.enabled=true needs a part with demonstrations, got {', '.join(silent)}")
        if silent:
            LOGGER.warning("nothing is demonstrated for %s: the cold start is about the other parts", ", ".join(silent))
        return [(self._adopted(name, prompt), text) for name, found in shown.items() for prompt, text in found]

    def metrics(self) -> dict[str, float]:
        found = {name: metrics_of(part) for name, part in self._parts.items()}
        return {f"{name}/{metric}": value for name, metrics in found.items() for metric, value in metrics.items()}

    def follow(self, step: int, max_steps: int, epoch: float) -> None:
        for part in self._parts.values():
            follow(part, step, max_steps, epoch)

    def read_with(self, tokenizer: Any) -> None:
        for part in self._parts.values():
            part.read_with(tokenizer)

    def watched_by(self, watchdog: Watchdog) -> None:
        for part in self._parts.values():
            part.watched_by(watchdog)

    def close(self) -> None:
        for part in self._parts.values():
            close_environment(part)

    def _adopted(self, name: str, own: Prompt) -> Prompt:
        prompt = replace(own, id=f"{name}/{own.id}", environment=name)
        self._own.setdefault(prompt.id, own)  # a demonstration may be called like a prompt, and be another
        return prompt

    def part_of(self, prompt: Prompt) -> tuple[Environment, Prompt]:
        """Return the judging part, and its own prompt."""
        return self._parts[prompt.environment], self._own[prompt.id]


def _add_term(name: str, verdict: Reward | Failure) -> Reward | Failure:
    if not isinstance(verdict, Reward) or UNREWARDED in verdict.parts:
        return verdict
    own = verdict.parts or {"value": verdict.value}
    parts = {name: verdict.value, **{f"{name}/{term}": value for term, value in own.items()}}
    return replace(verdict, parts=parts)
