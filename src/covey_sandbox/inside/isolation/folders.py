"""Private folders of programs on the host: bounded, and removed without links.

Only the Landlock tier needs them; in the namespace tier a program's folder is a file system that ends with it.
Everything in them is hostile: links, folders nested by the thousand, locked folders.
"""

import errno
import os
import resource
import signal
import stat
import tempfile
import time
from collections.abc import Iterator, Sequence
from itertools import islice

from covey_sandbox.inside.isolation import kernel

MAX_ENTRIES = 256
"""Maximum entries of a program's folder."""
MAX_DEPTH = 32
FEW = 16
"""Entries that are removed at once."""
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_REPLACED = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP)


def make_base(uid: int | None) -> str:
    """Make the base folder, which the programs' user can pass but not list."""
    candidates = [tempfile.gettempdir(), "/tmp", "/var/tmp", "/dev/shm"]
    suitable = [path for path in candidates if os.access(path, os.W_OK) and (uid is None or is_public(path))]
    if not suitable:
        raise FileNotFoundError(f"no folder for temporary files that every user may enter; tried {candidates}")
    base = tempfile.mkdtemp(prefix="covey-sandbox-", dir=suitable[0])
    os.chmod(base, 0o711)
    return base


def is_public(path: str) -> bool:
    """Return True if every user may enter the folder."""
    parts = os.path.realpath(path).split("/")
    above = ["/".join(parts[:number]) or "/" for number in range(1, len(parts) + 1)]
    return all(os.stat(folder).st_mode & 0o001 for folder in above)


def is_over(folder: str, max_bytes: int) -> bool:
    """Return True if a folder is too large, full or deep; unreadable counts so."""
    total = 0
    try:
        for entries, (status, depth) in enumerate(_below(folder), start=1):
            total += status.st_blocks * 512
            if total > max_bytes or entries > MAX_ENTRIES or depth > MAX_DEPTH:
                return True
    except OSError:
        return True
    return False


def _below(folder: str, at: int | None = None, depth: int = 0) -> Iterator[tuple[os.stat_result, int]]:
    """Yield the state and depth of all entries of a folder, if it exists."""
    # Open without following links: programs swap folders for them
    try:
        inner = os.open(folder, _FOLDER, dir_fd=at)
    except OSError as error:
        if error.errno in _REPLACED:
            return
        raise
    try:
        for name in os.listdir(inner):
            try:
                status = os.lstat(name, dir_fd=inner)
            # Files may vanish while the folder is read
            except FileNotFoundError:
                continue
            yield status, depth
            if stat.S_ISDIR(status.st_mode):
                yield from _below(name, inner, depth + 1)
    finally:
        os.close(inner)


def num_threads(pid: int) -> int:
    """Count a process's threads, 0 where it is gone."""
    try:
        return len(os.listdir(f"/proc/{pid}/task"))
    except OSError:
        return 0


def remove(folder: str) -> None:
    """Remove a folder tree of any depth with two descriptors, following no link.

    A dying program may move folders meanwhile, so that ".." leads elsewhere: OSError then.
    """
    at = os.open(folder, _FOLDER)
    path: list[tuple[str, os.stat_result]] = []
    # Descend by descriptors, never by paths: a path may change while it is walked, and be too long
    try:
        below = [_clear(at)]
        while below:
            if below[-1]:
                path.append((below[-1].pop(), os.fstat(at)))
                at = _exchange(at, path[-1][0])
                below.append(_clear(at))
                continue
            below.pop()
            if not path:
                break
            name, above = path.pop()
            at = _exchange(at, "..")
            if not os.path.samestat(os.fstat(at), above):
                raise OSError(errno.ESTALE, f"{folder} changes while it is removed")
            os.rmdir(name, dir_fd=at)
    finally:
        os.close(at)
    os.rmdir(folder)


def is_removed(folder: str) -> bool:
    """Remove a small folder; return True if it is gone."""
    try:
        if next(islice(_below(folder), FEW, None), None) is not None:
            return False
        remove(folder)
    except OSError as error:
        return error.errno == errno.ENOENT
    return True


def remove_aside(folders: Sequence[str]) -> int:
    """Start a process that removes folders; return its number."""
    pid = os.fork()
    if pid == 0:
        try:
            kernel.name_process("covey-remover")
            kernel.prctl(kernel.PR_SET_PDEATHSIG, signal.SIGKILL)
            os.closerange(0, resource.getrlimit(resource.RLIMIT_NOFILE)[0])
            for folder in folders:
                remove_when_still(folder)
        finally:
            os._exit(0)
    return pid


def remove_when_still(folder: str) -> None:
    """Remove a folder that a dying program may still write to; retry for a second."""
    for _ in range(20):
        try:
            remove(folder)
        except FileNotFoundError:
            return
        except OSError:
            time.sleep(0.05)


def _clear(at: int) -> list[str]:
    """Unlink all files; return the folders' names, made accessible."""
    inner = []
    for name in os.listdir(at):
        mode = os.lstat(name, dir_fd=at).st_mode
        if stat.S_ISDIR(mode):
            inner.append(name)
            if mode & stat.S_IRWXU != stat.S_IRWXU:
                _let_in(name, at)
        else:
            os.unlink(name, dir_fd=at)
    return inner


def _let_in(name: str, at: int) -> None:
    """Give the owner all rights on a folder, never through a link."""
    found = os.open(name, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=at)
    try:
        os.chmod(f"/proc/self/fd/{found}", stat.S_IRWXU)
    finally:
        os.close(found)


def _exchange(at: int, name: str) -> int:
    """Open a subfolder and close its parent, unless that fails."""
    inner = os.open(name, _FOLDER, dir_fd=at)
    os.close(at)
    return inner
