"""Start-up checks: a probe that nothing else would stop shows each layer.

Layers overlap on purpose, so probes also run with the layers that cover another removed. A surprise names the missing
layer.
"""

import contextlib
import ctypes
import os
import secrets
import socket
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from covey_sandbox.inside import codec, wire
from covey_sandbox.inside.host import Program
from covey_sandbox.inside.isolation import kernel
from covey_sandbox.inside.isolation.layers import NUM_DESCRIPTORS, WORK
from covey_sandbox.inside.isolation.probes import FAILED

CANARY = "COVEY_SANDBOX_CANARY"
"""Variable in the environment of the zygote; no program may see it."""
_IPC_PRIVATE, _IPC_CREAT, _IPC_RMID = 0, 0o1000, 0

Found = dict[str, Any]


@dataclass(frozen=True)
class Expected:
    """The expected findings of probes."""

    limits: dict[str, Any]
    base: str | None
    """The program's folder is below, or is WORK in the namespace tier."""
    is_namespaced: bool
    can_change_user: bool
    capabilities: int
    landlock_abi: int


@dataclass(frozen=True)
class LayerCheck:
    """A condition on a probe's finding, which proves a layer."""

    layer: str
    without: str
    """Run of the probes: see RUNS."""
    attempt: str
    holds: Callable[[Any, Expected], bool]


RUNS: dict[str, tuple[str, ...]] = {
    "": (),
    "landlock": ("landlock",),
    "seccomp": ("seccomp",),
    "both": ("landlock", "seccomp"),
}
"""Layers taken off, by the name of the run."""


def is_shut(found: Any, expected: Expected) -> bool:
    return "open" not in found


def limits_hold(found: dict[str, int], expected: Expected) -> bool:
    limits = expected.limits
    bounded = found["NPROC"] != -1 or not (expected.is_namespaced or expected.can_change_user)
    return (
        found["CPU"] <= limits["cpu_seconds"] + 1
        and -1 not in (found["AS"], found["FSIZE"], found["CPU"])
        and found["FSIZE"] <= limits["file_bytes"]
        and found["AS"] <= limits["memory_bytes"] + (2 << 30)
        and found["NOFILE"] <= NUM_DESCRIPTORS
        and found["CORE"] == 0
        and bounded
    )


def folder_holds(found: dict[str, Any], expected: Expected) -> bool:
    is_bounded = found["bytes"] <= expected.limits["file_bytes"] or not expected.is_namespaced
    is_own = found["path"] == WORK if expected.base is None else found["path"].startswith(expected.base + "/")
    return is_own and not found["names"] and found["write"] == "open" and is_bounded


def since(version: int) -> Callable[[Any, Expected], bool]:
    """Expect failure since a Landlock version; before, seccomp alone stops it."""
    return lambda found, expected: expected.landlock_abi < version or is_shut(found, expected)


SHARED_CHECKS = [
    LayerCheck("environment", "", "read_environment", is_shut),
    LayerCheck("descriptors", "", "descriptors", lambda found, expected: found == [0, 1, 2, 3, 4]),
    LayerCheck("limits", "", "limits", limits_hold),
    LayerCheck("private_folder", "", "folder", folder_holds),
    LayerCheck("no_new_privileges", "", "new_privileges", lambda found, expected: found == 0),
    LayerCheck("not_dumpable", "", "dumpable", lambda found, expected: found == 0),
    LayerCheck("seccomp", "landlock", "calls", lambda found, expected: set(found.values()) == {"PermissionError"}),
    LayerCheck("identity", "", "outer_uid", lambda found, expected: found != 0 or not expected.can_change_user),
    LayerCheck("landlock", "seccomp", "list_root", is_shut),
]
EVERYTHING = [
    LayerCheck("isolation", "", attempt, is_shut)
    for attempt in ("read_file", "read_parent_memory", "signal_parent", "connect_tcp", "send_udp", "connect_abstract")
]
CHECKS_OF: dict[str, list[LayerCheck]] = {
    "namespace": [
        LayerCheck("capabilities", "", "capabilities", lambda found, expected: found == 0),
        LayerCheck("mount_namespace", "both", "read_file", lambda found, expected: set(found) == {"FileNotFoundError"}),
        LayerCheck("pid_namespace", "both", "process_number", lambda found, expected: found == 1),
        LayerCheck("network_namespace", "both", "connect_tcp", is_shut),
        LayerCheck("network_namespace", "both", "send_udp", is_shut),
        LayerCheck("network_namespace", "both", "connect_abstract", is_shut),
        LayerCheck("ipc_namespace", "both", "shared_memory", is_shut),
        *SHARED_CHECKS,
        *EVERYTHING,
    ],
    "landlock": [
        *SHARED_CHECKS,
        LayerCheck("identity", "", "capabilities", lambda found, expected: found == expected.capabilities),
        LayerCheck("landlock", "seccomp", "read_file", is_shut),
        LayerCheck("landlock", "seccomp", "read_parent_memory", is_shut),
        LayerCheck("landlock", "seccomp", "connect_tcp", since(4)),
        LayerCheck("landlock", "seccomp", "signal_parent", since(6)),
        LayerCheck("landlock", "seccomp", "connect_abstract", since(6)),
        *EVERYTHING,
    ],
    "unsafe_no_isolation": [],
}
OUTSIDE = ("outer_uid", "capabilities")
"""Read from /proc of the host, where a program cannot lie about them."""


def results(
    checks: list[LayerCheck], expected: Expected, run: Callable[[tuple[str, ...], Found], Found]
) -> list[tuple[LayerCheck, Any, bool]]:
    """Return each probe's finding, and whether its layer holds."""
    met = []
    with canary_resources() as facts:
        for name, omitted in RUNS.items():
            mine = [check for check in checks if check.without == name]
            attempts = sorted({check.attempt for check in mine} - set(OUTSIDE))
            found = run(omitted, {**facts, "attempts": attempts}) if mine else {}
            met += [(check, found[check.attempt], does_hold(check, found[check.attempt], expected)) for check in mine]
    return [one for check in checks for one in met if one[0] is check]


def does_hold(check: LayerCheck, found: Any, expected: Expected) -> bool:
    """Return True where a layer holds; an impossible probe counts against it."""
    return not (type(found) is str and found.startswith(FAILED)) and check.holds(found, expected)


@contextmanager
def canary_resources() -> Iterator[Found]:
    """Make a file, listeners and shared memory as targets of probes."""
    token = secrets.token_hex(8)
    with contextlib.ExitStack() as stack:
        # A file open to everybody, which only isolation can hide
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="covey-bait-")))
        folder.chmod(0o755)
        (folder / "file").write_text(token)
        (folder / "file").chmod(0o644)
        tcp = stack.enter_context(listener(socket.AF_INET, socket.SOCK_STREAM, ("127.0.0.1", 0)))
        udp = stack.enter_context(listener(socket.AF_INET, socket.SOCK_DGRAM, ("127.0.0.1", 0)))
        stack.enter_context(listener(socket.AF_UNIX, socket.SOCK_STREAM, "\0covey-" + token))
        yield {
            "files": [str(folder / "file"), "/etc/passwd"],
            "canary": CANARY,
            "parent": os.getpid(),
            "tcp": tcp.getsockname()[1],
            "udp": udp.getsockname()[1],
            "abstract": "covey-" + token,
            "segment": stack.enter_context(segment()),
        }


def listener(family: int, kind: int, address: Any) -> socket.socket:
    server = socket.socket(family, kind)
    server.bind(address)
    if kind == socket.SOCK_STREAM:
        server.listen(16)
    return server


@contextmanager
def segment() -> Iterator[int]:
    """Make System V shared memory that everybody may read."""
    number = kernel.LIBC.shmget(_IPC_PRIVATE, 4096, _IPC_CREAT | 0o666)
    try:
        yield number
    finally:
        kernel.LIBC.shmctl(number, _IPC_RMID, ctypes.c_void_p(None))


def answers(program: Program, facts: Found, deadline: float) -> Found:
    """Return the findings of one run's probes."""
    program.send(wire.pack(codec.dumps(facts)))
    found = program.receive(deadline)
    if "failed" in found or "err" in found:
        return found
    lines = Path(f"/proc/{program.process.pid}/status").read_text().splitlines()  # as the kernel tells the outside
    status = {name: value.split() for name, _, value in (line.partition(":") for line in lines)}
    return {**found, "outer_uid": int(status["Uid"][0]), "capabilities": int(status["CapPrm"][0], 16)}
