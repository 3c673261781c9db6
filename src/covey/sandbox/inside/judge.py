"""The trusted process of a slot: holds the expected values, has programs run by its zygote, compares.

It speaks with its caller over a socket: `start` once, then one program after another. Where it fails, there is no
verdict; a program cannot make it fail, but for the test code of the data set that runs here.
"""

import contextlib
import os
import resource
import secrets
import time
from typing import Any

from covey.sandbox.inside import checks, folders, kernel, landlock, timer, verdicts, wire
from covey.sandbox.inside.case import Case
from covey.sandbox.inside.host import Broken, Ended, Program, TimedOut, Unjudged, Violation, Zygote
from covey.sandbox.inside.layers import LAYERS_OF, can_change_user

FIRST_UID, NUM_UIDS = 61184, 4336
"""Numbers for users that exist only for a moment, the range that systemd uses for the same purpose."""
RUNS_PER_ZYGOTE = 5000
JUDGE_SECONDS = 10.0
"""CPU time for one program's verdicts."""
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
    """A zygote, the process it keeps ready for the next program, and the folders of programs."""

    def __init__(self, start: dict[str, Any]) -> None:
        self.start = start
        self.is_namespaced = start["tier"] == "namespace"
        self.landlock_abi = landlock.abi()
        self.needs_landlock = not self.is_namespaced or self.landlock_abi > 0
        self.can_change_user = can_change_user()
        self.layers = self._wanted()
        self.uid = FIRST_UID + secrets.randbelow(NUM_UIDS) if "identity" in self.layers else None
        self.zygote: Zygote | None = None
        self.base: str | None = None
        self.probes: list[str] = []
        """Which layers were found to hold, and how."""
        self._spare: Program | None = None
        self._num_runs = 0
        self._leftovers: list[str] = []

    def _wanted(self) -> tuple[str, ...]:
        there_are = LAYERS_OF[self.start["tier"]]
        unknown = sorted(set(self.start["omit"]) - set(there_are))
        if unknown:
            raise Broken(f"there is no layer {', '.join(unknown)}; there are {', '.join(there_are)}")
        impossible = {"landlock": not self.needs_landlock, "identity": not self.can_change_user}
        return tuple(name for name in there_are if name not in self.start["omit"] and not impossible.get(name))

    def open(self) -> None:
        """Starts the zygote and looks for every layer. Raises Broken where one is missing."""
        if not self.is_namespaced:
            self.base = folders.make_base(self.uid)
        self._open_zygote()

    def _open_zygote(self) -> None:
        """A new one, in which nothing has run."""
        environment = {checks.CANARY: secrets.token_hex(8), "LANG": "C.UTF-8", "PYTHONHASHSEED": "0"}
        config = {"layers": self.layers, "uid": self.uid, "base": self.base}
        self.zygote = Zygote(self.start["command"], self.start["bundle"].encode(), config, environment)
        self._num_runs = 0
        self.check()

    @property
    def living(self) -> Zygote:
        """The zygote, which there is from `open` on."""
        assert self.zygote is not None
        return self.zygote

    def fresh(self, limits: dict[str, Any], is_script: bool) -> Program:
        """The process kept ready, where it suits."""
        spare, self._spare = self._spare, None
        if spare is not None:
            if spare.limits == limits and not is_script:
                return spare
            self.end(spare)
        return self.spawn(limits, is_script)

    def spawn(
        self, limits: dict[str, Any], is_script: bool = False, omit: tuple[str, ...] = (), is_probe: bool = False
    ) -> Program:
        """A new process, shut in, that waits for its order."""
        folder = self.make_folder() if self.base is not None and "private_folder" in self.layers else None
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
        return Program(pid, job_write, result_read, limits, folder, stdin, stdout, watches=not self.is_namespaced)

    def make_folder(self) -> str:
        """Empty, of the program's user alone."""
        assert self.base is not None
        folder = os.path.join(self.base, secrets.token_hex(8))
        os.mkdir(folder, 0o700)
        if self.uid is not None:
            os.chown(folder, self.uid, self.uid)
        return folder

    def end(self, program: Program) -> None:
        """Killed; gone by the next `tidy`."""
        self.living.end_soon(program.pid)
        program.close()
        if program.folder is not None:
            self._leftovers.append(program.folder)

    def tidy(self) -> None:
        """What programs left is gone."""
        self.living.reap()
        while self._leftovers:
            folders.remove(self._leftovers.pop())

    def prepare(self, limits: dict[str, Any]) -> None:
        """While the caller is busy: has a process ready for the next program."""
        if self._num_runs >= RUNS_PER_ZYGOTE and self._spare is None:
            self.living.close()
            self._open_zygote()
        if self._spare is None:
            self._spare = self.spawn(limits)

    def close(self) -> None:
        """Everything ends and nothing is left."""
        if self.zygote is not None:
            self.zygote.close()
        if self.base is not None:
            folders.remove_when_still(self.base)

    def probe(self, omit: tuple[str, ...], facts: dict[str, Any]) -> dict[str, Any]:
        """What the probes find with some layers taken off."""
        program = self.spawn(PROBE_LIMITS, omit=omit, is_probe=True)
        try:
            found = checks.answers(program, facts, time.monotonic() + PROBE_SECONDS)
        except (Ended, TimedOut, Violation) as error:
            raise Broken(f"the probes gave no answer ({type(error).__name__})") from error
        finally:
            self.end(program)
            self.tidy()
        if "failed" in found:
            raise Broken(f"{found['failed'].partition(':')[0]} is missing: {found['failed']}")
        return found

    def check(self) -> None:
        """Raises Broken with the first layer that does not hold."""
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


def prove(host: Host) -> None:
    """Programs of known outcome; raises Broken where one is judged otherwise."""
    for name, code, seconds, kinds in PROOFS:
        limits = {**PROBE_LIMITS, "wall_seconds": seconds}
        tests = [{"test": "call", "args": [], "kwargs": {"d": []}, "expected": 1, "rel": 0.0, "abs": 0.0}]
        request = {"code": code, "entry_point": "f", "limits": limits, "tests": tests}
        found = run(host, request)["results"][0]["kind"]
        host.tidy()
        if found not in kinds:
            raise Broken(f"{name} was judged {found}")


def describe(host: Host) -> dict[str, Any]:
    """For the manifest."""
    return {
        "tier": host.start["tier"],
        "layers": list(host.layers),
        "landlock_abi": host.landlock_abi,
        "python": host.living.version,
        "probes": host.probes,
        "folder": host.base,
        "is_search_kept": host.living.keeps_search,
    }


def run(host: Host, request: dict[str, Any]) -> dict[str, Any]:
    """The verdicts on one program."""
    started = time.monotonic()
    case = Case(host, request["code"], request["entry_point"], request["limits"])
    try:
        with timer.limited(JUDGE_SECONDS):
            results = verdicts.judge(case, request["tests"])
    except timer.TooSlow:
        return {"unjudged": f"judging it took more than {JUDGE_SECONDS:g} s of CPU time"}
    except Unjudged as error:
        return {"unjudged": " ".join(str(error).split())}
    finally:
        case.end()
    return {"results": results, "imports": case.imports or [], "seconds": time.monotonic() - started}


def main(control: int) -> None:
    """Until the caller closes its end, or the sandbox fails."""
    kernel.prctl(kernel.PR_SET_DUMPABLE, 0)
    resource.setrlimit(resource.RLIMIT_AS, (JUDGE_BYTES, JUDGE_BYTES))
    host = None
    try:
        host = Host(wire.receive(control))
        host.open()
        if host.start["proves"]:
            prove(host)
        wire.send(control, describe(host))
        while True:
            request = wire.receive(control)
            answer = run(host, request)
            host.tidy()  # first, so that a caller who has the answer finds nothing of the program
            wire.send(control, answer)
            host.prepare(request["limits"])
    except (EOFError, BrokenPipeError, ConnectionResetError):
        pass
    except Exception as error:
        with contextlib.suppress(OSError):
            wire.send(control, {"failed": " ".join(f"{error}".split()) or type(error).__name__})
    finally:
        if host is not None:
            host.close()
