"""Put layers around a program, in the process that will run it.

Order matters: mounts need capabilities, Landlock and seccomp need no-new-privileges, and seccomp comes last, as it
refuses the calls that make the others.
"""

import os
import resource
import sys
from dataclasses import dataclass
from typing import Any

from covey_sandbox.inside.isolation import kernel, landlock, seccomp

NAMESPACE_LAYERS = ("mount_namespace", "pid_namespace", "network_namespace", "ipc_namespace")
ALWAYS = ("environment", "descriptors", "limits", "private_folder")
"""Possible wherever there is Linux; alone they isolate nothing."""
SHARED_LAYERS = (*ALWAYS, "identity", "no_new_privileges", "not_dumpable", "landlock", "seccomp")
LAYERS_OF: dict[str, tuple[str, ...]] = {
    "namespace": (*NAMESPACE_LAYERS, "capabilities", *SHARED_LAYERS),
    "landlock": SHARED_LAYERS,
    "unsafe_no_isolation": ALWAYS,
}
"""Layers of each tier. docs/trust/sandbox.md says what each stops; `probes` looks for each at start."""

WORK = "/tmp"
"""A program's own folder, where it has a root of its own."""
ENVIRONMENT = {"LANG": "C.UTF-8", "PATH": "/usr/bin:/bin", "PYTHONDONTWRITEBYTECODE": "1"}
"""Environment variables of a program, besides its folder."""
DEVICES = ("/dev/null", "/dev/zero", "/dev/random", "/dev/urandom")
MAX_FILES = 4096
"""Maximum files in its folder."""
NUM_DESCRIPTORS = 32
NUM_SIGNALS = 64
"""Maximum signals that wait to be received."""
NUM_STREAMS = 5
"""Standard streams, job and result."""
_HIGH = 200
_OTHERS = 4
"""Processes of the same user: the zygote, the program's first thread, the one before it and the one after it."""
_CAPACITY = 1 << 20


@dataclass(frozen=True)
class Spec:
    """The isolation of one program."""

    layers: tuple[str, ...]
    limits: dict[str, Any]
    folder: str = WORK
    """Current folder, the program's alone. In a mount namespace it is a file system of its own."""
    uid: int | None = None
    """Change to this user and group; None keeps the present ones."""
    keep_search: bool = False
    """The interpreter lies where only root may look: keep the capability to read it, which Landlock bounds."""
    is_alone: bool = True
    """Whether this user's process count is its own."""
    rules: tuple[bytes, ...] = ()
    """Rules of Landlock: the standard library and the devices, in `landlock.rules`."""
    ruleset: int | None = None
    """Ruleset of Landlock: the bounds of every program, too long to be made for each."""
    base_bytes: int = 0
    """Address space of the interpreter before the program."""

    def has(self, layer: str) -> bool:
        return layer in self.layers


@dataclass
class Step:
    """Names the current layer, for error messages."""

    layer: str


def enter(spec: Spec, step: Step) -> None:
    """Put all layers of the spec on this process, permanently."""
    step.layer = "private_folder"
    if spec.has("mount_namespace") and spec.has("private_folder"):
        size = spec.limits["file_bytes"]
        options = f"size={size},nr_inodes={MAX_FILES},mode=0700"
        kernel.mount("tmpfs", WORK, kernel.MS_NOSUID | kernel.MS_NODEV | kernel.MS_NOEXEC, options)
    os.chdir(spec.folder)
    os.umask(0o077)
    # Environment and limits, while they can still be set
    step.layer = "environment"
    if spec.has("environment"):
        set_environment(spec.folder)
    step.layer = "limits"
    if spec.has("limits"):
        set_limits(spec)
    # The user, which later layers must not be able to change
    enter_identity(spec, step)
    # Files, descriptors, and last the calls that the layers before needed
    step.layer = "landlock"
    if spec.has("landlock"):
        landlock.restrict(landlock.ruleset([*spec.rules, *landlock.rules([(spec.folder, landlock.WORK)])]))
        if spec.ruleset is not None:
            landlock.restrict(spec.ruleset)
    step.layer = "descriptors"
    if spec.has("descriptors"):
        os.closerange(NUM_STREAMS, _CAPACITY)
    step.layer = "seccomp"
    if spec.has("seccomp"):
        seccomp.install(seccomp.program_for(kernel.MACHINE, os.getpid(), spec.has("mount_namespace")))


def enter_identity(spec: Spec, step: Step) -> None:
    """Become an unprivileged user whose processes cannot read each other's memory."""
    step.layer = "identity"
    # Keep one capability where only root may read the library
    kept = 1 << kernel.CAP_DAC_READ_SEARCH if spec.keep_search else 0
    if spec.uid is not None:
        if kept:
            kernel.prctl(kernel.PR_SET_KEEPCAPS, 1)
        change_user(spec.uid)
    step.layer = "capabilities"
    if spec.has("capabilities") or spec.uid is not None:
        kernel.set_capabilities(kept)
    # No new privileges: seccomp and Landlock ask for it
    step.layer = "no_new_privileges"
    if spec.has("no_new_privileges"):
        kernel.prctl(kernel.PR_SET_NO_NEW_PRIVS, 1)
    step.layer = "not_dumpable"
    kernel.prctl(kernel.PR_SET_DUMPABLE, 0 if spec.has("not_dumpable") else 1)
    kernel.prctl(kernel.PR_SET_PDEATHSIG, 9)  # after the change of user, which clears it


def change_user(uid: int) -> None:
    os.setgroups([])
    os.setresgid(uid, uid, uid)
    os.setresuid(uid, uid, uid)


def set_environment(folder: str) -> None:
    """Set the variables that libraries need, without the caller's."""
    wanted = {"HOME": folder, "TMPDIR": folder, **ENVIRONMENT}
    for name in list(os.environ):  # one by one: what clear and update call besides touches many pages of the zygote
        del os.environ[name]
    for name, value in wanted.items():
        os.environ[name] = value
    sys.argv[:] = ["program.py"]


def set_limits(spec: Spec) -> None:
    """Set resource limits; the time is watched from outside."""
    limits = spec.limits
    cpu = limits["cpu_seconds"]
    bounds = {
        resource.RLIMIT_CPU: (cpu, cpu + 1),
        resource.RLIMIT_AS: (limits["memory_bytes"] + spec.base_bytes,) * 2,
        resource.RLIMIT_FSIZE: (limits["file_bytes"],) * 2,
        resource.RLIMIT_NOFILE: (NUM_DESCRIPTORS,) * 2,
        resource.RLIMIT_CORE: (0, 0),
        resource.RLIMIT_MEMLOCK: (0, 0),
        resource.RLIMIT_MSGQUEUE: (0, 0),
        resource.RLIMIT_SIGPENDING: (NUM_SIGNALS, NUM_SIGNALS),
    }
    # Linux counts the processes of the user, not of this program
    if spec.is_alone:
        bounds[resource.RLIMIT_NPROC] = (limits["num_processes"] + _OTHERS,) * 2
    for which, (soft, hard) in bounds.items():
        # Hard limits can be lowered only
        most = resource.getrlimit(which)[1]
        if most != resource.RLIM_INFINITY:
            soft, hard = min(soft, most), min(hard, most)
        resource.setrlimit(which, (int(soft), int(hard)))


def arrange(descriptors: dict[int, int]) -> None:
    """Move descriptors to the numbers given as keys."""
    high = {number: os.dup2(source, _HIGH + number) for number, source in descriptors.items()}
    for number, source in high.items():
        os.dup2(source, number)


def can_change_user() -> bool:
    with open("/proc/self/status") as file:
        effective = next(int(line.split()[1], 16) for line in file if line.startswith("CapEff"))
    wanted = 1 << kernel.CAP_SETUID | 1 << kernel.CAP_SETGID
    return effective & wanted == wanted
