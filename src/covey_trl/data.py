"""Read rows as TRL does: data sets, streams, several eval sets by name."""

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from typing import Any

from covey.environments.base import Split
from covey_trl.config import GRPOConfig
from covey_trl.mapping import batches


def splits_of(train: Any, evaluated: Any, args: GRPOConfig) -> tuple[dict[Split, Sequence[Any]], list[str]]:
    """Split rows, and name the data set of each test row.

    A stream is read for as many rows as max_steps trains on. ValueError for unreadable data.
    """
    if train is None:
        raise ValueError("train_dataset is missing")
    if isinstance(train, Mapping):
        raise ValueError(f"train_dataset must be one Dataset or a list of rows, got a {type(train).__name__}")
    splits: dict[Split, Sequence[Any]] = {"train": _read_rows(train, "train_dataset", args)}
    if evaluated is None:
        return splits, []
    if not isinstance(evaluated, Mapping):
        return {**splits, "test": _read_rows(evaluated, "eval_dataset", args)}, []
    sets = {str(name): _read_rows(rows, f"eval_dataset[{name!r}]", args) for name, rows in evaluated.items()}
    names = [name for name, rows in sets.items() for _ in range(len(rows))]
    return {**splits, "test": [row for rows in sets.values() for row in rows]}, names


def _read_rows(rows: Any, name: str, args: GRPOConfig) -> Sequence[Any]:
    """Read a stream into rows, for training as many as the run takes."""
    if hasattr(rows, "__len__") and not isinstance(rows, str | Mapping):
        return rows
    if not isinstance(rows, Iterable) or isinstance(rows, str | Mapping):
        raise ValueError(f"{name} must be a Dataset or rows, got a {type(rows).__name__}")
    if name != "train_dataset":
        return list(rows)
    if args.max_steps <= 0:
        raise ValueError(f"{name} is a stream, so max_steps must say how long to train, got {args.max_steps}")
    return list(islice(rows, math.prod(batches(args, 0))))


def rows_of_reset(args: GRPOConfig) -> list[dict[str, Any]]:
    """Make empty rows for a run whose prompts `reset` supplies."""
    if args.max_steps <= 0:
        raise ValueError(f"without a train_dataset max_steps must say how long to train, got {args.max_steps}")
    return [{} for _ in range(math.prod(batches(args, 0)))]
