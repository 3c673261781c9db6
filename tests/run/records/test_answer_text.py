"""Answers as people read them."""

import json
from dataclasses import replace
from typing import Any

from covey.run.evaluate import Answers
from covey.run.records.answer_text import NAMES, as_text, shorten
from covey.run.records.rollout_log import StepRollout, evaluation_rows
from covey.types import Group, Prompt

from ...support.small import rollout


def row(**changes: Any) -> dict[str, Any]:
    """A row of rollouts.jsonl."""
    return {
        "step": 3,
        "prompt_id": "train-17",
        "prompt": "41+7=",
        "columns": {"answer": 48},
        "completion": "48",
        "num_tokens": 3,
        "reward": 1.1,
        "parts": {"correct": 1.0, "format": 0.1},
        "advantage": 0.707,
        "finish_reason": "stop",
        "dropped": None,
    } | changes


def test_an_answer_reads_from_the_question_to_what_it_earned() -> None:
    assert as_text(row()).splitlines() == [
        "step 3, train-17: reward 1.100 (correct 1, format 0.1), advantage +0.71, 3 tokens",
        "  prompt  41+7=",
        "  answer  48",
        "  row     answer: 48",
    ]


def test_what_was_cut_and_what_was_not_trained_is_said() -> None:
    first, *_ = as_text(
        row(advantage=None, dropped="filtered_all_right", finish_reason="length", parts={})
    ).splitlines()
    assert first == (
        "step 3, train-17: reward 1.100, not trained: filtered_all_right, 3 tokens (cut by sampling.max_tokens)"
    )


def test_an_answer_of_an_evaluation_is_right_or_wrong() -> None:
    evaluated = {k: v for k, v in row(parts={}).items() if k not in ("advantage", "dropped")}
    first, *_ = as_text(evaluated | {"greedy": True, "correct": False}).splitlines()
    assert first == "step 3, train-17: reward 1.100, greedy, wrong, 3 tokens"


def test_lines_and_turns_are_kept_under_their_label() -> None:
    talk = [{"role": "user", "content": "41+7?"}, {"role": "assistant", "content": "It is\n48"}]
    lines = as_text(row(prompt=talk, columns={})).splitlines()
    assert lines[1:] == ["  prompt  user: 41+7?", "          assistant: It is", "          48", "  answer  48"]


def test_a_call_of_tools_that_has_no_content_is_shown_as_the_call() -> None:
    calls = [{"function": {"name": "add"}}]
    for said in ({}, {"content": None}):
        lines = as_text(row(prompt=[{"role": "assistant", **said, "tool_calls": calls}], columns={})).splitlines()
        assert lines[1] == f"  prompt  assistant:  {json.dumps(calls)}"


def test_nothing_in_it_acts_on_a_terminal() -> None:
    bad = "\x1b]0;title\x07\u202e\r"
    text = as_text(
        row(prompt_id=bad, prompt=bad, completion=bad, columns={"answer": bad, "n\n": [bad]}, parts={bad: "nan"})
    )
    assert not set(text) & set("\x1b\x07\u202e\r")
    assert len(text.splitlines()) == 4


def test_the_middle_of_a_long_text_is_left_out() -> None:
    assert shorten("a" * 500 + "b" * 500, 10) == "aaaaa … (990 characters) … bbbbb"
    assert shorten("short", 10) == "short"


def test_what_a_reward_function_noted_follows() -> None:
    assert as_text(row(found="4\n8")).splitlines()[-1] == r"  noted   found: 4\n8"


def test_nothing_of_coveys_own_counts_as_noted() -> None:
    prompt = Prompt("train-1", "sums", "41+7=", {"answer": 48})
    trained = StepRollout(prompt, rollout(1.0), 0.5, None).row(3)
    group = Group(prompt, (rollout(1.0),), ())
    (evaluated,) = evaluation_rows(3, Answers([group], []), 1.0, 8)
    episode = StepRollout(prompt, replace(rollout(1.0), stop_reason="completed"), 0.5, None).row(3)
    assert trained.keys() | evaluated.keys() | episode.keys() == NAMES
