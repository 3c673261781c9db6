"""No hostile program passes a test, gets out, stays, or spoils the next one."""

import asyncio
import json
import os
import secrets
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import pytest

from covey_sandbox import AssertTest, CallTest, Limits, OutputTest, Report, Sandbox, SandboxFailed, Tier

from . import attack_run, hostile

Found = TypeVar("Found")

LIMITS = Limits(wall_seconds=1.0, total_seconds=1.25, file_bytes=1 << 20)
SLOW = {"infinite_loop", "sleep_ignoring_signals", "huge_power", "recursion_limit_segfault", "hang_on_one_input"}
NOBODY = 65534


def secret(index: int) -> str:
    """What no program can guess."""
    return f"SECRET-{index}-{secrets.token_hex(8)}"


@dataclass(frozen=True)
class Attacked:
    """What came of a hostile program, what it left, and what came of the honest one behind it."""

    report: Report
    left: list[str]
    victim: tuple[str, int]
    honest: float


async def attack(sandbox: Sandbox, name: str) -> Attacked:
    tests = [*[CallTest((index,), expected=secret(index)) for index in range(2)], CallTest((2,), expected="OUT")]
    report = await sandbox.run(hostile.ALL[name], tests, "solve", LIMITS)
    victim = attack_run.CANARY / "victim"
    kept = (victim.read_text(), victim.stat().st_mode & 0o777) if victim.is_file() else ("", 0)
    honest = await sandbox.run("def solve(x): return x", [CallTest((1,), expected=1)], "solve")
    return Attacked(report, os.listdir(attack_run.CANARY), kept, honest.fraction)


async def attack_with_tests_of_other_kinds(sandbox: Sandbox, name: str) -> Report:
    tests = [AssertTest(f"assert solve({index}) == {secret(index)!r}") for index in range(2)]
    return await sandbox.run(hostile.ALL[name], [tests[0], OutputTest("", secret(2)), tests[1]], "solve", LIMITS)


def side_by_side(
    tier: Tier, attack_with: Callable[[Sandbox, str], Awaitable[Found]], names: Iterable[str]
) -> dict[str, Found]:
    """What came of each, several at a time: most of them wait for their end."""
    num_slots = 4 if os.getuid() == 0 else 1  # programs of an ordinary user share its limits

    async def all_of(sandbox: Sandbox) -> list[Found]:
        room = asyncio.Semaphore(num_slots)

        async def one(name: str) -> Found:
            async with room:
                return await attack_with(sandbox, name)

        return await asyncio.gather(*map(one, names))

    with Sandbox(num_slots, tier) as sandbox, attack_run.planted({"file": {"/tmp/sbx_canary/victim": "kept"}}):
        return dict(zip(names, asyncio.run(all_of(sandbox)), strict=True))


@pytest.fixture(scope="module")
def attacked(sandbox: Sandbox) -> dict[str, Attacked]:
    return side_by_side(sandbox.tier, attack, list(hostile.ALL))


@pytest.fixture(scope="module")
def attacked_otherwise(sandbox: Sandbox) -> dict[str, Report]:
    return side_by_side(sandbox.tier, attack_with_tests_of_other_kinds, [*hostile.FORGING, *hostile.FINDING])


@pytest.mark.parametrize("name", hostile.ALL)
def test_a_hostile_program_passes_nothing_and_spoils_nothing(attacked: dict[str, Attacked], name: str) -> None:
    found = attacked[name]
    assert found.report.fraction == 0.0, found.report
    assert found.left == ["victim"]
    assert found.victim == ("kept", 0o666)
    assert all(result.message.isprintable() for result in found.report.results)
    assert found.honest == 1.0


@pytest.mark.parametrize("name", [*hostile.FORGING, *hostile.FINDING])
def test_nor_does_it_pass_asserts_or_script_tests(attacked_otherwise: dict[str, Report], name: str) -> None:
    assert attacked_otherwise[name].fraction == 0.0, attacked_otherwise[name]


def test_a_value_that_claims_to_equal_everything_fails_asserts(sandbox: Sandbox) -> None:
    code = """
class A:
    def __eq__(self, other): return True
    def __ne__(self, other): return False
def solve(x): return A()
"""
    sources = ["assert solve(0) == 1", "assert not solve(0) != 1", "assert solve(0) in [1, 2]"]
    tests = [AssertTest(source) for source in sources]
    assert sandbox.run_blocking(code, tests, "solve").fraction == 0.0


def shared_cases(shared: Path) -> list[attack_run.Case]:
    return [json.loads(line) for line in (shared / "sandbox" / "attacks.jsonl").read_text().splitlines()]


@pytest.mark.long
@pytest.mark.shared
def test_the_shared_attacks_get_what_they_deserve(sandbox: Sandbox, shared: Path) -> None:
    cases = [case for case in shared_cases(shared) if case["name"] not in SLOW]
    assert [problem for case in cases for problem in attack_run.problems(sandbox, case)] == []


@pytest.mark.shared
@pytest.mark.slow
def test_so_do_those_that_take_long(sandbox: Sandbox, shared: Path) -> None:
    cases = [case for case in shared_cases(shared) if case["name"] in SLOW]
    assert len(cases) == len(SLOW)
    assert [problem for case in cases for problem in attack_run.problems(sandbox, case)] == []


@pytest.mark.shared
@pytest.mark.slow
@pytest.mark.parametrize("tier", ["namespace", "landlock"])
def test_so_do_all_of_them_for_an_ordinary_user(shared: Path, tier: str) -> None:
    if os.getuid() != 0:
        pytest.skip("the other tests ran as an ordinary user already")
    try:
        Sandbox(1, tier).close()  # type: ignore[arg-type]
    except SandboxFailed as error:
        pytest.skip(str(error))
    file = shared / "sandbox" / "attacks.jsonl"
    command = [sys.executable, attack_run.__file__, tier, str(NOBODY), str(file)]
    found = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert (found.stdout.strip(), found.returncode) == ("55 cases, 0 problems", 0), found.stderr


@pytest.mark.slow
@pytest.mark.parametrize("tier", ["namespace", "landlock"])
def test_no_hostile_program_passes_for_an_ordinary_user(tmp_path: Path, tier: str) -> None:
    if os.getuid() != 0:
        pytest.skip("the other tests ran as an ordinary user already")
    tests = [{"args": [n], "expected": secret(n) if n < 2 else "OUT"} for n in range(3)]
    shared = {"function": "solve", "tests": tests, "reward": 0.0, "limits": {"wall_s": 1.5, "memory_mb": 512}}
    needs = {"needs": {"file": {"/tmp/sbx_canary/victim": "kept"}}}
    cases = [{"name": name, "code": code, **shared, **needs} for name, code in hostile.ALL.items()]
    file = tmp_path / "cases.jsonl"
    file.write_text("\n".join(map(json.dumps, cases)))
    tmp_path.chmod(0o755)
    command = [sys.executable, attack_run.__file__, tier, str(NOBODY), str(file)]
    found = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert (found.stdout.strip(), found.returncode) == (f"{len(cases)} cases, 0 problems", 0), found.stderr


@pytest.mark.long
@pytest.mark.shared
def test_the_canonical_solutions_pass(any_sandbox: Sandbox, shared: Path) -> None:
    assert failed_of_canonical(any_sandbox, shared) == []


@pytest.mark.shared
@pytest.mark.slow
def test_the_canonical_solutions_pass_in_each_tier(sandbox: Sandbox, shared: Path) -> None:
    assert failed_of_canonical(sandbox, shared) == []


def failed_of_canonical(sandbox: Sandbox, shared: Path) -> list[str]:
    """The problems whose own solution does not pass their tests."""
    failed = []
    for name in ("humaneval", "mbpp_sanitized"):
        for line in (shared / "data" / "code" / f"{name}.jsonl").read_text().splitlines():
            row = json.loads(line)
            setup = row["prompt"] if name == "humaneval" else "\n".join(row["test_imports"])
            sources = [row["tests"]] if name == "humaneval" else row["test_list"]
            tests = [AssertTest(source, setup) for source in sources]
            if sandbox.run_blocking(row["solution"], tests, row["entry_point"]).fraction != 1.0:
                failed.append(row["task_id"])
    return failed
