"""The words after a verb, checked and put in order before Hydra reads them: one line for a slip, never a usage text.

Imports the schema of the settings and nothing heavier.
"""

import difflib
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import fields
from decimal import Decimal
from typing import Any, get_type_hints

from covey.cli import help as usage
from covey.config.schema import ENVIRONMENT_SETTINGS, Config
from covey.system.section import Section

CONFIG_FLAG = "--config"
FLAGS = {
    "--help": 0, "-h": 0, "--hydra-help": 0, "--multirun": 0, "-m": 0, "--run": 0, "-r": 0, "--resolve": 0,
    "--info": 0, "-i": 0, "--cfg": 1, "-c": 1, "--package": 1, "-p": 1, "--config-name": 1, "-cn": 1,
    "--config-dir": 1, "-cd": 1, CONFIG_FLAG: 1,
}  # fmt: skip
"""Flags that may stand after a verb, with the number of words each takes."""
POWER_OF_TEN = re.compile(r"(?<![\w.])[+-]?\d+(?:\.\d+)?[eE]\+?\d+(?![\w.])")


def arrange(verb: str, words: Sequence[str]) -> list[str]:
    """Return flags first, as argparse needs them, then settings, whole numbers written out. Raises ValueError."""
    flags: list[str] = []
    settings: list[str] = []
    rest = list(words)
    # Split flags from settings
    while rest:
        word = rest.pop(0)
        if word.startswith("-"):
            flags += [word, *_values(verb, word, rest)]
        else:
            _refuse_slip(word, rest)
            settings.append(with_whole_numbers(word))
    # Refuse combinations that mean nothing
    if verb == "config" and {"-m", "--multirun"} & set(flags):
        raise ValueError("covey config prints one configuration; --multirun is for covey train")
    if verb == "train" and not settings and set(flags) <= {"-m", "--multirun", "-r", "--run"}:
        raise ValueError(
            "nothing says what to train: covey train recipe=arithmetic is a first run; "
            f"recipes: {', '.join(usage.group_choices()['recipe'])}; settings: covey train --help"
        )
    return [*flags, *settings]


def _values(verb: str, word: str, rest: list[str]) -> list[str]:
    """Take the words that a flag needs off the rest."""
    flag, equals, _ = word.partition("=")
    if flag not in FLAGS:
        raise ValueError(f'no flag "{flag}"{_meant(word, rest)}; see `covey {verb} --help`')
    count = 0 if equals else FLAGS[flag]
    if len(rest) < count:
        raise ValueError(f"{flag} needs a value")
    return [rest.pop(0) for _ in range(count)]


def _meant(word: str, rest: Sequence[str]) -> str:
    """Return what an unknown flag was meant to be: a setting, or another flag."""
    # Take the flag as a setting, with the next word as its value
    flag, equals, value = word.partition("=")
    name = flag.lstrip("-").replace("-", "_")
    if not equals:
        value = rest[0] if rest and not rest[0].startswith("-") and "=" not in rest[0] else "..."
    # The same name as a setting or group
    groups = usage.group_choices()
    if name in groups or name in _setting_types():
        return f"; settings are written {name}={value}"
    # A flag spelled alike
    close = difflib.get_close_matches(flag, list(FLAGS), n=1)
    if close:
        return f"; did you mean {close[0]}?"
    # What other libraries call a setting
    from covey.config.names import named_elsewhere, nearest  # imports Hydra

    known = list(_setting_types())
    found = named_elsewhere(name, known) or nearest(name, known)
    written = [other if "=" in other else f"{other}={value}" for other in found]
    return f"; did you mean {' or '.join(written)}?" if written else ""


def _refuse_slip(word: str, rest: Sequence[str]) -> None:
    """Refuse a word that sets nothing, or whose value stands behind a blank."""
    after = rest[0] if rest else ""
    # A blank beside "=" splits a word in two
    if word.endswith("=") and after and "=" not in after and not after.startswith(("-", "~")):
        raise ValueError(f"{word} is empty; write {word}{after} without a blank")
    if word == "hydra.run.dir=":
        raise ValueError("hydra.run.dir is empty; name the folder of the run")
    if "=" in word or word.startswith("~"):
        return
    if after.startswith("="):
        value = after[1:] or (rest[1] if len(rest) > 1 else "...")
        raise ValueError(f"{word} sets nothing; write {word}={value} without blanks")
    # A path or a choice without the name of what it sets
    if os.path.exists(word):
        raise ValueError(f'"{word}" sets nothing; did you mean model.name={word}?')
    groups = usage.group_choices()
    for group in ("recipe", *groups):
        if word in groups[group]:
            raise ValueError(f'"{word}" sets nothing; did you mean {group}={word}?')


def with_whole_numbers(word: str) -> str:
    """Return a word whose setting is an integer with powers of ten written out.

    >>> with_whole_numbers("num_steps=1e3"), with_whole_numbers("seed=1e1,2"), with_whole_numbers("optimizer.lr=1e3")
    ('num_steps=1000', 'seed=10,2', 'optimizer.lr=1e3')
    """
    # Only whole numbers may be written as 1e3
    name, equals, value = word.partition("=")
    kind = _setting_types().get(name.lstrip("+"))
    if not equals or kind not in (int, int | None, list[int]):
        return word

    def written_out(found: re.Match[str]) -> str:
        number = Decimal(found[0])
        return str(int(number)) if number == int(number) and abs(number) < Decimal(10) ** 20 else found[0]

    return f"{name}={POWER_OF_TEN.sub(written_out, value)}"


def _setting_types() -> dict[str, Any]:
    """Return the type of each setting by its dotted name, int winning where environments differ."""
    found: dict[str, Any] = {}
    for name, kind in _walk(Config, ""):
        found[name] = kind if found.get(name) not in (int, int | None, list[int]) else found[name]
    return found


def _walk(section: type, prefix: str) -> Iterator[tuple[str, Any]]:
    hints = get_type_hints(section)
    for field in fields(section):
        kind, name = hints[field.name], f"{prefix}{field.name}"
        if isinstance(kind, type) and issubclass(kind, Section):
            yield from _walk(kind, f"{name}.")
        elif name == "environment":
            for environment in ENVIRONMENT_SETTINGS.values():
                yield from _walk(environment, "environment.")
        else:
            yield name, kind
