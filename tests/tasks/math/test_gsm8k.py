"""Word problems: rows, prompts, reward schemes, and the scores other libraries give."""

import asyncio
import json
from pathlib import Path

import pytest

from covey.types import CutText, Failure, Reward
from covey_graders.math.symbolic import trl_accuracy
from covey_tasks.math.gsm8k import (
    GSM8K,
    INSTRUCTIONS,
    covey_reward,
    split_answer,
    torchrl_reward,
    verl_flexible_reward,
    verl_strict_reward,
)
from covey_tasks.math.schemes import torchrl_reward as torchrl_scale
from covey_tasks.math.settings import Gsm8kConfig
from covey_tasks.math.verifier import MathVerifier

ROW = {"question": "How much are 3 boxes at $410?", "answer": "3*410 = <<3*410=1230>>1230 dollars.\n#### 1,230"}
ROWS = {"train": [ROW], "test": [ROW]}


def scores(environment: GSM8K, completions: list[str]) -> list[Reward | Failure]:
    return asyncio.run(environment.score(environment.prompts("train")[0], completions))


def test_an_answer_is_split_into_solution_and_gold() -> None:
    assert split_answer(ROW["answer"]) == ("3*410 = 1230 dollars.", "1230")


@pytest.mark.parametrize("answer", ["42", "#### 41\n#### 42", "so 42\n#### ", None])
def test_a_row_without_exactly_one_gold_is_refused_by_its_number(answer: str | None) -> None:
    problem = "answer must end in one '#### N'" if answer else "column 'answer' must be text, got None"
    with pytest.raises(ValueError, match=f"^train row 2 {problem}"):
        GSM8K({"train": [ROW, {"question": "?"} | ({"answer": answer} if answer else {})], "test": [ROW]})


def test_a_prompt_holds_an_instruction_and_the_question() -> None:
    (prompt,) = GSM8K(ROWS).prompts("train")
    assert [message["role"] for message in prompt.text] == ["system", "user"]
    assert prompt.text[1]["content"] == ROW["question"]
    assert prompt.columns["gold"] == "1230"


def test_the_right_answer_scores_one_in_any_form_and_the_form_is_logged() -> None:
    rewards = scores(
        GSM8K(ROWS), ["#### 1,230", "The answer is $1230.00.", "#### 1231", "1231", "\\boxed{3\\cdot 410=1230}"]
    )
    assert rewards == [
        Reward(1.0, {"correct": 1.0, "format": 1.0}),
        Reward(1.0, {"correct": 1.0, "format": 0.0}),
        Reward(0.1, {"correct": 0.0, "format": 1.0}),
        Reward(0.0, {"correct": 0.0, "format": 0.0}),
        Reward(1.0, {"correct": 1.0, "format": 0.0}),
    ]


@pytest.mark.parametrize(
    "box", ["\\boxed{7}", "So it is \\(\\boxed{\\$7}\\).", "\\[ \\boxed{7\\text{ pens}} \\]\nThat is all."]
)
def test_a_wrong_answer_in_the_only_box_earns_the_format_reward(box: str) -> None:
    assert covey_reward(box, False, 0.1).value == 0.1


@pytest.mark.parametrize(
    "box", ["\\boxed{x}", "\\boxed{}", "\\boxed{7} or \\boxed{8}", "\\boxed{7", "<think>\\boxed{7}</think> 8"]
)
def test_a_box_without_a_number_and_several_boxes_are_not_the_requested_form(box: str) -> None:
    assert covey_reward(box, False, 0.1).value == 0.0


@pytest.mark.parametrize("scheme", ["covey", "values"])
def test_a_cut_answer_counts_where_it_is_marked_and_not_by_its_last_number(scheme: str) -> None:
    environment = GSM8K(ROWS, Gsm8kConfig(scheme=scheme))
    assert scores(environment, ["So there are 1230"]) == [Reward(1.0, {"correct": 1.0, "format": 0.0})]
    cut = scores(environment, [CutText("So there are 1230"), CutText("The answer is not 7. There are 1230")])
    assert cut == [Reward(0.0, {"correct": 0.0, "format": 0.0})] * 2
    assert scores(environment, [CutText("#### 1230\nBecause")])[0].value == 1.0  # type: ignore[union-attr]


@pytest.mark.parametrize("last", ["#### 7", "####7", "#### $1,230.50 \n\n", "#### -.5"])
def test_a_wrong_last_line_in_the_requested_form_earns_the_format_reward(last: str) -> None:
    assert covey_reward(f"So it is.\n{last}", False, 0.1).value == 0.1
    assert covey_reward(last, False, 0.1).value == 0.1
    assert covey_reward(f"<think>#### 8?</think>\n{last}", False, 0.1).value == 0.1
    assert covey_reward(f"so {last}", False, 0.1).value == 0.0


def test_a_last_line_that_is_too_long_is_not_in_the_requested_form() -> None:
    assert covey_reward("#### " + "1" * 195, False, 0.1).value == 0.1
    assert covey_reward("#### " + "1" * 196, False, 0.1).value == 0.0
    assert covey_reward("so #### " + "1" * 196, False, 0.1).value == 0.0


@pytest.mark.parametrize(
    "completion",
    [
        "#### 1\n#### 2",
        "#### 1\nor so",
        "#### one",
        "####",
        "#### {answer}",
        "<think>So:\n#### 1",
        "<think>\n#### 1</think>",
    ],
)
def test_the_form_is_one_last_line_with_a_number(completion: str) -> None:
    assert covey_reward(completion, False, 0.1).value == 0.0


@pytest.mark.parametrize("answer", ["#### 3*410", "#### 2460/2", "\\boxed{\\sqrt{1512900}}", "The answer is 1000+230."])
def test_an_answer_that_is_not_computed_is_wrong_unless_values_alone_are_asked_for(answer: str) -> None:
    rewards = [*scores(GSM8K(ROWS), [answer]), *scores(made := GSM8K(ROWS, Gsm8kConfig(scheme="values")), [answer])]
    made.close()
    assert [reward.value for reward in rewards if isinstance(reward, Reward)] == [0.0, 1.0]


@pytest.mark.long
def test_answers_that_need_algebra_are_judged_in_a_worker() -> None:
    environment = GSM8K(ROWS, Gsm8kConfig(scheme="values"))
    rewards = scores(environment, ["\\boxed{\\sqrt{1512900}}", "\\boxed{\\sqrt{1512901}}"])
    environment.close()
    assert [reward.value for reward in rewards if isinstance(reward, Reward)] == [1.0, 0.0]


@pytest.mark.long
def test_an_answer_that_hangs_algebra_is_wrong_and_counted() -> None:
    environment = GSM8K(ROWS, Gsm8kConfig(scheme="trl"))
    environment._verifier = MathVerifier(timeout=1.5)
    slow = "\\boxed{\\binom{999999999}{499999999}}"
    assert scores(environment, [slow]) == [Reward(0.0, {"correct": 0.0})]
    assert environment.metrics() == {"math_calls": 1.0, "math_timeouts": 1.0, "math_crashes": 0.0}
    assert environment.metrics() == {"math_calls": 0.0, "math_timeouts": 0.0, "math_crashes": 0.0}
    environment.close()


async def values_of_demonstrations(environment: GSM8K) -> set[float]:
    shown = [pair for split in ("train", "test") for pair in environment.demonstrations(split)]
    rewards = [(await environment.score(prompt, [text]))[0] for prompt, text in shown]
    return {reward.value if isinstance(reward, Reward) else -1.0 for reward in rewards}


@pytest.mark.parametrize("scheme", sorted(INSTRUCTIONS))
def test_demonstrations_score_full_marks_in_every_scheme(scheme: str) -> None:
    environment = GSM8K(ROWS, Gsm8kConfig(scheme=scheme))
    assert asyncio.run(values_of_demonstrations(environment)) == {1.0}
    environment.close()


@pytest.mark.long
def test_an_unreadable_gold_is_a_failure_in_the_trl_scheme() -> None:
    environment = GSM8K({"train": [{"question": "?", "answer": "#### \\"}], "test": []}, Gsm8kConfig(scheme="trl"))
    (failure,) = scores(environment, ["42"])
    environment.close()
    assert failure == Failure("math-verify cannot read the gold answer '\\\\'")


def test_verl_reads_the_last_hashes_of_the_last_300_characters() -> None:
    assert verl_strict_reward("#### 1,230", "1230").value == 1.0
    assert verl_strict_reward("#### 1230" + " " * 300, "1230").value == 0.0
    assert [verl_strict_reward(text, "18").value for text in ("#### 18.", "#### 18.00", "#### $18", "####18")] == [
        0.0
    ] * 4


def test_verl_flexible_keeps_commas_and_stops() -> None:
    assert verl_flexible_reward("so 42 .", "42").value == 1.0
    assert verl_flexible_reward("so 42.", "42").value == 0.0
    assert verl_flexible_reward("1,230", "1230").value == 0.0


def test_torchrl_takes_the_first_answer_tag_and_pays_for_a_wrong_one() -> None:
    right = torchrl_reward("<think>x</think><answer>$1,200.00</answer><answer>7</answer>", "1200")
    assert right == Reward(1.0, {"correct": 1.0, "answer": 1.0, "think": 1.0})
    assert torchrl_reward("<answer>7</answer>", "42").value == 0.1
    assert torchrl_reward("<answer> </answer>", "42").value == 0.0
    assert torchrl_reward("42", "42").value == 0.0


@pytest.mark.parametrize("settings", [{"scheme": "verl"}, {"format_reward": 1.0}])
def test_impossible_settings_are_refused(settings: dict) -> None:
    with pytest.raises(ValueError, match=r"must be (one of|<)"):
        GSM8K(ROWS, Gsm8kConfig(**settings))


@pytest.mark.shared
@pytest.mark.parametrize("scheme", sorted(INSTRUCTIONS))
def test_all_700_gold_answers_score_full_marks(shared: Path, scheme: str) -> None:
    rows = {split: _rows(shared / "data" / "gsm8k" / f"{split}.jsonl") for split in ("train", "test")}
    assert len(rows["train"]) + len(rows["test"]) == 700
    environment = GSM8K(rows, Gsm8kConfig(scheme=scheme))
    assert asyncio.run(values_of_demonstrations(environment)) == {1.0}
    environment.close()


@pytest.mark.shared
@pytest.mark.parametrize(
    ("column", "reward"),
    [
        ("verl_gsm8k_strict", verl_strict_reward),
        ("verl_gsm8k_flexible", verl_flexible_reward),
        ("torchrl_gsm8k", torchrl_reward),
    ],
)
def test_scores_equal_those_of_the_library_they_reproduce(shared: Path, column: str, reward: object) -> None:
    assert callable(reward)
    rows = _rows(shared / "data" / "math_answers.jsonl")
    different = [r["id"] for r in rows if reward(r["completion"], r["gold"]).value != r["external"][column]]
    assert different == []


@pytest.mark.long
@pytest.mark.shared
def test_trl_scores_equal_the_recorded_ones_but_for_a_percentage(shared: Path) -> None:
    rows = _rows(shared / "data" / "math_answers.jsonl")
    different = [
        row["id"] for row in rows if trl_accuracy(row["completion"], row["gold"]) != row["external"]["trl_accuracy"]
    ]
    # 0.35 against 35\%: newer versions of math-verify's parser read the gold as 35. The installed trl agrees with us
    # (test_trl_compatibility).
    assert set(different) <= {"ma-s-041"}


def _rows(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_torchrl_pays_nothing_for_what_is_right_outside_of_an_answer_block() -> None:
    assert torchrl_scale("<think>2</think> 42", is_right=True).value == 0.0
    assert torchrl_scale("<answer>42</answer>", is_right=True).value == 1.0


@pytest.mark.parametrize("scheme", ["covey", "verl_strict", "torchrl"])
def test_a_teacher_is_told_the_answer_that_was_not_accepted(scheme: str) -> None:
    said = ["so #### 12", "I do not know", f"\\boxed{{{'7' * 1000}}}", CutText("it is 12")]
    rewards = scores(GSM8K(ROWS, Gsm8kConfig(scheme=scheme)), said)
    noted = [reward.extra["feedback"] for reward in rewards if isinstance(reward, Reward)]
    not_accepted = "The answer was not accepted: "
    assert noted == [not_accepted + "12", "No answer was found.", not_accepted + "7" * 200, "No answer was found."]


def test_a_right_answer_has_no_note_for_a_teacher() -> None:
    (right,) = scores(GSM8K(ROWS), ["#### 1,230"])
    assert isinstance(right, Reward)
    assert right.extra == {}
