"""Assert-style tests as datasets have them: trusted code, run here, whose calls of the candidate go to the sandbox.

What comes back is plain data, so `assert f(x) == y` compares two plain values in a process that ran nothing of the
program. From its first call on a test is on the program's account: small answers can make large work.
"""

import ast
import builtins
import gc
import importlib
import threading
import time
from collections.abc import Callable
from functools import lru_cache
from types import CodeType
from typing import Any

from covey.sandbox.inside import codec, wire
from covey.sandbox.inside.case import Case, LoadFailed, answer_of
from covey.sandbox.inside.host import Ended, TimedOut, Unjudged, Violation
from covey.sandbox.inside.judging.shown import shown, shown_call
from covey.sandbox.inside.link import MAX_MESSAGE, PASSED, Verdict, failed

CANDIDATE = "candidate"
USUAL = "math cmath sys os re random string copy itertools functools collections heapq bisect operator datetime"
MODULES = {name: importlib.import_module(name) for name in USUAL.split()}
"""What tests use without importing it."""
TEST_NAME = "<test>"


class ProgramError(Exception):
    """The program raised something that is no built-in exception."""


class GivenUp(BaseException):
    """This test has its verdict already: a call hung or ended its process. No test's `except` is to catch it."""


class Candidate:
    """The program's function as one test sees it."""

    def __init__(self, case: Case, num_left: int) -> None:
        self._case = case
        self._num_left = num_left
        self._began = time.monotonic()
        self._deadline: float | None = None
        """There is one from the first call on."""
        self._has_answered = False
        self.verdict: Verdict | None = None
        """Of a call that gave no answer."""
        self.fault: Exception | None = None
        """Why the whole program passes no test, or gets no verdict. Kept here, since tests may catch what they like."""
        self.last = ""
        """The last call and what became of it."""

    def call(self, *arguments: Any, **keywords: Any) -> Any:
        """Return the program's answer, in plain types. Raises what it raised, by name."""
        text = shown_call(self._case.entry_point, arguments, keywords)
        if self.verdict is not None or self.fault is not None:
            raise GivenUp
        # Turn every way a call can end into a verdict, a fault or a value
        try:
            frame = self._ask(arguments, keywords)
            has_value, value = answer_of(frame, self._num_calls - 1)
        except TimedOut:
            self.verdict = failed("timeout", f"{text} took too long")
        except Ended:
            self.verdict = failed("crash", f"{text} ended its process")
        except (Violation, Unjudged) as error:
            self.fault = error
        except LoadFailed as error:
            self.verdict = failed("load", str(error))
        except codec.Unencodable as error:
            self._refuse(f"a test passes on what a program cannot be given: {text}: {error}")
        except Exception as error:
            self.verdict = failed("error", f"{text} cannot be judged: {type(error).__name__}")
        else:
            self._has_answered = True
            self.last = f"{text} returned {shown(value)}" if has_value else f"{text} raised {value}"
            if has_value:
                return value
            raise error_named(value)
        raise GivenUp

    @property
    def is_uncalled(self) -> bool:
        """Return whether nothing was asked of the program, so that it is not to blame for anything."""
        return self._deadline is None and self.fault is None

    @property
    def _num_calls(self) -> int:
        assert self._case.program is not None
        return self._case.program.num_calls

    def _ask(self, arguments: Any, keywords: Any) -> dict[str, Any]:
        program = self._case.program
        assert program is not None
        # Encode strictly: what a program cannot be given must not pass a test
        encoder = codec.Encoder(self._case.limits["output_bytes"], is_strict=True)
        order = {"i": program.num_calls, "args": encoder.encode(list(arguments)), "kwargs": encoder.encode(keywords)}
        # Time of the test before its first call is the judge's, not the program's
        if self._deadline is None:
            self._case.excuse(time.monotonic() - self._began)
            self._deadline = self._case.expect(self._num_left)
        program.send(wire.pack(codec.dumps(order)))
        program.num_calls += 1
        return program.receive(self._deadline)

    def _refuse(self, why: str) -> None:
        """Blame the program for arguments that may be made of its answers, else the test."""
        if self._has_answered:
            self.verdict = failed("error", why)
        else:
            self.fault = Unjudged(why)


def error_named(text: str) -> Exception:
    """Return the built-in exception of that name, or else a ProgramError. None that ends processes or loops."""
    name, _, message = text.partition(": ")
    found = builtins.__dict__.get(name)
    is_plain = isinstance(found, type) and issubclass(found, Exception) and not issubclass(found, StopIteration)
    try:
        return found(message) if is_plain else ProgramError(text)  # type: ignore[misc]
    except TypeError:  # UnicodeDecodeError wants more than a message
        return ProgramError(text)


def judge_assert(case: Case, tests: list[dict[str, Any]], index: int) -> int:
    """Give the verdict on one test, and return how many were given: none where a fresh process is to try it again."""
    # A test may run in the process of the one before, unless that has ended
    is_fresh = case.program is None
    if is_fresh:
        case.load()
    case.begin_uncharged()
    candidate = Candidate(case, len(tests) - index)
    verdict = verdict_on_assert(case, candidate, tests[index])
    # Whatever the test caught, the call's own verdict counts
    if candidate.verdict is not None:
        case.end()
        if candidate.verdict["kind"] == "crash" and not is_fresh:
            return 0  # what an earlier test did to the process may be to blame
    case.add(verdict)
    return 1


def verdict_on_assert(case: Case, candidate: Candidate, test: dict[str, Any]) -> Verdict:
    """Run the test, which is passed where nothing raises."""
    verdict = PASSED
    try:
        run_test(case.entry_point, candidate, test)
        if candidate.is_uncalled:
            raise Unjudged(f"a test never calls the program: {test['source'].strip()[:MAX_MESSAGE]}")
    except Unjudged:
        raise
    except GivenUp:
        pass
    except MemoryError:
        gc.collect()
        verdict = failed("error", f"MemoryError in the test: {candidate.last}")
    except BaseException as error:
        told = message(error, candidate, test)
        verdict = failed("wrong" if isinstance(error, AssertionError) else "error", told)
        if candidate.is_uncalled:
            raise Unjudged(f"a test fails before it calls the program: {told}") from error
    if candidate.fault is not None:
        raise candidate.fault
    return candidate.verdict or verdict


def message(error: BaseException, candidate: Candidate, test: dict[str, Any]) -> str:
    """Return the line of the test that failed, and the last call it made."""
    line, trace = "", error.__traceback__
    lines = test["source"].split("\n")
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == TEST_NAME:
            line = lines[trace.tb_lineno - 1].strip()
        trace = trace.tb_next
    told = "" if isinstance(error, AssertionError) else f"{type(error).__name__}{text_of(error)}"
    place = f" in {line[: MAX_MESSAGE // 2]}" if told and line else line[: MAX_MESSAGE // 2]
    return f"{told}{place}" + (f": {candidate.last}" if candidate.last else "")


def text_of(error: BaseException) -> str:
    """Return its message, which may be made of answers: it may be long, or raise itself."""
    try:
        text = str(error)[: MAX_MESSAGE // 3]
    except Exception:
        text = ""
    return f": {text}" if text else ""


def run_test(entry_point: str, candidate: Candidate, test: dict[str, Any]) -> None:
    """Run the test's code with the candidate under its own name and as `candidate`."""
    # The scope of a test: its modules, its setup, the program as a function
    scope: dict[str, Any] = {**MODULES, "__name__": "test"}
    exec(compiled(test["setup"], "<setup>")[0], scope)
    proxy = function_named(entry_point, candidate.call)
    scope[entry_point] = scope[CANDIDATE] = proxy
    # Run it; a check(candidate) that is only defined is called
    code, is_defined_only = compiled(test["source"], TEST_NAME)
    try:
        exec(code, scope)
        if is_defined_only:
            scope["check"](proxy)
    finally:
        scope.clear()  # what it holds would else stay until the next collection


def function_named(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function, since some tests look at `__name__`. Threads that call it take turns: there is one program."""
    turn = threading.RLock()

    def candidate(*arguments: Any, **keywords: Any) -> Any:
        with turn:
            return call(*arguments, **keywords)

    candidate.__name__ = name
    return candidate


@lru_cache(maxsize=512)
def compiled(source: str, name: str) -> tuple[CodeType, bool]:
    """Return the code, and whether it defines a `check` that it does not call itself."""
    try:
        tree = ast.parse(source, name)
    except SyntaxError as error:
        raise Unjudged(f"a test is not Python: {error}") from error
    # MBPP and HumanEval define check(candidate), some call it too
    defines = any(isinstance(node, ast.FunctionDef) and node.name == "check" for node in tree.body)
    calls = any(
        isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Call)
        and isinstance(node.value.func, ast.Name)
        and node.value.func.id == "check"
        for node in tree.body
    )
    return compile(tree, name, "exec", dont_inherit=True), defines and not calls
