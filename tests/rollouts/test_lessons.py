"""What a teacher reads: another prompt, the same tokens after it."""

from dataclasses import replace

import pytest

from covey.environments.arithmetic import Arithmetic
from covey.policy.models.nano import nano_tokenizer
from covey.rollouts.lessons import GoldAnswers, Lessons, feedback_of
from covey.types import Group, Prompt, Reward
from tests.support.builders import rollout_of

TOKENIZER = nano_tokenizer()
PROMPT = Prompt("p", "arithmetic", "4+3=", {"answer": 7})


def ids(text: str) -> list[int]:
    return list(TOKENIZER(text)["input_ids"])


def group(*rewards: float, note: str | None = None) -> Group:
    made = [rollout_of(ids("4+3="), (40 + place, 41)) for place in range(len(rewards))]
    extra = {} if note is None else {"feedback": note}
    pairs = zip(made, rewards, strict=True)
    judged = [replace(one, reward=Reward(value, extra=extra), text=f"a{value:g}") for one, value in pairs]
    return Group(PROMPT, tuple(judged), ())


def lessons(*shows: str, longest: int = 100, column: str | None = None) -> Lessons:
    environment = Arithmetic(levels=[1])
    return Lessons(TOKENIZER, environment, GoldAnswers(environment, column), shows, "{text};", longest)


def test_a_teacher_reads_the_gold_answer_before_the_prompt_and_the_same_tokens_after() -> None:
    given = group(0.0, 1.0)
    for read, one in zip(lessons("gold")(given), given.rollouts, strict=True):
        assert read is not None
        prompt = ids("7;4+3=")
        assert read.input_ids == (*prompt, one.target_ids[-2])
        assert read.target_ids[-2:] == one.target_ids[-2:]
        assert read.loss_mask == (False,) * (len(prompt) - 1) + (True, True)


def test_a_rollout_is_shown_a_solved_sibling_and_never_itself() -> None:
    first, second = lessons("solution")(group(0.0, 1.0))
    assert first is not None
    assert first.input_ids[: len(ids("a1;4+3="))] == tuple(ids("a1;4+3="))
    assert second is None


def test_a_rollout_without_anything_to_show_has_no_teacher() -> None:
    assert lessons("feedback")(group(0.0, 1.0)) == [None, None]
    assert all(lessons("feedback")(group(0.0, 1.0, note="too small")))


def test_what_was_said_of_an_answer_is_shown_up_to_a_length() -> None:
    assert feedback_of(group(0.0, note="x" * 10_000).rollouts[0]) == "x" * 2000
    asked, replied = {"role": "user", "content": "8?"}, {"role": "user", "content": " too small "}
    spoken = replace(group(0.0).rollouts[0], messages=(asked, {"role": "assistant", "content": "7"}, replied))
    assert feedback_of(spoken) == "too small"


def test_a_context_that_overflows_has_no_teacher_instead_of_a_cut_answer() -> None:
    assert lessons("gold", longest=6)(group(0.0, 1.0)) == [None, None]
    assert lessons(longest=3)(group(0.0)) == [None]


def test_an_unknown_gold_column_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"algorithm.gold_column must be a column of the rows \(answer\), got right"):
        lessons("gold", column="right")(group(0.0, 1.0))
