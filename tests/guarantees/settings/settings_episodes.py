"""What settings of episodes may change: how long they last, what they read of the past, what small games answer."""

import asyncio
from dataclasses import asdict
from typing import Any

from covey.config.schema import Config
from covey.environments.episode import Answer
from covey.policy.models.loading import load_policy
from covey.run.build import episode_limits

from .settings_observed import environment_of

GUESS: dict[str, Any] = {"environment.name": "guess", "environment.num_demonstrations": 8}
LOOKUP: dict[str, Any] = {"environment.name": "lookup", "environment.num_train": 4, "environment.num_test": 2}
CALCULATOR: dict[str, Any] = {"environment.name": "calculator", "environment.num_train": 4, "environment.num_test": 2}
MOVES = ("15;", "Qa;", "C2*3;", "07;", "Qb;", "C4*5;")


def limits(config: Config) -> Any:
    """Where the episodes of a run end."""
    return asdict(episode_limits(config.environment, load_policy(config.model, seed=config.seed).max_length))


def heard(config: Config) -> Any:
    """What the environment says to moves of every game, in every problem."""

    async def play() -> Any:
        with environment_of(config) as environment:
            found = []
            for prompt in environment.prompts("train"):
                episode = environment.episode(prompt, seed=3)
                assert episode is not None
                for turn, move in enumerate(MOVES, 1):
                    said = await episode.reply(Answer(move, (), "stop", turn, ()))
                    found.append((said.messages, said.reward, said.state))
            return found

    return asyncio.run(play())


def shown(config: Config) -> Any:
    """What the cold start is shown."""
    with environment_of(config) as environment:
        return [said for _, said in environment.demonstrations("train")]
