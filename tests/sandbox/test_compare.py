"""What counts as the expected value."""

import math
from decimal import Decimal
from fractions import Fraction
from typing import Any

import pytest

from covey_sandbox.inside.codec import Opaque
from covey_sandbox.inside.judging.compare import Tolerance, matches

NAN = math.nan

SAME = [
    (1, 1), (1.0, 1), (2.0**60, 2**60), (NAN, NAN), (math.inf, math.inf), (0.0, -0.0), ("a", "a"), (None, None),
    ([1, (2,)], [1, (2,)]), ({1, 2}, {2, 1}), ({1.0}, {1}), ({(1.0, 2)}, {(1, 2)}), ({1: [2.0]}, {1: [2]}),
    ({1.5: "a", 2.0: "b"}, {2: "b", 1.5: "a"}), (frozenset({1}), frozenset({1})), (b"a", b"a"), (1 + 2j, 1 + 2j),
    ({NAN}, {NAN}),
]  # fmt: skip
DIFFERENT = [
    (1, True), (True, 1), (0, False), (1, 1.0), (1.0, True), ((1,), [1]), ("a", b"a"), (NAN, 1.0), (1.0, NAN),
    (math.inf, -math.inf), (math.inf, 1e308), (1.0, math.inf), ([1, 2], [1]), ([1], [1, 2]), ([], [1]), ({1}, {True}),
    ({1}, {1, 2}), ({1: 1}, {1: 2}), ({1: 1}, {True: 1}), ({1: 1}, {1: 1, 2: 2}), ({1}, frozenset({1})),
    ([True], [1]), ({"a": (1,)}, {"a": [1]}), (None, False), (None, 0), ("1", 1), (1.0, "1.0"), (1.0, 1 << 5000),
    (bytearray(b"a"), b"a"), ({1, 2}, {1, 3}), ([[]], [()]), ({NAN: 1}, {float("nan"): 2, NAN: 1}),
    ({NAN}, {float("nan"), NAN}), (1 + 2j, 1 + 3j), (1 + 2j, 2 + 2j), ({(1.0, 1)}, {(1.0, True)}),
    (2.0**53, 2**53 + 1), (0.5, Fraction(1, 2)), (0.5, Decimal("0.5")), (6, Fraction(6)), (6, Decimal(6)),
]  # fmt: skip


@pytest.mark.parametrize(("expected", "got"), SAME, ids=str)
def test_these_pass(expected: Any, got: Any) -> None:
    assert matches(expected, got)


@pytest.mark.parametrize(("expected", "got"), DIFFERENT, ids=str)
def test_these_fail(expected: Any, got: Any) -> None:
    assert not matches(expected, got)


def test_a_tolerance_is_for_floats_wherever_they_are() -> None:
    close = Tolerance(rel=1e-6, abs=1e-9)
    assert matches([0.3, {"a": (1e6,)}], [0.1 + 0.2, {"a": (1e6 + 0.5,)}], close)
    assert matches({0.3, 5.0}, {5, 0.1 + 0.2}, close)
    assert matches({0.3: 1.0}, {0.1 + 0.2: 1.0 + 1e-9}, close)
    assert not matches({0.3: 1.0}, {0.1 + 0.2: 2.0}, close)
    assert not matches(1.0, 1.001, close)
    assert not matches(1.0, NAN, close)
    assert not matches(1, 1.0000000001, close)
    assert not matches(math.inf, 1e300, Tolerance(rel=1.0, abs=1e308))
    assert not matches(1e308, math.inf, Tolerance(rel=1.0, abs=1e308))
    assert not matches(1.0, 2.0, Tolerance(rel=0.5))  # of what is expected
    assert matches(100.0, 101, Tolerance(abs=1.0))
    assert not matches(100.0, 101.5, Tolerance(abs=1.0))


def test_a_value_that_is_not_plain_matches_nothing() -> None:
    token = Opaque(True)
    assert not matches(True, token)
    assert not matches([1], [token])
    assert not matches({1}, {token})
