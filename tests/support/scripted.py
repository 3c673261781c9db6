"""An environment for tests: prompts and verdicts come from where the test says."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from covey.environments.base import Environment, Split
from covey.types import Failure, Prompt, Reward

Verdict = Reward | Failure | float


@dataclass(frozen=True)
class Scripted(Environment):
    """Scores with a plain function of (prompt, completion). Shows `answers` as demonstrations.

    >>> Scripted({"train": ["1+1="], "test": []}, lambda prompt, text: float(text == "2"))
    """

    texts: dict[Split, Sequence[str]]
    verdict: Callable[[Prompt, str], Verdict]
    """A float becomes a Reward with the part "value"; what it raises comes out of `score`."""
    answer: Callable[[str], str] = str
    """The good completion of a prompt text."""

    def prompts(self, split: Split) -> list[Prompt]:
        return [Prompt(f"{split}-{i}", "scripted", text, {}) for i, text in enumerate(self.texts[split])]

    async def score(self, prompt: Prompt, completions: Sequence[str]) -> list[Reward | Failure]:
        verdicts = [self.verdict(prompt, text) for text in completions]
        return [Reward(v, {"value": v}) if isinstance(v, float | int) else v for v in verdicts]

    def demonstrations(self, split: Split) -> list[tuple[Prompt, str]]:
        return [(prompt, self.answer(str(prompt.text))) for prompt in self.prompts(split)]
