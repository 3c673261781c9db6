"""Updates that go astray, and weights that are late: what the numbers of a run show of a broken system."""

from typing import Any

import pytest

from covey_doctor.diagnose import diagnose
from covey_doctor.finding import Level
from covey_doctor.log import RunLog, log_of

FLOAT32 = {"model.precision": "float32", "num_steps": 40}


def found(log: RunLog) -> dict[str, Level]:
    return {finding.rule.id: finding.level for finding in diagnose(log)}


def looked(*gains: float, error: float = 0.1, **more: Any) -> RunLog:
    """A log whose update gain is measured in each step."""
    rows = [
        {"step": step, "learning_rate": 1e-4, "update_gain": gain, "update_gain_error": error, **more}
        for step, gain in enumerate(gains, 1)
    ]
    return log_of(rows, settings=FLOAT32)


def test_updates_that_lower_the_best_answers_go_astray_after_three_looks() -> None:
    assert found(looked(-0.4, -0.3)) == {}
    assert found(looked(-0.4, -0.3, -0.5))["D37"] is Level.SICK


@pytest.mark.parametrize(
    ("gains", "first", "rest", "is_found"),
    [
        *(((-5, -4), 0.34, 0.01, True), ((-5, 4), 0.34, 0.01, False), ((-5, -4), 0.34, 0.1, False)),
        *(((-5, -4), -1.0, -0.5, False), ((-5, -4), -0.5, -1.0, True)),
    ],
)
def test_two_updates_that_undo_all_rewards_go_astray(
    gains: tuple[float, ...], first: float, rest: float, is_found: bool
) -> None:
    looks = [{"update_gain": gain, "update_gain_error": 4.5, "sampled_reward_mean": first} for gain in gains]
    rows = [*looks, *({"sampled_reward_mean": rest} for _ in range(12))]
    log = log_of([{"step": step, "learning_rate": 1e-4, **row} for step, row in enumerate(rows, 1)], settings=FLOAT32)
    assert ("D37" in found(log)) is is_found


def test_updates_that_raise_the_best_answers_do_not_go_astray() -> None:
    assert "D37" not in found(looked(0.4, 0.3, 0.5, 0.4, 0.2))


def test_updates_that_leave_the_policy_where_it_was_go_astray() -> None:
    assert found(looked(1e-7, -1e-7, 2e-7, 0.0, 1e-7, error=1e-7))["D37"] is Level.SICK


def test_updates_that_gain_nothing_that_shows_are_to_be_watched_after_five_looks() -> None:
    assert "D37" not in found(looked(0.1, -0.1, 0.1, 0.0))
    assert found(looked(0.1, -0.1, 0.1, 0.0, -0.05))["D37"] is Level.WATCH


def test_small_gains_that_a_rising_reward_shows_are_enough() -> None:
    rows = [
        {
            "step": step,
            "update_gain": 0.01,
            "update_gain_error": 0.1,
            "reward_mean": 0.2 + 0.02 * step + 0.01 * (step % 2),
        }
        for step in range(1, 41)
    ]
    assert "D37" not in found(log_of(rows, settings=FLOAT32))


@pytest.mark.parametrize(("agreement", "is_sick"), [(1.0, False), (0.6, False), (0.0, True), (-1.0, True)])
def test_advantages_agree_with_the_rewards_of_their_answers(agreement: float, is_sick: bool) -> None:
    log = looked(0.4, 0.3, 0.5, advantage_agreement=agreement)
    assert ("D37" in found(log)) is is_sick


def test_an_engine_far_from_the_trainer_is_named_after_three_steps() -> None:
    def gap(*values: float) -> RunLog:
        return log_of([{"step": n, "mismatch_kl": value} for n, value in enumerate(values, 1)], settings=FLOAT32)

    assert found(gap(0.02, 0.03)) == {}
    assert found(gap(0.02, 0.03, 0.01))["D10"] is Level.SICK
    assert "D10" not in found(gap(0.02, 0.03, 1e-7))
    assert found(gap(1e-9, 0.02, 0.03, 0.04))["D10"] is Level.SICK


def test_verdicts_that_differ_are_named_after_ten_steps() -> None:
    rows = [{"step": step, "disagreement_fraction": 0.12 * (step % 2)} for step in range(1, 11)]
    assert "D24" not in found(log_of(rows[:9], settings=FLOAT32))
    assert found(log_of(rows, settings=FLOAT32))["D24"] is Level.SICK


def test_an_engine_that_keeps_its_first_weights_is_named_after_ten_steps() -> None:
    grown = [1e-6, *(0.002 * step for step in range(1, 10))]
    assert "D12" not in found(gaps(*grown[:9]))
    assert found(gaps(*grown))["D12"] is Level.SICK


def test_a_wrong_sign_is_named_where_all_answers_are_wrong_after_a_step() -> None:
    def after(agreement: float) -> RunLog:
        return log_of([{"step": 1, "advantage_agreement": agreement}, {"step": 2}, {"step": 3}], settings=FLOAT32)

    assert found(after(-1.0))["D37"] is Level.SICK
    assert "D37" not in found(after(0.1))


def gaps(*values: float) -> RunLog:
    rows = [{"step": step, "mismatch": value} for step, value in enumerate(values, 1)]
    return log_of(rows, settings=FLOAT32)


def test_weights_that_arrive_every_fourth_step_are_old_weights() -> None:
    log = gaps(*([1e-6, 0.02, 0.05, 0.08] * 6))
    assert found(log)["D12"] is Level.SICK
    assert "agree again in every 4 steps" in diagnose(log)[0].title


@pytest.mark.parametrize(
    "values",
    [
        [1e-6] * 12 + [0.05] * 12,  # something broke on the way
        [1e-6] * 11 + [0.05] + [1e-6] * 12,  # one bad step
        [0.05] * 24,  # never right: another engine
        [1e-6, 4e-4] * 12,  # rounding
    ],
)
def test_other_gaps_are_not_old_weights(values: list[float]) -> None:
    assert "D12" not in found(gaps(*values))


def test_a_noisy_verifier_is_named_after_its_twin_answers_are_gone() -> None:
    shares = [0.0, 0.34, 0.06, 0.12, *[0.0] * 26]
    rows = [{"step": step, "disagreement_fraction": share} for step, share in enumerate(shares, start=1)]
    assert found(log_of(rows, settings=FLOAT32))["D24"] is Level.SICK
    calm = [{**row, "disagreement_fraction": 0.01} for row in rows[:14]]
    assert "D24" not in found(log_of(calm, settings=FLOAT32))


def test_rounding_of_weights_of_eight_bits_is_no_other_sampler() -> None:
    def said(value: float, **settings: str) -> bool:
        rows = [{"step": n, "mismatch_kl": value} for n in range(1, 21)]
        return "D10" in found(log_of(rows, settings=FLOAT32 | settings))

    assert said(0.007)
    assert not said(0.007, **{"engine.weights": "int8"})
    assert said(0.08, **{"engine.weights": "int8"})
