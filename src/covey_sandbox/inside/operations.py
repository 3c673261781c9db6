"""Operations that test code may ask of a program's object."""

import builtins
import copy
import operator
from collections.abc import Callable
from typing import Any

BINARY = ["add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul", "and_", "or_", "xor", "lshift", "rshift"]
"""Functions of `operator`. Each has a method that swaps its operands."""
OTHER = ["lt", "le", "gt", "ge", "neg", "pos", "abs", "invert", "getitem", "setitem", "delitem", "contains", "index"]
BUILTIN = ["len", "int", "float", "round", "iter", "reversed", "hash", "divmod"]


def _call(function: Any, /, *arguments: Any, **keywords: Any) -> Any:
    return function(*arguments, **keywords)


def _take(iterator: Any, count: int) -> list[Any]:
    """Return the next values; a later exception is raised next time."""
    items: list[Any] = []
    try:
        if id(iterator) in _RAISED:
            raise _RAISED.pop(id(iterator))
        while len(items) < count:
            items.append(next(iterator))
    except BaseException as error:
        if not items:
            raise
        _RAISED[id(iterator)] = error
    return items


_RAISED: dict[int, BaseException] = {}
OPERATIONS: dict[str, Callable[..., Any]] = {
    **{name: operator.__dict__[name] for name in (*BINARY, *OTHER, "eq")},
    **{name: builtins.__dict__[name] for name in (*BUILTIN, "str", "repr", "next", "bool", "isinstance", "issubclass")},
    "call": _call,
    "make": _call,  # what this returns is an object, whatever it is
    "getattr": getattr,
    "setattr": setattr,
    "delattr": delattr,
    "take": _take,
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "enter": lambda made: type(made).__enter__(made),
    "exit": lambda made: type(made).__exit__(made, None, None, None),
    "value": lambda made: made,
}
