"""The cases of a matrix that run for each change: every value of two axes, every pair of values of more."""

import re
from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence
from itertools import combinations

import pytest

SMALL = 6
"""So few cases all run: what two axes do together is worth more than a moment."""


def diagonal(cases: Sequence[Mapping[str, Hashable]], strength: int = 1) -> list[int]:
    """Return the places of few cases that have every value of every axis, or every `strength` of them together."""
    found = [{frozenset(some) for some in combinations(sorted(case.items()), strength)} for case in cases]
    missing = set().union(*found)
    chosen = []
    while missing:
        best = max(range(len(cases)), key=lambda place: len(found[place] & missing))
        missing -= found[best]
        chosen.append(best)
    return sorted(chosen)


def values_of(item: pytest.Function) -> dict[str, Hashable]:
    """Return a case's value on each axis, which is a `parametrize`: a row of a table is one value."""
    found: dict[str, Hashable] = {}
    for mark in item.iter_markers("parametrize"):
        names = re.findall(r"\w+", mark.args[0]) if isinstance(mark.args[0], str) else mark.args[0]
        found[" ".join(names)] = tuple(id(item.callspec.params[name]) for name in names)
    return found


def mark_beside_diagonal(items: Sequence[pytest.Item]) -> None:
    """Mark as slow what is beside the diagonal of a matrix, unless it is small, asked for or partly slow already."""
    matrices = defaultdict(list)
    for item in items:
        if isinstance(item, pytest.Function) and hasattr(item, "callspec"):
            matrices[item.nodeid.partition("[")[0]].append(item)
    for cases in matrices.values():
        values = [*map(values_of, cases)]
        marks = {mark.name for case in cases for mark in case.iter_markers()}
        if len(cases) <= SMALL or len(values[0]) < 2 or marks & {"slow", "product"}:
            continue
        for place in set(range(len(cases))) - set(diagonal(values, min(2, len(values[0]) - 1))):
            cases[place].add_marker(pytest.mark.slow)
