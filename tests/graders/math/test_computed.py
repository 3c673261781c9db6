"""An answer leaves no computation to the verifier."""

import json
import random
import time
from pathlib import Path

import pytest

from covey_graders.math.computed import is_computed
from covey_graders.math.formulas.trees import MAX_DEPTH, read_tree
from covey_graders.math.judge import compare

CASES = [json.loads(line) for line in Path(__file__).with_name("computed_cases.jsonl").read_text().splitlines()]
RIGHT, WRONG = ([case for case in CASES if case["right"] is right] for right in (True, False))


def at_sight(answer: str, gold: str, question: str = "") -> bool:
    """Return the verdict on a box."""
    return compare(f"\\boxed{{{answer}}}", gold, question)


@pytest.mark.long
def test_what_is_computed_is_right_in_any_spelling() -> None:
    completions = [(f"\\boxed{{{case['answer']}}}", case["gold"], case.get("question", "")) for case in RIGHT]
    assert len(completions) > 100
    assert [found for found in completions if not compare(*found)] == []


def test_what_leaves_the_computation_undone_is_wrong_at_sight() -> None:
    assert len(WRONG) >= 190
    cases = [(case["answer"], case["gold"], case.get("question", "")) for case in WRONG]
    assert [case for case in cases if at_sight(*case) is not False] == []


def test_a_text_that_is_no_formula_leaves_no_sum_that_its_gold_does_not() -> None:
    assert [is_computed(text, "{7") for text in ("{3+4", "{7", "7")] == [False, True, False]
    assert is_computed("{3+4", "{2+5")


def test_every_gold_answer_is_right_even_uncomputed() -> None:
    golds = sorted({case["gold"] for case in CASES})
    questions = {case["gold"]: case.get("question", "") for case in CASES}
    assert [gold for gold in golds if not compare(f"\\boxed{{{gold}}}", gold, questions[gold])] == []


@pytest.mark.shared
def test_all_700_gold_answers_of_word_problems_and_all_400_labels_agree(shared: Path) -> None:
    for split, count in (("train", 500), ("test", 200)):
        lines = (shared / "data" / "gsm8k" / f"{split}.jsonl").read_text().splitlines()
        rows = [json.loads(line) for line in lines]
        right = [compare(row["answer"], row["answer"].rpartition("#### ")[2]) for row in rows]
        assert right == [True] * count


HEAVY = r"""
(x+y+z+w)^{99}  (x+1)^{999}  ((x+1)^{99}+1)^{99}  ((((x+1)^3+1)^3+1)^3+1)^3  (a+b+c+d+e+f+g)^{20}  x=(x+y+z+w)^{99}
(x^{99}-1)(x^{98}-1)(x^{97}-1)(x^{96}-1)  (1+x)^{50}(1-x)^{50}(1+x^2)^{50}  \left(\frac{x+1}{x-1}\right)^{99}
\frac{1}{(x+y)^{50}+(x-y)^{50}}  \frac{(x+y+z)^{30}}{(x-y)^{30}}  \{(x+y+z+w)^{99},1\}  \sqrt[99]{x+\sqrt[98]{x}}
(\sqrt2+\sqrt3+\sqrt5+\sqrt7)^{50}  (1+\sqrt{2})^{999}  \sqrt{\sqrt{\sqrt{x+\sqrt{x}}}}  \binom{99999}{4999}
\prod_{k=1}^{100}(x+k)  \sum_{k=1}^{100000}\frac{1}{k^2}  \int_0^1\frac{1}{x^7+x+1}dx  \sin^{50}x\cos^{50}x
\sin(\sin(\sin(x)))  e^{e^{e^x}}  \log(\log(x))  2^{9999}  123456789^{99}  3^{2^{x}}  x^{9999}+1  9^{9^{9^9}}
\begin{pmatrix}x&1\\1&x\end{pmatrix}^{99}
"""
PIECES = r"""
1 2 . , + - * / ^ _ ! ' ( ) [ ] { } \{ \} | x n sqrt \sqrt \frac \frac12 \binom \sum \text{ \mathrm{ \left \cdot \pi
\cup = : ; & \\ \begin{pmatrix} \end{pmatrix} 0.\overline{3} \overline{ \sin \pm % ^\circ ² ٣ ½ \neg $ or \lfloor
\rfloor 10 ^{ \lim gcd ~ \
"""


@pytest.mark.parametrize("gold", ["x+1", "\\sqrt{2}", "42", "\\{1,2\\}", "\\frac{1}{x}"])
def test_what_would_take_algebra_long_is_wrong_before_algebra_is_asked(gold: str) -> None:
    began = time.process_time()
    assert [answer for answer in HEAVY.split() if at_sight(answer, gold) is not False] == []
    assert time.process_time() - began < 1.0


@pytest.mark.long
def test_any_text_is_read_or_refused() -> None:
    pieces = [*PIECES.split(), " "]
    draw = random.Random(0)
    for _ in range(3000):
        text = "".join(draw.choices(pieces, k=draw.choice((1, 3, 6, 12, 40))))
        gold, question = draw.choice(("42", "x+1", "2\\sqrt{3}", "2^{100}", "[2,5)")), f"Simplify ${text}$."
        for computed in (True, False):
            assert compare(f"\\boxed{{{text}}}", gold, question, computed) in (True, False)


def test_nesting_is_bounded() -> None:
    assert read_tree("(" * MAX_DEPTH + "1") is None
    assert read_tree("\\sqrt" * 300 + "2") is None
    assert read_tree("(" * 20 + "x+1" + ")" * 20) == read_tree("x+1")
