"""Environment of prompts with instructions that a program can check."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import cycle, islice, pairwise, product
from typing import Any

from covey.environments.base import Environment, Split
from covey.environments.data.rows import row_settings
from covey.environments.settings import BuildSettings
from covey.types import Failure, Prompt, Reward
from covey_graders.ifeval.checks.text_checks import AT_LEAST
from covey_graders.ifeval.instructions import CHECKS, NEED_LANGDETECT, Instruction, instructions_of
from covey_graders.ifeval.topics import echoes, has_content, is_about, num_different_words, words_of
from covey_tasks.ifeval.generator import generate
from covey_tasks.ifeval.kinds import MATERIAL
from covey_tasks.ifeval.prompts import COLUMNS, from_requests, load, prompt_of, with_columns
from covey_tasks.ifeval.rewards import NAMED, NO_ECHO, OWN, Scheme
from covey_tasks.ifeval.settings import IfevalConfig


class IFEval(Environment):
    """Environment of instructions. Its prompts come from `prompts.load`.

    >>> rows = [{"prompt": "Write. No commas.", "instruction_id_list": ["punctuation:no_comma"], "kwargs": [{}]}]
    >>> IFEval({"train": [prompts.prompt_of(row) for row in rows], "test": []}, IfevalConfig(scheme="strict"))
    """

    def __init__(self, prompts: Mapping[Split, Sequence[Prompt]], settings: IfevalConfig | None = None) -> None:
        self._prompts = {split: list(found) for split, found in prompts.items()}
        self._scheme = Scheme(settings or IfevalConfig())
        self._of_benchmark = Scheme(replace(self._scheme.settings, min_words=0))

    def prompts(self, split: Split) -> list[Prompt]:
        return list(self._prompts[split])

    async def score(self, prompt: Prompt, completions: Sequence[str]) -> list[Reward | Failure]:
        instructions = _instructions(prompt)
        scheme = self._of_benchmark if prompt.columns.get("is_benchmark") else self._scheme
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
    ask = Scheme(settings).instruction if settings.instruction is None else settings.instruction

    def generated() -> dict[Split, list[Prompt]]:
        requests = generate(settings)
        return {split: from_requests(found, split, settings.style, ask) for split, found in requests.items()}

    make = partial(prompt_of, instruction=ask)
    how_to_read = replace(row_settings(config.data, COLUMNS, prompt=("prompt",), make=make), known=with_columns)
    return IFEval(load(config.data.path, settings.benchmark, how_to_read, generated), settings)


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


Arguments = Mapping[str, Mapping[str, Any]]
"""Kind of each instruction to its arguments."""

MAX_SENTENCES = 60


def gold_answer(topic: str, style: str, instructions: Sequence[Instruction]) -> str:
    """Write an answer of stock sentences, as short as the instructions allow."""
    wanted: Arguments = {asked.id: asked.arguments for asked in instructions}
    fast_first = sorted(instructions, key=lambda asked: asked.id in NEED_LANGDETECT)
    stock = _stock(topic, style, wanted)
    fewest = 3 if style == "full" else 1
    # Capitals are English to langdetect only with luck, so several beginnings are tried.
    starts = range(0, 16, 3) if "change_case:english_capital" in wanted else (0,)
    text = ""
    for length, start in product(range(fewest, MAX_SENTENCES), starts):
        text = _answer(topic, [stock(start + index) for index in range(length)], wanted)
        if all(asked.holds(text) for asked in fast_first):
            break
    return text


def _stock(topic: str, style: str, wanted: Arguments) -> Callable[[int], str]:
    if "language:response_language" in wanted:
        _, text = MATERIAL["languages"][wanted["language:response_language"]["language"]]
        foreign = [f"{sentence.strip()}." for sentence in text.split(".") if sentence.strip()]
        return lambda index: foreign[index % len(foreign)]
    templates = MATERIAL["short sentences"] if style == "short" else MATERIAL["sentences"]
    start = sum(topic.encode())  # another order for another topic
    kept = [template.replace(",", "") if "punctuation:no_comma" in wanted else template for template in templates]
    return lambda index: kept[(start + index) % len(kept)].format(topic=topic)


def _answer(topic: str, stock: Sequence[str], wanted: Arguments) -> str:
    body = _laid_out([*_asked_for(wanted), *stock], wanted)
    repeated = wanted.get("combination:repeat_prompt", {}).get("prompt_to_repeat", "")
    lines = [str(repeated), body, *_last_lines(topic, wanted)]
    text = "\n".join(line for line in lines if line)
    if "change_case:english_lowercase" in wanted:
        text = text.lower()
    if "change_case:english_capital" in wanted:
        text = text.upper()
    if "detectable_format:json_format" in wanted:
        return json.dumps({"answer": text})
    if "startend:quotation" in wanted:
        # Not on the line of a bullet, which would no longer begin with its mark.
        return f'"\n{text}"' if "detectable_format:number_bullet_lists" in wanted else f'"{text}"'
    return text


def _asked_for(wanted: Arguments) -> Iterator[str]:
    """Yield sentences with the content that instructions ask for."""
    if "detectable_format:constrained_response" in wanted:
        yield "My answer is yes."
    if given := wanted.get("keywords:existence"):
        yield f"say {' and '.join(given['keywords'])}."
    if (given := wanted.get("keywords:frequency")) and given["relation"] == AT_LEAST:
        yield f"say {' and '.join([given['keyword']] * given['frequency'])}."
    if given := wanted.get("detectable_content:number_placeholders"):
        names = islice(cycle(MATERIAL["placeholders"]), given["num_placeholders"])
        yield f"Ask for {' and '.join(f'[{name}]' for name in names)}."
    if given := wanted.get("detectable_format:number_highlighted_sections"):
        yield f"Note {' and '.join(f'*point {n + 1}*' for n in range(given['num_highlights']))}."
    if (given := wanted.get("change_case:capital_word_frequency")) and given["capital_relation"] == AT_LEAST:
        yield f"Remember this {' '.join(['NOW'] * given['capital_frequency'])}."


def _laid_out(sentences: Sequence[str], wanted: Arguments) -> str:
    """Arrange sentences as the one instruction about the layout asks for."""
    if given := wanted.get("length_constraints:number_paragraphs"):
        return "\n***\n".join(_parts(sentences, given["num_paragraphs"]))
    if given := wanted.get("length_constraints:nth_paragraph_first_word"):
        parts = _parts(sentences, given["num_paragraphs"])
        place = given["nth_paragraph"] - 1
        parts[place] = f"{given['first_word'].capitalize()} comes first. {parts[place]}".strip()
        return "\n\n".join(parts)
    if "combination:two_responses" in wanted:
        return "\n******\n".join(_parts(sentences, 2))
    if given := wanted.get("detectable_format:number_bullet_lists"):
        return "\n".join(f"- {part}" for part in _parts(sentences, given["num_bullets"]) if part)
    if given := wanted.get("detectable_format:multiple_sections"):
        parts = _parts(sentences, given["num_sections"])
        return "\n".join(f"{given['section_spliter']} {n + 1}\n{part}" for n, part in enumerate(parts))
    return " ".join(sentences)


def _parts(sentences: Sequence[str], num_parts: int) -> list[str]:
    bounds = [index * len(sentences) // num_parts for index in range(num_parts + 1)]
    return [" ".join(sentences[begin:end]) for begin, end in pairwise(bounds)]


def _last_lines(topic: str, wanted: Arguments) -> Iterator[str]:
    if "detectable_format:title" in wanted:
        yield f"<<{topic}>>"
    if given := wanted.get("detectable_content:postscript"):
        yield f"{given['postscript_marker']} Write back soon."
    if given := wanted.get("startend:end_checker"):
        yield str(given["end_phrase"])
