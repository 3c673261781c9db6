"""Which tier is chosen where; what is said where none is possible. Each in a process whose kernel allows less."""

import subprocess
import sys

import pytest

from covey_sandbox import SandboxFailed, client
from covey_sandbox.client import check_choice

PRELUDE = """
import errno, sys
from covey_sandbox import CallTest, Sandbox, SandboxFailed
from covey_sandbox.inside.isolation import kernel, seccomp
from covey_sandbox.inside.isolation.syscalls import numbers

def forbid(number, *names):
    # a container's filter: these calls fail, clone with flags of namespaces as well
    calls = numbers(kernel.MACHINE)
    program = [(0x20, 0, 0, 0)]
    for name in names:
        program += [(0x15, 0, 1, calls[name]), seccomp.refuse(number)]
    if "unshare" in names:
        program += [(0x15, 0, 3, calls["clone"]), seccomp.low(0), (0x45, 0, 1, 0x7E020000), seccomp.refuse()]
    program.append(seccomp.ALLOW)
    kernel.prctl(kernel.PR_SET_NO_NEW_PRIVS, 1)
    seccomp.install(b"".join(seccomp.struct.pack("=HBBI", *one) for one in program))

def attempt(tier):
    try:
        with Sandbox(1, tier) as sandbox:
            report = sandbox.run_blocking("def f(n): return n", [CallTest((1,), expected=1)], "f")
            print(sandbox.tier, report.fraction)
    except SandboxFailed as error:
        print(error)
"""


def said(script: str) -> str:
    """What such a process prints, in one line."""
    found = subprocess.run([sys.executable, "-c", PRELUDE + script], capture_output=True, text=True, timeout=120)
    assert found.returncode == 0, found.stderr
    assert found.stdout.count("\n") == 1
    return found.stdout.strip()


@pytest.mark.long
def test_where_containers_forbid_namespaces_the_other_tier_is_chosen() -> None:
    assert said('forbid(1, "unshare", "mount", "setns"); attempt("auto")') == "landlock 1.0"


def test_a_tier_that_was_asked_for_is_not_replaced() -> None:
    line = said('forbid(1, "unshare", "mount", "setns"); attempt("namespace")')
    assert line.startswith("no isolation for model code: tier namespace: [Errno 1] unshare: Operation not permitted; ")
    assert client.NAMESPACES in line


@pytest.mark.long
def test_where_nothing_isolates_nothing_runs_and_both_reasons_are_given() -> None:
    script = 'forbid(1, "unshare"); forbid(errno.ENOSYS, "landlock_create_ruleset"); attempt("auto")'
    line = said(script)
    assert "tier namespace: [Errno 1] unshare" in line
    assert "tier landlock: " in line
    assert client.LANDLOCK in line
    assert client.AT_RISK in line


@pytest.mark.long
def test_namespaces_hold_on_kernels_without_landlock() -> None:
    script = 'forbid(errno.ENOSYS, "landlock_create_ruleset"); attempt("auto")'
    assert said(script) == "namespace 1.0"


@pytest.mark.long
def test_without_seccomp_nothing_runs() -> None:
    line = said('forbid(errno.ENOSYS, "seccomp"); attempt("auto")')
    assert line.count("seccomp is missing") == 2
    assert client.SECCOMP in line


@pytest.mark.long
def test_landlock_is_chosen_where_apparmor_refuses_mounts() -> None:
    assert said('forbid(errno.EACCES, "mount", "mount_setattr", "move_mount"); attempt("auto")') == "landlock 1.0"


def test_other_systems_are_told_where_to_go(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(SandboxFailed, match="the sandbox needs Linux on x86_64 or aarch64"):
        check_choice(None, "auto")
