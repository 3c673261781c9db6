"""A learned judge on its own devices."""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from itertools import count
from typing import Any

from covey.cluster.serving import Answerers, Serving, lost
from covey.cluster.start import import_ray, prepare_actor
from covey.environments.base import SPLITS, Environment, Replies, Split, close_environment, follow, metrics_of
from covey.environments.episode import Episode, maybe_await
from covey.types import Failure, Message, Prompt, Reward


class JudgeActor:
    """Holds the environment; Ray makes one in each process of devices.judge."""

    def __init__(self, make_environment: Callable[[], Environment], tokenizer: Any) -> None:
        prepare_actor()
        self._environment = make_environment()
        self._environment.read_with(tokenizer)

    async def ready(self) -> bool:
        return True

    async def score(
        self, prompt: Prompt, completions: Sequence[str], completion_ids: Sequence[Sequence[int]] | None
    ) -> list[Reward | Failure]:
        """Judge completions, by their tokens too where given."""
        if completion_ids is None:
            return await maybe_await(self._environment.score(prompt, completions))
        return await maybe_await(self._environment.score_tokens(prompt, completions, completion_ids))

    async def reply(self, prompt: Prompt, messages: Sequence[Message]) -> Message | None:
        return await maybe_await(self._environment.reply(prompt, messages))

    async def follow(self, step: int, max_steps: int, epoch: float) -> None:
        follow(self._environment, step, max_steps, epoch)

    async def metrics(self) -> dict[str, float]:
        return metrics_of(self._environment)

    async def close(self) -> None:
        close_environment(self._environment)


class JudgedElsewhere(Environment):
    """Stands in for a sampler's environment; devices.judge's processes score in turns."""

    def __init__(self, answerers: Answerers, turns: Mapping[str, int], serving: Serving | None = None) -> None:
        self._ray = import_ray()
        self.answerers = answerers
        self._actors = answerers.actors()
        self.turns, self._serving = turns, serving
        self._turn = count()

    def prompts(self, split: Split) -> list[Prompt]:
        """Return no prompts: they come with the tickets."""
        return []

    async def score(self, prompt: Prompt, completions: Sequence[str]) -> list[Reward | Failure]:
        return list(await self._ask("score", prompt, completions, None))

    async def score_tokens(
        self, prompt: Prompt, completions: Sequence[str], completion_ids: Sequence[Sequence[int]]
    ) -> list[Reward | Failure]:
        return list(await self._ask("score", prompt, completions, completion_ids))

    async def reply(self, prompt: Prompt, messages: Sequence[Message]) -> Message | None:
        return await self._ask("reply", prompt, messages)

    def episode(self, prompt: Prompt, seed: int) -> Episode | None:
        return Replies(self, prompt) if prompt.id in self.turns else None

    def max_turns(self, prompt: Prompt) -> int:
        return self.turns.get(prompt.id, 1)

    def follow(self, step: int, max_steps: int, epoch: float) -> None:
        if self._serving is not None:
            self._serving.answer([actor.follow.remote(step, max_steps, epoch) for actor in self._actors])

    def metrics(self) -> Mapping[str, float]:
        """Return means of the judges' metrics, on rank 0 alone."""
        if self._serving is None:
            return {}
        found = self._serving.answer([actor.metrics.remote() for actor in self._actors])
        values: dict[str, list[float]] = {}
        for name, value in ((name, value) for one in found for name, value in one.items()):
            values.setdefault(name, []).append(value)
        return {name: sum(own) / len(own) for name, own in values.items()}

    def close(self) -> None:
        """Release the judges' worker processes."""
        if self._serving is not None:
            with suppress(Exception):
                self._serving.answer([actor.close.remote() for actor in self._actors])

    async def _ask(self, method: str, *given: Any) -> Any:
        actor = self._actors[next(self._turn) % len(self._actors)]
        answer: Awaitable[Any] = getattr(actor, method).remote(*given)
        try:
            return await answer
        except self._ray.exceptions.RayError as error:
            raise lost(self.answerers.role, error) from error


def turns_of(environment: Environment, num_judges: int) -> dict[str, int]:
    """Return each prompt's most turns with environment replies, by prompt id.

    ValueError for episodes that only the sampling process can play.
    """
    turns = {}
    for prompt in (prompt for split in SPLITS for prompt in environment.prompts(split)):
        episode = environment.episode(prompt, 0)
        if episode is None:
            continue
        if not isinstance(episode, Replies) or environment.judges_groups(prompt) or environment.tool_schemas(prompt):
            raise ValueError(
                f"devices.judge={num_judges} judges answers, and environment={prompt.environment} has episodes, which "
                "are played and judged where groups are sampled: leave devices.judge out"
            )
        turns[prompt.id] = environment.max_turns(prompt)
    return turns
