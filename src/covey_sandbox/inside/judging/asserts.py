"""Assert-style tests: trusted code here, calls of the candidate in the sandbox.

Answers are plain data, compared in a process without the program. From its first call on, a test is charged to the
program: small answers can cause large work.
"""

import ast
import gc
import importlib
from functools import lru_cache
from types import CodeType
from typing import Any

from covey_sandbox.inside.case import USUAL, ProgramCase
from covey_sandbox.inside.host import Unjudged
from covey_sandbox.inside.judging import pytest_like
from covey_sandbox.inside.judging.candidate import CANDIDATE, SETUP_NAME, TEST_MODULE, TEST_NAME, Candidate, GivenUp
from covey_sandbox.inside.judging.in_place import IN_PLACE, SAME, mark_calls
from covey_sandbox.inside.judging.remote import same
from covey_sandbox.inside.link import MAX_MESSAGE, PASSED, Verdict, failed_verdict

MODULES = {name: importlib.import_module(name) for name in USUAL.split()}
"""Modules that tests use without importing them."""


def judge_assert(case: ProgramCase, tests: list[dict[str, Any]], index: int) -> int:
    """Give the verdict on a test; return 0 where a fresh process must retry."""
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


def verdict_on_assert(case: ProgramCase, candidate: Candidate, test: dict[str, Any]) -> Verdict:
    """Run the test, which passes where nothing raises."""
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
        verdict = failed_verdict("error", f"MemoryError in the test: {candidate.last}")
    except BaseException as error:
        told = message(error, candidate, test)
        verdict = failed_verdict("wrong" if isinstance(error, AssertionError) else "error", told)
        if candidate.is_uncalled:
            raise Unjudged(f"a test fails before it calls the program: {told}") from error
    if candidate.fault is not None:
        raise candidate.fault
    return candidate.verdict or verdict


def message(error: BaseException, candidate: Candidate, test: dict[str, Any]) -> str:
    """Return the failed line of the test, and its last call."""
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
    """Return an error's message, which may be long or raise itself."""
    try:
        text = str(error)[: MAX_MESSAGE // 3]
    except Exception:
        text = ""
    return f": {text}" if text else ""


def run_test(entry_point: str, candidate: Candidate, test: dict[str, Any]) -> None:
    """Run the test's code with the candidate by name and as `candidate`."""
    scope: dict[str, Any] = {**MODULES, "__name__": TEST_MODULE}
    scope |= {IN_PLACE: candidate.in_place, SAME: same}
    exec(compile_test(test["setup"], SETUP_NAME)[0], scope)
    scope.update(candidate.names_for(test))
    # Run it, and what it only defines; a check(candidate) that is only defined is called
    code, is_defined_only = compile_test(test["source"], TEST_NAME)
    try:
        exec(code, scope)
        if test["call"]:
            pytest_like.run(scope, test["call"])
        elif is_defined_only:
            scope["check"](scope[CANDIDATE])
    finally:
        scope.clear()  # what it holds would else stay until the next collection


@lru_cache(maxsize=512)
def compile_test(source: str, name: str) -> tuple[CodeType, bool]:
    """Compile a test; return also whether it defines an uncalled `check`."""
    try:
        tree = mark_calls(ast.parse(source, name))
    except SyntaxError as error:
        raise Unjudged(f"a test is not Python: {error}") from error
    # HumanEval defines check(candidate), others call it too
    defines = any(isinstance(node, ast.FunctionDef) and node.name == "check" for node in tree.body)
    calls = any(
        isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Call)
        and isinstance(node.value.func, ast.Name)
        and node.value.func.id == "check"
        for node in tree.body
    )
    return compile(tree, name, "exec", dont_inherit=True), defines and not calls
