"""Tools and answers of tests."""

import asyncio
import json
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, TypeVar

from covey.environments.base import Split
from covey.environments.episode import Answer, Episode, Observation
from covey.types import Failure, FinishReason, Message, Prompt, Reward
from covey_integrations.tools.environment import ToolEnvironment

T = TypeVar("T")


def multiply(a: int, b: int) -> int:
    """
    Multiply two numbers.

    Args:
        a: The first.
        b: The second.
    """
    return a * b


def say(word: str, times: int = 1, how: str | None = None) -> str:
    """
    Say a word.

    Args:
        word: What to say.
        times: How often.
        how: How (choices: ["loud", "low"])
    """
    return " ".join([word] * times)


def call(name: str, /, **arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def answer(text: str, turn: int = 1, talk: Sequence[Message] = (), finish: FinishReason = "stop") -> Answer:
    return Answer(text, (7,), finish, turn, (*talk, {"role": "assistant", "content": text}), text + "<|im_end|>")


def run(coroutine: Coroutine[Any, Any, T]) -> T:
    return asyncio.run(coroutine)


async def play(episode: Episode, texts: Sequence[str]) -> list[Observation]:
    """What an episode says to each of some answers, from `reset` on, until it is done."""
    said = [await episode.reset()]
    for turn, text in enumerate(texts, start=1):
        said.append(await episode.reply(answer(text, turn)))
        if said[-1].done:
            break
    await episode.close()
    return said


class Sums(ToolEnvironment):
    """Asks for products, and rewards those that are named."""

    functions: Sequence[Callable[..., Any]] = (multiply,)

    def prompts(self, split: Split) -> list[Prompt]:
        asked = [(6, 7), (12, 12), (3, 5)] if split == "train" else [(8, 9), (2, 4)]
        return [
            Prompt(
                f"{split}-{a}-{b}", "sums", ({"role": "user", "content": f"What is {a} * {b}?"},), {"product": a * b}
            )
            for a, b in asked
        ]

    async def score(self, prompt: Prompt, completions: Sequence[str]) -> list[Reward | Failure]:
        return [Reward(float(str(prompt.columns["product"]) in text)) for text in completions]
