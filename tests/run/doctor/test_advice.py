"""The doctor advises what a run has not done yet, and says every comparison with the steps of both numbers."""

import inspect
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

import pytest

from benchmarks.checks.doctor.kept import read_kept
from benchmarks.checks.doctor.logs import MADE_SICK
from covey.algorithm.losses import LOSSES
from covey.config.schema import Config
from covey.run.doctor.advice import CLIPPING, still_open
from covey.run.doctor.catalogue import RULES
from covey.run.doctor.diagnose import diagnose
from covey.run.doctor.finding import Finding
from covey.run.doctor.log import RunLog, flat, log_of
from covey.run.doctor.rules.common import onset, since_look

KEPT = read_kept()
SETTINGS = flat(asdict(Config()))


def open_with(*advice: str, **settings: Any) -> list[str]:
    return list(still_open(advice, SETTINGS | {name.replace("__", "."): value for name, value in settings.items()}))


# ------------------------------------------------------------------------------------------------ advice


@pytest.mark.parametrize(
    ("advice", "settings", "said"),
    [
        ("engine.name=native", {}, []),
        ("engine.name=native", {"engine__name": "vllm"}, ["engine.name=native"]),
        ("cold_start.enabled=true", {"cold_start__enabled": True}, []),
        ("sampling.top_p=1", {"sampling__top_p": 1.0}, []),
        ("max_staleness lower", {"max_staleness": 0}, []),
        ("max_staleness lower", {"max_staleness": 4}, ["max_staleness lower (now 4)"]),
        ("updates_per_batch lower", {"updates_per_batch": 1}, []),
        ("algorithm.entropy_coef lower", {"algorithm__entropy_coef": 0.0}, []),
        ("sampling.top_p larger", {"sampling__top_p": 1.0}, []),
        ("optimizer.lr to a third", {"optimizer__lr": 1e-3}, ["optimizer.lr to a third (now 0.001)"]),
        ("algorithm.advantage_clip lower", {}, ["algorithm.advantage_clip set"]),
        ("algorithm.target_kl lower", {}, []),  # needs algorithm.kl_coef
        ("curriculum.earlier_share higher", {}, []),  # needs a curriculum
        (
            "curriculum.earlier_share higher",
            {"curriculum__name": "difficulty"},
            ["curriculum.earlier_share higher (now 0.2)"],
        ),
        ("environment.num_train larger | more prompts", {}, ["environment.num_train larger (now 4096)"]),
        ("evaluation.num_prompts larger | more rows", {"evaluation__num_prompts": math.inf}, ["more rows"]),
        ("algorithm.target_kl lower", {"algorithm__kl_coef": 0.1}, ["algorithm.target_kl set"]),
        ("algorithm.mask_truncated=true", {"model__kind": "masked"}, []),
        ("algorithm=cispo", {}, ["algorithm=cispo"]),
        (
            "algorithm=cispo",
            {
                "algorithm__loss": "cispo",
                "algorithm__loss_options.ratio_min": 0.0,
                "algorithm__loss_options.ratio_max": 5.0,
            },
            [],
        ),
        ("algorithm.shaping with soft_overlong", {"algorithm__shaping.soft_overlong.max_len": 9}, []),
        ("algorithm.loss_options.eps_high higher", {"algorithm__loss": "cispo"}, []),
        ("environment.recheck_rate higher", {}, []),  # of another environment
        (
            "environment.recheck_rate higher",
            {"environment__name": "code", "environment__recheck_rate": 0.01},
            ["environment.recheck_rate higher (now 0.01)"],
        ),
        ("the answers themselves", {}, ["the answers themselves"]),
    ],
)
def test_advice_that_a_run_follows_already_or_never_could_is_left_out(
    advice: str, settings: Mapping[str, Any], said: list[str]
) -> None:
    assert open_with(advice, **settings) == said


def test_of_two_ways_the_one_that_a_run_can_go_is_advised() -> None:
    ways = ("environment.num_train larger | more prompts",)
    assert still_open(ways, {"environment.name": "gsm8k"}) == ("more prompts",)
    own = {"environment.name": "countdown", "environment.num_train": 64}
    assert still_open(ways, own | {"data.path": None}) == ("environment.num_train larger (now 64)",)
    assert still_open(ways, own | {"data.path": "rows.jsonl"}) == ("more prompts",)


def test_a_log_without_settings_is_given_all_advice() -> None:
    for rule in RULES:
        assert still_open(rule.advice, {}) == rule.advice


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.id)
def test_some_advice_is_left_to_a_run_that_follows_all_that_has_a_value(rule: Any) -> None:
    settings = dict(SETTINGS)
    for advice in rule.advice:
        name, _, value = advice.partition("=")
        if name in settings:
            settings[name] = {"true": True, "1": 1, "0": 0}.get(value, value)
    left = still_open(rule.advice, settings)
    assert left
    assert not {
        advice for advice in left if re.fullmatch(r"[a-z_.]+=\S+", advice) and advice.partition("=")[0] in settings
    }


def test_losses_that_clip_are_those_that_read_a_range() -> None:
    reads = [
        name
        for name, loss in LOSSES.items()
        if any("eps_high" in inspect.signature(one).parameters for one in (loss.function, loss.selector) if one)
    ]
    assert sorted(reads) == sorted(CLIPPING)


def test_a_finding_advises_what_its_run_has_not_done() -> None:
    log = log_of([{"step": step, "ess_fraction": 0.4} for step in range(1, 61)], settings=SETTINGS)
    (finding,) = diagnose(log)
    assert finding.rule.id == "D25"
    assert finding.advice[0] == "algorithm.correction=truncate"
    assert finding.as_row()["advice"] == list(finding.advice)


# ------------------------------------------------------------------------------------------------ what it compares

PART = r"(before the first step|after step \d+|step \d+|steps \d+ to \d+)"
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
        "D35 got worse since step 21: held-out accuracy fell from 50 % (before the first step) "
        "to 20 % (after step 60), best after step 20 (follows from D14)"
    )
    assert " since step 21: held-out accuracy fell " in titles["D14"]
    whole = replace(log, look_steps=[0, 60], looks={"accuracy": [0.6, 0.2]})
    assert {one.rule.id: one.title for one in diagnose(whole)}["D35"].startswith(
        "D35 got worse from the first step on:"
    )


def test_a_loss_of_accuracy_begins_where_it_fell_whichever_evaluation_was_the_best_by_chance() -> None:
    rows = [{"step": n, "sampled_reward_mean": 0.5} for n in range(1, 201)]
    looks = {"accuracy": [0.32, 0.3, 0.31, 0.01, 0.01]}
    log = replace(log_of(rows), look_steps=[0, 50, 100, 150, 200], looks=looks)
    assert {one.rule.id: one.evidence.since for one in diagnose(log)}["D35"] == 101


@pytest.mark.parametrize("late", [lambda _: 0.2, lambda step: 0.003 + 0.002 * (step - 100)])
def test_a_gap_that_opens_in_the_middle_of_a_run_is_not_laid_to_weights_that_never_arrived(
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
