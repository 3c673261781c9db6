"""Every comparison is said with the steps of both numbers, and begins where what it says began."""

import re
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest

from benchmarks.checks.doctor.kept import read_kept
from benchmarks.checks.doctor.logs import MADE_SICK
from covey_doctor.diagnose import diagnose, in_a_line
from covey_doctor.finding import Finding, Level
from covey_doctor.log import RunLog, log_of
from covey_doctor.rules.common import onset, since_look
from covey_doctor.verdicts import with_prompts

KEPT = read_kept()

PART = r"(before step 1|after step \d+|step \d+|steps \d+ to \d+)"
NUMBER = r"-?[\d.]+(e[+-]?\d+)?( %| nats| tokens| ms)?"
COMPARED = re.compile(rf"from {NUMBER} \({PART}\) to {NUMBER} \({PART}\)")


def all_findings() -> dict[str, list[Finding]]:
    logs = KEPT | {name: made.change(KEPT["arithmetic-0"]) for name, made in MADE_SICK.items()}
    return {name: diagnose(log) for name, log in logs.items()}


FOUND = all_findings()


@pytest.mark.parametrize("name", FOUND)
def test_every_finding_says_what_it_compares_in_one_way(name: str) -> None:
    for finding in FOUND[name]:
        seen = finding.evidence.seen
        assert len(COMPARED.findall(seen)) == len(re.findall(rf"\b(?:from|to) {NUMBER}(?: |$)", seen)) / 2, seen
        assert not re.search(r"at first[,;:]|at first$|usual", seen), seen


@pytest.mark.parametrize("name", FOUND)
def test_no_finding_begins_before_the_first_step_or_at_the_last(name: str) -> None:
    steps = KEPT.get(name, KEPT["arithmetic-0"]).steps
    for finding in FOUND[name]:
        since = finding.evidence.since
        assert since is None or steps[0] <= since < steps[-1], finding.title
        assert ("from the first step" in finding.title) is (since == steps[0]), finding.title


def test_most_comparisons_are_seen() -> None:
    seen = {one.rule.id for findings in FOUND.values() for one in findings if COMPARED.search(one.evidence.seen)}
    assert seen >= {"D4", "D5", "D6", "D7", "D9", "D11", "D12", "D13", "D14", "D15", "D16", "D17", "D19", "D30", "D35"}


def test_what_holds_in_all_windows_but_not_before_them_begins_with_the_first_window() -> None:
    def since(early: float) -> int | None:
        shares = [early] * 5 + [0.7] * 60
        log = log_of([{"step": n + 1, "zero_std_fraction": v, "all_wrong_fraction": 0.0} for n, v in enumerate(shares)])
        return diagnose(log)[0].evidence.since

    assert since(0.7) == 1
    assert since(0.1) == 6


def test_a_loss_of_accuracy_begins_after_the_evaluation_before_it() -> None:
    rows = [{"step": n, "sampled_reward_mean": 0.5, "entropy": 0.5 if n < 30 else 1.5} for n in range(1, 61)]
    log = replace(log_of(rows), look_steps=[0, 20, 40, 60], looks={"accuracy": [0.5, 0.6, 0.2, 0.2]})
    titles = {one.rule.id: one.title for one in diagnose(log)}
    assert titles["D35"] == (
        "D35 got worse since step 21: held-out accuracy fell from 50 % (before step 1) "
        "to 20 % (after step 60), best after step 20 (follows from D14)"
    )
    assert " since step 21: held-out accuracy fell " in titles["D14"]
    whole = replace(log, look_steps=[0, 60], looks={"accuracy": [0.6, 0.2]})
    assert {one.rule.id: one.title for one in diagnose(whole)}["D35"].startswith(
        "D35 got worse from the first step on:"
    )


def test_a_loss_of_accuracy_begins_where_it_fell_not_at_a_lucky_best() -> None:
    rows = [{"step": n, "sampled_reward_mean": 0.5} for n in range(1, 201)]
    looks = {"accuracy": [0.32, 0.3, 0.31, 0.01, 0.01]}
    log = replace(log_of(rows), look_steps=[0, 50, 100, 150, 200], looks=looks)
    assert {one.rule.id: one.evidence.since for one in diagnose(log)}["D35"] == 101


@pytest.mark.parametrize("late", [lambda _: 0.2, lambda step: 0.003 + 0.002 * (step - 100)])
def test_a_mismatch_that_starts_midway_is_not_blamed_on_old_weights(
    late: Callable[[int], float],
) -> None:
    gaps = [0.003 + 0.0001 * (step * 7 % 5) if step <= 100 else late(step) for step in range(1, 201)]
    log = log_of([{"step": n, "mismatch": gap, "mismatch_kl": gap / 4} for n, gap in enumerate(gaps, start=1)])
    found = {one.rule.id: one.evidence.since for one in diagnose(log)}
    assert "D12" not in found
    assert found["D11"] == 101 <= found["D10"]


@pytest.mark.parametrize(("steps", "since"), [(range(1, 9), None), ((60, 67, 80), 60)])
def test_a_gradient_that_is_large_in_the_first_steps_and_settles_does_not_leap(
    steps: Sequence[int], since: int | None
) -> None:
    norms = [3.0 if step in steps else 0.9 + 0.01 * (step * 7 % 20) for step in range(1, 201)]
    log = log_of([{"step": n, "grad_norm": norm} for n, norm in enumerate(norms, start=1)])
    assert {one.rule.id: one.evidence.since for one in diagnose(log)}.get("D13") == since


def test_an_onset_is_where_numbers_come_nearer_to_the_last() -> None:
    assert onset([]) is onset([(1, 0.5)]) is None
    assert onset([(1, 5.0), (11, 4.0), (21, 1.0)]) == 21
    assert onset([(1, 0.0), (11, 9.0), (21, 0.0), (31, 9.0)]) == 31
    assert since_look([(0, 0.2), (50, 0.9)]) == 1
    assert since_look([(0, 0.2), (50, 0.2), (100, 0.9)]) == 51


def test_a_run_that_failed_says_after_which_step() -> None:
    log = RunLog(error="the disk is full", summary={"status": "failed"})
    assert diagnose(log)[0].title == "D36 ended early: the run ended before the first step was done: the disk is full"


def test_the_reason_of_a_failed_run_is_whole_or_ends_at_a_word() -> None:
    reason = "none of 2 completions could be scored: " + "a name; " * 30 + "fix the function or the rows"
    log = RunLog(error=reason, summary={"status": "failed"})
    assert diagnose(log)[0].title.endswith("fix the function or the rows")
    log.error = "words " * 200
    assert diagnose(log)[0].title.endswith("words words …")


def untrained(status: str, count: int, **numbers: float | None) -> RunLog:
    rows = [{"step": step, "num_rollouts_trained": 0.0, **numbers} for step in range(1, count + 1)]
    return log_of(rows, summary={"status": status})


def test_a_run_without_any_update_is_said_to_have_learnt_nothing() -> None:
    constant = untrained("completed", 4, sampled_reward_mean=1.0, zero_std_fraction=1.0)
    found = diagnose(constant)
    seen = "D1 no signal from the first step on: none of the 4 steps made an update, so nothing was learnt"
    assert (found[0].level, found[0].title) == (Level.SICK, seen)
    assert in_a_line(found, constant) == "sick: D1 no signal"
    unscored = diagnose(untrained("completed", 2, sampled_reward_mean=None))[0]
    assert unscored.title.endswith("none of the 2 steps made an update, so nothing was learnt: no answer was scored")
    assert diagnose(untrained("running", 3))[0].level is Level.WATCH
    assert diagnose(untrained("completed", 1)) == []


def test_one_update_is_enough_to_wait_for_more() -> None:
    log = untrained("running", 3)
    log.add_row({"step": 4, "num_rollouts_trained": 8.0})
    assert diagnose(log) == []


def test_verdicts_name_their_prompts_once_and_are_left_out_where_that_line_is_damaged() -> None:
    named, later = {"step": 0, "prompts": ["a"], "ids": ["0"], "right": "1"}, {"step": 4, "right": "0"}
    again = {"step": 8, "prompts": ["b"], "ids": ["1"], "right": "1"}
    assert with_prompts([named, later, again]) == [named, {**later, "prompts": ["a"], "ids": ["0"]}, again]
    assert with_prompts([later, again]) == [again]
