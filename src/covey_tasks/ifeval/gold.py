"""Answers that follow the instructions of a generated prompt: demonstrations, and proof that it can be done.

The answers say little; they show form.
"""

import itertools
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from covey_graders.ifeval.checks.text_checks import AT_LEAST
from covey_graders.ifeval.instructions import NEED_LANGDETECT, Instruction
from covey_tasks.ifeval.kinds import MATERIAL

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
    for length, start in itertools.product(range(fewest, MAX_SENTENCES), starts):
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
    lines = [*_first_lines(wanted), body, *_last_lines(topic, wanted)]
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


def _asked_for(wanted: Arguments) -> list[str]:
    return [sentence for kind, write in CONTENT.items() if kind in wanted and (sentence := write(wanted[kind]))]


def _keywords(arguments: Mapping[str, Any]) -> str:
    return f"say {' and '.join(arguments['keywords'])}."


def _repeated_keyword(arguments: Mapping[str, Any]) -> str:
    if arguments["relation"] != AT_LEAST:
        return ""
    return f"say {' and '.join([arguments['keyword']] * arguments['frequency'])}."


def _placeholders(arguments: Mapping[str, Any]) -> str:
    pool, count = MATERIAL["placeholders"], arguments["num_placeholders"]
    names = [pool[index % len(pool)] for index in range(count)]
    return f"Ask for {' and '.join(f'[{name}]' for name in names)}."


def _highlights(arguments: Mapping[str, Any]) -> str:
    return f"Note {' and '.join(f'*point {n + 1}*' for n in range(arguments['num_highlights']))}."


def _capitals(arguments: Mapping[str, Any]) -> str:
    if arguments["capital_relation"] != AT_LEAST:
        return ""
    return f"Remember this {' '.join(['NOW'] * arguments['capital_frequency'])}."


def _laid_out(sentences: Sequence[str], wanted: Arguments) -> str:
    for kind, lay_out in LAYOUTS.items():
        if kind in wanted:
            return lay_out(sentences, wanted[kind])
    return " ".join(sentences)


def _parts(sentences: Sequence[str], num_parts: int) -> list[str]:
    bounds = [index * len(sentences) // num_parts for index in range(num_parts + 1)]
    return [" ".join(sentences[begin:end]) for begin, end in itertools.pairwise(bounds)]


def _paragraphs(sentences: Sequence[str], arguments: Mapping[str, Any]) -> str:
    return "\n***\n".join(_parts(sentences, arguments["num_paragraphs"]))


def _first_word(sentences: Sequence[str], arguments: Mapping[str, Any]) -> str:
    parts = _parts(sentences, arguments["num_paragraphs"])
    place = arguments["nth_paragraph"] - 1
    parts[place] = f"{arguments['first_word'].capitalize()} comes first. {parts[place]}".strip()
    return "\n\n".join(parts)


def _two(sentences: Sequence[str], arguments: Mapping[str, Any]) -> str:
    return "\n******\n".join(_parts(sentences, 2))


def _bullets(sentences: Sequence[str], arguments: Mapping[str, Any]) -> str:
    return "\n".join(f"- {part}" for part in _parts(sentences, arguments["num_bullets"]) if part)


def _sections(sentences: Sequence[str], arguments: Mapping[str, Any]) -> str:
    parts = _parts(sentences, arguments["num_sections"])
    return "\n".join(f"{arguments['section_spliter']} {n + 1}\n{part}" for n, part in enumerate(parts))


def _first_lines(wanted: Arguments) -> list[str]:
    return [
        str(arguments["prompt_to_repeat"]) for kind, arguments in wanted.items() if kind == "combination:repeat_prompt"
    ]


def _last_lines(topic: str, wanted: Arguments) -> list[str]:
    lines = [f"<<{topic}>>"] if "detectable_format:title" in wanted else []
    if "detectable_content:postscript" in wanted:
        lines.append(f"{wanted['detectable_content:postscript']['postscript_marker']} Write back soon.")
    if "startend:end_checker" in wanted:
        lines.append(str(wanted["startend:end_checker"]["end_phrase"]))
    return lines


CONTENT: dict[str, Callable[[Mapping[str, Any]], str]] = {
    "detectable_format:constrained_response": lambda arguments: "My answer is yes.",
    "keywords:existence": _keywords,
    "keywords:frequency": _repeated_keyword,
    "detectable_content:number_placeholders": _placeholders,
    "detectable_format:number_highlighted_sections": _highlights,
    "change_case:capital_word_frequency": _capitals,
}
"""Kind to the sentence that follows it."""
LAYOUTS: dict[str, Callable[[Sequence[str], Mapping[str, Any]], str]] = {
    "length_constraints:number_paragraphs": _paragraphs,
    "length_constraints:nth_paragraph_first_word": _first_word,
    "combination:two_responses": _two,
    "detectable_format:number_bullet_lists": _bullets,
    "detectable_format:multiple_sections": _sections,
}
"""Kind to the way sentences are arranged to follow it."""
