"""Settings by keyword: dotted, nested, underscored, or by last part.

covey.train(..., num_steps=50, lr=1e-5)
covey.train(..., optimizer={"lr": 1e-5, "warmup_steps": 10})
covey.train(..., optimizer__lr=1e-5)
covey.train(..., **{"optimizer.lr": 1e-5})
covey.train(..., advantage=my_function)   # where a name of a function may stand, the function may, too
covey.train(..., algorithm="dapo", model="qwen2.5-0.5b", recipe="gsm8k")   # presets, by their names
"""

import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from covey.api.objects import named_functions
from covey.config import compose
from covey.config.auto_adjust import adjust_unset_options
from covey.config.checks import refuse_idle_cold_start, walk
from covey.config.engine_choice import this_machine
from covey.config.names import NAMES_FOLDER, RUN_FOLDER, refuse_foreign
from covey.config.schema import Config, group_choices, setting_names, unknown_setting
from covey.config.shelves import CONF, former
from covey.system.lookup import near
from covey.system.section import Section

SECONDARY = ("cold_start", "preflight", "timeouts", "curriculum", "devices", "doctor")
"""Sections whose settings are named in full where another section has one of the same last part."""


@dataclass(frozen=True, slots=True)
class Composed:
    """A run's settings, the given names, and adjustments."""

    config: Config
    names: frozenset[str]
    notes: tuple[str, ...]


def make_config(base: Config | None, settings: Mapping[str, Any]) -> Composed:
    """Return the settings of `base` or presets, with keywords applied.

    ValueError for an unknown name, with those that are near.
    """
    flat = list(named_functions(flatten(settings)))
    _refuse_foreign(flat)
    if not isinstance(dict(flat).get("recipe", ""), str):
        raise ValueError(f"recipe must be a name, got {dict(flat)['recipe']!r}")
    typed = [(name, value) for name, value in flat if name in group_choices() and isinstance(value, str)]
    chosen = {name: former(name).get(value, value) for name, value in typed}
    if base is not None and chosen:
        name, value = next(iter(chosen.items()))
        raise ValueError(f"{name}={value} is a preset, for which config=Config(...) leaves no room; give one of both")
    config = copy.deepcopy(base) if base is not None else _compose(chosen)
    names = _put_all(config, [(name, value) for name, value in flat if name not in chosen])
    refuse_idle_cold_start(config, names)
    machine = this_machine if base is None else None
    return Composed(config, names, tuple(adjust_unset_options(config, {*names, *chosen} - {"recipe"}, machine)))


def _refuse_foreign(flat: Sequence[tuple[str, Any]]) -> None:
    """Refuse words of other systems, with covey's for all of them."""
    ending = {found.name.rpartition(".")[2] for found in walk(Config()) if not found.name.startswith(SECONDARY)}
    known = {*setting_names(), *group_choices(), *ending, *RUN_FOLDER}
    unknown = [name for name, _ in flat if name not in known and name.partition(".")[0] not in vars(Config())]
    refuse_foreign(unknown, {name: str(value) for name, value in flat}, setting_names())


def _put_all(config: Config, given: Sequence[tuple[str, Any]]) -> frozenset[str]:
    """Apply keywords, whole sections first; return the names set.

    ValueError for a setting that is given twice, as one of both would be ignored.
    """
    names: set[str] = set()
    for name, value in sorted(given, key=lambda pair: not isinstance(pair[1], Section)):
        full = put(config, name, value)
        if full in names and not isinstance(value, Section):
            raise ValueError(f"{full} is given twice: write it once")
        # A section stands for its values that differ from their defaults
        inside = walk(value, f"{full}.") if isinstance(value, Section) else ()
        names |= {found.name for found in inside if found.value != found.default} or {full}
    return frozenset(names)


def flatten(settings: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield dotted names and values, mappings of sections taken apart."""
    for key, value in settings.items():
        if not isinstance(key, str):
            raise ValueError(f"{prefix.rstrip('.')} has settings by name, got {key!r}")
        name = prefix + key.replace("__", ".")
        if isinstance(value, Mapping) and "." not in name and isinstance(vars(Config()).get(name), Section):
            yield from flatten(value, f"{name}.")
        else:
            yield name, value


def _compose(chosen: Mapping[str, str]) -> Config:
    for group, name in chosen.items():
        if name not in group_choices()[group]:
            known = ", ".join(group_choices()[group])
            raise ValueError(f"{group} must be one of {known}, got {name}{near(name, group_choices()[group])}")
    if not chosen:
        return Config()
    from hydra import compose as hydra_compose
    from hydra import initialize_config_dir

    compose.register()
    with initialize_config_dir(version_base="1.3", config_dir=str(CONF)):
        overrides = [f"{group}={name}" for group, name in chosen.items()]
        return compose.to_unchecked(hydra_compose("config", overrides=overrides))


def put(config: Config, name: str, value: Any) -> str:
    """Set one setting; return its name. ValueError if unknown or ambiguous."""
    full = full_name(config, name)
    *sections, leaf = full.split(".")
    node: Any = config
    for section in sections:
        node = node[section] if isinstance(node, dict) else vars(node)[section]
    value = str(value) if isinstance(value, Path) else copy.deepcopy(value)  # what is given stays as it is
    if isinstance(node, dict):
        node[leaf] = value
    else:
        setattr(node, leaf, value)
    return full


def full_name(config: Config, name: str) -> str:
    """Return the dotted name that a keyword means.

    >>> full_name(Config(), "lr"), full_name(Config(), "num_steps")
    ('optimizer.lr', 'num_steps')
    """
    known = [found.name for found in walk(config)]
    mappings = {found.name for found in walk(config) if isinstance(found.value, dict)}
    if name in known or name in vars(config) or name.rpartition(".")[0] in mappings:
        return name
    ending = [other for other in known if other.rpartition(".")[2] == name]
    primary = [other for other in ending if not other.startswith(SECONDARY)] or ending
    if len(primary) == 1:
        return primary[0]
    if primary:
        spelled = " or ".join(other.replace(".", "__") for other in primary)
        raise ValueError(f"setting {name} is one of several: write {spelled}")
    if name == "folder":
        raise ValueError("unknown setting folder: covey.train(folder=...) makes a run folder, covey.build none")
    raise ValueError(unknown_setting(name).replace(NAMES_FOLDER, "folder"))
