"""Fields of settings with their bounds and conditions. Imports nothing of covey."""

import ast
from collections.abc import Callable, Mapping, Sequence
from dataclasses import Field, dataclass, field, fields, replace
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

_KEY = "covey"


@dataclass(frozen=True, slots=True)
class Requires:
    """A condition without which nothing reads a setting.

    >>> Requires("model.lora_rank > 0", ("model.lora_rank",), is_positive).holds(8)
    True
    """

    condition: str
    """Condition in words: "algorithm.kl_coef > 0"."""
    partners: tuple[str, ...]
    """The settings that the condition is about, by their dotted names."""
    holds: Callable[..., bool]
    """Takes the partners' values."""
    remedy: str = ""
    """Command or setting to type where the message alone does not say it."""
    value: Any = None
    """The one value of the setting that the condition is about; None stands for all but the default."""

    def for_value(self, value: Any) -> "Requires":
        """Return the same condition for one value alone."""
        return replace(self, value=value)


@dataclass(frozen=True, slots=True)
class Bounds:
    """The allowed values of a setting; null obeys all bounds."""

    ge: float | None = None
    gt: float | None = None
    le: float | None = None
    lt: float | None = None
    choices: tuple[str, ...] = ()
    """The values there are, or those of each item of a list."""
    packages: Mapping[Any, tuple[str, str]] | None = None
    """Value -> the package that it needs, and the extra of covey that installs it."""
    needs: tuple[Requires, ...] = ()
    table: str = ""
    """`module:NAME` of the functions that are choices too, beside any `module:function`."""

    def names(self) -> tuple[str, ...]:
        """Return the words that are choices, none without a list."""
        return (*self.choices, *(keys_in_source(self.table) if self.table else ()))

    def in_words(self, explained: str = "") -> str:
        """Describe the bounds for the help, without choices that `explained` names.

        >>> Bounds(ge=0, le=1).in_words()
        '>= 0, <= 1'
        """
        limits = ((">=", self.ge), (">", self.gt), ("<=", self.le), ("<", self.lt))
        words = [f"{sign} {limit:g}" for sign, limit in limits if limit is not None]
        names = self.names()
        if any(name not in explained for name in names):
            words.append(f"one of {', '.join(names)}{' or module:function' * bool(self.table)}")
        words += [f"{need.value} needs {need.condition}" for need in self.needs if need.value is not None]
        needed = [need.condition for need in self.needs if need.value is None]
        words += [f"needs {' and '.join(needed)}"] if needed else []
        return ", ".join(words)


@cache
def keys_in_source(table: str) -> tuple[str, ...]:
    """Return the keys of the dictionary `module:NAME`, read without importing it.

    >>> keys_in_source("covey.algorithm.kl:GRADIENTS")
    ('naive', 'straight_through_k2')
    """
    module, _, name = table.partition(":")
    spec = find_spec(module)
    source = Path(str(spec and spec.origin)).read_text(encoding="utf-8")
    for node in ast.parse(source).body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.value, ast.Dict) and ast.unparse(node.target) == name:
            return tuple(str(key.value) for key in node.value.keys if isinstance(key, ast.Constant))
    raise AssertionError(f"no table {table}")


NO_BOUNDS = Bounds()


def setting(
    default: Any,
    *,
    ge: float | None = None,
    gt: float | None = None,
    le: float | None = None,
    lt: float | None = None,
    choices: Sequence[str] = (),
    packages: Mapping[Any, tuple[str, str]] | None = None,
    needs: Requires | tuple[Requires, ...] = (),
    table: str = "",
) -> Any:
    """Return a dataclass field with bounds; a section copies mutable defaults.

    A default that is a function is called for each object.
    """
    wanted = (needs,) if isinstance(needs, Requires) else needs
    metadata = {_KEY: Bounds(ge, gt, le, lt, tuple(choices), packages, wanted, table)}
    if callable(default):
        return field(default_factory=default, metadata=metadata)
    if isinstance(default, list | dict):
        return field(default_factory=lambda: default, metadata=metadata)
    return field(default=default, metadata=metadata)


def bounds_of(described: "Field[Any]") -> Bounds:
    return described.metadata.get(_KEY, NO_BOUNDS)


def choices_of(section: Any, name: str) -> list[str]:
    """Return the possible values of a settings field, sorted."""
    return sorted(next(bounds_of(found).choices for found in fields(section) if found.name == name))


def is_set(value: Any) -> bool:
    return value is not None


def is_positive(value: float) -> bool:
    return value > 0


CAUSAL = Requires("model.kind = causal", ("model.kind",), lambda kind: kind == "causal")
CONTINUES = Requires("a policy that continues its prompts, model.kind = causal", ("model.kind",), CAUSAL.holds)
FILLS_IN = Requires("a policy that fills in, model.kind = masked", ("model.kind",), lambda kind: kind == "masked")
"""Conditions of settings in several rooms."""
