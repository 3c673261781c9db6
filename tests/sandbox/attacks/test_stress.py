"""Nothing grows, leaks or breaks however many programs have run, a third of them hostile."""

import asyncio
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.environments import attack_stress
from covey.sandbox import Sandbox, SandboxFailed, Tier

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
