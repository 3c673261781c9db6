"""Examples in docstrings that say what comes out come out so."""

import doctest
import importlib
from pathlib import Path
from typing import Any

import pytest

SOURCE = Path(__file__).resolve().parents[2] / "src"
MODULES = [path for path in sorted(SOURCE.rglob("*.py")) if ">>>" in path.read_text(encoding="utf-8")]


class Runner(doctest.DocTestRunner):
    """Passes over examples with names that stand for anything."""

    def report_unexpected_exception(self, out: Any, test: Any, example: Any, exc_info: Any) -> None:
        if not issubclass(exc_info[0], NameError | SyntaxError):
            super().report_unexpected_exception(out, test, example, exc_info)


def examples(path: Path) -> list[doctest.DocTest]:
    """Those of a module whose every example has a result; the others show how something is called."""
    module = importlib.import_module(".".join(path.relative_to(SOURCE).with_suffix("").parts))
    found = doctest.DocTestFinder().find(module)
    return [one for one in found if one.examples and all(e.want or "import " in e.source for e in one.examples)]


def room_of(path: Path) -> str:
    """Return a room of covey, or a package beside it."""
    package, room = path.relative_to(SOURCE).parts[:2]
    return room if package == "covey" else package


@pytest.mark.parametrize("room", sorted({room_of(path) for path in MODULES}))
def test_the_examples_of_docstrings_come_out_as_they_say(room: str) -> None:
    said: list[str] = []
    runner = Runner(optionflags=doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS)
    for path in (one for one in MODULES if room_of(one) == room):
        for test in examples(path):
            runner.run(test, out=said.append)
    assert "".join(said) == ""
