"""Objects of the program in test code; every use asks the program's process.

A program must not gain by returning an object in place of a value. So returned objects can be called, shown, iterated,
and asked for attributes that no plain value has; comparing one with a value fails the test, and it takes part in no
arithmetic. Objects that the test makes, of classes that it names, can do everything. The program decides equality of
two objects; an object equals a value where it is a kind of it (an IntEnum, a namedtuple).
"""

from collections.abc import Callable, Iterator
from typing import Any, Protocol

from covey_sandbox.inside.operations import BINARY, BUILTIN, OTHER

OF_PLAIN = frozenset(name for kind in (str, list, dict, set, tuple, int, float, complex, bytes) for name in dir(kind))
"""Attributes that plain values have."""
NUM_SINGLE, NUM_AHEAD = 64, 256
"""Values an iterator yields one by one, since it may be infinite; then values per call."""
NAME_OF = {"and_": "and", "or_": "or"}


class Asker(Protocol):
    """Asks the program's process."""

    def ask(self, operation: str, /, *operands: Any, **keywords: Any) -> Any:
        """Return the answer, a plain value or an object, or raise its exception."""

    def refuse(self, why: str) -> BaseException:
        """Return the exception for an unusable answer, which fails the test."""


class ProgramError(Exception):
    """The program raised an exception that is not built in."""


class Remote:
    """A returned object of the program that is no plain value."""

    __slots__ = ("_ahead", "_asker", "_num_next", "_path", "_reference")

    def __init__(self, asker: Asker, reference: int | str, path: str) -> None:
        self._asker = asker
        self._reference = reference
        self._path = path
        self._ahead: list[Any] = []
        """Values that an iterator has yielded and the test has not asked for, the first last."""
        self._num_next = 0

    def __call__(self, /, *arguments: Any, **keywords: Any) -> Any:
        return self._asker.ask("call", self, *arguments, **keywords)

    def __getattr__(self, name: str) -> Any:
        if name == "__name__" and self._reference == "":
            return self._path
        if name.startswith("__") and name != "__name__":
            raise AttributeError(name)
        if name in OF_PLAIN:
            raise self._asker.refuse(f"it is no plain value, whose .{name} is asked for")
        return self._asker.ask("getattr", self, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in Remote.__slots__:
            object.__setattr__(self, name, value)
        else:
            self._asker.ask("setattr", self, name, value)

    def __delattr__(self, name: str) -> None:
        self._asker.ask("delattr", self, name)

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Remote | Named):
            return self._asker.ask("eq", self, other) is True
        if other is None:
            return False
        return self._compare(other)

    def _compare(self, other: object) -> bool:
        raise self._asker.refuse("it is no plain value, and compared with one")

    def __hash__(self) -> int:
        found = self._asker.ask("hash", self)
        return found if type(found) is int else 0

    def __bool__(self) -> bool:
        return self._asker.ask("bool", self) is True

    def __str__(self) -> str:
        return self._text("str")

    def __repr__(self) -> str:
        return self._text("repr")

    def __format__(self, spec: str) -> str:
        return format(self._text("str"), spec)

    def _text(self, operation: str) -> str:
        found = self._asker.ask(operation, self)
        return found if type(found) is str else ""

    def __iter__(self) -> Iterator[Any]:
        found = self._asker.ask("iter", self)
        return found if isinstance(found, Remote) else iter(found)

    def __next__(self) -> Any:
        self._num_next += 1
        try:
            if self._num_next <= NUM_SINGLE:
                return self._asker.ask("next", self)
            self._ahead = self._ahead or self._asker.ask("take", self, NUM_AHEAD)[::-1]
            return self._ahead.pop()
        except ProgramError as error:
            if type(error).__name__ == "StopIteration":
                raise StopIteration from None
            raise

    def __enter__(self) -> Any:
        return self._asker.ask("enter", self)

    def __exit__(self, *error: object) -> None:
        self._asker.ask("exit", self)

    def __copy__(self) -> Any:
        return self._asker.ask("copy", self)

    def __deepcopy__(self, memo: Any) -> Any:
        return self._asker.ask("deepcopy", self)


class Instance(Remote):
    """An object that the test made of a program's class."""

    __slots__ = ()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self._asker.ask("getattr", self, name)

    def _compare(self, other: object) -> bool:
        value = self._asker.ask("value", self)
        return bool(value == other) if not isinstance(value, Remote) else super()._compare(other)

    def __enter__(self) -> Any:
        found = super().__enter__()
        return self if isinstance(found, Remote) and found._reference == self._reference else found

    __hash__ = Remote.__hash__


def same(one: Any, *others: Any) -> bool:
    """Return True if these are one object, here or in the program."""
    if isinstance(one, Remote):
        return all(isinstance(other, Remote) and other._reference == one._reference for other in others)
    return all(one is other for other in others)


class Named(type):
    """A program's class by name, which tests call, catch and check."""

    _asker: Asker
    _reference: str

    def __call__(cls, /, *arguments: Any, **keywords: Any) -> Any:
        return cls._asker.ask("make", cls, *arguments, **keywords)

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return cls._asker.ask("getattr", cls, name)

    def __bool__(cls) -> bool:
        return True

    def __instancecheck__(cls, value: Any) -> bool:
        if isinstance(value, Remote):
            return cls._asker.ask("isinstance", value, cls) is True
        return type.__instancecheck__(cls, value)

    def __subclasscheck__(cls, other: type) -> bool:
        is_named = isinstance(other, Named) and "_reference" in other.__dict__
        return type.__subclasscheck__(cls, other) or (is_named and cls._asker.ask("issubclass", other, cls) is True)


def named_class(asker: Asker, name: str) -> Named:
    return Named(name, (ProgramError,), {"_asker": asker, "_reference": name, "__module__": "program"})


def _asking(operation: str, is_swapped: bool = False) -> Callable[..., Any]:
    def method(self: Any, *others: Any) -> Any:
        operands = (*others, self) if is_swapped else (self, *others)
        return self._asker.ask(operation, *operands)

    return method


for _name in (*BINARY, *OTHER, *BUILTIN):
    _method = NAME_OF.get(_name, _name)
    if _method not in ("hash", "iter"):
        setattr(Instance, f"__{_method}__", _asking(_name))
    if _name in BINARY:
        setattr(Instance, f"__r{_method}__", _asking(_name, is_swapped=True))
for _name in ("getitem", "contains", "len", "iter"):
    setattr(Named, f"__{_name}__", _asking(_name))
