"""Honest programs pass, whatever of Python they use."""

import pytest

from covey_sandbox import CallTest, Limits, OutputTest, Sandbox

from . import honest


@pytest.mark.long
def test_functions_may_use_files_threads_locks_and_the_rest_of_the_library(sandbox: Sandbox) -> None:
    tests = [CallTest((name,), expected="x") for name in honest.NAMES]
    report = sandbox.run_blocking(honest.FUNCTIONS, tests, "f", Limits(wall_seconds=20.0, total_seconds=60.0))
    assert [result.message for result in report.results if not result.passed] == []
    assert len(tests) == 20


@pytest.mark.parametrize("name", honest.SCRIPTS)
def test_scripts_may_read_compute_and_print_as_people_write_them(sandbox: Sandbox, name: str) -> None:
    code, stdin, expected = honest.SCRIPTS[name]
    report = sandbox.run_blocking(code, [OutputTest(stdin, expected)], limits=Limits(wall_seconds=20.0))
    assert report.fraction == 1.0, report
