"""Custom functions, named in the settings as module:function.

Errors name the setting, the function and its place in the file.
"""

import hashlib
import inspect
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any

from torch import Tensor

from covey.system.lookup import attribute, check_options, describe, is_foreign, is_out_of_memory, resolve

Metrics = dict[str, Any]
"""Metrics that a custom advantage or loss may return beside its tensor, by name."""


@dataclass(frozen=True, slots=True)
class FunctionRole:
    """A setting that takes a function, and the function's arguments.

    >>> FunctionRole("algorithm.advantage", "(scores)", options="algorithm.advantage_options")
    """

    setting: str
    takes: str
    """The arguments, as its signature names them."""
    options: str = ""
    """The setting that holds its options; "" where it has none."""


ADVANTAGE = FunctionRole("algorithm.advantage", "(scores) or (scores, answers)", "algorithm.advantage_options")
LOSS = FunctionRole("algorithm.loss", "(inputs)", "algorithm.loss_options")
SHAPING = FunctionRole("algorithm.shaping", "(rewards_N, scores)", "algorithm.shaping")
SELECTION = FunctionRole("algorithm.selection", "(scores, estimator)", "algorithm.selection_options")
GROUP_FILTER = FunctionRole("algorithm.group_filter", "(rewards_M)", "algorithm.group_filter_options")
AGGREGATION = FunctionRole("algorithm.aggregation", "(counts_N, denominators)")
KL_AGGREGATION = FunctionRole("algorithm.kl_aggregation", "(counts_N, denominators)")
KL_ESTIMATOR = FunctionRole("algorithm.kl_estimator", "(q_NT, clamp)")
CURRICULUM = FunctionRole("curriculum.name", "(prompts, seed, shuffle)", "curriculum.options")


@dataclass(frozen=True, slots=True)
class Custom:
    """A function named as module:function, with its options bound."""

    role: FunctionRole
    name: str
    function: Callable[..., Any]

    def __call__(self, *arguments: Any) -> Any:
        """Call the function. ValueError with its place for any error."""
        misfit = self._misfit(arguments)
        if misfit is not None:
            raise self.error(f"take {self.role.takes}", misfit)
        try:
            return self.function(*arguments)
        except Exception as error:
            if is_out_of_memory(error):
                raise
            raise ValueError(f"{self.role.setting}={self.name} {describe(error)}") from error

    def _misfit(self, arguments: Sequence[Any]) -> str | None:
        """Return why these arguments do not fit, None if they do."""
        try:
            signature = inspect.signature(self.function)
        except ValueError:  # some that are written in C have none
            return None
        try:
            signature.bind(*arguments)
        except TypeError as error:
            return str(error)
        return None

    @property
    def num_inputs(self) -> int:
        """Count the positional parameters without a default, which are data."""
        parameters = inspect.signature(self.function).parameters.values()
        positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        return sum(p.kind in positional and p.default is p.empty for p in parameters)

    def error(self, requirement: str, got: str) -> ValueError:
        """Return an error with setting, requirement, result and place."""
        return ValueError(f"{self.role.setting}={self.name} must {requirement}, got {got}{definition(self.function)}")

    def check_tensor(self, found: Any, shape: tuple[int, ...], each: str) -> Tensor:
        """Return `found` if it is a real tensor of this shape. `each` names the things that get one number each."""
        requirement = f"return one number for each {each}, a tensor of shape {shape}"
        if not isinstance(found, Tensor):
            raise self.error(requirement, f"a {type(found).__name__}")
        if tuple(found.shape) != shape:
            raise self.error(requirement, f"shape {tuple(found.shape)}")
        if found.is_complex():
            raise self.error(requirement, f"values of {found.dtype}")
        return found

    def check_finite(self, found: Tensor, where: Tensor, given: Tensor, each: str) -> None:
        """Raise ValueError for the first infinite value, with its entry of `given`."""
        bad = ~found.isfinite() & where
        if bool(bad.any()):
            value, of = float(found[bad][0]), float(given[bad][0])
            raise self.error("return finite numbers", f"{value} for a {each} of {of:g}")


def lookup(
    role: FunctionRole, name: str, table: Mapping[str, Callable[..., Any]], options: Mapping[str, Any] | None = None
) -> Callable[..., Any]:
    """Return a setting's function, from `table` or custom, with its options bound.

    ValueError for an unknown name or option.
    """
    function = resolve(name, table)
    check_options(function, options or {}, setting=role.options or role.setting)
    bound = partial(function, **options) if options else function
    return bound if name in table else Custom(role, name, bound)


def definition(function: Callable[..., Any]) -> str:
    """Return " (file.py:line)" of a function or class, "" if unknown."""
    while isinstance(function, partial):
        function = function.func
    try:
        file = inspect.getsourcefile(function)
        _, line = inspect.getsourcelines(function)
    except (TypeError, OSError):
        return ""
    return f" ({os.path.basename(file or '')}:{line})"


def split_metrics(found: Any) -> tuple[Any, Metrics]:
    """Split a result into its tensor and its metrics, if any."""
    if isinstance(found, tuple) and len(found) == 2 and isinstance(found[1], Mapping):
        return found[0], dict(found[1])
    return found, {}


def source_hashes(parts: Iterable[Any], modules: Iterable[str] = ()) -> dict[str, str]:
    """Return hashes of the user's code behind functions and classes, by file.

    {} where all of it is of installed packages. Files, also of `modules`, are followed through their imports; of a
    program or a notebook the parts count, by name, and what its functions use of it.
    """
    texts: dict[str, set[str]] = {}
    names, seen, waiting = set(modules), set[int](), list(parts)
    while waiting:
        part = waiting.pop()
        if isinstance(part, partial):
            waiting += [part.func, *filter(callable, part.args)]
            continue
        part = attribute(part, "__func__", part)
        part = part if isinstance(part, FunctionType | type | ModuleType) else type(part)
        home = _home(part)
        if home != "__main__" or id(part) in seen:
            names |= {home or ""}
            continue
        seen.add(id(part))
        with suppress(OSError, TypeError):  # typed at a prompt
            texts.setdefault(attribute(part, "__qualname__", ""), set()).add(inspect.getsource(part))
        if isinstance(part, FunctionType):
            used = (part.__globals__.get(name) for name in _names(part.__code__))
            waiting += [one for one in used if isinstance(one, FunctionType | type | ModuleType)]
    for file in _files(names):
        with suppress(OSError):  # removed since it was imported
            texts.setdefault(file.name, set()).add(file.read_text(encoding="utf-8", errors="replace"))
    joined = {name: "\0".join(sorted(own)).encode() for name, own in sorted(texts.items())}
    return {name: hashlib.sha256(text).hexdigest()[:12] for name, text in joined.items()}


def _names(code: CodeType) -> Iterator[str]:
    """Yield the names that code uses, also within comprehensions."""
    yield from code.co_names
    for inner in code.co_consts:
        yield from _names(inner) if isinstance(inner, CodeType) else ()


def _files(names: set[str]) -> Iterator[Path]:
    """Yield the user's files of modules and their imports."""
    waiting, seen = set(names), {"__main__"}
    while waiting:
        seen.add(name := waiting.pop())
        module = sys.modules.get(name)
        file = None if module is None else vars(module).get("__file__")
        if module is None or not str(file).endswith(".py") or is_foreign(str(file)):
            continue
        yield Path(str(file))
        waiting |= {found for value in list(vars(module).values()) if (found := _home(value)) is not None} - seen


def _home(value: Any) -> str | None:
    found = value.__name__ if isinstance(value, ModuleType) else attribute(value, "__module__")
    return found if isinstance(found, str) else None
