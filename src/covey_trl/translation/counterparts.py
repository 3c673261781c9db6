"""Read the tables of other systems, and fill in covey's settings."""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal, DecimalException
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from covey.system.lookup import function_path_of_file, read_table
from covey_trl.device_map import device_of_map

Given = Mapping[str, str]
"""Foreign settings by their full names."""
HOLE = re.compile(r"<([^<>]*)>")
SUM = re.compile(r"([\w.]+)\s*([-+*/])\s*([\w.]+)")
ONLY_ID = re.compile(r"""\[\{["']?id["']?: *["']?([\w./-]+)["']?\}\]""")
"""A list of one environment of which nothing but its name is said."""
EMPTY = ("", "none", "null", "~")


@dataclass(frozen=True, slots=True)
class Translation:
    """Translation of foreign settings."""

    words: tuple[str, ...] = ()
    """Covey's words; none where nothing need be said, or nothing can."""
    note: str = ""
    """Reason why there are no words, or the difference."""


@dataclass(frozen=True, slots=True)
class Row:
    """Translation of one setting alone."""

    words: str = ""
    """Covey's words, {} or <v|MAP> standing for the value."""
    values: Mapping[str, str | None] | None = None
    """Words of each value, in small letters with "_"; None, and another value where `words` has none, have the note
    alone."""
    by: str = ""
    """A key of CONVERT, which converts the value to covey's unit."""
    note: str = ""
    """Given with every answer; of values, where a value has no words."""

    def answer(self, value: str, maps: Mapping[str, Given]) -> Translation:
        if self.values is not None and (words := self.values.get(plain(value))) is not None:
            return Translation(tuple(words.split()), "" if words else self.note)
        if self.values is not None and not self.words:
            known = ", ".join(self.values)
            return Translation((), self.note or f"no counterpart for {value}; there is one for {known}")
        if not self.words:
            return Translation((), self.note)
        try:
            shown = CONVERT[self.by](value) if self.by else value
            template = "" if shown is None else self.words.replace("{}", "<v>")
            return Translation(_words(template, {"v": shown or ""}, maps), self.note)
        except (ValueError, DecimalException, yaml.YAMLError):  # no number, or not of a map
            return Translation((), self.note or f"no counterpart for {value}")


@dataclass(frozen=True, slots=True)
class Decision:
    """Settings that are translated together, in any order."""

    reads: Mapping[str, tuple[str, ...]]
    """Short name -> the settings that say it. The first that was typed counts, else the default of the first."""
    uses: Mapping[str, tuple[str, ...]]
    """The same of settings that it looks at, and that say something of their own besides."""
    cases: Sequence[Mapping[str, Any]]
    """`when`, `words` and `note`. The first that fits, and whose words can be filled in, counts."""

    @property
    def names(self) -> set[str]:
        return {name for names in self.reads.values() for name in names}

    @property
    def looked_at(self) -> set[str]:
        return {name for _, names in self._all for name in names}

    def answer(self, typed: Given, defaults: Given, maps: Mapping[str, Given]) -> Translation:
        """Translate all settings that it reads."""
        values = dict(self._values(typed, defaults))
        said = {short for short, names in self._all if any(name in typed for name in names)}
        for case in self.cases:
            if not all(_holds(short, wanted, values, said) for short, wanted in case.get("when", {}).items()):
                continue
            try:
                words = _words(case.get("words") or "", values, maps)
                return Translation(words, fill_in_text(case.get("note", ""), values, maps))
            except (ValueError, DecimalException):
                continue
        return Translation((), "covey has nothing like it")

    @property
    def _all(self) -> list[tuple[str, tuple[str, ...]]]:
        return [*self.reads.items(), *self.uses.items()]

    def _values(self, typed: Given, defaults: Given) -> Iterator[tuple[str, str]]:
        for short, names in self._all:
            found = next((given[name] for given in (typed, defaults) for name in names if name in given), None)
            if found is not None:
                yield short, found.strip("'\"")


@dataclass(frozen=True, slots=True)
class System:
    """Program whose settings are translated, by one file of this folder."""

    name: str
    settings: Mapping[str, Row]
    decisions: Sequence[Decision]
    defaults: Given
    variants: Mapping[str, Given]
    """Name of a file of its settings -> the defaults that are other ones there."""
    maps: Mapping[str, Given]
    aliases: Given
    """Other names of settings, of other versions."""
    prefixes: Given
    """Notes on other settings, by prefix of the name. The first match counts."""
    programs: re.Pattern[str]
    others: re.Pattern[str]
    """Its programs that train by something else."""
    sections: tuple[str, ...]
    not_carried: Sequence[str]
    """Defaults of it that no setting of covey's reproduces."""

    def has(self, name: str) -> bool:
        """Check that it translates a setting."""
        decided = any(name in decision.names for decision in self.decisions)
        return decided or name in self.settings or any(name.startswith(prefix) for prefix in self.prefixes)

    def row(self, name: str, value: str) -> Translation | None:
        """Translate a setting alone, None for unknown names."""
        if name in self.settings:
            return self.settings[name].answer(value, self.maps)
        note = next((note for prefix, note in self.prefixes.items() if name.startswith(prefix)), None)
        return None if note is None else Translation((), note)


def _words(template: str, values: Given, maps: Mapping[str, Given]) -> tuple[str, ...]:
    return tuple(fill_in_text(word, values, maps) for word in template.split())


def plain(value: str) -> str:
    return value.strip("'\"").lower().replace("-", "_")


def _holds(short: str, wanted: Any, values: Given, said: set[str]) -> bool:
    """Check a condition: value, list, typed, absent, set, ~part, >0, >=batch."""
    if isinstance(wanted, list):
        return any(_holds(short, one, values, said) for one in wanted)
    value = values.get(short, "")
    text = "" if wanted is None else str(wanted)
    if text in ("typed", "absent"):
        return (short in said) == (text == "typed")
    if text == "set":
        return short in values
    if text.startswith("~"):
        return text[1:] in value
    if compared := re.fullmatch(r"(>=|>)(.+)", text):
        try:
            left, right = Decimal(value), Decimal(_compute(compared[2], values))
        except (DecimalException, ValueError):
            return False
        return left >= right if compared[1] == ">=" else left > right
    if plain(value) in EMPTY or plain(text) in EMPTY:
        return plain(value) in EMPTY and plain(text) in EMPTY
    try:
        return Decimal(value) == Decimal(text)
    except DecimalException:
        return plain(value) == plain(text)


def fill_in_text(text: str, values: Given, maps: Mapping[str, Given]) -> str:
    """Fill in <NAME>, <NAME|MAP>, <NAME|CONVERTER> and <1+NAME>. ValueError without a value."""

    def fill(found: re.Match[str]) -> str:
        expression, _, by = found[1].partition("|")
        value = _compute(expression, values)
        if by in maps:
            value = maps[by].get(plain(value), "")
        elif by:
            value = CONVERT[by](value) or ""
        if plain(value) in EMPTY:
            raise ValueError(f"no value for {found[1]}")
        return value

    return HOLE.sub(fill, text)


def _compute(expression: str, values: Given) -> str:
    """Compute a number, name or sum; whole quotients round down."""
    if found := SUM.fullmatch(expression):
        left, right = (Decimal(_compute(side, values)) for side in (found[1], found[3]))
        if found[2] == "/":
            whole = left == int(left) and right == int(right) and left >= right
            return f"{max(1, left // right) if whole else left / right}"
        return f"{ {'+': left + right, '-': left - right, '*': left * right}[found[2]]:f}"
    if expression in values:
        return values[expression]
    return str(Decimal(expression))


def list_names(value: str) -> str:
    """List names without brackets and quotes."""
    return ",".join(re.findall(r"[\w.*+-]+", value))


def _above_0(value: str) -> str | None:
    return None if plain(value) in EMPTY or float(value) < 1 else str(int(float(value)))


CONVERT: dict[str, Callable[[str], str | None]] = {
    "whole": lambda value: str(int(float(value))),
    "above_0": _above_0,
    "never": lambda value: str(max(0, int(float(value)))),
    "named": lambda value: None if plain(value) in EMPTY else value,
    "truth": lambda value: {"1": "true", "0": "false"}.get(value, value.lower()),
    "listed": list_names,
    "first": lambda value: list_names(value).split(",")[0],
    "second": lambda value: list_names(value).split(",")[1] if "," in list_names(value) else None,
    "trackers": lambda value: ",".join(name for name in ("tensorboard", "wandb") if name in value) or None,
    "device": lambda value: device_of_map(yaml.safe_load(value)),  # which may be written as JSON
    "only_id": lambda value: found[1] if (found := ONLY_ID.fullmatch(value)) else None,
    "module": lambda value: None if value.startswith("/") else function_path_of_file(f"{value}:")[:-1],
}
"""Converters of foreign values to covey's; None where no value needs to be set. ValueError where it is none."""


@cache
def system(name: str) -> System:
    """Read the file of one program."""
    table = read_table(Path(__file__).with_name(f"{name}.yaml"))
    short: Given = table.get("short", {})

    def full(named: str) -> str:
        head, dot, rest = named.partition(".")
        return f"{short[head]}.{rest}" if dot and head in short else named

    def texts(given: Mapping[Any, Any]) -> dict[str, str]:
        return {full(str(key)): _text(value) for key, value in given.items()}

    def read(given: Mapping[str, Any]) -> dict[str, tuple[str, ...]]:
        return {key: tuple(map(full, [named] if isinstance(named, str) else named)) for key, named in given.items()}

    def decision(given: Mapping[str, Any]) -> Decision:
        return Decision(read(given["reads"]), read(given.get("uses", {})), given["cases"])

    return System(
        name=name,
        settings={full(one): _row(row) for names, row in table["settings"].items() for one in str(names).split()},
        decisions=[decision(one) for one in table.get("decisions", ())],
        defaults=texts(table.get("defaults", {})),
        variants={key: texts(given) for key, given in table.get("variants", {}).items()},
        maps={key: {plain(_text(k)): _text(v) for k, v in own.items()} for key, own in table.get("maps", {}).items()},
        aliases=table.get("aliases", {}),
        prefixes=table.get("prefixes", {}),
        programs=re.compile(table.get("programs") or "(?!)"),
        others=re.compile(table.get("others") or "(?!)"),
        sections=tuple(table.get("sections", "").split()),
        not_carried=table.get("not_carried", ()),
    )


def _row(row: Any) -> Row:
    if isinstance(row, str):
        return Row(row)
    values = row.get("values")
    if values is not None:
        said = {plain(_text(key)): words for key, words in values.items()}
        values = said | {number: said[word] for number, word in (("1", "true"), ("0", "false")) if word in said}
    return Row(row.get("words", ""), values, row.get("by", ""), row.get("note", ""))


def _text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else "" if value is None else str(value)
