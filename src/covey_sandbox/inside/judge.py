"""The trusted process of a slot: runs programs, supervises their checker.

It speaks with its caller over a socket: `start` once, then one program after another. It looks at no answer itself, so
no program can make it fail or wait; a failure means no verdict.
"""

import contextlib
import os
import resource
import secrets
import select
import signal
import socket
import time
from collections.abc import Sequence
from typing import Any

from covey_sandbox.inside import checker, wire
from covey_sandbox.inside.host import Broken, Ended, Process, Program, TimedOut, Violation, Zygote
from covey_sandbox.inside.isolation import checks, folders, kernel, landlock, users
from covey_sandbox.inside.isolation.layers import LAYERS_OF, can_change_user
from covey_sandbox.inside.link import REFUSED
from covey_sandbox.inside.supervisor import CallerGone, Supervisor

RUNS_PER_ZYGOTE = 5000
ZYGOTE_SECONDS = 6 * 3600.0
"""Longest life of a zygote; its preparations at the start hold for half a day."""
MAX_REMOVERS = 8
"""Most removers at a time, in each slot; with more the next program waits."""
LOOK_SECONDS = 0.05
"""Seconds between two looks at a program's folder and threads, where the kernel does not bound them."""
JUDGE_BYTES = 8 << 30
PROBE_SECONDS = 30.0
PROBE_LIMITS = {
    "wall_seconds": 30.0,
    "total_seconds": 60.0,
    "cpu_seconds": 30,
    "memory_bytes": 256 << 20,
    "output_bytes": 1 << 20,
    "num_processes": 16,
    "file_bytes": 1 << 20,
}
PROOFS = (
    ("a program that hangs", "def f():\n    import time\n    while True: time.sleep(1)", 0.2, ("timeout", "load")),
    ("a program that takes twice its memory", "def f(): return len(bytearray(512 << 20)) and 1", 30.0, ("error",)),
    ("an honest program", "def f(): return 1", 30.0, ("passed",)),
)
"""Name, code, seconds for it, verdicts that are right; a busy machine may take that long to load it."""


class Host:
    """A zygote, its ready process, and the folders of programs."""

    def __init__(self, start: dict[str, Any], callers: Sequence[int]) -> None:
        self.start = start
        self.callers = callers
        self.is_namespaced = start["tier"] == "namespace"
        self.landlock_abi = landlock.abi()
        self.needs_landlock = not self.is_namespaced or self.landlock_abi > 0
        self.can_change_user = can_change_user()
        self.layers = self._choose_layers()
        self._reservation = users.reserve() if "identity" in self.layers else None
        self.uid = self._reservation[0] if self._reservation is not None else None
        self.zygote: Zygote | None = None
        self.base: str | None = None
        self.probes: list[str] = []
        """Layers that were found to hold, and how."""
        self.look_seconds = LOOK_SECONDS if not self.is_namespaced else wire.MAX_WAIT
        self._limits: dict[str, Any] = {}
        self._spare: Process | None = None
        self._running: Process | None = None
        self._looked = 0.0
        self._num_runs, self._opened = 0, time.monotonic()
        self._leftovers: list[str] = []
        self._removers: list[int] = []
        """Processes that remove leftovers of programs."""
        self._has_overrun = False
        """The program has made more files than it may, and gets no further process."""

    def _choose_layers(self) -> tuple[str, ...]:
        there_are = LAYERS_OF[self.start["tier"]]
        unknown = sorted(set(self.start["omit"]) - set(there_are))
        if unknown:
            raise Broken(f"there is no layer {', '.join(unknown)}; there are {', '.join(there_are)}")
        impossible = {"landlock": not self.needs_landlock, "identity": not self.can_change_user}
        return tuple(name for name in there_are if name not in self.start["omit"] and not impossible.get(name))

    def open(self) -> None:
        """Start the zygote and check every layer. Raises Broken."""
        if not self.is_namespaced:
            self.base = folders.make_base(self.uid)
        self._open_zygote()

    def _open_zygote(self) -> None:
        environment = {checks.CANARY: secrets.token_hex(8), "LANG": "C.UTF-8", "PYTHONHASHSEED": "0"}
        config = {"layers": self.layers, "uid": self.uid, "base": self.base}
        self.zygote = Zygote(self.start["command"], self.start["bundle"].encode(), config, environment)
        self._num_runs, self._opened = 0, time.monotonic()
        self.check()

    @property
    def living(self) -> Zygote:
        """Return the zygote, present after `open`."""
        assert self.zygote is not None
        return self.zygote

    def judge(self, order: dict[str, Any], supervisor: Supervisor) -> dict[str, Any]:
        """Return the verdicts on a program, and leave nothing of it."""
        self._use(order["limits"])
        self._has_overrun = False
        answer = supervisor.judge(order)
        self.tidy()
        return answer

    def serve(self, message: dict[str, Any], channel: socket.socket) -> None:
        """Give the checker a process, or end its process."""
        if "end" in message:
            self.clear()
        if "spawn" in message:
            self.clear()
            if self._has_overrun:
                channel.sendall(REFUSED)
                return
            self._running = self._fresh(message["spawn"])
            socket.send_fds(channel, [b"+"], self._running.descriptors)
            self._running.close()

    def look(self) -> None:
        """End a program with too many files or threads, where the kernel cannot."""
        now = time.monotonic()
        if self.is_namespaced or self._running is None or now - self._looked < LOOK_SECONDS:
            return
        self._looked = now
        has_many = folders.num_threads(self._running.pid) > self._limits["num_processes"] + 1
        if self._count(self._running) or has_many:
            os.kill(self._running.pid, signal.SIGKILL)

    def _count(self, process: Process) -> bool:
        """Return True if a process, or an earlier one, has too many files."""
        if process.folder is not None:
            self._has_overrun |= folders.is_over(process.folder, self._limits["file_bytes"])
        return self._has_overrun

    def clear(self) -> None:
        """End the running program, which is gone by the next `tidy`."""
        running, self._running = self._running, None
        if running is not None:
            self._count(running)  # it may have ended between two looks
            self._end(running)

    def _use(self, limits: dict[str, Any]) -> None:
        if limits != self._limits and self._spare is not None:
            spare, self._spare = self._spare, None
            spare.close()
            self._end(spare)
        self._limits = limits

    def _fresh(self, is_script: bool) -> Process:
        if is_script or self._spare is None:
            return self.spawn(self._limits, is_script)
        spare, self._spare = self._spare, None
        return spare

    def spawn(
        self, limits: dict[str, Any], is_script: bool = False, omit: tuple[str, ...] = (), is_probe: bool = False
    ) -> Process:
        """Return a new, isolated process that waits for its order."""
        has_folder = self.base is not None and "private_folder" in self.layers
        folder = self.make_folder(limits["file_bytes"]) if has_folder else None
        job_read, job_write = os.pipe()
        result_read, result_write = os.pipe()
        theirs = [job_read, result_write]
        stdin, stdout = None, None
        if is_script:
            stdin_read, stdin = os.pipe()
            stdout, stdout_write = os.pipe()
            theirs += [stdin_read, stdout_write]
        request = {"limits": limits, "folder": folder, "omit": omit, "probe": is_probe}
        try:
            pid = self.living.ask(request, tuple(theirs))["pid"]
        finally:
            for descriptor in theirs:
                os.close(descriptor)
        self._num_runs += 1
        return Process(pid, folder, job_write, result_read, stdin, stdout)

    def make_folder(self, max_bytes: int) -> str:
        """Make an empty folder of the program's user. Raises Broken on a full disk."""
        assert self.base is not None
        disk = os.statvfs(self.base)
        if disk.f_blocks and disk.f_bavail * disk.f_frsize < max_bytes:  # of no blocks where it has no size
            raise Broken(f"{self.base} has no room for the {max_bytes} bytes of a program; make some, or set TMPDIR")
        folder = os.path.join(self.base, secrets.token_hex(8))
        os.mkdir(folder, 0o700)
        if self.uid is not None:
            os.chown(folder, self.uid, self.uid)
        return folder

    def _end(self, process: Process) -> None:
        self.living.end_soon(process.pid)
        if process.folder is not None:
            self._leftovers.append(process.folder)

    def tidy(self) -> None:
        """Wait for the ended programs, and remove their files."""
        self.living.reap()
        full = [folder for folder in self._leftovers if not folders.is_removed(folder)]
        self._leftovers.clear()
        if full:
            self._removers.append(folders.remove_aside(full))

    def prepare(self) -> None:
        """Make a process ready while the caller is busy."""
        while self._removers:
            how = 0 if len(self._removers) > MAX_REMOVERS else os.WNOHANG
            if os.waitpid(self._removers[0], how)[0] == 0:
                break
            self._removers.pop(0)
        is_old = self._num_runs >= RUNS_PER_ZYGOTE or time.monotonic() - self._opened > ZYGOTE_SECONDS
        if is_old and self._spare is None:
            self.living.close()
            self._open_zygote()
        if self._spare is None:
            self._spare = self.spawn(self._limits)

    def close(self) -> None:
        if self.zygote is not None:
            self.zygote.close()
        for remover in self._removers:
            os.kill(remover, signal.SIGKILL)
            os.waitpid(remover, 0)
        if self.base is not None:
            folders.remove_when_still(self.base)

    def probe(self, omit: tuple[str, ...], facts: dict[str, Any]) -> dict[str, Any]:
        """Return the probes' findings without some layers."""
        process = self.spawn(PROBE_LIMITS, omit=omit, is_probe=True)
        program = Program(process, PROBE_LIMITS)
        try:
            found = checks.answers(program, facts, time.monotonic() + PROBE_SECONDS)
        except (Ended, TimedOut, Violation) as error:
            raise Broken(f"the probes gave no answer ({type(error).__name__})") from error
        finally:
            program.close()
            self._end(process)
            self.tidy()
        if "failed" in found:
            raise Broken(f"{found['failed'].partition(':')[0]} is missing: {found['failed']}")
        return found

    def check(self) -> None:
        """Raise Broken with the first layer that does not hold."""
        kept = 1 << kernel.CAP_DAC_READ_SEARCH if self.living.keeps_search else 0
        expected = checks.Expected(
            PROBE_LIMITS, self.base, self.is_namespaced, self.can_change_user, kept, self.landlock_abi
        )
        wanted = [
            check for check in checks.CHECKS_OF[self.start["tier"]] if check.layer != "landlock" or self.needs_landlock
        ]
        met = checks.results(wanted, expected, self.probe)
        for check, found, holds in met:
            if not holds:
                raise Broken(f"{check.layer} is missing: its probe {check.attempt} met {found!s:.120}")
        self.probes = [f"{check.layer}: {check.attempt}" for check, _, _ in met]


def prove(host: Host, supervisor: Supervisor) -> None:
    """Judge programs of known outcome. Raises Broken on another verdict."""
    for name, code, seconds, kinds in PROOFS:
        limits = {**PROBE_LIMITS, "wall_seconds": seconds}
        tests = [
            {"test": "call", "args": [], "kwargs": {"d": []}, "expected": [1], "rel": 0.0, "abs": 0.0, "is_json": False}
        ]
        order = {"code": code, "entry_point": "f", "limits": limits, "tests": tests}
        found = host.judge(order, supervisor)["results"][0]["kind"]
        if found not in kinds:
            raise Broken(f"{name} was judged {found}")


def describe(host: Host) -> dict[str, Any]:
    return {
        "tier": host.start["tier"],
        "layers": list(host.layers),
        "landlock_abi": host.landlock_abi,
        "python": host.living.version,
        "probes": host.probes,
        "folder": host.base,
        "is_search_kept": host.living.keeps_search,
    }


def main(control: int) -> None:
    """Judge programs until the caller is gone, or the sandbox fails."""
    kernel.name_process("covey-judge")
    kernel.prctl(kernel.PR_SET_DUMPABLE, 0)
    resource.setrlimit(resource.RLIMIT_AS, (JUDGE_BYTES, JUDGE_BYTES))
    callers = caller_descriptors(control)
    host, supervisor = None, None
    try:
        host = Host(receive(callers), callers)
        supervisor = Supervisor(serve_checker, host)
        host.open()
        if host.start["proves"]:
            prove(host, supervisor)
        wire.send(control, describe(host))
        while True:
            answer = host.judge(receive(callers), supervisor)
            wire.send(control, answer)
            host.prepare()
    except (EOFError, BrokenPipeError, ConnectionResetError):
        pass
    except Exception as error:
        with contextlib.suppress(OSError):
            wire.send(control, {"failed": " ".join(f"{error}".split()) or type(error).__name__})
    finally:
        if supervisor is not None:
            supervisor.close()
        if host is not None:
            host.close()


def serve_checker(channel: socket.socket) -> None:
    """Run the checker, which ends with this process."""
    kernel.prctl(kernel.PR_SET_PDEATHSIG, signal.SIGKILL)
    kernel.name_process("covey-checker")
    kernel.offer_to_oom_killer()
    checker.serve(channel)


def caller_descriptors(control: int) -> list[int]:
    """Return descriptors that report the caller's end: socket and process."""
    try:
        return [control, os.pidfd_open(os.getppid())]
    except OSError:  # a container may refuse it
        return [control]


def receive(callers: Sequence[int]) -> Any:
    """Return the caller's next message. Raises CallerGone."""
    poll = select.poll()
    for descriptor in callers:
        poll.register(descriptor, select.POLLIN)
    ready = {descriptor for descriptor, _ in poll.poll()}
    if callers[0] not in ready:
        raise CallerGone
    return wire.receive(callers[0])
