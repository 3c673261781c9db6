"""The caller's side of the sandbox: slots of trusted judges, what they are told, and their answers."""

import asyncio
import atexit
import importlib.util
import os
import platform
import sys
import threading
from collections import deque
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import lru_cache
from pathlib import Path
from typing import Any, Self

from covey_sandbox.inside.codec import Encoder, Unencodable
from covey_sandbox.inside.isolation.syscalls import COLUMNS, this_machine
from covey_sandbox.slot import Slot, SlotLost
from covey_sandbox.types import (
    TIERS,
    AssertTest,
    CallTest,
    Limits,
    OutputTest,
    Report,
    SandboxFailed,
    Test,
    TestResult,
    Tier,
)

AUTOMATIC: tuple[Tier, ...] = ("namespace", "landlock")
"""Tiers that "auto" tries, the strongest first."""


class Sandbox:
    """Runs isolated programs, `num_slots` at a time; a context manager.

    >>> with Sandbox(num_slots=4) as sandbox:
    ...     report = await sandbox.run(code, tests, entry_point="solve")
    """

    def __init__(self, num_slots: int | None = None, tier: Tier = "auto", unsafe_without: Collection[str] = ()) -> None:
        """Set the slots, by default one more than processors; none starts yet.

        `unsafe_without`: layers to omit, for tests. Raises SandboxFailed, with the remedy, where a layer of the tier
        does not hold.
        """
        check_choice(num_slots, tier)
        self._omit = tuple(unsafe_without)
        first = start_first(tier, self._omit)
        self.tier: Tier = first.tier
        self._num_slots = num_slots or len(os.sched_getaffinity(0)) + 1
        self._idle = deque([first])
        """The others are started when they are first needed."""
        self._executor = ThreadPoolExecutor(self._num_slots, thread_name_prefix="sandbox")
        self._described = first.described
        self._slots = {first}
        self._lock = threading.Lock()
        self._is_closed = False
        self._owner = os.getpid()

    async def run(
        self, code: str, tests: Sequence[Test], entry_point: str | None = None, limits: Limits | None = None
    ) -> Report:
        """Judge a program. Raises SandboxFailed without a verdict, ValueError for bad tests."""
        return await asyncio.wrap_future(self._submit(code, tests, entry_point, limits))

    def run_blocking(
        self, code: str, tests: Sequence[Test], entry_point: str | None = None, limits: Limits | None = None
    ) -> Report:
        """Judge a program as `run` does, for callers without an event loop."""
        return self._submit(code, tests, entry_point, limits).result()

    def describe(self) -> dict[str, Any]:
        """Return the manifest's values: tier, layers, probes, versions."""
        return {**self._described, "num_slots": self._num_slots, "without": list(self._omit)}

    def close(self) -> None:
        """End all processes; idempotent, and a no-op in a forked child."""
        if os.getpid() != self._owner:
            return
        with self._lock:
            self._is_closed = True
            slots, self._slots = self._slots, set()
        for slot in slots:
            slot.close()
        self._executor.shutdown(wait=True, cancel_futures=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _submit(
        self, code: str, tests: Sequence[Test], entry_point: str | None, limits: Limits | None
    ) -> Future[Report]:
        if self._is_closed:
            raise SandboxFailed("the sandbox is closed")
        if os.getpid() != self._owner:
            raise SandboxFailed("the sandbox belongs to the process that this one was forked from; make one here")
        limits = limits or Limits()
        order = encode_request(code, tests, entry_point, limits)
        try:
            return self._executor.submit(self._run, order, limits)
        except RuntimeError as error:  # the machine has no thread left
            raise SandboxFailed(f"the sandbox cannot start a thread: {error}") from error

    def _run(self, order: dict[str, Any], limits: Limits) -> Report:
        """Run in a thread, of which each slot has one."""
        try:
            answer = self._ask(order, limits)
        except SlotLost:  # it is replaced, once for each program
            try:
                answer = self._ask(order, limits)
            except SlotLost as error:
                raise SandboxFailed(str(error)) from error
        return decode_report(answer)

    def _ask(self, order: dict[str, Any], limits: Limits) -> dict[str, Any]:
        slot = self._take_slot()
        try:
            answer = slot.run(order, limits.total_seconds)
        except BaseException:
            slot.close()
            with self._lock:
                self._slots.discard(slot)
            raise
        self._idle.append(slot)
        return answer

    def _take_slot(self) -> Slot:
        try:
            return self._idle.popleft()
        except IndexError:
            return self._start_slot()

    def _start_slot(self) -> Slot:
        if self._is_closed:
            raise SlotLost("the sandbox was closed")
        slot = Slot(self.tier, self._omit, proves=False)
        with self._lock:
            self._slots.add(slot)
            is_late = self._is_closed
        if is_late:
            slot.close()
        return slot


def check_choice(num_slots: int | None, tier: str) -> None:
    """Refuse unknown choices (ValueError) and unsuitable machines (SandboxFailed)."""
    if num_slots is not None and num_slots < 1:
        raise ValueError(f"num_slots must be >= 1, got {num_slots}")
    if tier not in TIERS:
        raise ValueError(f"tier must be one of {', '.join(TIERS)}, got {tier}")
    if sys.platform != "linux" or this_machine() not in COLUMNS:
        here = f"{platform.system()} on {platform.machine()}"
        raise SandboxFailed(f"the sandbox needs Linux on x86_64 or aarch64, got {here}; use a container, {AT_RISK}")


def start_first(tier: Tier, omit: tuple[str, ...]) -> Slot:
    """Start a slot of the strongest tier that holds."""
    if tier == "unsafe_no_isolation" or omit:
        without = ", ".join(omit) or "isolation"
        sys.stderr.write(f"covey_sandbox: UNSAFE: tier={tier} runs model code without {without}\n")
    missing = []
    for candidate in AUTOMATIC if tier == "auto" else (tier,):
        try:
            return Slot(candidate, omit, proves=True)
        except SlotLost as error:
            missing.append(with_remedy(candidate, str(error)))
    raise SandboxFailed(f"no isolation for model code: {'; '.join(missing)}; {AT_RISK}")


@lru_cache(maxsize=len(TIERS))
def shared_sandbox(tier: Tier, pid: int) -> Sandbox:
    """Return this process's shared sandbox, which ends with it."""
    sandbox = Sandbox(tier=tier)
    atexit.register(sandbox.close)
    return sandbox


def run_tests(
    code: str, tests: Sequence[Test], entry_point: str | None = None, limits: Limits | None = None, tier: Tier = "auto"
) -> Report:
    """Judge a program in this process's shared sandbox."""
    return shared_sandbox(tier, os.getpid()).run_blocking(code, tests, entry_point, limits)


def with_remedy(tier: str, message: str) -> str:
    """Describe a tier's missing part and its remedy in a line."""
    remedy = next((f"; {remedy}" for word, remedy in REMEDIES if word in message), "")
    return f"tier {tier}: {message}{remedy}"


AT_RISK = 'or accept the risk with tier="unsafe_no_isolation"'

NAMESPACES = (
    "allow user namespaces (sysctl kernel.unprivileged_userns_clone=1 user.max_user_namespaces=10000; on Ubuntu "
    "kernel.apparmor_restrict_unprivileged_userns=0; containers forbid them by their seccomp profile)"
)
LANDLOCK = "use Linux >= 5.13 with landlock in the kernel's list of security modules (boot with lsm=landlock,...)"
SECCOMP = "use a kernel with CONFIG_SECCOMP_FILTER; gVisor and some emulators have none"

NAMESPACE_WORDS = ("unshare", "uid_map", "setgroups", "namespace", "clone", "mount", "open_tree", "pivot_root")
REMEDIES = (
    ("landlock", LANDLOCK),
    ("seccomp", SECCOMP),
    *((word, NAMESPACES) for word in NAMESPACE_WORDS),
    ("temporary", "set TMPDIR to a folder that every user may enter"),
)
"""Remedies for a missing layer, by the kernel's message."""


MAX_TEST = 256 << 20
"""Nodes and characters of a test's values."""


def encode_request(code: str, tests: Sequence[Test], entry_point: str | None, limits: Limits) -> dict[str, Any]:
    """Return the judge's request. Raises ValueError for tests that cannot run."""
    if not tests:
        raise ValueError("tests must not be empty: a program that passes none of none has shown nothing")
    if entry_point is None and not all(isinstance(test, OutputTest) for test in tests):
        raise ValueError("entry_point must name the function to call, got None")
    return {
        "code": code,
        "entry_point": entry_point or "",
        "tests": [_ORDERS[type(test)](test) for test in tests],
        "limits": dict(vars(limits)),
        "packages": {
            name: _folder_of(name) for test in tests if isinstance(test, AssertTest) for name in test.packages
        },
    }


def _folder_of(package: str) -> str:
    found = importlib.util.find_spec(package)
    if found is None or found.origin is None:
        raise ValueError(f"a test imports {package}, which is not installed")
    return str(Path(found.origin).parent.parent)


def decode_report(answer: dict[str, Any]) -> Report:
    """Return a report, equal results shared. Raises SandboxFailed without a verdict."""
    if "unjudged" in answer:
        raise SandboxFailed(answer["unjudged"])
    results = [TestResult(**result) for result in answer["results"]]
    return Report(
        results=tuple(map({result: result for result in results}.__getitem__, results)),
        suspicious_imports=tuple(answer["imports"]),
        seconds=answer["seconds"],
    )


def _call(test: CallTest) -> dict[str, Any]:
    return {
        "test": "call",
        "args": _encode_value("args", list(test.args)),
        "kwargs": _encode_value("kwargs", dict(test.kwargs)),
        "expected": [_encode_value("expected", value) for value in (test.expected, *test.also)],
        "rel": test.rel,
        "abs": test.abs,
        "is_json": test.is_json,
    }


def _encode_value(name: str, value: Any) -> Any:
    try:
        return Encoder(MAX_TEST, is_strict=True).encode(value)
    except Unencodable as error:
        raise ValueError(f"{name} of a test must be plain values: {error}") from error


_ORDERS: dict[type, Callable[[Any], dict[str, Any]]] = {
    CallTest: _call,
    OutputTest: lambda test: {"test": "output", "stdin": test.stdin, "expected": test.expected},
    AssertTest: lambda test: {
        "test": "assert",
        **{name: value for name, value in vars(test).items() if name != "packages"},
    },
}
