"""The page about the fill-in demo: both measures must rise, and every seed is shown."""

from typing import Any

import pytest

from benchmarks.demo.infill import found_in, has_risen, page, row


def estimate(value: float, low: float) -> dict[str, float]:
    return {"value": value, "low": low, "high": value + 0.1}


def result(judge: float = 0.01, grammar: float = 0.01) -> dict[str, Any]:
    """A run whose gains have these lower ends."""
    parts = {name: estimate(0.5, 0.4) for name in ("judge", "grammar", "gap", "ngram")}
    gain = {"judge": estimate(0.1, judge), "grammar": estimate(0.1, grammar), "gap": estimate(0.0, -0.1)}
    summary = {
        "before": {"reward_parts": parts},
        "after": {"reward_parts": parts},
        "gain": {"reward_parts": gain},
        "environment": {"judge": {"accuracy": 0.9375}},
        "seconds": 181.4,
        "phases": {"sampling": {"seconds": 20.0, "share": 0.1}},
        "versions": {"torch": "2.13.0", "transformers": "5.23.0"},
    }
    return found_in(summary)


@pytest.mark.parametrize(
    ("judge", "grammar", "rose"), [(0.01, 0.01, True), (0.0, 0.01, False), (0.01, 0.0, False), (-0.1, -0.1, False)]
)
def test_both_must_rise_beyond_their_intervals(judge: float, grammar: float, rose: bool) -> None:
    assert has_risen(result(judge, grammar)) is rose


def test_a_row_shows_both_measures_the_gap_and_seconds() -> None:
    before = "0.500 [0.400, 0.600] | 0.500 [0.400, 0.600]"
    gain = "+0.100 [+0.010, +0.200]"
    expected = f"| 1 | {before} | {gain} | {before} | {gain} | +0.000 [-0.100, +0.100] | yes | 181 |"
    assert row("1", result()) == expected


def test_the_page_shows_every_seed_and_the_one_that_did_not_rise() -> None:
    text = page({"0": result(), "2": result(), "1": result(grammar=-0.1)})
    assert [line[:4] for line in text.splitlines() if line[:3] in ("| 0", "| 1", "| 2")] == ["| 0 ", "| 1 ", "| 2 "]
    assert text.count("**no**") == 1
    assert "rank 93.8 to 93.8 % of 256 held-out texts" in text
