"""Find the origin of settings: typed, recipe, preset, fitted or default."""

import json
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import yaml

from covey.config.schema import Config, group_choices
from covey.config.shelves import preset_fields, preset_file
from covey.environments.registry import known_class
from covey.system.section import flat
from covey_report.logs.read import Row, RunFiles

OWN, RECIPE, FITTED, DEFAULT = "own", "recipe", "fitted", "default"
NAMED_BY = {"environment": "environment.name", "engine": "engine.name", "optimizer": "optimizer.name"}
"""Groups whose choice is a name in the schema, rather than a file."""


@dataclass(frozen=True, slots=True)
class Command:
    """Command that started a run, read from its folder."""

    recipe: str = ""
    chosen: Mapping[str, str] = field(default_factory=dict)
    """Group -> the preset that was typed for it."""
    typed: frozenset[str] = frozenset()
    """Dotted names."""
    file: str = ""
    """File of settings, after --config."""


def settings_page(run: RunFiles) -> dict[str, Any]:
    """Build the page of settings, with the origin of each.

    The recipe's values are those of its file and of the presets that it names, before anything gave way.
    """
    command = command_of(run.versions)
    config = Config()
    config.environment = known_class(str(run.settings.get("environment.name")))()
    default = flat(asdict(config))
    recipe = default | _presets(command)
    rows = []
    for name, value in run.settings.items():
        base = recipe.get(name, default.get(name))
        is_typed = any(name == word or name.startswith(f"{word}.") for word in command.typed)
        if is_same(value, base):
            origin = DEFAULT if is_same(base, default.get(name)) else RECIPE
        else:
            origin = OWN if is_typed else FITTED
        rows.append((name, plain(value), plain(default.get(name)), plain(base), origin))
    presets = [f"{group}={choice}" for group, choice in command.chosen.items()]
    return {
        "recipe": command.recipe,
        "presets": presets,
        "file": command.file,
        "is_known": bool(run.versions),
        "rows": rows,
    }


def command_of(versions: Row) -> Command:
    """Read the commands that began and resumed a run."""
    given = versions.get("earlier_commands")
    lines = [*(given if isinstance(given, list) else []), versions.get("command", "")]
    recipe, file, chosen, typed, known = "", "", {}, set(), group_choices()
    for words in map(_words, lines):
        for place, word in enumerate(words):
            name, equals, value = word.lstrip("+").partition("=")
            if name == "--config":
                file = value or next(iter(words[place + 1 :]), "")
            elif equals and name == "recipe":
                recipe = value
            elif equals and name in known:
                chosen[name] = value
            elif equals and not name.startswith(("-", "hydra.")):
                typed.add(name)
    return Command(recipe, chosen, frozenset(typed), file)


def algorithm_of(run: RunFiles) -> str:
    """Name the algorithm by its preset, and its advantage and loss."""
    command, chosen = command_of(run.versions), dict[str, str]()
    list(_of_recipe(command.recipe, chosen) if command.recipe else ())
    name = command.chosen.get("algorithm", chosen.get("algorithm"))
    parts = f"{run.settings.get('algorithm.advantage')}, {run.settings.get('algorithm.loss')}"
    return f"{name} ({parts})" if name else parts


def _words(line: Any) -> list[str]:
    """Return the arguments of `covey train`, of other commands none."""
    try:
        words = shlex.split(str(line))
    except ValueError:
        return []
    return words[2:] if words[1:2] == ["train"] else []


def _presets(command: Command) -> dict[str, Any]:
    """Read a recipe and typed presets of covey by dotted name."""
    chosen: dict[str, str] = {}
    own = dict(_of_recipe(command.recipe, chosen)) if command.recipe else {}
    found: dict[str, Any] = {}
    for group, choice in (chosen | dict(command.chosen)).items():
        found |= _of_choice(group, choice)
    return found | {name: value for name, value in own.items() if name.partition(".")[0] not in command.chosen}


def _of_recipe(recipe: str, chosen: dict[str, str]) -> Iterator[tuple[str, Any]]:
    """Yield a recipe's settings after its bases', and note presets in `chosen`."""
    file = preset_file("recipe", recipe)
    if file is None:
        return
    content = yaml.safe_load(file.read_text(encoding="utf-8"))
    for entry in content.pop("defaults", []):
        if isinstance(entry, str) and entry != "_self_":
            yield from _of_recipe(entry.removeprefix("/recipe/"), chosen)
        elif isinstance(entry, dict):
            chosen |= {name.removeprefix("override /"): str(value) for name, value in entry.items()}
    yield from flat(content).items()


def _of_choice(group: str, choice: str) -> dict[str, Any]:
    if group not in NAMED_BY:
        return preset_settings(group, choice) or {}
    if (group, choice) != ("engine", "fill"):
        return {NAMED_BY[group]: choice}
    from covey.config.compose import FILL_SAMPLING  # which imports Hydra

    return {"engine.name": "fill", **flat({"sampling": FILL_SAMPLING})}


def preset_settings(group: str, choice: str) -> dict[str, Any] | None:
    """Read a preset by dotted names, None where there is no file."""
    fields = preset_fields(group, choice)
    return None if fields is None else flat(fields, f"{group}.")


def is_same(one: Any, other: Any) -> bool:
    """Compare two values, of which YAML may read 1e-6 as text.

    >>> is_same(1e-6, "1e-6"), is_same(1, True)
    (True, False)
    """
    if isinstance(one, bool) or isinstance(other, bool):
        return one is other
    if isinstance(one, str) is not isinstance(other, str):
        try:
            return float(one) == float(other)
        except (TypeError, ValueError):
            return False
    return bool(one == other)


def plain(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, default=str, ensure_ascii=False)
