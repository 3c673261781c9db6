"""Programming problems made from parameters: a statement, a right program, and inputs to try programs on.

| family      | difficulty | what the function does                                                        |
|-------------|------------|-------------------------------------------------------------------------------|
| line        | 1          | one operation with a constant                                                 |
| steps       | 2          | two operations, one after the other                                           |
| fizzbuzz    | 3, 4       | words for multiples of two numbers, of three                                  |
| counting    | 4          | counts the members of a list that meet a condition                            |
| letters     | 5          | shifts letters round the alphabet, with one kind of letter left alone         |
| digits      | 6          | repeats a sum over the digits in some base until one digit is left            |
| parentheses | 7, 8       | whether brackets of several kinds match; how deep they are nested             |
| intervals   | 8          | joins intervals that are near each other                                      |
| postfix     | 9          | evaluates an expression in postfix notation, its operators under other names  |
| edits       | 10         | the cheapest way to turn one text into another, with a price for each edit    |

The programs here are trusted: they say what each test expects.
"""

import random
import string
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

Arguments = tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class Draft:
    """A problem without its tests.

    >>> Draft("Python: f(n) returns n plus 7", "f", "def f(n): return n + 7", inputs)
    """

    statement: str
    entry_point: str
    solution: str
    inputs: Callable[[random.Random], Arguments]
    """Arguments of one call."""


Family = Callable[[random.Random], Draft]

NAMES = "fghjk"
WORDS = ("Fizz", "Buzz", "Bang", "Pop", "Zip", "Ding", "Hop", "Moo")


def line(rng: random.Random) -> Draft:
    name, constant = rng.choice(NAMES), rng.randint(2, 99)
    word, sign = rng.choice((("plus", "+"), ("minus", "-"), ("times", "*")))
    return Draft(
        f"Python: {name}(n) returns n {word} {constant}",
        name,
        f"def {name}(n): return n {sign} {constant}",
        _small_number,
    )


def steps(rng: random.Random) -> Draft:
    # Draw a rule
    name, factor, term = rng.choice(NAMES), rng.randint(2, 9), rng.randint(2, 99)
    word, sign = rng.choice((("plus", "+"), ("minus", "-")))
    if rng.random() < 0.5:
        told, expression = f"n times {factor}, then {word} {term}", f"n * {factor} {sign} {term}"
    else:
        told, expression = f"n {word} {term}, then times {factor}", f"(n {sign} {term}) * {factor}"
    # State it, and write the solution
    return Draft(
        f"Python: {name}(n) returns {told}",
        name,
        f"def {name}(n): return {expression}",
        _small_number,
    )


def _small_number(rng: random.Random) -> Arguments:
    return (rng.randint(-50, 50),)


def fizzbuzz(rng: random.Random, num_words: int) -> Draft:
    divisors = sorted(rng.sample(range(2, 10), num_words))
    return _words_for_multiples(divisors, rng.sample(WORDS, num_words))


def _words_for_multiples(divisors: Sequence[int], words: Sequence[str]) -> Draft:
    pairs = list(zip(divisors, words, strict=True))
    told = ", ".join(f'"{word}" for multiples of {divisor}' for divisor, word in pairs)
    parts = " + ".join(f'"{word}" * (n % {divisor} == 0)' for divisor, word in pairs)

    # Draw multiples of none, one or both
    def inputs(rng: random.Random) -> Arguments:
        chosen = rng.choice((1, *divisors, divisors[0] * divisors[1]))
        return (chosen * rng.randint(1, 12),)

    return Draft(
        f"Python: fizzbuzz(n) returns {told}, joined where several apply, else str(n)",
        "fizzbuzz",
        f"def fizzbuzz(n): return {parts} or str(n)",
        inputs,
    )


def counting(rng: random.Random) -> Draft:
    divisor, limit = rng.randint(2, 9), rng.randint(5, 60)
    word, sign = rng.choice((("above", ">"), ("below", "<")))
    return Draft(
        f"Python: count(numbers) returns how many of the numbers are multiples of {divisor} and {word} {limit}.",
        "count",
        f"def count(numbers): return sum(n % {divisor} == 0 and n {sign} {limit} for n in numbers)",
        lambda rng: ([rng.randint(0, 80) for _ in range(rng.randint(0, 24))],),
    )


def letters(rng: random.Random) -> Draft:
    # Draw a shift and the letters it leaves alone
    shift, kept = rng.randint(1, 25), "".join(sorted(rng.sample(string.ascii_lowercase, 3)))
    listed = ", ".join(kept)
    solution = (
        "def shift(text):\n"
        '    out = ""\n'
        "    for c in text:\n"
        f'        if "a" <= c <= "z" and c not in "{kept}":\n'
        f"            c = chr((ord(c) - 97 + {shift}) % 26 + 97)\n"
        "        out += c\n"
        "    return out"
    )
    # Mostly letters, among what must stay
    alphabet = string.ascii_lowercase + " .,XY" + kept * 4
    return Draft(
        f"Python: shift(text) moves each lower-case letter {shift} places on in the alphabet, "
        f"after z comes a, and leaves {listed} and every other character as it is.",
        "shift",
        solution,
        lambda rng: ("".join(rng.choices(alphabet, k=rng.randint(0, 20))),),
    )


def digits(rng: random.Random) -> Draft:
    # Draw base, power and number of rounds
    base, power = rng.randint(3, 16), rng.randint(1, 3)
    told = {1: "digits", 2: "squares of the digits", 3: "cubes of the digits"}[power]
    term = f"(n % {base})" + f" ** {power}" * (power > 1)
    rounds = rng.randint(1, 4)
    solution = (
        "def digits(n):\n"
        f"    for _ in range({rounds}):\n"
        "        total = 0\n"
        "        while n:\n"
        f"            total += {term}\n"
        f"            n //= {base}\n"
        "        n = total\n"
        "    return n"
    )
    times = "once" if rounds == 1 else f"{rounds} times"
    return Draft(
        f"Python: digits(n) replaces n by the sum of the {told} of n in base {base}, {times}, and returns the result.",
        "digits",
        solution,
        lambda rng: (rng.choice((0, rng.randint(1, 99), rng.randint(100, 10**6), 10**9 + rng.randint(0, 10**9))),),
    )


PAIRS = ("()", "[]", "{}", "<>")
BRACKET_NAMES = ("balanced", "is_balanced", "matched", "is_valid", "check")


def parentheses(rng: random.Random) -> Draft:
    # Draw the kinds of brackets and the two answers
    kinds, name = rng.sample(PAIRS, rng.randint(1, 3)), rng.choice(BRACKET_NAMES)
    yes, no = rng.choice((("True", "False"), ("1", "0"), ('"yes"', '"no"')))
    opening, closing = "".join(k[0] for k in kinds), "".join(k[1] for k in kinds)
    solution = (
        f"def {name}(text):\n"
        "    stack = []\n"
        "    for c in text:\n"
        f'        if c in "{opening}":\n'
        "            stack.append(c)\n"
        f'        elif c in "{closing}" and (not stack or stack.pop() != "{opening}"["{closing}".index(c)]):\n'
        f"            return {no}\n"
        f"    return {no} if stack else {yes}"
    )
    return Draft(
        f"Python: {name}(text) returns {yes} where every bracket of the kinds "
        f"{' '.join(kinds)} is closed by its own kind in the right order, else {no}; other characters do not matter.",
        name,
        solution,
        lambda rng: (_brackets(rng, kinds),),
    )


def nesting(rng: random.Random) -> Draft:
    # Draw the kinds of brackets and the answer for a mismatch
    kinds, wrong = rng.sample(PAIRS, rng.randint(1, 3)), rng.choice((-1, -2, -5, 99))
    opening, closing = "".join(k[0] for k in kinds), "".join(k[1] for k in kinds)
    solution = (
        "def depth(text):\n"
        "    stack, deepest = [], 0\n"
        "    for c in text:\n"
        f'        if c in "{opening}":\n'
        "            stack.append(c)\n"
        "            deepest = max(deepest, len(stack))\n"
        f'        elif c in "{closing}" and (not stack or stack.pop() != "{opening}"["{closing}".index(c)]):\n'
        f"            return {wrong}\n"
        f"    return {wrong} if stack else deepest"
    )
    return Draft(
        f"Python: depth(text) returns how deep brackets of the kinds {' '.join(kinds)} are "
        f"nested, or {wrong} where they do not match; other characters do not matter.",
        "depth",
        solution,
        lambda rng: (_brackets(rng, kinds),),
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
    # Draw the largest gap
    gap, name = rng.randint(0, 30), rng.choice(("join", "merge", "unite", "union"))
    solution = (
        f"def {name}(pairs):\n"
        "    out = []\n"
        "    for a, b in sorted(pairs):\n"
        f"        if out and a - out[-1][1] <= {gap}:\n"
        "            out[-1][1] = max(out[-1][1], b)\n"
        "        else:\n"
        "            out.append([a, b])\n"
        "    return out"
    )

    def inputs(rng: random.Random) -> Arguments:
        furthest = 60 + 6 * gap  # so that gaps of either kind occur
        starts = [rng.randint(0, furthest) for _ in range(rng.randint(0, 7))]
        return ([[start, start + rng.randint(0, 9)] for start in starts],)

    return Draft(
        f"Python: {name}(pairs) takes intervals [first, last], joins those with at most {gap} "
        "between the last of one and the first of the next, and returns the joined intervals in order.",
        name,
        solution,
        inputs,
    )


OPERATORS = (("+", "a + b"), ("-", "a - b"), ("*", "a * b"), ("<", "min(a, b)"), (">", "max(a, b)"))


def postfix(rng: random.Random) -> Draft:
    # Draw symbols and what they mean
    meanings = rng.sample(OPERATORS, 3)
    symbols = rng.sample("+-*<>&|#@", 3)
    pairs = list(zip(symbols, (meaning for _, meaning in meanings), strict=True))
    case = '        elif token == "{}":\n            stack.append({})\n'
    cases = "".join(case.format(symbol, meaning) for symbol, meaning in pairs)
    solution = (
        "def evaluate(tokens):\n"
        "    stack = []\n"
        "    for token in tokens:\n"
        "        if isinstance(token, int):\n"
        "            stack.append(token)\n"
        "            continue\n"
        "        b, a = stack.pop(), stack.pop()\n"
        f"{cases.replace('elif', 'if', 1)}"
        "    return stack[0]"
    )
    told = ", ".join(f'"{symbol}" gives {meaning}' for symbol, meaning in pairs)
    return Draft(
        "Python: evaluate(tokens) evaluates an expression in postfix notation: numbers are themselves, "
        f"and of the two values a and b before it {told}.",
        "evaluate",
        solution,
        lambda rng: (_expression(rng, symbols, 3),),
    )


def _expression(rng: random.Random, symbols: list[str], depth: int) -> list[int | str]:
    if depth == 0 or rng.random() < 0.2:
        return [rng.randint(-9, 20)]
    return [*_expression(rng, symbols, depth - 1), *_expression(rng, symbols, depth - 1), rng.choice(symbols)]


def edits(rng: random.Random) -> Draft:
    # Draw three prices
    insert, delete, replace = (rng.randint(1, 9) for _ in range(3))
    solution = (
        "def price(a, b):\n"
        f"    row = [j * {insert} for j in range(len(b) + 1)]\n"
        "    for i, c in enumerate(a, 1):\n"
        f"        new = [i * {delete}]\n"
        "        for j, d in enumerate(b, 1):\n"
        f"            new.append(min(row[j] + {delete}, new[-1] + {insert}, row[j - 1] + {replace} * (c != d)))\n"
        "        row = new\n"
        "    return row[-1]"
    )

    def inputs(rng: random.Random) -> Arguments:
        first = "".join(rng.choices("abc", k=rng.randint(0, 8)))
        return first, "".join(rng.choices("abc", k=rng.randint(0, 8)))

    return Draft(
        f"Python: price(a, b) returns the lowest price of turning text a into text b, where "
        f"inserting a character costs {insert}, deleting one {delete} and replacing one {replace}.",
        "price",
        solution,
        inputs,
    )


def chosen_families(problem: str, difficulty: int | None) -> list[tuple[str, int]]:
    """Return the families and difficulties that a setting means, by difficulty. ValueError where there are none."""
    names = MIXES.get(problem, (problem,))
    # Refuse unknown names
    unknown = [name for name in names if name not in FAMILIES]
    if unknown:
        raise ValueError(f"problem must be one of {', '.join([*MIXES, *FAMILIES])}, got {problem}")
    # Keep levels of the asked difficulty
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
"""Names for several families; the starters are what a randomly initialised policy learns within minutes."""
