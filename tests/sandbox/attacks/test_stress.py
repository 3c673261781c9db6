"""Nothing grows, leaks or breaks however many programs have run, a third of them hostile."""

import asyncio
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks.environments import attack_stress
from covey_sandbox import CallTest, Sandbox, SandboxFailed, Tier

from ..conftest import opened
from . import attack_run

TIERS: tuple[Tier, ...] = ("namespace", "landlock")
ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.parametrize("tier", TIERS)
def test_hundreds_of_programs_leave_nothing(tier: Tier) -> None:
    try:
        sandbox = Sandbox(2, tier)
    except SandboxFailed as error:
        pytest.skip(str(error))
    with sandbox:
        outcome = asyncio.run(attack_stress.run(sandbox, attack_stress.Mix(2, 40, 120, seed=3)))
    assert outcome.problems() == []
    assert outcome.kinds["passed"] > 300


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("tier", TIERS)
def test_20000_programs_leave_nothing(tier: Tier) -> None:
    user = ["--user", "65534"] if os.getuid() == 0 and tier == "landlock" else []
    command = [sys.executable, "-m", "benchmarks.environments.attack_stress", "--tier", tier, *user]
    found = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=3500)
    assert (found.stdout.splitlines()[-1], found.returncode) == ("0 problems", 0), found.stdout + found.stderr


ENTRIES = """
import os
def f(n):
    for place in range(100000):
        try: {make}
        except OSError: break
    return n
"""
MAKING = {
    "folders": 'os.mkdir(f"d{place}")',
    "folders, in processes that end between two looks": 'os.mkdir(f"d{place}") if place < 300 else os._exit(0)',
    "folders in folders": 'os.mkdir("d"); os.chdir("d")',
    "links": 'os.symlink("x" * 1000, f"d{place}")',
    "files": 'open(f"d{place}", "w").close()',
}


def test_a_program_that_makes_folders_gets_a_verdict_in_time_and_leaves_none() -> None:
    with opened("landlock") as sandbox:
        left = attack_run.own_folders(sandbox)
        for make in MAKING.values():
            began = time.monotonic()
            code = ENTRIES.replace("{make}", make)
            report = sandbox.run_blocking(code, [CallTest((n,), expected=n) for n in range(20)], "f")
            waited = time.monotonic() - began
            assert waited < report.seconds + 2.0
            assert waited < 10.0
            kinds = [result.kind for result in report.results]
            assert kinds == ["crash"] + ["load"] * 19
            assert report.results[-1].message == "it left more files than a program may have"
            # The next program has nothing of it
            assert sandbox.run_blocking("def f(n): return n", [CallTest((1,), expected=1)], "f").fraction == 1.0
    assert not any(map(os.path.exists, left))
