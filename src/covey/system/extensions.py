"""Find extensions by name: covey's own and entry points of installed packages.

Nothing is imported before its name is chosen, and no metadata is read for a name of covey's own.
"""

import ast
import importlib
import sys
from collections.abc import Mapping
from functools import lru_cache
from importlib.metadata import EntryPoint, entry_points
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from covey.system.lookup import describe, near


class Extensions:
    """Extensions of one kind by name.

    `own` has "module:object" or the object itself; a program may add to it. An entry point never replaces one.
    """

    def __init__(self, group: str, kind: str, own: Mapping[str, Any]) -> None:
        """Take a group, such as covey.environments, and a word for messages."""
        self.own = own
        self._group, self._kind = group, kind

    def names(self) -> list[str]:
        return sorted({*self.own, *self._entries()})

    def __contains__(self, name: object) -> bool:
        return name in self.own or name in self._entries()

    def load(self, name: str) -> Any:
        """Import an extension. ValueError where it is unknown, ambiguous or broken."""
        found = self.own.get(name)
        if found is None:
            return self._load_entry(name)
        if not isinstance(found, str):
            return found
        module, _, attribute = found.partition(":")
        return getattr(importlib.import_module(module), attribute)

    def first_line(self, name: str) -> str:
        """Read the first line of an installed function's docstring without importing it, or ""."""
        found = self._entries().get(name, ())
        return _read_docstring(found[0]).partition("\n")[0] if found else ""

    def package(self, name: str) -> str:
        """Name the package of an installed extension, "" for covey's own.

        >>> Extensions("covey.commands", "verb", {"show": "covey_report.runs.show:run_show"}).package("show")
        ''
        """
        found = () if name in self.own else self._entries().get(name, ())
        return ", ".join(f"{one.dist.name} {one.dist.version}" if one.dist else one.value for one in found)

    def _entries(self) -> Mapping[str, tuple[EntryPoint, ...]]:
        return _read_group(self._group, tuple(sys.path))

    def _load_entry(self, name: str) -> Any:
        if name not in self._entries():  # a package may have come since
            _read_group.cache_clear()
        found = self._entries().get(name, ())
        if not found:
            known = ", ".join(self.names()) or f"the names of {self._group} (no installed package adds any)"
            raise ValueError(
                f"{self._kind} must be one of {known}, got {name or 'none'}"
                f"{near(name, self.names())}; a package may add others (pip install PACKAGE)"
            )
        if len(found) > 1:
            raise ValueError(f"{self._kind}={name} is in {self.package(name)}; uninstall all of these but one")
        try:
            return found[0].load()
        except Exception as error:  # foreign code
            raise ValueError(
                f"{self._kind}={name} needs {found[0].value} of {self.package(name)}, whose import {describe(error)}"
            ) from error


@lru_cache(maxsize=8)
def _read_group(group: str, path: tuple[str, ...]) -> Mapping[str, tuple[EntryPoint, ...]]:
    found: dict[str, tuple[EntryPoint, ...]] = {}
    for one in entry_points(group=group):
        if one not in found.get(one.name, ()):
            found[one.name] = (*found.get(one.name, ()), one)
    return found


def _read_docstring(point: EntryPoint) -> str:
    package, *inner = point.module.split(".")
    try:
        spec = find_spec(package)
        origin = Path(str(spec and spec.origin))
        place = origin.parent.joinpath(*inner)
        source = next(file for file in (place.with_suffix(".py"), place / "__init__.py", origin) if file.is_file())
        body = ast.parse(source.read_text(encoding="utf-8")).body
    except (OSError, ValueError, ImportError, SyntaxError, StopIteration):
        return ""
    found = (one for one in body if isinstance(one, ast.FunctionDef) and one.name == point.attr)
    return next((ast.get_docstring(one) or "" for one in found), "")


CALLBACKS = Extensions("covey.callbacks", "output.callbacks", {})
"""Name -> function of settings and of a line printer, which makes a callback of a run."""
