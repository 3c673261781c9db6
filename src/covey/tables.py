"""Looking up a pure function by name, and refusing options it does not have: nothing in a setting is ignored."""

import difflib
import importlib
import inspect
import re
from collections.abc import Callable, Collection, Mapping
from typing import Any

_FUNCTION = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")


def resolve(name_or_path: str, table: Mapping[str, Callable[..., Any]]) -> Callable[..., Any]:
    """The function a setting names: a key of `table`, or your own as "module:function".

    ValueError where there is no such key, module or function.
    """
    if name_or_path in table:
        return table[name_or_path]
    module_name, colon, function_name = name_or_path.partition(":")
    if not colon:
        raise ValueError(f"expected one of {', '.join(sorted(table))} or module:function, got {name_or_path}")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        raise ValueError(f"{name_or_path} needs module {error.name}, which cannot be imported") from error
    function = vars(module).get(function_name)
    if not callable(function):
        raise ValueError(f"module {module_name} must define the function {function_name} ({name_or_path})")
    return function


def check_options(function: Callable[..., Any], options: Collection[str], *, setting: str = "options") -> None:
    """Refuse option names that `function` does not take, and the absence of one it needs.

    Options are the keyword-only parameters and those with a default; the others are data. `setting` is the name the
    message gives to the place the options came from. ValueError names the unknown and the allowed ones.
    """
    parameters = inspect.signature(function).parameters.values()
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return
    allowed = [p for p in parameters if p.kind is p.KEYWORD_ONLY or p.default is not p.empty]
    names = [p.name for p in allowed]
    unknown = sorted(set(options) - set(names))
    if unknown:
        allowed_names = f"be among {', '.join(names)}" if names else "be empty"
        raise ValueError(f"{setting} must {allowed_names} for {function.__name__}, got {', '.join(unknown)}")
    missing = [p.name for p in allowed if p.default is p.empty and p.name not in options]
    if missing:
        raise ValueError(f"{setting} must set {', '.join(missing)} for {function.__name__}, got {sorted(options)}")


def one_of(name: str, value: str, allowed: Collection[str]) -> str:
    """`value`, or ValueError where it is not among `allowed`."""
    if value not in allowed:
        raise ValueError(f"{name} must be one of {', '.join(allowed)}, got {value}")
    return value


def names_function(text: str) -> bool:
    """Whether it is `module:function` in form.

    >>> names_function("my_checks:exact"), names_function("rows.jsonl"), names_function("C:/rows.jsonl")
    (True, False, False)
    """
    return _FUNCTION.fullmatch(text) is not None


def near(word: str, known: Collection[str]) -> str:
    """The end of a message about an unknown name: the known one most like it, or nothing.

    >>> near("soft_overlog", ["repetition", "soft_overlong"])
    '; did you mean soft_overlong?'
    """
    close = difflib.get_close_matches(word, list(known), n=1)
    return f"; did you mean {close[0]}?" if close else ""
