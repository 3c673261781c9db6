"""Rollouts and their parts as plain containers, checked by type when read.

One form for checkpoints and the journal. A file may be a stranger's: nothing but the fields of these types is made from
it, and tokens are within the vocabulary.
"""

import base64
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from types import NoneType, UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin

from covey.rollouts.attempt import Attempt
from covey.system.jsonl import plain_data
from covey.system.section import types_of
from covey.types import Completion, Failure, Group, Prompt, Rollout

T = TypeVar("T")
PACKED = {tuple[int, ...]: "iq", tuple[float, ...]: "fd", tuple[bool, ...]: "b"}
"""Types of long tuples, with the codes of `array` that hold them, the smallest first."""
CODES = "iqfdb"
CLASSES = {int: (int,), float: (int, float), bool: (bool,), str: (str,)}
"""Classes of plain values by the type that they are for."""


@dataclass(frozen=True, slots=True)
class SavedGroup:
    """A group without its prompt, which the data holds."""

    rollouts: tuple[Rollout, ...]
    failures: tuple[Failure, ...]

    @staticmethod
    def of(group: Group) -> "SavedGroup":
        return SavedGroup(group.rollouts, group.failures)

    def group(self, prompt: Prompt) -> Group:
        return Group(prompt, self.rollouts, self.failures)


@dataclass(frozen=True, slots=True)
class Piece:
    """Tokens of an unfinished completion, from a place on."""

    start: int
    token_ids: tuple[int, ...]

    def after(self, known: tuple[int, ...]) -> tuple[int, ...]:
        """Return known tokens and its own; known ones alone past a gap."""
        return known if self.start > len(known) else (*known[: max(0, self.start)], *self.token_ids)


def to_plain(value: Any) -> Any:
    """Return a dataclass as plain containers, its numbers packed."""
    kind: Any = type(value)
    hints = types_of(kind)
    return {field.name: _plain(hints[field.name], getattr(value, field.name)) for field in fields(value)}


def _plain(kind: Any, value: Any) -> Any:
    if kind in PACKED:
        return pack(value, PACKED[kind])
    if is_dataclass(value):
        return to_plain(value)
    if get_origin(kind) in (tuple, list):
        return [_plain(get_args(kind)[0], item) for item in value]
    return plain_data(value)


def pack(values: Sequence[float], codes: str) -> str:
    """Pack numbers as text, by the first code that holds them."""
    for code in codes:
        try:
            packed = array(code, values)
        except OverflowError:
            continue
        if code == codes[-1] or list(packed) == list(values):
            return code + base64.b64encode(packed.tobytes()).decode()
    raise AssertionError("the last code holds every number")


def unpack(text: str) -> tuple[Any, ...]:
    """Return packed numbers. ValueError for other text."""
    if text[:1] not in CODES or not text:
        raise ValueError(f"packed numbers must begin with one of {', '.join(CODES)}, got {text[:20]!r}")
    return tuple(array(text[0], base64.b64decode(text[1:], validate=True)))


def from_plain(kind: type[T], plain: Any) -> T:
    """Restore what `to_plain` took apart. ValueError for anything else."""
    return _restore(kind, plain)


def _restore(kind: Any, plain: Any) -> Any:
    origin, parts = get_origin(kind), get_args(kind)
    if kind in PACKED and isinstance(plain, str):
        return tuple(map(parts[0], unpack(plain)))
    if is_dataclass(kind):
        return _dataclass(kind, plain)
    if origin in (Union, UnionType):
        return _one_of(parts, plain)
    if origin in (tuple, list) and isinstance(plain, list | tuple):
        return origin(_restore(parts[0], item) for item in plain)
    if isinstance(origin, type) and issubclass(origin, Mapping) and isinstance(plain, dict):
        return {_restore(parts[0], key): _restore(parts[1], item) for key, item in plain.items()}
    if kind is Any or (plain in parts if origin is Literal else type(plain) in CLASSES.get(kind, ())):
        return plain
    raise ValueError(f"{kind} is due, got {plain!r:.60}")


def _dataclass(kind: Any, plain: Any) -> Any:
    hints = types_of(kind)
    if not isinstance(plain, dict) or not plain.keys() <= hints.keys():
        raise ValueError(f"a {kind.__name__} is due, got {plain!r:.60}")
    try:
        return kind(**{name: _restore(hints[name], item) for name, item in plain.items()})
    except (AssertionError, TypeError) as error:
        raise ValueError(f"no {kind.__name__}: {error}") from error


def _one_of(parts: Sequence[Any], plain: Any) -> Any:
    """Restore a value of one of several types, told by its fields."""
    if plain is None and NoneType in parts:
        return None
    names, others = set(plain) if isinstance(plain, dict) else set(), [part for part in parts if part is not NoneType]
    fitting: list[Any] = [part for part in others if is_dataclass(part)]
    return _restore(next((part for part in fitting if names <= types_of(part).keys()), others[0]), plain)


def check_tokens(value: Any, vocabulary: int) -> None:
    """Refuse tokens outside the vocabulary. ValueError."""
    for ids in _tokens(value):
        if ids and not 0 <= min(ids) <= max(ids) < vocabulary:
            raise ValueError(f"tokens must be below {vocabulary}, got {max(ids, key=abs)}")


def _tokens(value: Any) -> Iterable[tuple[int, ...]]:
    if isinstance(value, Completion | Piece):
        yield value.token_ids
    elif isinstance(value, Rollout):
        yield from (value.input_ids, value.target_ids)
    elif isinstance(value, SavedGroup):
        for rollout in value.rollouts:
            yield from _tokens(rollout)
    elif isinstance(value, Attempt):
        for segment in (segment for branch in value.branches for segment in branch):
            yield segment.ids
            yield from _tokens(segment.completion)
