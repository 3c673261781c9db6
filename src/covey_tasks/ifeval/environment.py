"""Environment of prompts with instructions that a program can check."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial

from covey.environments.base import Environment, Split
from covey.environments.data.rows import row_settings
from covey.environments.settings import BuildSettings
from covey.types import Failure, Prompt, Reward
from covey_graders.ifeval.instructions import CHECKS, Instruction, instructions_of
from covey_graders.ifeval.topics import echoes, has_content, is_about, num_different_words, words_of
from covey_tasks.ifeval.generator import generate
from covey_tasks.ifeval.gold import gold_answer
from covey_tasks.ifeval.kinds import MATERIAL
from covey_tasks.ifeval.prompts import COLUMNS, from_requests, load, prompt_of
from covey_tasks.ifeval.rewards import NAMED, NO_ECHO, OWN, Scheme, scheme_of
from covey_tasks.ifeval.settings import IfevalConfig


class IFEval(Environment):
    """Environment of instructions. Its prompts come from `prompts.load`.

    >>> rows = [{"prompt": "Write. No commas.", "instruction_id_list": ["punctuation:no_comma"], "kwargs": [{}]}]
    >>> IFEval({"train": [prompts.prompt_of(row) for row in rows], "test": []}, Scheme("strict"))
    """

    def __init__(self, prompts: Mapping[Split, Sequence[Prompt]], scheme: Scheme | None = None) -> None:
        self._prompts = {split: list(found) for split, found in prompts.items()}
        self._scheme = scheme or Scheme()

    def prompts(self, split: Split) -> list[Prompt]:
        return list(self._prompts[split])

    async def score(self, prompt: Prompt, completions: Sequence[str]) -> list[Reward | Failure]:
        instructions = _instructions(prompt)
        scheme = replace(self._scheme, min_words=0) if prompt.columns.get("is_benchmark") else self._scheme
        return [scheme.reward(completion, instructions, _rules(prompt)) for completion in completions]

    def gold(self, prompt: Prompt) -> str | None:
        if "topic" not in prompt.columns:
            return None
        answer = gold_answer(prompt.columns["topic"], prompt.columns["style"], _instructions(prompt))
        return self._scheme.in_form(answer)

    def demonstrations(self, split: Split) -> list[tuple[Prompt, str]]:
        """Show the gold answers of generated prompts. ValueError where all are rows."""
        golds = [(prompt, self.gold(prompt)) for prompt in self._prompts[split]]
        shown = [(prompt, gold) for prompt, gold in golds if gold is not None]
        if not shown:
            raise ValueError("environment=ifeval has demonstrations of generated prompts only, got rows from data.path")
        return shown

    def difficulty(self, prompt: Prompt) -> int:
        return len(prompt.columns["instruction_id_list"])

    @property
    def part_weights(self) -> Mapping[str, float]:
        return {name.partition(":")[2]: 0.0 for name in CHECKS} | self._scheme.part_weights


def build_ifeval(settings: IfevalConfig, config: BuildSettings) -> Environment:
    scheme = scheme_of(settings)
    ask = scheme.instruction if settings.instruction is None else settings.instruction

    def generated() -> dict[Split, list[Prompt]]:
        requests = generate(settings)
        return {split: from_requests(found, split, settings.style, ask) for split, found in requests.items()}

    make = partial(prompt_of, instruction=ask)
    how_to_read = row_settings(config.data, COLUMNS, prompt=("prompt",), make=make)
    return IFEval(load(config.data.path, settings.benchmark, how_to_read, generated), scheme)


def _rules(prompt: Prompt) -> Callable[[str], Mapping[str, bool]]:
    """Make the rules of a generated prompt: whether a text answers it."""
    if "topic" not in prompt.columns:
        return lambda text: {}
    kinds, style, topic = (prompt.columns[name] for name in ("instruction_id_list", "style", "topic"))
    asked = prompt.text if isinstance(prompt.text, str) else str(prompt.text[-1]["content"])
    values = [value for given in prompt.columns["kwargs"] for value in given.values()]
    wanted = " ".join([topic, *(" ".join(v) if isinstance(v, list) else str(v) for v in values)])

    def rules(text: str) -> Mapping[str, bool]:
        is_full = style == "full" and WORDED not in kinds
        return {
            OWN: has_content(text, asked, OWN_WORDS) if is_full else num_different_words(text, words_of(asked)) > 0,
            NAMED: not NAMELESS.isdisjoint(kinds) or is_about(text, topic, TOPICS[style]),
            NO_ECHO: not echoes(text, asked, wanted),
        }

    return rules


def _instructions(prompt: Prompt) -> tuple[Instruction, ...]:
    return instructions_of(prompt.columns["instruction_id_list"], prompt.columns["kwargs"])


TOPICS = {"full": MATERIAL["topics"], "short": MATERIAL["short topics"]}
OWN_WORDS = 4
"""Different words that mean something, which an answer has and the prompt has not."""
WORDED = "detectable_format:constrained_response"
"""The prompt gives every word of the answer."""
NAMELESS = frozenset({"language:response_language", WORDED})
"""Kinds whose answers need not name the topic in the words of the prompt."""
