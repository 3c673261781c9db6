"""Landlock: accessible files, and TCP, signals and sockets if the kernel can.

Numbers are from the kernel's `linux/landlock.h`. Seccomp covers the rules that older kernels lack.
"""

import ctypes
import fcntl
import os
import stat
from collections.abc import Sequence
from functools import cache

from covey_sandbox.inside.isolation import kernel

EXECUTE, WRITE_FILE, READ_FILE, READ_DIR, REMOVE_DIR, REMOVE_FILE = (1 << bit for bit in range(6))
MAKE_CHAR, MAKE_DIR, MAKE_REG, MAKE_SOCK, MAKE_FIFO, MAKE_BLOCK, MAKE_SYM, REFER, TRUNCATE, IOCTL_DEV = (
    1 << bit for bit in range(6, 16)
)

READ = READ_FILE | READ_DIR
DEVICE = READ_FILE | WRITE_FILE | TRUNCATE
WORK = READ | WRITE_FILE | REMOVE_DIR | REMOVE_FILE | MAKE_DIR | MAKE_REG | MAKE_SYM | REFER | TRUNCATE
"""A program's own folder: no device files, sockets or fifos, and nothing there may be executed."""
_ON_FILES = EXECUTE | WRITE_FILE | READ_FILE | TRUNCATE | IOCTL_DEV

_NUM_FILE_RIGHTS = {1: 13, 2: 14, 3: 15, 4: 15, 5: 16}
_TCP = 0b11
_SCOPES = 0b11
"""Abstract unix sockets, signals."""
_VERSION = 1
_FIRST_DESCRIPTOR = 10
_RIGHTS_BYTES = 8
_PATH_BENEATH = 1


@cache
def abi() -> int:
    """Return the kernel's Landlock version, 0 without."""
    try:
        return kernel.call("landlock_create_ruleset", 0, 0, _VERSION)
    except OSError:
        return 0


def rules(paths: Sequence[tuple[str, int]]) -> tuple[bytes, ...]:
    """Make a rule for each existing (path, rights), with the path opened."""
    return tuple(rule for path, rights in paths if (rule := _rule(path, rights)) is not None)


def let_go(allowed: Sequence[bytes]) -> None:
    """Close the paths of rules; rulesets made of them stay."""
    for rule in allowed:
        os.close(int.from_bytes(rule[_RIGHTS_BYTES:], "little"))


def ruleset(allowed: Sequence[bytes]) -> int:
    """Make a ruleset's descriptor: it refuses all but `allowed`."""
    version = abi()
    handled = _all_rights(version)
    attributes = (ctypes.c_uint64 * 3)(handled, _TCP if version >= 4 else 0, _SCOPES if version >= 6 else 0)
    size = 24 if version >= 6 else 16 if version >= 4 else 8
    made = kernel.call("landlock_create_ruleset", ctypes.addressof(attributes), size, 0)
    for rule in allowed:
        kernel.call("landlock_add_rule", made, _PATH_BENEATH, kernel.address_of(rule), 0)
    return _move_up(made)


def restrict(descriptor: int) -> None:
    """Restrict this process to the ruleset, permanently. Needs no-new-privileges."""
    kernel.call("landlock_restrict_self", descriptor, 0)


def _all_rights(version: int) -> int:
    """Return all rights of this version; unlisted ones are refused."""
    return (1 << _NUM_FILE_RIGHTS[max(1, min(version, 5))]) - 1


def _rule(path: str, rights: int) -> bytes | None:
    """Pack a struct landlock_path_beneath_attr: u64 rights, s32 descriptor."""
    try:
        opened = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    beneath = _move_up(opened)
    rights &= _all_rights(abi()) & (-1 if stat.S_ISDIR(os.fstat(beneath).st_mode) else _ON_FILES)
    return rights.to_bytes(_RIGHTS_BYTES, "little") + beneath.to_bytes(4, "little")


def _move_up(descriptor: int) -> int:
    """Move a descriptor above the programs' numbers."""
    moved = fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, _FIRST_DESCRIPTOR)
    os.close(descriptor)
    return moved
