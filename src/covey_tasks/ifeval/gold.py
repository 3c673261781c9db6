"""Gold answers to generated prompts, as demonstrations and proof of feasibility.

The answers say little; they show form.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import cycle, islice, pairwise, product
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
