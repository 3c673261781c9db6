"""The seccomp filter: the allowed system calls, as a classic BPF program.

It lists allowed calls, so unknown ones are refused. They fail with EPERM, an ordinary PermissionError to honest
code.
"""

import errno
import struct
from collections.abc import Sequence
from functools import cache

from covey_sandbox.inside.isolation import kernel
from covey_sandbox.inside.isolation.syscalls import AUDIT_ARCH, numbers

ALLOWED = """
read write close lseek pread64 pwrite64 readv writev preadv pwritev
open openat creat stat fstat lstat newfstatat statx access faccessat faccessat2 readlink readlinkat getdents getdents64
getcwd chdir fchdir mkdir mkdirat rmdir unlink unlinkat rename renameat renameat2 link linkat symlink symlinkat umask
ftruncate fsync fdatasync statfs fstatfs copy_file_range sendfile
dup dup2 dup3 pipe pipe2 poll ppoll select pselect6 epoll_create epoll_create1 epoll_ctl epoll_wait
epoll_pwait epoll_pwait2 eventfd eventfd2 timerfd_create timerfd_settime timerfd_gettime signalfd signalfd4
recvfrom getsockname getpeername getsockopt shutdown
munmap mprotect mremap madvise brk msync
rt_sigaction rt_sigprocmask rt_sigreturn rt_sigpending rt_sigtimedwait rt_sigsuspend sigaltstack
alarm pause getitimer setitimer timer_settime timer_gettime timer_getoverrun timer_delete
nanosleep gettimeofday time times restart_syscall
getpid getppid gettid getpgrp getuid geteuid getgid getegid getresuid getresgid getgroups
getrlimit setrlimit getrusage sysinfo uname getcpu getrandom
sched_yield sched_get_priority_max sched_get_priority_min
set_robust_list set_tid_address rseq membarrier arch_prctl exit exit_group wait4 waitid
"""
MODES = "chmod fchmod fchmodat utime utimes utimensat futimesat truncate"
"""Landlock lacks these (truncate until its third version): they are for programs that see no file of the host."""
ATTRIBUTES = "getxattr lgetxattr fgetxattr listxattr llistxattr flistxattr"
"""Answered as by a file system without extended attributes: `shutil.copy2` then continues."""

CLOCKS = "clock_gettime clock_getres clock_nanosleep timer_create"
"""Their first argument names a clock; numbers above the kernel's own stand for the CPU time of any process."""
NUM_CLOCKS = 12
OF_A_PROCESS = "getpgid getsid sched_getaffinity sched_getparam sched_getscheduler sched_rr_get_interval"
"""Their first argument names a process, which may only be the caller's own."""
LOCKS = "flock fadvise64 readahead"
"""Calls that succeed without effect: locks on shared files and memory would be visible to other programs."""

FIRST_UNKNOWN = 449
"""Calls from this number on are younger than the tables; libc falls back to older ones where they do not exist."""
IOCTLS = (0x5401, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451)
"""TCGETS (isatty), TIOCGWINSZ, FIONREAD, FIONBIO, FIONCLEX, FIOCLEX."""
FCNTLS = (0, 1, 2, 3, 4, 1030, 1032)
"""Duplicate, flags, F_GETPIPE_SZ; not F_SETOWN, which has signals sent to other processes."""
FCNTL_LOCKS = (6, 7, 37, 38)
"""F_SETLK, F_SETLKW and those of open files: like the calls of LOCKS."""
_MAP_ANONYMOUS = 0x20
PRCTLS = (2, 3, 15, 16, 21, 23, 39, 0x53564D41)
"""Names of threads and of memory, and questions."""
_NEW_NAMESPACES = 0x7E020000
_SHARED_BY_THREADS = 0x10F00
"""CLONE_THREAD, CLONE_VM, CLONE_FS, CLONE_FILES and CLONE_SIGHAND, which every C library asks for."""
_FUTEX_PRIVATE = 128
_CLOSE_RANGE_CLOEXEC = 4
"""The other flag gives a thread descriptors of its own."""

_LOAD, _AND, _RETURN = 0x20, 0x54, 0x06
_EQUAL, _AT_LEAST, _ANY_BIT = 0x15, 0x35, 0x45
_ALLOW = 0x7FFF0000
_KILL_PROCESS = 0x80000000
_ERRNO = 0x00050000
_NUMBER, _ARCHITECTURE = 0, 4
_SET_MODE_FILTER = 1
_INSTRUCTION_BYTES = 8

Instruction = tuple[int, int, int, int]
"""Operation, jump if true, jump if false, operand."""
Block = list[Instruction]
"""Straight code that ends in a return."""


def refuse(number: int = errno.EPERM) -> Instruction:
    """Make the call fail with this errno."""
    return (_RETURN, 0, 0, _ERRNO | number)


ALLOW: Instruction = (_RETURN, 0, 0, _ALLOW)
SUCCEED: Instruction = (_RETURN, 0, 0, _ERRNO)
"""The call returns 0, and the kernel does nothing."""


def low(argument: int) -> Instruction:
    """Load the low 32 bits of an argument (both machines are little-endian)."""
    return (_LOAD, 0, 0, 16 + 8 * argument)


def one_of(argument: int, values: Sequence[int], ignored: Sequence[int] = ()) -> Block:
    """Allow a call with one of the values; ignore it with `ignored` ones."""
    outcomes = [*((value, ALLOW) for value in values), *((value, SUCCEED) for value in ignored)]
    tests = [instruction for value, outcome in outcomes for instruction in ((_EQUAL, 0, 1, value), outcome)]
    return [low(argument), *tests, refuse()]


def below(argument: int, limit: int) -> Block:
    return [low(argument), (_AT_LEAST, 0, 1, limit), refuse(errno.EINVAL), ALLOW]


def anonymous() -> Block:
    """Allow mmap of memory, not files, which would outlive their names."""
    return [low(3), (_ANY_BIT, 0, 1, _MAP_ANONYMOUS), ALLOW, refuse()]


def thread_only() -> Block:
    """Allow clone of threads sharing all, not processes or namespaces.

    With descriptors of its own a thread would have its own limit of them.
    """
    wanted = _SHARED_BY_THREADS | _NEW_NAMESPACES
    return [low(0), (_AND, 0, 0, wanted), (_EQUAL, 0, 1, _SHARED_BY_THREADS), ALLOW, refuse()]


def in_this_process() -> Block:
    """Allow futex within a process; on shared memory it does nothing.

    There one program could wake another. Waits may end early at any time.
    """
    return [low(1), (_ANY_BIT, 0, 1, _FUTEX_PRIVATE), ALLOW, SUCCEED]


def stream_pair() -> Block:
    """Allow socketpair of unix streams (asyncio's), not addressable datagrams."""
    return [low(0), (_EQUAL, 0, 4, 1), low(1), (_AND, 0, 0, 0xF), (_EQUAL, 0, 1, 1), ALLOW, refuse()]


def without_address() -> Block:
    """Allow sendto only without an address, as `send`."""
    high = (_LOAD, 0, 0, 16 + 8 * 4 + 4)
    return [low(4), (_EQUAL, 0, 3, 0), high, (_EQUAL, 0, 1, 0), ALLOW, refuse()]


def rules(pid: int, are_files_private: bool) -> dict[str, Block]:
    """Return the treatment of conditional calls; all others are refused."""
    # Calls that are allowed with some arguments only
    table = {
        "clone": thread_only(),
        "futex": in_this_process(),
        "close_range": one_of(2, (0, _CLOSE_RANGE_CLOEXEC)),
        "clone3": [refuse(errno.ENOSYS)],  # libc falls back to clone, whose flags a filter can see
        "socketpair": stream_pair(),
        "sendto": without_address(),
        "kill": one_of(0, (pid,)),
        "tgkill": one_of(0, (pid,)),
        "prlimit64": one_of(0, (0, pid)),
        "ioctl": one_of(1, IOCTLS),
        "fcntl": one_of(1, FCNTLS, FCNTL_LOCKS),
        "prctl": one_of(0, PRCTLS),
        "getpriority": one_of(1, (0, pid)),
        "preadv2": [refuse(errno.ENOSYS)],  # tells what of a file is in memory; libc falls back to preadv
        "pwritev2": [refuse(errno.ENOSYS)],
        "mmap": [ALLOW] if are_files_private else anonymous(),
        "fallocate": [ALLOW] if are_files_private else one_of(1, (0,)),  # other modes are not held to RLIMIT_FSIZE
    }
    table |= {name: below(0, NUM_CLOCKS) for name in CLOCKS.split()}
    table |= {name: one_of(0, (0, pid)) for name in OF_A_PROCESS.split()}
    table |= {name: [SUCCEED] for name in LOCKS.split()}
    table |= {name: [refuse(errno.ENOTSUP)] for name in ATTRIBUTES.split()}
    table |= {name: [ALLOW if are_files_private else refuse()] for name in MODES.split()}
    return table


def assemble(machine: str, pid: int, are_files_private: bool) -> list[Instruction]:
    """Assemble the whole program for one process."""
    # Refuse other machines' calls and unknown ones
    calls = numbers(machine)
    program: list[Instruction] = [
        (_LOAD, 0, 0, _ARCHITECTURE),
        (_EQUAL, 1, 0, AUDIT_ARCH[machine]),
        (_RETURN, 0, 0, _KILL_PROCESS),
        (_LOAD, 0, 0, _NUMBER),
        (_AT_LEAST, 0, 1, FIRST_UNKNOWN),  # the x32 calls of x86_64 too: their numbers have bit 30
        refuse(errno.ENOSYS),
    ]
    # Calls with rules, then ranges of allowed numbers, then refuse
    for name, block in rules(pid, are_files_private).items():
        if name in calls:
            program += [(_EQUAL, 0, len(block), calls[name]), *block]
    for first, last in ranges(sorted(calls[name] for name in ALLOWED.split() if name in calls)):
        program += [(_AT_LEAST, 3, 0, last + 1), (_AT_LEAST, 0, 1, first), ALLOW, refuse()]
    return [*program, refuse()]


def ranges(ordered: Sequence[int]) -> list[tuple[int, int]]:
    """Group numbers into runs of consecutive ones.

    >>> ranges([1, 2, 3, 7])
    [(1, 3), (7, 7)]
    """
    found: list[tuple[int, int]] = []
    for number in ordered:
        if found and found[-1][1] == number - 1:
            found[-1] = (found[-1][0], number)
        else:
            found.append((number, number))
    return found


_PID = 0x7ABCDEF1
"""Stands for the process's number until it is known; no process has it."""


@cache
def template(machine: str, are_files_private: bool) -> bytes:
    """Return the kernel's form of the program, without the process number."""
    return b"".join(struct.pack("=HBBI", *one) for one in assemble(machine, _PID, are_files_private))


def program_for(machine: str, pid: int, are_files_private: bool) -> bytes:
    return template(machine, are_files_private).replace(_PID.to_bytes(4, "little"), pid.to_bytes(4, "little"))


def install(program: bytes) -> None:
    """Install it for this thread and its children. Needs no-new-privileges."""
    header = struct.pack("@HP", len(program) // _INSTRUCTION_BYTES, kernel.address_of(program))
    kernel.call("seccomp", _SET_MODE_FILTER, 0, kernel.address_of(header))
