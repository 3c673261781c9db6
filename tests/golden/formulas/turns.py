"""Advantages of single turns, from the rewards of episodes and of their turns.

Each takes (params, inputs) and returns one number per turn, episode after episode, 0 for those of an episode that was
not scored. `turns` holds for each episode its list of (reward, state).
"""

from collections.abc import Callable, Hashable
from typing import Any

from . import advantages
from .advantages import Inputs
from .exact import MP, Params, Real, mean, over
from .group_statistics import is_scored, std

BASES: dict[str, Callable[[Params, Inputs], list[Real]]] = {
    "group_zscore": advantages.group_zscore,
    "group_center": advantages.group_center,
    "leave_one_out": advantages.leave_one_out,
}


def outcome(inputs: Inputs, i: int) -> Real:
    """Return what is left of an episode's reward without those of its turns."""
    return inputs["rewards"][i] - sum(reward for reward, _ in inputs["turns"][i])


def value_from(params: Params, inputs: Inputs, i: int, k: int) -> Real:
    """Return the discounted sum of rewards from turn k on, the outcome with that of the last turn."""
    own = [reward for reward, _ in inputs["turns"][i]]
    own[-1] += outcome(inputs, i)
    return sum(params["gamma"] ** (j - k) * own[j] for j in range(k, len(own)))


def places(inputs: Inputs) -> list[tuple[int, int]]:
    """Return (episode, turn) of every turn."""
    return [(i, k) for i, own in enumerate(inputs["turns"]) for k in range(len(own))]


def base(params: Params, inputs: Inputs, rewards: list[Real]) -> list[Real]:
    """Return the advantages of episodes with these rewards."""
    return BASES[params["estimator"]]({"ddof": 1, "eps": MP.mpf("1e-6")}, {**inputs, "rewards": rewards})


def compared(params: Params, values: dict[Any, Real], names: dict[Any, Hashable]) -> dict[Any, Real]:
    """Return (value - mean) / (std + eps) among those of one name; 0 for one alone and where all are equal."""
    found = {}
    for one, name in names.items():
        alike = [values[other] for other, called in names.items() if called == name]
        spread = std(alike, params.get("ddof", 1)) + params.get("eps", MP.mpf("1e-6"))
        is_equal = max(alike) - min(alike) < MP.mpf("1e-20")
        gap = MP.mpf(0) if is_equal else values[one] - mean(alike)
        found[one] = gap if params.get("scale") == "none" else over(gap, spread)
    return found


def credit(params: Params, inputs: Inputs) -> list[Real]:
    """Return the advantage of every turn by the rule that params names."""
    scored = [(i, k) for i, k in places(inputs) if is_scored(inputs["rewards"][i])]
    by_turn = RULES[params["turn_credit"]](params, inputs, scored)
    return [by_turn.get(place, MP.mpf(0)) for place in places(inputs)]


def _episode(params: Params, inputs: Inputs, scored: list[Any]) -> dict[Any, Real]:
    whole = base(params, inputs, inputs["rewards"])
    return {(i, k): whole[i] for i, k in scored}


def _discounted(params: Params, inputs: Inputs, scored: list[Any]) -> dict[Any, Real]:
    rewards = [value_from(params, inputs, i, k) for i, k in scored]
    rows = {"groups": [inputs["groups"][i] for i, _ in scored]}
    return dict(zip(scored, base(params, rows, rewards), strict=True))


def _turn_mixed(params: Params, inputs: Inputs, scored: list[Any]) -> dict[Any, Real]:
    of_outcome = base(params, inputs, [outcome(inputs, i) for i in range(len(inputs["turns"]))])
    rewards = {(i, k): inputs["turns"][i][k][0] for i, k in scored}
    own = compared(params, rewards, {(i, k): (inputs["groups"][i], k) for i, k in scored})
    return {(i, k): of_outcome[i] + params["weight"] * own[i, k] for i, k in scored}


def _anchor_state(params: Params, inputs: Inputs, scored: list[Any]) -> dict[Any, Real]:
    def state(i: int, k: int) -> Hashable:
        name = inputs["turns"][i][k][1]
        return (inputs["groups"][i], name) if name else (i, k, "alone")

    values = {(i, k): value_from(params, inputs, i, k) for i, k in scored}
    own = compared(params, values, {(i, k): state(i, k) for i, k in scored})
    whole = _episode(params, inputs, scored)
    return {place: whole[place] + params["weight"] * own[place] for place in scored}


RULES: dict[str, Callable[[Params, Inputs, list[Any]], dict[Any, Real]]] = {
    "episode": _episode,
    "discounted": _discounted,
    "turn_mixed": _turn_mixed,
    "anchor_state": _anchor_state,
}
