"""Cases of credit in time."""

from typing import Any

from .draws import NAN, Document, Draw, Given

Episodes = list[list[list[Any]]]


def drawn(draw: Draw, lengths: list[int], states: str) -> Episodes:
    """Return episodes of so many turns, with rewards of two decimals and states of the letters given."""
    return [[[draw.number(-0.5, 1.0, 2), states[draw.whole(0, len(states) - 1)]] for _ in range(n)] for n in lengths]


def batches(draw: Draw) -> dict[str, dict[str, Any]]:
    """Return batches of episodes, ordinary and degenerate."""
    equal = [[[0.25, "a"], [0.5, "b"]] for _ in range(3)]
    return {
        "two groups of three turns each": {
            "rewards": draw.numbers(6, -1.0, 2.0),
            "groups": [0] * 3 + [1] * 3,
            "turns": drawn(draw, [3] * 6, "ab"),
        },
        "groups interleave, episodes of unequal numbers of turns": {
            "rewards": draw.numbers(7, -1.0, 2.0),
            "groups": ["b", "a", "b", "a", "b", "c", "b"],
            "turns": drawn(draw, [1, 4, 2, 1, 5, 2, 3], "abc"),
        },
        "one turn each": {
            "rewards": draw.numbers(4, 0.0, 1.0),
            "groups": [0] * 4,
            "turns": drawn(draw, [1] * 4, "a"),
        },
        "not scored (NaN)": {
            "rewards": [NAN, *draw.numbers(3, 0.0, 1.0), NAN, 0.5],
            "groups": [0, 0, 0, 0, 1, 1],
            "turns": drawn(draw, [2, 3, 2, 4, 2, 2], "ab"),
        },
        "all alike": {"rewards": [1.75, 1.75, 1.75], "groups": [0] * 3, "turns": equal},
        "outcomes alike, turns not": {
            "rewards": [1.5, 1.25, 1.75],
            "groups": [0] * 3,
            "turns": [[[0.25, "a"], [0.25, "b"]], [[0.25, "a"], [0.0, "b"]], [[0.5, "a"], [0.25, "b"]]],
        },
        "states without a name": {
            "rewards": draw.numbers(4, 0.0, 1.0),
            "groups": [0] * 4,
            "turns": [[[0.1, ""], [0.3, "a"]], [[0.7, ""], [0.2, "a"]], [[0.4, "a"], [0.5, ""]], [[0.9, "b"]]],
        },
        "an episode comes back to a state": {
            "rewards": draw.numbers(2, 0.0, 1.0),
            "groups": [0, 0],
            "turns": [[[0.1, "a"], [0.2, "b"], [0.0, "a"], [0.3, "a"]], [[0.5, "a"], [0.0, "c"]]],
        },
    }


def turn_credit(draw: Draw) -> list[Given]:
    settings: list[dict[str, Any]] = [
        {"turn_credit": "episode", "estimator": "group_zscore"},
        {"turn_credit": "discounted", "estimator": "group_zscore", "gamma": 0.4},
        {"turn_credit": "discounted", "estimator": "group_center", "gamma": 1.0},
        {"turn_credit": "discounted", "estimator": "leave_one_out", "gamma": 0.0},
        {"turn_credit": "turn_mixed", "estimator": "group_zscore", "weight": 1.0},
        {"turn_credit": "turn_mixed", "estimator": "group_center", "weight": 0.3, "scale": "none"},
        {"turn_credit": "turn_mixed", "estimator": "group_zscore", "weight": 2.0, "ddof": 0, "eps": 0.0},
        {"turn_credit": "anchor_state", "estimator": "group_zscore", "weight": 1.0, "gamma": 0.95},
        {"turn_credit": "anchor_state", "estimator": "group_center", "weight": 0.5, "gamma": 1.0, "scale": "none"},
        {
            "turn_credit": "anchor_state",
            "estimator": "group_zscore",
            "weight": 1.0,
            "gamma": 0.5,
            "ddof": 0,
            "eps": 0.1,
        },
    ]
    made = batches(draw)
    return [Given(note, dict(params), inputs) for note, inputs in made.items() for params in settings]


DOCUMENTS = (
    Document(
        "turn_credit",
        "Kevin, arXiv 2507.11948, MT-GRPO, 2505.11821, and GiGPO, 2505.10978",
        turn_credit,
    ),
)
