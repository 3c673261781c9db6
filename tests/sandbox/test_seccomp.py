"""The filter, run by an interpreter of the few BPF operations it uses, on both architectures."""

import errno
import os
import re
from pathlib import Path

import pytest

from covey_sandbox.inside.isolation import seccomp
from covey_sandbox.inside.isolation.syscalls import _TABLE, AUDIT_ARCH, numbers

MACHINES = ("x86_64", "aarch64")
PID = 4711
ALLOW, KILL, DONE = "allow", "kill", "done"
HEADERS = {
    "x86_64": Path("/usr/include/x86_64-linux-gnu/asm/unistd_64.h"),
    "aarch64": Path("/usr/include/asm-generic/unistd.h"),
}


def verdict(machine: str, number: int, *arguments: int, arch: int | None = None, are_files_private: bool = True) -> str:
    """What the kernel would do with a call: allow, kill, or the name of an errno."""
    memory = {0: number, 4: AUDIT_ARCH[machine] if arch is None else arch}
    for index, argument in enumerate([*arguments, 0, 0, 0, 0, 0, 0][:6]):
        memory[16 + 8 * index], memory[20 + 8 * index] = argument & 0xFFFFFFFF, argument >> 32 & 0xFFFFFFFF
    program, at, value = seccomp.assemble(machine, PID, are_files_private), 0, 0
    while True:
        operation, if_true, if_false, operand = program[at]
        if operation == 0x20:
            value = memory[operand]
        elif operation == 0x54:
            value &= operand
        elif operation == 0x06:
            return {0x7FFF0000: ALLOW, 0x80000000: KILL, 0x50000: DONE}.get(operand) or errno.errorcode[
                operand & 0xFFFF
            ]
        else:
            holds = {0x15: value == operand, 0x35: value >= operand, 0x45: value & operand != 0}[operation]
            at += if_true if holds else if_false
        at += 1


@pytest.mark.parametrize("machine", MACHINES)
def test_exactly_the_listed_calls_are_allowed(machine: str) -> None:
    calls = numbers(machine)
    allowed = {calls[name] for name in seccomp.ALLOWED.split() if name in calls}
    special = {calls[name] for name in seccomp.rules(PID, are_files_private=True) if name in calls}
    for number in range(seccomp.FIRST_UNKNOWN):
        if number not in special:
            assert verdict(machine, number) == (ALLOW if number in allowed else "EPERM"), number


FORBIDDEN = """
execve execveat unshare setns mount umount2 pivot_root chroot ptrace process_vm_readv process_vm_writev bpf keyctl
add_key request_key userfaultfd io_uring_setup perf_event_open memfd_create open_by_handle_at pidfd_open
pidfd_send_signal socket connect bind sendmsg setsid setpgid setuid capset seccomp landlock_restrict_self personality
mlock kcmp mknodat shmget msgget semget mq_open inotify_init1 fanotify_init move_mount open_tree
capget fork landlock_add_rule landlock_create_ruleset mincore mknod mount_setattr name_to_handle_at vfork
"""


@pytest.mark.parametrize("machine", MACHINES)
def test_forbidden_system_calls_are_refused_with_any_arguments(machine: str) -> None:
    calls = numbers(machine)
    found = {name: verdict(machine, calls[name], 0, 0, 0) for name in FORBIDDEN.split() if name in calls}
    assert set(found.values()) == {"EPERM"}
    assert set(calls) - set(seccomp.ALLOWED.split()) - set(seccomp.rules(PID, True)) == set(found)


NEW_NAMESPACES = (0x00020000, 0x02000000, 0x04000000, 0x08000000, 0x10000000, 0x20000000, 0x40000000)
"""Mounts, cgroups, host names, System V, users, processes, network."""
THREAD = 0x3D0F00
"""What pthread_create asks for: memory, folder, descriptors, signals and the group of threads shared, among others."""


@pytest.mark.parametrize("machine", MACHINES)
def test_what_is_allowed_by_a_number_is_allowed_by_these_alone(machine: str) -> None:
    calls = numbers(machine)

    def allowed(name: str, index: int, numbers: range) -> set[int]:
        return {n for n in numbers if verdict(machine, calls[name], *[0] * index, n) == ALLOW}

    assert allowed("prctl", 0, range(100)) == {2, 3, 15, 16, 21, 23, 39}
    assert verdict(machine, calls["prctl"], 0x59616D61) == "EPERM"  # PR_SET_PTRACER
    assert allowed("fcntl", 1, range(50)) == {0, 1, 2, 3, 4}
    assert allowed("fcntl", 1, range(1024, 1050)) == {1030, 1032}
    assert allowed("ioctl", 1, range(0x5400, 0x5480)) == {0x5401, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451}
    assert allowed("clock_gettime", 0, range(40)) == set(range(12))
    assert [verdict(machine, calls["clone"], THREAD | flag) for flag in NEW_NAMESPACES] == ["EPERM"] * 7
    shared = (0x100, 0x200, 0x400, 0x800, 0x10000)
    assert [verdict(machine, calls["clone"], THREAD & ~flag) for flag in shared] == ["EPERM"] * 5


@pytest.mark.product
@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize(
    ("name", "arguments", "expected"),
    [
        ("clone", (THREAD,), ALLOW),
        ("clone", (0x11,), "EPERM"),  # fork
        ("clone", (0x4111,), "EPERM"),  # vfork
        ("close_range", (3, 9, 0), ALLOW),
        ("close_range", (3, 9, 4), ALLOW),  # close when another program is executed
        ("close_range", (3, 9, 2), "EPERM"),  # descriptors of its own
        ("close_range", (3, 9, 6), "EPERM"),
        ("clone3", (1, 88), "ENOSYS"),
        ("kill", (PID, 9), ALLOW),
        ("kill", (PID + 1, 0), "EPERM"),
        ("kill", (0, 9), "EPERM"),
        ("kill", (0xFFFFFFFF, 9), "EPERM"),  # -1: everybody
        ("tgkill", (PID, PID, 6), ALLOW),
        ("tgkill", (1, 1, 9), "EPERM"),
        ("prlimit64", (0, 7), ALLOW),
        ("prlimit64", (1, 7), "EPERM"),
        ("socketpair", (1, 1), ALLOW),
        ("socketpair", (1, 1 | 0x80800), ALLOW),  # SOCK_CLOEXEC | SOCK_NONBLOCK
        ("socketpair", (1, 2), "EPERM"),
        ("socketpair", (2, 1), "EPERM"),
        ("sendto", (3, 0, 1, 0, 0), ALLOW),
        ("sendto", (3, 0, 1, 0, 0x7F0000000000), "EPERM"),
        ("sendto", (3, 0, 1, 0, 0x1000), "EPERM"),
        ("ioctl", (0, 0x5401), ALLOW),
        ("ioctl", (0, 0x5412), "EPERM"),  # TIOCSTI: input for a terminal
        ("fcntl", (0, 4), ALLOW),
        ("fcntl", (0, 8), "EPERM"),  # F_SETOWN: signals to others
        ("fcntl", (0, 6), DONE),  # F_SETLK
        ("fcntl", (0, 37), DONE),  # F_OFD_SETLK
        ("fcntl", (0, 5), "EPERM"),  # F_GETLK
        ("fcntl", (0, 1024), "EPERM"),  # F_SETLEASE
        ("flock", (3, 2), DONE),
        ("futex", (0, 128), ALLOW),  # FUTEX_WAIT in this process alone
        ("futex", (0, 129), ALLOW),
        ("futex", (0, 0), DONE),  # FUTEX_WAIT for whoever shares the memory
        ("futex", (0, 1), DONE),  # FUTEX_WAKE
        ("futex", (0, 9 | 256), DONE),
        ("fadvise64", (3, 0, 0, 4), DONE),
        ("clock_gettime", (1,), ALLOW),
        ("clock_gettime", (11,), ALLOW),
        ("clock_gettime", (~PID << 3 | 2,), "EINVAL"),  # the CPU time of a process
        ("timer_create", (0xFFFFFFFA,), "EINVAL"),
        ("sched_getaffinity", (0,), ALLOW),
        ("sched_getaffinity", (PID,), ALLOW),
        ("sched_getaffinity", (PID - 1,), "EPERM"),
        ("getpgid", (1,), "EPERM"),
        ("getpriority", (0, 1), "EPERM"),
        ("preadv2", (), "ENOSYS"),
        ("mincore", (), "EPERM"),
        ("prctl", (15,), ALLOW),
        ("prctl", (4, 1), "EPERM"),  # PR_SET_DUMPABLE
        ("prctl", (8, 1), "EPERM"),
        ("fgetxattr", (), "ENOTSUP"),
    ],
)
def test_what_depends_on_arguments(machine: str, name: str, arguments: tuple[int, ...], expected: str) -> None:
    assert verdict(machine, numbers(machine)[name], *arguments) == expected


@pytest.mark.parametrize("machine", MACHINES)
def test_modes_and_times_are_for_programs_that_see_no_file_of_the_host(machine: str) -> None:
    for name in seccomp.MODES.split():
        if name in numbers(machine):
            assert verdict(machine, numbers(machine)[name], are_files_private=True) == ALLOW
            assert verdict(machine, numbers(machine)[name], are_files_private=False) == "EPERM"


@pytest.mark.parametrize("machine", MACHINES)
def test_files_of_the_host_are_neither_mapped_nor_reserved(machine: str) -> None:
    for name, arguments, verdict_there in [
        ("mmap", (0, 4096, 3, 0x22, 0xFFFFFFFF), ALLOW),  # MAP_PRIVATE | MAP_ANONYMOUS
        ("mmap", (0, 4096, 1, 0x1, 3), "EPERM"),
        ("mmap", (0, 4096, 1, 0x802, 3), "EPERM"),  # as the linker does it
        ("fallocate", (3, 0), ALLOW),
        ("fallocate", (3, 1), "EPERM"),
        ("fallocate", (3, 0x10), "EPERM"),
    ]:
        number = numbers(machine)[name]
        assert verdict(machine, number, *arguments, are_files_private=True) == ALLOW
        assert verdict(machine, number, *arguments, are_files_private=False) == verdict_there


def test_another_architecture_is_killed_and_calls_younger_than_the_table_do_not_exist() -> None:
    assert verdict("x86_64", 20, arch=0x40000003) == KILL  # i386
    assert verdict("x86_64", 0x40000000) == "ENOSYS"  # x32
    assert verdict("x86_64", 451) == verdict("aarch64", 462) == "ENOSYS"


def test_the_number_of_the_process_is_put_into_the_assembled_program() -> None:
    for machine in MACHINES:
        made = seccomp.program_for(machine, PID, are_files_private=True)
        assert made == b"".join(seccomp.struct.pack("=HBBI", *one) for one in seccomp.assemble(machine, PID, True))
        assert seccomp.program_for(machine, PID, True).count(PID.to_bytes(4, "little")) == 10


@pytest.mark.parametrize("machine", MACHINES)
def test_the_numbers_are_those_of_the_kernels_headers(machine: str) -> None:
    if not HEADERS[machine].is_file():
        pytest.skip(f"{HEADERS[machine]} is not installed")
    text = HEADERS[machine].read_text()
    known = {name: int(number) for name, number in re.findall(r"#define __NR(?:3264)?_(\w+)\s+(\d+)", text)}
    table = numbers(machine)
    aliases = {"newfstatat": "fstatat"}
    compared = [name for name in table if name in known or aliases.get(name) in known]
    assert {name: table[name] for name in compared} == {
        name: known.get(name, known.get(aliases.get(name, ""))) for name in compared
    }
    assert len(compared) == len(table)


def test_every_allowed_name_is_in_the_table() -> None:
    names = {cell.split()[0] for cell in _TABLE.replace("\n", " ").split("|")}
    listed = (seccomp.ALLOWED, seccomp.MODES, seccomp.ATTRIBUTES, seccomp.CLOCKS, seccomp.OF_A_PROCESS, seccomp.LOCKS)
    assert {name for text in listed for name in text.split()} <= names
    assert set(seccomp.rules(PID, True)) <= names


def test_this_machine_has_a_syscall_table_or_a_named_error() -> None:
    with pytest.raises(ValueError, match="one of x86_64, aarch64, got riscv64"):
        numbers("riscv64")
    assert os.uname().machine in (*MACHINES, "arm64") or pytest.skip("no table for this machine")
