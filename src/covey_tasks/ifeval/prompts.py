"""Load prompts: generated, from rows, or a benchmark for evaluation alone."""

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from covey.environments.base import SPLITS, Split, conversation, text_of
from covey.environments.data.columns import VERLS, from_text, value_in
from covey.environments.data.rows import RowSettings, load_rows, make_prompts
from covey.system.lookup import read_table
from covey.types import Prompt
from covey_graders.ifeval.instructions import instructions_of
from covey_tasks.columns import list_in, text_in
from covey_tasks.ifeval.generator import Request

Row = Mapping[str, Any]

BENCHMARK_KEYS = range(1000, 3758)
"""Keys of the benchmark's 541 prompts lie here."""
COLUMNS = ("prompt", "instruction_id_list", "kwargs")

_log = logging.getLogger(__name__)


def load(
    path: str | None,
    benchmark_path: str | None,
    how: RowSettings,
    generated: Callable[[], Mapping[Split, Sequence[Prompt]]],
) -> dict[Split, list[Prompt]]:
    """Return both splits' prompts, with a warning if training uses the benchmark.

    Prompts are generated where `path` is None. ValueError for rows the user must fix.
    """
    benchmark = _benchmark_prompts(benchmark_path, how) if benchmark_path is not None else []
    if path is None:
        found = generated()
    else:
        read = load_rows(path, how).splits
        train = apart(read["train"], benchmark, str(benchmark_path))
        warn_of_benchmark(train, path)
        found = {"train": train, "test": read["test"]}
    return make_prompts({**found, "test": benchmark or found["test"]}, how.make)


def _benchmark_prompts(path: str, how: RowSettings) -> list[Prompt]:
    """Return all splits' prompts, ordered by key if they have keys.

    Nothing is trained on them: they are marked, and every answer to them is judged by its form alone.
    """
    settings = RowSettings(columns=COLUMNS, known=how.known, make=how.make, bad_rows=how.bad_rows)
    splits = load_rows(path, settings).splits
    prompts: list[Prompt] = [prompt for split in SPLITS for prompt in splits[split]]
    if all(isinstance(prompt.columns["key"], int) for prompt in prompts):
        prompts.sort(key=lambda prompt: prompt.columns["key"])
    return [replace(prompt, columns={**prompt.columns, "is_benchmark": True}) for prompt in prompts]


def from_requests(requests: Iterable[Request], split: Split, style: str, instruction: str = "") -> list[Prompt]:
    found: list[Prompt] = []
    for index, request in enumerate(requests):
        kinds, arguments = list(request.instruction_id_list), list(request.kwargs)
        columns = {"topic": request.topic, "style": style, "instruction_id_list": kinds, "kwargs": arguments}
        found.append(Prompt(f"{split}-{index}", "ifeval", conversation(request.text, instruction), columns))
    return found


def with_columns(row: Row) -> Row:
    """Return a row of verl or Tulu with IFEval's columns."""
    if row.get("prompt") is None:
        row = {**row, "prompt": row["messages"]} if "messages" in row else row
    truth = from_text(value_in(row, VERLS if VERLS.partition(".")[0] in row else "ground_truth"))
    truth = truth[0] if isinstance(truth, list) and len(truth) == 1 else truth
    if not isinstance(truth, Mapping):
        return row
    kinds, given = truth.get("instruction_id_list", truth.get("instruction_id")), truth.get("kwargs")
    if name := truth.get("func_name"):
        function = FUNCTIONS.get(name, {"kind": name})
        said = {ours: truth.get(theirs) for theirs, ours in function.get("names", {}).items()}
        kinds, given = [function["kind"]], [said | function.get("means", {})]
    return {**row, "instruction_id_list": kinds, "kwargs": given}


FUNCTIONS = read_table(Path(__file__).with_name("functions.yaml"))


def prompt_of(row: Row, instruction: str = "") -> Prompt:
    """Make a prompt of IFEval's row: prompt, instruction_id_list, kwargs, key.

    `instruction` is the system message's text, "" for none. ValueError where the row makes no sense.
    """
    asked = instructions_of(list_in(row, "instruction_id_list"), list_in(row, "kwargs"))
    columns = {
        "key": row.get("key"),
        "instruction_id_list": [wanted.id for wanted in asked],
        "kwargs": [dict(wanted.arguments) for wanted in asked],
    }
    return Prompt("ifeval", "ifeval", conversation(text_in(row, "prompt"), instruction), columns)


def warn_of_benchmark(prompts: Sequence[Prompt], path: str) -> None:
    """Say in the log that training rows are the benchmark itself.

    They are taken for it where they are read from a data set called IFEval, or have instruction ids and a whole `key`
    from 1000 to 3757, as its 541 prompts do.
    """
    named = path.rstrip("/").rpartition("/")[2].lower() == "ifeval"
    num_alike = len(prompts) if named else sum(_has_benchmark_key(prompt) for prompt in prompts)
    if num_alike:
        _log.warning(
            "%d of %d training rows of %s look like IFEval's own 541 prompts: scores on that benchmark will mean "
            "nothing; train on generated prompts (data.path=null) and name it in environment.benchmark",
            *(num_alike, len(prompts), path),
        )


def _has_benchmark_key(prompt: Prompt) -> bool:
    key = prompt.columns["key"]
    return isinstance(key, int) and not isinstance(key, bool) and key in BENCHMARK_KEYS


def apart(train: Sequence[Prompt], benchmark: Sequence[Prompt], path: str) -> list[Prompt]:
    texts = set(map(_words, benchmark))
    kept = [prompt for prompt in train if _words(prompt) not in texts]
    if len(kept) < len(train):
        _log.warning("%d training rows left out: their prompts are in %s", len(train) - len(kept), path)
    return kept


def _words(prompt: Prompt) -> str:
    said = prompt.text if isinstance(prompt.text, str) else text_of(prompt.text[-1])
    return " ".join(said.split())
