"""Stops a forked child before and after each system call that changes a disk (ptrace), to look at it or to kill it.

Every write is seen so, also those of torch and safetensors, which are not made in Python.
"""

import ctypes
import os
import platform
import signal
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

TRACEME, CONT_SYSCALL, GETREGS, SETOPTIONS = 0, 24, 12, 0x4200
MARK_CALLS, KILL_WITH_TRACER = 1, 0x100000
CALL_STOP = signal.SIGTRAP | 0x80

NAMES = {
    1: "write", 18: "pwrite64", 20: "writev", 74: "fsync", 75: "fdatasync", 76: "truncate", 77: "ftruncate",
    82: "rename", 83: "mkdir", 84: "rmdir", 87: "unlink", 258: "mkdirat", 263: "unlinkat",
    264: "renameat", 316: "renameat2", 326: "copy_file_range",
}  # fmt: skip
"""Of x86-64 (arch/x86/entry/syscalls/syscall_64.tbl of Linux)."""
HAS_DESCRIPTOR = ("write", "pwrite64", "writev", "fsync", "fdatasync", "ftruncate")


class _Registers(ctypes.Structure):
    """user_regs_struct of x86-64."""

    _fields_ = [
        (name, ctypes.c_ulong)
        for name in (
            *("r15", "r14", "r13", "r12", "rbp", "rbx", "r11", "r10", "r9", "r8", "rax", "rcx", "rdx", "rsi", "rdi"),
            *("orig_rax", "rip", "cs", "eflags", "rsp", "ss", "fs_base", "gs_base", "ds", "es", "fs", "gs"),
        )
    ]


@dataclass(frozen=True, slots=True)
class Call:
    """A system call that the child is about to make, or has just made."""

    name: str
    is_done: bool
    path: Path | None
    """What its descriptor, if it has one, refers to."""


def can_trace() -> bool:
    """Whether system calls can be followed here."""
    if platform.system() != "Linux" or platform.machine() != "x86_64":
        return False
    try:
        return follow(lambda: None, lambda call: False) == 0
    except OSError:
        return False


def follow(action: Callable[[], object], look: Callable[[Call], bool]) -> int:
    """Run the action in a child and show `look` every call, before and after; where it returns True the child is
    killed there. Returns what waitpid says of the child's end; 0 where it came through."""
    child = os.fork()
    if child == 0:
        _be_followed(action)
    _, status = os.waitpid(child, 0)
    _ptrace(SETOPTIONS, child, MARK_CALLS | KILL_WITH_TRACER)
    is_done = True
    while not (os.WIFEXITED(status) or os.WIFSIGNALED(status)):
        pending = 0
        if os.WSTOPSIG(status) == CALL_STOP:
            is_done = not is_done
            call = _call(child, is_done)
            if call is not None and look(call):
                os.kill(child, signal.SIGKILL)
        elif os.WSTOPSIG(status) != signal.SIGSTOP:
            pending = os.WSTOPSIG(status)
        _ptrace(CONT_SYSCALL, child, pending)
        _, status = os.waitpid(child, 0)
    return status


def _be_followed(action: Callable[[], object]) -> NoReturn:
    try:
        _ptrace(TRACEME, 0, 0)
        os.kill(os.getpid(), signal.SIGSTOP)
        action()
        os._exit(0)
    finally:
        os._exit(1)


def _call(child: int, is_done: bool) -> Call | None:
    registers = _Registers()
    _ptrace(GETREGS, child, ctypes.addressof(registers))
    name = NAMES.get(registers.orig_rax)
    if name is None:
        return None
    if name not in HAS_DESCRIPTOR:
        return Call(name, is_done, None)
    try:
        return Call(name, is_done, Path(os.readlink(f"/proc/{child}/fd/{registers.rdi}")))
    except OSError:
        return None


def _ptrace(request: int, pid: int, data: int) -> None:
    function = ctypes.CDLL(None, use_errno=True).ptrace
    function.argtypes = (ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p)
    function.restype = ctypes.c_long
    if function(request, pid, None, data) == -1 and ctypes.get_errno() != 3:  # ESRCH: it was killed a moment ago
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
