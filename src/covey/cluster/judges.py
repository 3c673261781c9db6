"""A learned judge on devices of its own: its processes score, and samplers need not hold it."""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from itertools import count
from typing import Any

from covey.cluster.serving import Answerers, Serving, lost
from covey.cluster.start import import_ray, prepare_actor
from covey.environments.base import SPLITS, Environment, Replies, Split, close_environment, follow, metrics_of
from covey.environments.episode import Episode, answered
from covey.types import Failure, Message, Prompt, Reward


class JudgeActor:
    """Holds the environment. Ray makes one in each process of devices.judge."""

    def __init__(self, make_environment: Callable[[], Environment], tokenizer: Any) -> None:
        """`tokenizer` is the policy's."""
        prepare_actor()
        self._environment = make_environment()
        self._environment.read_with(tokenizer)

    async def ready(self) -> bool:
        """Return True: the judge is loaded."""
        return True

    async def score(
        self, prompt: Prompt, completions: Sequence[str], completion_ids: Sequence[Sequence[int]] | None
    ) -> list[Reward | Failure]:
        """Judge completions, by their tokens too where these are given."""
        if completion_ids is None:
            return await answered(self._environment.score(prompt, completions))
        return await answered(self._environment.score_tokens(prompt, completions, completion_ids))

    async def reply(self, prompt: Prompt, messages: Sequence[Message]) -> Message | None:
        """Return the environment's next message."""
        return await answered(self._environment.reply(prompt, messages))

    async def follow(self, step: int, max_steps: int, epoch: float) -> None:
        """Tell the environment how far training is."""
        follow(self._environment, step, max_steps, epoch)

    async def metrics(self) -> dict[str, float]:
        """Return what the environment logged since this was last asked."""
        return metrics_of(self._environment)

    async def close(self) -> None:
        """Let go of worker processes."""
        close_environment(self._environment)


class JudgedElsewhere(Environment):
    """Has the processes of devices.judge score, in turns. Every sampler has one in the place of its environment."""

    def __init__(self, answerers: Answerers, turns: Mapping[str, int], serving: Serving | None = None) -> None:
        """`turns` are those of `turns_of`. `serving`, on rank 0, hears how far training is and is asked for its log."""
        self._ray = import_ray()
        self.answerers = answerers
        self._actors = answerers.actors()
        self.turns, self._serving = turns, serving
        self._turn = count()

    def prompts(self, split: Split) -> list[Prompt]:
        """Return none: prompts come with the tickets."""
        return []

    async def score(self, prompt: Prompt, completions: Sequence[str]) -> list[Reward | Failure]:
        return list(await self._ask("score", prompt, completions, None))

    async def score_tokens(
        self, prompt: Prompt, completions: Sequence[str], completion_ids: Sequence[Sequence[int]]
    ) -> list[Reward | Failure]:
        return list(await self._ask("score", prompt, completions, completion_ids))

    async def reply(self, prompt: Prompt, messages: Sequence[Message]) -> Message | None:
        message: Message | None = await self._ask("reply", prompt, messages)
        return message

    def episode(self, prompt: Prompt, seed: int) -> Episode | None:
        return Replies(self, prompt) if prompt.id in self.turns else None

    def max_turns(self, prompt: Prompt) -> int:
        return self.turns.get(prompt.id, 1)

    def follow(self, step: int, max_steps: int, epoch: float) -> None:
        if self._serving is not None:
            self._serving.answer([actor.follow.remote(step, max_steps, epoch) for actor in self._actors])

    def metrics(self) -> Mapping[str, float]:
        """Return means over the judges of what they logged. On rank 0 alone."""
        if self._serving is None:
            return {}
        found = self._serving.answer([actor.metrics.remote() for actor in self._actors])
        values: dict[str, list[float]] = {}
        for name, value in ((name, value) for one in found for name, value in one.items()):
            values.setdefault(name, []).append(value)
        return {name: sum(own) / len(own) for name, own in values.items()}

    def close(self) -> None:
        """Have the judges let go of their worker processes."""
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
    """Return the most turns of each prompt that the environment replies to, by the prompt's id.

    ValueError where a prompt has episodes that only who samples can play.
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
