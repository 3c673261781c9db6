"""Reward functions as named in settings, with arguments.

    rewards:
      - my_checks:exact
      - think_format
      - {function: soft_overlong, args: {max_length: 256, cache: 64}}

A class is made with its arguments, once; a function gets them with every call. Names of ready-made rewards may also be
written `covey.rewards:NAME`.
"""

import functools
import importlib
import operator
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from covey.environments.reward_functions.call import CALLED_WITH, HOOKS, RewardCallable, named_parameters
from covey.system.lookup import hint_of_file, module_and_name, near, resolve

KEYS = ("function", "args")
READY_MADE = "covey.rewards"
_PACKAGE = "covey_tasks.rewards"
REWARDS = {
    "accuracy": f"{_PACKAGE}.mathematics:accuracy",
    "reasoning_accuracy": f"{_PACKAGE}.mathematics:ReasoningAccuracy",
    "cosine_scaled": f"{_PACKAGE}.mathematics:CosineScaled",
    "think_format": f"{_PACKAGE}.style:think_format",
    "sentence_end": f"{_PACKAGE}.style:SentenceEnd",
    "length_penalty": f"{_PACKAGE}.style:LengthPenalty",
    "soft_overlong": f"{_PACKAGE}.lengths:SoftOverlong",
    "repetition": f"{_PACKAGE}.lengths:Repetition",
    "tool_calls": f"{_PACKAGE}.calls:tool_calls",
    "pairwise": f"{_PACKAGE}.pairwise:Pairwise",
    "reward_model": f"{_PACKAGE}.reward_model:RewardModel",
}
"""Name of a ready-made reward -> its function, or the class that makes it. Imported when it is used."""


@dataclass(frozen=True, slots=True)
class RewardSpec:
    """One entry of `rewards`.

    >>> reward_spec({"function": "soft_overlong", "args": {"max_length": 256, "cache": 64}})
    RewardSpec(function='soft_overlong', args={'max_length': 256, 'cache': 64})
    """

    function: str
    args: Mapping[str, Any] = field(default_factory=dict)

    @property
    def ready_made(self) -> str | None:
        """Return its name among the ready-made ones."""
        name = self.function.removeprefix(f"{READY_MADE}:")
        return name if name in REWARDS else None


def reward_spec(entry: object) -> RewardSpec:
    """Read an entry. ValueError for a wrong form or unknown name."""
    if isinstance(entry, str):
        return _check_spec(RewardSpec(entry))
    if callable(entry):
        meant = f"{entry.__module__}:{getattr(entry, '__qualname__', type(entry).__qualname__)}"
        raise ValueError(f'rewards must name functions: "{meant}" in place of {entry!r:.80}')
    if not isinstance(entry, Mapping):
        raise ValueError(f"rewards must hold names or mappings of {' and '.join(KEYS)}, got {entry!r:.80}")
    for key in entry:
        if key not in KEYS:
            raise ValueError(f"rewards have no key {key!r}{near(str(key), KEYS)}; there is {' and '.join(KEYS)}")
    name, args = entry.get("function"), entry.get("args", {})
    if not isinstance(name, str):
        raise ValueError(f"a mapping in rewards needs function: NAME, got {dict(entry)!r:.80}")
    if not isinstance(args, Mapping) or not all(isinstance(key, str) for key in args):
        raise ValueError(f"args of the reward function {name} must be a mapping of names to values, got {args!r:.80}")
    return _check_spec(RewardSpec(name, dict(args)))


def _check_spec(spec: RewardSpec) -> RewardSpec:
    if spec.ready_made is None and module_and_name(spec.function) is None:
        colon = ":" in spec.function
        path, dot, name = spec.function.rpartition(".")
        meant = near(spec.function, REWARDS)
        if not colon and (name == "py" or Path(f"{spec.function}.py").is_file()):
            meant = hint_of_file(f"{spec.function.removesuffix('.py')}.py:FUNCTION")
        elif path and dot and name and not colon:
            meant = f"; did you mean {path}:{name}?"
        raise ValueError(
            f"no reward function {spec.function!r}{meant}; "
            f"there is {', '.join(REWARDS)}, and your own as module:function"
        )
    return spec


def check_reward(entry: object) -> None:
    """Refuse a wrong entry, importing nothing. ValueError."""
    spec = reward_spec(entry)
    if spec.ready_made is not None or spec.function.startswith(f"{READY_MADE}:"):
        load_reward(entry)


def load_reward(entry: object) -> RewardCallable:
    """Load an entry of `rewards`, from the current directory too. ValueError."""
    if os.getcwd() not in sys.path and "" not in sys.path:
        sys.path.append(os.getcwd())
    spec = reward_spec(entry)
    function = find_reward(spec)
    if not isinstance(function, type):
        return functools.partial(function, **spec.args) if spec.args else function
    # Make a class once; functions get their arguments with every call
    _refuse_missing(spec, function)
    try:
        made = function(**spec.args)
    except (TypeError, ValueError) as error:
        raise ValueError(f"reward function {spec.function}: {error}") from error
    if not callable(made):
        raise ValueError(f"reward function {spec.function}: a {function.__name__} cannot be called")
    return made


def find_reward(spec: RewardSpec) -> Any:
    """Return an entry's function or class. ValueError for unknown arguments."""
    function = _named_by(spec.function) if spec.ready_made is None else resolve(REWARDS[spec.ready_made], {})
    options = [name for name in named_parameters(function)[0] if name not in (*CALLED_WITH, *HOOKS)]
    for name in spec.args:
        if name not in options:
            there = f"it takes {', '.join(options)}" if options else "it takes none"
            raise ValueError(f"reward function {spec.function} has no argument {name!r}{near(name, options)}; {there}")
    return function


def _refuse_missing(spec: RewardSpec, function: RewardCallable) -> None:
    """Refuse missing arguments of a class; functions' may be columns."""
    named, _ = named_parameters(function)
    missing = [name for name, p in named.items() if p.default is p.empty and name not in spec.args]
    if missing:
        raise ValueError(f"reward function {spec.function} needs args.{', args.'.join(missing)}")


def _named_by(name: str) -> Any:
    parts = module_and_name(name)
    assert parts is not None, "_named refuses others"
    module_name, attribute = parts
    try:
        module = importlib.import_module(module_name)
    except Exception as error:
        hint = hint_of_file(name)
        reason = f"a module is named with dots and without .py{hint}" if hint else str(error)
        if not hint and isinstance(error, ModuleNotFoundError) and error.name == module_name:
            reason += near(module_name, [file.stem for file in Path().glob("*.py")])
        raise ValueError(f"reward function {name}: cannot import {module_name}: {reason}") from error
    try:
        function = operator.attrgetter(attribute)(module)
    except AttributeError as error:
        known = [name for name in dir(module) if not name.startswith("_") and callable(getattr(module, name))]
        raise ValueError(
            f"reward function {name}: module {module_name} has no {attribute!r}{near(attribute, known)}"
        ) from error
    if not callable(function):
        raise ValueError(f"reward function {name} must be a function, got {type(function).__name__}")
    return function
