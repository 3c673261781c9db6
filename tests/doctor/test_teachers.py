"""A teacher that costs thinking, and one that does not: planted logs."""

from typing import Any

import pytest

from covey_doctor.diagnose import diagnose
from covey_doctor.finding import Level
from covey_doctor.log import RunLog, log_of

SAID = ("Hmm, 7 and 8. Wait, that is 15.", "7 and 8 is 15.")


def log(length: float, says: str, taught: bool = True, reward: float = 0.5) -> RunLog:
    """A run of 40 steps, in the second half of which answers have this length and words."""
    rows: list[dict[str, Any]] = []
    for step in range(1, 41):
        late = step > 12
        rows.append(
            {
                "step": step,
                "learning_rate": 1e-4,
                "sampled_reward_mean": reward if late else 0.5,
                "completion_length_mean": (length if late else 100.0) + step % 3,
                "mean_group_std": 0.4,
                **({"teacher/kl": 0.2} if taught else {}),
            }
        )
    said = [
        {"step": step, "completion": says if step > 12 else SAID[0], "prompt_id": f"p{step}-{n}", "reward": n % 2}
        for step in range(1, 41)
        for n in range(2)
    ]
    return log_of(rows, rollouts=said, settings={"num_steps": 40})


def found(given: RunLog) -> dict[str, Level]:
    return {finding.rule.id: finding.level for finding in diagnose(given)}


def test_a_teacher_beside_which_answers_shorten_and_doubt_goes_costs_thinking() -> None:
    (finding,) = [one for one in diagnose(log(40.0, SAID[1])) if one.rule.id == "D38"]
    assert finding.level is Level.WATCH
    assert "answers shrank from" in str(finding.evidence)
    assert "with a word of doubt fell from" in str(finding.evidence)


@pytest.mark.parametrize(
    ("length", "says", "taught"), [(100.0, SAID[0], True), (100.0, SAID[1], True), (40.0, SAID[1], False)]
)
def test_answers_of_their_length_or_without_a_teacher_are_healthy(length: float, says: str, taught: bool) -> None:
    assert "D38" not in found(log(length, says, taught))
