"""Look up functions by name, and refuse unknown options."""

import difflib
import importlib
import inspect
import os
import re
import sys
import sysconfig
import traceback
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import yaml

_COVEY = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
_OWN = (_COVEY + os.sep, _COVEY + "_")
"""Beginnings of paths of covey and of the packages beside it."""
_FOREIGN = (*_OWN, sysconfig.get_path("stdlib") + os.sep)
YAML_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
"""libyaml's where PyYAML has it: it reads saved settings 16 times as fast."""
SYNONYMS = Path(__file__).parent / "text/synonyms.yaml"
_NO_MEMORY = re.compile(r"(?i)can't allocate memory|out of memory")
_FUNCTION = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")
_LOADABLE = re.compile(r"([^\n:]+):([^\W\d][\w.]*)")
"""Nothing else is imported. Also decides which settings are code in a run of another user (`trust.CODE`)."""
MET: dict[str, str] = {}
"""Source of each user module at its last import, which Python does not keep."""
ANEW: set[str] = set()
"""Reloaded modules: objects of theirs may come from an older source."""


def resolve(name_or_path: str, table: Mapping[str, Callable[..., Any]]) -> Callable[..., Any]:
    """Return the function of a key of `table`, or of "module:function". ValueError."""
    if name_or_path in table:
        return table[name_or_path]
    parts = module_and_name(name_or_path)
    if parts is None:
        raise ValueError(f"expected one of {', '.join(sorted(table))} or module:function, got {name_or_path}")
    module_name, function_name = parts
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        hint = hint_of_file(name_or_path)
        raise ValueError(f"{name_or_path} needs module {error.name}, which cannot be imported{hint}") from error
    except Exception as error:
        raise ValueError(f"{name_or_path} needs module {module_name}, whose import {describe(error)}") from error
    if not is_foreign(vars(module).get("__file__") or "<"):
        meet(module)
    function = vars(module).get(function_name)
    if not callable(function):
        suggestion = near(function_name, [name for name, value in vars(module).items() if callable(value)])
        raise ValueError(f"module {module_name} must define the function {function_name} ({name_or_path}){suggestion}")
    return function


def import_changed() -> list[str]:
    """Reload changed user modules, a line for each. ValueError."""
    lines = []
    for module, text in find_changed():
        name = module.__name__
        try:
            importlib.reload(module)
        except ModuleNotFoundError as error:
            if error.name != name:
                raise ValueError(f"{name} has changed since it was imported, and needs {error.name}") from error
            lines.append(f"{name} has changed since it was imported, but its folder is no longer searched")
            continue
        except Exception as error:
            raise ValueError(f"{name} has changed since it was imported, and its import {describe(error)}") from error
        MET[name] = text
        ANEW.add(name)
        lines.append(f"{name} has changed since it was imported, and was imported again")
    return lines


def meet(module: ModuleType) -> None:
    """Remember the contents of a module's file."""
    if module.__name__ not in MET and (text := _text_of(module)) is not None:
        MET[module.__name__] = text


def find_changed() -> Iterator[tuple[ModuleType, str]]:
    """Yield modules whose files say something else now, with that text."""
    for name, text in list(MET.items()):
        module = sys.modules.get(name)
        now = None if module is None else _text_of(module)
        if module is not None and now is not None and now != text:
            yield module, now


def _text_of(module: ModuleType) -> str | None:
    file = vars(module).get("__file__")
    try:
        return Path(str(file)).read_text(encoding="utf-8") if str(file).endswith(".py") else None
    except (OSError, UnicodeDecodeError):
        return None


def check_options(function: Callable[..., Any], options: Collection[str], *, setting: str = "options") -> None:
    """Refuse unknown options, and missing ones that have no default.

    Options are the keyword-only parameters and those with a default. `setting` is the options' name in the message.
    ValueError names the unknown and the allowed ones.
    """
    allowed = _option_parameters(function)
    if allowed is None:
        return
    names = [p.name for p in allowed]
    unknown = sorted(set(options) - set(names))
    if unknown:
        allowed_names = f"be among {', '.join(names)}" if names else "be empty"
        raise ValueError(f"{setting} must {allowed_names} for {function.__name__}, got {', '.join(unknown)}")
    missing = [p.name for p in allowed if p.default is p.empty and p.name not in options]
    if missing:
        raise ValueError(f"{setting} must set {', '.join(missing)} for {function.__name__}, got {sorted(options)}")


def option_names(function: Callable[..., Any]) -> list[str] | None:
    """Return a function's options, None where any may be given.

    None where it takes any, or its signature cannot be seen.

    >>> option_names(lambda rewards, *, ddof=0: rewards)
    ['ddof']
    """
    parameters = _option_parameters(function)
    return None if parameters is None else [parameter.name for parameter in parameters]


def _option_parameters(function: Callable[..., Any]) -> list[inspect.Parameter] | None:
    """Return the option parameters, None where any may be given."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except ValueError:
        return None
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return None
    return [p for p in parameters if p.kind is p.KEYWORD_ONLY or p.default is not p.empty]


def one_of(name: str, value: str, allowed: Collection[str]) -> str:
    """Return `value`, or raise ValueError unless it is allowed."""
    if value not in allowed:
        raise ValueError(f"{name} must be one of {', '.join(allowed)}, got {value}{near(value, allowed)}")
    return value


def is_function_path(text: str) -> bool:
    """Return True for text of the form `module:function`.

    >>> is_function_path("my_checks:exact"), is_function_path("rows.jsonl"), is_function_path("C:/rows.jsonl")
    (True, False, False)
    """
    return _FUNCTION.fullmatch(text) is not None


def module_and_name(text: str) -> tuple[str, str] | None:
    """Split `module:function`, None for other text.

    >>> module_and_name("my-checks:Exact.strictly"), module_and_name("my_checks:1")
    (('my-checks', 'Exact.strictly'), None)
    """
    found = _LOADABLE.fullmatch(text)
    return None if found is None else (found[1], found[2])


def function_path_of_file(text: str) -> str:
    """Spell `file.py:function` as a module and a function.

    >>> function_path_of_file("./checks/mine.py:exact"), function_path_of_file("mine:exact")
    ('checks.mine:exact', 'mine:exact')
    """
    file, colon, function = text.rpartition(":")
    inside = os.path.relpath(file) if file.startswith(("/", ".")) else file
    module = os.path.basename(file) if inside.startswith("..") else inside
    return f"{module.removesuffix('.py').replace('/', '.')}{colon}{function}"


def hint_of_file(text: str) -> str:
    """Return a hint for `file.py:function`, "" for a function of a module.

    >>> hint_of_file("./checks/mine.py:exact"), hint_of_file("mine:exact")
    ('; write checks.mine:exact', '')
    >>> hint_of_file("/elsewhere/mine.py:exact")
    '; write mine:exact and set PYTHONPATH=/elsewhere'
    """
    meant, folder = function_path_of_file(text), os.path.dirname(text.rpartition(":")[0])
    is_outside = folder and os.path.relpath(folder).startswith("..")
    return f"; write {meant}{f' and set PYTHONPATH={folder}' if is_outside else ''}" if meant != text else ""


def near(word: str, known: Collection[str]) -> str:
    """Return a hint for an unknown name: its alias, or a similar name.

    It says what others call by it here, or the one most like it.

    >>> near("soft_overlog", ["repetition", "soft_overlong"]), near("bf16", ["float32", "bfloat16"])
    ('; did you mean soft_overlong?', '; did you mean bfloat16?')
    """
    small = word.lower().replace("-", "_")
    meant = [name for name in (small, *read_table(SYNONYMS).get(small, "").split()) if name in known]
    close = meant or difflib.get_close_matches(word, list(known), n=1)
    return f"; did you mean {close[0]}?" if close else ""


def describe(error: BaseException) -> str:
    """Describe an exception with the innermost line of user code."""
    message = " ".join(str(error).split())[:300]
    places = [(frame.filename, frame.lineno) for frame in traceback.extract_tb(error.__traceback__)]
    if isinstance(error, SyntaxError):
        message, places = str(error.msg), [*places, (str(error.filename), error.lineno)]
    own = [(file, line) for file, line in places if not is_foreign(file)]
    place = f" ({os.path.basename(own[-1][0])}:{own[-1][1]})" if own else ""
    return f"raised {type(error).__name__}{': ' if message else ''}{message}{place}"


def is_out_of_memory(error: BaseException) -> bool:
    """Return True for an allocator's error, on CPU and GPU."""
    return isinstance(error, MemoryError) or (isinstance(error, RuntimeError) and bool(_NO_MEMORY.search(str(error))))


def is_coveys(error: BaseException) -> bool:
    """Return True where a line of covey raised the exception."""
    places = traceback.extract_tb(error.__traceback__)
    return bool(places) and os.path.abspath(places[-1].filename).startswith(_OWN)


def is_foreign(filename: str) -> bool:
    """Return True for files of Python, of covey and of installed packages."""
    path = os.path.abspath(filename)
    return filename.startswith("<") or "site-packages" in path or path.startswith(_FOREIGN)


@cache
def read_table(path: Path) -> Any:
    """Read a YAML file of the package once; keep it unchanged."""
    return yaml.load(path.read_text(encoding="utf-8"), YAML_LOADER)


def attribute(owner: object, name: str, default: Any = None) -> Any:
    """Return an attribute of a user's object, or the default."""
    try:
        return getattr(owner, name, default)
    except Exception:  # a __getattr__ of its own
        return default
