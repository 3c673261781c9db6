"""Generated rows like GSM8K's and MATH's, for small policies on laptops.

`data.path=covey_tasks.math.generated:word_problems` reads them. Every row follows from a fixed seed, so the rows
are the same everywhere; no question is in both splits.
"""

import random
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from covey.environments.base import Split
from covey.system.lookup import read_table

Row = Mapping[str, Any]
NUM_TRAIN = 4096
NUM_TEST = 512
_NUMBER = re.compile(r"\d+")

_NAMES = ("Ann", "Ben", "Eva", "Tom", "Mia", "Leo")
_THINGS = ("pens", "eggs", "cups", "figs", "nuts", "keys")


def word_problems() -> dict[Split, list[Row]]:
    """Generate word problems of one or two steps, like GSM8K's.

    >>> word_problems()["train"][0]
    {'question': 'Eva has 25 keys and loses 6. How many now?', 'answer': '25-6=19\\n#### 19', 'level': 1}
    """
    return _rows(WORD_PROBLEMS, lambda q, s, a: {"question": q, "answer": f"{s}\n#### {a}"})


def mathematics() -> dict[Split, list[Row]]:
    """Generate short problems like MATH's, with answers in LaTeX.

    >>> mathematics()["train"][0]
    {'problem': 'Solve $x+8=86$.', 'solution': '86-8=78\\n\\\\boxed{78}', 'answer': '78', 'level': 2}
    """
    return _rows(MATHEMATICS, lambda q, s, a: {"problem": q, "solution": s, "answer": a})


def _rows(templates: Sequence[Row], as_row: Callable[[str, str, str], dict[str, Any]]) -> dict[Split, list[Row]]:
    generator = random.Random("made-up rows")
    found: dict[str, Row] = {}
    while len(found) < NUM_TRAIN + NUM_TEST:
        template = generator.choice(templates)
        question, solution, answer = _problem(template, generator)
        if answer in _NUMBER.findall(question):  # a policy that copies a number would be right
            continue
        found.setdefault(question, as_row(question, solution, answer) | {"level": template["level"]})
    rows = list(found.values())
    generator.shuffle(rows)
    return {"train": rows[NUM_TEST:], "test": rows[:NUM_TEST]}


def _problem(template: Row, generator: random.Random) -> tuple[str, str, str]:
    """Draw question, worked solution and answer."""
    numbers = [generator.randint(low, high) for low, high in template.get("bounds", ((10, 89), (2, 19)))]
    result = sum(sign * number for sign, number in zip(template.get("signs", (1, 1)), numbers, strict=True))
    values: dict[str, Any] = dict(zip("abc", numbers, strict=False)) | {"s": sum(numbers[:2]), "d": result}
    if "{who}" in template["question"]:
        values |= {"who": generator.choice(_NAMES), "what": generator.choice(_THINGS)}
    texts = template["question"], template["solution"], template.get("answer", "{d}")
    question, solution, answer = (text.format(**values) for text in texts)
    return question, solution, answer


TABLE = read_table(Path(__file__).with_suffix(".yaml"))
WORD_PROBLEMS, MATHEMATICS = TABLE["word_problems"], TABLE["mathematics"]
