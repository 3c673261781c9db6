"""The journal: answers and verdicts since the last checkpoint, on disk.

    journal/step-000012.0.log       of the process of rank 0, while the weights after 12 steps were the newest
      9f3c...  1764400000.25  4be1...  completion 3  {"token_ids": ..., "logprobs": ..., ...}

A line has a checksum of what follows it, the time, the key of its group, what it is, and JSON. A group is known by its
prompt, its sampling (with the seed) and the weights that it is sampled on, and these decide all that is drawn; so a
resumed run asks for the same groups, finds them here and does not sample again. A line is handed to the system at once,
so that a killed process loses none, and reaches the disk within `SYNC_SECONDS`, for power cuts. An unfinished answer
comes in pieces, its new tokens every second: the engine draws them again, many in a pass. A checkpoint ends the use of
older files, which are deleted.
"""

import hashlib
import json
import logging
import os
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, is_dataclass, replace
from pathlib import Path
from typing import Any

import xxhash

from covey.rollouts.attempt import Attempt
from covey.rollouts.saved.plain import Piece, SavedGroup, check_tokens, from_plain, to_plain
from covey.system.disk import WriteError, cannot_write, catch_write_errors, read_regular, sync
from covey.system.jsonl import MAX_BYTES, JsonlWriter
from covey.types import Completion, Failure, Prompt, Reward, Sampling

LOGGER = logging.getLogger(__name__)

SYNC_SECONDS = 1.0
"""Seconds between two syncs to the disk, and between two signs of life."""
NAME = re.compile(r"step-(\d{6,12})\.(\d{1,6})\.log")
KINDS: dict[str, Any] = {
    "begin": None,
    "piece": Piece,
    "completion": Completion,
    "attempt": Attempt | Failure,
    "verdicts": tuple[Reward | Failure, ...],
    "group": SavedGroup,
    "metrics": Mapping[str, float],
    "end": None,
}
"""Types of the values by kind of line; a group has one line at its begin, and one at its end."""


@dataclass(frozen=True, slots=True)
class JournalLine:
    """A line of a file that verified."""

    seconds: float
    key: str
    kind: str
    number: int
    content: bytes


@dataclass(frozen=True)
class KeptGroup:
    """The known parts of a group, and a listener for new ones."""

    completions: dict[int, Completion] = field(default_factory=dict)
    attempts: dict[int, Attempt | Failure] = field(default_factory=dict)
    begun: dict[int, tuple[int, ...]] = field(default_factory=dict)
    """Tokens so far of unfinished completions."""
    verdicts: tuple[Reward | Failure, ...] = ()
    whole: SavedGroup | None = None
    """All of it, where other processes sampled it."""
    tell: "Callable[[str, int, Any], None] | None" = None
    """Told of the kind, sample index and value of each new part; None without a journal."""

    def add(self, kind: str, number: int = 0, value: Any = None) -> None:
        """Keep a new part, and tell of it."""
        if self.tell is not None:
            of_kind: dict[str, dict[int, Any]] = {"completion": self.completions, "attempt": self.attempts}
            of_kind.get(kind, {})[number] = value
            self.tell(kind, number, value)

    def add_begun(self, number: int, token_ids: Sequence[int]) -> None:
        """Tell of an unfinished completion's new tokens."""
        start = len(self.begun.get(number, ()))
        if len(token_ids) > start:
            self.begun[number] = tuple(token_ids)
            self.add("piece", number, Piece(start, self.begun[number][start:]))


NOTHING_KEPT = KeptGroup()


class RolloutJournal:
    """Answers and verdicts of one process, and those of its predecessors."""

    def __init__(
        self,
        folder: Path,
        identity: str,
        vocabulary: int,
        place: tuple[int, int] = (0, 1),
        *,
        step: int = 0,
        wait: bool = False,
    ) -> None:
        """Read the files since step `step`, and delete older ones.

        `identity` tells settings, prompts and code apart, `vocabulary` bounds the tokens. `place` is the rank of this
        process, and how many there are. With `wait` a disk that refuses lines does not end the run (`JsonlWriter`).
        """
        self.folder, self.step = folder, step
        self._identity, self._vocabulary, self._wait = identity, vocabulary, wait
        self._rank, self._num_ranks = place
        self._known: dict[str, list[JournalLine]] = {}
        self._lock = threading.Lock()
        self._news = threading.Event()
        self._lines: list[tuple[int, bytes]] = []
        self._writer: tuple[int, Path, JsonlWriter] | None = None
        self._synced, self._is_dirty, self._is_closed = time.monotonic(), False, False
        self._error: OSError | None = None
        self._looks = 0
        """Looks at the environment's metrics since these weights came."""
        self.forget_before(step)
        until = 0.0
        for path in journal_files(folder):
            until = max(until, path.stat().st_mtime)
            for line in _read(path, cuts=_place(path)[1] == self._rank):
                self._known.setdefault(line.key, []).append(line)
        self.found = _describe(self._known, identity, until)
        """Description of the lines found; empty without any."""
        self._thread = threading.Thread(target=self._run, name="journal", daemon=True)
        self._thread.start()

    def begin(self, step: int) -> None:
        """Begin the file of the weights after `step` steps."""
        self.step, self._looks = step, 0

    def group(self, place: str, prompt: Prompt, sampling: Sampling) -> KeptGroup:
        """Return the known parts of a group. WriteError for a failed disk.

        `place` tells groups of one prompt and seed apart that are sampled on different weights.
        """
        self._check()
        key = self._key(place, prompt.id, repr(replace(sampling, first_sample=0)))
        found: dict[str, dict[int, Any]] = {kind: {} for kind in KINDS}
        begun: dict[int, tuple[int, ...]] = {}
        for line in self._known.pop(key, ()):
            found[line.kind] |= (value := self._value(line))
            if line.kind == "piece":
                begun |= {number: piece.after(begun.get(number, ())) for number, piece in value.items()}

        def tell(kind: str, number: int, value: Any) -> None:
            self._write(key, kind, number, value)

        if not found["begin"]:
            tell("begin", 0, None)
        verdicts, whole = found["verdicts"].get(0, ()), found["group"].get(0)
        return KeptGroup(found["completion"], found["attempt"], begun, verdicts, whole, tell)

    def metrics(self, measured: dict[str, float]) -> dict[str, float]:
        """Return an environment's metrics of this look, else those `measured` now."""
        key, self._looks = self._key("metrics", f"{self.step}/{self._rank}"), self._looks + 1
        known = {line.number: line for line in self._known.get(key, ())}
        if self._looks in known and (found := self._value(known[self._looks])):
            return dict(found[self._looks])
        self._write(key, "metrics", self._looks, measured)
        return measured

    def forget_before(self, step: int) -> None:
        """Delete the files of fewer than `step` steps, which a checkpoint holds."""
        with self._lock:
            self._flush()
            if self._writer is not None and self._writer[0] < step:
                self._writer[2].close()
                self._writer = None
            for path in journal_files(self.folder):
                written, rank = _place(path)
                if written < step and rank % self._num_ranks == self._rank:
                    path.unlink(missing_ok=True)
            if step > self.step:
                with suppress(OSError):
                    self.folder.rmdir()

    def close(self) -> None:
        """Write what is left. WriteError where the disk refuses."""
        self._is_closed = True
        self._news.set()
        self._thread.join()
        with self._lock:
            self._flush()
            if self._writer is not None:
                self._writer[2].close()
                with catch_write_errors(self._writer[1]):
                    sync(self._writer[1])
                self._writer = None
        self._check()

    def _key(self, *parts: str) -> str:
        text = "\0".join((self._identity, *parts)).encode("utf-8", "surrogatepass")
        return self._identity[:8] + hashlib.blake2b(text, digest_size=12).hexdigest()

    def _check(self) -> None:
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def _value(self, line: JournalLine) -> dict[int, Any]:
        """Return a line's value by its number, nothing of a damaged one."""
        kind = KINDS[line.kind]
        try:
            plain = json.loads(line.content, parse_constant=_refuse)
            value: Any = True if kind is None else from_plain(kind, plain)
            for one in value if line.kind == "verdicts" else (value,):
                check_tokens(one, self._vocabulary)
        except (ValueError, RecursionError, OverflowError) as error:
            LOGGER.warning("a line of %s is no %s (%.100s): it is sampled again", self.folder, line.kind, error)
            return {}
        return {line.number: value}

    def _write(self, key: str, kind: str, number: int, value: Any) -> None:
        plain = [*map(to_plain, value)] if kind == "verdicts" else to_plain(value) if is_dataclass(value) else value
        text = f"{time.time():.3f} {key} {kind} {number} {json.dumps(plain)}".encode()
        line = f"{xxhash.xxh3_64_hexdigest(text)} ".encode() + text + b"\n"
        with self._lock:
            self._lines.append((self.step, line))
        self._news.set()

    def _run(self) -> None:
        """Write lines at once, and touch the file as a heartbeat."""
        while not self._is_closed:
            self._news.wait(SYNC_SECONDS)
            self._news.clear()
            with self._lock:
                self._flush()
            if self._is_dirty and time.monotonic() - self._synced >= SYNC_SECONDS:
                self._sync()

    def _flush(self) -> None:
        lines, self._lines = self._lines, []
        try:
            for step in sorted({step for step, _ in lines}):
                self._open(step).write_line(b"".join(line for own, line in lines if own == step))
                self._is_dirty = True
            if self._writer is not None and not lines:
                os.utime(self._writer[1])
        except OSError as error:
            self._error = error if isinstance(error, WriteError) else cannot_write(self.folder, error)

    def _sync(self) -> None:
        self._synced, self._is_dirty = time.monotonic(), False
        with suppress(OSError):  # the next write says so
            if (writer := self._writer) is not None:
                sync(writer[1])

    def _open(self, step: int) -> JsonlWriter:
        if self._writer is None or self._writer[0] != step:
            if self._writer is not None:
                self._writer[2].close()
            self.folder.mkdir(exist_ok=True)  # never its parents, as with checkpoints
            path = self.folder / f"step-{step:06d}.{self._rank}.log"
            self._writer = (step, path, JsonlWriter(path, wait=self._wait))
        return self._writer[2]


def journal_files(folder: Path) -> list[Path]:
    """Return the files of a journal, oldest first."""
    return sorted((path for path in folder.glob("step-*.log") if NAME.fullmatch(path.name)), key=_place)


def _place(path: Path) -> tuple[int, int]:
    """Return the step and the rank of a file."""
    found = NAME.fullmatch(path.name)
    assert found is not None
    return int(found[1]), int(found[2])


def _read(path: Path, *, cuts: bool) -> Iterator[JournalLine]:
    """Yield the lines that verify, with a warning of others.

    A torn end is no damage; it is cut off where this process writes on.
    """
    content = read_regular(path, MAX_BYTES)
    whole, _, torn = content.rpartition(b"\n")
    if torn and cuts:
        os.truncate(path, len(content) - len(torn))
    lines = whole.split(b"\n") if whole else []
    found = [_line(line) for line in lines]
    if bad := [number for number, line in enumerate(found, 1) if line is None]:
        what = f"line {bad[0]} of {path}" + (f" and {len(bad) - 1} more" if len(bad) > 1 else "")
        LOGGER.warning("%s: damaged (the checksum differs); what it held is sampled again", what)
    yield from (line for line in found if line is not None)


def _line(line: bytes) -> JournalLine | None:
    checksum, _, rest = line.partition(b" ")
    if checksum != xxhash.xxh3_64_hexdigest(rest).encode():
        return None
    try:
        seconds, key, kind, number, content = rest.split(b" ", 4)
        made = JournalLine(float(seconds), key.decode(), kind.decode(), int(number), content)
    except ValueError:
        return None
    return made if made.kind in KINDS else None


def _describe(known: Mapping[str, Sequence[JournalLine]], identity: str, until: float) -> str:
    """Describe what was found, `until` the last sign of life."""
    if known and not any(key.startswith(identity[:8]) for key in known):
        return "the journal was written with other settings, prompts or code and is not used"
    groups = [{line.kind for line in lines} for lines in known.values()]
    lines = [line for of_group in known.values() for line in of_group]
    if not any("begin" in kinds for kinds in groups):
        return ""
    answers = sum(line.kind in ("completion", "attempt", "group") for line in lines)
    is_open = any("begin" in kinds and "end" not in kinds for kinds in groups)
    lost = max(0.0, until - max(line.seconds for line in lines)) if is_open else 0.0
    whole, begun = (sum(kind in kinds for kinds in groups) for kind in ("end", "begin"))
    held = f"{answers} answers, and {whole} of {begun} groups whole (an evaluated prompt has two)"
    kept = f"{held}: they are not sampled again" if answers else "no finished answer"
    return f"the journal holds {kept}; {lost:.1f} s of sampling are lost"


def _refuse(name: str) -> None:
    raise ValueError(f"{name} is no number of a run's")
