"""Reads the golden values of the shared reference material: one `Case` per setting, compared under its own tolerance.

    from .cases import Case, check, golden, tensor

    @golden("adv_opo", "adv_maxrl")
    def test_an_estimator_gives_the_golden_advantages(case: Case) -> None:
        check(ADVANTAGES[case.params["estimator"]](...), case, "advantages")

Where the folder is absent every such test becomes one skipped test that says so.
"""

import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

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
    repo: str
    """Where the numbers come from: a GitHub name, "definition", "enumeration", "catalogue rule" or "seed document"."""

    def options(self, *names: str) -> dict[str, Any]:
        """Those of `names` that the case sets, as keyword arguments."""
        return {name: self.params[name] for name in names if name in self.params}


def golden_folder() -> Path:
    """The folder of golden files; it need not exist."""
    default = Path(__file__).resolve().parents[3] / "shared"
    return Path(os.environ.get("COVEY_SHARED", default)) / "golden"


def read_cases(*names: str) -> list[Case]:
    """All cases of the files `names` (without ".json"; "adv_*" is a pattern), in file order."""
    paths = [path for name in names for path in sorted(golden_folder().glob(f"{name}.json"))]
    return [_case(path.stem, raw) for path in paths for raw in json.loads(path.read_text())["cases"]]


def golden(*names: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Decorator: run a test that takes `case` once for every case of the files `names`."""
    if golden_folder().is_dir():
        params = [pytest.param(case, id=case.id) for case in read_cases(*names)]
        assert params, f"no golden file is named {names}"
    else:
        absent = pytest.mark.skip(reason=f"golden values are not at {golden_folder()}; set COVEY_SHARED")
        params = [pytest.param(None, id="absent", marks=absent)]

    def mark(test: Callable[..., None]) -> Callable[..., None]:
        return pytest.mark.shared(pytest.mark.parametrize("case", params)(test))

    return mark


def tensor(values: Any, dtype: torch.dtype = torch.float64) -> Tensor:
    """Nested lists as a float64 tensor."""
    return torch.tensor(values, dtype=dtype)


def check(actual: Any, case: Case, key: str) -> None:
    """Fail unless `actual` (tensor, list or number) is `expected[key]` in shape and, within tolerance, in value."""
    got = actual.detach().to(torch.float64) if isinstance(actual, Tensor) else tensor(actual)
    want = tensor(case.expected[key])
    assert got.shape == want.shape, f"{case.id}: {key} has shape {tuple(got.shape)}, expected {tuple(want.shape)}"
    gap = (got - want).abs() - (case.atol + case.rtol * want.abs())
    # A NaN on either side must fail, so ask for "<= 0" rather than refuse "> 0".
    assert bool((gap <= 0).all()), f"{case.id}: {key}\n     got {got.tolist()}\nexpected {want.tolist()}"


def check_all(actual: dict[str, Any], case: Case) -> None:
    """`check` every expected key; a key that `actual` lacks fails too."""
    missing = set(case.expected) - set(actual)
    assert not missing, f"{case.id}: nothing computed for {sorted(missing)}"
    for key in case.expected:
        check(actual[key], case, key)


def _case(file: str, raw: dict[str, Any]) -> Case:
    return Case(
        id=raw["id"],
        file=file,
        params=_decode(raw["params"]),
        inputs=_decode(raw["inputs"]),
        expected=_decode(raw["expected"]),
        rtol=raw["tolerance"]["rtol"],
        atol=raw["tolerance"]["atol"],
        repo=raw["origin"]["repo"],
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
