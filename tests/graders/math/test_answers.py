"""Which answer a completion gives, and whether it equals the reference answer."""

import json
import subprocess
import sys
import time
from fractions import Fraction
from pathlib import Path

import pytest

from covey_graders.math.answers import ExtractedAnswer, find_answer
from covey_graders.math.equal import same_formula
from covey_graders.math.judge import compare
from covey_graders.math.reading.numerals import Reading, read_last, read_values
from covey_graders.tags import after_thoughts, without_thoughts

CASES = [json.loads(line) for line in Path(__file__).with_name("answer_cases.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("case", CASES, ids=[case["completion"][:40] for case in CASES])
def test_a_completion_is_right_exactly_where_its_answer_is(case: dict) -> None:
    assert compare(case["completion"], case["gold"]) is case["right"]
    by_value = case.get("value", case["right"])
    assert compare(case["completion"], case["gold"], computed=False) is by_value


def test_the_last_mark_decides_and_says_its_form() -> None:
    assert find_answer("\\boxed{7} no, \\boxed{8}") == ExtractedAnswer("8", "box")
    assert find_answer("#### 17\nbut with the tip:\n#### 18") == ExtractedAnswer(" 18", "hash")
    assert find_answer("so she has 42 apples") == ExtractedAnswer("so she has 42 apples", "none")
    assert find_answer("") is None
    for mark, form in (("so \\boxed{1} no\n", "box"), ("#### 1\n", "hash"), ("The answer is 1.\n", "label")):
        found = find_answer(60 * mark + mark.replace("1", "42"))
        assert (found and found.text.strip(), found and found.form) == ("42", form)


def test_a_list_of_alternatives_is_reported_as_a_list() -> None:
    answer = find_answer("#### 40 #### 41 #### 42")
    assert answer == ExtractedAnswer("40, 41, 42", "hash")
    assert compare("#### 40 #### 41 #### 42", "42") is False


def test_thoughts_are_removed_even_if_the_template_opened_them() -> None:
    assert without_thoughts("<think>a</think>b") == "b"
    assert without_thoughts("a</think>b") == "b"
    assert without_thoughts("a<think>b").strip() == "a"
    assert without_thoughts("<think>a<think>b</think>c</think>d") == "d"
    assert without_thoughts("<think>I write <think> first.</think>42") == "42"
    assert after_thoughts("<think>I write <think> first.</think>\n42\n") == "42"
    assert after_thoughts("a<think>b") == "a"


@pytest.mark.parametrize(
    ("begin", "end"),
    [
        ("<thinking>", "</thinking>"),
        ("<thought>", "</thought>"),
        ("<seed:think>", "</seed:think>"),
        ("[THINK]", "[/THINK]"),
        ("\u25c1think\u25b7", "\u25c1/think\u25b7"),
        ("<|begin_of_thought|>", "<|end_of_thought|>"),
        ("<|START_THINKING|>", "<|END_THINKING|>"),
    ],
)
def test_thoughts_of_every_template_are_no_answer(begin: str, end: str) -> None:
    assert without_thoughts(f"{begin}a{end}b") == after_thoughts(f"{begin}a{end}b") == "b"
    assert without_thoughts(f"a{end}b") == after_thoughts(f"a{end}b") == "b"
    assert without_thoughts(f"{begin}a") == after_thoughts(f" {begin}a") == ""
    assert compare(f"{begin}maybe 41{end}So 42.", "42")
    assert not compare(f"{begin}it is \\boxed{{42}}", "42")


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
    assert read_values(text) == [Reading(value) for value in values]


NUMBERS = {
    "999": "999", "1,234": "1234", "12,345": "12345", "125,000": "125000", "1,234,567": "1234567",
    "100,000,000": "100000000", "9,876,543,210": "9876543210", "12,34,56,789": "123456789",
    "1,234.5": "2469/2", "125,000.25": "500001/4", "1,23,456": "123456",
    "12,34,567.5": "2469135/2", "1,2": "6/5", "12,34": "617/50", "1,2345": "2469/2000", "123,4567": "1234567/10000",
    "1234,5": "2469/2", "1234,567": "1234567/1000", "1.234,5": "2469/2", "12.345,67": "1234567/100",
    "123.456,7": "1234567/10", "1.234.567,8": "6172839/5", "1 234": "1234", "12 345": "12345", "123 456": "123456",
    "1 234 567": "1234567", "12'345": "12345", "12_345.5": "24691/2", "1e5": "100000", "1.5e-3": "3/2000",
    "2E+10": "20000000000", "7e12": "7000000000000", "3e100": "3" + 100 * "0", ".5": "1/2", "0.125": "1/8",
    "12.5": "25/2", "3 1/2": "7/2", "3 12345678/123456789": "42524005/13717421", "3 2/2": None,
    "1234 567": None, "12 34": None, "1,234,56": None, "1234.567,8": None, "1.2.3": None, "5e1000": None,
}  # fmt: skip
"""A number as it may be written, and its value; None where it is not one number."""


@pytest.mark.parametrize("sign", ["", "-"])
def test_a_number_of_any_number_of_digits_is_read_with_its_marks(sign: str) -> None:
    single = {text: found[0].bare if len(found := read_values(sign + text)) == 1 else None for text in NUMBERS}
    assert single == {text: value and Fraction(sign + value) for text, value in NUMBERS.items()}


def test_numbers_are_read_to_bounds_of_digits_and_powers() -> None:
    assert [len(read_values(text)) for text in ("9" * 100, "9" * 101, "2^9999", "2^10000")] == [1, 0, 1, 0]
    assert [one.bare for one in read_values("2^-3")] == [Fraction(1, 8)]
    assert [one.bare for text in ("48/4*2", "2-3-4", "2+3*4", "2*3^2") for one in read_values(text)] == [24, -5, 14, 18]
    assert read_values("0^-1") == []


def test_a_percentage_has_two_readings() -> None:
    assert read_values("25%") == [Reading(Fraction(25), scale=Fraction(1, 100))]


@pytest.mark.parametrize("text", ["(x-1)^2", "[2,5)", "2\\sqrt{3}", "9\\pi", "\\binom{5}{2}", "|-5|", "x > 5", "1,4"])
def test_what_is_not_one_number_is_not_read_strictly(text: str) -> None:
    assert read_values(text, strict=True) == []


def test_the_last_number_keeps_its_sign_and_its_fraction() -> None:
    assert read_last("3-10 = -7.") == [Reading(Fraction(-7))]
    assert read_last("It takes 5-7 days.") == [Reading(Fraction(7))]
    assert read_last("It is 1/2.") == [Reading(Fraction(1, 2))]
    assert read_last("It is 3 x 10^8.") == [Reading(Fraction(300000000))]
    assert read_last("He comes at 10:30.") == []


@pytest.mark.parametrize("tower", ["9^{9^{9}}", "99999!", "2^{100000}", "((9!)!)!!", "10^{10^{10}}", "e^{e^{99}}"])
def test_towers_cost_the_answer_and_no_time(tower: str) -> None:
    began = time.process_time()
    assert same_formula(tower, "\\sqrt{2}") is False
    assert same_formula(tower, tower)
    assert time.process_time() - began < 0.2


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


@pytest.mark.product
@pytest.mark.parametrize("unit", UNITS)
@pytest.mark.parametrize("start", ["", "#### ", "the answer is ", "\\boxed{", "42 "])
def test_long_repetitive_completions_take_no_time(start: str, unit: str) -> None:
    began = time.process_time()
    compare(start + unit * (30_000 // len(unit)), "42")
    assert time.process_time() - began < 1.0


def test_comparing_imports_neither_torch_nor_sympy() -> None:
    code = "import sys, covey_graders.math.judge; print({'torch', 'sympy', 'math_verify'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "set()"


@pytest.mark.shared
def test_labels_agree_but_for_number_words_and_answers_that_compute_nothing(shared: Path) -> None:
    rows = _rows(shared / "data" / "math_answers.jsonl")
    assert (len(rows), sum(row["debatable"] for row in rows)) == (138, 39)
    by_value = [row for row in rows if compare(row["completion"], row["gold"], computed=False) != row["correct"]]
    in_words = [("18", "hash_word_number", True), ("30", "word_number", True), ("12", "last_number_in_brackets", True)]
    assert [(row["gold"], row["form"], row["debatable"]) for row in by_value] == in_words
    different = [row for row in rows if compare(row["completion"], row["gold"]) != row["correct"]]
    assert [(row["gold"], row["form"], row["debatable"]) for row in different if row not in by_value] == [
        ("\\frac{3}{4}", "boxed_unreduced", True),
        ("2\\sqrt{3}", "boxed_sqrt_unsimplified", True),
        ("1024", "boxed_power", False),
        ("10", "boxed_binomial", True),
    ]


@pytest.mark.shared
def test_labels_of_real_model_solutions_agree(shared: Path) -> None:
    rows = _rows(shared / "data" / "gsm8k" / "model_solutions.jsonl")
    wrong = [row for row in rows if compare(row["completion"], row["gold"]) != row["is_correct"]]
    assert len(rows) == 400
    assert wrong == []


def _rows(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.parametrize(
    "said",
    [
        *("I choose option B.", "The best answer is B.", "Final answer: [B]", "[[B]]", "I would go with B.", "It's B."),
        *("The answer is b) 4", r"\boxed{{\bf B}}", r"\boxed{\rm (B)}", "B is correct.", "B, not C."),
    ],
)
def test_a_choice_is_read_in_the_words_that_models_choose_with(said: str) -> None:
    assert compare(said, "B")
    assert not compare(said, "C")


@pytest.mark.parametrize(
    "said",
    ["C is wrong. The answer is not C.", "C is not right.", "C is clearly incorrect.", "C isn't it."],
)
def test_a_choice_that_is_denied_is_not_made(said: str) -> None:
    assert not compare(said, "C")


@pytest.mark.parametrize(
    ("answer", "gold"),
    [
        (r"\bf 42", "42"),
        (r"{\rm 42}", "42"),
        (r"\bm{42}", "42"),
        (r"\hbox{42 cm}", "42"),
        (r"18\,\frac{\mathrm{km}}{\mathrm{h}}", "18 km/h"),
        (r"5\ \tfrac{\text{m}}{\text{s}^2}", r"5\text{ m/s}^2"),
        (r"\left(\begin{array}{cc}1&2\\3&4\end{array}\right)", r"\begin{pmatrix}1&2\\3&4\end{pmatrix}"),
        (r"\left[\begin{matrix}1\\2\end{matrix}\right]", r"\begin{pmatrix}1\\2\end{pmatrix}"),
    ],
)
def test_fonts_units_as_fractions_and_matrices_of_arrays_are_spellings(answer: str, gold: str) -> None:
    assert compare(rf"\boxed{{{answer}}}", gold)
    assert not compare(rf"\boxed{{{answer.replace('2', '7').replace('8', '7').replace('5', '7')}}}", gold)


@pytest.mark.parametrize(
    "said",
    [
        *("42 cannot be right.", "42 can't be it", "42 could not be the answer.", "Not 42.", "I doubt it is 42."),
        *("42 is too large.", "It's anything but 42.", "42? No.", "42, which is wrong.", "We get 42, a contradiction."),
    ],
)
def test_a_number_that_the_text_denies_is_no_answer(said: str) -> None:
    assert not compare(said, "42")


@pytest.mark.parametrize(
    "said", ["I cannot see why, but it is 42.", "42, which is what was asked.", "Is it 42? Now yes.", "42 cans"]
)
def test_a_denial_of_something_else_leaves_the_number(said: str) -> None:
    assert compare(said, "42")


def test_bars_and_commas_of_tex_are_spellings() -> None:
    assert compare(r"\boxed{\lvert x \rvert}", "|x|")
    assert compare(r"\boxed{1\text{, }2\text{, and }3}", "1,2,3")
    assert not compare(r"\boxed{1\text{, }2\text{, and }4}", "1,2,3")
