"""Run model-written code isolated, and judge its answers: `from covey_sandbox import run_tests`.

Needs nothing but Python's standard library and Linux.

>>> report = run_tests("def add(a, b): return a + b", [CallTest((2, 3), expected=5)], entry_point="add")
>>> report.fraction
1.0
"""

from covey_sandbox.client import Sandbox, run_tests
from covey_sandbox.types import (
    SUSPICIOUS,
    AssertTest,
    CallTest,
    Limits,
    OutputTest,
    Report,
    Runner,
    SandboxFailed,
    Test,
    TestResult,
    Tier,
)

__all__ = [
    "SUSPICIOUS",
    "AssertTest",
    "CallTest",
    "Limits",
    "OutputTest",
    "Report",
    "Runner",
    "Sandbox",
    "SandboxFailed",
    "Test",
    "TestResult",
    "Tier",
    "run_tests",
]
