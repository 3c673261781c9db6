"""Write to failing disks with one-line errors."""

import errno
import logging
import os
import re
import select
import shutil
import stat
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TextIO

from covey.system.text.format import memory

LOGGER = logging.getLogger(__name__)


LEFTOVER_SECONDS = 86400.0
"""Seconds after which a half-written cache folder is abandoned."""


def cache_folder() -> str:
    """Return the folder of reproducible files: $COVEY_CACHE, else ~/.cache/covey."""
    return os.environ.get("COVEY_CACHE") or str(Path.home() / ".cache" / "covey")


class WriteError(OSError):
    """A file of the run cannot be written; the message has a remedy."""


def cannot_write(path: Path, error: BaseException) -> WriteError:
    """Build the error of a failed write.

    >>> cannot_write(Path("outputs/x/metrics.jsonl"), OSError(errno.EROFS, "Read-only file system"))
    WriteError('cannot write outputs/x/metrics.jsonl: Read-only file system; make its folder writable')
    """
    number = _number(error)
    reason = " ".join(str(error).split()) if number is None else os.strerror(number)
    remedy = REMEDIES.get(number or errno.ENOSPC, "see what the disk's system says")
    return WriteError(f"cannot write {path}: {reason}; {remedy.format(free=_free(path))}")


@contextmanager
def catch_write_errors(path: Path) -> Iterator[None]:
    """Turn the errors of libraries on a failing disk into WriteError."""
    try:
        yield
    except WriteError:
        raise
    except Exception as error:
        if not (isinstance(error, OSError) or bool(_RUST.search(str(error))) or _TORCH in str(error)):
            raise
        raise cannot_write(path, error) from error


@contextmanager
def only_warn(when: bool) -> Iterator[None]:
    """Log a WriteError instead of raising it, if another error goes first."""
    try:
        yield
    except WriteError as error:
        if not when:
            raise
        LOGGER.warning("%s", error)


@contextmanager
def ignore_stdout_errors() -> Iterator[None]:
    """Print nothing more once stdout breaks, instead of stopping the run.

    It breaks by a full disk behind `> log`, or a closed pipe.
    """
    try:
        yield
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if not isinstance(error, BrokenPipeError):
            LOGGER.warning("standard output cannot be written (%s); the run continues without it", error.strerror)


def leave_broken_stdout() -> bool:
    """Return True, and print nothing more, where stdout is a closed pipe."""
    looked = select.poll()
    looked.register(1, 0)  # errors are told in any case
    is_broken = bool(looked.poll(0))
    if is_broken:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    return is_broken


def sync(path: Path) -> None:
    """Sync a file's bytes or a directory's entries."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def atomic_folder(
    final: Path, *, family: str | None = None, max_age: float = 0.0, replaces: bool = False
) -> Iterator[Path]:
    """Yield a new folder, synced and renamed to `final` at the end.

    Leftovers of killed processes are removed first: {family}.tmp-* beside it (default: its own name), not written to
    for `max_age` seconds. An existing `final` is an OSError, unless this one `replaces` it. A failing disk is a
    WriteError.
    """
    _remove_leftovers(final.parent, f"{family or final.name}.tmp-*", max_age)
    with (
        catch_write_errors(final),
        tempfile.TemporaryDirectory(prefix=f"{final.name}.tmp-", dir=final.parent, ignore_cleanup_errors=True) as made,
        catch_write_errors(final),  # which tells the room there is before what was written goes
    ):
        aside = Path(made) / final.name
        aside.mkdir()
        yield aside
        # Sync files before the folders that name them, so that a power cut after the rename loses nothing
        for folder, _, files in os.walk(aside, topdown=False):
            for path in (*(Path(folder, name) for name in files), Path(folder)):
                sync(path)
        if replaces and final.exists():
            os.rename(final, Path(made) / BEFORE)
        os.rename(aside, final)
        sync(final.parent)


BEFORE = "before"


def put_back(folder: Path) -> None:
    """Restore the folders that `atomic_folder` was killed in replacing."""
    for before in folder.glob(f"*.tmp-*/{BEFORE}"):
        final = folder / before.parent.name.rpartition(".tmp-")[0]
        if not final.exists():
            os.rename(before, final)


def _remove_leftovers(folder: Path, pattern: str, max_age: float) -> None:
    for left in folder.glob(pattern):
        with suppress(OSError):  # another process may be removing it too
            # By a clock that was set back, what was just written is of the future
            if max_age == 0 or time.time() - left.stat().st_mtime >= max_age:
                shutil.rmtree(left, ignore_errors=True)


@contextmanager
def atomic_file(path: Path) -> Iterator[TextIO]:
    """Yield a text file that replaces `path` when the block ends.

    A failing disk is a WriteError, and leaves the file as it was.
    """
    aside = path.with_name(f"{path.name}.partial")
    with catch_write_errors(path):
        try:
            aside.unlink(missing_ok=True)  # whatever it leads to
            with aside.open("x", encoding="utf-8") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            os.replace(aside, path)
        except BaseException:
            with suppress(OSError):
                aside.unlink()
            raise


def no_follow(path: str, flags: int) -> int:
    """Open a run's file for writing, as `opener`, refusing links. OSError."""
    return os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)


def read_regular(path: Path, max_bytes: int) -> bytes:
    """Return the content of an untrusted file, refusing links and pipes.

    ValueError unless it is a regular file of at most `max_bytes`.
    """
    if path.is_symlink():
        raise ValueError(f"{path.name} is a link, not a file")
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
    with os.fdopen(descriptor, "rb") as file:
        facts = os.fstat(file.fileno())
        if not stat.S_ISREG(facts.st_mode):
            raise ValueError(f"{path.name} is not a regular file")
        if facts.st_size > max_bytes:
            raise ValueError(f"{path.name} has {facts.st_size} bytes, at most {max_bytes} are read")
        return file.read(max_bytes)


class NotWritten(ValueError):
    """A file of a run has another content than covey writes."""


@contextmanager
def as_written(file: Path | str) -> Iterator[None]:
    """Turn any error in using the content of `file` into NotWritten."""
    try:
        yield
    except NotWritten:
        raise
    except (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError) as error:
        reason = f"{type(error).__name__}: {str(error)[:100]}"
        raise NotWritten(f"{file} does not hold what a run writes there ({reason})") from error


def _number(error: BaseException) -> int | None:
    if isinstance(error, OSError):
        return error.errno
    if match := _RUST.search(str(error)):
        return int(match[1])
    return _number(error.__context__) if error.__context__ is not None else None


def _free(path: Path) -> str:
    there = next((parent for parent in [path, *path.absolute().parents] if os.path.exists(parent)), "/")
    return memory(shutil.disk_usage(there).free)


_RUST = re.compile(r"\(os error (\d+)\)")
_TORCH = "inline_container"
"""The source file of torch that writes checkpoints, named in its errors."""

FULL = "make room on its disk ({free} are free)"
WRITABLE = "make its folder writable"
REMEDIES: dict[int, str] = {
    errno.ENOSPC: FULL,
    errno.EDQUOT: FULL,
    errno.EFBIG: "raise the limit of file sizes (ulimit -f)",
    errno.EROFS: WRITABLE,
    errno.EACCES: WRITABLE,
    errno.EPERM: WRITABLE,
    errno.ENOENT: "it was moved or deleted while the run was going; put it back",
    errno.ENOTDIR: "it was moved or deleted while the run was going; put it back",
}
