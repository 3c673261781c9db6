"""Generated sums: which problems there are, and which completions are right."""

import asyncio

import pytest

from covey.environments.arithmetic import LEVELS, Arithmetic, score
from covey.types import CutText, Prompt, Reward


def test_the_default_is_two_digit_addition_with_enough_problems() -> None:
    environment = Arithmetic()
    assert len(environment.prompts("train")) == 4096
    assert len(environment.prompts("test")) == 512
    for prompt in environment.prompts("train"):
        left, right = str(prompt.text).removesuffix("=").split("+")
        assert 10 <= int(left) <= 99
        assert 10 <= int(right) <= 99
        assert prompt.columns == {"answer": int(left) + int(right), "level": 3}


def test_train_and_test_share_no_problem_and_no_id() -> None:
    environment = Arithmetic(levels=[1, 2, 3], num_train=900, num_test=300)
    prompts = [*environment.prompts("train"), *environment.prompts("test")]
    assert len({prompt.text for prompt in prompts}) == len(prompts)
    assert len({prompt.id for prompt in prompts}) == len(prompts)


def test_the_same_seed_draws_the_same_problems_and_another_seed_others() -> None:
    assert Arithmetic(problem_seed=4).prompts("test") == Arithmetic(problem_seed=4).prompts("test")
    assert Arithmetic(problem_seed=4).prompts("test") != Arithmetic(problem_seed=5).prompts("test")


def test_a_small_level_is_shared_between_the_splits() -> None:
    environment = Arithmetic(levels=[1], num_train=4096, num_test=512)
    assert len(environment.prompts("train")) == 88
    assert len(environment.prompts("test")) == 12


@pytest.mark.parametrize("level", sorted(LEVELS))
def test_answers_of_every_level_follow_the_usual_precedence(level: int) -> None:
    for index in range(0, LEVELS[level].size, max(1, LEVELS[level].size // 50)):
        text, answer = LEVELS[level].problem(index)
        assert eval(text.removesuffix("=")) == answer
        assert set(text + str(answer)) <= set("0123456789+-*= ")


def test_problems_of_a_level_are_all_different() -> None:
    assert len({LEVELS[3].problem(index)[0] for index in range(8100)}) == 8100


def test_several_levels_are_drawn_in_equal_parts_and_mixed() -> None:
    prompts = Arithmetic(levels=[3, 5], num_train=100, num_test=10).prompts("train")
    assert sum(prompt.columns["level"] == 3 for prompt in prompts) == 50
    assert len({prompt.columns["level"] for prompt in prompts[:20]}) == 2


@pytest.mark.parametrize(
    ("completion", "value"),
    [("78", 1.0), (" 78\n", 1.0), ("078", 0.0), ("78.", 0.0), ("+78", 0.0), ("7 8", 0.0), ("", 0.0), ("787", 0.0)],
)
def test_only_the_exact_integer_is_right(completion: str, value: float) -> None:
    assert score(completion, 78) == Reward(value, {"correct": value})


def test_negative_answers_are_written_with_a_minus_sign() -> None:
    assert score("-16", -16).value == 1.0
    assert score("16", -16).value == 0.0


def test_scores_come_in_the_order_of_the_completions() -> None:
    prompt = Prompt("train-0", "arithmetic", "41+37=", {"answer": 78, "level": 3})
    rewards = asyncio.run(Arithmetic().score(prompt, ["77", "78", "79"]))
    assert rewards == [Reward(value, {"correct": value}) for value in (0.0, 1.0, 0.0)]


def test_demonstrations_are_right() -> None:
    environment = Arithmetic(levels=[4, 10], num_train=50, num_test=10)
    for prompt, completion in environment.demonstrations("train"):
        assert score(completion, prompt.columns["answer"]).value == 1.0


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"levels": [11]}, "levels must be different numbers of 1..10, got [11]"),
        ({"levels": []}, "levels must be different numbers of 1..10, got []"),
        ({"levels": [3, 3]}, "levels must be different numbers of 1..10, got [3, 3]"),
        ({"num_test": 0}, "num_train and num_test must be >= 1, got 4096 and 0"),
    ],
)
def test_impossible_settings_are_refused(settings: dict, message: str) -> None:
    with pytest.raises(ValueError) as error:
        Arithmetic(**settings)
    assert str(error.value) == message


def test_in_full_the_same_sums_are_questions_to_a_model_that_chats() -> None:
    short, full = (Arithmetic(num_train=20, num_test=5, style=style) for style in ("short", "full"))
    for sum_alone, question in zip(short.prompts("train"), full.prompts("train"), strict=True):
        assert sum_alone.columns == question.columns
        (message,) = question.text
        assert f"What is {str(sum_alone.text).removesuffix('=')}?" in message["content"]  # type: ignore[index]
    with pytest.raises(ValueError, match="style must be one of short, full, got long"):
        Arithmetic(style="long")


def test_a_question_may_be_answered_in_words_that_state_the_number() -> None:
    environment = Arithmetic(num_train=1, num_test=1, style="full")
    (prompt,) = environment.prompts("train")
    right = str(prompt.columns["answer"])
    said = [
        right,
        f"{str(prompt.text[-1]['content'])[8:13]} = {right}",
        f"{right}.",
        f"{right} or 3",
        "1",
        CutText(right),
    ]  # type: ignore[index]
    found = asyncio.run(environment.score(prompt, said))
    assert [reward.value for reward in found if isinstance(reward, Reward)] == [1.0, 1.0, 1.0, 0.0, 0.0, 0.0]
