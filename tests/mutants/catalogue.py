"""Wrong edits that somebody might make, as data: what is changed in which file, and the tests that must see it.

Each catalogue/AREA.toml holds a list of them:

    [[mutant]]
    name = "the KL coefficient is not restored"
    file = "src/covey/trainer/trainer.py"
    old = 'coef=float(state["kl_coef"])'  # stands exactly once in the file
    new = "coef=self.controller.coef"
    tests = ["tests/guarantees/test_resume_restores_all_state.py"]
    reason = "a resumed run penalises with the coefficient it began with"
"""

import re
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import CodeType

ROOT = Path(__file__).resolve().parents[2]
CATALOGUE = Path(__file__).parent / "catalogue"


@dataclass(frozen=True, slots=True)
class Mutant:
    """One wrong edit. Paths begin at the root of the repository; those of tests may name a single one."""

    area: str
    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]
    reason: str

    def path(self, root: Path) -> Path:
        """Return the file it changes in a copy of the repository."""
        return root / self.file


def read_catalogue(folder: Path = CATALOGUE) -> list[Mutant]:
    """Return the mutants of all areas. TypeError for a field that is missing or unknown."""
    return [
        Mutant(**{**entry, "area": file.stem, "tests": tuple(entry["tests"])})
        for file in sorted(folder.glob("*.toml"))
        for entry in tomllib.loads(file.read_text(encoding="utf-8"))["mutant"]
    ]


def mutated(text: str, mutant: Mutant) -> str:
    """Return the text of its file with the edit. ValueError where it no longer applies or is no Python."""
    count = text.count(mutant.old)
    if count != 1:
        raise ValueError(f"mutant {mutant.name!r}: old text must stand once in {mutant.file}, got {count} times")
    changed = text.replace(mutant.old, mutant.new)
    code = _code if mutant.file.endswith(".py") else _words
    try:
        is_same = code(changed) == code(text)
    except SyntaxError as error:
        raise ValueError(f"mutant {mutant.name!r}: {mutant.file} must parse, got {error}") from error
    if is_same:
        raise ValueError(f"mutant {mutant.name!r}: new text must change what {mutant.file} does")
    return changed


def missing_tests(root: Path, tests: Sequence[str]) -> list[str]:
    """Return those of the given tests that are not there, judged by the names of functions."""
    return [test for test in tests if not _is_there(root, *test.partition("::")[::2])]


def _is_there(root: Path, file: str, function: str) -> bool:
    path, name = root / file, function.partition("[")[0]
    return path.is_file() and (not name or f"def {name}(" in path.read_text(encoding="utf-8"))


@cache
def _code(text: str) -> tuple[object, ...]:
    """Return what Python makes of a module, without the places of lines."""
    return _without_places(compile(text, "module", "exec", dont_inherit=True))


def _words(text: str) -> list[str]:
    """Return a source of C without comments."""
    return re.sub(r"/\*.*?\*/|//[^\n]*", "", text, flags=re.DOTALL).split()


def _without_places(code: CodeType) -> tuple[object, ...]:
    constants = [_without_places(one) if isinstance(one, CodeType) else repr(one) for one in code.co_consts]
    names = (code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars)
    numbers = (code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount, code.co_flags)
    return (code.co_qualname, code.co_code, code.co_exceptiontable, *names, *numbers, tuple(constants))
