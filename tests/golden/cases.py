"""Golden values: one `Case` for each setting of a formula, compared under its own tolerance.

    from .cases import Case, check, golden, tensor

    @golden("adv_opo", "adv_maxrl")
    def test_an_estimator_gives_the_golden_advantages(case: Case) -> None:
        check(ADVANTAGES[case.params["estimator"]](...), case, "advantages")

The values in the folder values/ are part of the repository; generate.py writes them. Those of the shared reference
material, which other libraries computed, are read besides where COVEY_SHARED names it.
"""

import fnmatch
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

VALUES = Path(__file__).parent / "values"
RTOL, ATOL = 1e-12, 1e-14
"""Of the values of the repository, which are exact to the last digit."""
RENAMED = {"seed_formulas": "document_formulas"}
DOCUMENT_OF_SEED = {"000": "machines", "001": "code", "003": "torchrl", "004": "trl"}
"""How the shared values name these files and documents."""
NON_FINITE = {"nan": float("nan"), "inf": float("inf"), "-inf": float("-inf")}


@dataclass(frozen=True)
class Case:
    """One setting of one formula, with inputs and outputs as nested lists of Python numbers."""

    id: str
    file: str
    params: dict[str, Any]
    inputs: dict[str, Any]
    expected: dict[str, Any]
    rtol: float
    atol: float

    def options(self, *names: str) -> dict[str, Any]:
        """Those of `names` that the case sets, as keyword arguments."""
        return {name: self.params[name] for name in names if name in self.params}


def shared_cases(*names: str) -> list["Case"]:
    """Return the cases of documents among the shared values, none where those are not there."""
    default = Path(__file__).resolve().parents[3] / "shared"
    folder = Path(os.environ.get("COVEY_SHARED", default))
    return [case for part in ("golden", "teachers") for case in read_cases(*names, folder=folder / part)]


def read_cases(*names: str, folder: Path = VALUES) -> list[Case]:
    """Return all cases of the documents `names` ("adv_*" is a pattern), in the order of the files."""
    files = {RENAMED.get(path.stem, path.stem): path for path in folder.glob("*.json")}
    chosen = [name for pattern in names for name in sorted(fnmatch.filter(files, pattern))]
    documents = [(name, json.loads(files[name].read_text())) for name in chosen]
    return [_case(name, raw, document.get("inputs", ())) for name, document in documents for raw in document["cases"]]


NOT_RUN = {"truncated", "tool", "sum_pi_squared", "avg_at_k", "majority_vote", "maj_at_k", "optimal_token_baseline"}
"""Masks, quantities, metrics and estimators with golden values that nothing in covey runs yet."""


def is_run(case: Case) -> bool:
    """Return whether covey runs the formula of a case: none pays single tokens, none guesses the old policy."""
    named = {case.params.get(name) for name in ("mask", "quantity", "metric", "estimator")}
    of_sequences = case.params.get("metrics") == "ess" and case.params["level"] == "sequence"
    by_token = "token_rewards" in case.inputs or "proximal" in case.params
    # Rewards paid token by token; what covey shares with those who pay them is the KL that a controller sees.
    by_token |= "token_rewards" in case.expected and "controller_kl" not in case.expected
    return not (named & NOT_RUN or of_sequences or by_token)


def golden(
    *names: str, where: Callable[[Case], bool] = lambda case: True
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Decorate a test that takes `case`: run it for every case of the documents `names` that `where` accepts.

    Cases of formulas that nothing runs (`is_run`) are left out.
    """
    committed = [pytest.param(case, id=case.id) for case in read_cases(*names) if is_run(case) and where(case)]
    assert committed, f"no golden document is named {names}"
    shared = [case for case in shared_cases(*names) if is_run(case) and where(case)]
    marked = [pytest.param(case, id=case.id, marks=pytest.mark.shared) for case in shared]
    return pytest.mark.parametrize("case", committed + marked)


def tensor(values: Any, dtype: torch.dtype = torch.float64) -> Tensor:
    """Nested lists as a float64 tensor."""
    return torch.tensor(values, dtype=dtype)


def check(actual: Any, case: Case, key: str) -> None:
    """Fail unless `actual` (tensor, list or number) is `expected[key]` in shape and, within tolerance, in value."""
    got = actual.detach().to(torch.float64) if isinstance(actual, Tensor) else tensor(actual)
    want = tensor(case.expected[key])
    assert got.shape == want.shape, f"{case.id}: {key} has shape {tuple(got.shape)}, expected {tuple(want.shape)}"
    gap = (got - want).abs() - (case.atol + case.rtol * want.abs())
    # A NaN on one side must fail, so ask for "<= 0" rather than refuse "> 0".
    assert bool(((gap <= 0) | (got.isnan() & want.isnan())).all()), (
        f"{case.id}: {key}\n     got {got.tolist()}\nexpected {want.tolist()}"
    )


def check_all(actual: dict[str, Any], case: Case) -> None:
    """`check` every expected key; a key that `actual` lacks fails too."""
    missing = set(case.expected) - set(actual)
    assert not missing, f"{case.id}: nothing computed for {sorted(missing)}"
    for key in case.expected:
        check(actual[key], case, key)


def _case(file: str, raw: dict[str, Any], batches: Sequence[dict[str, Any]]) -> Case:
    params, inputs = _decode(raw["params"]), raw["inputs"]
    if "seed" in params:
        params["document"] = DOCUMENT_OF_SEED[params.pop("seed")]
    tolerance = raw.get("tolerance", {"rtol": RTOL, "atol": ATOL})
    return Case(
        id=raw["id"],
        file=file,
        params=params,
        inputs=_decode(batches[inputs] if isinstance(inputs, int) else inputs),
        expected=_decode(raw["expected"]),
        rtol=tolerance["rtol"],
        atol=tolerance["atol"],
    )


def _decode(value: Any) -> Any:
    """JSON has no NaN or infinity: the files write them as strings."""
    if isinstance(value, str):
        return NON_FINITE.get(value, value)
    if isinstance(value, list):
        return [_decode(entry) for entry in value]
    if isinstance(value, dict):
        return {key: _decode(entry) for key, entry in value.items()}
    return value
