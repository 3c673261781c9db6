"""Kinds of instruction for the generator: arguments, wordings, compatible pairs."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

from covey.system.lookup import read_table
from covey_graders.ifeval.checks.text_checks import RELATIONS

Arguments = dict[str, Any]
TABLE = read_table(Path(__file__).with_suffix(".yaml"))
MATERIAL = read_table(Path(__file__).with_name("material.yaml"))
"""Topics of generated prompts, and the words and sentences that they are made of."""


@dataclass(frozen=True, slots=True)
class Kind:
    """One kind of instruction in one style of prompt.

    >>> Kind({"num_bullets": [2, 7]}, ("Use exactly {num_bullets} bullet points.",))
    """

    arguments: Mapping[str, Any]
    """Name -> how it is drawn, in the words of `kinds.yaml`."""
    wordings: Sequence[str]
    """Templates over the arguments, of which one is drawn; lists are joined by "and"."""

    def draw(self, random: Random) -> Arguments:
        drawn: Arguments = {}
        for name, how in self.arguments.items():
            drawn |= _draw_argument(random, name, how, drawn)
        return drawn


def _draw_argument(random: Random, name: str, how: Any, before: Arguments) -> Arguments:
    """Draw one argument with its relation, after those drawn before."""
    if isinstance(how, list):
        low, high = how
        return {name: random.randint(low, high if isinstance(high, int) else before[high])}
    if not isinstance(how, dict):
        return {name: how}
    if "relation" in how:
        chosen = random.choice(RELATIONS)
        return {name: random.randint(*how[chosen]), how["relation"]: chosen}
    if "sample" in how:
        count = random.randint(*how["count"])
        return {name: random.sample(MATERIAL[how["sample"]], count)}
    pool = how[before[how["by"]]] if "by" in how else how["choose"]
    return {name: random.choice(pool if isinstance(pool, list) else list(MATERIAL[pool]))}


@cache
def compatible(first: str, second: str) -> bool:
    """Check whether one answer can follow both kinds of instruction."""
    few = TABLE["only with"]
    if first == second or second not in few.get(first, [second]) or first not in few.get(second, [first]):
        return False
    return not any(first in group and second in group for group in TABLE["exclusive"])


STYLES: Mapping[str, Mapping[str, Kind]] = {
    style: {name: Kind(row.get("draw", {}), row["ask"]) for name, row in TABLE[style].items()}
    for style in ("full", "short")
}
"""full: all 25 kinds; short: those that a model of a million parameters can learn in minutes."""
