"""The environment: prompts with instructions that a program can check, and what completions of them are worth."""

from collections.abc import Mapping, Sequence

from covey.environments.base import Split
from covey.environments.ifeval.gold import gold_answer
from covey.environments.ifeval.instructions import CHECKS, Instruction
from covey.environments.ifeval.rewards import Scheme
from covey.environments.ifeval.verdicts import instructions_of
from covey.types import Failure, Prompt, Reward


class IFEval:
    """Environment of instructions. Its prompts come from `prompts.load`.

    >>> rows = [{"prompt": "Write. No commas.", "instruction_id_list": ["punctuation:no_comma"], "kwargs": [{}]}]
    >>> IFEval({"train": prompts.from_rows(rows, "train"), "test": []}, Scheme("strict"))
    """

    def __init__(self, prompts: Mapping[Split, Sequence[Prompt]], scheme: Scheme | None = None) -> None:
        self._prompts = {split: list(found) for split, found in prompts.items()}
        self._scheme = scheme or Scheme()

    def prompts(self, split: Split) -> list[Prompt]:
        return list(self._prompts[split])

    async def score(self, prompt: Prompt, completions: Sequence[str]) -> list[Reward | Failure]:
        instructions = _instructions(prompt)
        return [self._scheme.reward(completion, instructions) for completion in completions]

    def gold(self, prompt: Prompt) -> str | None:
        """An answer that follows every instruction of a generated prompt; None for a row."""
        if "topic" not in prompt.columns:
            return None
        answer = gold_answer(prompt.columns["topic"], prompt.columns["style"], _instructions(prompt))
        return self._scheme.in_form(answer)

    def demonstrations(self, split: Split) -> list[tuple[Prompt, str]]:
        """The generated prompts with their gold answers. ValueError where all are rows, which have none."""
        golds = [(prompt, self.gold(prompt)) for prompt in self._prompts[split]]
        shown = [(prompt, gold) for prompt, gold in golds if gold is not None]
        if not shown:
            raise ValueError("environment=ifeval has demonstrations of generated prompts only, got rows from data.path")
        return shown

    def difficulty(self, prompt: Prompt) -> int:
        """The number of instructions."""
        return len(prompt.columns["instruction_id_list"])

    @property
    def part_weights(self) -> Mapping[str, float]:
        """What each part of the reward counts; those that only say which kinds were followed count nothing."""
        return {name.partition(":")[2]: 0.0 for name in CHECKS} | self._scheme.part_weights


def _instructions(prompt: Prompt) -> tuple[Instruction, ...]:
    return instructions_of(prompt.columns["instruction_id_list"], prompt.columns["kwargs"])
