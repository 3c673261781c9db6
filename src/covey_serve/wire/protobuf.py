"""Protocol buffers of the Tinker API, as protobuf.yaml lays them out.

A message is a dictionary: every field is there, with its default where the wire has none. Unknown fields are left out.
"""

import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from covey.system.lookup import read_table

MAX_FIELDS = 250_000
"""Most fields of a request: a byte of the wire must not become a hundred of memory without bound."""
MAX_DEPTH = 8

LAYOUTS: Mapping[str, Mapping[int, tuple[str, str]]] = read_table(Path(__file__).with_suffix(".yaml"))
"""Message -> field number -> name and kind."""
VARINT, FIXED64, BYTES, FIXED32 = 0, 1, 2, 5
DEFAULTS: dict[str, Any] = {"int": 0, "bool": False, "double": 0.0, "str": "", "bytes": b"", "ints": ()}


def decode(kind: str, raw: bytes) -> dict[str, Any]:
    """Read a message. ValueError for anything that is none."""
    return _Reader().message(kind, memoryview(raw), 0)


def encode(kind: str, message: Mapping[str, Any]) -> bytes:
    """Write a message; absent fields and scalar defaults are left out."""
    out = bytearray()
    for number, (name, of) in LAYOUTS[kind].items():
        values = message.get(name)
        for value in (values or ()) if of.endswith("*") else () if values is None else (values,):
            out += _encode_field(number, of.removesuffix("*"), value)
    return bytes(out)


class _Reader:
    """Reads one request, and counts its fields."""

    def __init__(self) -> None:
        self._left = MAX_FIELDS

    def message(self, kind: str, raw: memoryview, depth: int) -> dict[str, Any]:
        layout = LAYOUTS[kind]
        if depth > MAX_DEPTH:
            raise ValueError(f"protobuf must be nested at most {MAX_DEPTH} deep")
        found: dict[str, Any] = {name: [] if of.endswith("*") else DEFAULTS.get(of) for name, of in layout.values()}
        place = 0
        while place < len(raw):
            self._left -= 1
            if self._left < 0:
                raise ValueError(f"protobuf must have at most {MAX_FIELDS} fields")
            tag, place = _varint(raw, place)
            value, place = _value(raw, place, tag & 7)
            if tag >> 3 in layout:
                self._put(found, *layout[tag >> 3], value, depth)
        return found

    def _put(self, found: dict[str, Any], name: str, of: str, value: Any, depth: int) -> None:
        single = of.removesuffix("*")
        is_bytes = isinstance(value, memoryview)
        if single == "ints":
            found[name] = (*found[name], *(_unpack(value) if is_bytes else (_to_signed(value),)))
            if len(found[name]) > MAX_DEPTH:
                raise ValueError(f"protobuf field {name} must have at most {MAX_DEPTH} numbers")
            return
        if is_bytes is not (single in ("str", "bytes") or single in LAYOUTS):
            raise ValueError(f"protobuf field {name} has another type")
        if single in LAYOUTS:
            read: Any = self.message(single, value, depth + 1)
        elif is_bytes:
            read = str(value, "utf-8") if single == "str" else bytes(value)
        elif isinstance(value, float) is not (single == "double"):
            raise ValueError(f"protobuf field {name} has another type")
        else:
            read = bool(value) if single == "bool" else _to_signed(value) if single == "int" else value
        if of.endswith("*"):
            found[name].append(read)
        else:
            found[name] = read


def _value(raw: memoryview, place: int, wire: int) -> tuple[Any, int]:
    if wire == VARINT:
        return _varint(raw, place)
    length = {FIXED64: 8, FIXED32: 4}.get(wire)
    if wire == BYTES:
        length, place = _varint(raw, place)
    if length is None or place + length > len(raw):
        raise ValueError("protobuf is cut or damaged")
    value = raw[place : place + length]
    if wire == BYTES:
        return value, place + length
    return struct.unpack("<d" if wire == FIXED64 else "<f", value)[0], place + length


def _varint(raw: memoryview, place: int) -> tuple[int, int]:
    found = shift = 0
    while place < len(raw) and shift < 70:
        byte = raw[place]
        found |= (byte & 127) << shift
        place, shift = place + 1, shift + 7
        if byte < 128:
            return found & (2**64 - 1), place
    raise ValueError("protobuf is cut or damaged")


def _unpack(raw: memoryview) -> tuple[int, ...]:
    values: list[int] = []
    place = 0
    while place < len(raw) and len(values) <= MAX_DEPTH:  # shapes alone are packed
        value, place = _varint(raw, place)
        values.append(_to_signed(value))
    return tuple(values)


def _to_signed(value: int) -> int:
    return value - 2**64 if value >= 2**63 else value


def _encode_field(number: int, of: str, value: Any) -> bytes:
    if of in ("int", "bool"):
        return _number(number << 3 | VARINT) + _number(int(value)) if value else b""
    if of == "double":
        return _number(number << 3 | FIXED64) + struct.pack("<d", value)
    if of == "ints":
        raw = b"".join(map(_number, value))
        if not raw:
            return b""
    else:
        raw = encode(of, value) if of in LAYOUTS else value.encode() if of == "str" else value
    return _number(number << 3 | BYTES) + _number(len(raw)) + raw


def _number(value: int) -> bytes:
    value &= 2**64 - 1
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    return bytes([*out, value])
