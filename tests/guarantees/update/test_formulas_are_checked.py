"""Promise 8: every formula is checked against values computed elsewhere, and no check is idle.

Each entry of each table of formulas is spoiled in turn, and a golden case of the repository must turn red. What
formulas do where there is nothing to compute: test_formulas_at_the_edge.py.
"""

import functools
import importlib
import inspect
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from covey.algorithm.aggregation import AGGREGATIONS
from covey.algorithm.controllers import CONTROLLERS
from covey.algorithm.corrections import DIVERGENCES, SCOPES
from covey.algorithm.credit.advantages import ADVANTAGES
from covey.algorithm.credit.selection import GROUP_FILTERS, SELECTION, Selected
from covey.algorithm.credit.shaping import SHAPING
from covey.algorithm.kl import ESTIMATORS, GRADIENTS, SAMPLER_ESTIMATORS
from covey.algorithm.loss_inputs import LEVELS
from covey.algorithm.losses import LOSSES
from covey.algorithm.objective import DENOMINATORS

from ...golden.cases import Case, is_run, read_cases, shared_cases

TABLES: dict[str, dict[str, Any]] = {
    "ADVANTAGES": ADVANTAGES,
    "AGGREGATIONS": AGGREGATIONS,
    "ESTIMATORS": ESTIMATORS,
    "GRADIENTS": GRADIENTS,
    "CONTROLLERS": CONTROLLERS,
    "SHAPING": SHAPING,
    "SELECTION": SELECTION,
    "GROUP_FILTERS": GROUP_FILTERS,
    "SCOPES": SCOPES,
    "DIVERGENCES": DIVERGENCES,
    "LEVELS": LEVELS,
    "DENOMINATORS": DENOMINATORS,
}
ENTRIES = [f"{table}.{name}" for table, entries in TABLES.items() for name in entries]
PARTS_OF_LOSSES = [
    (name, part) for name, loss in LOSSES.items() for part in ("function", "events", "selector") if getattr(loss, part)
]

Check = tuple[Callable[..., None], Case]


@functools.cache
def golden_modules() -> tuple[ModuleType, ...]:
    names = sorted(path.stem for path in (Path(__file__).resolve().parents[2] / "golden").glob("test_*.py"))
    return tuple(importlib.import_module(f"...golden.{name}", __package__) for name in names)


@functools.cache
def golden_checks() -> tuple[Check, ...]:
    """Pair every golden case with every test that takes it."""
    return tuple((test, param.values[0]) for test, param in golden_params())


@functools.cache
def committed_checks() -> tuple[Check, ...]:
    """Return the checks that a plain clone has: those of the values in the repository."""
    return tuple((test, param.values[0]) for test, param in golden_params() if not param.marks)


def golden_params() -> list[tuple[Callable[..., None], Any]]:
    """Pair every golden test with each of its parameters, cases marked `shared` included."""
    tests = [test for module in golden_modules() for name, test in vars(module).items() if name.startswith("test_")]
    return [
        (test, param)
        for test in tests
        for mark in vars(test).get("pytestmark", ())
        if mark.name == "parametrize" and mark.args[0] == "case"
        for param in mark.args[1]
    ]


def called_directly() -> list[tuple[str, str]]:
    """(golden test module, name) of the formulas it does not take from a table."""
    return [
        (module.__name__, name)
        for module in golden_modules()
        for name, function in vars(module).items()
        if inspect.isfunction(function) and function.__module__.startswith("covey.")
        if inspect.signature(function).return_annotation in (Tensor, float, bool)
    ]


def test_every_case_of_every_golden_document_is_checked() -> None:
    checked = {(case.file, case.id) for _, case in golden_checks()}
    present = {(case.file, case.id) for case in read_cases("*") if is_run(case)}
    shared = shared_cases("*")
    assert checked == present | {(case.file, case.id) for case in shared if is_run(case)}
    assert len(present) >= 1000


def red(check: Callable[[], None]) -> bool:
    """The check fails; where it is no check of this case (it skips) or cannot compute at all, it does not count."""
    try:
        check()
    except AssertionError:
        return True
    except (pytest.skip.Exception, ValueError):
        return False
    return False


def spoiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """The same function, wrong."""

    @functools.wraps(function)
    def wrong(*arguments: Any, **options: Any) -> Any:
        return off(function(*arguments, **options))

    return wrong


def off(found: Any) -> Any:
    """Another value of the same kind."""
    if isinstance(found, Selected):
        return replace(found, keep_N=off(found.keep_N), advantages_N=off(found.advantages_N))
    if isinstance(found, Mapping):
        return {name: off(value) for name, value in found.items()}
    if isinstance(found, Tensor) and found.dtype == torch.bool:
        return ~found
    return not found if isinstance(found, bool) else 3 * found + 1


@pytest.mark.parametrize("entry", ENTRIES)
def test_an_entry_that_is_wrong_turns_a_golden_value_red(entry: str, monkeypatch: pytest.MonkeyPatch) -> None:
    table, name = entry.split(".")
    monkeypatch.setitem(TABLES[table], name, spoiled(TABLES[table][name]))
    assert is_noticed(name)


def is_noticed(name: str) -> bool:
    """Return whether any golden value fails, those that name what was spoiled first."""
    likely_first = sorted(committed_checks(), key=lambda check: name not in str(check[1].params))
    return any(red(functools.partial(test, case)) for test, case in likely_first)


@pytest.mark.parametrize(("name", "part"), PARTS_OF_LOSSES)
def test_a_part_of_a_loss_that_is_wrong_turns_a_golden_value_red(
    name: str, part: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    wrong = replace(LOSSES[name], **{part: spoiled(getattr(LOSSES[name], part))})
    monkeypatch.setitem(LOSSES, name, wrong)
    assert is_noticed(name)


@pytest.mark.parametrize(("module", "name"), called_directly(), ids=lambda word: word.rsplit(".")[-1])
def test_a_formula_outside_the_tables_that_is_wrong_turns_a_golden_value_red(
    module: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.modules[module], name, spoiled(vars(sys.modules[module])[name]))
    own = [(test, case) for test, case in committed_checks() if test.__module__ == module]
    assert any(red(functools.partial(test, case)) for test, case in own)


def test_every_name_a_setting_can_take_is_an_entry_above() -> None:
    assert set(SAMPLER_ESTIMATORS.values()) <= set(ESTIMATORS)
