"""Every golden advantage of a turn."""

from typing import Any

from covey.algorithm.credit.advantages import ADVANTAGES, scores
from covey.algorithm.credit.turns import TURN_CREDIT, as_turns

from .cases import Case, check, golden


@golden("turn_credit")
def test_advantages_of_turns_are_the_golden_ones(case: Case) -> None:
    inputs, params = case.inputs, case.params
    rows: list[tuple[int, Any]] = [(i, turn) for i, own in enumerate(inputs["turns"]) for turn in own]
    turns = as_turns([i for i, _ in rows], [turn[0] for _, turn in rows], states=[turn[1] for _, turn in rows])
    options = case.options("gamma", "weight", "scale", "ddof", "eps")
    estimate = ADVANTAGES[params["estimator"]]
    given = scores(inputs["rewards"], inputs["groups"])
    check(TURN_CREDIT[params["turn_credit"]](given, turns, estimate, **options), case, "advantages")
