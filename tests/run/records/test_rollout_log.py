"""What is kept of answers: who asked what, what was written and earned, how much of it."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from covey.config.schema import OutputConfig
from covey.rollouts.source import Dropped
from covey.run.evaluate import Answers
from covey.run.records.rollout_log import (
    AnswerLog,
    AnswerRow,
    answer_row,
    answers_per_evaluation,
    best_to_worst,
    bound_columns,
    evaluation_rows,
    list_sampled,
    spread,
    spread_over,
)
from covey.types import Group, Prompt, Reward, Rollout, Turn

from ...support.small import timeless


def group_of(prompt_id: str, *rewards: float, columns: dict[str, Any] | None = None) -> Group:
    rollouts = tuple(
        Rollout((5, 8), (8, 2), (True, True), (-0.1, -0.2), Reward(r, {"correct": r}), f"says {r}", "stop", 3)
        for r in rewards
    )
    return Group(Prompt(prompt_id, "arithmetic", f"text of {prompt_id}", columns or {}), rollouts, ())


def rows_of(
    step: int, groups: Sequence[Group], advantages: Sequence[float], dropped: Sequence[Dropped], most: int
) -> list[AnswerRow]:
    """What rollouts.jsonl gets."""
    return [one.row(step) for one in spread_over(list_sampled(groups, advantages, dropped), most)]


ASKED = {
    "step": 7,
    "environment": "arithmetic",
    "prompt_id": "train-1",
    "prompt": "text of train-1",
    "columns": {"answer": 48},
    "completion": "says 1.0",
    "num_tokens": 2,
    "reward": 1.0,
    "parts": {"correct": 1.0},
    "finish_reason": "stop",
}


def test_a_rollout_row_says_what_was_asked_answered_and_earned() -> None:
    rows = rows_of(7, [group_of("train-1", 1.0, columns={"answer": 48})], [0.5], [], 8)
    assert timeless(rows) == [{**ASKED, "advantage": 0.5, "policy_version": 3, "dropped": None}]


def test_turns_of_an_episode_say_what_each_was_trained_with() -> None:
    (plain,) = [group_of("train-1", 1.0)]
    turns = (Turn(0, 1, 0.25), Turn(1, 2, 0.5))
    episode = replace(plain, rollouts=(replace(plain.rollouts[0], turns=turns, stop_reason="completed"),))
    (row,) = [one.row(7) for one in list_sampled([episode], [0.1], [], [(0.3, -0.1)])]
    assert [(turn["reward"], turn["advantage"]) for turn in row["turns"]] == [(0.25, 0.3), (0.5, -0.1)]
    (alike,) = [one.row(7) for one in list_sampled([episode], [0.1], [])]
    assert [turn.keys() for turn in alike["turns"]] == [row["turns"][0].keys() - {"advantage"}] * 2


def test_a_rollout_of_a_dropped_group_says_why_and_has_no_advantage() -> None:
    left_out = Dropped(group_of("train-1", 1.0, columns={"answer": 48}), "filtered_all_right")
    (row,) = timeless(rows_of(7, [], [], [left_out], 8))
    assert row == {**ASKED, "advantage": None, "policy_version": 3, "dropped": "filtered_all_right"}


def test_an_evaluation_row_says_whether_the_answer_was_greedy_and_right() -> None:
    right, wrong = group_of("train-1", 1.0, columns={"answer": 48}), group_of("train-1", 0.0)
    greedy, sample = timeless(evaluation_rows(7, Answers([right], [wrong]), 1.0, 8))
    assert greedy == {**ASKED, "kind": "evaluate", "greedy": True, "correct": True}
    assert (sample["greedy"], sample["correct"]) == (False, False)


def test_rollouts_are_spread_over_the_groups_of_a_step() -> None:
    rows = rows_of(1, [group_of("a", 0.0, 1.0), group_of("b", 0.0, 1.0)], [-1.0, 1.0, -1.0, 1.0], [], 2)
    assert [row["prompt_id"] for row in rows] == ["a", "b"]


@pytest.mark.parametrize(
    ("num_trained", "num_dropped", "most", "expected"),
    [
        (20, 20, 8, (6, 2)),
        (20, 0, 8, (8, 0)),
        (3, 20, 8, (3, 5)),
        (0, 20, 8, (0, 8)),
        (20, 20, 3, (3, 0)),
        (5, 1, 8, (5, 1)),
    ],
)
def test_dropped_groups_get_a_quarter_of_the_rows_or_what_is_left(
    num_trained: int, num_dropped: int, most: int, expected: tuple[int, int]
) -> None:
    dropped = [Dropped(group_of("d", *[1.0] * num_dropped), "stale_groups")]
    rows = rows_of(1, [group_of("t", *[0.0] * num_trained)], [0.0] * num_trained, dropped, most)
    assert (sum(row["dropped"] is None for row in rows), sum(row["dropped"] is not None for row in rows)) == expected


def test_rollouts_are_shown_from_the_best_to_the_worst() -> None:
    dropped = [Dropped(group_of("d", 0.5, 0.75), "stale_groups")]
    found = list_sampled([group_of("t", 0.0, 1.0, 0.25)], [-1.0, 1.0, 0.0], dropped)

    def rewards(most: int) -> list[float]:
        return [one.rollout.reward.value for one in best_to_worst(found, most)]

    assert [rewards(most) for most in (0, 1, 2, 3, 9)] == [
        [],
        [1.0],
        [1.0, 0.0],
        [1.0, 0.5, 0.0],
        [1.0, 0.75, 0.5, 0.25, 0.0],
    ]
    assert best_to_worst([], 3) == []


def test_greedy_answers_come_first_and_samples_take_what_is_left() -> None:
    answers = Answers([group_of(name, 1.0) for name in "abc"], [group_of(name, 0.0, 0.0) for name in "abc"])
    kept = [(row["prompt_id"], row["greedy"]) for row in evaluation_rows(0, answers, 1.0, 6)]
    assert kept == [("a", True), ("b", True), ("c", True), ("a", False), ("b", False), ("c", False)]
    assert [row["prompt_id"] for row in evaluation_rows(0, answers, 1.0, 2)] == ["a", "b"]
    assert evaluation_rows(0, answers, 1.0, 0) == []


def test_notes_take_the_place_of_nothing_that_is_said_of_an_answer() -> None:
    group = group_of("train-1", 1.0)
    noted = Reward(1.0, {}, {"reward": 5, "kind": "odd", "why": "short"})
    row = answer_row(1, group.prompt, replace(group.rollouts[0], reward=noted))
    assert (row["reward"], row["extra/reward"], row["extra/kind"], row["why"]) == (1.0, 5, "odd", "short")


def test_every_evaluation_of_a_run_has_the_same_room_for_answers() -> None:
    output = OutputConfig(max_rollout_rows=100, answers_per_evaluation=1000)
    for every, most in ((5, 25), (0, 50)):  # before, after steps 5 and 10, after
        assert answers_per_evaluation(output, every, num_steps=11) == most


def test_the_file_is_bounded_over_restarts_too(tmp_path: Path) -> None:
    for step in range(3):
        log = AnswerLog(tmp_path / "rollouts.jsonl", max_rows=3)
        log.log(rows_of(step, [group_of("a", 0.0, 1.0)], [-1.0, 1.0], [], 2))
        log.close()
    lines = (tmp_path / "rollouts.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [0, 0, 1]


def test_what_an_environment_noted_is_written_though_json_does_not_know_it(tmp_path: Path) -> None:
    log = AnswerLog(tmp_path / "rollouts.jsonl", max_rows=1)
    log.log([{"note": np.float32(0.5), "all": np.array([1, 2]), "file": Path("a.txt")}])
    log.close()
    row = json.loads((tmp_path / "rollouts.jsonl").read_text())
    assert row == {"note": 0.5, "all": [1, 2], "file": "a.txt"}


def test_advantages_must_fit_the_rollouts() -> None:
    with pytest.raises(ValueError):
        rows_of(1, [group_of("a", 0.0, 1.0)], [1.0], [], 2)


def test_spread_indices_start_at_the_first_and_never_exceed_what_there_is() -> None:
    assert spread(10, 3) == [0, 3, 6]
    assert spread(2, 8) == [0, 1]
    assert spread(5, 0) == spread(0, 5) == spread(5, -1) == []


@dataclass(frozen=True)
class Problem:
    tests: tuple[str, ...]


HOLDS_ITSELF: list[Any] = []
HOLDS_ITSELF.append(HOLDS_ITSELF)


@pytest.mark.parametrize(
    ("columns", "kept"),
    [
        ({"answer": 48, "level": None, "unit": "km"}, {"answer": 48, "level": None, "unit": "km"}),
        ({"nums": (1, 2), "problem": Problem(("f(1)",))}, {"nums": [1, 2], "problem": {"tests": ["f(1)"]}}),
        ({"text": "a" * 2000}, {"text": "a" * 1000 + "…"}),
        ({"tests": ["b" * 2000]}, {"tests": '["' + "b" * 998 + "…"}),
        ({"set": {1}}, {"set": "{1}"}),
        ({"odd": {(1, 2): 3}}, {"odd": "{(1, 2): 3}"}),
        ({"round": HOLDS_ITSELF}, {"round": "[[...]]"}),
    ],
)
def test_columns_become_json_data_and_long_ones_are_cut(columns: dict[str, Any], kept: dict[str, Any]) -> None:
    assert bound_columns(columns) == kept


def test_columns_of_one_row_are_bounded_together() -> None:
    kept: AnswerRow = bound_columns({f"c{n}": "x" * 900 for n in range(50)})
    assert len(json.dumps(kept)) < 6000
    assert list(kept)[:4] == ["c0", "c1", "c2", "c3"]
