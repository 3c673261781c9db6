"""Promise 8: every formula is checked against values computed elsewhere, and no check is idle.

Each entry of each table of formulas is spoiled in turn, and a golden case, or a literal one below, must turn red. What
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

from covey.advantages import ADVANTAGES, scores
from covey.aggregation import AGGREGATIONS
from covey.batch_rules import SELECTORS
from covey.corrections import DIVERGENCES, SCOPES, parse_rejection, rejection_keep
from covey.kl import CONTROLLERS, ESTIMATORS, GRADIENTS, SAMPLER_ESTIMATORS, KLController
from covey.loss_events import EVENTS
from covey.losses import LOSSES, LossInputs, loss_inputs
from covey.objective_terms import DENOMINATORS, ObjectiveInputs
from covey.ratio import LEVELS
from covey.selection import GROUP_FILTERS, SELECTION, Selected
from covey.shaping import SHAPING, ShapingInputs

from ..golden.cases import Case, read_cases

TABLES: dict[str, dict[str, Any]] = {
    "ADVANTAGES": ADVANTAGES,
    "LOSSES": LOSSES,
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
    "EVENTS": EVENTS,
    "SELECTORS": SELECTORS,
}
ENTRIES = [f"{table}.{name}" for table, entries in TABLES.items() for name in entries]

# ------------------------------------------------------------------------------------- literal values, worked by hand

REWARDS = torch.tensor([1.0, 0.0, 0.5, 0.5], dtype=torch.float64)
INFO = ShapingInputs(
    groups_N=torch.zeros(4, dtype=torch.int64),
    lengths_N=torch.tensor([5, 10, 8, 6]),
    total_lengths_N=torch.tensor([9, 14, 12, 10]),
    turns_N=torch.tensor([1, 1, 2, 1]),
    truncated_N=torch.tensor([False, True, False, False]),
    token_ids=((1, 2, 3, 4, 5), (1, 2, 1, 2, 1, 2), (7, 7, 7, 7), (1,)),
)
LN2 = 0.6931471805599453


def of_rewards(name: str, **options: Any) -> Tensor:
    return ADVANTAGES[name](scores(REWARDS, [0, 0, 1, 1], lengths=[1, 3, 2, 2]), **options)


def shaped(name: str, **options: Any) -> Tensor:
    return SHAPING[name](REWARDS, INFO, **options)


def selected(name: str, **options: Any) -> list[list[float]]:
    """Which of the rewards 1, 0, 0.5, 0.5 are kept, and their values as advantages."""
    chosen = SELECTION[name](scores(REWARDS, [0] * 4), lambda given: given.rewards_N, baseline_over="group", **options)
    return [chosen.keep_N.double().tolist(), torch.where(chosen.keep_N, chosen.advantages_N, 0.0).tolist()]


def two_tokens(ratio_log: float = 0.5) -> LossInputs:
    """Log-probs -0.5 and -1.5 against old ones lower by `ratio_log`; advantages 1 and -2; the second is selected."""
    log_probs_NT = torch.tensor([[-0.5, -1.5]], dtype=torch.float64)
    mask_NT = torch.ones(1, 2, dtype=torch.bool)
    advantages_NT = torch.tensor([[1.0, -2.0]], dtype=torch.float64)
    return loss_inputs(log_probs_NT, log_probs_NT - ratio_log, advantages_NT, mask_NT, torch.tensor([[False, True]]))


def events(name: str, ratio_log: float) -> list[list[list[bool]]]:
    return [happened.tolist() for happened in EVENTS[name](two_tokens(ratio_log)).values()]


def sampler_base() -> Tensor:
    log_probs_NT = torch.tensor([[-1.0]])
    inputs = ObjectiveInputs(
        log_probs_NT, log_probs_NT - 1, log_probs_NT - 2, log_probs_NT, torch.ones(1, 1, dtype=torch.bool)
    )
    base_NT = DENOMINATORS["behaviour"](inputs)
    assert base_NT is not None
    return base_NT


def kept(criterion: str, bounds: str) -> Tensor:
    """Of two tokens whose sampler was more confident by 0.1 and 0.3 nats."""
    old_NT = torch.tensor([[-1.0, -2.0]], dtype=torch.float64)
    mask_NT = torch.ones(1, 2, dtype=torch.bool)
    sampler_NT = old_NT + torch.tensor([[0.1, 0.3]])
    return rejection_keep(old_NT, sampler_NT, mask_NT, parse_rejection(criterion, bounds))


LITERALS: dict[str, tuple[Callable[[], Any], Any]] = {
    "ADVANTAGES.none": (lambda: of_rewards("none"), [1.0, 0.0, 0.5, 0.5]),
    # Token mean (1 + 0 + 1 + 1) / 8 = 3/8, token variance (25/64 + 3 * 9/64 + 4 * 1/64) / 7 = 1/8.
    "ADVANTAGES.reinforce_plus_plus": (
        lambda: of_rewards("reinforce_plus_plus", eps=0.0),
        [1.7677669529663689, -1.0606601717798212, 0.35355339059327373, 0.35355339059327373],
    ),
    "LOSSES.nll": (lambda: LOSSES["nll"](two_tokens()), [[0.5, 1.5]]),
    "ESTIMATORS.k3_forward": (
        lambda: ESTIMATORS["k3_forward"](torch.tensor([LN2, -LN2], dtype=torch.float64), None),
        [1 - LN2, LN2 - 0.5],
    ),
    "CONTROLLERS.fixed": (lambda: CONTROLLERS["fixed"](KLController(coef=0.3), 5.0, 64), 0.3),
    "SCOPES.seq_sum": (lambda: kept("seq_sum_k2", "0.06"), [[True, True]]),
    "DIVERGENCES.k1": (lambda: kept("token_k1", "0.8_1.2"), [[True, False]]),
    # 10 tokens are 4 of 4 over 6, 8 tokens 2 of 4.
    "SHAPING.soft_overlong": (lambda: shaped("soft_overlong", max_len=10, cache=4), [1.0, -1.0, 0.0, 0.5]),
    "SHAPING.repetition": (lambda: shaped("repetition", ngram=2), [1.0, -0.6, 0.5 - 2 / 3, 0.5]),
    # The group's mean 1/2 times the shares of the longest: lengths 5, 10, 8, 6 of 10, and turns 1, 1, 2, 1 of 2.
    "SHAPING.pass_rate_linear": (
        lambda: shaped("pass_rate_linear", w_out=0.2, w_in=0.0, w_turns=0.4),
        [0.85, -0.2, 0.22, 0.34],
    ),
    "SELECTION.max_variance": (lambda: selected("max_variance", m=2), [[1.0, 1.0, 0.0, 0.0], [1.0, 0.0, 0.0, 0.0]]),
    "SELECTION.balanced_subset": (
        lambda: selected("balanced_subset", group_size=2),
        [[1.0, 1.0, 0.0, 0.0], [1.0, 0.0, 0.0, 0.0]],
    ),
    "DENOMINATORS.behaviour": (sampler_base, [[-3.0]]),
    "EVENTS.gmpo": (
        lambda: [events("gmpo", 0.5), events("gmpo", -0.5)],
        [
            [[[False, False]], [[True, False]], [[True, False]]],
            [[[False, True]], [[False, False]], [[False, True]]],
        ],
    ),
    "EVENTS.kl_cov": (lambda: events("kl_cov", 0.5), [[[False, True]]]),
}


def literal(entry: str) -> None:
    """AssertionError unless the entry has the value worked out by hand."""
    compute, expected = LITERALS[entry]
    found, wanted = compute(), torch.tensor(expected, dtype=torch.float64)
    got = found.double() if isinstance(found, Tensor) else torch.tensor(found, dtype=torch.float64)
    assert got.shape == wanted.shape
    assert float((got - wanted).abs().max()) < 1e-9, f"{entry}: {got.tolist()}, expected {expected}"


@pytest.mark.parametrize("entry", LITERALS)
def test_entries_without_golden_values_have_literal_ones(entry: str) -> None:
    literal(entry)


# ------------------------------------------------------------------------------------- golden values

Check = tuple[Callable[..., None], Case]


@functools.cache
def golden_modules() -> tuple[ModuleType, ...]:
    names = sorted(path.stem for path in (Path(__file__).resolve().parents[1] / "golden").glob("test_*.py"))
    return tuple(importlib.import_module(f"..golden.{name}", __package__) for name in names)


@functools.cache
def golden_checks() -> tuple[Check, ...]:
    """Every golden case with every test that takes it."""
    tests = [test for module in golden_modules() for name, test in vars(module).items() if name.startswith("test_")]
    return tuple(
        (test, param.values[0])
        for test in tests
        for mark in vars(test).get("pytestmark", ())
        if mark.name == "parametrize" and mark.args[0] == "case"
        for param in mark.args[1]
        if isinstance(param.values[0], Case)
    )


def called_directly() -> list[tuple[str, str]]:
    """(golden test module, name) of the formulas it does not take from a table."""
    return [
        (module.__name__, name)
        for module in golden_modules()
        for name, function in vars(module).items()
        if inspect.isfunction(function) and function.__module__.startswith("covey.")
        if inspect.signature(function).return_annotation in (Tensor, float, bool)
    ]


@pytest.mark.shared
def test_every_case_of_every_golden_document_is_checked(shared: Path) -> None:
    checked = {(case.file, case.id) for _, case in golden_checks()}
    present = {(case.file, case.id) for case in read_cases("*")}
    assert checked == present
    assert {file for file, _ in present} == {path.stem for path in (shared / "golden").glob("*.json")}
    assert len(present) >= 693


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


@pytest.mark.shared
@pytest.mark.parametrize("entry", ENTRIES)
def test_an_entry_that_is_wrong_turns_a_golden_or_literal_value_red(
    entry: str, shared: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table, name = entry.split(".")
    monkeypatch.setitem(TABLES[table], name, spoiled(TABLES[table][name]))
    if entry in LITERALS:
        assert red(functools.partial(literal, entry))
    else:
        likely_first = sorted(golden_checks(), key=lambda check: name not in str(check[1].params))
        assert any(red(functools.partial(test, case)) for test, case in likely_first)


@pytest.mark.shared
@pytest.mark.parametrize(("module", "name"), called_directly(), ids=lambda word: word.rsplit(".")[-1])
def test_a_formula_outside_the_tables_that_is_wrong_turns_a_golden_value_red(
    module: str, name: str, shared: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.modules[module], name, spoiled(vars(sys.modules[module])[name]))
    own = [(test, case) for test, case in golden_checks() if test.__module__ == module]
    assert any(red(functools.partial(test, case)) for test, case in own)


def test_every_name_a_setting_can_take_is_an_entry_above() -> None:
    assert set(SAMPLER_ESTIMATORS.values()) <= set(ESTIMATORS)
    assert set(EVENTS) | set(SELECTORS) <= set(LOSSES)
