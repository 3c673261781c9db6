"""Read rows of programming data sets, by any column names (docs/tasks/code.md).

Test code is trusted: it runs as it is, in a process that the tested program cannot reach.
"""

import ast
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

from covey.environments.data.columns import from_text
from covey_graders.code.cases import call_test, case_tests, is_assigned, name_in, plural
from covey_graders.code.suites import Suite, called_name, imported, suite_tests
from covey_sandbox.types import AssertTest, CallTest, OutputTest, Test
from covey_tasks.code.problems import Problem
from covey_tasks.code.settings import TEST_PACKAGES
from covey_tasks.code.words import asked, shown_call, signature_of, to_complete, to_define, to_script
from covey_tasks.columns import nothing_in, text_in

Row = Mapping[str, Any]

PROMPTS = (
    *("problem_description", "question_content", "instruct_prompt", "prompt", "text", "question", "problem"),
    *("instruction", "query", "description"),
)
NAMES = ("entry_point", "function", "fn_name", "func_name", "function_name", "function_signature", "signature")
FIRST_LINE = re.compile(r"^[ \t]*(?:async[ \t]+)?def[ \t]+((?!__)\w+)", re.MULTILINE)
SCRIPTS_NAME = "main"
"""A function so called says that the program is a script."""
TESTS = (
    *("test_list", "tests", "test", "input_output", "public_test_cases", "private_test_cases", "test_cases"),
    *("public_tests", "private_tests", "generated_tests", "official_tests", "unit_tests", "test_code"),
    *("challenge_test_list", "testcase", "verification_info", "assert_case", "functional"),
)
PARTS = {"input_format": "Input", "output_format": "Output", "note": "Note"}
"""Columns of Codeforces that continue the description."""
OTHER_LANGUAGES = frozenset(["c", "c++", "cpp", "c#", "cs", "csharp", "go", "haskell", "java", "javascript", "js"])
OTHER_LANGUAGES |= {"julia", "kotlin", "lua", "perl", "php", "r", "ruby", "rust", "scala", "swift", "typescript"}
PACKED = (*TESTS, "test_imports", "metadata")
"""Columns that copies in Parquet hold as JSON text."""
METHOD = re.compile(r"^check\((Solution\(\)\.\w+)\)\s*\Z", re.MULTILINE)
"""The last line of tests of a method."""
USUAL_IMPORTS = """\
import bisect, collections, datetime, functools, heapq, itertools, math, operator, random, re, string
from typing import *
from bisect import *
from collections import *
from functools import *
from heapq import *
from itertools import *
from math import *
"""
"""Imports that LeetCode puts before every answer, a method of `Solution`."""


def problem_of(row: Row, packages: Collection[str] = TEST_PACKAGES) -> Problem:
    """Read a row's problem. ValueError for missing columns or impossible needs.

    packages: those that test code may import besides the standard library.
    """
    row = _unpack(row)
    prompt = "\n\n".join([_text(row, *PROMPTS), *_parts(row)])
    _check_judged(row)
    columns, left_out = _test_columns(row)
    # HumanEval's prompts are the beginning of the program itself
    entry_point = _entry_point(row, columns)
    opening = prompt if _begins_program(prompt, entry_point) else ""
    solution, preamble = _solution(row, prompt), _preamble(row, prompt, entry_point)
    _check_program(solution or opening)
    given = "\n".join([solution or "", row.get("starter_code") or "", preamble, prompt])
    suite = Suite("", _setup(row, opening, preamble), entry_point, given, packages)
    tests = _different([test for column in columns for test in _tests(column, suite, _function(row, column))])
    if not tests:
        raise ValueError("has no test: its lists of tests are empty")
    is_script = all(isinstance(test, OutputTest) for test in tests)
    level = row.get("difficulty")
    problem = Problem(
        family=str(row.get("source", "rows")),
        difficulty=level if isinstance(level, int | str) and not isinstance(level, bool) else None,
        statement=to_complete(opening) if opening else "",
        entry_point="" if is_script else entry_point,
        tests=tuple(tests),
        solution=solution,
        opening=opening,
        preamble=preamble,
        left_out=left_out,
    )
    return problem if opening else replace(problem, statement=_statement(problem, prompt, row, columns[0]))


def _unpack(row: Row) -> Row:
    return {name: from_text(value) if name in PACKED else value for name, value in row.items()}


def _parts(row: Row) -> list[str]:
    """Return the parts of a statement beside its description."""
    whole = _given(row, *PROMPTS) == "description"
    return [f"{title}\n\n{row[name]}" for name, title in PARTS.items() if whole and row.get(name)]


def _check_judged(row: Row) -> None:
    """Refuse (ValueError) problems of other languages, or of many right outputs."""
    if row.get("generated_checker") or row.get("interaction_format"):
        raise ValueError("has outputs that a program of its own judges, which nothing here runs")
    tests = row.get("verification_info")
    language = tests.get("language") if isinstance(tests, Mapping) else row.get("language")
    if str(language).lower() in OTHER_LANGUAGES:
        raise ValueError(f"asks for a program in {language}, and programs are Python's")


def _given(row: Row, *names: str) -> str:
    for name in names:
        if row.get(name):
            return name
    raise ValueError(nothing_in(row, *names))


def _text(row: Row, *names: str) -> str:
    return text_in(row, _given(row, *names))


def _test_columns(row: Row) -> tuple[list[Any], str]:
    """Collect the columns of tests, and the reason to omit one."""
    if row.get("inputs") and row.get("outputs"):
        row = {"tests": {name: from_text(row[name]) for name in ("inputs", "outputs")}, **row}
    columns = _named_tests(row)
    columns = [value for place, value in enumerate(columns) if value not in columns[:place]]
    # LeetCode shows the calls of its test code once more, where lists stand for trees
    is_tested = any(map(_sources, columns))
    columns = [value for value in columns if not (is_tested and _are_shown(value))]
    # A pickle runs whatever its author likes
    readable = [value for value in columns if not (isinstance(value, str) and value is row.get("private_test_cases"))]
    left_out = (
        "" if len(readable) == len(columns) else "private_test_cases is a pickle in base64, which nothing here reads"
    )
    if not readable:
        raise ValueError(left_out)
    return readable, left_out


def _are_shown(tests: Any) -> bool:
    return isinstance(tests, list) and all(isinstance(one, Mapping) and is_assigned(one.get("input")) for one in tests)


def _named_tests(row: Row) -> list[Any]:
    """Collect the columns of tests, and those of such a column."""
    found: list[Any] = []
    for value in [row[name] for name in (_given(row, *TESTS), *TESTS) if row.get(name)]:
        is_row = isinstance(value, Mapping) and not value.keys().isdisjoint(TESTS)
        found += _named_tests(_unpack(value)) if is_row else [value]
    return found


def _function(row: Row, tests: Any) -> str | None:
    """Find the function that cases call, None for a script."""
    cases = tests if isinstance(tests, list) else [tests]
    named = next((name for name in map(name_in, [*cases, {"metadata": row.get("metadata")}]) if name), None)
    if named or _sources(tests):
        return named or row.get("fn_name")
    given = [case.get("inputs", case.get("input")) for case in cases if isinstance(case, Mapping)]
    given = given[0] if len(given) == 1 and isinstance(given[0], list) else given
    is_read = all(isinstance(one, str) and not is_assigned(one) for one in given)  # by a script, else by a function
    begun = FIRST_LINE.findall("" if is_read else row.get("starter_code") or "")
    named = _function_name(row) or next(reversed(begun), None)
    return named if isinstance(named, str) and named != SCRIPTS_NAME else None


def _function_name(row: Row) -> Any:
    """Find the function's name in a column: a name or first line."""
    named = next((row[name] for name in NAMES if row.get(name)), None)
    line = FIRST_LINE.match(named) if isinstance(named, str) else None
    return line[1] if line else named


def _entry_point(row: Row, columns: Sequence[Any]) -> str:
    """Find the function's name in a column, cases or test code."""
    named = _function_name(row)
    sources = [source for column in columns for source in _sources(column)]
    named = named or next((name for column in columns if (name := _function(row, column))), None)
    if named is None:
        method = METHOD.search(sources[0]) if sources else None
        named = method[1] if method is not None else called_name(sources[0]) if sources else ""
    name = named.replace("()", "") if isinstance(named, str) else ""
    if not all(map(str.isidentifier, name.split("."))) and (sources or name):
        raise ValueError(f"column 'entry_point' must name a function, got {named!r:.80}")
    is_method = "class Solution" in (row.get("starter_code") or "") and name.isidentifier()
    return f"Solution.{name}" if is_method and name != "Solution" else name


def _solution(row: Row, prompt: str) -> str | None:
    for name in ("solution", "code", *(("completion",) if row.get("starter_code") else ())):
        if row.get(name):
            return text_in(row, name)
    if not row.get("canonical_solution"):
        return None
    # After a prompt in words another column holds the beginning
    rest = _text(row, "canonical_solution")
    begun = next((row[name] for name in ("code_prompt", "complete_prompt") if row.get(name)), prompt)
    return begun + rest if rest.startswith((" ", "\t")) else rest


def _preamble(row: Row, prompt: str, entry_point: str) -> str:
    """Find the imports before every answer of LeetCode."""
    if not entry_point.startswith("Solution."):
        return ""
    own = row.get("prompt")
    return own if isinstance(own, str) and own != prompt and "import " in own else USUAL_IMPORTS


def _check_program(program: str) -> None:
    """Refuse (ValueError) a program with imports that the sandbox lacks."""
    tree = _tree_of(program) or _tree_of(program + "\n    pass\n")
    for name in imported(tree) if tree is not None else ():
        raise ValueError(f"its program imports {name}; programs have Python's standard library alone")


def _tree_of(program: str) -> ast.Module | None:
    try:
        return ast.parse(program)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def _setup(row: Row, opening: str, preamble: str) -> str:
    """Collect imports and helpers that test code needs."""
    imports = row.get("test_imports") or []
    if not _is_list_of_text(imports):
        raise ValueError(f"test_imports must be a list of import lines, got {imports!r:.80}")
    helpers = opening + "    pass\n" if opening else preamble
    return "\n".join([helpers, *imports, row.get("test_setup_code") or ""]).strip("\n")


def _is_list_of_text(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str) and all(isinstance(v, str) for v in value)


def _begins_program(prompt: str, entry_point: str) -> bool:
    """Check whether the prompt is the beginning of the program."""
    tree, functions = _tree_of(prompt + "\n    pass\n"), (ast.FunctionDef, ast.AsyncFunctionDef)
    return tree is not None and any(isinstance(node, functions) and node.name == entry_point for node in tree.body)


def _statement(problem: Problem, prompt: str, row: Row, shown: Any) -> str:
    """Write the problem's statement, with the first of several examples."""
    starter = row.get("starter_code") or ""
    if not problem.entry_point:
        return to_script(prompt, starter)
    name, calls = problem.entry_point, [test for test in problem.tests if isinstance(test, CallTest)]
    lines = [shown[0]] if _is_list_of_text(shown) else [shown_call(name, test) for test in calls[:-1]]
    others = {
        other: test.classes for test in problem.tests if isinstance(test, AssertTest) for other in (name, *test.names)
    }
    signature = signature_of(problem.solution, name, calls)
    called = to_define(name, signature, starter, {other: other in classes for other, classes in others.items()})
    return asked(prompt, called, lines[:1])


def _sources(tests: Any) -> list[str]:
    if isinstance(tests, str):
        return [tests]
    return list(tests) if _is_list_of_text(tests) else []


def _tests(tests: Any, suite: Suite, function: str | None) -> Sequence[Test]:
    sources = _sources(tests)
    if sources:
        return [test for source in sources for test in suite_tests(replace(suite, source=source))]
    if isinstance(tests, Mapping):
        return case_tests(plural(tests), function)
    if isinstance(tests, Sequence) and all(isinstance(test, Mapping) and "input" in test for test in tests):
        return case_tests(tests, function)
    if isinstance(tests, Sequence):
        return [call_test(test) for test in tests]
    raise ValueError(f"tests must be code or a list, got {tests!r:.80}")


def _different(tests: Sequence[Test]) -> list[Test]:
    """Leave out repeated tests: rows may hold asserts as list and text."""
    found: dict[Any, Test] = {}
    for test in tests:
        same = (ast.unparse(ast.parse(test.source)), test.call) if isinstance(test, AssertTest) else id(test)
        found.setdefault(same, test)
    return list(found.values())
