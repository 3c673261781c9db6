"""Made-up rows in the form of GSM8K and of MATH, small enough for a randomly initialised policy to learn on a laptop.

`data.path=covey_tasks.math.generated:word_problems` reads them. Every row follows from a fixed seed, so the rows
are the same everywhere; no question is in both splits.
"""

import random
import re
from collections.abc import Callable, Mapping
from typing import Any

from covey.environments.base import Split

Row = Mapping[str, Any]
Problem = tuple[str, str, str]
"""(question, worked solution, answer)."""

NUM_TRAIN = 4096
NUM_TEST = 512
_NUMBER = re.compile(r"\d+")

_NAMES = ("Ann", "Ben", "Eva", "Tom", "Mia", "Leo")
_THINGS = ("pens", "eggs", "cups", "figs", "nuts", "keys")


def word_problems() -> dict[Split, list[Row]]:
    """Generate word problems of one or two steps in the form of GSM8K.

    >>> word_problems()["train"][0]
    {'question': 'Eva has 25 keys and loses 6. How many now?', 'answer': '25-6=19\\n#### 19', 'level': 1}
    """
    return _rows(WORD_PROBLEMS, lambda q, s, a: {"question": q, "answer": f"{s}\n#### {a}"})


def mathematics() -> dict[Split, list[Row]]:
    """Generate short problems in the form of MATH, whose answers are numbers and expressions in LaTeX.

    >>> mathematics()["train"][0]
    {'problem': 'Solve $x+8=86$.', 'solution': '86-8=78\\n\\\\boxed{78}', 'answer': '78', 'level': 2}
    """
    return _rows(MATHEMATICS, lambda q, s, a: {"problem": q, "solution": s, "answer": a})


Maker = Callable[[random.Random], Problem]


def _rows(makers: Mapping[Maker, int], as_row: Callable[[str, str, str], dict[str, Any]]) -> dict[Split, list[Row]]:
    generator = random.Random("made-up rows")
    found: dict[str, Row] = {}
    kinds = list(makers)
    while len(found) < NUM_TRAIN + NUM_TEST:
        maker = generator.choice(kinds)
        question, solution, answer = maker(generator)
        if answer in _NUMBER.findall(question):  # a policy that copies a number would be right
            continue
        found.setdefault(question, as_row(question, solution, answer) | {"level": makers[maker]})
    rows = list(found.values())
    generator.shuffle(rows)
    return {"train": rows[NUM_TEST:], "test": rows[:NUM_TEST]}


# ------------------------------------------------------------------------------------------------ word problems


def _gets(generator: random.Random) -> Problem:
    a, b = generator.randint(10, 89), generator.randint(2, 9)
    who, what = generator.choice(_NAMES), generator.choice(_THINGS)
    return f"{who} has {a} {what} and gets {b}. How many now?", f"{a}+{b}={a + b}", str(a + b)


def _loses(generator: random.Random) -> Problem:
    a, b = generator.randint(12, 98), generator.randint(2, 9)
    who, what = generator.choice(_NAMES), generator.choice(_THINGS)
    return f"{who} has {a} {what} and loses {b}. How many now?", f"{a}-{b}={a - b}", str(a - b)


def _gets_and_loses(generator: random.Random) -> Problem:
    a, b, c = generator.randint(12, 89), generator.randint(2, 9), generator.randint(2, 9)
    who, what = generator.choice(_NAMES), generator.choice(_THINGS)
    question = f"{who} has {a} {what}, gets {b} and loses {c}. How many now?"
    return question, f"{a}+{b}={a + b}\n{a + b}-{c}={a + b - c}", str(a + b - c)


WORD_PROBLEMS: dict[Maker, int] = {_gets: 1, _loses: 1, _gets_and_loses: 2}
"""What makes a problem, and its level."""


# ------------------------------------------------------------------------------------------------ mathematics


def _two(generator: random.Random) -> tuple[int, int]:
    return generator.randint(10, 89), generator.randint(2, 19)


def _evaluate(generator: random.Random) -> Problem:
    a, b = _two(generator)
    return f"Evaluate $x+{b}$ at $x={a}$.", f"{a}+{b}={a + b}\n\\boxed{{{a + b}}}", str(a + b)


def _solve(generator: random.Random) -> Problem:
    a, b = _two(generator)
    return f"Solve $x+{b}={a + b}$.", f"{a + b}-{b}={a}\n\\boxed{{{a}}}", str(a)


def _collect(generator: random.Random) -> Problem:
    a, b = _two(generator)
    return f"Simplify ${a}x+{b}x$.", f"{a}+{b}={a + b}\n\\boxed{{{a + b}x}}", f"{a + b}x"


def _add_fractions(generator: random.Random) -> Problem:
    a, b = _two(generator)
    answer = f"\\frac{{{a + b}}}{{n}}"
    return f"Add $\\frac{{{a}}}{{n}}+\\frac{{{b}}}{{n}}$.", f"{a}+{b}={a + b}\n\\boxed{{{answer}}}", answer


MATHEMATICS: dict[Maker, int] = {_evaluate: 1, _solve: 2, _collect: 2, _add_fractions: 3}
"""What makes a problem, and its level."""
