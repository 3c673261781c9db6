"""What settings of environment=machines may change: prompts, demonstrations, and the worth of a few machines."""

import asyncio
from typing import Any

from covey.config.schema import Config
from covey.types import Failure
from covey_tasks.machines.environment import Machines

from .settings_observed import environment_of

MACHINES: dict[str, Any] = {
    "environment.name": "machines",
    "environment.num_train": 4,
    "environment.num_test": 2,
    "environment.num_demonstrations": 12,
}
OWN_DESIGNS: dict[str, Any] = {"environment.name": "machines", "environment.demonstrations": "designs.jsonl"}
COMPACT = MACHINES | {"environment.form": "compact"}
THROWING = COMPACT | {"environment.stages": ["catapult"]}
ANSWERS = ("nonsense", "Ba0Wb1Wb2", "Ba0Ba1Wb3Wb6Wc3Wc6")
"""What is no tree, what overlaps, and a car."""
CATAPULT = "Ba0Ba1Ba2Ba3Mb0Mc0Md0Me0Aa4Aj0Tk4Al2Cm6Qn0"
"""On a cross with ballast, a tower, a rotating block, an arm with a bowl."""


def judged(config: Config, *answers: str) -> list[float | str]:
    with environment_of(config) as environment:
        verdicts = asyncio.run(environment.score(environment.prompts("train")[0], answers))
    return [found.reason if isinstance(found, Failure) else found.value for found in verdicts]


def rewards(config: Config) -> list[float | str]:
    return judged(config, *ANSWERS)


def throws(config: Config) -> list[float | str]:
    return judged(config, CATAPULT)


def demonstrations(config: Config) -> Any:
    with environment_of(config) as environment:
        assert isinstance(environment, Machines)
        return [text for _, text in environment.demonstrations("train")]


def simulated(config: Config) -> dict[str, float]:
    """Of a machine that is built twice, one time after the other."""
    with environment_of(config) as environment:
        assert isinstance(environment, Machines)
        for _ in range(2):
            asyncio.run(environment.score(environment.prompts("train")[0], ANSWERS[2:]))
        return environment.metrics()
