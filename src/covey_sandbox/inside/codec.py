"""Plain values as JSON and back, the only language of program and judge.

None, bools, strings, lists and integers up to 2^53 are themselves; everything else is an object with one key, its tag:

    i integer (hexadecimal)   f float (float.hex)   c complex [real, imaginary]   b bytes   y bytearray
    q fraction [numerator, denominator]   m decimal (as text)
    t tuple   T tuple with names [names, items]   s set   z frozenset   d dict [[key, value], ...]
    n iterator [items]   k, v, e views of a dict: keys, values, items   r range [start, stop, step]
    w date, time or duration [kind, parts, offset]   D deque [items]
    o anything else: whether it is true; between test code and a program, which object it is
    h a function of the test's [number, name]   g one that both sides have [module, name]
    x an object of a class that both sides have [[class, attributes], ...], the first of those that it leads to

Since every dict is tagged, no value can imitate a tag. Encoding reads a value with the methods of its plain base class,
whatever a subclass says about itself; decoding makes exact plain types and trusts nothing.
"""

import json
import re
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from datetime import date, datetime, time, timedelta, timezone
from decimal import Decimal
from fractions import Fraction
from operator import itemgetter
from typing import Any

MAX_DEPTH = 60
MAX_COLLISIONS = 1_000_000
"""Pairs of values in one set or dict that have the same hash: each costs a comparison."""
SAFE_INTEGER = 1 << 53
"""JSON numbers above are not the same everywhere."""
FOREIGN = (ArithmeticError, AttributeError, TypeError, ValueError, RecursionError, MemoryError)
"""Exceptions that decoding hostile text may raise."""


class Unencodable(Exception):
    """The value is too deep, too large, or not plain."""


class Opaque:
    """Stands for a value that is not plain: true or false, without attributes."""

    __slots__ = ("_truth",)

    def __init__(self, truth: bool) -> None:
        self._truth = truth

    def __bool__(self) -> bool:
        return self._truth

    def __eq__(self, other: object) -> bool:
        return False

    __hash__ = object.__hash__

    def __repr__(self) -> str:
        return "<not a plain value>"


class Encoder:
    """Encodes one value, of at most `size` nodes and characters."""

    def __init__(self, size: int, is_strict: bool = False, keep: Callable[[Any], Any] | None = None) -> None:
        """Begin a text of at most `size`; `is_strict` refuses values that are not plain.

        `keep` encodes other values as objects that the other side may name, None where it cannot.
        """
        self._left = size
        self._is_strict = is_strict
        self._keep = keep
        self.names_objects = keep is not None
        """Test code reads the encoded value, not a comparison."""

    def encode(self, value: Any, depth: int = 0) -> Any:
        """Encode a value for `json.dumps`. Raises Unencodable."""
        kind = type(value)
        self._left -= 1
        if value is None or kind is bool:
            return value
        if depth > MAX_DEPTH:
            raise Unencodable(f"the value is nested more than {MAX_DEPTH} deep")
        # Exact types first, then subclasses, then what only looks like a value
        for base, encode in _ENCODERS:
            if kind is base:
                return encode(self, value, depth)
        for base, encode in _ENCODERS:
            if issubclass(kind, base):
                return encode(self, value, depth)
        return self._iterator_or_opaque(value, depth)

    def spend(self, size: int) -> None:
        self._left -= size
        if self._left < 0:
            raise Unencodable("the value is too large")

    def all(self, values: Iterable[Any], depth: int) -> list[Any]:
        encoded = []
        for value in values:
            self.spend(1)
            encoded.append(self.encode(value, depth + 1))
        return encoded

    def pairs(self, values: Iterable[tuple[Any, Any]], depth: int) -> list[list[Any]]:
        encoded = []
        for first, second in values:
            self.spend(1)
            encoded.append([self.encode(first, depth + 1), self.encode(second, depth + 1)])
        return encoded

    def _iterator_or_opaque(self, value: Any, depth: int) -> Any:
        kind = type(value)
        for base, tag in _VIEWS.items():
            if kind is base:
                return {tag: self.pairs(value, depth) if tag == "e" else self.all(value, depth)}
        kept = self._keep(value) if self._keep is not None else None
        if kept is not None:
            return kept
        if issubclass(kind, Iterator):
            return {"n": self.all(value, depth)}
        if self._is_strict and kind is not Opaque:
            raise Unencodable(f"{kind.__name__} is no plain type")
        return {"o": bool(value)}


def _text(encoder: Encoder, value: Any, depth: int) -> Any:
    text = str.__str__(value)
    encoder.spend(len(text))
    return text


def _integer(encoder: Encoder, value: Any, depth: int) -> Any:
    number = int.__pos__(value)
    if -SAFE_INTEGER <= number <= SAFE_INTEGER:
        return number
    return {"i": _hex(encoder, number)}


def _hex(encoder: Encoder, number: int) -> str:
    encoder.spend(number.bit_length() // 4)
    return hex(number)


def _bytes(tag: str, to_hex: Callable[[Any], str]) -> Callable[[Encoder, Any, int], Any]:
    def encode(encoder: Encoder, value: Any, depth: int) -> Any:
        text = to_hex(value)
        encoder.spend(len(text))
        return {tag: text}

    return encode


def _items(tag: str, iterate: Callable[[Any], Iterator[Any]]) -> Callable[[Encoder, Any, int], Any]:
    return lambda encoder, value, depth: {tag: encoder.all(iterate(value), depth)}


def _tuple(encoder: Encoder, value: Any, depth: int) -> Any:
    items = encoder.all(tuple.__iter__(value), depth)
    names = type(value).__dict__.get("_fields") if encoder.names_objects else None
    if type(names) is tuple and len(names) == len(items) and all(type(name) is str for name in names):
        return {"T": [list(names), items]}
    return {"t": items}


def _complex(encoder: Encoder, value: Any, depth: int) -> Any:
    number = complex.__pos__(value)
    return {"c": [number.real.hex(), number.imag.hex()]}


def _range(encoder: Encoder, value: Any, depth: int) -> Any:
    return {"r": [_hex(encoder, part) for part in (value.start, value.stop, value.step)]}


def _fraction(encoder: Encoder, value: Any, depth: int) -> Any:
    return {"q": [_hex(encoder, part) for part in Fraction.as_integer_ratio(value)]}


def _decimal(encoder: Encoder, value: Any, depth: int) -> Any:
    text = "NaN" if Decimal.is_nan(value) else Decimal.__str__(value)  # of one kind: some raise where they are compared
    encoder.spend(len(text))
    return {"m": text}


def _moment(kind: type, names: str) -> Callable[[Encoder, Any, int], Any]:
    read = [getattr(kind, name).__get__ for name in names.split()]

    def encode(encoder: Encoder, value: Any, depth: int) -> Any:
        parts = [part(value) for part in read]
        zone = parts.pop() if names.endswith("tzinfo") else None
        if zone is not None and type(zone) is not timezone:
            return {"o": True}
        offset = None if zone is None else timezone.utcoffset(zone, None) // timedelta(microseconds=1)
        return {"w": [kind.__name__, parts, offset]}

    return encode


_MOMENTS = {
    datetime: "year month day hour minute second microsecond tzinfo",
    date: "year month day",
    time: "hour minute second microsecond tzinfo",
    timedelta: "days seconds microseconds",
}
_MOMENT_OF = {kind.__name__: kind for kind in _MOMENTS}

_ENCODERS: list[tuple[type, Callable[[Encoder, Any, int], Any]]] = [
    (int, _integer),
    (str, _text),
    (float, lambda encoder, value, depth: {"f": float.hex(value)}),
    (list, lambda encoder, value, depth: encoder.all(list.__iter__(value), depth)),
    (tuple, _tuple),
    (dict, lambda encoder, value, depth: {"d": encoder.pairs(dict.items(value), depth)}),
    (set, _items("s", set.__iter__)),
    (frozenset, _items("z", frozenset.__iter__)),
    (bytes, _bytes("b", bytes.hex)),
    (bytearray, _bytes("y", bytearray.hex)),
    (complex, _complex),
    (Fraction, _fraction),
    (Decimal, _decimal),
    (range, _range),
    *((kind, _moment(kind, names)) for kind, names in _MOMENTS.items()),
    (deque, _items("D", deque.__iter__)),
]
_VIEWS: dict[type, str] = {type({}.keys()): "k", type({}.values()): "v", type({}.items()): "e"}


def _refuse(text: str) -> Any:
    raise ValueError("floats are tagged")


_TO_JSON = json.JSONEncoder(ensure_ascii=True, allow_nan=False, check_circular=False, separators=(",", ":"))
_FROM_JSON = json.JSONDecoder(parse_float=_refuse, parse_constant=_refuse)


def dumps(value: Any) -> bytes:
    return _TO_JSON.encode(value).encode()


def loads(text: bytes) -> Any:
    """Read JSON without floats, which are always tagged. Raises FOREIGN."""
    return _FROM_JSON.decode(text.decode())


_INTEGER = re.compile(r"-?0x[0-9a-f]+")
_FLOAT = re.compile(r"-?0x[01]\.[0-9a-f]{1,13}p[+-]\d{1,4}|-?inf|nan")
_DECIMAL = re.compile(r"-?[0-9]+(\.[0-9]+)?([Ee][+-][0-9]+)?|-?Infinity|NaN")


Refer = Callable[[str, Any], Any]
"""Returns the object that a tag and its content name; ValueError if there is none."""


def decode(node: Any, depth: int = 0, refer: Refer | None = None) -> Any:
    """Decode JSON into exact plain types. Raises FOREIGN for foreign JSON.

    `refer` finds named objects; without it there are none.
    """
    kind = type(node)
    if node is None or kind is bool or kind is str or kind is int:
        return node
    if depth > MAX_DEPTH:
        raise ValueError("nested too deep")
    if kind is list:
        return [decode(item, depth + 1, refer) for item in node]
    ((tag, content),) = node.items()
    if tag in _CONTAINERS:
        return _CONTAINERS[tag](content, depth, refer)
    if refer is not None and tag in NAMING and type(content) is not bool:
        return refer(tag, content)
    return _DECODERS[tag](content) if tag in _DECODERS else _refuse(tag)


def _decoded_integer(text: str) -> int:
    if not _INTEGER.fullmatch(text):
        raise ValueError("not an integer")
    return int(text, 16)


def _decoded_float(text: str) -> float:
    if not _FLOAT.fullmatch(text):
        raise ValueError("not a float")
    return float.fromhex(text)


def _decoded_fraction(content: Any) -> Fraction:
    numerator, denominator = content
    return Fraction(_decoded_integer(numerator), _decoded_integer(denominator))


def _decoded_decimal(text: str) -> Decimal:
    if not _DECIMAL.fullmatch(text):
        raise ValueError("not a decimal")
    return Decimal(text)


def _decoded_moment(content: Any) -> Any:
    name, parts, offset = content
    if type(name) is not str or name not in _MOMENT_OF or type(parts) is not list or {*map(type, parts)} != {int}:
        raise ValueError("not a moment")
    zone = {} if offset is None else {"tzinfo": timezone(timedelta(microseconds=offset))}
    return _MOMENT_OF[name](*parts, **zone)


def _decoded_all(content: Any, depth: int, refer: Refer | None) -> list[Any]:
    if type(content) is not list:
        raise ValueError("not a list")
    return [decode(item, depth + 1, refer) for item in content]


def _hashable(values: list[Any]) -> list[Any]:
    """Return the values unless many share a hash, which would stall inserting.

    Honest ones form small groups: -1 and -2 share a hash, and so do points of a grid with them.
    """
    alike = Counter(map(hash, values)).values()
    if sum(number * (number - 1) for number in alike) > MAX_COLLISIONS:
        raise ValueError("too many values with the same hash")
    return values


def _decoded_named(content: Any, depth: int, refer: Refer | None) -> tuple[Any, ...]:
    names, items = content
    if refer is None or len(names) != len(items) or not all(name.isidentifier() and name[0] != "_" for name in names):
        raise ValueError("not a tuple with names")
    fields = {name: property(itemgetter(place)) for place, name in enumerate(names)}
    return type("Fields", (tuple,), {"__slots__": (), **fields})(_decoded_all(items, depth, refer))


def _decoded_pairs(content: Any, depth: int, refer: Refer | None) -> dict[Any, Any]:
    keys = _hashable([decode(key, depth + 1, refer) for key, _ in content])
    return dict(zip(keys, (decode(value, depth + 1, refer) for _, value in content), strict=True))


def _decoded_complex(content: Any) -> complex:
    real, imaginary = content
    return complex(_decoded_float(real), _decoded_float(imaginary))


def _decoded_range(content: Any) -> range:
    start, stop, step = content
    return range(_decoded_integer(start), _decoded_integer(stop), _decoded_integer(step))


def _decoded_truth(content: Any) -> Opaque:
    if type(content) is not bool:
        raise ValueError("neither true nor false")
    return Opaque(content)


_CONTAINERS: dict[str, Callable[[Any, int, Refer | None], Any]] = {
    "T": _decoded_named,
    "t": lambda *given: tuple(_decoded_all(*given)),
    "s": lambda *given: set(_hashable(_decoded_all(*given))),
    "z": lambda *given: frozenset(_hashable(_decoded_all(*given))),
    "d": _decoded_pairs,
    "n": lambda *given: iter(_decoded_all(*given)),
    "k": lambda *given: dict.fromkeys(_hashable(_decoded_all(*given))).keys(),
    "v": lambda *given: dict(enumerate(_decoded_all(*given))).values(),
    "e": lambda *given: _decoded_pairs(*given).items(),
    "D": lambda *given: deque(_decoded_all(*given)),
}
NAMING = ("o", "h", "g", "x")
_DECODERS: dict[str, Callable[[Any], Any]] = {
    "i": _decoded_integer,
    "f": _decoded_float,
    "c": _decoded_complex,
    "q": _decoded_fraction,
    "m": _decoded_decimal,
    "b": bytes.fromhex,
    "y": bytearray.fromhex,
    "w": _decoded_moment,
    "o": _decoded_truth,
    "r": _decoded_range,
}
