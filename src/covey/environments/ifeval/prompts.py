"""Where prompts come from: the generator, rows of IFEval's form, and a benchmark that is only evaluated on."""

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from covey.environments.base import Split, conversation
from covey.environments.data.rows import RowSettings, load_rows
from covey.environments.ifeval.generator import Request
from covey.environments.ifeval.instructions import instructions_of
from covey.types import Prompt

Row = Mapping[str, Any]

BENCHMARK_KEYS = range(1000, 3758)
"""Keys of the benchmark's 541 prompts lie here."""
COLUMNS = ("prompt", "instruction_id_list", "kwargs")

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Source:
    """Rows to read, and how."""

    path: str | None = None
    """Rows of both splits; None generates prompts."""
    benchmark: str | None = None
    """Rows to evaluate on instead of the test split."""
    settings: RowSettings = field(default_factory=RowSettings)
    """How the rows at `path` are read."""


def load(
    source: Source, generated: Callable[[], Mapping[Split, Sequence[Prompt]]], instruction: str
) -> dict[Split, list[Prompt]]:
    """Return the prompts of both splits. Where they are read, training on the benchmark itself is warned of.

    `instruction` is what the system message says, "" for none. ValueError for rows the user must fix.
    """
    benchmark = _benchmark_rows(source) if source.benchmark is not None else []
    if source.path is None:
        found = {split: list(prompts) for split, prompts in generated().items()}
    else:
        rows = load_rows(source.path, source.settings).splits
        train = apart(rows["train"], benchmark, str(source.benchmark))
        warn_of_benchmark(train, source.path)
        found = {"train": from_rows(train, "train", instruction), "test": from_rows(rows["test"], "test", instruction)}
    return {**found, "test": _only_measured(from_rows(benchmark, "test", instruction))} if benchmark else found


def _only_measured(prompts: Sequence[Prompt]) -> list[Prompt]:
    """Mark prompts that nothing is trained on: every answer to them is judged by its form alone."""
    return [replace(prompt, columns={**prompt.columns, "is_benchmark": True}) for prompt in prompts]


def _benchmark_rows(source: Source) -> list[Row]:
    """Return all rows, whatever splits they come in, in the order of their keys where they have some."""
    how = RowSettings(columns=COLUMNS, check=source.settings.check, bad_rows=source.settings.bad_rows)
    splits = load_rows(source.benchmark, how).splits
    rows = [row for split in ("train", "test") for row in splits[split]]
    return sorted(rows, key=lambda row: row["key"]) if all(isinstance(row.get("key"), int) for row in rows) else rows


def from_requests(requests: Iterable[Request], split: Split, style: str, instruction: str = "") -> list[Prompt]:
    """Make prompts of generated requests."""
    return [
        Prompt(f"{split}-{index}", "ifeval", conversation(request.text, instruction), _columns(request, style))
        for index, request in enumerate(requests)
    ]


def _columns(request: Request, style: str) -> dict[str, Any]:
    return {
        "topic": request.topic,
        "style": style,
        "instruction_id_list": list(request.instruction_id_list),
        "kwargs": list(request.kwargs),
    }


def from_rows(rows: Sequence[Row], split: Split, instruction: str = "") -> list[Prompt]:
    """Make prompts of rows of IFEval's form (prompt, instruction_id_list, kwargs, key), null arguments dropped.

    ValueError that names the row where a column is missing or an instruction makes no sense.
    """
    prompts = []
    for index, row in enumerate(rows):
        # Parse the instructions
        try:
            asked = instructions_of(row["instruction_id_list"], row["kwargs"])
        except KeyError as error:
            raise ValueError(f"{split} row {index} has no column {error} (has: {', '.join(row)})") from error
        except ValueError as error:
            raise ValueError(f"{split} row {index}: {error}") from error
        # Keep as columns what judging needs
        columns = {
            "key": row.get("key"),
            "instruction_id_list": [wanted.id for wanted in asked],
            "kwargs": [dict(wanted.arguments) for wanted in asked],
        }
        prompts.append(Prompt(f"{split}-{index}", "ifeval", conversation(row["prompt"], instruction), columns))
    return prompts


def warn_of_benchmark(rows: Sequence[Row], path: str) -> None:
    """Say in the log that training rows are the benchmark itself.

    They are taken for it where they are read from a data set called IFEval, or have instruction ids and a whole `key`
    from 1000 to 3757, as its 541 prompts do.
    """
    named = path.rstrip("/").rpartition("/")[2].lower() == "ifeval"
    num_alike = len(rows) if named else sum(_has_benchmark_key(row) for row in rows)
    if num_alike:
        _log.warning(
            "%d of %d training rows of %s look like IFEval's own 541 prompts: scores on that benchmark will mean "
            "nothing; train on generated prompts (data.path=null) and name it in environment.benchmark",
            *(num_alike, len(rows), path),
        )


def _has_benchmark_key(row: Row) -> bool:
    key = row.get("key")
    return isinstance(key, int) and not isinstance(key, bool) and key in BENCHMARK_KEYS


def apart(train: Sequence[Row], benchmark: Sequence[Row], path: str) -> list[Row]:
    """Return the training rows whose prompt is not in the benchmark that the run is evaluated on."""
    texts = {" ".join(str(row["prompt"]).split()) for row in benchmark}
    kept = [row for row in train if " ".join(str(row["prompt"]).split()) not in texts]
    if len(kept) < len(train):
        _log.warning("%d training rows left out: their prompts are in %s", len(train) - len(kept), path)
    return kept
