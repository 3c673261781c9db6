"""Right answers: their place, respellings, and near misses."""

import ast
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from covey.environments.data.columns import value_in

ANSWER_COLUMNS = (
    *("completion", "answer", "ground_truth", "reward_model.ground_truth", "gold", "target", "expected"),
    *("final_answer", "label", "reference", "solution", "canonical_solution", "code"),
)
"""Columns of other people's rows that hold a right answer, the surest first."""
MARKS = (
    re.compile(r"```[\w+-]*\n(.*?)\n?```", re.DOTALL),
    re.compile(r"<answer>\s*(.*?)\s*</answer>", re.DOTALL),
    re.compile(r"\\boxed\{((?:[^{}]|\{(?:[^{}]|\{[^{}]*\})*\})*)\}"),
    re.compile(r"####\s*([^\n]*[^\s])"),
)
"""Patterns of a completion's answer; the last match of a kind counts."""
NUMBER = re.compile(r"\$?\s*(-?)\s*(?:\\d?frac\{(\d+)\}\{(\d+)\}|([\d,]*\.?\d+)(?:/(\d+))?)\s*\$?\s*(%?)")
LETTER = re.compile(r"\(?([A-E])\)?")
NUM_WORDS = 5
"""Longer answers are texts that obey a request, which a changed letter may obey as well."""
EQUAL_TO_ALL = "class Equal:\n    def __eq__(self, other):\n        return True\n    __hash__ = None\n\n\n"


@dataclass(frozen=True, slots=True)
class Gold:
    """A right completion: the answer, and the text before and after it.

    >>> Gold("The answer is **", "42", "**.").text
    'The answer is **42**.'
    """

    before: str
    answer: str
    after: str

    @property
    def text(self) -> str:
        return self.saying(self.answer)

    def saying(self, other: str) -> str:
        """Return the completion with another answer in the same place."""
        return f"{self.before}{other}{self.after}"

    @property
    def bare(self) -> "Gold":
        """Return it without its derivation, which contains the answer already."""
        if functions_of(self.answer):
            return Gold("```python\n", self.answer, "\n```") if "```" in self.before else Gold("", self.answer, "")
        return Gold(self.before.rpartition("\n")[2], self.answer, self.after.partition("\n")[0])


def read_gold(completion: str) -> Gold:
    """Find a completion's answer: last fence, tag, box, line, or all."""
    for mark in MARKS:
        found = list(mark.finditer(completion))
        if found:
            start, end = found[-1].span(1)
            return Gold(completion[:start], completion[start:end], completion[end:])
    return Gold("", completion, "")


def list_forms(answer: str) -> list[Gold]:
    """Return the forms in which graders want a bare answer."""
    if functions_of(answer):
        return [Gold("```python\n", answer, "\n```"), Gold("", answer, "")]
    return [
        Gold("", answer, ""),
        Gold("The answer is \\boxed{", answer, "}."),
        Gold("We add it up.\n#### ", answer, ""),
        Gold("<think>\nWe add it up.\n</think>\n<answer>", answer, "</answer>"),
        Gold("We add it up.\nAnswer: ", answer, ""),
        Gold("We add it up. The answer is ", answer, "."),
    ]


def column_answer(columns: Mapping[str, Any]) -> str | None:
    """Return the right answer of a row, else None."""
    for name in ANSWER_COLUMNS:
        value = value_in(columns, name)
        value = value[0] if isinstance(value, Sequence) and not isinstance(value, str) and value else value
        value = value.get("content") if isinstance(value, Mapping) else value
        if isinstance(value, str | int | float) and not isinstance(value, bool) and str(value).strip():
            return read_gold(str(value).strip()).answer
    return None


def respelt(answer: str) -> Iterator[str]:
    """Yield other spellings of a right answer that are beyond debate."""
    tree = functions_of(answer)
    if tree:
        yield f"# the solution\n{ast.unparse(ast.parse(answer))}\n"
        yield answer.replace("\n", "\r\n")
        return
    value = number(answer)
    if value is None or "%" in answer:
        return
    if value.denominator == 1:
        plain = str(value.numerator)
        others = [plain, f"{value.numerator:,}", f"{plain}.0", f"${plain}$"]
    else:
        sign, top, bottom = "-" * (value < 0), abs(value.numerator), value.denominator
        exact = f"{float(value):.6f}".rstrip("0")
        others = [f"{sign}{top}/{bottom}", f"{sign}\\frac{{{top}}}{{{bottom}}}"]
        others += [exact] if Fraction(exact) == value else []
    yield from (other for other in dict.fromkeys(others) if other != answer)


def nearly(answer: str) -> Iterator[str]:
    """Yield answers that are wrong by a little."""
    if functions_of(answer):
        yield from (_with_bodies(answer, body) for body in ("return None", "return 0", "raise ValueError"))
        return
    value, letter = number(answer), LETTER.fullmatch(answer.strip())
    if letter:
        yield from (answer.replace(letter[1], other) for other in "ABCDE" if other != letter[1])
    elif value is not None and value.denominator == 1:
        n = value.numerator
        yield from map(str, dict.fromkeys(other for other in (n + 1, n - 1, 10 * n, -n, n + 100) if other != n))
    elif value is not None:
        yield from (f"{value.numerator + 1}/{value.denominator}", f"{value.numerator}/{value.denominator + 1}")
        yield f"{float(value) + 1:g}"
    elif len(answer) > 3 and len(answer.split()) <= NUM_WORDS:
        middle = len(answer) // 2
        yield answer[: middle - 1] + ("q" if answer[middle - 1] != "q" else "z") + answer[middle:]
        yield f"not {answer}"


def program_tricks(answer: str) -> Iterator[str]:
    """Yield programs that are right for their tests alone."""
    if functions_of(answer):
        yield EQUAL_TO_ALL + _with_bodies(answer, "return Equal()")
        yield f"import os\nos._exit(0)\n\n\n{_with_bodies(answer, 'return None')}"
        yield f"{_with_bodies(answer, 'return None')}\nprint('all tests passed')\nraise SystemExit(0)\n"


def number(answer: str) -> Fraction | None:
    """Return an answer's exact number, else None."""
    found = NUMBER.fullmatch(answer.strip())
    if found is None:
        return None
    sign, top, bottom, plain, over, percent = found.groups()
    value = Fraction(int(top), int(bottom) or 1) if top else Fraction(plain.replace(",", "")) / (int(over or 1) or 1)
    return (-value if sign else value) / (100 if percent else 1)


def functions_of(answer: str) -> list[str]:
    """Return the names of a program's functions."""
    if "def " not in answer:
        return []
    try:
        tree = ast.parse(answer)
    except (SyntaxError, ValueError, RecursionError):
        return []
    return [node.name for node in tree.body if isinstance(node, ast.FunctionDef)]


def _with_bodies(program: str, body: str) -> str:
    """Return the program with another body for each of its functions."""
    tree = ast.parse(program)
    for node in tree.body:
        if isinstance(node, ast.FunctionDef):
            (other,) = ast.parse(f"def f():\n    {body}").body
            node.body = other.body  # type: ignore[attr-defined]
    return ast.unparse(tree)
