"""Everything that reads a model's text takes linear time: no deadline reaches a pattern that is being matched.

Every reader is given hostile pieces, repeated, at two lengths. A pattern that backtracks over what it has matched takes
16 times as long for four times the text, a linear one four times.
"""

import gc
import random
import re
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest

from covey.environments import arithmetic
from covey.environments.episode import Answer
from covey.rewards import LengthPenalty, Repetition, SentenceEnd, think_format
from covey_graders.code.extract import defines, extract_program, fenced_blocks
from covey_graders.ifeval.instructions import CHECKS, instruction, judge
from covey_graders.math.answers import find_answer
from covey_graders.math.equal import same_formula, same_spelling
from covey_graders.math.judge import compare
from covey_graders.math.layout import boxed_answer
from covey_graders.math.reading.normalize import plain
from covey_graders.math.reading.numerals import read_last, read_values
from covey_graders.tags import after_thoughts, visible, without_thoughts
from covey_integrations.openenv.environment import action_of
from covey_integrations.reasoning_gym import answer_in
from covey_integrations.tools.calls import hermes
from covey_tasks.ifeval.rewards import PLAIN, Scheme
from covey_tasks.ifeval.settings import IfevalConfig
from covey_tasks.machines.design.blocks import CAR_TYPES
from covey_tasks.machines.design.types import Rules
from covey_tasks.machines.prompts import FORMS
from covey_tasks.math import gsm8k, mathematics, schemes
from covey_tasks.math.countdown.environment import score as countdown_score
from covey_tasks.math.settings import CountdownConfig

SHORT, LONG = 4_000, 16_000
"""Characters."""
SUSPECT = 0.004
"""CPU seconds for the short text from which the long one is looked at: faster readers are within 4 s at 128,000."""
GROWTH = 9.0
"""Between linear (4) and quadratic (16)."""

ARGUMENTS: dict[str, Any] = {
    "keywords": ["a", "bb"],
    "keyword": "aa",
    "forbidden_words": ["a b", "aa"],
    "letter": "a",
    "language": "en",
    "first_word": "a",
    "postscript_marker": "(a+)+$",
    "section_spliter": "Day",
    "prompt_to_repeat": "aa",
    "end_phrase": "aa",
    "nth_paragraph": 1,
}
"""Arguments of instructions; all others are the number 2 or a relation."""
SAMPLES = {
    **{"language:response_language": 8, "change_case:english_capital": 8, "change_case:english_lowercase": 8},
    **{"change_case:capital_word_frequency": 60, "length_constraints:number_sentences": 60},
}
"""How many texts are tried where each takes long. langdetect cuts a text at 10,000 characters."""


def checks() -> Iterator[tuple[str, Callable[[str], object]]]:
    """A reader for each kind of instruction."""
    for kind, check in CHECKS.items():
        names = check.__kwdefaults__ or check.__annotations__
        given = {
            name: "at least" if name.endswith("relation") else ARGUMENTS.get(name, 2)
            for name in names
            if name not in ("text", "return")
        }
        asked = [instruction(kind, given)]
        yield kind, lambda text, asked=asked: judge(text, asked)


def readers() -> dict[str, Callable[[str], object]]:
    """Every public function that extracts something from a completion or judges it."""
    commas = [instruction("punctuation:no_comma", {})]
    plain_rules = CountdownConfig(answer_form="plain")
    found: dict[str, Callable[[str], object]] = {
        "without_thoughts": without_thoughts,
        "visible": visible,
        "find_answer": find_answer,
        "find_answer of any kind": lambda text: find_answer(text, numeric=False),
        "compare with a number": lambda text: compare(text, "42"),
        "compare with an expression": lambda text: compare(text, "x+1"),
        "read_values": read_values,
        "read_values strictly": lambda text: read_values(text, strict=True),
        "read_last": read_last,
        "plain": plain,
        "same_formula": lambda text: same_formula(text, "x+1"),
        "same_spelling": lambda text: same_spelling(text, "x+1"),
        "arithmetic": lambda text: arithmetic.score(text, 42),
        "gsm8k covey": lambda text: gsm8k.covey_reward(text, False, 0.1),
        "math covey": lambda text: mathematics.covey_reward(text, False, 0.1),
        "torchrl": lambda text: schemes.torchrl_reward(text, True),
        "boxed_answer": boxed_answer,
        "fenced_blocks": fenced_blocks,
        "extract_program": lambda text: extract_program(text, "f"),
        "extract_program after an opening": lambda text: extract_program(text, "f", "def f():\n"),
        "defines": lambda text: defines(text, "f"),
        "countdown tags": lambda text: countdown_score(text, [1, 2, 3], 6, CountdownConfig()),
        "countdown plain": lambda text: countdown_score(text, [1, 2, 3], 6, plain_rules),
        "ifeval answer": after_thoughts,
        "think_format": lambda text: think_format([text]),
        "sentence_end": lambda text: SentenceEnd()([text]),
        "length_penalty": lambda text: LengthPenalty(3)([text]),
        "repetition": lambda text: Repetition()([text.encode()]),
        "tool calls": lambda text: hermes(Answer(text, (), "stop", 1, ())),
        "reasoning_gym answer": answer_in,
        "openenv action": lambda text: action_of(text, {"required": ["a"]}),
    }
    rewards = gsm8k.TEXT_SCHEMES.items()
    found |= {f"gsm8k {name}": lambda text, score=score: score(text, "42") for name, score in rewards}
    found |= {
        f"ifeval {name}": partial(Scheme(IfevalConfig(scheme=name)).reward, instructions=commas)
        for name in (*PLAIN, "torchrl")
    }
    rules = Rules(CAR_TYPES)
    found |= {f"machine {name}": lambda text, form=form: form.read(text, rules) for name, form in FORMS.items()}
    return found | dict(checks())


READERS = readers()
UNITS = (
    *(
        "1",
        "1,",
        "1.",
        "1/",
        "1^",
        "(1",
        "a",
        "A",
        "a b",
        "a. ",
        "A. ",
        "x ",
        "\u00e9",
        "\u200b",
        " ",
        "\t",
        "\n",
        "\r",
    ),
    *(
        "\r\n",
        "1\n",
        "(",
        ")",
        "[",
        "]",
        "{",
        "}",
        "<",
        ">",
        "<<",
        "-",
        "- ",
        "=",
        "+",
        "*",
        "**",
        "***",
        "* ",
        "/",
        "^",
    ),
    *(
        "$",
        "#",
        "####",
        "#### ",
        "`",
        "```",
        "```\n",
        "~",
        "~~~~",
        '"',
        "'",
        "''",
        ".",
        ". ",
        ",",
        ";",
        ":",
        "!",
        "?",
        "|",
    ),
    *(
        "&",
        "\\",
        "_",
        "%",
        "\\boxed{",
        "\\boxed ",
        "\\fbox",
        "\\frac",
        "\\frac{",
        "\\text{",
        "\\text{ ",
        "\\sqrt",
        "{,}",
    ),
    *("<think>", "</think>", "<answer>", "</answer>", "Answer:", "answer is ", "the answer is ", "A:", "or ", "1 or "),
    *("not ", "is ", "P.S", "p. ", "Day 1", "def f", "f:", "\n- ", "\n\n", "[[", '{"a":', "Ba0", "1-", "-1"),
    "<tool_call>1",
)
OPENINGS = ("", "#### ", "\\boxed{", "<answer>", "```\n", "f:", "the answer is ")
OWN_OPENINGS = {
    "gsm8k": 1,
    "math": 2,
    "torchrl": 3,
    "countdown": 3,
    "ifeval": 3,
    "fenced": 4,
    "extract": 4,
    "defines": 5,
}
"""By how a reader's name begins; all others read sentences."""
ENDINGS = ("", "x", "`")


@pytest.mark.parametrize("name", READERS)
def test_readers_of_a_models_text_take_linear_time(name: str) -> None:
    opening = OPENINGS[OWN_OPENINGS.get(name.split()[0].split("_")[0], 6)]
    texts = [(opening, unit, ending) for unit in UNITS for ending in ENDINGS] + [("", unit, "") for unit in UNITS]
    assert superlinear(READERS[name], random.Random(0).sample(texts, SAMPLES.get(name, len(texts)))) == []


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in READERS if SAMPLES.get(name) != 8])
def test_they_do_so_for_every_opening_and_ending(name: str) -> None:
    texts = [(opening, unit, ending) for opening in OPENINGS for unit in UNITS for ending in ENDINGS]
    assert superlinear(READERS[name], texts) == []


@pytest.mark.long
def test_a_quadratic_pattern_is_found_and_a_linear_one_is_not() -> None:
    assert superlinear(re.compile("a*b").search, [("", "a", "")]) == [("", "a", "")]
    assert superlinear(re.compile("a*+b").match, [("", "a", "")]) == []


def superlinear(reader: Callable[[str], object], texts: list[tuple[str, str, str]]) -> list[tuple[str, str, str]]:
    """Return the texts, as opening, unit and ending, on which the time grows faster than linearly."""
    gc.disable()  # its rounds grow with the whole heap
    try:
        return [parts for parts in texts if seconds(reader, parts, SHORT) > SUSPECT and grows(reader, parts)]
    finally:
        gc.enable()


def grows(reader: Callable[[str], object], parts: tuple[str, str, str]) -> bool:
    """Compare the fastest of three readings, for other work on the machine makes some slow."""
    short, long = (min(seconds(reader, parts, length) for _ in range(3)) for length in (SHORT, LONG))
    return long > GROWTH * short


def seconds(reader: Callable[[str], object], parts: tuple[str, str, str], length: int) -> float:
    """Return the CPU time of one reading."""
    opening, unit, ending = parts
    text = opening + unit * (length // len(unit)) + ending
    began = time.process_time()
    reader(text)
    return time.process_time() - began
