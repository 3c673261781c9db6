"""Generate prompts of 1 to 3 instructions, none of the benchmark's.

A request names a form, a topic and a reader of `material`; instructions are drawn from those that go together
(`kinds.compatible`), with arguments an answer can follow. A prompt is a pure function of seed, split and its number.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

from covey.environments.base import Split
from covey.system.section import check_bounds
from covey_tasks.ifeval.kinds import MATERIAL, STYLES, Arguments, compatible
from covey_tasks.ifeval.settings import IfevalConfig

_ONE_OF_MANY = re.compile(r"\b1 (\w+)s\b")
_WORDS = re.compile(r"\b([Tt]he word)s\b")
ATTEMPTS = 50
"""Draws for each prompt that is asked for, before it is concluded that there are not so many."""


@dataclass(frozen=True, slots=True)
class Request:
    """A generated prompt as a row of IFEval's form, and its subject.

    >>> Request("no commas. write about bees", "bees", ("punctuation:no_comma",), ({},))
    """

    text: str
    topic: str
    instruction_id_list: tuple[str, ...]
    kwargs: tuple[Arguments, ...]


def check_kinds(settings: IfevalConfig) -> None:
    """Refuse (ValueError) settings that no prompt can be made of."""
    check_bounds(settings)
    style, kinds = settings.style, settings.kinds
    unknown = [kind for kind in kinds if kind not in STYLES[style]]
    if unknown:
        raise ValueError(f"kinds of style {style} must be among {', '.join(STYLES[style])}, got {unknown[0]}")
    if len(set(kinds)) < len(kinds):
        raise ValueError(f"kinds must be different, got {', '.join(kinds)}")


def generate(settings: IfevalConfig) -> dict[Split, list[Request]]:
    """Generate different prompts for both splits, which share none."""
    check_kinds(settings)
    num_train, num_test = settings.num_train, settings.num_test
    found: dict[str, Request] = {}
    random = Random(f"ifeval {settings.problem_seed}")
    for _ in range(ATTEMPTS * (num_train + num_test)):
        request = _draw(settings, random)
        found.setdefault(request.text, request)
        if len(found) == num_train + num_test:
            break
    else:
        raise ValueError(
            f"num_train + num_test = {num_train + num_test} needs more kinds or instructions: "
            f"{len(found)} different prompts were found"
        )
    requests = list(found.values())
    return {"train": requests[num_test:], "test": requests[:num_test]}


def _draw(settings: IfevalConfig, random: Random) -> Request:
    kinds = STYLES[settings.style]
    names = _names(settings.kinds or tuple(kinds), random.randint(1, settings.max_instructions), random)
    arguments = [kinds[name].draw(random) for name in names]
    topic, ask = _ask(settings.style, names, random)
    for name, drawn in zip(names, arguments, strict=True):
        if name == "combination:repeat_prompt":
            drawn["prompt_to_repeat"] = ask
    parts = [_word(random.choice(kinds[name].wordings), drawn) for name, drawn in zip(names, arguments, strict=True)]
    return Request(" ".join([ask, *parts]), topic, names, tuple(arguments))


def _names(pool: Sequence[str], count: int, random: Random) -> tuple[str, ...]:
    chosen: list[str] = []
    while len(chosen) < count:
        left = [name for name in pool if all(compatible(name, other) for other in chosen)]
        if not left:
            break
        chosen.append(random.choice(left))
    return tuple(chosen)


def _ask(style: str, names: Sequence[str], random: Random) -> tuple[str, str]:
    if style == "short":
        topic = random.choice(MATERIAL["short topics"])
        return topic, f"{topic}."
    topic = random.choice(MATERIAL["topics"])
    if "detectable_format:constrained_response" in names:
        return topic, random.choice(MATERIAL["questions"]).format(topic=topic)
    form, reader = random.choice(MATERIAL["forms"]), random.choice(MATERIAL["readers"])
    article = "an" if form[0] in "aeiou" else "a"
    return topic, f"Write {article} {form} about {topic}{reader}."


def _word(template: str, arguments: Arguments) -> str:
    text = template.format(**{name: _show(name, value) for name, value in arguments.items()})
    has_one = any(isinstance(value, list) and len(value) == 1 for value in arguments.values())
    return _ONE_OF_MANY.sub(r"1 \1", _WORDS.sub(r"\1", text) if has_one else text)


def _show(name: str, value: Any) -> str:
    if name == "language":
        return MATERIAL["languages"][value][0]
    return " and ".join(value) if isinstance(value, list) else str(value)
