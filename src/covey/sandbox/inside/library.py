"""What a program may read of the host: Python's standard library, and nothing that somebody installed beside it.

Shared libraries need not be readable: those that the standard library wants are loaded before the first fork.
"""

import ctypes
import importlib
import os
import sysconfig
from contextlib import suppress

from covey.sandbox.inside import landlock
from covey.sandbox.inside.layers import DEVICES

INSTALLED = ("site-packages", "dist-packages")
TIME_ZONES = "/usr/share/zoneinfo"
PRELOADED = """
abc array ast bisect calendar cmath collections collections.abc contextlib copy ctypes dataclasses datetime decimal
enum fractions functools gc hashlib heapq inspect io itertools json keyword math numbers operator os queue random re
statistics string struct sys textwrap threading time traceback types typing unicodedata warnings weakref
"""
"""What programs import most: a fork has it for nothing."""
WITH_LIBRARIES = "zlib bz2 lzma pyexpat _ssl _sqlite3"
"""Modules of C code that need libraries which a program could not open any more."""
THREAD_END = "libgcc_s.so.1"
"""The C library opens it when a thread ends itself."""


def preload() -> None:
    """Imports what programs are likely to need, and what they could not load later."""
    for name in PRELOADED.split():
        importlib.import_module(name)
    for name in WITH_LIBRARIES.split():
        with suppress(ImportError):  # an interpreter may have been built without
            importlib.import_module(name)
    with suppress(OSError):
        ctypes.CDLL(THREAD_END)


def folders() -> tuple[str, ...]:
    """The standard library, Python and C, and the time zones."""
    candidates = [sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib"), TIME_ZONES]
    return tuple(dict.fromkeys(os.path.realpath(path) for path in candidates if path and os.path.isdir(path)))


def hidden() -> list[str]:
    """Folders in them with installed packages, the caller's own for instance."""
    return [path for folder in folders() for name in INSTALLED if os.path.isdir(path := os.path.join(folder, name))]


def rules() -> tuple[bytes, ...]:
    """For Landlock: the folders as a whole, and the devices."""
    readable = [(path, landlock.READ) for path in folders()]
    return landlock.rules([*readable, *((path, landlock.DEVICE) for path in DEVICES)])


def exact_ruleset(base: str) -> int:
    """For Landlock where nothing hides installed packages: entry by entry, and the folder that all programs' are in."""
    paths = [(folder, landlock.READ_DIR) for folder in folders()]
    paths += [
        (os.path.join(folder, name), landlock.READ)
        for folder in folders()
        for name in os.listdir(folder)
        if name not in INSTALLED
    ]
    paths += [(path, landlock.DEVICE) for path in DEVICES]
    rules = landlock.rules([*paths, (base, landlock.WORK)])
    try:
        return landlock.ruleset(rules)
    finally:
        landlock.let_go(rules)
