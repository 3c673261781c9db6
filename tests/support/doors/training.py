"""Two steps of training through a endpoint, what a whole episode earns, and a place for somebody else's server."""

import json
import math
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from covey.environments.base import Environment
from covey.environments.settings import EnvironmentConfig
from covey.loop import train
from covey.types import Prompt, Reward

from ..small import small_config
from ..tools import play, run


def trained(environment: EnvironmentConfig, folder: Path | str = "run", **changes: Any) -> list[dict[str, Any]]:
    """The rollouts of two steps on the smallest model, whose losses are finite."""
    config = small_config(**changes)
    config.environment = environment
    train(config, folder)
    rows = [json.loads(line) for line in (Path(folder) / "metrics.jsonl").read_text().splitlines()]
    losses = [row["loss"] for row in rows if "loss" in row]
    assert len(losses) == 2
    assert all(math.isfinite(loss) for loss in losses)
    rollouts = [json.loads(line) for line in (Path(folder) / "rollouts.jsonl").read_text().splitlines()]
    assert rollouts
    return rollouts


def earned(environment: Environment, prompt: Prompt, actions: Sequence[str]) -> float:
    """What a whole episode is worth here."""

    async def whole() -> float:
        episode = environment.episode(prompt, 0)
        assert episode is not None
        said = await play(episode, actions)
        verdict = await episode.score(())
        assert isinstance(verdict, Reward)
        return verdict.value + sum(turn.reward or 0.0 for turn in said)

    return run(whole())


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])
