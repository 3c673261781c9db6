"""Logs that are made sick: columns of a real healthy run with the one thing changed that a sickness would change.

For what does not come about in a minute on two cores: several ranks, other engines, half precision, hours of training.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from covey_doctor.log import RunLog

Change = Callable[[RunLog], RunLog]


@dataclass(frozen=True, slots=True)
class MadeSick:
    """A change of a healthy log, and the findings that name it."""

    expected: tuple[str, ...]
    change: Change


def set_column(log: RunLog, name: str, value: Callable[[int, float], float]) -> RunLog:
    """Return the log with another column: `value` takes the place of a row, 0 to 1, and what was there, else 0."""
    count = len(log.steps)
    old = log.columns.get(name) or [0.0] * count
    made = [value(place / max(1, count - 1), number or 0.0) for place, number in enumerate(old)]
    return replace(log, columns={**log.columns, name: made})


def set_looks(log: RunLog, name: str, value: Callable[[float, float], float]) -> RunLog:
    count = len(log.look_steps)
    old = log.looks.get(name) or [0.0] * count
    made = [value(place / max(1, count - 1), number or 0.0) for place, number in enumerate(old)]
    return replace(log, looks={**log.looks, name: made})


def with_settings(log: RunLog, **settings: Any) -> RunLog:
    named = {name.replace("__", "."): value for name, value in settings.items()}
    return replace(log, settings={**log.settings, **named})


def jitter(share: float = 0.05) -> Callable[[float], float]:
    """Return a function that shakes a number by about a share of it."""
    draw = random.Random(0)
    return lambda value: value * (1 + share * draw.gauss(0, 1))


def entropy_gone(log: RunLog) -> RunLog:
    shake = jitter()
    log = set_column(log, "entropy", lambda place, _: shake(0.6 if place < 0.1 else max(0.02, 0.6 - 1.5 * place)))
    log = set_column(log, "unique_fraction", lambda place, _: shake(max(0.13, 0.6 - place)))
    for name in ("accuracy", "pass_at_1", "pass_at_4", "pass_at_8"):
        log = set_looks(log, name, lambda place, _: 0.4)
    return set_column(log, "sampled_reward_mean", lambda place, _: shake(0.4))


def solved(log: RunLog) -> RunLog:
    log = set_column(log, "zero_std_fraction", lambda place, _: 0.92)
    log = set_column(log, "all_correct_fraction", lambda place, _: 0.90)
    log = set_column(log, "sampled_reward_mean", lambda place, _: 0.97)
    return set_looks(set_column(log, "all_wrong_fraction", lambda place, _: 0.02), "accuracy", lambda place, _: 0.97)


def kl_away(log: RunLog) -> RunLog:
    shake = jitter()
    log = set_column(log, "kl", lambda place, _: shake(0.002 + 3 * place**2))
    log = set_looks(log, "accuracy", lambda place, _: 0.3)
    return set_column(log, "sampled_reward_mean", lambda place, _: shake(0.3))


def spikes(log: RunLog) -> RunLog:
    count = len(log.steps)
    return set_column(log, "grad_norm", lambda place, old: 90.0 if round(place * (count - 1)) % 15 == 14 else old)


def half_precision_gap(log: RunLog) -> RunLog:
    shake = jitter(0.2)
    log = with_settings(log, model__precision="bfloat16")
    log = set_column(log, "mismatch", lambda place, _: shake(0.03))
    return set_column(log, "mismatch_kl", lambda place, _: shake(0.02))


def gap_that_grows(log: RunLog) -> RunLog:
    shake = jitter(0.1)
    log = with_settings(log, model__precision="bfloat16")
    log = set_column(log, "mismatch_kl", lambda place, _: shake(5e-4))
    return set_column(log, "mismatch", lambda place, _: shake(0.011 + 0.03 * place))


def stale(log: RunLog) -> RunLog:
    log = with_settings(log, max_staleness=4, source="ray")
    log = set_column(log, "ess_fraction", lambda place, _: 0.95 - 0.6 * place)
    return set_column(log, "staleness_max", lambda place, _: 4.0)


def clip_takes_all(log: RunLog) -> RunLog:
    return set_column(log, "clip_fraction", lambda place, _: 0.4)


def prompts_by_heart(log: RunLog) -> RunLog:
    shake = jitter()
    log = set_column(log, "sampled_reward_mean", lambda place, _: shake(0.25 + 0.7 * place))
    log = set_looks(log, "reward_mean", lambda place, _: 0.25 + 0.1 * place)
    return set_looks(log, "accuracy", lambda place, _: 0.30 + 0.1 * place)


def all_alike(log: RunLog) -> RunLog:
    shake = jitter()
    log = set_column(log, "completion_length_mean", lambda place, _: shake(180.0))
    return set_column(log, "unique_fraction", lambda place, _: 0.14)


def half_lost(log: RunLog) -> RunLog:
    return set_column(log, "unscored_fraction", lambda place, _: 0.02 + 0.2 * place)


def tools_fail(log: RunLog) -> RunLog:
    return set_column(log, "tools/failure_frequency", lambda place, _: 0.55)


def leaking(log: RunLog) -> RunLog:
    shake = jitter(0.02)
    return set_column(log, "tokens_per_second", lambda place, _: shake(5000 / (1 + 2 * place)))


def not_a_number(log: RunLog) -> RunLog:
    return set_column(log, "loss", lambda place, old: float("nan") if 0.5 < place < 0.52 else old)


def skipped(log: RunLog) -> RunLog:
    count = len(log.steps)
    return set_column(log, "skipped", lambda place, _: float(round(place * (count - 1)) % 12 == 3))


def forged(log: RunLog) -> RunLog:
    count = len(log.steps)
    name = "environment/recheck_disagreements"
    return set_column(log, name, lambda place, _: float(round(place * (count - 1)) == count // 2))


def one_wins(log: RunLog) -> RunLog:
    late = log.steps[-1]
    rows = [
        {"step": late, "prompt_id": f"p{n}", "completion": "yes" if n % 2 else str(n), "reward": 1.0} for n in range(60)
    ]
    return replace(log, rollouts=rows)


def control_gains(log: RunLog) -> RunLog:
    return replace(log, control=replace(log, summary={}), summary={})


def wrong_by_chance(log: RunLog) -> RunLog:
    return set_column(log, "disagreement_fraction", lambda place, _: 0.08)


def forgets(log: RunLog) -> RunLog:
    """A tenth of what was solved is lost, and as much is not gained: accuracy alone does not show it."""
    names = [f"test-{n}" for n in range(512)]
    rows = [
        {"step": step, "prompts": names, "ids": names, "right": "1" * right + "0" * (512 - right)}
        for step, right in ((0, 240), (100, 200))
    ]
    log = set_looks(log, "accuracy", lambda place, _: 0.43)
    return replace(log, verdicts=rows, summary={})


def most_thrown_away(log: RunLog) -> RunLog:
    log = set_column(log, "num_groups_sampled", lambda place, _: 160.0)
    return set_column(log, "num_groups", lambda place, _: 64.0)


def few_count(log: RunLog) -> RunLog:
    return set_column(log, "advantage_top_share", lambda place, _: 0.65)


def wrong_sign(log: RunLog) -> RunLog:
    return set_column(log, "advantage_agreement", lambda place, _: -1.0)


def nothing_moves(log: RunLog) -> RunLog:
    log = set_column(log, "update_gain", lambda place, _: 1e-7)
    return set_column(log, "update_gain_error", lambda place, _: 1e-6)


def hacked(log: RunLog) -> RunLog:
    return set_looks(log, "accuracy", lambda place, _: 0.35 - 0.25 * place)


MADE_SICK: dict[str, MadeSick] = {
    "entropy gone, answers alike": MadeSick(("D4",), entropy_gone),
    "solved before it began": MadeSick(("D3",), solved),
    "KL without a gain": MadeSick(("D9",), kl_away),
    "gradient leaps every 15 steps": MadeSick(("D13",), spikes),
    "bfloat16 engine 0.02 nats off": MadeSick(("D10",), half_precision_gap),
    "mismatch 0.011 to 0.04 nats": MadeSick(("D11",), gap_that_grows),
    "effective sample size to 0.35": MadeSick(("D25",), stale),
    "0.4 of the tokens clipped": MadeSick(("D26",), clip_takes_all),
    "training prompts by heart": MadeSick(("D19",), prompts_by_heart),
    "long answers, all alike": MadeSick(("D22",), all_alike),
    "ever more answers not judged": MadeSick(("D23",), half_lost),
    "tools fail in 0.55 of the calls": MadeSick(("D29",), tools_fail),
    "a token three times as slow": MadeSick(("D30",), leaking),
    "a loss that is no number": MadeSick(("D33",), not_a_number),
    "every twelfth update skipped": MadeSick(("D33",), skipped),
    "a program of full score fails": MadeSick(("D18",), forged),
    "one text wins half the prompts": MadeSick(("D18",), one_wins),
    "the control gains as much": MadeSick(("D31",), control_gains),
    "0.08 of the verdicts differ": MadeSick(("D24",), wrong_by_chance),
    "solved prompts lost": MadeSick(("D21",), forgets),
    "0.6 of the groups dropped": MadeSick(("D28",), most_thrown_away),
    "a hundredth holds 0.65 of the advantages": MadeSick(("D27",), few_count),
    "advantages of the wrong sign": MadeSick(("D37",), wrong_sign),
    "an optimiser of other weights": MadeSick(("D37",), nothing_moves),
    "reward up, accuracy down": MadeSick(("D16",), hacked),
}
