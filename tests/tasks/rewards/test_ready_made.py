"""The ready-made rewards: values by hand, and the refusal of options that cannot be."""

import pickle
from collections.abc import Callable
from typing import Any

import pytest

from covey.environments.reward_functions.call import name_of
from covey.environments.reward_functions.texts import final_text
from covey.rewards import (
    REWARDS,
    CosineScaled,
    LengthPenalty,
    ReasoningAccuracy,
    Repetition,
    SentenceEnd,
    SoftOverlong,
    accuracy,
    think_format,
)
from covey_tasks.rewards.style import num_words

HALF = "$\\frac{1}{2}$"


def tokens(*lengths: int) -> list[list[int]]:
    return [list(range(length)) for length in lengths]


def test_soft_overlong_falls_over_the_last_tokens_and_stays_there() -> None:
    reward = SoftOverlong(max_length=10, cache=4)
    assert reward(completion_ids=tokens(0, 6, 7, 8, 10, 15)) == [0.0, 0.0, -0.25, -0.5, -1.0, -1.0]


def test_repetition_counts_ngrams_that_were_there_before() -> None:
    reward = Repetition(ngram=2, max_penalty=-2.0)
    given = [[1, 2, 3, 4], [5, 5, 5, 5, 5], [1, 2, 1, 2], [1]]
    assert reward(completion_ids=given) == pytest.approx([0.0, -1.5, -2 / 3, 0.0])


def test_cosine_scaling_prefers_short_right_answers_and_long_wrong_ones() -> None:
    right, wrong = f"\\boxed{{{HALF[1:-1]}}}", "\\boxed{3}"
    given = [right, right, right, wrong, wrong, wrong]
    ids = tokens(0, 50, 200, 0, 50, 200)
    assert CosineScaled(max_length=100)(given, [HALF] * 6, ids) == pytest.approx([1.0, 0.75, 0.5, -1.0, -0.75, -0.5])
    steep = CosineScaled(max_length=100, wrong_short=-4.0, wrong_long=0.0, right_long=2.0, right_short=3.0)
    assert steep(given, [HALF] * 6, ids) == pytest.approx([3.0, 2.5, 2.0, -4.0, -2.0, 0.0])


def test_accuracy_needs_a_box_and_skips_unreadable_gold() -> None:
    given = ["so \\boxed{\\frac{2}{4}}", "\\boxed{0.5}", "0.5", "\\boxed{2}", "", "\\boxed{1}", "\\boxed{1}"]
    assert accuracy(given, [HALF] * 5 + ["", None]) == [1.0, 1.0, 0.0, 0.0, 0.0, None, None]


def test_the_answer_of_a_reasoner_is_what_follows_its_reasoning() -> None:
    given = ["<think>\\boxed{2}</think> \\boxed{0.5}", "\\boxed{0.5}</think> no", "<think> \\boxed{0.5}", "</think>"]
    assert ReasoningAccuracy()(given, [HALF] * 4) == [1.0, 0.0, 0.0, 0.0]
    assert ReasoningAccuracy()(["a</think> \\boxed{0.5} </think> no"], [HALF]) == [0.0]
    other = ReasoningAccuracy(delimiters=["[end]", "</think>"])
    assert other(["</think> \\boxed{2} [end] \\boxed{0.5}"], [HALF]) == [1.0]
    assert other(["</think> \\boxed{0.5}"], [HALF]) == [1.0]


def test_the_thinking_comes_first_once_and_closed() -> None:
    passing = ["<think></think>", "<think>\na\n</think>\nb", "<think>a</think> </think> b"]
    failing = ["", " <think>a</think>", "<think>a", "a</think>", "<think><think>a</think>", "<think>a</think><think>"]
    assert think_format(passing + failing) == [1.0] * 3 + [0.0] * 6


def test_a_sentence_ends_in_a_stop_before_any_white_space() -> None:
    assert SentenceEnd()(["Yes.", "Yes. \n", "Yes", "Yes!", "", "."]) == [1.0, 1.0, 0.0, 0.0, 0.0, 1.0]
    assert SentenceEnd(marks=".!")(["Yes!", "Yes?"]) == [1.0, 0.0]


def test_words_beyond_the_limit_cost_each_the_same() -> None:
    reward = LengthPenalty(max_words=3, per_word=0.5)
    assert reward(["a b c", "a b c.", "a b c d.", ""]) == [0.0, -0.5, -1.0, 0.0]
    assert LengthPenalty(max_words=512)(["word " * 612]) == pytest.approx([-0.1])


def test_words_are_counted_with_their_marks() -> None:
    assert [num_words(text) for text in ("Don't panic.", "a well-known fact", "...", "été 1,5")] == [3, 3, 3, 4]
    assert [num_words(text) for text in ("state-of-the-art", "-".join("abcdefgh"), "a" * 90)] == [1, 3, 3]


def test_text_is_read_from_either_form_of_a_completion() -> None:
    turns = [{"role": "assistant", "content": "first"}, {"role": "tool", "content": "x"}]
    assert final_text("a") == final_text([*turns, {"role": "assistant", "content": "a"}]) == "a"
    assert final_text(turns) == "first"
    assert final_text([{"role": "assistant", "content": None}]) == final_text([]) == ""


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: SoftOverlong(10, 11), r"cache must be in \[1, max_length=10\], got 11"),
        (lambda: Repetition(ngram=0), "ngram must be >= 1, got 0"),
        (lambda: Repetition(max_penalty=0.5), "max_penalty must be <= 0, got 0.5"),
        (lambda: CosineScaled(max_length=0), "max_length must be >= 1, got 0"),
        (lambda: LengthPenalty(max_words=-1), "max_words must be >= 0, got -1"),
        (lambda: LengthPenalty(max_words=1, per_word=-0.1), "per_word must be >= 0, got -0.1"),
        (lambda: SentenceEnd(marks=""), "marks must name at least one character, got none"),
        (lambda: REWARDS["reward_model"]("x", batch_size=0), "batch_size must be >= 1, got 0"),
        (lambda: REWARDS["reward_model"]("x", label=-1), "label must be >= 0, got -1"),
        (lambda: REWARDS["reward_model"]("x", precision="int8"), "precision must be one of float32, bfloat16, float16"),
    ],
)
def test_options_that_cannot_be_are_refused_when_the_reward_is_made(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}"):
        make()


ARGUMENTS = {
    "soft_overlong": {"max_length": 8, "cache": 2},
    "cosine_scaled": {"max_length": 8},
    "length_penalty": {"max_words": 3},
    "pairwise": {"judge": "json:loads"},
    "reward_model": {"model": "some/model"},
}


@pytest.mark.parametrize("name", REWARDS)
def test_every_reward_is_logged_under_its_name_and_can_be_sent_to_a_worker(name: str) -> None:
    made = REWARDS[name]
    reward = made(**ARGUMENTS.get(name, {})) if isinstance(made, type) else made
    assert name_of(reward) == name
    assert name_of(pickle.loads(pickle.dumps(reward))) == name
