"""What settings of environment=ifeval may change: prompts, and the worth of answers in and out of form."""

import asyncio
from typing import Any

from covey.config.schema import Config

from .settings_observed import environment_of

IFEVAL: dict[str, Any] = {
    "environment.name": "ifeval",
    "environment.num_train": 24,
    "environment.num_test": 8,
    "environment.kinds": ["punctuation:no_comma"],
    "environment.max_instructions": 1,
}
FEW = IFEVAL | {"environment.num_train": 4, "environment.num_test": 2}
TORCHRL = IFEVAL | {"environment.scheme": "torchrl"}
ROWS = {"environment.name": "ifeval", "data.path": "instructions.jsonl"}
ANSWERS = (
    "rivers carry silver stones slowly home it is",
    "rivers, carry silver stones slowly home it is",
    "<think>hm</think><answer>rivers carry silver stones slowly home it is</answer>",
    "<answer>rivers, carry silver\nstones slowly home it is</answer>",
)


def rewards(config: Config) -> list[float]:
    """Return those of answers about a prompt's topic that asks for no commas."""
    with environment_of(config) as environment:
        prompt = environment.prompts("train")[0]
        answers = [answer.replace("it is", prompt.columns["topic"]) for answer in ANSWERS]
        return [verdict.value for verdict in asyncio.run(environment.score(prompt, answers))]
