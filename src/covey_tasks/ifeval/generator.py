"""New instruction prompts, none of which is in the benchmark: requests put together from parts, 1 to 3 instructions.

A request names a form, a topic and a reader of `material`; instructions are drawn from those that go together
(`kinds.compatible`), with arguments an answer can follow. A prompt is a pure function of seed, split and its number.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

from covey.environments.base import Split
from covey_tasks.ifeval.kinds import MATERIAL, STYLES, Arguments, compatible
from covey_tasks.ifeval.settings import IfevalConfig

_ONE_OF_MANY = re.compile(r"\b1 (\w+)s\b")
_WORDS = re.compile(r"\b([Tt]he word)s\b")
ATTEMPTS = 50
"""Draws for each prompt that is asked for, before it is concluded that there are not so many."""


@dataclass(frozen=True, slots=True)
class Request:
    """A generated prompt: a row of IFEval's form, and what it is about.

    >>> Request("no commas. write about bees", "bees", ("punctuation:no_comma",), ({},))
    """

    text: str
    topic: str
    instruction_id_list: tuple[str, ...]
    kwargs: tuple[Arguments, ...]


@dataclass(frozen=True)
class Recipe:
    """What prompts are made of. ValueError for what cannot be."""

    style: str = "full"
    """full (whole sentences, all 25 kinds) or short (a few words, the eight kinds of `kinds.yaml`)."""
    kinds: Sequence[str] = ()
    """The kinds of instruction; empty takes all of the style."""
    max_instructions: int = 3
    seed: int = 0

    def __post_init__(self) -> None:
        if self.style not in STYLES:
            raise ValueError(f"style must be one of {', '.join(STYLES)}, got {self.style!r}")
        unknown = [kind for kind in self.kinds if kind not in STYLES[self.style]]
        if unknown:
            raise ValueError(
                f"kinds of style {self.style} must be among {', '.join(STYLES[self.style])}, got {unknown[0]}"
            )
        if len(set(self.kinds)) < len(self.kinds):
            raise ValueError(f"kinds must be different, got {', '.join(self.kinds)}")
        if self.max_instructions < 1:
            raise ValueError(f"max_instructions must be >= 1, got {self.max_instructions}")


def recipe_of(settings: IfevalConfig) -> Recipe:
    return Recipe(settings.style, tuple(settings.kinds), settings.max_instructions, settings.problem_seed)


def generate(recipe: Recipe, num_train: int, num_test: int) -> dict[Split, list[Request]]:
    """Generate different prompts for both splits, which share none. Raises ValueError where there are not so many."""
    if num_train < 1 or num_test < 1:
        raise ValueError(f"num_train and num_test must be >= 1, got {num_train} and {num_test}")
    found: dict[str, Request] = {}
    random = Random(f"ifeval {recipe.seed}")
    for _ in range(ATTEMPTS * (num_train + num_test)):
        request = _draw(recipe, random)
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


def _draw(recipe: Recipe, random: Random) -> Request:
    kinds = STYLES[recipe.style]
    names = _names(recipe.kinds or tuple(kinds), random.randint(1, recipe.max_instructions), random)
    arguments = [kinds[name].draw(random) for name in names]
    topic, ask = _ask(recipe.style, names, random)
    for name, drawn in zip(names, arguments, strict=True):
        if name == "combination:repeat_prompt":
            drawn["prompt_to_repeat"] = ask
    parts = [_worded(random.choice(kinds[name].wordings), drawn) for name, drawn in zip(names, arguments, strict=True)]
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


def _worded(template: str, arguments: Arguments) -> str:
    text = template.format(**{name: _shown(name, value) for name, value in arguments.items()})
    has_one = any(isinstance(value, list) and len(value) == 1 for value in arguments.values())
    return _ONE_OF_MANY.sub(r"1 \1", _WORDS.sub(r"\1", text) if has_one else text)


def _shown(name: str, value: Any) -> str:
    if name == "language":
        return MATERIAL["languages"][value][0]
    return " and ".join(value) if isinstance(value, list) else str(value)
