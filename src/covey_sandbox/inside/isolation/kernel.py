"""Linux calls through ctypes; each raises OSError where the kernel refuses."""

import contextlib
import ctypes
import os
import signal

from covey_sandbox.inside.isolation.syscalls import numbers, this_machine

LIBC = ctypes.CDLL(None, use_errno=True)
LIBC.syscall.argtypes = [ctypes.c_long] * 7
LIBC.syscall.restype = ctypes.c_long
LIBC.mount.argtypes = [ctypes.c_char_p, ctypes.c_char_p, ctypes.c_char_p, ctypes.c_ulong, ctypes.c_char_p]
LIBC.prctl.argtypes = [ctypes.c_int] + [ctypes.c_ulong] * 4
WITH_GIL = ctypes.PyDLL(None, use_errno=True)
WITH_GIL.syscall.argtypes = [ctypes.c_long] * 7
WITH_GIL.syscall.restype = ctypes.c_long

MACHINE = this_machine()
NUMBERS = numbers(MACHINE)

CLONE_NEWNS = 0x00020000
CLONE_NEWCGROUP = 0x02000000
CLONE_NEWUTS = 0x04000000
CLONE_NEWIPC = 0x08000000
CLONE_NEWUSER = 0x10000000
CLONE_NEWPID = 0x20000000
CLONE_NEWNET = 0x40000000

PR_SET_PDEATHSIG = 1
PR_GET_DUMPABLE = 3
PR_SET_DUMPABLE = 4
PR_SET_KEEPCAPS = 8
PR_SET_NAME = 15
PR_SET_NO_NEW_PRIVS = 38
PR_GET_NO_NEW_PRIVS = 39

MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC = 1, 2, 4, 8
MS_REC, MS_PRIVATE = 0x4000, 0x40000
MNT_DETACH = 2
OPEN_TREE_CLONE, OPEN_TREE_CLOEXEC = 1, os.O_CLOEXEC
AT_FDCWD, AT_EMPTY_PATH, AT_RECURSIVE = -100, 0x1000, 0x8000
MOVE_MOUNT_F_EMPTY_PATH = 4
MOUNT_ATTR_RDONLY, MOUNT_ATTR_NOSUID, MOUNT_ATTR_NODEV, MOUNT_ATTR_NOEXEC = 1, 2, 4, 8

CAP_DAC_READ_SEARCH, CAP_SETGID, CAP_SETUID = 2, 6, 7
_CAPABILITY_VERSION_3 = 0x20080522
_M_ARENA_MAX = -8


def address_of(content: bytes) -> int:
    """Return the address of bytes, which must be kept alive."""
    return ctypes.cast(ctypes.c_char_p(content), ctypes.c_void_p).value or 0


def check_result(result: int, what: str) -> int:
    """Return a call's result. Raises OSError with its errno where negative."""
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
    return result


def call(name: str, *arguments: int) -> int:
    """Make a system call by name. Pointers are addresses."""
    padded = [*arguments, 0, 0, 0, 0, 0, 0][:6]
    return check_result(LIBC.syscall(NUMBERS[name], *padded), name)


def prctl(option: int, value: int = 0) -> int:
    return check_result(LIBC.prctl(option, value, 0, 0, 0), f"prctl {option}")


def name_process(name: str) -> None:
    """Set the name that `ps` and `top` show, up to 15 characters."""
    text = ctypes.create_string_buffer(name.encode())
    prctl(PR_SET_NAME, ctypes.addressof(text))


def offer_to_oom_killer() -> None:
    """Let the kernel's OOM killer prefer this process and its children."""
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        file.write("500")


def mount(kind: str, target: str, flags: int, options: str) -> None:
    """Mount a file system that has no source."""
    check_result(LIBC.mount(kind.encode(), target.encode(), kind.encode(), flags, options.encode()), f"mount {target}")


def make_mounts_private() -> None:
    """Hide later mounts from outside this mount namespace."""
    check_result(LIBC.mount(None, b"/", None, MS_REC | MS_PRIVATE, None), "mount --make-rprivate /")


def path_call(name: str, folder: int, path: str, *arguments: int) -> int:
    """Make a system call whose first arguments are folder descriptor and path."""
    text = ctypes.create_string_buffer(os.fsencode(path))
    return call(name, folder, ctypes.addressof(text), *arguments)


def clone_tree(path: str) -> int:
    """Copy the mounts at a path; return a detached tree's descriptor."""
    return path_call("open_tree", AT_FDCWD, path, OPEN_TREE_CLONE | OPEN_TREE_CLOEXEC | AT_RECURSIVE)


def set_attributes(tree: int, attributes: int) -> None:
    """Add mount attributes to a detached tree with its submounts."""
    pack = (ctypes.c_uint64 * 4)(attributes, 0, 0, 0)
    path_call("mount_setattr", tree, "", AT_EMPTY_PATH | AT_RECURSIVE, ctypes.addressof(pack), 32)


def restrict_mount(path: str, attributes: int) -> None:
    """Add mount attributes to the mount at a path alone."""
    pack = (ctypes.c_uint64 * 4)(attributes, 0, 0, 0)
    path_call("mount_setattr", AT_FDCWD, path, 0, ctypes.addressof(pack), 32)


def attach_tree(tree: int, target: str) -> None:
    empty = ctypes.create_string_buffer(b"")
    path = ctypes.create_string_buffer(os.fsencode(target))
    addresses = ctypes.addressof(empty), ctypes.addressof(path)
    call("move_mount", tree, addresses[0], AT_FDCWD, addresses[1], MOVE_MOUNT_F_EMPTY_PATH)


def make_root(path: str) -> None:
    """Make the mount at `path` the root, and drop the old one."""
    os.chdir(path)
    dot = ctypes.create_string_buffer(b".")
    call("pivot_root", ctypes.addressof(dot), ctypes.addressof(dot))
    call("umount2", ctypes.addressof(dot), MNT_DETACH)
    os.chdir("/")


def set_capabilities(mask: int) -> None:
    """Set permitted and effective capabilities of this thread, none inheritable."""
    header = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION_3, 0)
    low, high = mask & 0xFFFFFFFF, mask >> 32
    data = (ctypes.c_uint32 * 6)(low, low, 0, high, high, 0)
    call("capset", ctypes.addressof(header), ctypes.addressof(data))


def fork_into(namespaces: int) -> int:
    """Fork a child into new namespaces (0: the same).

    `unshare` works only once per process.
    """
    ctypes.pythonapi.PyOS_BeforeFork()
    pid: int = WITH_GIL.syscall(NUMBERS["clone"], namespaces | signal.SIGCHLD, 0, 0, 0, 0, 0)
    if pid == 0:
        ctypes.pythonapi.PyOS_AfterFork_Child()
    else:
        ctypes.pythonapi.PyOS_AfterFork_Parent()
    return check_result(pid, "clone")


def one_malloc_arena() -> None:
    """Stop threads from reserving 64 MiB each, which the memory limit would count."""
    LIBC.mallopt(_M_ARENA_MAX, 1)
