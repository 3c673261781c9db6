"""Call the environment; convert its errors to `Failure` and check rewards."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from typing import TypeVar

from covey.environments.base import Environment
from covey.environments.episode import Episode, maybe_await
from covey.environments.reward_functions.call import problem_with
from covey.rollouts.attempt import Attempt
from covey.system.waits.watchdog import PromptWaits, ScoringTimeout
from covey.types import Failure, Prompt, Reward, RunStopped

LOGGER = logging.getLogger(__name__)

T = TypeVar("T")


async def call_env_async(
    waits: PromptWaits, prompt: Prompt, method: str, ask: Callable[[], Awaitable[T]], seconds: float | None = None
) -> T | Failure:
    """Call an environment's method; errors and timeouts become a Failure.

    `seconds` is the limit of environment.turn_timeout, besides timeouts.scoring.
    """
    name = f"{prompt.environment}.{method}"
    try:
        async with waits.scoring(prompt.environment, method), asyncio.timeout(seconds) as own:
            return await maybe_await(ask())
    except RunStopped:
        raise
    except ScoringTimeout as error:
        return Failure(str(error))
    # Foreign code: all that it raises is the system's failure, also a cancellation that is not this task's
    except (Exception, SystemExit, asyncio.CancelledError) as error:
        if isinstance(error, asyncio.CancelledError) and is_cancelled():
            raise
        if isinstance(error, TimeoutError) and own.expired():
            return Failure(f"{name} has not answered for {seconds:g} s (environment.turn_timeout={seconds:g})")
        return Failure(f"{name} raised {type(error).__name__}: {error}")


def is_cancelled() -> bool:
    """Return True if the current task was cancelled."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def call_env(prompt: Prompt, method: str, call: Callable[[], T]) -> T | Failure:
    """Call a synchronous method; an error becomes a Failure."""
    try:
        return call()
    except RunStopped:
        raise
    except (Exception, SystemExit) as error:  # foreign code, as above
        return Failure(f"{prompt.environment}.{method} raised {type(error).__name__}: {error}")


def new_episode(environment: Environment, prompt: Prompt, seed: int) -> Episode | Failure | None:
    """Return a new attempt, None without episodes, Failure for anything else."""
    made: object = call_env(prompt, "episode", lambda: environment.episode(prompt, seed))
    if made is None or isinstance(made, Episode | Failure):
        return made
    return Failure(f"{prompt.environment}.episode returned a {type(made).__name__} where an Episode or None is due")


async def close(waits: PromptWaits, prompt: Prompt, episode: Episode, seconds: float | None) -> None:
    """Close an episode, logging errors and timeouts."""
    try:
        failure = await call_env_async(waits, prompt, "close", episode.close, seconds)
    except RunStopped as error:
        failure = Failure(f"{prompt.environment}.close raised RunStopped: {error}")
    if failure is not None:
        LOGGER.warning("prompt %s: %s", prompt.id, failure.reason)


async def judge_texts(
    environment: Environment, waits: PromptWaits, prompt: Prompt, texts: Sequence[str], ids: Sequence[Sequence[int]]
) -> list[Reward | Failure]:
    """Return one checked verdict per completion."""
    given = list(texts), list(ids)  # its own, to change as it likes
    found = await call_env_async(waits, prompt, "score", lambda: environment.score_tokens(prompt, *given))
    return _each(prompt, found, len(texts))


async def judge_together(
    environment: Environment,
    waits: PromptWaits,
    prompt: Prompt,
    episodes: Sequence[Episode | Failure],
    attempts: Sequence[Attempt | Failure],
) -> None:
    """Judge a group's finished attempts before any is closed."""
    pairs = zip(episodes, attempts, strict=True)
    left = [(e, a) for e, a in pairs if not isinstance(e, Failure) and not isinstance(a, Failure)]
    if not left:
        return
    own, conversations = [episode for episode, _ in left], [attempt.conversation for _, attempt in left]
    found = await call_env_async(waits, prompt, "score", lambda: environment.score_group(prompt, own, conversations))
    for (_, attempt), verdict in zip(left, _each(prompt, found, len(left)), strict=True):
        attempt.verdict = verdict


def _each(prompt: Prompt, found: Sequence[Reward | Failure] | Failure, count: int) -> list[Reward | Failure]:
    """Return one verdict per completion, Failures for a wrong number."""
    name = f"{prompt.environment}.score"
    try:
        verdicts = [found] * count if isinstance(found, Failure) else list(found)
    except TypeError as error:
        verdicts = [Failure(f"{name} raised TypeError: {error}")] * count
    if len(verdicts) != count:
        return [Failure(f"{name} returned {len(verdicts)} verdicts for {count} completions")] * count
    return [check_verdict(verdict, prompt.environment) for verdict in verdicts]


def check_verdict(verdict: object, environment: str) -> Reward | Failure:
    """Return the verdict with plain floats, or a Failure."""
    if isinstance(verdict, Failure):
        return verdict
    if not isinstance(verdict, Reward):
        return Failure(f"{environment}.score returned a {type(verdict).__name__} where a Reward or Failure is due")
    if not isinstance(verdict.parts, Mapping):
        return Failure(f"{environment} gave a reward whose parts are no mapping but {verdict.parts!r:.80}")
    if problem_with(verdict.value):
        return Failure(f"{environment} gave the reward {verdict.value}")
    wrong = [name for name, part in verdict.parts.items() if problem_with(part)]
    if wrong:
        return Failure(f"{environment} gave the part {wrong[0]} of the reward {verdict.parts[wrong[0]]}")
    parts = {name: float(part) for name, part in verdict.parts.items()}
    return replace(verdict, value=float(verdict.value), parts=parts)
