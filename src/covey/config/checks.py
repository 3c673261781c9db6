"""Check settings one by one: ranges, choices, packages, and conditions.

Checks are declared with each field (`covey.system.setting`); null is within every range.
"""

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import MISSING, dataclass, fields
from importlib.util import find_spec
from typing import Any

import yaml
from omegaconf.errors import InterpolationResolutionError, OmegaConfBaseException

from covey.config.schema import Config, unknown_setting
from covey.system.lookup import YAML_LOADER
from covey.system.section import Section, check_choice, check_range
from covey.system.setting import Bounds, Requires, bounds_of
from covey.system.text.format import one_line


@dataclass(frozen=True, slots=True)
class Found:
    """One setting of a run: its dotted name, value, default and bounds."""

    name: str
    value: Any
    default: Any
    bounds: Bounds


def walk(section: Section, prefix: str = "") -> Iterator[Found]:
    """Yield every setting, those of nested sections included."""
    for described in fields(section):  # type: ignore[arg-type] # every section is a dataclass
        value = vars(section)[described.name]
        if isinstance(value, Section):
            yield from walk(value, f"{prefix}{described.name}.")
        else:
            factory = described.default_factory
            default = described.default if factory is MISSING else factory()
            yield Found(f"{prefix}{described.name}", value, default, bounds_of(described))


def read(config: Config, name: str) -> Any:
    """Return the value of a dotted setting.

    >>> read(Config(), "sampling.top_k")
    0
    """
    value: Any = config
    for part in name.split("."):
        value = vars(value)[part]
    return value


def refuse_idle_cold_start(config: Config, typed: Iterable[str]) -> None:
    """Refuse typed settings of a disabled cold start."""
    known = [found.name for found in walk(config) if found.name.startswith(OF_COLD_START)]
    idle = [name for name in typed if name in known and name != "cold_start.enabled"]
    if idle and not config.cold_start.enabled:
        value = format_value(read(config, idle[0]))
        raise ValueError(f"{idle[0]}={value} needs cold_start.enabled=true, got cold_start.enabled=false")


OF_COLD_START = (
    *("cold_start.", "timeouts.cold_start"),
    *("environment.demonstration", "environment.num_demonstrations", "environment.family_share"),
)


def format_value(value: Any) -> str:
    """Write a value as on the command line."""
    if isinstance(value, list):
        return f"[{','.join(map(str, value))}]"
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return str(value)


def check_ranges(config: Config) -> None:
    for found in walk(config):
        check_range(found.name, found.value, found.bounds)


def check_choices(config: Config) -> None:
    for found in walk(config):
        if found.value != found.default:
            check_choice(found.name, found.value, found.bounds)


def check_packages(config: Config) -> None:
    """Refuse a value whose package is not installed, before hours of work."""
    for one in walk(config):
        for value, (package, extra) in (one.bounds.packages or {}).items():
            used = value in one.value if isinstance(one.value, list) else one.value == value
            if used and find_spec(package) is None:
                raise ValueError(f"{one.name}={format_value(one.value)} needs {package}: pip install 'covey[{extra}]'")


def check_needs(config: Config) -> None:
    """Refuse a setting that differs from its default while nothing reads it."""
    for found, need in unmet(config):
        got = ", ".join(f"{as_typed(name)}={format_value(read(config, name))}" for name in need.partners)
        remedy = f"; {need.remedy}" if need.remedy else ""
        raise ValueError(f"{found.name}={format_value(found.value)} needs {need.condition}, got {got}{remedy}")


def unmet(config: Config) -> Iterator[tuple[Found, Requires]]:
    """Yield changed settings with a condition that does not hold."""
    for found in walk(config):
        for need in found.bounds.needs:
            concerned = found.value != found.default if need.value is None else found.value == need.value
            if concerned and not need.holds(*(read(config, name) for name in need.partners)):
                yield found, need


def as_typed(name: str) -> str:
    """Return a setting's name on the command line.

    >>> as_typed("environment.name"), as_typed("model.name")
    ('environment', 'model.name')
    """
    return name.removesuffix(".name") if name == "environment.name" else name


MOST = 10**9
"""Maximum of any count that nothing below bounds more tightly."""
UNBOUNDED = ("bytes", "seed")
"""Last words of settings that may be larger."""
MOST_OF: dict[str, float] = {
    "lr": 100,
    "num_workers": 1024,
    "num_slots": 1024,
    "num_train": 10**7,
    "num_test": 10**7,
    "num_demonstrations": 10**7,
    "num_samples": 10**5,
    "batch_size": 10**6,
    "judge_lr": 100,
    "seed": 2**63 - 1,
    "problem_seed": 2**63 - 1,
}
"""Maxima of settings of these names, in any section."""
MAY_BE_EMPTY = ("instruction",)
"""Texts that may be ""."""
LEAST_OF: dict[str, float] = {"seed": 0, "problem_seed": 0}
MAY_BE_INFINITE = ("algorithm.correction_max", "algorithm.kl_coef_max")
"""Bounds that may be off."""


def check_bounds(config: Config) -> None:
    """Refuse infinite numbers, absurd counts, and seeds that no generator takes."""
    for name, value in numbers(config, ""):
        last = name.rpartition(".")[2]
        if math.isnan(value) or (math.isinf(value) and name not in MAY_BE_INFINITE):
            raise ValueError(f"{name} must be a finite number, got {value}")
        most = MOST_OF.get(last, math.inf if isinstance(value, float) or last.endswith(UNBOUNDED) else MOST)
        if value > most:
            got = f"{value:,}" if isinstance(value, int) else f"{value:g}"
            raise ValueError(f"{name} must be <= {most:,}, got {got}")
        if value < LEAST_OF.get(last, -math.inf):
            raise ValueError(f"{name} must be >= {LEAST_OF[last]}, got {value}")


def check_texts(config: Config) -> None:
    """Refuse empty texts where the default is null."""
    for found in walk(config):
        is_blank = isinstance(found.value, str) and not found.value.strip()
        if is_blank and found.default is None and not found.name.endswith(MAY_BE_EMPTY):
            raise ValueError(f"{found.name} is empty; null leaves it out")


def numbers(value: Any, name: str) -> Iterator[tuple[str, int | float]]:
    """Yield every number of the settings with its dotted name."""
    if isinstance(value, Section):
        value = vars(value)
    if isinstance(value, dict):
        for key, item in value.items():
            yield from numbers(item, f"{name}.{key}" if name else str(key))
    elif isinstance(value, list | tuple):
        for item in value:
            yield from numbers(item, name)
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield name, value


def explain_error(error: OmegaConfBaseException) -> str:
    text = str(error)
    if isinstance(error, InterpolationResolutionError):
        return f"a ${{...}} cannot be filled in: {one_line(text.partition(' full_key:')[0])}"
    if "does not support deletion" in text:
        return f"{error.full_key} cannot be deleted; every setting has a value"
    if re.search(r"Key '\S+' (is )?not in", text):
        return unknown_setting(error.full_key or str(error.key))

    if error.full_key and "is not a ListConfig" in text:
        return f"{error.full_key} is a list: write {error.full_key}=[{error.value}]"
    return misfit(error.full_key, text)


def misfit(name: str | None, text: str) -> str:
    """Describe a setting's type, from OmegaConf's message about its value.

    >>> misfit("seed", "Value 'abc' of type 'str' could not be converted to Integer")
    'seed must be an integer, got abc'
    """
    said = one_line(text)
    if name and (
        found := re.match(r"Invalid type assigned: \w+ is not a subclass of \w+\. value: (.*?)(?: full_key:|$)", said)
    ):
        return _of_a_section(name, found[1])
    if name and re.match("field '.*' is not Optional", said):
        default = next((one.default for one in walk(Config()) if one.name == name), None)
        usual = "" if default is None else f"; it is {format_value(default)} where nothing is said"
        return f"{name} must have a value, got null{usual}"
    for pattern, wanted in MISFITS.items():
        if name and (found := re.match(pattern, said)):
            got = f", got {found[1][:80] or 'nothing'}" if found.lastindex else ""
            return f"{name} {wanted}{got}"
    reason = re.split(r" (?:full_key|reference_type|object_type)[:=]", said)[0]
    return f"{name}: {reason}" if name else reason


def _of_a_section(name: str, value: str) -> str:
    if name.endswith("]"):
        return f"{name} must be a mapping, got {value}"
    first, *_ = inner = [*vars(vars(Config()).get(name, Config()))]
    setting = f"{name}.{first}" if first in ("name", "path", "enabled", "strategy") else f"{name}.NAME"
    written = value.lower() if value in ("True", "False") else value
    which = f"; NAME is one of {', '.join(inner)}" if setting.endswith(".NAME") and name != "output" else ""
    return f"{name} is a section of settings: write {'hydra.run.dir' if name == 'output' else setting}={written}{which}"


def refuse_aliases(text: str) -> None:
    """Raise ValueError for YAML aliases, which can fill the memory."""
    if any(isinstance(event, yaml.AliasEvent) for event in yaml.parse(text, YAML_LOADER)):
        raise ValueError("it uses aliases (*name); write the values out")


def yaml_fault(error: yaml.MarkedYAMLError, text: str) -> str:
    """Describe the line of invalid YAML and its error."""
    mark, problem = error.problem_mark, error.problem or error.context
    if mark is None:
        return str(problem)
    line = next(iter(text.splitlines()[mark.line : mark.line + 1]), "")
    if line[mark.column : mark.column + 1] == "\t":
        problem = "indent by blanks, not by a tab"
    return f"line {mark.line + 1}: {problem}"


MISFITS: Mapping[str, str] = {
    r"Value '(.*)' of type '.*' could not be converted to Integer": "must be an integer",
    r"Value '(.*)' of type '.*' could not be converted to Float": "must be a number",
    r"Value '(.*)' is not a valid bool.*": "must be true or false",
    r"Cannot convert '.*' to string: '(.*)'": "must be text",
    r"Structured config of type `.*` has missing mandatory value": "must have a value",
    r"Invalid value assigned: (.*) is not a ListConfig": "must be a list",
    r"Cannot assign (.*) to Dict": "must be a mapping",
    r"Cannot merge .*reference_type=(?:Optional\[)?List": "must be a list",
    r"Cannot merge .*reference_type=(?:Optional\[)?Dict": "must be a mapping",
}
"""Messages of OmegaConf about a value of another type -> their meaning."""
