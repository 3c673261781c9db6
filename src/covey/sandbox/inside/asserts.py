"""Assert-style tests as datasets have them: trusted code, run here, whose calls of the candidate go to the sandbox.

What comes back is plain data, so `assert f(x) == y` compares two plain values in a process that ran nothing of the
program.
"""

import ast
import builtins
import importlib
from collections.abc import Callable
from functools import lru_cache
from types import CodeType
from typing import Any

from covey.sandbox.inside import codec, wire
from covey.sandbox.inside.case import PASSED, Case, LoadFailed, Verdict, answer_of, failed
from covey.sandbox.inside.host import Ended, TimedOut, Unjudged, Violation
from covey.sandbox.inside.shown import shown, shown_call
from covey.sandbox.inside.timer import TooSlow

CANDIDATE = "candidate"
USUAL = "math cmath sys os re random string copy itertools functools collections heapq bisect operator datetime"
"""Modules that tests use without importing them."""
TEST_NAME = "<test>"


class ProgramError(Exception):
    """The program raised something that is no built-in exception."""


class GivenUp(BaseException):
    """This test has its verdict already: a call hung or ended its process. No test's `except` is to catch it."""


class Candidate:
    """The program's function as a test sees it."""

    def __init__(self, case: Case) -> None:
        self._case = case
        self.verdict: Verdict | None = None
        """Of a call that gave no answer."""
        self.fault: Exception | None = None
        """Why the whole program passes no test, or gets no verdict. Kept here, since tests may catch what they like."""
        self.num_calls = 0
        """Of the process that runs now."""
        self.deadline = 0.0
        self.last = ""
        """The last call and what became of it."""

    def call(self, *arguments: Any, **keywords: Any) -> Any:
        """The program's answer, in plain types; raises what it raised, by name."""
        text = shown_call(self._case.entry_point, arguments, keywords)
        if self.verdict is not None or self.fault is not None:
            raise GivenUp
        try:
            frame = self._ask(arguments, keywords)
            has_value, value = answer_of(frame, self.num_calls - 1)
        except TimedOut:
            self._case.has_timed_out = True
            self.verdict = failed("timeout", f"{text} took too long")
        except Ended:
            self.verdict = failed("crash", f"{text} ended its process")
        except Violation as error:
            self.fault = error
        except codec.Unencodable as error:
            self.fault = Unjudged(f"a test passes on what a program cannot be given: {text}: {error}")
        else:
            self.last = f"{text} returned {shown(value)}" if has_value else f"{text} raised {value}"
            if has_value:
                return value
            raise error_named(value)
        raise GivenUp

    def _ask(self, arguments: Any, keywords: Any) -> dict[str, Any]:
        program = self._case.program
        assert program is not None
        encoder = codec.Encoder(self._case.limits["output_bytes"], is_strict=True)
        order = {"i": self.num_calls, "args": encoder.encode(list(arguments)), "kwargs": encoder.encode(keywords)}
        program.send(wire.pack(codec.dumps(order)))
        self.num_calls += 1
        return program.receive(self.deadline)


def error_named(text: str) -> Exception:
    """The built-in exception of that name, or else a ProgramError; none that ends processes or loops."""
    name, _, message = text.partition(": ")
    found = builtins.__dict__.get(name)
    is_plain = isinstance(found, type) and issubclass(found, Exception) and not issubclass(found, StopIteration)
    try:
        return found(message) if is_plain else ProgramError(text)  # type: ignore[misc]
    except TypeError:  # UnicodeDecodeError wants more than a message
        return ProgramError(text)


def judge_asserts(case: Case, tests: list[dict[str, Any]]) -> list[Verdict]:
    """Each test by itself; one that ends its process does not touch those behind it."""
    verdicts: list[Verdict] = []
    candidate = Candidate(case)
    is_fresh = False
    while len(verdicts) < len(tests):
        if case.left() == 0:
            left = failed("not_run", f"the program used up {case.limits['total_seconds']:g} s")
            return verdicts + [left] * (len(tests) - len(verdicts))
        if case.program is None:
            try:
                case.load()
            except LoadFailed as error:
                return verdicts + [failed("load", str(error))] * (len(tests) - len(verdicts))
            candidate, is_fresh = Candidate(case), True
        candidate.deadline = case.deadline(len(tests) - len(verdicts))
        verdict = judge_assert(case, candidate, tests[len(verdicts)])
        if candidate.verdict is not None:
            case.end()
        if verdict["kind"] != "crash" or is_fresh:
            verdicts.append(verdict)
        is_fresh = False
    return verdicts


def judge_assert(case: Case, candidate: Candidate, test: dict[str, Any]) -> Verdict:
    """Passed where nothing raises."""
    candidate.last = ""
    verdict = PASSED
    try:
        run_test(case.entry_point, candidate, test)
    except (Unjudged, TooSlow):
        raise
    except GivenUp:
        pass
    except BaseException as error:
        verdict = failed("wrong" if isinstance(error, AssertionError) else "error", message(error, candidate, test))
    if candidate.fault is not None:
        raise candidate.fault
    return candidate.verdict or verdict


def message(error: BaseException, candidate: Candidate, test: dict[str, Any]) -> str:
    """The line of the test that failed, and the last call it made."""
    line, trace = "", error.__traceback__
    lines = test["source"].split("\n")
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == TEST_NAME:
            line = lines[trace.tb_lineno - 1].strip()
        trace = trace.tb_next
    told = "" if isinstance(error, AssertionError) else f"{type(error).__name__}: {error} in "
    return f"{told}{line[:300]}" + (f": {candidate.last}" if candidate.last else "")


def run_test(entry_point: str, candidate: Candidate, test: dict[str, Any]) -> None:
    """The test's code with the candidate under its own name and as `candidate`."""
    scope: dict[str, Any] = {name: importlib.import_module(name) for name in USUAL.split()}
    scope["__name__"] = "test"
    exec(compiled(test["setup"], "<setup>")[0], scope)
    proxy = function_named(entry_point, candidate.call)
    scope[entry_point] = scope[CANDIDATE] = proxy
    code, is_defined_only = compiled(test["source"], TEST_NAME)
    exec(code, scope)
    if is_defined_only:
        scope["check"](proxy)


def function_named(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
    """A function, since some tests look at `__name__`."""

    def candidate(*arguments: Any, **keywords: Any) -> Any:
        return call(*arguments, **keywords)

    candidate.__name__ = name
    return candidate


@lru_cache(maxsize=512)
def compiled(source: str, name: str) -> tuple[CodeType, bool]:
    """The code, and whether it defines a `check` that it does not call itself."""
    try:
        tree = ast.parse(source, name)
    except SyntaxError as error:
        raise Unjudged(f"a test is not Python: {error}") from error
    defines = any(isinstance(node, ast.FunctionDef) and node.name == "check" for node in tree.body)
    calls = any(
        isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Call)
        and isinstance(node.value.func, ast.Name)
        and node.value.func.id == "check"
        for node in tree.body
    )
    return compile(tree, name, "exec", dont_inherit=True), defines and not calls
