"""Countdown: problems, rules, rewards, and a parser that evaluates nothing as code."""

import asyncio
import random
import time
from fractions import Fraction

import numpy as np
import pytest

from covey.types import CutText, Reward
from covey_graders.countdown import Expression, find_expression, read_expression
from covey_tasks.math.countdown.environment import (
    INSTRUCTIONS,
    Countdown,
    Problem,
    generate,
    joined,
    problem_of,
    random_expression,
    score,
    search_expression,
    whole,
    with_columns,
)
from covey_tasks.math.settings import CountdownConfig

PROBLEM = Problem((3, 5, 7), 22, "3*5+7")
PLAIN = CountdownConfig(answer_form="plain")
FEW = {"num_train": 60, "num_test": 20}


def environment(*problems: Problem, **rules: object) -> Countdown:
    return Countdown({"train": problems or (PROBLEM,), "test": ()}, CountdownConfig(**rules))


# ------------------------------------------------------------------------------------------------ writing


def test_random_expressions_are_read_as_python_would_evaluate_them() -> None:
    generator = random.Random(0)
    for _ in range(300):
        numbers = [generator.randint(1, 20) for _ in range(generator.randint(2, 6))]
        made = random_expression(numbers, "+-*/", generator)
        read = read_expression(made.text)
        assert read is not None
        assert read.value == made.value == round(eval(made.text))
        assert sorted(read.numbers) == sorted(numbers)


def test_parentheses_are_written_only_where_they_are_needed() -> None:
    five, three, two = whole(5), whole(3), whole(2)
    total, difference = joined(five, "+", three), joined(five, "-", three)
    assert total is not None
    assert difference is not None
    texts = [joined(a, sign, b) for a, sign, b in ((total, "*", two), (two, "-", difference), (two, "+", difference))]
    assert [term.text for term in texts if term is not None] == ["(5+3)*2", "2-(5-3)", "2+5-3"]
    assert joined(five, "/", joined(two, "-", two) or two) is None


# ------------------------------------------------------------------------------------------------ rewards


def test_a_truncated_expression_is_no_answer() -> None:
    assert score(CutText("3*5+7"), (3, 5, 7), 22, PLAIN).value == 0.0
    assert score(CutText("<answer>3*5+7</answer> for"), (3, 5, 7), 22, CountdownConfig()).value == 1.0
    assert score(CutText("<answer>3*5+7"), (3, 5, 7), 22, CountdownConfig()).value == 0.0


@pytest.mark.parametrize(
    ("expression", "exactly", "at_most"),
    [
        ("3*5+7", 1.0, 1.0),
        ("7+5*3", 1.0, 1.0),
        ("(3*5)+7*1", 0.1, 0.1),
        ("3*5", 0.1, 0.1),
        ("22", 0.1, 0.1),
        ("3*7+5", 0.1, 0.1),
        ("3+5+7+7", 0.1, 0.1),
        ("3*5+7=22", 0.0, 0.0),
        ("", 0.0, 0.0),
    ],
)
def test_each_number_is_used_exactly_once(expression: str, exactly: float, at_most: float) -> None:
    assert score(expression, (3, 5, 7), 22, PLAIN).value == exactly
    assert score(expression, (3, 5, 7), 22, CountdownConfig(uses="at_most", answer_form="plain")).value == at_most


def test_numbers_may_be_left_over_where_the_rule_says_so() -> None:
    rules = CountdownConfig(uses="at_most", answer_form="plain")
    assert score("3+5", (3, 5, 7), 8, rules).value == 1.0
    assert score("3+5", (3, 5, 7), 8, PLAIN).value == 0.1
    assert score("3+3", (3, 5, 7), 6, rules).value == 0.1
    assert score("3+3", (3, 3, 7), 6, rules).value == 1.0


def test_values_are_compared_as_fractions() -> None:
    assert score("8/(3-8/3)", (3, 3, 8, 8), 24, PLAIN).value == 1.0
    assert score("(1/3)*3", (1, 3, 3), 1, PLAIN).value == 1.0
    assert score("10/3", (10, 3), 3, PLAIN).value == 0.1


@pytest.mark.parametrize(
    ("completion", "value"),
    [
        ("<think>3*5=15, 15+7=22</think>\n<answer>3*5+7</answer>", 1.0),
        ("so</think> <answer> 7 + 3*5 </answer>", 1.0),
        ("<answer>1</answer> no: <answer>3*5+7</answer>", 1.0),
        ("<answer>3*5+7</answer> no: <answer>1</answer>", 0.1),
        ("<think><answer>3*5+7</answer></think>", 0.0),
        ("<answer>three times five plus seven</answer>", 0.1),
        ("<answer>3*5+7 = 22</answer>", 0.1),
        ("<answer> </answer>", 0.0),
        ("<answer>3*5+7", 0.0),
        ("3*5+7", 0.0),
        (r"So \boxed{3 \times 5 + 7}.", 1.0),
        (r"<answer>$\boxed{7 + 3 \cdot 5}$</answer>", 1.0),
        (r"<answer>3*5</answer> \boxed{3*5+7}", 0.1),
        (r"<think>\boxed{3*5+7}</think>", 0.0),
        (r"\boxed{3*5+7} or \boxed{3*5}", 0.1),
        (r"\boxed{}", 0.0),
    ],
)
def test_the_last_closed_answer_tag_outside_the_thoughts_counts(completion: str, value: float) -> None:
    assert score(completion, (3, 5, 7), 22, CountdownConfig()).value == value


def test_the_reward_for_the_form_can_be_set_and_parts_are_logged() -> None:
    rules = CountdownConfig(format_reward=0.0)
    assert score("<answer>1</answer>", (3, 5), 8, rules) == Reward(0.0, {"correct": 0.0, "format": 1.0})
    assert score("<answer>3+5</answer>", (3, 5), 8, rules) == Reward(1.0, {"correct": 1.0, "format": 1.0})


def test_megabytes_of_nonsense_take_no_time() -> None:
    for unit in ("<answer>", "</answer>", "(", "1+", "<answer>1</answer>", "<think>"):
        text = unit * (2_000_000 // len(unit))
        began = time.process_time()
        assert score(text, (3, 5), 8, CountdownConfig()).value <= 0.1
        assert score(text, (3, 5), 8, PLAIN).value == 0.0
        assert time.process_time() - began < 5
    assert find_expression("<answer>" + "1" * 1_000_000 + "</answer>") == "1" * 1_000_000


# ------------------------------------------------------------------------------------------------ problems


@pytest.mark.parametrize("size", [2, 3, 4, 5, 6])
def test_every_made_up_problem_is_solved_by_its_gold(size: int) -> None:
    made = Countdown(generate(CountdownConfig(num_numbers=[size], **FEW)))
    for prompt in (*made.prompts("train"), *made.prompts("test")):
        gold = made.gold(prompt)
        assert gold is not None
        assert asyncio.run(made.score(prompt, [gold])) == [Reward(1.0, {"correct": 1.0, "format": 1.0})]
        assert len(prompt.columns["nums"]) == size
        assert 1 <= prompt.columns["target"] <= 100


def test_no_two_problems_share_numbers_and_target_in_any_order() -> None:
    splits = generate(CountdownConfig(num_numbers=[2, 3], max_number=6, num_train=300, num_test=100))
    keys = [(tuple(sorted(problem.numbers)), problem.target) for problems in splits.values() for problem in problems]
    assert len(set(keys)) == len(keys)


def test_a_small_range_is_shared_between_the_splits() -> None:
    splits = generate(CountdownConfig(num_numbers=[2], max_number=3, num_train=4000, num_test=1000))
    assert {split: len(problems) for split, problems in splits.items()} == {"train": 9, "test": 3}


def test_the_problems_of_a_seed_never_change() -> None:
    splits = generate(CountdownConfig(num_numbers=[2, 3], max_number=9, num_train=4, num_test=2))
    assert [problem.solution for problem in splits["test"]] == ["(2+7)*5", "3+6"]
    assert [problem.solution for problem in splits["train"]] == ["1+9", "7*2", "1+3+5", "7+7-3"]


def test_difficulties_come_in_equal_parts_and_mixed() -> None:
    made = Countdown(generate(CountdownConfig(num_numbers=[3, 5], **FEW)))
    sizes = [made.difficulty(prompt) for prompt in made.prompts("train")]
    assert (sizes.count(3), sizes.count(5)) == (30, 30)
    assert set(sizes[:12]) == {3, 5}


def test_the_same_seed_draws_the_same_problems_and_another_seed_others() -> None:
    assert generate(CountdownConfig(**FEW)) == generate(CountdownConfig(**FEW))
    assert generate(CountdownConfig(**FEW)) != generate(CountdownConfig(**FEW, problem_seed=1))


def test_problems_are_made_of_the_operators_that_were_asked_for() -> None:
    splits = generate(CountdownConfig(operators=["+", "-"], **FEW))
    assert not any(set(problem.solution or "") & set("*/") for problem in splits["train"])


@pytest.mark.parametrize(
    "settings",
    [
        *({"num_numbers": sizes} for sizes in ((), (1,), (7,), (3, 3))),
        *({"operators": signs} for signs in (("-",), ("+", "^"))),
        *({name: 0} for name in ("max_number", "max_target", "num_train", "num_test")),
    ],
)
def test_impossible_problems_are_refused(settings: dict) -> None:
    with pytest.raises(ValueError, match="must be"):
        generate(CountdownConfig(**settings))


@pytest.mark.parametrize("rules", [{"uses": "twice"}, {"answer_form": "box"}, {"format_reward": 1.0}])
def test_impossible_rules_are_refused(rules: dict) -> None:
    with pytest.raises(ValueError, match="must be"):
        Countdown({}, CountdownConfig(**rules))


# ------------------------------------------------------------------------------------------------ rows and prompts


def test_problems_may_come_from_rows_and_are_solved_by_search() -> None:
    rows = [{"nums": [3, 3, 8, 8], "target": 24}, {"nums": [1, 1], "target": 50}]
    made = Countdown({"train": list(map(problem_of, rows))})
    solvable, hopeless = made.prompts("train")
    assert find_expression(made.gold(solvable) or "") == "8/(3-8/3)"
    assert made.gold(hopeless) is None
    assert [prompt for prompt, _ in made.demonstrations("train")] == [solvable]


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        ({"nums": "3 5", "target": 8}, "nums must be a list of whole numbers, got '3 5'"),
        ({"nums": [3, 5.5], "target": 8}, r"nums must be a list of whole numbers, got \[3, 5.5\]"),
        ({"nums": [3, -5], "target": 8}, r"nums must be a list of whole numbers, got \[3, -5\]"),
        ({"nums": [], "target": 8}, r"nums must be a list of whole numbers, got \[\]"),
        ({"nums": [True, 7], "target": 8}, r"nums must be a list of whole numbers, got \[True, 7\]"),
        ({"nums": [3, 5], "target": "8.5"}, "target must be a whole number, got '8.5'"),
    ],
)
def test_a_row_that_is_no_problem_is_refused(row: dict, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        problem_of(row)


def test_rows_of_tables_hold_numbers_as_text_or_in_arrays() -> None:
    rows = (
        {"nums": "[3, 5]", "target": " 8"},
        {"nums": np.array([3, 5]), "target": 8},
        {"nums": [3.0, "5"], "target": 8.0},
    )
    assert {problem_of(row) for row in rows} == {Problem((3, 5), 8, None)}


def test_rows_of_verl_and_rows_that_call_them_numbers_are_read() -> None:
    truth = {"numbers": [3, 5], "target": 8}
    rows = (truth, {"prompt": "?", "reward_model": {"ground_truth": truth}}, {"nums": [3, 5], "target": 8})
    assert {problem_of(with_columns(row)) for row in rows} == {Problem((3, 5), 8, None)}


@pytest.mark.long
def test_a_search_uses_all_numbers_or_some_and_gives_up_in_time() -> None:
    assert read_expression(search_expression([2, 3, 50], 5, uses_all=False) or "") == Expression(Fraction(5), (2, 3))
    assert search_expression([2, 3, 50], 5, uses_all=True) is None
    assert search_expression([1, 2], 3, uses_all=True) == search_expression([1, 2], 3, uses_all=True) == "1+2"
    began = time.process_time()
    assert search_expression([97, 89, 83, 79, 73, 71], 999_983, uses_all=True) is None
    assert time.process_time() - began < 60


def test_a_prompt_says_the_numbers_the_target_and_the_rule() -> None:
    (prompt,) = environment().prompts("train")
    assert prompt.text == (
        {"role": "system", "content": INSTRUCTIONS["tags"]},
        {"role": "user", "content": "Numbers: 3 5 7. Target: 22. Use each number exactly once."},
    )
    assert prompt.columns == {"nums": [3, 5, 7], "target": 22, "solution": "3*5+7", "level": 3}
    assert environment(answer_form="plain").prompts("train")[0].text == "3 5 7 -> 22: "
    (told,) = environment(answer_form="plain", instruction="Reply briefly.", uses="at_most").prompts("train")
    assert told.text[0]["content"] == "Reply briefly."
    assert told.text[1]["content"].endswith("Use each number at most once.")


def test_the_gold_is_in_the_form_that_was_asked_for() -> None:
    plain, tags = environment(answer_form="plain"), environment()
    assert plain.gold(plain.prompts("train")[0]) == "3*5+7"
    assert tags.gold(tags.prompts("train")[0]) == "<think>3*5+7=22</think>\n<answer>3*5+7</answer>"


def test_no_made_up_problem_is_solved_by_one_of_its_numbers() -> None:
    for size in (2, 3, 4):
        problems = [found for split in generate(CountdownConfig(num_numbers=[size], **FEW)).values() for found in split]
        assert [found for found in problems if found.target in found.numbers] == []
