"""The host's files for programs: the standard library, no installed packages.

Shared libraries need not be readable: they are loaded before the first fork.
"""

import ctypes
import importlib
import locale
import os
import site
import stat
import sysconfig
import time
import warnings
from contextlib import suppress

from covey_sandbox.inside.isolation import landlock
from covey_sandbox.inside.isolation.layers import DEVICES

HIDDEN = ("site-packages", "dist-packages", "test", "idlelib", "turtledemo", "ensurepip")
"""Folders of the standard library with installed packages, or needed by no program."""
NO_EXTENSIONS = ("_test", "_xx", "xx", "_tkinter", "_curses", "_ctypes_test", "readline", "nis", "ossaudiodev")
"""Prefixes of C modules that no program needs."""
TIME_ZONES = "/usr/share/zoneinfo"
PRELOADED = """
abc array ast bisect calendar cmath collections collections.abc contextlib copy ctypes dataclasses datetime decimal
enum fractions functools gc hashlib heapq inspect io itertools json keyword math numbers operator os queue random re
statistics string struct sys textwrap threading time traceback types typing unicodedata warnings weakref
"""
"""Modules that programs import most: a fork has them for nothing."""
WITH_LIBRARIES = "zlib bz2 lzma pyexpat _ssl _sqlite3"
"""Modules of C code that need libraries which a program could not open any more."""
NOTED_SECONDS = 12 * 3600.0
THREAD_END = "libgcc_s.so.1"
"""The C library opens it when a thread ends itself."""


def preload() -> None:
    """Import likely modules, and those that cannot be loaded later."""
    site.setquit()  # `exit` and `quit`, which an interpreter without site packages lacks
    site.sethelper()
    for name in PRELOADED.split():
        importlib.import_module(name)
    for name in WITH_LIBRARIES.split():
        with suppress(ImportError):  # an interpreter may have been built without
            importlib.import_module(name)
    with suppress(OSError):
        ctypes.CDLL(THREAD_END)
    with suppress(locale.Error):
        locale.setlocale(locale.LC_ALL, "")  # its files stay in memory


def preload_extensions() -> None:
    """Import all modules in C, which a program could not map."""
    importlib.import_module("asyncio")  # before its part in C, which is there twice where that is imported first
    folder = os.path.join(sysconfig.get_path("platstdlib"), "lib-dynload")
    for file in sorted(os.listdir(folder)) if os.path.isdir(folder) else ():
        module = file.partition(".")[0]
        if not module.startswith(NO_EXTENSIONS):
            with suppress(ImportError), warnings.catch_warnings(action="ignore"):
                importlib.import_module(module)


def folders() -> tuple[str, ...]:
    """Return the folders of the standard library and the time zones."""
    candidates = [sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib"), TIME_ZONES]
    return tuple(dict.fromkeys(os.path.realpath(path) for path in candidates if path and os.path.isdir(path)))


def hidden() -> list[str]:
    """Return subfolders to hide: needless ones and installed packages."""
    return [path for folder in folders() for name in HIDDEN if os.path.isdir(path := os.path.join(folder, name))]


def rules() -> tuple[bytes, ...]:
    """Return the rules for the folders as a whole, and the devices."""
    readable = [(path, landlock.READ) for path in folders()]
    return landlock.rules([*readable, *((path, landlock.DEVICE) for path in DEVICES)])


def exact_ruleset(base: str) -> int:
    """Return rules entry by entry, which hide even packages' names.

    The programs' folder `base` is allowed besides.
    """
    paths = [(path, landlock.READ) for path in exact_paths()]
    paths += [(path, landlock.DEVICE) for path in DEVICES]
    rules = landlock.rules([*paths, (base, landlock.WORK)])
    try:
        return landlock.ruleset(rules)
    finally:
        landlock.let_go(rules)


def exact_paths() -> list[str]:
    """Return the files and folders that hold nothing else."""
    found = []
    for folder in folders():
        names = os.listdir(folder)
        kept = [os.path.join(folder, name) for name in names if name not in HIDDEN]
        found += kept if len(kept) < len(names) else [folder]
    return found


def freshen() -> None:
    """Read a byte of all readable files, unless done lately.

    The kernel notes a read where the last one is older than a day, or than the file: programs could signal to each
    other so. After this no read is noted for half a day.
    """
    for path in exact_paths():
        if os.statvfs(path).f_flag & (os.ST_NOATIME | os.ST_RDONLY):
            continue
        _freshen_one(path)
        for folder, folders_in_it, files in os.walk(path):
            for name in (*folders_in_it, *files):
                _freshen_one(os.path.join(folder, name))


def _freshen_one(path: str) -> None:
    with suppress(OSError):
        status = os.stat(path)
        is_noted = status.st_atime > max(status.st_mtime, status.st_ctime, time.time() - NOTED_SECONDS)
        if is_noted:
            return
        if stat.S_ISDIR(status.st_mode):
            os.listdir(path)
        elif stat.S_ISREG(status.st_mode):
            with open(path, "rb", buffering=0) as file:
                file.read(1)
