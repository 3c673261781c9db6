"""A grammar of one's own, read from a file in BNF: it draws sentences, and checks a text exactly.

    # The first rule is the sentence. Words stand for themselves, <names> for rules.
    <sentence> ::= <who> sings . | <who> sees <who> .
    <who> ::= the cat | <who> and <who>

Words are joined by blanks, but for punctuation, which follows its word. Rules may be recursive, in any way.
"""

import random
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from covey.environments.base import Split
from covey.environments.infill.grammar import is_held_out

Alternative = tuple[str, ...]
"""Words, and names of rules in angle brackets."""
NAME = re.compile(r"<[^<>\s]+>")
PUNCTUATION = frozenset(".,;:!?")
MAX_EXPANSIONS = 100
"""Rules of one sentence, beyond which the shortest alternatives are taken, so that every sentence ends."""
DRAWS = 8
"""Sentences drawn for each that is wanted, before a grammar is taken to have no others."""
LEAST: Mapping[Split, int] = {"train": 20, "test": 4}
"""Different sentences of each split, without which a judge learns the sentences and not the grammar."""

Item = tuple[str, int, int, int]
"""Of the chart: a rule, its alternative, how many of its symbols were read, and where it began."""


@dataclass(frozen=True)
class Grammar:
    """Rules by name, the sentence first.

    >>> Grammar({"<sentence>": (("one", "."), ("two", "."))}).has("two.")
    True
    """

    rules: Mapping[str, tuple[Alternative, ...]]

    @property
    def start(self) -> str:
        return next(iter(self.rules))

    def sentence(self, chance: random.Random) -> str:
        """Draw a sentence, each alternative of a rule as likely as the others."""
        shortest = _heights(self.rules)
        text, todo, expansions = "", [self.start], 0
        # Expand the leftmost symbol until only text is left
        while todo:
            symbol = todo.pop()
            if symbol not in self.rules:
                text += _joined(symbol, len(text))
                continue
            expansions += 1
            choices = self.rules[symbol]
            found = chance.choice(choices)
            # Past the limit, take the alternative that ends soonest
            if expansions > MAX_EXPANSIONS:
                found = min(choices, key=lambda one: max(shortest.get(part, 0) for part in one))
            todo += reversed(found)
        return text

    def sentences(self, counts: Mapping[Split, int], seed: str) -> dict[Split, list[str]]:
        """Draw different sentences for each split, as a pure function of the arguments. Fewer where there are no more.

        Raises ValueError where there are hardly any.
        """
        chance = random.Random(f"grammar/{seed}")
        found: dict[Split, dict[str, None]] = {split: {} for split in counts}
        for _ in range(DRAWS * sum(counts.values())):
            text = self.sentence(chance)
            split: Split = "test" if is_held_out(text) else "train"
            if len(found[split]) < counts[split]:
                found[split][text] = None
        # Refuse a grammar of too few sentences
        if any(len(found[split]) < least for split, least in LEAST.items()):
            number = " and ".join(f"{len(texts)} to {split}" for split, texts in found.items())
            raise ValueError(f"environment.grammar has too few different sentences: {number}, 20 and 4 are needed")
        return {split: list(texts) for split, texts in found.items()}

    def has(self, text: str) -> bool:
        """Return whether the whole text is exactly one sentence (Earley's chart, over characters)."""
        chart: list[dict[Item, None]] = [{} for _ in range(len(text) + 1)]
        chart[0] = dict.fromkeys(self._begun(self.start, 0))
        for place in range(len(text) + 1):
            agenda = list(chart[place])
            while agenda:
                for end, item in self._next(agenda.pop(), place, text, chart):
                    is_new = item not in chart[end]
                    chart[end][item] = None
                    agenda += [item] if is_new and end == place else []
        return any(item[0] == self.start and item[3] == 0 and self._is_read(item) for item in chart[-1])

    def _next(self, item: Item, place: int, text: str, chart: list[dict[Item, None]]) -> Iterator[tuple[int, Item]]:
        """Yield what follows from an item, and where it stands."""
        name, number, read, begin = item
        # A rule that was read is a symbol of what waited for it
        if self._is_read(item):
            waiting = [other for other in chart[begin] if self._symbol(other) == name]
            yield from ((place, (rule, which, done + 1, start)) for rule, which, done, start in waiting)
            return
        # A rule begins here, or a word stands here
        symbol = self.rules[name][number][read]
        if symbol in self.rules:
            yield from ((place, begun) for begun in self._begun(symbol, place))
        elif text.startswith(piece := _joined(symbol, place), place):
            yield place + len(piece), (name, number, read + 1, begin)

    def _begun(self, name: str, place: int) -> list[Item]:
        return [(name, number, 0, place) for number in range(len(self.rules[name]))]

    def _is_read(self, item: Item) -> bool:
        return item[2] == len(self.rules[item[0]][item[1]])

    def _symbol(self, item: Item) -> str | None:
        return None if self._is_read(item) else self.rules[item[0]][item[1]][item[2]]


def _joined(word: str, place: int) -> str:
    """Return a word as it stands at a place of a text, with the blank before it."""
    return word if place == 0 or set(word) <= PUNCTUATION else f" {word}"


def read_grammar(path: str) -> Grammar:
    """Read the grammar of a file. Raises ValueError that names the setting, the file and what is wrong with it."""
    try:
        lines = Path(path).expanduser().read_text(encoding="utf-8").splitlines()
        rules = _rules(lines)
        _check(rules)
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"environment.grammar={path} cannot be read: {error}") from error
    except ValueError as error:
        raise ValueError(f"environment.grammar={path} {error}") from error
    return Grammar(rules)


def _rules(lines: list[str]) -> dict[str, tuple[Alternative, ...]]:
    rules: dict[str, tuple[Alternative, ...]] = {}
    name = ""
    for number, line in enumerate(lines, start=1):
        text = line.strip()
        if not text or text.startswith("#"):
            continue
        # A rule, or further alternatives of the one above
        head, is_rule, body = text.partition("::=")
        if is_rule:
            name = head.strip()
            if not NAME.fullmatch(name) or name in rules:
                said = "is there twice" if name in rules else "is no name in angle brackets"
                raise ValueError(f"line {number}: {name or 'what stands before ::='} {said}")
        elif not text.startswith("|") or not name:
            raise ValueError(f"line {number}: must be <name> ::= words or <names> | others, got {text!r:.60}")
        found = [tuple(part.split()) for part in (body if is_rule else text[1:]).split("|")]
        if not all(found):
            raise ValueError(f"line {number}: an alternative of {name} is empty")
        rules[name] = (*rules.get(name, ()), *found)
    return rules


def _check(rules: Mapping[str, tuple[Alternative, ...]]) -> None:
    """Refuse (ValueError) rules that are missing, that nothing leads to, or that never end."""
    if not rules:
        raise ValueError("has no rules: write <sentence> ::= words or <names> | others")
    used = {symbol: name for name, found in rules.items() for one in found for symbol in one if NAME.fullmatch(symbol)}
    missing = [symbol for symbol in used if symbol not in rules]
    if missing:
        raise ValueError(f"has no rule {missing[0]}, which {used[missing[0]]} names")
    # Follow the rules from the sentence
    reached = [next(iter(rules))]
    for name in reached:  # grows while it is walked through
        symbols = dict.fromkeys(symbol for one in rules[name] for symbol in one)
        reached += [symbol for symbol in symbols if symbol in rules and symbol not in reached]
    idle = [name for name in rules if name not in reached]
    if idle:
        raise ValueError(f"has a rule that nothing leads to from {reached[0]}: {idle[0]}")
    heights = _heights(rules)
    endless = [name for name in rules if name not in heights]
    if endless:
        raise ValueError(f"has a rule that never ends: {endless[0]}")


def _heights(rules: Mapping[str, tuple[Alternative, ...]]) -> dict[str, int]:
    """Return how many rules stand above one another in the flattest text of each rule that has an end."""
    heights: dict[str, int] = {}
    for height in range(1, len(rules) + 1):
        ending = [
            name
            for name, found in rules.items()
            if name not in heights and any(all(part not in rules or part in heights for part in one) for one in found)
        ]
        heights |= dict.fromkeys(ending, height)
    return heights
