"""Curves come in the order of what tells the truth first, over the steps of the run, in bands that can be."""

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from covey_report.logs.read import RunFiles
from covey_report.page import curves
from covey_report.page.bands import Band, inside, moving_bands, moving_shares, share_band
from covey_report.page.curves import curves_of, reading, span_of

STEPS = range(1, 31)


def run_of(looks: tuple[int, ...] = (0, 30), **columns: Any) -> RunFiles:
    """A run of 30 steps with the columns, functions of the step."""
    steps = [{"step": n, **{name.replace("__", "/"): of(n) for name, of in columns.items()}} for n in STEPS]
    rows = [{"step": step, "kind": "evaluate", "accuracy": 0.5} for step in looks]
    return RunFiles(Path("run"), {"num_steps": 30}, steps=steps, looks=rows, summary={"before": {"num_prompts": 8}})


def test_what_tells_the_truth_comes_first_and_time_last() -> None:
    names = (
        *("seconds", "grad_norm", "mismatch", "kl", "entropy", "completion_length_mean", "environment__cost"),
        *("environment__pool/solved", "reward__form", "reward__correct", "sampled_reward_mean", "tokens_per_second"),
    )
    run = run_of(**{name: lambda step: step / 100 for name in names})
    assert [curve["name"] for curve in curves_of(run)] == [
        *("accuracy", "reward", "reward/correct", "reward/form", "environment/pool/solved"),
        *("completion_length_mean", "entropy", "kl", "mismatch", "grad_norm", "environment/cost"),
        *("seconds", "tokens_per_second"),
    ]


@pytest.mark.parametrize("name", ["truncated_fraction", "reward__form", "unscored_fraction", "environment__solved"])
@pytest.mark.parametrize("common", [0.0, 1.0])
def test_no_band_of_a_share_leaves_0_to_1(name: str, common: float) -> None:
    other = {"reward__correct": lambda step: 0.5}
    run = run_of(**other | {name: lambda step: abs(common - 0.3) if step % 7 == 0 else common})
    curve = next(one for one in curves_of(run) if one["name"] == name.replace("__", "/"))
    bounds = [value for value in (*curve["low"], *curve["high"]) if value is not None]
    assert 0 <= min(bounds) < max(bounds) <= 1
    assert (0.0 if common == 0 else 1.0) in bounds  # the interval would have gone on


def test_only_the_band_of_a_reward_in_0_to_1_is_clipped_there() -> None:
    def bounds(scale: float) -> list[float]:
        run = run_of(sampled_reward_mean=lambda step: scale * (step % 9 == 0))
        curve = next(one for one in curves_of(run) if one["name"] == "reward")
        return [value for value in (*curve["low"], *curve["high"]) if value is not None]

    assert min(bounds(1.0)) == 0
    assert min(bounds(2.0)) < 0


def test_groups_without_signal_have_wilsons_interval_over_the_groups_of_the_steps() -> None:
    run = run_of(zero_std_fraction=lambda step: 0.25, num_groups=lambda step: 8)
    curve = next(one for one in curves_of(run) if one["name"] == "zero_std_fraction")
    low, high = share_band(10, 40)[1:]
    assert (curve["low"][10], curve["high"][10]) == pytest.approx((low, high), abs=1e-4)
    assert "Wilson" in curve["about"]
    assert moving_shares([0.5, None, 1.0], [2, 2, 4], 3)[1] == share_band(5, 6)


def test_a_long_run_has_one_band_for_each_drawn_point() -> None:
    found = moving_bands([float(place) for place in range(1200)], 3)
    assert [band.value for band in found[:5]] == [1.0, 1.0, 3.0, 3.0, 5.0]
    assert found[2][1:] == (2.0, 4.0)  # 2, 3 and 4: a standard deviation of 1
    assert len(found) == 1200
    assert len(set(found)) == 600


def test_hundreds_of_metrics_share_the_points_that_a_page_has_room_for(monkeypatch: pytest.MonkeyPatch) -> None:
    names: dict[str, Any] = {f"environment__tool_{place}": lambda step: step / 30 for place in range(10)}
    monkeypatch.setattr(curves, "OWN_POINTS", 100)
    found = {curve["name"]: curve for curve in curves_of(run_of(**names, entropy=lambda step: step / 30))}
    assert found["environment/tool_3"]["x"] == [1, 4, 7, 10, 13, 16, 19, 22, 25, 28, 30]
    assert [len(found["environment/tool_3"][name]) for name in ("raw", "y", "low", "high")] == [11] * 4
    assert len(found["entropy"]["x"]) == 30


@pytest.mark.parametrize(
    ("sampled", "known", "about", "band"),
    [
        (3, 3, "95 % over the prompts of a step", (0.171, 1.0)),
        (9, 3, "mean of 5 steps, and their standard deviation", (0.1, 0.1)),
        (3, 2, "mean of 5 steps", (0.1, 0.1)),
    ],
)
def test_a_reward_interval_over_prompts_needs_all_of_them(
    sampled: int, known: int, about: str, band: tuple[float, float]
) -> None:
    """Three prompts of 0.5, 1 and 0.75 on average, whose interval is cut at 1; steps are all alike."""
    run = run_of(sampled_reward_mean=lambda _: 0.1, num_groups=lambda _: 3.0, num_groups_sampled=lambda _: sampled)
    groups = [{"prompt_id": str(rewards), "rewards": rewards} for rewards in ([0.0, 1.0], [1.0] * 4, [0.75])]
    run.updates.extend({"step": step, "num_groups": 3, "groups": groups[:known]} for step in STEPS)
    (curve,) = (one for one in curves_of(run) if one["name"] == "reward")
    assert curve["about"].startswith(about)
    assert (curve["y"][0], curve["low"][0], curve["high"][0]) == pytest.approx((0.1, *band), abs=1e-3)


def test_two_steps_are_no_mean_of_steps() -> None:
    whole = run_of(entropy=lambda step: step / 9, zero_std_fraction=lambda _: 0.5, num_groups=lambda _: 4.0)
    found = {curve["name"]: curve["about"] for curve in curves_of(replace(whole, steps=whole.steps[:2]))}
    assert (found["entropy"], found["zero_std_fraction"]) == ("each step", "each step and its 95 %, Wilson")


def test_an_accuracy_has_the_interval_of_the_prompts_that_were_looked_at_last() -> None:
    run = replace(run_of(), summary={"before": {"num_prompts": 4}, "after": {"num_prompts": 8}})
    (curve,) = (one for one in curves_of(run) if one["name"] == "accuracy")
    assert (curve["low"][0], curve["high"][0]) == pytest.approx(share_band(4, 8)[1:], abs=1e-4)


def test_without_a_right_answer_the_evaluations_mean_reward_is_drawn() -> None:
    looks = [{"step": step, "kind": "evaluate", "reward_mean": reward} for step, reward in ((0, 2.5), (30, 7.5))]
    names = [str(place) for place in range(40)]
    verdicts = [
        {"step": step, "prompts": names, "ids": names, "right": "-" * 40, "rewards": [base, base + 3.0] * 20}
        for step, base in ((0, 1.0), (30, 6.0))
    ]
    run = replace(run_of(), looks=looks, verdicts=verdicts, summary={"after": {"num_prompts": 40}})
    (curve,) = (one for one in curves_of(run) if one["name"] == "accuracy")
    assert (curve["title"], curve["y"]) == ("mean reward, held-out prompts", [2.5, 7.5])
    half = 2.0227 * 1.5 * (40 / 39) ** 0.5 / 40**0.5  # Student's t(39)
    assert (curve["low"][0], curve["high"][0]) == pytest.approx((2.5 - half, 2.5 + half), abs=2e-3)
    assert curve["reading"] == "rose by 200 %: 2.5 to 7.5"


def test_evaluations_whose_intervals_meet_have_no_trend() -> None:
    looks = [{"step": step, "kind": "evaluate", "accuracy": value} for step, value in ((0, 0.5), (15, 0.4), (30, 0.6))]
    near = replace(run_of(), looks=looks, summary={"after": {"num_prompts": 64}})
    far = replace(near, summary={"after": {"num_prompts": 4000}})
    assert [curves_of(run)[0]["reading"] for run in (near, far)] == ["no trend: 0.4 to 0.6", "rose by 20 %: 0.5 to 0.6"]


@pytest.mark.parametrize("number", [3, 4, 5, 8, 20, 60])
def test_noise_is_seldom_read_as_a_trend(number: int) -> None:
    draw = random.Random(number)
    told = [reading([draw.gauss(5, 1) for _ in range(number)]) for _ in range(400)]
    assert sum(one.startswith(("rose", "fell")) for one in told) / 400 < 0.07


def test_a_band_on_a_log_axis_ends_at_the_smallest_number_drawn() -> None:
    run = run_of(mismatch=lambda step: 1e-6 if step % 5 else 1e-3)
    curve = next(one for one in curves_of(run) if one["name"] == "mismatch")
    assert curve["log"] is True
    assert min(value for value in curve["low"] if value is not None) == 1e-6


def test_an_interval_is_cut_on_both_sides_and_nothing_stays_nothing() -> None:
    assert inside(Band(0.5, -1.0, 2.0), 0.0, 1.0) == Band(0.5, 0.0, 1.0)
    assert inside(Band(None, None, None), 0.0, 1.0) == Band(None, None, None)
    assert inside(Band(5.0, -1.0, 9.0), None, None) == Band(5.0, -1.0, 9.0)


@pytest.mark.parametrize(("looks", "span"), [((0,), (0, 30)), ((30,), (1, 30)), ((0, 40), (0, 40)), ((), (1, 30))])
def test_the_axis_of_steps_covers_the_whole_run(looks: tuple[int, ...], span: tuple[int, int]) -> None:
    assert span_of(run_of(looks, entropy=lambda step: 0.5)) == span


def test_a_run_without_steps_has_the_axis_of_its_planned_steps() -> None:
    before = RunFiles(Path("run"), {"num_steps": 60}, looks=[{"step": 0, "accuracy": 0.5}])
    assert span_of(before) == (0, 60)
    assert span_of(RunFiles(Path("run"))) == (0, 1)
