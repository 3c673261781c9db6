"""Objects of a program, and their names in settings.

A function of a module stands for itself, as `module:function`. Objects that no other process could import (a
lambda, a function of a notebook, rows, a model) are passed to the run as they are; config.yaml names them as such.
"""

import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain, count
from operator import attrgetter
from typing import Any, NoReturn

from covey.api import of_this_program
from covey.environments.data.entries import is_table
from covey.environments.reward_functions.call import name_of
from covey.policy.models.naming import IN_MEMORY, OWN_MODULE
from covey.system.lookup import ANEW, attribute, resolve
from covey.system.section import Section

HOME = "covey.api.objects"
OF_THIS_PROGRAM = of_this_program.__name__
ORDER = "the order is covey.train(model, rewards, data)"
RESUMES = "covey.train(...) with the same objects and resume=FOLDER resumes the run"

Reward = str | Mapping[str, Any] | Callable[..., Any]
"""A reward function, its name, or a mapping of `function` and `args`."""


def reward(name: str) -> NoReturn:
    """Stand for a reward function that was an object of a program."""
    raise ValueError(f"the reward function {name} was an object of a program, which alone has it; {RESUMES}")


def tool(name: str) -> NoReturn:
    """Stand for a tool that was an object of a program."""
    raise ValueError(f"the tool {name} was an object of a program, which alone has it; {RESUMES}")


def rows() -> NoReturn:
    """Stand for rows that were objects of a program."""
    raise ValueError(f"the rows were objects of a program, which alone has them; {RESUMES}")


def environment(kind: str) -> NoReturn:
    """Stand for an environment that was an object of a program."""
    raise ValueError(f"the environment, a {kind}, was an object of a program, which alone has it; {RESUMES}")


def model_name(model: object) -> str:
    """Return the setting of a model in memory."""
    beginning = OWN_MODULE if "given" in vars(model) else IN_MEMORY
    return f"{beginning}: {type(model).__name__}>"


def importable_name(function: Callable[..., Any]) -> str | None:
    """Return a function's importable `module:function`, else None.

    >>> importable_name(len), importable_name(lambda completions, **columns: [0.0])
    ('builtins:len', None)
    """
    module, name = (attribute(function, one) for one in ("__module__", "__qualname__"))
    if module is None or name is None or module == "__main__" or "<" in name:
        return None
    try:
        found = attrgetter(name)(sys.modules[module])
    except (AttributeError, KeyError):
        return None
    if found is not function and module not in ANEW:
        return None
    return f"{module}:{name}" if callable(found) else None


def current(given: Any) -> Any:
    """Return a reloaded function in place of the old one."""
    name = importable_name(given) if callable(given) else None
    return given if name is None or name.partition(":")[0] not in ANEW else resolve(name, {})


def reward_entry(given: Reward) -> Any:
    """Return a reward's setting: its name."""
    if isinstance(given, str | Mapping):
        return given
    if not callable(given):
        raise ValueError(f"rewards must be functions or their names, got {given!r:.80}")
    return importable_name(given) or {"function": f"{HOME}:reward", "args": {"name": name_of(given)}}


def named_functions(settings: Iterable[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
    """Yield settings with functions replaced by names.

    A function also stands for a mapping of itself and no options (shaping), and for the `name` of its section.
    """
    taken: dict[str, Callable[..., Any]] = {}

    def name_for(given: Any) -> Any:
        if not callable(given) or isinstance(given, Section):
            return given
        if (name := importable_name(given)) is not None:
            return name
        base = re.sub(r"\W", "", name_of(given)) or "function"
        names = chain([base], (f"{base}_{number}" for number in count(2)))
        name = next(one for one in names if taken.get(one, given) is given)
        taken[name] = vars(of_this_program)[name] = given
        return f"{OF_THIS_PROGRAM}:{name}"

    for name, value in settings:
        if name.rpartition(".")[2] == "shaping":
            options = value if isinstance(value, Mapping) else {one: {} for one in as_list(value)}
            yield name, {name_for(key): given for key, given in options.items()}
        elif callable(value) and name == "curriculum":
            yield "curriculum.name", name_for(value)
        else:
            yield name, name_for(value)


def unnamed_functions(config: object) -> list[str]:
    """Return the functions of settings that this program alone has."""
    return sorted(set(re.findall(rf"{re.escape(OF_THIS_PROGRAM)}:(\w+)", repr(config))))


def tool_entry(given: Callable[..., Any]) -> str:
    """Return a tool's setting: its name."""
    return importable_name(given) or f"{HOME}:tool"


def as_list(rewards: Reward | Sequence[Reward]) -> list[Reward]:
    return list(rewards) if isinstance(rewards, list | tuple) else [rewards]  # type: ignore[list-item]


def splits_of(data: Any) -> Mapping[str, Iterable[Mapping[str, Any]]]:
    """Return rows in memory by split. ValueError for objects without rows."""
    if isinstance(data, str | bytes) or not isinstance(data, Iterable):
        order = f"; {ORDER}" if callable(data) else ""
        kind = type(data).__name__
        raise ValueError(f"data must be rows, a path, splits of rows or an environment, got a {kind}{order}")
    splits = _named_splits(data) if isinstance(data, Mapping) else {"train": data}
    for rows in splits.values():
        if hasattr(rows, "columns") and hasattr(rows, "to_numpy"):  # iterating over a table gives columns
            kind = type(rows).__name__
            raise ValueError(f"data must be rows, got a {kind}: give a list of dicts, as to_dict('records') of pandas")
    return splits


def _named_splits(data: Mapping[str, Any]) -> dict[str, Iterable[Mapping[str, Any]]]:
    if "train" not in data:
        names = ", ".join(map(str, data)) or "none"
        hint = f"; of a table of columns give a list of rows, [{{{next(iter(data))!r}: ...}}, ...]" * is_table(data)
        raise ValueError(f"data must have a split 'train', got {names}{hint}")
    test = next((name for name in ("test", "validation", "eval") if name in data), None)
    return {"train": data["train"], **({} if test is None else {"test": data[test]})}
