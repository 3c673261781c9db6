"""Which answer a completion gives, and whether it equals the reference answer."""

import json
import subprocess
import sys
import time
from fractions import Fraction
from pathlib import Path

import pytest

from covey.environments.answers import Answer, compare, find_answer, is_correct, without_thoughts
from covey.environments.numerals import read_last, read_values
from covey.environments.symbolic import symbolic_equal

CASES = [
    ("The answer is \\boxed{40} or \\boxed{42}.", "42", False),
    ("<answer>\\boxed{41} or \\boxed{42}</answer>", "42", False),
    ("The answer is 40 or \\boxed{42}", "42", False),
    ("\\boxed{42} or 43", "42", False),
    ("The answer is 42 apples, because 50 - 8 = 42.", "42", True),
    ("The answer is 42, because 50 - 8 = 42 and 8 are gone.", "42", True),
    ("The answer is 42. I checked it 3 times.", "42", True),
    ("Answer: $42", "42", True),
    ("Answer:\n\n42", "42", True),
    ("## Final Answer\n\n42 apples", "42", True),
    ("### Answer: 42", "42", True),
    ("**Final Answer**: 42 apples (7 boxes of 6)", "42", True),
    ("Final Answer: \\boxed{42}. I hope it is correct after 2 tries.", "42", True),
    ("A: 42", "42", True),
    ("A: 43", "42", False),
    ("Ans: 42", "42", True),
    ("Ans = 42", "42", True),
    ("Let me answer the question: there are 7 boxes of 6, so 42.", "42", True),
    ("To answer this, 6*7 = 42", "42", True),
    ("The correct answer should be 42 dollars.", "42", True),
    ("the answer to question 3 is 42", "42", True),
    ("So my final answer is 42!", "42", True),
    ("The answer is that she has 42 apples left.", "42", True),
    ("I think the answer is correct. The total is 42", "42", True),
    ("The answer is not 41. It is 42.", "42", True),
    ("The answer is not 41 but 42.", "42", True),
    ("The answer isn't 42", "42", False),
    ("The answer is 6 * 7 = 42", "42", True),
    ("The answer is $50 - $8 = $42.", "42", True),
    ("The answer is 42 or 43", "42", False),
    ("The answer is either 41 or 42", "42", False),
    ("The answer is between 40 and 42.", "42", False),
    ("The answer is 42, 43.", "42", False),
    ("The answer is 40. The answer is 41. The answer is 42.", "42", False),
    ("Answer: 40\nAnswer: 41\nAnswer: 42", "42", False),
    ("Answer: 40. Let me check again... it should be 42.\nAnswer: 42", "42", True),
    ("#### 40, 41, 42", "42", False),
    ("#### 41 or 42", "42", False),
    ("#### 42 or 42", "42", True),
    ("#### 42 apples", "42", True),
    ("#### 42 (6*7)", "42", True),
    ("#### The answer is 42", "42", True),
    ("#### x = 42", "42", True),
    ("#### 6*7=42", "42", True),
    ("#### 6 x 7 = 42", "42", True),
    ("#### 42.0", "42", True),
    ("#### 042", "42", True),
    ("#### +42", "42", True),
    ("#### 42.5", "42", False),
    ("#### 1,000,000", "1000000", True),
    ("#### 1 000 000", "1000000", True),
    ("#### -$5", "-5", True),
    ("#### $-5", "-5", True),
    ("#### (5)", "5", True),
    ("#### 5:00", "5", False),
    ("#### `42`", "42", True),
    ('#### "42"', "42", True),
    ("#### _42_", "42", True),
    ("#### $42$", "42", True),
    ("#### $$42$$", "42", True),
    ("#### \\(42\\)", "42", True),
    ("#### \\$42", "42", True),
    ("#### 42\\%", "42", True),
    ("#### \\frac{1}{2}", "0.5", True),
    ("#### $\\frac{1}{2}$", "0.5", True),
    ("#### 0.3333", "1/3", False),
    ("#### 0.333333", "1/3", False),
    ("#### 1/3", "1/3", True),
    ("####\n42", "42", True),
    ("#### 42\n", "42", True),
    ("#### 42<|im_end|>", "42", True),
    ("#### 42</s>", "42", True),
    ("#### 42\n\nHuman: next? 3", "42", True),
    ("<answer>42</answer>", "42", True),
    ("<answer>\n42\n</answer>", "42", True),
    ("<answer>42 apples</answer>", "42", True),
    ("<answer>50 - 8 = 42</answer>", "42", True),
    ("<answer>The answer is 42.</answer>", "42", True),
    ("<answer>#### 42</answer>", "42", True),
    ("<answer>\\boxed{42}</answer>", "42", True),
    ("<answer>41 or 42</answer>", "42", False),
    ("<answer>forty-two</answer>", "42", False),
    ("<ANSWER>42</ANSWER>", "42", True),
    ("<answer>42</answer> There are 3 reasons.", "42", True),
    ("<think>41</think><answer>42</answer>", "42", True),
    ("<think>The answer is 42</think> I do not know.", "42", False),
    ("<think>\\boxed{41}</think>So 42", "42", True),
    ("It is 41</think>42", "42", True),
    ("<think>a</think>41<think>b</think>42", "42", True),
    ("\\boxed{42}", "42", True),
    ("$$\\boxed{42}$$", "42", True),
    ("\\boxed{ 42 }", "42", True),
    ("\\boxed{42 \\text{ apples}}", "42", True),
    ("\\boxed{x = 42}", "42", True),
    ("\\boxed{\\text{Answer: }42}", "42", True),
    ("\\boxed{\\$42.00}", "42", True),
    ("\\boxed{42.}", "42", True),
    ("\\boxed{6 \\times 7}", "42", True),
    ("\\boxed{6\\cdot7}", "42", True),
    ("\\boxed{\\mathbf{42}}", "42", True),
    ("\\boxed{\\textbf{42}}", "42", True),
    ("\\boxed{42\\,\\text{dollars}}", "42", True),
    ("\\boxed{40 + 2}", "42", True),
    ("\\boxed{42\\text{ or }43}", "42", False),
    ("\\boxed{41,42}", "42", False),
    ("\\boxed{\\sqrt{1764}}", "42", True),
    ("\\boxed{4}2", "42", False),
    ("\\boxed{42} \\boxed{43}", "42", False),
    ("\\boxed{\\approx 42}", "42", True),
    ("\\boxed{42x}", "42", False),
    ("\\boxed{x^{42}}", "42", False),
    ("So there are 42.", "42", True),
    ("Total = 42", "42", True),
    ("42 - that's it", "42", True),
    ("= $42", "42", True),
    ("42!", "42", True),
    ("it's 42%", "42", True),
    ("She has 42", "42", True),
    ("total: 42.", "42", True),
    ("(42)", "42", True),
    ("**42**", "42", True),
    ("*42*", "42", True),
    ("41 42", "42", True),
    ("She has 40 or 42 apples", "42", False),
    ("40, 41, 42", "42", False),
    ("I don't know", "42", False),
    ("42 42 42", "42", True),
    ("Total is 1,234", "1234", True),
    ("1234", "1,234", True),
    ("$1,234.00", "1234", True),
    ("1.234,50", "1234.5", True),
    ("99999999999999999999999", "42", False),
    ("-42", "42", False),
    ("–42", "-42", True),
    ("—42", "42", True),
    ("is 3 - 42", "42", True),
    ("is 3-42", "42", True),
    ("It costs 5 dollars and 42 cents", "42", True),
    ('{"answer": 42}', "42", True),
    ('{"reason": "6*7", "answer": "42"}', "42", True),
    ("The answer is\n42", "42", True),
    ("The answer is:\n\\[42\\]", "42", True),
    ("The answer is $\\frac{84}{2}$.", "42", True),
    ("So the answer: 42", "42", True),
    ("giving an answer of 42", "42", True),
    ("The final answer is: $\\boxed{42}$", "42", True),
    ("Answer - 42", "42", True),
    ("The answer is approximately 42", "42", True),
    ("The answer is 42 (not 41)", "42", True),
    ("The answer is thirty. There were 5 rows", "5", False),
    ("The gold answer.", "42", False),
    ("", "42", False),
    ("   \n", "42", False),
    ("The answer is about 42.7, so 42", "42", False),
    ("The answer is 42 students, 3 more than Bob.", "42", True),
    ("Answer: 3 hours and 30 minutes", "3", False),
    ("The answer is 7 1/2", "7.5", True),
    ("The answer is 7½", "7.5", True),
    ("The answer is half. 0.5", "0.5", True),
    ("The answer is 0.75 = 3/4", "0.75", True),
    ("The answer is 3/4 or 0.75", "0.75", True),
    ("The answer is 50%", "0.5", True),
    ("x=5, y=7", "7", True),
    ("#### 12 inches * 3 = 36 inches", "36", True),
    ("#### Step 1: compute 3\nIt is 42", "42", True),
    ("####42", "42", True),
    ("##### 42", "42", True),
    ("#### **$42.00**", "42", True),
    ("#### 42 km/h", "42", True),
    ("#### €42", "42", True),
    ("#### 42 €", "42", True),
    ("\\boxed{\\dfrac{84}{2}}", "42", True),
    ("\\boxed{42}^\\circ", "42", True),
    ("The probability is $\\boxed{\\frac{1}{6}}$", "\\frac{1}{6}", True),
    ("$\\boxed{0.1667}$", "\\frac{1}{6}", False),
    ("$\\boxed{3.464102}$", "2\\sqrt{3}", False),
    ("$\\boxed{3.4641016151377544}$", "2\\sqrt{3}", False),
    ("$\\boxed{2 \\sqrt{3}}$", "2\\sqrt{3}", True),
    ("$\\boxed{3.14159265}$", "\\pi", False),
    ("the answer is $2\\sqrt{3}$.", "2\\sqrt{3}", True),
    ("so we get $2\\sqrt{3}$", "2\\sqrt{3}", True),
    ("\\boxed{\\text{No}}", "\\text{no}", True),
    ("\\boxed{No}", "\\text{no}", True),
    ("\\boxed{yes}", "\\text{no}", False),
    ("\\boxed{(3,-1)}", "(3,-1)", True),
    ("\\boxed{(3, -1)}", "(3,-1)", True),
    ("\\boxed{x \\in [2,5)}", "[2,5)", True),
    ("\\boxed{\\begin{pmatrix}1\\\\2\\end{pmatrix}}", "\\begin{pmatrix}1\\\\2\\end{pmatrix}", True),
    ("\\boxed{x^2+2x+1}", "(x+1)^2", True),
    ("\\boxed{x^2+2x+2}", "(x+1)^2", False),
    ("\\boxed{\\frac{\\sqrt{3}}{3}}", "\\frac{1}{\\sqrt{3}}", True),
    ("\\boxed{9^{9^{9^{9}}}}", "42", False),
    ("\\boxed{y = 2x+1}", "y=2x+1", True),
    ("\\boxed{\\{1,2\\}}", "\\{1,2,3\\}", False),
    ("\\boxed{[2,5]}", "[2,5)", False),
    ("\\boxed{42} and \\boxed{43}", "42", False),
    ("\\boxed{-\\frac{3}{4}}", "\\frac{-3}{4}", True),
    ("\\boxed{45^\\circ}", "45", True),
    ("\\boxed{45}", "45^\\circ", True),
    ("\\boxed{\\frac{3}{4} \\text{ cups}}", "\\frac{3}{4}", True),
    ("\\boxed{12\\text{ cm}^2}", "12", True),
    ("\\boxed{12}", "12\\text{ cm}^2", True),
    ("\\boxed{12 \\text{ square units}}", "12", True),
    ("\\boxed{5\\text{ hours }30\\text{ minutes}}", "5", False),
]


@pytest.mark.parametrize(("completion", "gold", "right"), CASES)
def test_a_completion_is_right_exactly_where_its_answer_is(completion: str, gold: str, right: bool) -> None:
    assert is_correct(completion, gold) is right


def test_the_last_mark_decides_and_says_its_form() -> None:
    assert find_answer("\\boxed{7} no, \\boxed{8}") == Answer("8", "box")
    assert find_answer("#### 17\nbut with the tip:\n#### 18") == Answer(" 18", "hash")
    assert find_answer("so she has 42 apples") == Answer("so she has 42 apples", "none")
    assert find_answer("") is None


def test_a_list_of_alternatives_is_reported_as_a_list() -> None:
    answer = find_answer("#### 40 #### 41 #### 42")
    assert answer == Answer("40, 41, 42", "hash")
    assert compare("#### 40 #### 41 #### 42", "42") is False


def test_thoughts_are_cut_out_whoever_opened_them() -> None:
    assert without_thoughts("<think>a</think>b") == "b"
    assert without_thoughts("a</think>b") == "b"
    assert without_thoughts("a<think>b").strip() == "a"
    assert without_thoughts("<think>a<think>b</think>c</think>d") == "d"


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("1,230", [Fraction(1230)]),
        ("$1,234.50.", [Fraction(2469, 2)]),
        ("3 1/2", [Fraction(7, 2)]),
        ("\u2212$3", [Fraction(-3)]),
        ("50 - 8 = 42", [Fraction(42)]),
        ("40 or 41", [Fraction(40), Fraction(41)]),
        ("10:30", []),
        ("1.2.3", []),
        ("5x", []),
        ("3x+5", []),
        ("9^9^9^9", []),
        ("9^99999", []),
        ("6 x 7", [Fraction(42)]),
        ("3 x 10^8", [Fraction(300000000)]),
        ("1" * 200, []),
    ],
)
def test_values_are_read_exactly_or_not_at_all(text: str, values: list[Fraction]) -> None:
    assert read_values(text) == [frozenset({value}) for value in values]


def test_a_percentage_has_two_readings() -> None:
    assert read_values("25%") == [frozenset({Fraction(25), Fraction(1, 4)})]


@pytest.mark.parametrize("text", ["(x-1)^2", "[2,5)", "2\\sqrt{3}", "9\\pi", "\\binom{5}{2}", "|-5|", "x > 5", "1,4"])
def test_what_is_not_one_number_is_not_read_strictly(text: str) -> None:
    assert read_values(text, strict=True) == []


def test_the_last_number_keeps_its_sign_and_its_fraction() -> None:
    assert read_last("3-10 = -7.") == [frozenset({Fraction(-7)})]
    assert read_last("It takes 5-7 days.") == [frozenset({Fraction(7)})]
    assert read_last("It is 1/2.") == [frozenset({Fraction(1, 2)})]
    assert read_last("It is 3 x 10^8.") == [frozenset({Fraction(300000000)})]
    assert read_last("He comes at 10:30.") == []


def test_symbolic_answers_are_left_to_the_caller() -> None:
    assert compare("\\boxed{\\binom{5}{2}}", "10") == Answer("\\binom{5}{2}", "box")
    assert compare("\\boxed{x+1}", "1+x") == Answer("x+1", "box")
    assert symbolic_equal("x+1", "1+x")


@pytest.mark.parametrize("tower", ["9^{9^{9}}", "99999!", "2^{100000}", "((9!)!)!!"])
def test_towers_are_refused_before_they_are_evaluated(tower: str) -> None:
    began = time.monotonic()
    assert symbolic_equal(tower, "\\sqrt{2}") is False
    assert time.monotonic() - began < 5


UNITS = (
    *("1", "1,", "1.", "1 or ", "(", ")", "-", "= ", "a-", "x ", "^", "a ", "$", " ", "\n", "{", "}"),
    *(
        "#### ",
        "\\boxed{",
        "\\frac",
        "\\text{",
        "the answer is ",
        "answer ",
        "<think>",
        "<answer>",
        "or ",
        "A:",
        "not ",
    ),
)


@pytest.mark.parametrize("unit", UNITS)
@pytest.mark.parametrize("start", ["", "#### ", "the answer is ", "\\boxed{", "42 "])
def test_long_repetitive_completions_take_no_time(start: str, unit: str) -> None:
    began = time.monotonic()
    compare(start + unit * (30_000 // len(unit)), "42")
    assert time.monotonic() - began < 1.0


def test_comparing_imports_neither_torch_nor_sympy() -> None:
    code = "import sys, covey.environments.answers; print({'torch', 'sympy'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "set()"


@pytest.mark.shared
def test_every_row_that_is_not_debatable_agrees(shared: Path) -> None:
    rows = _rows(shared / "data" / "math_answers.jsonl")
    wrong = [
        row["id"]
        for row in rows
        if not row["debatable"] and is_correct(row["completion"], row["gold"]) != row["correct"]
    ]
    assert len(rows) == 138
    assert wrong == []


@pytest.mark.shared
def test_debatable_rows_agree_too(shared: Path) -> None:
    rows = [row for row in _rows(shared / "data" / "math_answers.jsonl") if row["debatable"]]
    wrong = [row["id"] for row in rows if is_correct(row["completion"], row["gold"]) != row["correct"]]
    assert len(rows) == 39
    assert wrong == []


@pytest.mark.shared
def test_labels_of_real_model_solutions_agree(shared: Path) -> None:
    rows = _rows(shared / "data" / "gsm8k" / "model_solutions.jsonl")
    wrong = [row for row in rows if is_correct(row["completion"], row["gold"]) != row["is_correct"]]
    assert len(rows) == 400
    assert wrong == []


def _rows(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]
