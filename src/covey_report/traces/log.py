"""Write traces.jsonl and updates.jsonl, bounded in bytes."""

import logging
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from covey.algorithm.credit.groups import Credit
from covey.rollouts.source import Dropped
from covey.run.build import Run
from covey.run.folder import TRACES, UPDATES
from covey.system import collectives
from covey.system.jsonl import JsonlWriter, encode_row
from covey.types import Group
from covey_report.traces.rows import Speller, TraceGroup, candidates, choose, trace_rows
from covey_report.traces.token_scores import StepScores, TokenScores, TrainedRow
from covey_report.traces.updates import fitting, update_row

LOGGER = logging.getLogger(__name__)
ABOUT = 20
"""Steps that are traced where output.trace_every is null."""


class TraceLog:
    """Writes the report's data; every rank has one, rank 0's writes."""

    def __init__(self, folder: Path, run: Run) -> None:
        self._config = run.config
        self._folder = folder
        self._scores = TokenScores()
        run.trainer.observer = self._scores.see
        self._pieces = Speller(run.policy.tokenizer)
        self._files: tuple[BoundedLog, BoundedLog] | None = None

    def step(self, step: int, groups: Sequence[Group], credit: Credit, dropped: Sequence[Dropped]) -> None:
        """Write a finished step. Collective."""
        scores, output, num_steps = self._scores.take(), self._config.output, self._config.num_steps
        row = update_row(step, groups, credit, scores, self._config.sampling.max_tokens)
        every = output.trace_every or -(-num_steps // ABOUT)
        # Choose groups of rank 0 to be written whole. Other ranks may have trained answers of them
        chosen: list[tuple[TraceGroup, str]] = []
        trained: list[TrainedRow] = []
        if is_traced(step, num_steps, every):
            chosen = choose(candidates(groups, credit, dropped, scores), output.traced_groups)
            trained = rows_of_ranks([one.group.prompt.id for one, _ in chosen if one.dropped is None], scores)
        if not collectives.is_main_process():
            return
        self._files = self._files or self._open()
        updates, traces = self._files
        share = updates.share(num_steps - step + 1)
        updates.write(row | {"groups": fitting(row["groups"], share)}, share)
        num_bytes = traces.share(1 + -(-(num_steps - step) // every)) if chosen else 0
        for row in trace_rows(step, chosen, trained, self._pieces, num_bytes):
            num_bytes -= traces.write(row, num_bytes)

    def _open(self) -> "tuple[BoundedLog, BoundedLog]":
        most, wait = self._config.output.max_trace_bytes, self._config.output.on_write_error == "continue"
        return tuple(BoundedLog(self._folder / name, most, wait=wait) for name in (UPDATES, TRACES))  # type: ignore[return-value] # two names

    def close(self) -> None:
        with ExitStack() as closing:  # both, also where one raises
            for file in self._files or ():
                closing.callback(file.close)


def rows_of_ranks(prompt_ids: Sequence[str], scores: StepScores) -> list[TrainedRow]:
    """Return the trained rows of rank 0's `prompt_ids`. Collective."""
    if collectives.world_size() == 1:
        return list(scores.rows(prompt_ids))
    wanted: list[list[str]] = collectives.all_gather(list(prompt_ids))
    of_ranks: list[list[TrainedRow]] = collectives.all_gather(list(scores.rows(wanted[0])))
    return [row for of_rank in of_ranks for row in of_rank]


class BoundedLog:
    """A file of rows bounded in bytes, over restarts too."""

    def __init__(self, path: Path, most: int, *, wait: bool) -> None:
        self._path = path
        self._file = JsonlWriter(path, wait=wait)
        self._left = most - path.stat().st_size
        self._is_full = False

    def share(self, count: int) -> int:
        """Return the remaining bytes for each of `count` times."""
        return max(0, self._left) // max(1, count)

    def write(self, row: dict[str, Any], most: int) -> int:
        """Write a row of at most `most` bytes; return its size."""
        line = encode_row(row)
        num_bytes = len(line)
        if num_bytes > most:
            if not self._is_full:
                LOGGER.info("%s has no room for %d bytes here (output.max_trace_bytes)", self._path, num_bytes)
            self._is_full = True
            return 0
        self._left -= num_bytes
        self._file.write_line(line)
        return num_bytes

    def close(self) -> None:
        self._file.close()


def is_traced(step: int, num_steps: int, every: int) -> bool:
    """Return True for the first, the last and every `every`-th step."""
    return step in (1, num_steps) or step % every == 0
