"""Rewards of verdicts.

| scheme       | judges                                   | reward                                              |
|--------------|------------------------------------------|-----------------------------------------------------|
| strict       | the response less its thoughts           | 1 where every instruction is followed strictly      |
| strict_share | the response less its thoughts           | the share of instructions followed strictly         |
| loose        | the response less its thoughts           | 1 where every instruction is followed loosely       |
| loose_share  | the response less its thoughts           | the share of instructions followed loosely          |
| torchrl      | the first closed answer block, untrimmed | a weighted sum of the four, and bonuses for format  |

Under all but the last, a text with too few words earns nothing, nor does one that is not about what was asked: its
part `on_topic` is 0, and what it followed all the same stands in the other parts.
The last is the default reward of TorchRL's IfEvalScorer (pytorch/rl ae9719f1), 0 to 1.15.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from covey.system.section import check_bounds
from covey.types import Reward
from covey_graders.ifeval.instructions import Instruction, Verdicts, judge
from covey_graders.ifeval.topics import num_different_words
from covey_graders.tags import after_thoughts, blocks
from covey_tasks.ifeval.settings import IfevalConfig

ASK_TAGS = "Think inside <think></think> tags, then write your whole answer inside <answer></answer> tags."


@dataclass(frozen=True)
class Scheme:
    """Turns verdicts into a reward. ValueError for unknown names or wrong weights."""

    settings: IfevalConfig

    def __post_init__(self) -> None:
        check_bounds(self.settings)
        if len(weights := self.settings.measure_weights) != 4:
            raise ValueError(f"measure_weights must be four numbers, got {weights}")

    @property
    def name(self) -> str:
        return self.settings.scheme

    @property
    def instruction(self) -> str:
        return ASK_TAGS if self.name == "torchrl" else ""

    @property
    def part_weights(self) -> dict[str, float]:
        if self.name != "torchrl":
            return {FOLLOWED: 1.0, **dict.fromkeys((ON_TOPIC, *RULES, *MEASURES), 0.0)}
        measured = dict(zip(MEASURES, self.settings.measure_weights, strict=True))
        return measured | {"answer_block": self.settings.answer_bonus, "think_block": self.settings.think_bonus}

    def reward(
        self,
        completion: str,
        instructions: Sequence[Instruction],
        rules: Callable[[str], Mapping[str, bool]] = lambda text: {},
    ) -> Reward:
        """Return a completion's reward, its parts, and the kinds strictly followed.

        Args:
            rules: whether a text answers what was asked, by name; one that does not earns nothing (all but torchrl).
        """
        text, found = self._judge(completion)
        verdicts = judge(text, instructions)
        parts = measures(verdicts) | found
        feedback = _not_followed(instructions, verdicts.loose if "loose" in self.name else verdicts.strict)
        if self.name != "torchrl":
            has_words = num_different_words(text) >= self.settings.min_words
            kept = dict.fromkeys(RULES, True) | {WORDS: has_words, **rules(text)}
            on_topic = float(all(kept.values()))
            parts |= {name: float(holds) for name, holds in kept.items()}
            feedback += [BROKEN[name] for name, holds in kept.items() if not holds]
            parts |= {ON_TOPIC: on_topic, FOLLOWED: on_topic * parts[PLAIN[self.name]]}
        value = math.fsum(weight * parts[name] for name, weight in self.part_weights.items())
        noted = {"feedback": "\n".join(feedback)} if feedback else {}
        return Reward(value, parts | _find_followed(instructions, verdicts), noted)

    def in_form(self, answer: str) -> str:
        return f"<think>{answer[:40]}</think>\n<answer>{answer}</answer>" if self.name == "torchrl" else answer

    def _judge(self, completion: str) -> tuple[str, dict[str, float]]:
        if self.name != "torchrl":
            return after_thoughts(completion), {}
        answers, thoughts = blocks(completion, "answer"), blocks(completion, "think")
        counted = {"answer_block": float(len(answers) == 1), "think_block": float(len(thoughts) == 1)}
        return answers[0] if answers else "", counted


def _find_followed(instructions: Sequence[Instruction], verdicts: Verdicts) -> dict[str, float]:
    found: dict[str, float] = {}
    for asked, followed in zip(instructions, verdicts.strict, strict=True):
        name = asked.id.partition(":")[2]
        found[name] = min(found.get(name, 1.0), float(followed))
    return found


def _not_followed(instructions: Sequence[Instruction], verdicts: Sequence[bool]) -> list[str]:
    """Return a line for each instruction that was not followed.

    >>> _not_followed([Instruction("keywords:existence", {"keywords": ["lantern", "harbor"]})], [False])
    ['Not followed: keywords existence, keywords lantern, harbor.']
    """
    found = []
    for asked, followed in zip(instructions, verdicts, strict=True):
        values = ((name, value if isinstance(value, list) else [value]) for name, value in asked.arguments.items())
        words = [asked.id.replace(":", " "), *(f"{name} {', '.join(map(str, value))}" for name, value in values)]
        found += [] if followed else [f"Not followed: {', '.join(words).replace('_', ' ')}."]
    return found


def measures(verdicts: Verdicts) -> dict[str, float]:
    found = (verdicts.all_strict, verdicts.share_strict, verdicts.all_loose, verdicts.share_loose)
    return dict(zip(MEASURES, found, strict=True))


MEASURES = ("all_strict", "share_strict", "all_loose", "share_loose")
"""Measures in the order of TorchRL's weights."""
FOLLOWED, ON_TOPIC = "followed_on_topic", "on_topic"
"""The reward of the plain schemes, and whether the answer is about the question."""
RULES = WORDS, OWN, NAMED, NO_ECHO = ("has_words", "has_own_words", "names_topic", "is_no_echo")
"""The rules of that: enough words, some of its own that mean something, the topic, and not the prompt again."""
BROKEN = {
    WORDS: "The answer has too few words.",
    OWN: "The answer has too few words of its own.",
    NAMED: "The answer does not name the topic.",
    NO_ECHO: "The answer repeats the request.",
}
"""Words for a rule that does not hold."""
PLAIN = {"strict": "all_strict", "strict_share": "share_strict", "loose": "all_loose", "loose_share": "share_loose"}
"""The measure that is the reward."""
