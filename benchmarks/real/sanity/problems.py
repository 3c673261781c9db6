"""Makes the set: of the candidates those that the model solves in some of 16 attempts, neither in none nor in all."""

import json
import random
from collections.abc import Iterator, Sequence
from itertools import zip_longest
from pathlib import Path

from benchmarks.real.sanity.tasks import Row, candidates, solved
from covey.api.answers import sample
from covey.config.schema import Config
from covey.policy.models.loading import load_policy
from covey.types import Sampling

ATTEMPTS = 16
SAMPLING = {"temperature": 0.7, "max_tokens": 32}
"""Of the set and of its runs: this model writes noise at temperature 1."""
AT_ONCE = 24
"""Candidates sampled in one go."""


def build(model: str, number: int, precision: str = "bfloat16") -> list[Row]:
    """Return the set: rows of tasks with the share that was solved. ValueError where too few are solved sometimes."""
    rows = [row for row in measured(model, candidates(), precision) if 0 < row["solved"] < ATTEMPTS]
    if len(rows) < number:
        raise ValueError(f"the set must have {number} problems, got {len(rows)} that the model solves sometimes")
    return list(mixed(rows))[:number]


def measured(model: str, rows: Sequence[Row], precision: str = "bfloat16", seed: int = 0) -> list[Row]:
    """Return the rows with the number of attempts, of 16, that the model solved."""
    config = Config()
    config.model.name, config.model.precision = model, precision
    policy = load_policy(config.model)
    found: list[Row] = []
    for start in range(0, len(rows), AT_ONCE):
        part = rows[start : start + AT_ONCE]
        answers = sample(policy, config, [row["prompt"] for row in part], ATTEMPTS, Sampling(**SAMPLING, seed=seed))
        found += [{**row, "solved": num_solved(row, texts)} for row, texts in zip(part, answers, strict=True)]
    return found


def num_solved(row: Row, texts: Sequence[str]) -> int:
    size = len(texts)
    return int(sum(solved(texts, [row["kind"]] * size, [row["target"]] * size)))


def mixed(rows: Sequence[Row]) -> Iterator[Row]:
    """Yield the rows one kind after the other, in an order that was drawn."""
    kinds = {row["kind"]: [one for one in rows if one["kind"] == row["kind"]] for row in rows}
    for of_kind in kinds.values():
        random.Random(0).shuffle(of_kind)
    for several in zip_longest(*kinds.values()):
        yield from (row for row in several if row is not None)


def write(rows: Sequence[Row], path: Path) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def read(path: Path) -> list[Row]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
