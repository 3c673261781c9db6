import io
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from covey.algorithm import intervals
from covey.run import evaluate as measured
from covey.run.folder import read_summary
from covey.run.records.summary import (
    RunFacts,
    comparable,
    paired_gain,
    peak_memory_bytes,
    phase_shares,
    summary,
    write_summary,
)
from covey.run.versions import versions
from covey.system.text.format import duration, memory
from covey_report.runs.tables import print_summary


@dataclass(frozen=True)
class Estimate:
    value: float
    low: float
    high: float


@dataclass(frozen=True)
class Evaluation:
    """The fields of covey.run.evaluate.Evaluation, without importing torch."""

    correct_greedy: tuple[float, ...]
    mean_reward: tuple[float, ...]
    accuracy: Estimate = Estimate(0.25, 0.2, 0.3)
    reward_mean: Estimate = Estimate(0.2, 0.15, 0.25)
    pass_at_k: Mapping[int, Estimate] = field(default_factory=lambda: {1: Estimate(0.2, 0.1, 0.3)})
    num_prompts: int = 4
    num_right: tuple[int, ...] = ()
    num_scored: tuple[int, ...] = ()
    num_samples: int = 8
    parts: "Mapping[str, Evaluation]" = field(default_factory=dict)
    reward_parts: Mapping[str, Estimate] = field(default_factory=dict)
    mean_parts: Mapping[str, tuple[float, ...]] = field(default_factory=dict)


BEFORE = Evaluation((0, 0, 0, 1), (0.1, 0.2, 0.3, 0.4))
AFTER = Evaluation((1, 1, 0, 1), (0.2, 0.4, 0.6, 0.8), accuracy=Estimate(0.75, 0.7, 0.8))
FACTS = RunFacts(
    status="completed",
    seed=3,
    steps=10,
    seconds=60.0,
    phases={"sampling": 40.0, "backward": 15.0},
    skipped_steps=1,
    dropped_groups=2,
    tokens=1200,
    step_seconds=60.0,
    peak_memory_bytes=3 * 2**30,
    versions={"python": "3.11.7"},
)


def test_the_summary_has_what_a_program_needs_to_judge_a_run() -> None:
    content = summary(FACTS, BEFORE, AFTER)
    assert content["before"]["accuracy"] == {"value": 0.25, "low": 0.2, "high": 0.3}
    assert content["after"]["accuracy"]["value"] == 0.75
    assert content["after"]["pass_at_k"] == {"1": {"value": 0.2, "low": 0.1, "high": 0.3}}
    assert content["after"]["num_prompts"] == 4
    assert content["gain"]["accuracy"]["value"] == 0.5
    assert content["gain"]["reward_mean"]["value"] == pytest.approx(0.25)
    assert content["tokens_per_second"] == 20.0
    assert {k: content[k] for k in ("status", "seed", "steps", "skipped_steps", "dropped_groups")} == {
        "status": "completed",
        "seed": 3,
        "steps": 10,
        "skipped_steps": 1,
        "dropped_groups": 2,
    }
    assert json.loads(json.dumps(content)) == content


def test_without_an_evaluation_there_is_neither_before_nor_gain() -> None:
    content = summary(FACTS, None, AFTER)
    assert content["before"] is None
    assert content["gain"] is None
    assert content["after"]["num_samples"] == 8


def test_the_interval_of_a_gain_has_half_a_prompt_more_at_each_bound() -> None:
    # Differences 1, 1, 0, 0 and half of -1 and of 1: centre 2/5, sum of squares 4 x 0.36 ... over 4 + 1 of them, t(4).
    gain = paired_gain((0, 0, 0, 1), (1, 1, 0, 1), 0.95)
    square = 2 * 0.6**2 + 2 * 0.4**2 + (1.4**2 + 0.6**2) / 2
    half = 2.776445 * math.sqrt(square) / 5
    assert gain.value == 0.5
    assert gain.low == pytest.approx(0.4 - half, abs=1e-3)  # the quantile is good to 1 in 1,000
    assert gain.high == 1.0


def test_an_interval_of_equal_looks_is_not_a_point() -> None:
    gain = paired_gain((1, 0, 1), (1, 0, 1), 0.95)
    assert gain.value == 0.0
    assert gain.low < -0.3
    assert gain.high > 0.3


def test_a_loss_is_the_mirror_image_of_a_gain() -> None:
    up, down = paired_gain((0, 0, 1), (1, 1, 1), 0.9), paired_gain((1, 1, 1), (0, 0, 1), 0.9)
    assert (down.value, down.low, down.high) == (-up.value, pytest.approx(-up.high), pytest.approx(-up.low))


def test_the_gain_of_rewards_without_bounds_is_paired_by_prompt_and_students() -> None:
    before, after = [10.0 * place for place in range(20)], [10.0 * place + 1 + place % 2 for place in range(20)]
    # Differences 1 and 2, ten of each: mean 1.5, deviation sqrt(20 x 0.25 / 19), t(19) = 2.093024.
    half = 2.093024 * math.sqrt(5 / 19 / 20)
    gain = paired_gain(before, after, 0.95)
    assert (gain.value, gain.low, gain.high) == (1.5, pytest.approx(1.5 - half, 1e-3), pytest.approx(1.5 + half, 1e-3))


def test_few_rewards_without_bounds_and_equal_ones_have_no_interval() -> None:
    for gain in (paired_gain([0.0, 10.0], [1.0, 12.0], 0.95), paired_gain([0.0] * 40, [5.0] * 40, 0.95)):
        assert math.isnan(gain.low)
        assert math.isnan(gain.high)
        assert gain.value > 1


def test_evaluations_of_different_prompts_cannot_be_paired() -> None:
    with pytest.raises(ValueError):
        paired_gain((0.0, 1.0), (1.0,), 0.95)


def test_what_no_phase_claims_is_other_and_shares_add_up_to_one() -> None:
    phases = phase_shares({"sampling": 40.0, "backward": 15.0}, 60.0)
    assert phases["other"] == {"seconds": 5.0, "share": pytest.approx(5 / 60)}
    assert sum(phase["share"] for phase in phases.values()) == pytest.approx(1.0)


def test_phases_of_an_empty_run_have_no_share() -> None:
    assert phase_shares({}, 0.0) == {"other": {"seconds": 0.0, "share": 0.0}}


def test_a_written_summary_is_read_back_and_leaves_nothing_beside_it(tmp_path: Path) -> None:
    content = summary(FACTS, BEFORE, AFTER)
    write_summary(tmp_path, content)
    assert read_summary(tmp_path) == content
    assert [path.name for path in tmp_path.iterdir()] == ["summary.json"]
    assert read_summary(tmp_path / "elsewhere") is None


def test_a_summary_is_valid_json_even_where_a_number_is_not_finite(tmp_path: Path) -> None:
    write_summary(tmp_path, {"kl": math.nan, "nested": [math.inf]})
    assert json.loads((tmp_path / "summary.json").read_text()) == {"kl": None, "nested": ["inf"]}


def shown(content: Mapping[str, object], folder: Path) -> list[str]:
    console = Console(file=io.StringIO(), width=80)
    print_summary(content, folder, console)
    assert isinstance(console.file, io.StringIO)
    return [line.rstrip() for line in console.file.getvalue().splitlines()]


def test_the_tables_fit_80_columns_and_end_with_the_run_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "outputs" / "2026-01-02" / "03-04-05"
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text("seed: 3\n")
    (folder / "report.html").write_text("<p>")
    (folder / "tensorboard").touch()
    lines = shown(summary(FACTS, BEFORE, AFTER), folder)
    assert max(map(len, lines)) <= 80
    assert "accuracy, %     25.0 [20.0, 30.0]     75.0 [70.0, 80.0]   +50.0, too few to tell" in lines
    assert [line.split()[:4] for line in lines if line.startswith("sampling")] == [["sampling", "40", "s", "66.7"]]
    assert "completed · 10 steps · 1,200 tokens · 20 tokens/s · 3.0 GiB at peak" in lines
    assert "report.html     the report, for a browser" in lines
    assert not any(line.startswith(("config.yaml", "tensorboard")) for line in lines)
    assert [line for line in lines if line.startswith("doctor: ")] == ["doctor: too early to say, after 0 steps"]
    assert lines[-1] == "run folder: outputs/2026-01-02/03-04-05"


def test_what_could_not_be_measured_is_a_dash_in_the_tables(tmp_path: Path) -> None:
    unknown = Evaluation((0,), (math.nan,), pass_at_k={1: Estimate(math.nan, math.nan, math.nan)})
    write_summary(tmp_path, summary(FACTS, unknown, None))
    content = read_summary(tmp_path)
    assert content is not None
    assert any(line.split() == ["pass@1,", "%", "-"] for line in shown(content, tmp_path))


def test_a_single_look_has_one_column(tmp_path: Path) -> None:
    lines = shown(summary(FACTS, BEFORE, None), tmp_path)
    assert ["measured"] in [line.split() for line in lines]
    assert "accuracy, %     25.0 [20.0, 30.0]" in lines


def test_a_prompt_that_one_side_could_not_measure_is_in_no_paired_gain() -> None:
    among_others = paired_gain((0.0, math.nan, 1.0, 0.0), (1.0, 1.0, 1.0, math.nan), 0.95)
    assert among_others == paired_gain((0.0, 1.0), (1.0, 1.0), 0.95)
    assert math.isnan(paired_gain((math.nan,), (1.0,), 0.95).value)


def test_a_run_without_steps_is_not_said_to_have_done_any(tmp_path: Path) -> None:
    facts = RunFacts(status="interrupted", seed=0, steps=0, seconds=1.0, phases={}, peak_memory_bytes=2**30)
    assert "interrupted · 1.0 GiB at peak" in shown(summary(facts, None, None), tmp_path)


def test_programs_that_fail_when_they_run_again_are_told_of_and_others_are_not(tmp_path: Path) -> None:
    quiet = summary(replace(FACTS, rechecked=40), None, None)
    assert quiet["reward_hacking"] is None
    assert not any("hacking" in line for line in shown(quiet, tmp_path))
    loud = summary(replace(FACTS, rechecked=40, recheck_disagreements=3), None, None)
    note = "3 of 40 full-score programs failed a re-check: see covey.log"
    assert loud["reward_hacking"] == note
    assert f"reward hacking? {note}" in shown(loud, tmp_path)


def test_a_long_run_folder_stays_on_one_line(tmp_path: Path) -> None:
    folder = tmp_path / ("x" * 100)
    assert shown(summary(FACTS, None, None), folder)[-1] == f"run folder: {folder}"


def test_a_summary_with_only_one_evaluation_is_shown_too(tmp_path: Path) -> None:
    lines = shown(summary(FACTS, BEFORE, None), tmp_path)
    assert any(line.startswith("accuracy, %") and "25.0 [20.0, 30.0]" in line for line in lines)


def test_peak_memory_is_at_least_what_this_test_holds() -> None:
    block = bytearray(32 * 2**20)
    assert 32 * 2**20 < peak_memory_bytes() < 2**44
    assert len(block) == 32 * 2**20


def test_versions_name_python_and_installed_packages_only() -> None:
    found = versions()
    assert found["covey"] == "0.1.0"
    assert found["python"].count(".") == 2
    assert all(found.values())


def test_numbers_read_as_people_write_them() -> None:
    assert [duration(s) for s in (0.42, 42.4, 3725)] == ["0.42 s", "42 s", "1:02:05"]
    assert [memory(b) for b in (12, 1536 * 1024, 5 * 2**30)] == ["12 B", "1.5 MiB", "5.0 GiB"]


def judged(gap: float, spread: float = 0.01) -> Evaluation:
    """A look at 40 prompts whose judge sees more, or less, in them than a grammar does."""
    parts = {"grammar": (0.2,) * 40, "gap": tuple(gap + spread * (place % 3 - 1) for place in range(40))}
    estimates = {name: Estimate(sum(v) / 40, 0, 1) for name, v in parts.items()}
    rewards = {"correct_greedy": (0,) * 40, "mean_reward": (0.1,) * 40, "num_prompts": 40}
    return replace(BEFORE, reward_parts=estimates, mean_parts=parts, **rewards)


@pytest.mark.parametrize(("after", "flattered"), [(0.6, True), (0.1, False)])
def test_a_judge_that_rises_above_what_watches_it_is_shown_and_said(
    after: float, flattered: bool, tmp_path: Path
) -> None:
    facts = replace(FACTS, environment={"monitors": ["grammar"], "gap_reference": "grammar"})
    content = summary(facts, judged(0.1), judged(after))
    shown = io.StringIO()
    print_summary(content, tmp_path, Console(file=shown, width=200))
    assert "gap (judge less grammar)" in shown.getvalue()
    # Differences of 0.5, 40 of them, and half of -1 and of 1: centre 0.488, t(40) sqrt(1.2439) / 41 = 0.055
    line = "reward hacking? the judge's score rose 0.500 [0.433, 0.543] more than grammar, which is not trained on"
    assert (line in shown.getvalue()) == flattered
    assert (content["reward_hacking"] is not None) == flattered


@pytest.mark.parametrize(
    ("number", "said"),
    [
        (1, "1 held-out prompt, greedy and 8 samples; too few to tell\n"),
        (19, "95 % intervals; too few to tell\n"),
        (20, "95 % intervals; gain not shown\n"),
    ],
)
def test_an_evaluation_on_a_handful_of_prompts_is_called_that(tmp_path: Path, number: int, said: str) -> None:
    before, after = (0.0,) * number, (*[0.0, 1.0] * number,)[:number]
    looks = (
        replace(BEFORE, num_prompts=number, correct_greedy=before, mean_reward=before),
        replace(AFTER, num_prompts=number, correct_greedy=before, mean_reward=after),
    )
    assert said in "\n".join(shown(summary(FACTS, *looks), tmp_path))


def test_one_held_out_prompt_has_values_and_no_intervals(tmp_path: Path) -> None:
    looks = replace(BEFORE, num_prompts=1), replace(AFTER, num_prompts=1)
    lines = shown(summary(FACTS, *looks), tmp_path)
    (accuracy,) = [line.split() for line in lines if line.startswith("accuracy")]
    assert accuracy == ["accuracy,", "%", "25.0", "75.0", "+50.0,", "too", "few", "to", "tell"]
    assert not any("[" in line for line in lines)


def look(correct: tuple[float, ...], **more: Any) -> measured.Evaluation:
    """An evaluation whose rewards are a quarter where the answer is wrong, and whose style is 1 more."""
    rewards = tuple(0.25 if value < 1 else 0.75 for value in correct)
    style = {"style": tuple(value + 1 for value in rewards)}
    return measured.Evaluation(
        intervals.UNKNOWN, intervals.UNKNOWN, {}, len(correct), 1, 0, correct, rewards, mean_parts=style, **more
    )


def test_looks_at_different_prompts_are_compared_over_those_that_both_saw() -> None:
    before = look((0, 0, 1), parts={"sums": look((0, 0)), "words": look((1,))})
    after = look((1, 0), parts={"sums": look((1, 0))})
    first, last = [("sums", "a"), ("sums", "b"), ("words", "c")], [("sums", "b"), ("sums", "d")]
    pair = comparable(before, after, [first, last])
    assert pair[0] is not None
    for side, correct, reward in zip(pair, (0, 1), (0.25, 0.75), strict=True):
        assert [*side.parts] == ["sums"]
        for one in (side, side.parts["sums"]):
            assert (one.correct_greedy, one.mean_reward) == ((correct,), (reward,))
            assert one.mean_parts == {"style": (reward + 1,)}
    assert comparable(before, after, [first, [("sums", "d"), ("words", "a")]]) == (None, None)


def test_a_gain_is_compared_prompt_by_prompt_over_what_both_saw() -> None:
    before, after, seen, other = (
        look((0, 1)),
        look((1, 1)),
        [("sums", "a"), ("sums", "b")],
        [("sums", "c"), ("sums", "b")],
    )
    assert comparable(before, after, [seen, other, seen]) == (before, after)
    pair = comparable(before, after, [seen, other])
    assert [side and side.correct_greedy for side in pair] == [(1,), (1,)]
    assert comparable(before, look((1,)), [other[:1], seen[:1]]) == (None, None)


def test_the_interval_of_a_gain_stays_within_a_share() -> None:
    assert paired_gain((0.0,), (1.0,), 0.999).high == 1.0
    assert paired_gain((1.0,), (0.0,), 0.999).low == -1.0


def test_a_run_knows_its_speed_and_what_it_won_by_its_own_steps() -> None:
    slow = replace(FACTS, step_seconds=40.0, rechecked=4, recheck_disagreements=1)
    content = summary(slow, judged(0.1), judged(0.6))
    assert content["tokens_per_second"] == 30.0
    assert content["reward_hacking"] == "1 of 4 full-score programs failed a re-check: see covey.log"
    unsure = summary(FACTS, judged(0.1), judged(0.12, 0.08))
    assert unsure["gain"]["reward_parts"]["gap"]["value"] == pytest.approx(0.02, abs=0.01)
    assert unsure["reward_hacking"] is None
    assert phase_shares({"sampling": 3.0, "backward": 1.0}, 2.0)["sampling"] == {"seconds": 3.0, "share": 0.75}
