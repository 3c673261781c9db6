"""Data sets of reasoning_gym by name: questions from a generator, one answer each, judged by the data set itself."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from covey.environments.base import Environment, Split, conversation
from covey.system.lookup import near
from covey.types import Failure, Prompt, Reward
from covey_graders.countdown import find_expression
from covey_graders.tags import without_thoughts
from covey_integrations.tools.calling import TookTooLong, called_in_time

WITHOUT_GOLD = frozenset({"boxnet", "graph_color", "propositional_logic", "rubiks_cube", "rush_hour"})
"""Data sets whose `answer` is no answer that they accept."""
SECONDS = 30.0
"""Timeout of one judgement, seconds."""
INSTRUCTION = "Give the answer between <answer> and </answer>."


class ReasoningGym(Environment):
    """One data set. The reward is that of its own `score_answer`, in [0, 1]."""

    def __init__(self, dataset: Any, name: str, counts: Mapping[Split, int], instruction: str = INSTRUCTION) -> None:
        """Take the first rows for training and the next ones for tests, without those whose question is known."""
        self._dataset = dataset
        self._name = name
        self._prompts: dict[Split, list[Prompt]] = {}
        known: set[str] = set()
        first = 0
        for split, count in counts.items():
            rows = [(index, dataset[index]) for index in range(first, first + count)]
            asked = [(index, row) for index, row in rows if row["question"] not in known]
            self._prompts[split] = [self._prompt(split, index, row, instruction) for index, row in asked]
            known |= {row["question"] for _, row in rows}
            first += count

    def _prompt(self, split: Split, index: int, row: Mapping[str, Any], instruction: str) -> Prompt:
        messages = conversation(str(row["question"]), instruction)
        return Prompt(f"{split}-{index}", "reasoning_gym", messages, {"entry": row})

    def prompts(self, split: Split) -> list[Prompt]:
        return list(self._prompts[split])

    async def score(self, prompt: Prompt, completions: Sequence[str]) -> list[Reward | Failure]:
        return [await self._judged(prompt, text) for text in completions]

    async def _judged(self, prompt: Prompt, text: str) -> Reward | Failure:
        """Judge one answer. One that the data set's own judge breaks on is worth nothing."""
        try:
            found = await called_in_time(
                self._dataset.score_answer,
                f"{self._name}.score_answer",
                SECONDS,
                answer=answer_in(text),
                entry=prompt.columns["entry"],
            )
            value = float(found)
        except TookTooLong:
            return Failure(f"{self._name}.score_answer took longer than {SECONDS:g} s")
        except (Exception, SystemExit):  # foreign code, that takes apart what the policy wrote
            value = math.nan
        is_sound = math.isfinite(value)
        return Reward(value if is_sound else 0.0, {"unreadable": float(not is_sound)})

    def gold(self, prompt: Prompt) -> str | None:
        answer = prompt.columns["entry"]["answer"]
        if self._name in WITHOUT_GOLD or answer is None:
            return None
        return f"<answer>{answer}</answer>"


def answer_in(text: str) -> str:
    """Return the text between the last tags, or all of it without tags, thoughts aside.

    >>> answer_in("so <answer> 42 </answer>"), answer_in("<think>41?</think> 42")
    ('42', '42')
    """
    return find_expression(text) or without_thoughts(text).strip()


def make_dataset(name: str, size: int, seed: int, options: Mapping[str, Any]) -> Any:
    """Return a data set of reasoning_gym. ValueError for a name it does not have, or options that do not fit."""
    import reasoning_gym
    from reasoning_gym.factory import DATASETS

    if name not in DATASETS:
        raise ValueError(f"environment.dataset={name} is none of reasoning_gym's{near(name, DATASETS)}")
    try:
        return reasoning_gym.create_dataset(name, size=size, seed=seed, **options)
    except (TypeError, AssertionError, ValueError) as error:
        said = " ".join(str(error).split()) or type(error).__name__
        raise ValueError(f"environment.options={dict(options)} do not fit {name}: {said}") from error
