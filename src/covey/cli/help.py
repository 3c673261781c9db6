"""The texts of `covey --help`, without heavy imports."""

import ast
import re
import shutil
import sys
import textwrap
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import get_type_hints

from covey.config.schema import Config, group_choices
from covey.config.shelves import CONF
from covey.environments.registry import environment_classes
from covey.rollouts.settings import GroupSizeStep
from covey.system.lookup import near, read_table
from covey.system.section import Section
from covey.system.setting import bounds_of

TEXT = read_table(CONF.with_name("help.yaml"))
VERBS: dict[str, str] = TEXT["verbs"]
EXAMPLES: dict[str, list[str]] = TEXT["examples"]
PLAN: dict[str, str] = TEXT["plan"]
USAGES: dict[str, str] = TEXT["usages"]
"""Usage of the verbs without settings."""
OWN_FLAGS = {
    "machines": (TEXT["machines"], 22),
    "show": (TEXT["show"], 12),
    "rollouts": (TEXT["rollouts"], 15),
    "report": (TEXT["report"], 18),
    "export": (TEXT["export"], 15),
    "doctor": (TEXT["doctor"], 15),
    "verify": (TEXT["verify"], 15),
    "branch": (TEXT["branch"], 15),
}
"""Flags of these verbs, and the width of the column of names."""


def overview(verbs: Mapping[str, str]) -> str:
    """Lay out `covey --help`, with the verbs of installed packages."""
    examples = [f"  {EXAMPLES[verb][0]}" for verb in VERBS]
    return str(TEXT["overview"]).format(verbs=_columns(verbs, 12), examples="\n".join(examples))


def unknown_verb(verb: str, rest: Sequence[str], verbs: Collection[str]) -> str:
    """Describe an unknown verb with a suggestion."""
    word = f"resume={''.join(rest[:1]) or 'FOLDER'}" if verb == "resume" else verb
    meant = f"; did you mean covey train {word}?" if "=" in word else near(verb, [*verbs, "--version", "--help"])
    return f'no verb "{verb}"{meant}; verbs: {", ".join(verbs)}'


def verb_help(verb: str) -> str:
    """Return the text of `covey VERB --help`: flags, groups and settings.

    For config these are all settings, else those of the top level.
    """
    if verb in USAGES:
        return _page_without_settings(verb)
    parts = [f"usage: covey {verb} [setting=value ...] [flags]\n\n{VERBS[verb]}"]
    parts.append("examples:\n" + "\n".join(f"  {line}" for line in EXAMPLES[verb]))
    if verb == "evaluate":
        parts += [TEXT["trust"], "flags of this verb:\n" + _columns(TEXT["evaluate"], 37)]
    if verb == "plan":
        parts.append("flags of this verb:\n" + _columns(PLAN, 37))
    parts.append("flags:\n" + _columns(TEXT["flags"], 37))
    groups = {group: ", ".join(choices) for group, choices in group_choices().items()}
    parts.append("choices (GROUP=NAME):\n" + _columns(groups, 14))
    sections = all_settings()
    shown = sections if verb == "config" else {"": sections[""]}
    for name, settings in shown.items():
        title = f"settings of {name}:" if name else "settings:"
        described = {f"{s.name} = {s.default}": s.explanation for s in settings}
        parts.append(f"{title}\n" + _columns(described, 44))
    return "\n\n".join(parts)


def _page_without_settings(verb: str) -> str:
    examples = "examples:\n" + "\n".join(f"  {line}" for line in EXAMPLES[verb])
    rows, width = OWN_FLAGS.get(verb, ({}, 0))
    flags = [_columns(rows | {"--help, -h": "this help"}, width)] if rows else []
    ending = [TEXT[f"{verb}_exit"]] if f"{verb}_exit" in TEXT else []
    return "\n\n".join([f"usage: {USAGES[verb]}", VERBS[verb], examples, *flags, *ending])


@dataclass(frozen=True, slots=True)
class Setting:
    """One field of the schema, as in its source."""

    name: str
    default: str
    explanation: str


def all_settings() -> dict[str, list[Setting]]:
    """Return the settings of sections, "", engine, environment=NAME, by name."""
    kinds: list[type[Section]] = [Config, *_sections_of(Config), GroupSizeStep]
    named = {kind.section_name(): kind for kind in kinds}
    named |= {f"environment={name}": kind for name, kind in environment_classes().items()}
    return {name: read_settings(kind) for name, kind in named.items()}


def _sections_of(config: type[Config]) -> list[type[Section]]:
    kinds = get_type_hints(config).values()
    return [kind for kind in kinds if isinstance(kind, type) and issubclass(kind, Section)]


def read_settings(section: type) -> list[Setting]:
    """Return a dataclass's fields with docstring and bounds, inherited ones last."""
    bounds = {found.name: bounds_of(found) for found in fields(section)}
    own = [name for kind in section.__mro__ if is_dataclass(kind) for name in _fields_of(kind).items()]
    found: dict[str, Setting | None] = {}
    # Fields without a docstring are no settings to show; limits come from their metadata
    for name, (default, explanation) in own:
        limits = bounds[name].in_words(explanation)
        said = f"{explanation} [{limits}]" if limits else explanation
        found.setdefault(name, Setting(name, default, said) if explanation else None)
    return [setting for setting in found.values() if setting is not None]


def _fields_of(section: type) -> dict[str, tuple[str, str]]:
    """Return default and docstring of a class's own fields."""
    (node,) = (node for node in _classes(sys.modules[section.__module__]) if node.name == section.__name__)
    found = {}
    for statement, after in zip(node.body, [*node.body[1:], None], strict=True):
        if isinstance(statement, ast.AnnAssign) and not NO_SETTING(ast.unparse(statement.annotation)):
            found[ast.unparse(statement.target)] = (_default(statement.value), _docstring(after))
    return found


NO_SETTING = re.compile(r".*Config$|ClassVar").match
"""Annotations of sections and of facts about a class."""


@cache
def _classes(module: ModuleType) -> list[ast.ClassDef]:
    source = Path(str(module.__file__)).read_text(encoding="utf-8")
    return [node for node in ast.parse(source).body if isinstance(node, ast.ClassDef)]


def _docstring(node: ast.stmt | None) -> str:
    is_text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
    return " ".join(ast.literal_eval(node.value).split()) if is_text and isinstance(node, ast.Expr) else ""


def _default(node: ast.expr | None) -> str:
    """Return a default as YAML, a factory's product included."""
    if isinstance(node, ast.Call) and ast.unparse(node.func) == "setting":
        return "..." if isinstance(node.args[0], ast.Name) else _default(node.args[0])
    if isinstance(node, ast.Call):
        factory = next(keyword.value for keyword in node.keywords if keyword.arg == "default_factory")
        return _default(factory.body) if isinstance(factory, ast.Lambda) else EMPTY.get(ast.unparse(factory), "...")
    text = ast.unparse(node) if node is not None else ""
    return {"None": "null", "True": "true", "False": "false"}.get(text, text.replace("'", ""))


EMPTY = {"list": "[]", "dict": "{}"}


def _columns(rows: Mapping[str, str], width: int) -> str:
    total = max(shutil.get_terminal_size().columns, width + 40)
    indent = " " * (width + 3)
    lines = [f"  {name:<{width}} {text}" for name, text in rows.items()]
    wrapped = [
        textwrap.fill(line, total, subsequent_indent=indent, break_on_hyphens=False, break_long_words=False)
        for line in lines
    ]
    return "\n".join(wrapped)
