"""The catalogue of wrong edits fits the code as it is, and what runs it tells found from missed."""

import io
import re
from collections import Counter
from contextlib import redirect_stdout

import pytest

from .catalogue import ROOT, Mutant, missing_tests, mutated, read_catalogue
from .run import main

MUTANTS = read_catalogue()
LONG = re.compile(r"^@pytest\.mark\.long\n(?:[@ \])}].*\n)*def (\w+)\(", re.MULTILINE)
"""The name of a test that is marked long, below its other decorators."""


def fault_of(mutant: Mutant) -> str | None:
    """Return why a mutant cannot be made."""
    path = mutant.path(ROOT)
    if not path.is_file():
        return f"mutant {mutant.name!r}: there is no {mutant.file}"
    try:
        mutated(path.read_text(encoding="utf-8"), mutant)
    except ValueError as error:
        return str(error)
    missing = missing_tests(ROOT, mutant.tests)
    return f"mutant {mutant.name!r}: there is no {', '.join(missing)}" if missing else None


def test_every_mutant_still_applies_to_the_code_and_its_tests_are_there() -> None:
    assert [fault for fault in map(fault_of, MUTANTS) if fault] == []


def test_what_is_named_to_find_an_edit_runs_in_make_test() -> None:
    named = {test.partition("[")[0] for mutant in MUTANTS for test in mutant.tests if "::" in test}
    files = {test.partition("::")[0] for test in named}
    long = {f"{file}::{name}" for file in files for name in LONG.findall((ROOT / file).read_text(encoding="utf-8"))}
    assert named & long == set()


def test_each_mutant_has_a_unique_name_tests_and_a_reason() -> None:
    assert len(MUTANTS) >= 60
    assert [name for name, count in Counter(m.name for m in MUTANTS).items() if count > 1] == []
    assert all(mutant.tests and mutant.reason for mutant in MUTANTS)


def mutant_of(old: str, new: str) -> Mutant:
    return Mutant("area", "name", "code.py", old, new, ("tests/test_code.py",), "reason")


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("a - b", "b - a", "must stand once in code.py, got 0 times"),
        ("a", "b", "must stand once in code.py, got 3 times"),
        ("a + b", "a +", "must parse"),
        ("a + b", "(a + b)", "must change what code.py does"),
    ],
)
def test_a_mutant_that_no_longer_fits_is_an_error(old: str, new: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        mutated("def add(a, b):\n    return a + b\n", mutant_of(old, new))


ADDING = "def add(a, b):\n    return a + b\n\n\ndef subtract(a, b):\n    return a - b\n"
TESTS = """from covey.adding import add, subtract


def test_sums():
    assert add(2, 3) == 5


def test_differences():
    assert subtract(0, 0) == 0


def test_that_fails():
    assert add(2, 3) == 6
"""
CASES = {
    "found": ("a + b", "a - b", "test_sums"),
    "a survivor": ("a - b", "b - a", "test_differences"),
    "of tests that fail anyway": ("a + b", "a - b", "test_that_fails"),
    "with a name that is not there": ("a + b", "a + c", "test_sums"),
    "that cannot be imported": ("def add", "def added", "test_sums"),
}
"""Old text, new text, the test that is to see it."""


def entry(name: str, old: str, new: str, test: str) -> str:
    fields = {"name": name, "file": "src/covey/adding.py", "old": old, "new": new, "reason": "r"}
    lines = [f'{field} = "{value}"' for field, value in fields.items()]
    return "\n".join(["[[mutant]]", *lines, f'tests = ["tests/test_adding.py::{test}"]', ""])


@pytest.fixture(scope="module")
def judged(tmp_path_factory: pytest.TempPathFactory) -> tuple[int, list[str]]:
    """Exit status and output of judging the mutants of a project of one module."""
    root, catalogue = tmp_path_factory.mktemp("project"), tmp_path_factory.mktemp("catalogue")
    module, tests = root / "src" / "covey" / "adding.py", root / "tests" / "test_adding.py"
    for path, text in ((module, ADDING), (module.with_name("__init__.py"), ""), (tests, TESTS)):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (catalogue / "area.toml").write_text("".join(entry(name, *case) for name, case in CASES.items()))
    said = io.StringIO()
    with redirect_stdout(said):
        status = main(["--root", str(root), "--catalogue", str(catalogue), "--jobs", "1", "--libraries", "pytest"])
    assert module.read_text() == ADDING
    return status, said.getvalue().splitlines()


@pytest.mark.parametrize(
    ("name", "mark", "said"),
    [
        ("found", "found ", "tests/test_adding.py::test_sums"),
        ("a survivor", "MISSED", "SURVIVED"),
        ("of tests that fail anyway", "MISSED", "its tests fail without it: tests/test_adding.py::test_that_fails"),
        ("with a name that is not there", "MISSED", "broken, pytest exits with 1"),
        ("that cannot be imported", "MISSED", "broken, pytest exits with 4"),
    ],
)
def test_a_mutant_is_found_only_by_tests_that_pass_without_it(
    name: str, mark: str, said: str, judged: tuple[int, list[str]]
) -> None:
    (line,) = (line for line in judged[1][: len(CASES)] if f"area: {name}  <- " in line)
    assert line.startswith(mark)
    assert said in line


def test_mutants_that_are_missed_are_listed_and_make_the_command_fail(judged: tuple[int, list[str]]) -> None:
    status, lines = judged
    assert status == 1
    assert any(line.startswith("5 mutants, 4 not found, ") for line in lines)
    assert "    src/covey/adding.py: a - b  ->  b - a" in lines


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_no_mutant_survives() -> None:
    assert main([]) == 0
