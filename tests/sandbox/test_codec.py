"""Values survive the channel with their exact types; hostile frames do not get past decoding."""

import json
import math
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple
from collections.abc import Iterable, Iterator
from datetime import date
from decimal import Decimal
from enum import IntEnum
from fractions import Fraction
from itertools import chain, count, groupby, islice, permutations, product
from typing import Any

import pytest

from covey_sandbox.inside import codec
from covey_sandbox.inside.codec import FOREIGN, Encoder, Opaque, Unencodable, decode, dumps, loads

Point = namedtuple("Point", "x y")


class Color(IntEnum):
    RED = 7


class Doubled(int):
    def __pos__(self) -> int:
        return 2 * self


class Shifted(Decimal):
    def __eq__(self, other: object) -> bool:
        return True

    __hash__ = Decimal.__hash__

    def __str__(self) -> str:
        return "8"


class Everything(Fraction):
    def __eq__(self, other: object) -> bool:
        return True

    __hash__ = Fraction.__hash__
    numerator = property(lambda self: 8)


class Liar(str):
    def __eq__(self, other: object) -> bool:
        return True

    __hash__ = str.__hash__

    def __str__(self) -> str:
        return "a lie"


def sent(value: Any) -> Any:
    """What arrives on the other side."""
    return decode(loads(dumps(Encoder(1 << 20).encode(value))))


PLAIN = [
    None, True, False, 0, -7, 1 << 53, (1 << 53) + 1, -(1 << 5000), 0.1, -0.0, 5e-324, math.inf, -math.inf, "",
    "h\u00e9\ud800\x00", b"\x00\xff", bytearray(b"ab"), 1 + 2j, [], [1, [2, [3]]], (), (1,), (1, (2.5, None)),
    set(), {1, 2.5, (2,)},
    frozenset({frozenset({1})}), {}, {"i": "0x1"}, {1: "x", (1, 2): 2.5, None: False}, {"t": [1]}, range(3, 90, 4),
    Fraction(-3, 4), Fraction(1 << 5000, 3), Decimal("-0.50"), Decimal("1E+999999999"), Decimal("-Infinity"),
    Decimal("-0"),
]  # fmt: skip


@pytest.mark.parametrize("value", PLAIN, ids=str)
def test_a_plain_value_arrives_with_its_exact_types(value: Any) -> None:
    assert repr(sent(value)) == repr(value)


def test_nan_arrives() -> None:
    assert math.isnan(sent(math.nan))
    assert repr([sent(Decimal(text)) for text in ("NaN", "sNaN", "-NaN123")]) == repr([Decimal("NaN")] * 3)


@pytest.mark.parametrize(
    ("value", "content"),
    [
        (Counter("aab"), {"a": 2, "b": 1}),
        (defaultdict(list, {1: [2]}), {1: [2]}),
        (OrderedDict(a=1), {"a": 1}),
        (Point(1, 2), (1, 2)),
        (Color.RED, 7),
        (Liar("the truth"), "the truth"),
        (Doubled(7), 7),
        (Shifted("7.5"), Decimal("7.5")),
        (Everything(7, 2), Fraction(7, 2)),
    ],
    ids=str,
)
def test_a_subclass_is_read_with_the_methods_of_its_plain_base(value: Any, content: Any) -> None:
    arrived = sent(value)
    assert type(arrived) is type(content)
    assert repr(arrived) == repr(content)


def test_iterators_and_views_can_be_iterated_once_they_arrive() -> None:
    assert list(sent(character for character in "ab")) == ["a", "b"]
    assert sorted(sent({"b": 1, "a": 2}.keys())) == ["a", "b"]
    assert sum(sent({"b": 1, "a": 2}.values())) == 3
    assert list(sent({"b": 1}.items())) == [("b", 1)]


class CountDown:
    def __init__(self, start: int) -> None:
        self.left = start

    def __iter__(self) -> "CountDown":
        return self

    def __next__(self) -> int:
        if self.left == 0:
            raise StopIteration
        self.left -= 1
        return self.left


@pytest.mark.parametrize(
    ("iterator", "members"),
    [
        (permutations("ab"), [("a", "b"), ("b", "a")]),
        (chain([1], (2,)), [1, 2]),
        (islice(count(5), 2), [5, 6]),
        (reversed({1: 2, 3: 4}), [3, 1]),
        (iter("h\u00e9"), ["h", "\u00e9"]),
        (iter(b"ab"), [97, 98]),
        (iter([3, 2, 0].pop, 3), [0, 2]),
        (CountDown(2), [1, 0]),
    ],
    ids=lambda value: type(value).__name__,
)
def test_any_iterator_is_decoded(iterator: Iterator[Any], members: list[Any]) -> None:
    assert list(sent(iterator)) == members


def test_the_groups_of_an_iterator_arrive() -> None:
    assert [(key, list(group)) for key, group in sent(groupby("aab"))] == [("a", ["a", "a"]), ("b", ["b"])]


def test_what_is_not_plain_keeps_its_truth_and_equals_nothing() -> None:
    arrived = sent([object(), ...])
    assert [bool(item) for item in arrived] == [True, True]
    assert arrived[0] != arrived[0]
    assert sent({"key": {1, 2}.add}) != {"key": Opaque(True)}


def test_what_is_not_plain_is_refused_where_it_must_be() -> None:
    with pytest.raises(Unencodable, match="function is no plain type"):
        Encoder(100, is_strict=True).encode([1, sent])


def test_depth_and_size_are_bounded() -> None:
    nested: list[Any] = []
    for _ in range(200_000):
        nested = [nested]
    with pytest.raises(Unencodable, match="60 deep"):
        Encoder(1 << 20).encode(nested)
    endless = (number for number in iter(int, 1))
    for large in ("x" * 1001, list(range(1001)), 1 << 5000, b"x" * 600, endless, dict.fromkeys(range(600))):
        with pytest.raises(Unencodable, match="too large"):
            Encoder(1000).encode([large])


@pytest.mark.parametrize(
    "frame",
    [
        "1.5", "NaN", "Infinity", '{"f": "1.5"}', '{"f": 1}', '{"i": "12"}', '{"i": 5}', '{"i": "0x_1"}', '{"x": 1}',
        "{}", '{"i": "0x1", "f": "inf"}', '{"t": 5}', '{"t": "ab"}', '{"s": [[]]}', '{"d": [[1]]}', '{"d": {"a": 1}}',
        '{"b": "zz"}', '{"b": 7}', '{"o": 1}', '{"c": ["inf"]}', '{"r": ["0x1"]}', '{"t": {"t": 1}}',
        '{"q": ["0x1", "0x0"]}', '{"q": ["0x1"]}', '{"q": [1, 2]}', '{"m": "sNaN"}', '{"m": "1e9999999999999999999"}',
        '{"m": 1}', '{"m": "1_0"}', '{"m": "\\u0661"}', '{"m": "10e999999999999999999"}', '{"__class__": "x"}',
        "1" * 5000,
        "[" * 100_000, '{"t": [' * 100_000, "\x00", '"\udcff"',
    ],
)  # fmt: skip
def test_a_frame_that_encoding_does_not_make_raises_what_the_judge_expects(frame: str) -> None:
    with pytest.raises(FOREIGN):
        decode(loads(frame.encode("utf-8", "surrogateescape")))


@pytest.mark.long
def test_numbers_chosen_to_have_one_hash_are_refused_quickly() -> None:
    same = [{"i": hex(((1 << 61) - 1) * index)} for index in range(1, 50_000)]
    for frame in ({"s": same}, {"z": same}, {"d": [[number, 1] for number in same]}, {"k": same}):
        with pytest.raises(ValueError, match="same hash"):
            decode(json.loads(json.dumps(frame)))


@pytest.mark.parametrize(("numbers", "length"), [(range(-3, 4), 4), (range(-20, 20), 3), ((-2, -1), 9)], ids=str)
def test_grid_points_arrive_despite_equal_hashes_of_minus_1_and_2(numbers: Iterable[int], length: int) -> None:
    points = set(product(numbers, repeat=length))
    assert sent(points) == points
    assert sent(dict.fromkeys(points, 1)) == dict.fromkeys(points, 1)


def test_every_tag_that_can_be_encoded_can_be_decoded() -> None:
    views = [iter(()), {}.keys(), {}.values(), {}.items()]
    values: list[Any] = [*PLAIN, date(2020, 1, 2), deque([1]), *views, len]
    encoded = [*(Encoder(9999).encode(value) for value in values), Encoder(9999, keep=id).encode(Point(1, 2))]
    assert {next(iter(node)) for node in encoded if type(node) is dict} == {*codec._DECODERS, *codec._CONTAINERS}


def test_names_of_a_tuple_are_read_where_test_code_asks_for_them_alone() -> None:
    assert Encoder(99).encode(Point(1, 2)) == {"t": [1, 2]}
    told = Encoder(99, keep=id).encode(Point(1, [2]))
    found = decode(told, refer=lambda tag, content: None)
    assert (found, found.x, found.y) == ((1, [2]), 1, [2])
    for names in (["x"], ["x", "__eq__"], ["x", "1"], ["x", 3]):
        with pytest.raises(FOREIGN):
            decode({"T": [names, [1, 2]]}, refer=lambda tag, content: None)
    with pytest.raises(FOREIGN):
        decode(told)
