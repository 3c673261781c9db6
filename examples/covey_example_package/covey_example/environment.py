"""Write a number backwards: an environment with settings of its own."""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from covey.environments.base import Split
from covey.environments.settings import BuildSettings, EnvironmentConfig, Say
from covey.system.setting import setting
from covey.types import Failure, Prompt, Reward


@dataclass
class BackwardsConfig(EnvironmentConfig):
    """Numbers to write backwards."""

    name: str = "backwards"
    digits: int = setting(3, ge=1, le=6)
    """Digits of a number."""
    num_test: int = setting(8, ge=1)
    """Held-out numbers; all others train."""

    knows_right: ClassVar[bool] = True

    def build(self, run: BuildSettings, say: Say) -> "Backwards":
        return Backwards(self)

    def check(self, run: BuildSettings) -> None:
        most = 9 * 10 ** (self.digits - 1)
        if self.num_test >= most:
            raise ValueError(f"environment.num_test must be < {most} (numbers of that length), got {self.num_test}")


class Backwards:
    """Prompts such as "123>", whose answer is "321"."""

    def __init__(self, settings: BackwardsConfig) -> None:
        numbers = list(range(10 ** (settings.digits - 1), 10**settings.digits))
        random.Random(0).shuffle(numbers)
        self._numbers = {"test": numbers[: settings.num_test], "train": numbers[settings.num_test :]}

    def prompts(self, split: Split) -> list[Prompt]:
        return [Prompt(f"{split}-{n}", "backwards", f"{n}>", {"answer": str(n)[::-1]}) for n in self._numbers[split]]

    async def score(self, prompt: Prompt, completions: Sequence[str]) -> list[Reward | Failure]:
        right = prompt.columns["answer"]
        shares = [
            sum(a == b for a, b in zip(text, right, strict=False)) / max(len(text), len(right)) for text in completions
        ]
        return [Reward(share, {"exact": float(share == 1)}) for share in shares]

    def gold(self, prompt: Prompt) -> str:
        return str(prompt.columns["answer"])
