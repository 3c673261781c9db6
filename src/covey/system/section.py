"""The base of settings classes: known names and right types."""

import os
import types
from collections.abc import Callable, Mapping
from dataclasses import fields
from functools import cache
from numbers import Integral, Real
from typing import Any, Union, get_args, get_origin, get_type_hints

from covey.system.lookup import near
from covey.system.setting import Bounds, bounds_of


class Section:
    """Settings that refuse unknown names and wrong types in one line.

    An integer serves as a float, a whole float as an integer, a path as text and a tuple as a list.
    """

    @classmethod
    def section_name(cls) -> str:
        """Return the name before the dot: ColdStartConfig is cold_start, Config is empty."""
        words = (f"_{c.lower()}" if c.isupper() else c for c in cls.__name__.removesuffix("Config"))
        return "".join(words).strip("_")

    def __new__(cls, *values: Any, **settings: Any) -> Any:
        for name in settings:
            _check_name(cls, name)
        return super().__new__(cls)

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, _converted_field(type(self), name, value))


explain_unknown: Callable[[str], str] = "unknown setting {}".format
"""Message about an unknown setting. The schema, which knows all settings, puts a better one here."""


def check_section(section: Section) -> None:
    """Check names and types again, as lists and dicts may have changed."""
    for name, value in vars(section).items():
        _converted_field(type(section), name, value)
        for inner in value.values() if isinstance(value, dict) else [value]:
            if isinstance(inner, Section):
                check_section(inner)


def check_range(name: str, value: Any, bounds: Bounds) -> None:
    """Refuse a number out of range; null is within every one. ValueError."""
    for sign, limit, holds in RANGES:
        bound = getattr(bounds, limit)
        if bound is not None and value is not None and not holds(value, bound):
            raise ValueError(f"{name} must be {sign} {bound}, got {value}")


def check_choice(name: str, value: Any, bounds: Bounds) -> None:
    """Refuse a value, or an item, that is no choice. ValueError."""
    names = bounds.names()
    for one in value if isinstance(value, list | dict) else [value]:
        if one is not None and names and one not in names and not (bounds.table and ":" in one):
            own = " or module:function" if bounds.table else ""
            raise ValueError(f"{name} must be one of {', '.join(names)}{own}, got {one or 'nothing'}{near(one, names)}")


def check_bounds(section: Section, prefix: str = "") -> None:
    """Refuse values out of bounds, where no run has checked them. ValueError."""
    for one in fields(section):  # type: ignore[arg-type] # every section is a dataclass
        name, value, bounds = f"{prefix}{one.name}", vars(section)[one.name], bounds_of(one)
        check_range(name, value, bounds)
        check_choice(name, value, bounds)


def _converted_field(section: type, name: str, value: Any) -> Any:
    _check_name(section, name)
    try:
        return convert(value, types_of(section)[name], name)
    except ValueError as error:
        raise ValueError(f"{_prefix(section)}{error}") from None


def convert(value: Any, kind: Any, name: str) -> Any:
    """Convert a value to the type `kind`. ValueError if impossible."""
    origin, parts = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):
        (inner,) = (part for part in parts if part is not types.NoneType)
        return None if value is None else convert(value, inner, name)
    if origin is list and isinstance(value, list | tuple):
        return [convert(item, parts[0], f"{name}[{index}]") for index, item in enumerate(value)]
    if origin is dict and isinstance(value, Mapping):
        return {convert(k, parts[0], name): convert(v, parts[1], f"{name}.{k}") for k, v in value.items()}
    if origin is None and (kind is Any or type(value) is kind):
        return value
    return _one(value, origin or kind, name)


def _one(value: Any, kind: Any, name: str) -> Any:
    is_number = isinstance(value, Real) and not isinstance(value, bool)
    if kind is float and is_number:
        return float(value)
    if kind is int and is_number and (isinstance(value, Integral) or float(value).is_integer()):
        return int(value)
    if kind is str and isinstance(value, str | os.PathLike):
        return str(value)
    # Sections within sections; a mapping is refused, with the call to write instead
    if isinstance(kind, type) and issubclass(kind, Section):
        if isinstance(value, kind):
            return value
        settings = value if isinstance(value, dict) else {}
        for key in settings:
            _check_name(kind, str(key))
        inside = ", ".join(f"{k}={v!r}" for k, v in settings.items())
        raise ValueError(f"{name} must be settings, such as {kind.__name__}({inside}), got {_show(value)}")
    raise ValueError(f"{name} must be {NAMES.get(kind, 'of another type')}, got {_show(value)}")


def _show(value: Any) -> str:
    text = f"{type(value).__name__}(...)" if isinstance(value, Section) else repr(value)
    return f"{text[:60]}..." if len(text) > 60 else text


def _check_name(section: type, name: str) -> None:
    if name in types_of(section):
        return
    raise ValueError(explain_unknown(f"{_prefix(section)}{name}"))


def _prefix(section: Any) -> str:
    """Return the prefix of a section's settings on the command line.

    >>> from covey.trainer.settings import OptimizerConfig
    >>> _prefix(OptimizerConfig)
    'optimizer.'
    """
    name = section.section_name()
    return f"{name}." if name else ""


def flat(settings: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Name settings by their dotted names.

    >>> flat({"seed": 0, "model": {"name": "nano"}})
    {'seed': 0, 'model.name': 'nano'}
    """
    found: dict[str, Any] = {}
    for name, value in settings.items():
        if isinstance(value, dict) and value:
            found |= flat(value, f"{prefix}{name}.")
        else:
            found[f"{prefix}{name}"] = value
    return found


@cache
def types_of(section: Any) -> dict[str, Any]:
    """Return the type of each field, read once per class."""
    hints = get_type_hints(section)
    return {field.name: hints[field.name] for field in fields(section)}


NAMES: dict[Any, str] = {
    bool: "true or false",
    int: "an integer",
    float: "a number",
    str: "text",
    list: "a list",
    dict: "a mapping",
}
"""Names of types in messages."""
RANGES: tuple[tuple[str, str, Callable[[Any, Any], bool]], ...] = (
    (">=", "ge", lambda value, bound: value >= bound),
    (">", "gt", lambda value, bound: value > bound),
    ("<=", "le", lambda value, bound: value <= bound),
    ("<", "lt", lambda value, bound: value < bound),
)
"""Sign, name of the bound, and the check."""
