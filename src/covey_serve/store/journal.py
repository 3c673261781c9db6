"""An append-only file of records with checksums.

A record is a header of JSON and a body of bytes. A process that is killed leaves at most a torn last record, which is
cut when the file is opened. The file grows until `compact` copies what is still needed into a new one.
"""

import json
import logging
import mmap
import os
import struct
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash

from covey.system.disk import sync

LOGGER = logging.getLogger(__name__)
FRAME = struct.Struct("<4sIIQ")
MAGIC = b"CVJ1"
Header = dict[str, Any]


@dataclass(frozen=True, slots=True)
class RecordPlace:
    """A record in the file."""

    start: int
    length: int


class RequestJournal:
    """Appends records, and reads them by place. Used by one thread."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path = path
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        self.size = os.fstat(self._file).st_size
        self.compacted = 0
        """Bytes after the last compaction."""

    def records(self) -> Iterator[tuple[RecordPlace, Header]]:
        """Yield all records, and cut a torn end off."""
        start = 0
        while (found := self._record(start)) is not None:
            yield found[0], found[1]
            start += found[0].length
        if start < self.size:
            self._check_end(start)
            LOGGER.warning("%s: %d bytes at its end are no whole record and were cut", self._path, self.size - start)
            os.ftruncate(self._file, start)
            self.size = start

    def _check_end(self, start: int) -> None:
        """Refuse to cut whole records off. ValueError where one follows `start`."""
        with mmap.mmap(self._file, 0, prot=mmap.PROT_READ) as content:
            place = start
            while (place := content.find(MAGIC, place + 1)) >= 0:
                if self._record(place) is not None:
                    raise ValueError(
                        f"{self._path} is damaged at byte {start}, and whole records follow: restore it, give up what "
                        f"follows (truncate -s {start} {self._path}), or name another folder with --to"
                    )

    def append(self, header: Mapping[str, Any], body: bytes = b"") -> RecordPlace:
        """Write a record through. OSError leaves the file unchanged."""
        raw = _frame(header, body)
        written = 0
        try:
            while written < len(raw):
                written += os.pwrite(self._file, raw[written:], self.size + written)
        except OSError:
            os.ftruncate(self._file, self.size)
            raise
        place = RecordPlace(self.size, len(raw))
        self.size += len(raw)
        return place

    def read(self, place: RecordPlace) -> tuple[Header, bytes]:
        found = self._record(place.start)
        if found is None:
            raise OSError(f"{self._path} is damaged at byte {place.start}")
        return found[1], found[2]

    def sync(self) -> None:
        """Wait until the disk has all records."""
        os.fdatasync(self._file)

    def compact(self, kept: Iterable[tuple[Header, RecordPlace | None]]) -> list[RecordPlace]:
        """Rewrite the file with these headers and their old bodies. Return the new places, in order."""
        aside = self._path.with_name(f"{self._path.name}.new")
        aside.unlink(missing_ok=True)
        other = RequestJournal(aside)
        try:
            places = [other.append(header, b"" if old is None else self.read(old)[1]) for header, old in kept]
            other.sync()
            os.replace(aside, self._path)
        except BaseException:
            os.close(other._file)
            aside.unlink(missing_ok=True)
            raise
        os.close(self._file)
        self._file, self.size, self.compacted = other._file, other.size, other.size
        try:
            sync(self._path.parent)
        except OSError as error:  # the new file is the journal all the same
            LOGGER.warning("%s: its folder could not be synced (%s)", self._path, error.strerror)
        return places

    def close(self) -> None:
        self.sync()
        os.close(self._file)

    def _record(self, start: int) -> tuple[RecordPlace, Header, bytes] | None:
        head = os.pread(self._file, FRAME.size, start)
        if len(head) < FRAME.size:
            return None
        magic, header_length, body_length, digest = FRAME.unpack(head)
        length = FRAME.size + header_length + body_length
        if magic != MAGIC or start + length > self.size:
            return None
        raw = os.pread(self._file, header_length + body_length, start + FRAME.size)
        if xxhash.xxh3_64_intdigest(raw) != digest:
            return None
        return RecordPlace(start, length), json.loads(raw[:header_length]), raw[header_length:]


def _frame(header: Mapping[str, Any], body: bytes) -> bytes:
    head = json.dumps(header, separators=(",", ":")).encode()
    return FRAME.pack(MAGIC, len(head), len(body), xxhash.xxh3_64_intdigest(head + body)) + head + body
