"""The benchmark of the sandbox measures what it says."""

import asyncio

import pytest

from benchmarks.environments import sandbox as benchmark
from covey_sandbox import Sandbox


@pytest.mark.long
def test_each_execution_is_timed_once(capsys: pytest.CaptureFixture[str]) -> None:
    with Sandbox(2) as sandbox:
        measured = asyncio.run(benchmark.measure(sandbox, 2, 20))
    assert 0 < measured.p50 <= measured.p95
    assert measured.per_second > 0
    assert measured.row().startswith(f"| {sandbox.tier} | 2 | ")
    assert benchmark.main(["--tier", sandbox.tier, "--slots", "1", "--programs", "5"]) == 0
    assert capsys.readouterr().out.count("\n") == 3
