"""Write traces.jsonl and updates.jsonl, bounded in bytes."""

import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import compress
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from covey.algorithm.credit.groups import Credit
from covey.rollouts.source import Dropped
from covey.run.build import Run
from covey.run.folder import TRACES, UPDATES
from covey.run.records.rollout_log import bound_columns, episode_facts, spread
from covey.system import collectives
from covey.system.jsonl import JsonlWriter, encode_row
from covey.system.text.format import four_digits, timestamp
from covey.types import Group, Rollout
from covey_report.traces.token_scores import RowScores, StepScores, TokenScores, TrainedRow
from covey_report.traces.updates import FORMAT, fitting, update_row

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


MAX_CHARACTERS = 20_000
"""Maximum characters of a prompt or a completion."""
TOKEN_BYTES = 90
"""Approximate bytes of a token with its numbers."""
LEAST_TOKENS = 16
BROKEN, MAX_BYTES = "\ufffd", 4
"""Replacement that part of a character is decoded to, and most tokens of a character: a byte each."""


@dataclass(frozen=True, slots=True)
class TraceGroup:
    """A group of a step, and the reasons to choose it."""

    group: Group
    advantages: Sequence[float] | None
    """None where it was not trained."""
    dropped: str | None
    """Reason for that."""
    gap: float = 0.0
    """Largest |trainer - sampler| of a log-prob in it, nats."""
    log_ratio: float = 0.0
    """Largest |log ratio| in it."""

    @property
    def reward_spread(self) -> float:
        rewards = [reward for reward in self.group.rewards if math.isfinite(reward)]
        return max(rewards) - min(rewards) if rewards else 0.0


REASONS: Mapping[str, Callable[[TraceGroup], float]] = {
    "a failure": lambda one: float(len(one.group.failures)),
    "largest spread of rewards": lambda one: one.reward_spread,
    "largest mismatch": lambda one: one.gap,
    "largest change of ratio": lambda one: one.log_ratio,
}
"""Reasons to trace a group, in this order: the group with the largest value, if above 0."""
EVENLY = "evenly spread"


def candidates(
    groups: Sequence[Group], credit: Credit, dropped: Sequence[Dropped], scores: StepScores
) -> list[TraceGroup]:
    """List this rank's groups of a step, trained ones first."""
    largest = scores.largest()
    trained = [
        TraceGroup(group, advantages, None, *largest.get(group.prompt.id, (0.0, 0.0)))
        for group, advantages in zip(groups, credit.advantages, strict=True)
    ]
    return trained + [TraceGroup(one.group, None, one.reason) for one in dropped]


def choose(found: Sequence[TraceGroup], most: int) -> list[tuple[TraceGroup, str]]:
    """Choose at most `most` groups with reasons, special ones first."""
    left = list(found)
    chosen: list[tuple[TraceGroup, str]] = []
    for reason, size in REASONS.items():
        best = max(left, key=size, default=None)
        if len(chosen) < most and best is not None and size(best) > 0:
            chosen.append((best, reason))
            left = [one for one in left if one is not best]
    return chosen + [(left[place], EVENLY) for place in spread(len(left), most - len(chosen))]


def trace_rows(
    step: int, chosen: Sequence[tuple[TraceGroup, str]], trained: Sequence[TrainedRow], pieces: "Speller", room: int
) -> Iterator[dict[str, Any]]:
    """Yield the chosen groups' lines, with rows `trained` anywhere. Long answers are cut to `room` bytes in all."""
    num_rollouts = sum(len(one.group.rollouts) for one, _ in chosen)
    limit = max(LEAST_TOKENS, room // (TOKEN_BYTES * max(num_rollouts, 1)))
    rows = list(trained)
    for one, reason in chosen:
        yield _group_row(step, one, reason) | {"rollouts": [*_rollouts(one, rows, pieces, limit)]}


def _group_row(step: int, one: TraceGroup, reason: str) -> dict[str, Any]:
    prompt = one.group.prompt
    text = prompt.text[:MAX_CHARACTERS] if isinstance(prompt.text, str) else [dict(turn) for turn in prompt.text]
    return {
        "format": FORMAT,
        "step": step,
        "kind": "train",
        "time": timestamp(),
        "reason": reason,
        "environment": prompt.environment,
        "prompt_id": prompt.id,
        "prompt": text,
        "columns": bound_columns(prompt.columns),
        "dropped": one.dropped,
        "failures": [failure.reason for failure in one.group.failures],
    }


def _rollouts(one: TraceGroup, rows: list[TrainedRow], pieces: "Speller", limit: int) -> Iterator[dict[str, Any]]:
    """Yield a group's answers, consuming their trained rows."""
    advantages: Sequence[float | None] = one.advantages or [None] * len(one.group.rollouts)
    for rollout, advantage in zip(one.group.rollouts, advantages, strict=True):
        key = one.group.prompt.id, tuple(compress(rollout.target_ids, rollout.loss_mask))
        place = next((place for place, row in enumerate(rows) if row[:2] == key), None)
        scores = None if place is None or one.dropped else rows.pop(place)[2]
        yield {
            "completion": [dict(turn) for turn in rollout.messages] or rollout.text[:MAX_CHARACTERS],
            "reward": rollout.reward.value,
            "parts": dict(rollout.reward.parts),
            "extra": bound_columns({str(name): value for name, value in rollout.reward.extra.items()}),
            "advantage": None if advantage is None else four_digits(advantage),
            "finish_reason": rollout.finish_reason,
            "policy_version": rollout.policy_version,
            "num_tokens": rollout.num_loss_tokens,
            **episode_facts(rollout),
            "tokens": _tokens(rollout, scores, pieces, limit),
        }


def _tokens(rollout: Rollout, scores: RowScores | None, pieces: "Speller", limit: int) -> dict[str, Any]:
    """Return the first `limit` tokens, with numbers, null for given tokens."""
    ids, places = _sequence(rollout)

    def along(values: Iterable[float]) -> list[float | None]:
        found: list[float | None] = [None] * len(ids)
        for place, value in zip(places, values, strict=True):
            found[place] = four_digits(value)
        return found[:limit]

    chosen = set(places)
    own = [value for value, is_own in zip(rollout.sampler_logprobs, rollout.loss_mask, strict=True) if is_own]
    return {
        "ids": ids[:limit],
        "pieces": pieces(ids[:limit]),
        "learnt": [place in chosen for place in range(len(ids[:limit]))],
        "sampler_logprob": along(own),
        "trainer_logprob": None if scores is None else along(scores.trainer_logprob),
        "ratio": None if scores is None else along(scores.ratio),
        "entropy": None if scores is None or scores.entropy is None else along(scores.entropy),
        "kl": None if scores is None or scores.kl is None else along(scores.kl),
    }


def _sequence(rollout: Rollout) -> tuple[list[int], list[int]]:
    """Return an answer's tokens, and the policy's places, in loss order.

    For a masked policy these are the filled input; for branches, each from its first own token.
    """
    chosen = [position for position, is_own in enumerate(rollout.loss_mask) if is_own]
    if rollout.input_length is None:
        starts = [next((p for p in chosen if start <= p < end), end) for start, end in rollout.sequences]
        ends = [end for _, end in rollout.sequences]
        shown = [p for start, end in zip(starts, ends, strict=True) for p in range(start, end)]
        place_of = {position: place for place, position in enumerate(shown)}
        return [rollout.target_ids[p] for p in shown], [place_of[position] for position in chosen]
    ids = list(rollout.input_ids[-rollout.input_length :])
    places = [position % rollout.input_length for position in chosen]
    for place, position in zip(places, chosen, strict=True):
        ids[place] = rollout.target_ids[position]
    return ids, places


class Speller:
    """Decodes tokens one by one, special ones by name."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self._known: dict[tuple[int, int], str] = {}

    def __call__(self, ids: Sequence[int]) -> list[str]:
        """Return each token's text; the last one of a character has it."""
        found = [self._after(before, token_id) for before, token_id in zip([*ids[:1], *ids], ids, strict=False)]
        start = 0
        while start < len(found):
            end = self._end_of_character(ids, start) if BROKEN in found[start] else start + 1
            if end > start + 1:
                found[start:end] = [*[""] * (end - start - 1), self._decode(list(ids[start:end]))]
            start = end
        return found

    def _end_of_character(self, ids: Sequence[int], start: int) -> int:
        """Return the end of the tokens that form whole characters."""
        ends = range(start + 2, min(start + MAX_BYTES, len(ids)) + 1)
        return next((end for end in ends if BROKEN not in self._decode(list(ids[start:end]))), start + 1)

    def _after(self, before: int, token_id: int) -> str:
        key = before, token_id
        if key not in self._known:
            # After another token, as some tokenizers leave out the blank before the first
            whole, start = self._decode([before, token_id]), self._decode([before])
            self._known[key] = whole[len(start) :] if whole.startswith(start) else self._decode([token_id])
        return self._known[key]

    def _decode(self, ids: list[int]) -> str:
        return str(self._tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))
