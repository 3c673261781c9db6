"""Stand-ins for Python functions whose system calls are refused.

They protect nothing: bypassing them leads to the filter.
"""

import functools
import importlib
import os
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

_RECURSIVE = 0


def install(*, are_files_private: bool) -> None:
    """Install them before anything has taken hold of the originals."""
    with suppress(ImportError):  # an interpreter may have been built without
        vars(importlib.import_module("_multiprocessing"))["SemLock"] = SemLock
    if not are_files_private:
        os.chmod, os.utime, os.truncate = forgiving(os.chmod), forgiving(os.utime), truncate


class SemLock:
    """A semaphore of `multiprocessing` for threads alone."""

    SEM_VALUE_MAX = (1 << 31) - 1
    handle, name = 0, None

    def __init__(self, kind: int, value: int, maxvalue: int, name: str, unlink: bool) -> None:
        self.kind, self.maxvalue = kind, maxvalue
        self._inner = threading.Semaphore(value)
        self._held, self._last = 0, 0

    def acquire(self, block: bool = True, timeout: float | None = None) -> bool:
        """Take it; return True if that succeeded."""
        is_taken = self._is_again() or self._inner.acquire(block, timeout if block else None)
        if is_taken:
            self._held, self._last = self._held + 1, threading.get_ident()
        return is_taken

    def release(self) -> None:
        """Release it, with the errors of the semaphore in C."""
        if self.kind == _RECURSIVE and not self._is_mine():
            raise AssertionError("attempt to release recursive lock not owned by thread")
        if self.kind != _RECURSIVE and self._get_value() >= self.maxvalue:
            raise ValueError("semaphore or lock released too many times")
        self._held -= 1
        if not self._is_again():
            self._inner.release()

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()

    def _is_again(self) -> bool:
        return self.kind == _RECURSIVE and self._is_mine()

    def _is_mine(self) -> bool:
        return self._held > 0 and self._last == threading.get_ident()

    def _count(self) -> int:
        return self._held

    def _get_value(self) -> int:
        return self._inner._value

    def _is_zero(self) -> bool:
        return self._get_value() == 0


def forgiving(change: Callable[..., None]) -> Callable[..., None]:
    """Return a function that changes modes or times of own files alone."""

    @functools.wraps(change)
    def changed(path: Any, *arguments: Any, **keywords: Any) -> None:
        try:
            change(path, *arguments, **keywords)
        except PermissionError:
            if not is_own(path):
                raise

    return changed


def is_own(path: Any) -> bool:
    """Return True for a path in the program's folder. FileNotFoundError."""
    os.stat(path)
    folder = os.path.realpath(os.environ.get("TMPDIR", "/dev/null"))
    return not isinstance(path, int) and f"{os.path.realpath(os.fsdecode(path))}/".startswith(f"{folder}/")


def truncate(path: Any, length: int) -> None:
    """Truncate a file through a descriptor, which Landlock has judged."""
    with open(path, "r+b", closefd=not isinstance(path, int)) as file:
        file.truncate(length)
