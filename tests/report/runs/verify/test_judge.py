"""A difference of rounding size on another machine is no forgery; a larger one, or one on the same machine, is."""

import pytest

from covey_report.verify.differences import Difference, first_column
from covey_report.verify.judge import judge
from covey_report.verify.plan import Leg, make_plan

from ....support.small import small_config

HERE = {"torch": "2.9", "processor": "A", "threads": 2}


def one(kind: str, same: float | None = None, gap: float | None = None) -> Difference:
    return Difference(3, "something", kind, same, gap)


@pytest.mark.parametrize(
    ("found", "then", "word"),
    [
        ([], HERE | {"torch": "2.8"}, "confirmed"),
        ([one("row", 1.0, 1e-9)], HERE, "differs"),
        ([one("row", 1.0, 1e-5)], HERE | {"torch": "2.8"}, "cannot be verified"),
        ([one("row", 1.0, 0.01)], HERE | {"torch": "2.8"}, "differs"),
        ([one("tokens", 0.95)], HERE | {"processor": "B"}, "cannot be verified"),
        ([one("tokens", 0.4)], HERE | {"processor": "B"}, "differs"),
        ([one("reward", 1.0)], HERE | {"processor": "B"}, "differs"),
        ([one("data")], HERE | {"processor": "B"}, "differs"),
        ([one("weights", 1.0, 0.0), one("reward", 1.0)], HERE | {"threads": 4}, "differs"),
        ([one("row", None, None)], {}, "cannot be verified"),
    ],
)
def test_what_differs_means(found: list[Difference], then: dict[str, object], word: str) -> None:
    assert judge(found, then, HERE, small_config()).word == word


def test_half_precision_rounds_more() -> None:
    found, then = [one("row", 1.0, 0.01)], HERE | {"torch": "2.8"}
    assert judge(found, then, HERE, small_config(model__precision="bfloat16")).word == "cannot be verified"


def test_the_reason_names_what_is_other_here() -> None:
    found = judge([one("row", 1.0, 1e-5)], HERE | {"torch": "2.8"}, HERE, small_config())
    assert found.reason.endswith("the machine is another: torch was 2.8, is 2.9")


def test_the_reason_names_a_reward_whose_file_changed_since() -> None:
    then, now = (HERE | {"user_code": {"rewards mut:r": {"mut.py": found}}} for found in ("1", "2"))
    reason = "the run's own code was changed since, which may be all: rewards mut:r (mut.py)"
    assert judge([one("reward", 1.0)], then, now, small_config()).reason == reason
    assert judge([one("reward", 1.0)], HERE, now, small_config()).reason.startswith("processor, packages, code")


def test_steps_are_drawn_within_the_work_that_is_allowed() -> None:
    legs = [Leg(0, 1, 1)] * 100
    plan = make_plan([0, 50], legs, wanted=20, most=30, seed=3)
    assert plan.cost <= 30
    assert plan.reach == 100
    assert len(plan.drawn) > 1
    assert make_plan([0, 50], legs, wanted=20, most=30, seed=3) == plan
    assert make_plan([0, 50], legs, wanted=20, most=30, seed=4) != plan


def test_steps_on_the_way_are_computed_once() -> None:
    plan = make_plan([0, 50], [Leg(0, 1, 1)] * 100, wanted=100, most=1000, seed=0)
    assert plan.cost == 100


def test_no_step_is_computed_across_a_change_of_settings() -> None:
    legs = [Leg(0, 1, 1)] * 10 + [Leg(1, 1, 1)] * 10
    plan = make_plan([0, 15], legs, wanted=100, most=1000, seed=0)
    assert plan.reach == 15
    assert [leg.changes for leg, _ in plan.work] == [0, 1]
    assert set(plan.drawn) == {*range(1, 11), *range(16, 21)}


def test_numbers_that_follow_the_clock_are_not_compared() -> None:
    row = {"loss": 0.5, "engine/draft_tokens": 32.0, "seconds": 2.0}
    assert first_column(row, {"loss": 0.5, "engine/draft_tokens": 62.0, "seconds": 3.0}) is None
    assert first_column(row, row | {"loss": 0.25}) == "loss"
