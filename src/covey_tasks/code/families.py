"""Generated programming problems: statement, program and inputs (listed in docs/tasks/code.md).

Statements and programs are templates of `families.yaml`, whose parameters are drawn here. The programs are trusted:
they say what each test expects.
"""

import random
import string
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from string import Template
from typing import Any

from covey.system.lookup import read_table

Arguments = tuple[Any, ...]
TEMPLATES = read_table(Path(__file__).with_suffix(".yaml"))


@dataclass(frozen=True, slots=True)
class Draft:
    """A problem without its tests.

    >>> Draft("Python: f(n) returns n plus 7", "f", "def f(n): return n + 7", (inputs,))
    """

    statement: str
    entry_point: str
    solution: str
    inputs: tuple[Callable[[random.Random], Arguments], ...]
    """Arguments of one call, by kinds of calls, which take turns."""


Inputs = Callable[[random.Random], Arguments]
Family = Callable[[random.Random], Draft]


def _draft(family: str, *inputs: Inputs, **drawn: Any) -> Draft:
    told, solution = (Template(TEMPLATES[family][key]).substitute(drawn) for key in ("told", "solution"))
    return Draft(f"Python: {told}", told.partition("(")[0], solution, inputs)


NAMES = "fghjk"
WORDS = ("Fizz", "Buzz", "Bang", "Pop", "Zip", "Ding", "Hop", "Moo")


def line(rng: random.Random) -> Draft:
    name, constant = rng.choice(NAMES), rng.randint(2, 99)
    word, sign = rng.choice((("plus", "+"), ("minus", "-"), ("times", "*")))
    return _draft("line", _small_number, name=name, word=word, sign=sign, constant=constant)


def steps(rng: random.Random) -> Draft:
    name, factor, term = rng.choice(NAMES), rng.randint(2, 9), rng.randint(2, 99)
    word, sign = rng.choice((("plus", "+"), ("minus", "-")))
    if rng.random() < 0.5:
        rule, expression = f"n times {factor}, then {word} {term}", f"n * {factor} {sign} {term}"
    else:
        rule, expression = f"n {word} {term}, then times {factor}", f"(n {sign} {term}) * {factor}"
    return _draft("steps", _small_number, name=name, rule=rule, expression=expression)


def _small_number(rng: random.Random) -> Arguments:
    return (rng.randint(-50, 50),)


def fizzbuzz(rng: random.Random, num_words: int) -> Draft:
    divisors = sorted(rng.sample(range(2, 10), num_words))
    return _words_for_multiples(divisors, rng.sample(WORDS, num_words))


def _words_for_multiples(divisors: Sequence[int], words: Sequence[str]) -> Draft:
    pairs = list(zip(divisors, words, strict=True))
    listed = ", ".join(f'"{word}" for multiples of {divisor}' for divisor, word in pairs)
    parts = " + ".join(f'"{word}" * (n % {divisor} == 0)' for divisor, word in pairs)
    # Numbers by the words that they get: a program that forgets one kind must not pass
    alike: dict[tuple[bool, ...], list[int]] = {}
    for n in range(1, 12 * divisors[0] * divisors[1] + 1):
        alike.setdefault(tuple(n % divisor == 0 for divisor in divisors), []).append(n)

    def of(numbers: Sequence[int]) -> Inputs:
        return lambda rng: (rng.choice(numbers),)

    return _draft("fizzbuzz", *map(of, alike.values()), listed=listed, parts=parts)


def counting(rng: random.Random) -> Draft:
    divisor, limit = rng.randint(2, 9), rng.randint(5, 60)
    word, sign = rng.choice((("above", ">"), ("below", "<")))
    return _draft("counting", _numbers, divisor=divisor, limit=limit, word=word, sign=sign)


def _numbers(rng: random.Random) -> Arguments:
    return ([rng.randint(0, 80) for _ in range(rng.randint(0, 24))],)


def letters(rng: random.Random) -> Draft:
    shift, kept = rng.randint(1, 25), "".join(sorted(rng.sample(string.ascii_lowercase, 3)))
    alphabet = string.ascii_lowercase + " .,XY" + kept * 4
    return _draft(
        "letters",
        lambda rng: ("".join(rng.choices(alphabet, k=rng.randint(0, 20))),),
        shift=shift,
        kept=kept,
        listed=", ".join(kept),
    )


def digits(rng: random.Random) -> Draft:
    base, power = rng.randint(3, 16), rng.randint(1, 3)
    summed = {1: "digits", 2: "squares of the digits", 3: "cubes of the digits"}[power]
    term = f"(n % {base})" + f" ** {power}" * (power > 1)
    rounds = rng.randint(1, 4)
    times = "once" if rounds == 1 else f"{rounds} times"
    return _draft("digits", _large_number, base=base, summed=summed, term=term, rounds=rounds, times=times)


def _large_number(rng: random.Random) -> Arguments:
    return (rng.choice((0, rng.randint(1, 99), rng.randint(100, 10**6), 10**9 + rng.randint(0, 10**9))),)


PAIRS = ("()", "[]", "{}", "<>")
BRACKET_NAMES = ("balanced", "is_balanced", "matched", "is_valid", "check")


def parentheses(rng: random.Random) -> Draft:
    kinds, name = rng.sample(PAIRS, rng.randint(1, 3)), rng.choice(BRACKET_NAMES)
    yes, no = rng.choice((("True", "False"), ("1", "0"), ('"yes"', '"no"')))
    return _of_brackets("parentheses", kinds, name=name, yes=yes, no=no)


def nesting(rng: random.Random) -> Draft:
    kinds, wrong = rng.sample(PAIRS, rng.randint(1, 3)), rng.choice((-1, -2, -5, 99))
    return _of_brackets("nesting", kinds, wrong=wrong)


def _of_brackets(family: str, kinds: list[str], **drawn: Any) -> Draft:
    opening, closing = ("".join(kind[place] for kind in kinds) for place in (0, 1))
    return _draft(
        family, lambda rng: (_brackets(rng, kinds),), kinds=" ".join(kinds), opening=opening, closing=closing, **drawn
    )


def _brackets(rng: random.Random, kinds: list[str]) -> str:
    """Write matching brackets among letters, in half of the cases spoilt."""
    text, spoils = _matching(rng, kinds, 4), rng.random() < 0.5
    places = [index for index, c in enumerate(text) if c in "".join(kinds)]
    if not spoils or not places:
        return text if not spoils else text + rng.choice("".join(kinds))
    place = rng.choice(places)
    swapped = rng.choice(["", *(c for c in "".join(kinds) if c != text[place])])
    return text[:place] + swapped + text[place + 1 :]


def _matching(rng: random.Random, kinds: list[str], depth: int) -> str:
    if depth == 0:
        return rng.choice(("", "", "a", "b"))
    parts = []
    for _ in range(rng.randint(1, 2)):
        kind = rng.choice(kinds)
        parts.append(kind[0] + _matching(rng, kinds, rng.randint(0, depth - 1)) + kind[1])
    return "".join(parts)


def intervals(rng: random.Random) -> Draft:
    gap, name = rng.randint(0, 30), rng.choice(("join", "merge", "unite", "union"))

    def inputs(rng: random.Random) -> Arguments:
        furthest = 60 + 6 * gap  # so that gaps of either kind occur
        starts = [rng.randint(0, furthest) for _ in range(rng.randint(0, 7))]
        return ([[start, start + rng.randint(0, 9)] for start in starts],)

    return _draft("intervals", inputs, gap=gap, name=name)


OPERATORS = (("+", "a + b"), ("-", "a - b"), ("*", "a * b"), ("<", "min(a, b)"), (">", "max(a, b)"))


def postfix(rng: random.Random) -> Draft:
    meanings = rng.sample(OPERATORS, 3)
    symbols = rng.sample("+-*<>&|#@", 3)
    pairs = list(zip(symbols, (meaning for _, meaning in meanings), strict=True))
    case = '        elif token == "{}":\n            stack.append({})\n'
    cases = "".join(case.format(symbol, meaning) for symbol, meaning in pairs).replace("elif", "if", 1)
    listed = ", ".join(f'"{symbol}" gives {meaning}' for symbol, meaning in pairs)
    return _draft("postfix", lambda rng: (_expression(rng, symbols, 3),), cases=cases, listed=listed)


def _expression(rng: random.Random, symbols: list[str], depth: int) -> list[int | str]:
    if depth == 0 or rng.random() < 0.2:
        return [rng.randint(-9, 20)]
    return [*_expression(rng, symbols, depth - 1), *_expression(rng, symbols, depth - 1), rng.choice(symbols)]


def edits(rng: random.Random) -> Draft:
    insert, delete, replace = (rng.randint(1, 9) for _ in range(3))

    def inputs(rng: random.Random) -> Arguments:
        first = "".join(rng.choices("abc", k=rng.randint(0, 8)))
        return first, "".join(rng.choices("abc", k=rng.randint(0, 8)))

    return _draft("edits", inputs, insert=insert, delete=delete, replace=replace)


def chosen_families(problem: str, difficulty: int | None) -> list[tuple[str, int]]:
    """Return a setting's families by difficulty. ValueError without any."""
    names = MIXES.get(problem, (problem,))
    unknown = [name for name in names if name not in FAMILIES]
    if unknown:
        raise ValueError(f"problem must be one of {', '.join([*MIXES, *FAMILIES])}, got {problem}")
    levels = [(name, level) for name in names for level in FAMILIES[name]]
    fitting = [(name, level) for name, level in levels if difficulty in (None, level)]
    if not fitting:
        there_is = ", ".join(str(level) for level in sorted({level for _, level in levels}))
        raise ValueError(f"difficulty={difficulty} needs a problem that has it, got problem={problem} ({there_is})")
    return sorted(fitting, key=lambda found: found[1])


FAMILIES: dict[str, dict[int, Family]] = {
    "line": {1: line},
    "steps": {2: steps},
    "fizzbuzz": {3: partial(fizzbuzz, num_words=2), 4: partial(fizzbuzz, num_words=3)},
    "counting": {4: counting},
    "letters": {5: letters},
    "digits": {6: digits},
    "parentheses": {7: parentheses, 8: nesting},
    "intervals": {8: intervals},
    "postfix": {9: postfix},
    "edits": {10: edits},
}
"""Name of a family to its problems of each difficulty."""
CLASSIC_FIZZBUZZ = (
    'Python: fizzbuzz(n) returns "FizzBuzz" for multiples of both 3 and 5, "Fizz" for other multiples of 3, "Buzz" for '
    "other multiples of 5, else str(n)"
)
CLASSICS = {("fizzbuzz", 3): replace(_words_for_multiples((3, 5), ("Fizz", "Buzz")), statement=CLASSIC_FIZZBUZZ)}
"""Problems that everybody knows, by family and difficulty. Such a level trains on that one alone."""
MIXES: dict[str, Sequence[str]] = {"starters": ("line", "steps"), "all": tuple(FAMILIES)}
"""Names for several families; a randomly initialised policy learns the starters within minutes."""
