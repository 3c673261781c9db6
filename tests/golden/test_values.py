"""The golden values of the repository are what their generator writes, and it shares nothing with covey."""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from .cases import VALUES, Case, shared_cases
from .formulas.table import expected
from .generate import DOCUMENTS, text_of
from .settings.draws import Document

HERE = Path(__file__).parent
RENEW = "write the values anew with `python -m tests.golden.generate`, and look at what changed"
METRIC_NAMES = {
    "clip_region": "clip_fraction",
    "cov_clip_fraction": "cov_fraction",
    "mask_fraction": "dropped_fraction",
}
OTHER_READINGS = {"clip_fraction_pos", "clip_fraction_neg"}
"""Metrics that one library alone has."""


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda document: document.name)
def test_a_file_of_values_is_what_the_generator_writes(document: Document) -> None:
    assert (VALUES / f"{document.name}.json").read_text() == text_of(document), RENEW


def test_every_file_of_values_has_a_generator() -> None:
    assert {path.stem for path in VALUES.iterdir()} == {document.name for document in DOCUMENTS}


def imported(path: Path) -> Iterator[str]:
    """Yield the top-level packages that a file imports, and its neighbours with a dot before them."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        if isinstance(node, ast.ImportFrom):
            name = (node.module or "").partition(".")[0]
            yield f".{name}" if node.level else name


@pytest.mark.long
def test_the_generator_imports_nothing_but_mpmath_the_standard_library_and_itself() -> None:
    files = [HERE / "generate.py", *(HERE / "formulas").glob("*.py"), *(HERE / "settings").glob("*.py")]
    own = {f".{path.stem}" for path in files} | {".", ".formulas", ".settings"}
    found = {name for path in files for name in imported(path)}
    assert found <= own | {"mpmath"} | sys.stdlib_module_names
    assert "mpmath" in found


# ------------------------------------------------------------------------------------- other libraries' values


def flat(value: Any) -> Iterator[float]:
    """Yield the numbers of a nested structure in a fixed order."""
    if isinstance(value, dict):
        value = [value[name] for name in sorted(value)]
    if isinstance(value, list):
        for entry in value:
            yield from flat(entry)
    else:
        yield float(value)


def differences(case: Case) -> list[str]:
    """Return the outputs in which the generator's formulas and a shared case disagree."""
    whole = {name: [[int(entry) for entry in row] for row in case.inputs[name]]
             for name in ("mask", "env_mask") if name in case.inputs}  # fmt: skip
    got = expected(case.file, case.params, case.inputs | whole)
    wanted = {name: value for name, value in case.expected.items() if name != "metrics"}
    for name, value in case.expected.get("metrics", {}).items():
        if name not in OTHER_READINGS and METRIC_NAMES.get(name, name) in got["metrics"]:
            wanted[name] = value
            got[name] = got["metrics"][METRIC_NAMES.get(name, name)]
    return [name for name, value in wanted.items() if not agree(got[name], value, case)]


def agree(got: Any, wanted: Any, case: Case) -> bool:
    """Return whether all numbers lie within the tolerance of the case."""
    pairs = zip(flat(got), flat(wanted), strict=True)
    return all(abs(a - b) <= case.atol + case.rtol * abs(b) for a, b in pairs)


@pytest.mark.shared
def test_the_formulas_of_the_generator_agree_with_the_values_of_other_libraries(shared: Path) -> None:
    # "clipped_ratio" is what one library calls CISPO, and a loss that nobody should use.
    cases = [c for c in shared_cases("*") if c.params.get("loss") != "clipped_ratio"]
    assert len(cases) >= 690
    assert {case.id: found for case in cases if (found := differences(case))} == {}
