"""How starts, rests of steps and evaluations are measured, and the page that shows them."""

from pathlib import Path

import pytest

from benchmarks.speed import starts
from covey_report.plan.settings import derive_numbers

from ..config.test_config import composed

ROOT = Path(__file__).resolve().parents[2]
LOG = """2026-01-02 10:00:03,500 INFO covey.run.records.record: preflight 9 of 9: gradient
2026-01-02 10:00:04,000 INFO covey.run.records.record: preflight: 9 checks passed in 1.2 s
2026-01-02 10:00:07,000 INFO covey.run.records.record: evaluated after step 0: {'reward_mean': 0.1}
2026-01-02 10:00:08,000 INFO covey.run.records.record: step 1: reward 0.1, loss 0.2
2026-01-02 10:00:10,000 INFO covey.run.records.record: step 2: reward 0.2, loss 0.1
2026-01-02 10:00:11,000 INFO covey.run.records.record: evaluated after step 2: {'reward_mean': 0.2}
"""
PHASES = {"evaluation": 3.0, "sampling": 2.0, "backward": 1.6, "preflight": 1.2, "cold_start": 0.5}
CONFIG = {
    "num_steps": 2,
    "groups_per_step": 2,
    "group_size": 5,
    "evaluation": {"num_prompts": 3, "num_samples": 4},
}


def test_a_run_is_timed_by_its_log() -> None:
    moments = starts.moments_of(LOG)
    assert list(moments) == ["preflight", "evaluated 0", "step 1", "step 2", "evaluated 2"]
    summary = {"phases": {name: {"seconds": seconds} for name, seconds in PHASES.items()}}
    found = starts.figures(moments["preflight"] - 4.0, moments, summary, CONFIG)
    assert found["start"] == pytest.approx(3.5)
    assert found["step"] == pytest.approx(2.0)  # six seconds of which the first evaluation took two
    assert found["rest"] == pytest.approx(0.1)
    assert found["cost"] == pytest.approx(0.5)  # 0.1 s of each of 30 answers, 0.2 of each of 20


def test_the_share_of_evaluations_follows_from_their_cost() -> None:
    assert starts.share(0.5, 900, 200) == pytest.approx(0.1)


@pytest.mark.parametrize("name", starts.CASES)
def test_a_case_stands_for_its_recipe(name: str) -> None:
    case = starts.CASES[name]
    (recipe,) = (word for word in case.words if word.startswith("recipe="))
    counts = derive_numbers(composed(recipe))
    assert case.answers == (counts["rollouts_in_all"], counts["evaluations"] * counts["completions_per_evaluation"])


def test_the_page_shows_the_starts_that_were_measured() -> None:
    page = (ROOT / "docs" / "use" / "real_models.md").read_text(encoding="utf-8").splitlines()
    lines = starts.table(starts.load(starts.NAME))
    assert [line for line in lines if line not in page] == []
    assert len(lines) > 4
