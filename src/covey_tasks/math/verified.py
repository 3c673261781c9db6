"""Shared base of environments whose answers math-verify may compare."""

import asyncio
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import replace

from covey.environments.base import Environment, Split
from covey.types import CutText, Failure, Prompt, Reward
from covey_graders.math.answers import find_answer
from covey_tasks.math.verifier import MathVerifier

MAX_ANSWER = 200
"""Characters of an answer that are told."""


class VerifiedAnswers(Environment):
    """Environment of prompts with gold answers, each completion judged by itself."""

    def __init__(self, prompts: Mapping[Split, Sequence[Prompt]], verifier: MathVerifier) -> None:
        self._prompts = prompts
        self._verifier = verifier

    @abstractmethod
    async def judged(self, prompt: Prompt, completion: str) -> Reward | Failure:
        """Judge one completion."""

    @abstractmethod
    def write_solution(self, prompt: Prompt) -> str:
        """Write the row's solution in the form that the scheme asks for."""

    def gold(self, prompt: Prompt) -> str | None:
        return self.write_solution(prompt)

    def demonstrations(self, split: Split) -> list[tuple[Prompt, str]]:
        return [(prompt, self.write_solution(prompt)) for prompt in self._prompts[split]]

    def prompts(self, split: Split) -> list[Prompt]:
        return list(self._prompts[split])

    async def score(self, prompt: Prompt, completions: Sequence[str]) -> list[Reward | Failure]:
        rewards = await asyncio.gather(*(self.judged(prompt, completion) for completion in completions))
        return [_with_feedback(reward, text) for reward, text in zip(rewards, completions, strict=True)]

    def difficulty(self, prompt: Prompt) -> int | None:
        level = prompt.columns.get("level")
        return level if isinstance(level, int) else None

    def metrics(self) -> dict[str, float]:
        return self._verifier.metrics()

    def close(self) -> None:
        self._verifier.close()


def _with_feedback(reward: Reward | Failure, completion: str) -> Reward | Failure:
    """Note which answer was not accepted, for a teacher."""
    if isinstance(reward, Failure) or reward.parts["correct"] == 1:
        return reward
    found = find_answer(completion, numeric=False, is_cut=isinstance(completion, CutText))
    said = "No answer was found."
    if found is not None and found.form != "none":
        said = f"The answer was not accepted: {found.text.strip()[:MAX_ANSWER]}"
    return replace(reward, extra={**reward.extra, "feedback": said})
