"""Attempts to escape, made inside the sandbox at start by trusted code.

Each answer is "open" where the attempt succeeded, else an error's name or a number. `checks` has the expected ones.
"""

import ctypes
import os
import resource
import socket
from collections.abc import Callable
from typing import Any, NoReturn

from covey_sandbox.inside import codec, program
from covey_sandbox.inside.isolation import kernel

IPC_STAT = 2
FAILED = "failed with"
FORBIDDEN = """
fork execve unshare setns mount pivot_root chroot ptrace process_vm_readv bpf keyctl add_key userfaultfd
io_uring_setup perf_event_open memfd_create open_by_handle_at pidfd_open socket shmget mq_open capset
"""
"""Calls that must be refused for any arguments, tried with harmless ones."""


def serve() -> NoReturn:
    facts = codec.loads(program.read_frame(program.JOB))
    found = {name: try_attempt(ATTEMPTS[name], facts) for name in facts["attempts"]}
    program.ResultChannel(program.RESULT, 1 << 16).send(found)
    os.read(program.JOB, 1)  # stays to be looked at until it is ended
    os._exit(0)


def try_attempt(attempt: Callable[[dict[str, Any]], Any], facts: dict[str, Any]) -> Any:
    """Return an attempt's result, or that it could not be made."""
    try:
        return attempt(facts)
    except Exception as error:
        return f"{FAILED} {type(error).__name__}"


def outcome(attempt: Callable[[], object]) -> str:
    """Return "open", or the name of the error."""
    try:
        attempt()
    except Exception as error:
        return type(error).__name__
    return "open"


def calls(facts: dict[str, Any]) -> dict[str, str]:
    """Try each forbidden call with arguments of -1, which have no effect."""
    names = [name for name in FORBIDDEN.split() if name in kernel.NUMBERS]
    return {name: outcome(lambda name=name: call_through(name)) for name in names}  # type: ignore[misc]


def call_through(name: str) -> None:
    """Make a call; any error but PermissionError means that it got through."""
    if name == "fork":  # has no arguments that could be wrong
        if kernel.fork_into(0) == 0:
            os._exit(0)
        return
    try:
        kernel.call(name, -1, -1, -1, -1, -1, -1)
    except OSError as error:
        if isinstance(error, PermissionError):
            raise


def read_file(facts: dict[str, Any]) -> list[str]:
    return [outcome(lambda path=path: open(path).close()) for path in facts["files"]]  # type: ignore[misc]


def list_root(facts: dict[str, Any]) -> str:
    return outcome(lambda: os.listdir("/"))


def read_environment(facts: dict[str, Any]) -> str:
    return "open" if facts["canary"] in os.environ else "absent"


def read_parent_memory(facts: dict[str, Any]) -> str:
    return outcome(lambda: open(f"/proc/{facts['parent']}/mem", "rb").close())


def signal_parent(facts: dict[str, Any]) -> str:
    return outcome(lambda: os.kill(facts["parent"], 0))


def connect(family: int, kind: int, address: Any) -> str:
    """Try to make a connection and use it."""

    def attempt() -> None:
        with socket.socket(family, kind) as client:
            client.settimeout(1)
            client.connect(address)
            client.send(b"x")

    return outcome(attempt)


def connect_tcp(facts: dict[str, Any]) -> str:
    return connect(socket.AF_INET, socket.SOCK_STREAM, ("127.0.0.1", facts["tcp"]))


def connect_abstract(facts: dict[str, Any]) -> str:
    return connect(socket.AF_UNIX, socket.SOCK_STREAM, "\0" + facts["abstract"])


def send_udp(facts: dict[str, Any]) -> str:
    """Send a datagram; an empty network refuses it at once."""
    return connect(socket.AF_INET, socket.SOCK_DGRAM, ("127.0.0.1", facts["udp"]))


def shared_memory(facts: dict[str, Any]) -> str:
    state = ctypes.create_string_buffer(512)
    return outcome(
        lambda: kernel.check_result(kernel.LIBC.shmctl(facts["segment"], IPC_STAT, ctypes.byref(state)), "shmctl")
    )


def process_number(facts: dict[str, Any]) -> int:
    return os.getpid()


def descriptors(facts: dict[str, Any]) -> list[int]:
    return [number for number in range(1024) if outcome(lambda number=number: os.fstat(number)) == "open"]  # type: ignore[misc]


def limits(facts: dict[str, Any]) -> dict[str, int]:
    names = ("CPU", "AS", "FSIZE", "NOFILE", "CORE", "NPROC")
    return {name: resource.getrlimit(getattr(resource, f"RLIMIT_{name}"))[1] for name in names}


def folder(facts: dict[str, Any]) -> dict[str, Any]:
    """Return the folder's properties: owner, content, writability, size."""
    state = os.statvfs(".")
    found = {"path": os.getcwd(), "names": os.listdir("."), "bytes": state.f_blocks * state.f_frsize}
    return {**found, "write": outcome(lambda: open("probe", "w").close())}


def new_privileges(facts: dict[str, Any]) -> int:
    return 1 - kernel.prctl(kernel.PR_GET_NO_NEW_PRIVS)


def dumpable(facts: dict[str, Any]) -> int:
    return kernel.prctl(kernel.PR_GET_DUMPABLE)


ATTEMPTS: dict[str, Callable[[dict[str, Any]], Any]] = {
    attempt.__name__: attempt
    for attempt in (
        *(calls, read_file, list_root, read_environment, read_parent_memory, signal_parent),
        *(connect_tcp, connect_abstract, send_udp, shared_memory, process_number),
        *(descriptors, limits, folder, new_privileges, dumpable),
    )
}
