"""Order of letters, words and lists; second thoughts; denials in other languages."""

import pytest

from covey_graders.math.judge import compare

OTHERS = {
    "knight, knave": ["knave, knight", "\\text{knave}, \\text{knight}", "knave and knight"],
    "yes, no, yes": ["no, yes, yes", "yes, yes, no", "no, no, yes"],
    "red; blue": ["blue; red"],
    "T, F, T": ["T, T, F"],
    "T F T": ["F T T"],
    "tea": ["eat"],
    "THE": ["HTE"],
    "CO": ["OC"],
    "LRL": ["RLL", "\\text{LLR}"],
    "H2O": ["OH2"],
    "e4 e5": ["e5 e4"],
    "ABBA": ["BABA"],
    "B A C": ["A B C"],
    "5 6 7": ["210", "7 6 5", "5 42"],
    "1 0 1": ["0", "1 1 0"],
    "1 2\n3 4": ["24", "1 3\n2 4"],
    "1, 0, 1": ["1, 1, 0", "1, 0"],
    "abc123": ["123abc", "abc321"],
    "x1y2": ["2x1y"],
    "['a', 'b']": ["['b', 'a']"],
    "5\\%": ["5 \\text{ cm}", "5 \\text{ cents}"],
    "(1) Ann is a knave\n(2) Bob is a knight": ["(1) Ann is a knight\n(2) Bob is a knave"],
    "Ann is a knave, and Bob is a knight": ["Ann is a knight, and Bob is a knave"],
}
SAME = {
    "knight, knave": ["knight, knave", "\\text{Knight}, \\text{knave}"],
    "red and blue": ["blue and red"],
    "\\{red, blue\\}": ["\\{blue, red\\}"],
    "Ann is a knave, and Bob is a knight": ["Bob is a knight and Ann is a knave"],
    "abc": ["cab"],
    "sin x cos x": ["cos x sin x"],
    "1, 2, 3": ["3, 2, 1"],
    "A, B": ["B, A"],
    "5 6 7": ["5 6 7", "5\\ 6\\quad 7"],
    "1 0\n0 1": ["1 0\n0 1", "1 0 0 1"],
    "1, 0, 1": ["1, 0, 1"],
    "['a', 'b']": ['["a", "b"]'],
    "5\\%": ["5 \\text{ per cent}"],
    "3 hours 20 minutes": ["3 hours 20 minutes"],
}


def wrong_verdicts(cases: dict[str, list[str]], is_right: bool) -> list[tuple[str, str]]:
    return [(gold, text) for gold in cases for text in cases[gold] if compare(f"\\boxed{{{text}}}", gold) != is_right]


def test_letters_words_and_numbers_in_another_order_are_another_answer() -> None:
    assert wrong_verdicts(OTHERS, is_right=False) == []


def test_where_no_order_is_stated_any_is_right() -> None:
    assert wrong_verdicts(SAME, is_right=True) == []


@pytest.mark.parametrize(
    ("question", "is_right"),
    [
        ("List them in increasing order.", False),
        ("What are x and y, respectively?", False),
        ("Sort 3, 1, 2.", False),
        ("Give the roots in any order.", True),
        ("Solve it, in order to find x.", True),
        ("They stand in some order. Which numbers?", True),
        ("List them from least to greatest.", False),
    ],
)
def test_a_question_may_ask_for_an_order(question: str, is_right: bool) -> None:
    assert compare("\\boxed{3,1,2}", "1,2,3", question) is is_right
    assert compare("\\boxed{1,2,3}", "1, 2, 3", question)
    assert compare("\\boxed{y=2,x=1}", "x=1,y=2", question)


@pytest.mark.parametrize(
    "said",
    [
        "\\boxed{18}. Actually, 17.",
        "\\boxed{18} Wait, that's wrong. It is 17.",
        "\\boxed{18}. Hmm, no: 17.",
        "#### 18\nOn second thought, 17.",
        "The answer is 18. No, 17.",
        "The answer is 18. Wait, no, it should be 17.",
        "<answer>18</answer> Actually, 17.",
        "Answer: 18? Or 17?",
        "The answer is 18 (but possibly 17)",
        "Answer: 18, otherwise 17",
        "I don't think it's 18",
        "答案不是18",
        "答えは18ではありません。",
        "La respuesta no es 18",
        "La réponse n'est pas 18",
        "Die Antwort ist 17, nicht 18.",
        "Ответ: 17, а не 18",
    ],
)
def test_a_second_thought_and_a_denial_take_a_value_back(said: str) -> None:
    assert not compare(said, "18")


@pytest.mark.parametrize(
    "said",
    [
        "\\boxed{18}. No, wait, let me double check: 18 it is.",
        "\\boxed{18}\nActually the sum 17 + 1 is easy.",
        "\\boxed{18}. Actually, 17 of them were red, but all count.",
        "The answer is 18. No other 17 values exist.",
        "#### 18\n\nNo further steps.",
        "The answer is 18. Actually, 18.",
        "La respuesta es 18.",
        "答案是１８。",
    ],
)
def test_what_only_looks_like_one_takes_nothing_back(said: str) -> None:
    assert compare(said, "18")


@pytest.mark.parametrize(
    ("said", "gold", "is_right"),
    [
        ("The statement is true.", "True", True),
        ("The statement is not true.", "True", False),
        ("故选：C。", "C", True),
        ("答案为B", "B", True),
        ("答案是A或B", "B", False),
    ],
)
def test_choices_and_statements_may_be_worded(said: str, gold: str, is_right: bool) -> None:
    assert compare(said, gold) is is_right


@pytest.mark.parametrize(("said", "is_right"), [("1 2\n3 4", True), ("1 3\n2 4", False), ("4", False)])
def test_an_answer_may_stand_between_fences(said: str, is_right: bool) -> None:
    assert compare(f"So:\n```\n{said}\n```", "1 2\n3 4") is is_right
    assert compare(f"```text\n9\n```\nno,\n```\n{said}\n```\n", "1 2\n3 4") is is_right
