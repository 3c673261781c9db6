"""The sandbox's data: tests and limits in, verdicts out."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, get_args

from covey_sandbox.inside import case

Tier = Literal["auto", "namespace", "landlock", "unsafe_no_isolation"]
"""Isolation of a program. "auto": the strongest of the next two that passes its probes; never the last."""
TIERS: tuple[Tier, ...] = get_args(Tier)

USUAL_MODULES = frozenset(case.USUAL.split())
"""Modules that test code uses without importing them."""

Kind = Literal["passed", "wrong", "error", "timeout", "crash", "output", "load", "channel", "not_run"]
"""Result of one test:

- passed
- wrong: an answer, but not the expected one (or one that is no plain value)
- error: it raised
- timeout: it took longer than `wall_seconds`, or its answer took too long to judge
- crash: its process ended or was killed (a signal, the CPU limit, `os._exit`), or its answer ended the one that judged
- output: it printed more than `output_bytes` where its output is the answer
- load: the program could not be loaded, or does not define the entry point
- channel: the program broke the rules of the result channel; then all of its tests fail
- not_run: `total_seconds` were used up before it"""

SUSPICIOUS = case.SUSPICIOUS
"""Modules that honest solutions rarely need and attacks nearly always do."""


@dataclass(frozen=True)
class Limits:
    """The limits of one program; defaults suit HumanEval and MBPP."""

    wall_seconds: float = 5.0
    """Seconds for each test, and for loading the program."""
    total_seconds: float = 20.0
    """Seconds for all tests of a program; once one has timed out the others share the rest."""
    cpu_seconds: int = 20
    """CPU seconds of one process; a program gets a fresh one after a test that ended it."""
    memory_bytes: int = 512 << 20
    """Address space besides the interpreter's own."""
    output_bytes: int = 8 << 20
    """Maximum bytes of one answer, and of the output of a stdin/stdout program."""
    num_processes: int = 64
    """Threads; starting further processes is never allowed."""
    file_bytes: int = 16 << 20
    """Maximum bytes of all files in its private folder together, and of each."""

    def __post_init__(self) -> None:
        for name in ("wall_seconds", "cpu_seconds", "memory_bytes", "output_bytes", "num_processes", "file_bytes"):
            value = self.__dict__[name]
            if not value > 0:
                raise ValueError(f"{name} must be > 0, got {value}")
        if not self.total_seconds >= self.wall_seconds:
            raise ValueError(f"total_seconds must be >= wall_seconds={self.wall_seconds}, got {self.total_seconds}")


@dataclass(frozen=True)
class CallTest:
    """The entry point, called with these arguments, must return the expected value.

    Types are strict: `True` is not `1`, a list is not a tuple, but an int of equal value passes for a float.
    Values are plain: None, bool, int, float, complex, str, bytes, list, tuple, set, frozenset, dict, Fraction, Decimal.

    >>> CallTest(args=(12, 18), expected=6)
    >>> CallTest(args=([0.1, 0.2],), expected=0.3, rel=1e-6)
    """

    args: Sequence[Any] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    expected: Any = None
    rel: float = 0.0
    abs: float = 0.0
    """Floats pass where |got - expected| <= abs + rel * |expected|."""
    also: tuple[Any, ...] = ()
    """Further values that are right."""
    is_json: bool = False
    """The values are those of JSON, which has no tuples: one passes for a list."""

    def __post_init__(self) -> None:
        if isinstance(self.args, str | bytes) or not isinstance(self.args, Sequence):
            raise ValueError(f"args must be a tuple or a list of arguments, got {self.args!r:.80}; one is written (x,)")


@dataclass(frozen=True)
class OutputTest:
    """The program, run as a script with this stdin, must print the expected text.

    Compared line by line without white space at line ends and without empty lines at the end; decimals may differ by
    1e-6, absolute and relative.
    """

    stdin: str
    expected: str


@dataclass(frozen=True)
class AssertTest:
    """Trusted test code: HumanEval's `check(candidate)`, an assert of MBPP.

    It runs in a trusted process where the entry point (also under the name `candidate`) is a proxy: each call goes
    to the sandbox and comes back as a plain value. One AssertTest is one test, passed where nothing raises; a
    `check` that is only defined is called.
    """

    source: str
    setup: str = ""
    """Runs before `source`, in the trusted process: imports, and helpers that the prompt defines."""
    call: str = ""
    """Callable of `source` to call then: a function, or `Class.method` of a unittest or pytest class."""
    names: tuple[str, ...] = ()
    """Names of the program that the test uses besides the entry point."""
    classes: tuple[str, ...] = ()
    """Classes among `names` and the entry point. Only objects that the test makes of these may take part in
    comparisons and arithmetic: what a function returns is a plain value, or little more than true or false."""
    packages: tuple[str, ...] = ()
    """Packages that the test imports besides the standard library, taken from the caller's installation."""


Test = CallTest | OutputTest | AssertTest


@dataclass(frozen=True)
class TestResult:
    """Result of one test."""

    passed: bool
    kind: Kind
    message: str
    """One line for people and for the model's next turn; empty where it passed."""

    __test__ = False  # pytest would collect it


@dataclass(frozen=True)
class Report:
    """Results of a program."""

    results: tuple[TestResult, ...]
    """One for each test, in order."""
    suspicious_imports: tuple[str, ...]
    """Modules of SUSPICIOUS that the program names in an import, sorted. Found before any of it runs."""
    seconds: float
    """Seconds from the start of the program to the last verdict."""

    @property
    def fraction(self) -> float:
        """Compute passed tests / tests, exactly."""
        return sum(result.passed for result in self.results) / len(self.results)


class SandboxFailed(RuntimeError):
    """The sandbox itself failed, not the program: there is no verdict."""


class Runner(Protocol):
    """Runs tests: the Sandbox, or a cache before it."""

    async def run(
        self, code: str, tests: Sequence[Test], entry_point: str | None = None, limits: Limits | None = None
    ) -> Report:
        """Judge a program. SandboxFailed without verdict, ValueError for unsupported tests."""

    def describe(self) -> dict[str, Any]:
        """Return manifest values: the isolation, and results of the probes."""

    def close(self) -> None:
        """End all processes. Idempotent."""
