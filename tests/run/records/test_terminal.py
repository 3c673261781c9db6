import io
import math
import os
import pty
import sys
from typing import Any

import pytest
from rich.console import Console

from covey.run.records.notebook import NotebookProgress, curve
from covey.run.records.terminal import (
    ROOMY,
    EtaEstimator,
    LiveProgress,
    PlainProgress,
    average_bins,
    details_of,
    evaluation_line,
    fitting,
    make_progress,
    number_cells,
    sparkline,
    time_left,
)


def plain_console() -> Console:
    return Console(file=io.StringIO(), width=80)


def terminal() -> Console:
    return of_kind("xterm")


def of_kind(term: str) -> Console:
    options: dict[str, Any] = {"width": 80, "height": 20, "force_terminal": True, "color_system": None}
    return Console(file=io.StringIO(), _environ={"TERM": term}, **options)


def written(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_outside_a_terminal_every_step_is_one_line_with_its_numbers() -> None:
    console = plain_console()
    with make_progress(3, True, console) as progress:
        progress.update(
            1, {"sampled_reward_mean": 0.25, "loss": -0.01234, "kl": 0.0, "entropy": 1.5, "tokens_per_second": 1234.4}
        )
        progress.update(2, {"sampled_reward_mean": 0.5})
        progress.update(3, {"sampled_reward_mean": None, "entropy": 0.5})
    first, second, third = written(console).splitlines()
    assert first == "step 1/3  reward 0.250  loss -0.0123  kl 0.0000  entropy 1.500  tokens/s 1,234"
    assert second.startswith("step 2/3  reward 0.500  ")
    assert second.endswith(" s left")
    assert third.startswith("step 3/3  reward -  entropy 0.500")


class Clock:
    """Seconds that a test sets."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def wait_until(progress: PlainProgress, clock: Clock, end: float, what: str, *, in_step: bool) -> None:
    """Look at what is waited for every second, as the run does."""
    while clock.now < end:
        clock.now += 1
        progress.waiting(what, in_step=in_step)


def paced(console: Console, clock: Clock) -> PlainProgress:
    progress = PlainProgress(9, console)
    progress._clock = progress._pace.clock = clock
    progress.message("loading")
    return progress


def test_outside_a_terminal_nothing_is_silent_for_more_than_ten_seconds() -> None:
    console, clock = plain_console(), Clock()
    progress = paced(console, clock)
    wait_until(progress, clock, 25, "waiting for the model m to be loaded", in_step=False)
    progress.message("m: 3 parameters")
    wait_until(progress, clock, 30, "waiting for the engine", in_step=False)
    progress.evaluation(0, {"accuracy": 0.5})
    wait_until(progress, clock, 38, "waiting for the engine", in_step=False)
    loading = "waiting for the model m to be loaded"
    assert written(console).splitlines() == [
        *("loading", f"{loading}, 9 s", f"{loading}, 18 s", "m: 3 parameters", "step 0 evaluated: accuracy 0.500")
    ]


def test_a_step_is_silent_for_twice_its_usual_time() -> None:
    console, clock = plain_console(), Clock()
    progress = paced(console, clock)
    wait_until(progress, clock, 20, "sampling", in_step=True)  # nobody knows the pace yet
    for step, end in ((1, 20), (2, 50)):
        clock.now = end
        progress.update(step, {})
    wait_until(progress, clock, 109, "sampling", in_step=True)
    wait_until(progress, clock, 111, "backward", in_step=True)
    wait_until(progress, clock, 120, "evaluation", in_step=False)
    told = [line for line in written(console).splitlines() if "step" not in line]
    assert told == ["loading", "sampling, 9 s", "sampling, 18 s", "backward, 1:00", "evaluation, 1:09"]


def test_a_run_without_progress_says_nothing_of_its_waits() -> None:
    console = plain_console()
    progress = make_progress(3, False, console)
    assert isinstance(progress, PlainProgress)
    progress._clock = clock = Clock()
    wait_until(progress, clock, 100, "sampling", in_step=False)
    assert written(console) == ""


def test_the_progress_bar_starts_with_the_steps_after_the_waits() -> None:
    console = terminal()
    with make_progress(4, True, console) as progress:
        progress.waiting("waiting for the model to be loaded", in_step=False)
        assert "waiting for the model to be loaded, 0 s" in written(console)
        assert "0/4" not in written(console)
        progress.update(1, {"sampled_reward_mean": 0.5})
        progress.waiting("waiting for the checkpoint", in_step=False)
        assert "waiting for the checkpoint" in written(console)[written(console).rindex("step 1/4") :]
    assert "waiting" not in written(console)[written(console).rindex("step 1/4") :]


def test_progress_that_is_switched_off_still_passes_messages_on() -> None:
    console = plain_console()
    with make_progress(3, False, console) as progress:
        progress.update(1, {"sampled_reward_mean": 0.25})
        progress.evaluation(1, {"accuracy": 0.5})
        progress.message("cold start from the cache")
    assert written(console) == "cold start from the cache\n"


def test_the_kind_of_display_follows_the_terminal() -> None:
    assert isinstance(make_progress(3, True, terminal()), LiveProgress)
    assert isinstance(make_progress(3, True, plain_console()), PlainProgress)
    assert isinstance(make_progress(3, False, terminal()), PlainProgress)
    assert isinstance(make_progress(3, True, of_kind("dumb")), PlainProgress)  # which cannot draw anew


def test_a_terminal_that_is_gone_ends_no_run(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    master, slave = pty.openpty()
    monkeypatch.setenv("TERM", "xterm")
    with os.fdopen(slave, "w") as gone:
        monkeypatch.setattr(sys, "stdout", gone)
        with make_progress(3, True) as progress:
            assert isinstance(progress, LiveProgress)
            progress.update(1, {"sampled_reward_mean": 0.5})
            os.close(master)
            for step in (2, 3):
                progress.update(step, {"sampled_reward_mean": 0.5})
                progress.message("nobody reads this")
    said = "standard output cannot be written (Input/output error); the run continues without it"
    assert [record.getMessage() for record in caplog.records] == [said]


def test_the_panel_shows_bar_trend_and_last_evaluation_within_80_columns() -> None:
    console = terminal()
    with make_progress(4, True, console) as progress:
        progress.evaluation(0, {"accuracy": 0.125, "pass_at_8": 0.5})
        for step, reward in enumerate([0.0, 0.5, 1.0], start=1):
            progress.update(
                step, {"sampled_reward_mean": reward, "kl": 2e-5, "entropy": 0.7, "tokens_per_second": 99.0}
            )
    last = written(console)[written(console).rindex("step 3/4") :]
    assert "reward 1.000 ▁▅█  kl 2.0e-05  entropy 0.700  tokens/s 99" in last
    assert "step 0 evaluated: accuracy 0.125  pass@8 0.500" in last
    assert max(len(line) for line in last.splitlines()) <= 80


def test_a_message_is_printed_above_the_panel_as_it_is() -> None:
    console = terminal()
    with make_progress(2, True, console) as progress:
        progress.message("[cold start] 3 of 4")
    assert "[cold start] 3 of 4" in written(console)


def test_the_panel_survives_a_step_without_numbers() -> None:
    console = terminal()
    with make_progress(2, True, console) as progress:
        progress.update(1, {})
        progress.update(2, {"sampled_reward_mean": math.nan})
        progress.update(2, {"sampled_reward_mean": None, "kl": None})
    assert "step 2/2" in written(console)
    assert "reward -   kl -" in written(console)


def test_the_panel_shows_parts_and_lengths_where_there_is_room() -> None:
    metrics = {"sampled_reward_mean": 0.5, "reward/correct": 0.25, "reward/form\x1b": None, "reward_std/correct": 0.1}
    metrics |= {"completion_length_mean": 7.4, "truncated_fraction": 0.125}
    line = r"correct 0.250  form\x1b -  length 7  cut off 12 %"
    for height, shown in ((ROOMY, True), (ROOMY - 1, False)):
        console = Console(file=io.StringIO(), width=80, height=height, force_terminal=True, color_system=None)
        with make_progress(2, True, console) as progress:
            progress.update(1, metrics)
        assert (line in written(console)) == shown
    episodes = {"turns_mean": 4.61, "stop/completed": 0.5, "stop/max_turns": 0.5, "stop/timeout": 0.0}
    assert details_of(episodes) == "turns 4.6  max turns 50 %"
    tools = {f"environment/tool/{name}/calls": 10.0 for name in ("add", "find")}
    tools |= {"environment/tool/add/seconds": 0.5, "environment/tool/find/errors": 2.0}
    assert details_of({"turns_mean": 2.0, **tools}) == "turns 2.0  tool calls 20 (2 errors, 0.25 s each)"
    assert details_of({"reward/correct": 0.25, "completion_length_mean": 7.6, "truncated_fraction": 0.0}) == "length 8"


def test_a_message_is_taken_as_it_is() -> None:
    for console in (terminal(), plain_console()):
        with make_progress(2, True, console) as progress:
            progress.message("[red]:smile: 1")
            progress.message("\x1b" * 30 + "the end")
        assert "[red]:smile: 1" in written(console)
        assert "the end" in written(console)  # though the escapes are longer than a line


def test_the_pace_of_the_last_steps_predicts_the_time_left() -> None:
    times = iter([0.0, 10.0, 20.0])
    pace = EtaEstimator(5, lambda: next(times))
    pace.mark(0)
    assert pace.seconds_left is None
    pace.mark(1)
    assert pace.seconds_left == 40.0
    pace.mark(2)
    assert pace.seconds_left == 30.0


def test_a_sparkline_spans_its_own_range_and_leaves_gaps_for_what_is_not_finite() -> None:
    assert sparkline([2.0, 3.0, math.nan, 4.0]) == "▁▅ █"
    assert sparkline([0.5, 0.5]) == "▁▁"
    assert sparkline([math.nan]) == ""


def test_the_trend_is_that_of_the_whole_run() -> None:
    assert average_bins([0.0, 1.0, 2.0, 3.0, 4.0, 5.0], 3) == [0.5, 2.5, 4.5]
    assert average_bins([1.0, 2.0], 16) == [1.0, 2.0]
    assert sparkline(average_bins([math.nan, math.nan, 1.0, math.nan, 3.0, 3.0], 3)) == " ▁█"
    assert average_bins([], 16) == []
    console = terminal()
    with make_progress(100, True, console) as progress:
        for step in range(1, 101):
            progress.update(step, {"sampled_reward_mean": step / 100})
    assert "reward 1.000 ▁▁▂▂▃▃▄▄▅▅▆▆▇▇██" in written(console)


def test_time_left_reads_in_seconds_minutes_or_hours() -> None:
    assert [time_left(s) for s in (None, 0.4, 42.0, 90.0, 3725.0)] == [
        "",
        "0 s left",
        "42 s left",
        "1:30 left",
        "1:02:05 left",
    ]


def test_an_evaluation_reads_as_a_sentence() -> None:
    line = evaluation_line(10, {"accuracy": 0.41, "reward_mean": 0.2, "pass_at_8": 0.72})
    assert line == "step 10 evaluated: accuracy 0.410  reward mean 0.200  pass@8 0.720"


def test_an_evaluation_whose_rewards_are_all_0_or_all_1_claims_no_accuracy() -> None:
    """Rewards that grade answers look so as well, as long as nothing is half right."""
    for value in (0.0, 1.0):
        numbers = {"accuracy": value, "reward_mean": value, "pass_at_1": value}
        assert evaluation_line(0, numbers) == f"step 0 evaluated: reward mean {value:.3f}"
    mixed = {"accuracy": 1.0, "reward_mean": 0.0, "pass_at_1": 0.0}
    assert evaluation_line(0, mixed) == "step 0 evaluated: accuracy 1.000  reward mean 0.000  pass@1 0.000"


def test_numbers_that_do_not_fit_a_line_are_left_out_whole() -> None:
    line = "reward 0.5  loss 0.125  tokens/s 1,024"
    assert [fitting(line, width) for width in (99, 38, 37, 21, 5)] == [
        line,
        line,
        "reward 0.5  loss 0.125",
        "reward 0.5",
        "reward 0.5",
    ]


def test_the_curve_in_a_notebook_has_a_point_a_pixel_however_long_the_run() -> None:
    drawn = curve([float(step % 2) for step in range(20_000)])
    assert len(drawn.partition('points="')[2].partition('"')[0].split()) == 360
    assert 'aria-label="reward from 0.000 to 1.000, between 0.000 and 1.000"' in drawn
    assert 'points="2.0,58.0 358.0,2.0"' in curve([0.0, 1.0])


def test_a_notebooks_curve_omits_a_nan_reward() -> None:
    progress = NotebookProgress(3)
    for step, reward in enumerate((math.nan, 0.25, math.inf, 0.5), start=1):
        progress.update(step, {"sampled_reward_mean": reward})
    assert 'points="2.0,58.0 358.0,2.0"' in progress.html()


def test_a_step_of_a_teacher_alone_shows_its_gap_and_no_reward() -> None:
    alone = {"sampled_reward_mean": None, "loss": 0.25, "teacher/kl": 0.2683}
    assert number_cells(alone) == ["loss 0.25", "teacher/kl 0.2683"]
    assert number_cells(alone | {"sampled_reward_mean": 0.5})[0] == "reward 0.500"
    assert evaluation_line(2, {"reward_mean": math.nan}) == "step 2 evaluated: no rewards"
