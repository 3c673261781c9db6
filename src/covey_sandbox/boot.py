"""Start the sandbox's processes with modules sent over a pipe.

Interpreter and package may lie where only this user can read; processes import exactly `inside/` of this package.
"""

import json
import os
import sys
from pathlib import Path

BOOT = """
import importlib.abc, importlib.util, json, sys
with open(int(sys.argv[2]), "rb") as pipe:
    SOURCES = json.loads(pipe.read())
class Bundle(importlib.abc.Loader, importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name in SOURCES:
            return importlib.util.spec_from_loader(name, self, is_package=not SOURCES[name])
    def create_module(self, spec):
        return None
    def exec_module(self, module):
        exec(compile(SOURCES[module.__name__], "<" + module.__name__ + ">", "exec"), module.__dict__)
sys.meta_path.insert(0, Bundle())
importlib.import_module(sys.argv[1]).main(int(sys.argv[3]))
"""
"""Run as `python -c BOOT MODULE PIPE SOCKET`."""

PACKAGE = "covey_sandbox.inside"
FLAGS = ("-s", "-S", "-P", "-B")
"""No packages but the standard library's, nothing of the current folder, nothing written."""


def read_sources() -> dict[str, str]:
    """Return the modules of `inside/`, packages as empty texts."""
    folder = Path(__file__).parent / "inside"
    modules = {"covey_sandbox": ""}
    for path in sorted(folder.rglob("*.py")):
        is_package = path.stem == "__init__"
        parts = (path.parent if is_package else path.with_suffix("")).relative_to(folder).parts
        modules[".".join((PACKAGE, *parts))] = "" if is_package else path.read_text(encoding="utf-8")
    return modules


SOURCES = read_sources()
"""Read once, at import: later this process may have become a user who cannot."""


def bundle() -> bytes:
    return json.dumps(SOURCES).encode()


def interpreters() -> list[str]:
    """Return interpreters to try, best first; virtual environments come last."""
    own = os.path.realpath(sys._base_executable or sys.executable)  # type: ignore[attr-defined]
    return list(dict.fromkeys([own, "/usr/local/bin/python3", "/usr/bin/python3"]))


def command(interpreter: str, module: str) -> list[str]:
    """Return the command, without the descriptors that follow."""
    return [interpreter, *FLAGS, "-c", BOOT, f"{PACKAGE}.{module}"]
