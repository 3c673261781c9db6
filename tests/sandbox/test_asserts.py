"""Test code as data sets have it, whose calls go to a program."""

import re

import pytest

from covey_sandbox import AssertTest, CallTest, Limits, Report, Sandbox, SandboxFailed, Test

HANGS = "def f(n):\n    while n == 0: pass\n    return n\n"


def kinds(report: Report) -> list[str]:
    return [result.kind for result in report.results]


CHECK = """
def check(candidate):
    assert candidate(2) == 4
    assert candidate(3) == 9, "three"
"""


@pytest.mark.long
def test_a_check_runs_as_it_is_whether_or_not_it_is_called(sandbox: Sandbox) -> None:
    for source in (CHECK, CHECK + "\ncheck(square)"):
        assert sandbox.run_blocking("def square(n): return n * n", [AssertTest(source)], "square").fraction == 1.0
        report = sandbox.run_blocking("def square(n): return n + 2", [AssertTest(source)], "square")
        assert kinds(report) == ["wrong"]
        assert report.results[0].message == 'assert candidate(3) == 9, "three": square(3) returned 5'


@pytest.mark.long
def test_asserts_fail_one_by_one_by_hang_or_crash_too(sandbox: Sandbox) -> None:
    code = (
        HANGS
        + "import os\ng = f\ndef f(n):\n    if n == 9: os._exit(0)\n    if n == 8: raise KeyError(n)\n    return g(n)\n"
    )
    tests = [
        AssertTest(f"assert f({n}) == {expected}")
        for n, expected in [(1, 1), (0, 0), (2, 2), (9, 9), (3, 4), (8, 8), (4, 4)]
    ]
    report = sandbox.run_blocking(code, tests, "f", Limits(wall_seconds=2.0, total_seconds=60.0))
    assert kinds(report) == ["passed", "timeout", "passed", "crash", "wrong", "error", "passed"]
    assert report.results[5].message == "KeyError: 8 in assert f(8) == 8: f(8) raised KeyError: 8 (line 8)"


EXACT = """
from decimal import Decimal
from fractions import Fraction
def f(kind): return globals()[kind]()
def half(): return Fraction(1, 2)
def price(): return [Decimal("0.50"), Decimal(3)]
class Lies:
    __eq__ = __le__ = __ge__ = lambda self, other: True
    __hash__ = lambda self: hash(0.5)
    __float__ = lambda self: 0.5
class Ratio(Lies, Fraction): pass
class Price(Lies, Decimal): pass
class Plain(Lies): __class__ = Fraction
def ratio(): return Ratio(1, 3)
def cheap(): return [Price("0.25"), Price(4)]
def plain(): return Plain()
"""


@pytest.mark.long
def test_exact_numbers_are_the_value_they_have_and_not_what_they_say_of_themselves(any_sandbox: Sandbox) -> None:
    right: list[Test] = [
        AssertTest("assert f('half') == 0.5 and f('half') < 1"),
        AssertTest("assert f('price') == [0.5, 3]"),
    ]
    assert any_sandbox.run_blocking(EXACT, right, "f").fraction == 1.0
    wrong: list[Test] = [CallTest(("half",), expected=0.5), CallTest(("price",), expected=[0.5, 3])]  # types are strict
    wrong += [CallTest(("plain",), expected=0.5, rel=1.0), AssertTest("assert f('plain') == 0.5")]
    wrong += [AssertTest("assert f('ratio') == 0.5"), AssertTest("assert f('cheap') == [0.5, 3]")]
    assert kinds(any_sandbox.run_blocking(EXACT, wrong, "f")) == ["wrong"] * 6


@pytest.mark.long
def test_tests_may_use_helpers_of_the_prompt_usual_modules_and_exceptions(any_sandbox: Sandbox) -> None:
    source = """
value = random.randint(1, 100)
assert math.isclose(f(helper(value)), value + 1)
try:
    f("x")
    assert False
except TypeError:
    pass
"""
    tests = [AssertTest(source, setup="def helper(n): return float(n)\ndef f(n): 'the stub of the prompt'")]
    assert any_sandbox.run_blocking("def f(n): return n + 1", tests, "f").fraction == 1.0


@pytest.mark.long
def test_a_tests_own_except_hides_neither_a_hang_nor_a_broken_channel(sandbox: Sandbox) -> None:
    swallowing = AssertTest("try:\n    f(0)\nexcept BaseException:\n    pass")
    limits = Limits(wall_seconds=1.0)
    assert kinds(sandbox.run_blocking(HANGS, [swallowing], "f", limits)) == ["timeout"]
    code = "import os\ndef f(n): os.write(4, b'\\0\\0\\0\\x02{}')"
    assert kinds(sandbox.run_blocking(code, [swallowing, swallowing], "f")) == ["channel", "channel"]


def test_a_value_that_is_not_plain_data_serves_in_asserts(any_sandbox: Sandbox) -> None:
    code = "import re\ndef f(text): return re.match('a', text)"
    tests = [
        AssertTest(source)
        for source in (
            "assert f('a')",
            "assert not f('b')",
            "assert f('a') == f('a')",
            "assert f('a').group() == 'a'",
            "f('a').lower()",
        )
    ]
    assert kinds(any_sandbox.run_blocking(code, tests, "f")) == ["passed", "passed", "wrong", "passed", "wrong"]


def test_a_test_at_fault_is_no_verdict_on_the_program(any_sandbox: Sandbox) -> None:
    code = "def f(n): return n"
    for source, said in [("assert f(", "is not Python"), ("assert f(object())", "cannot be given")]:
        with pytest.raises(SandboxFailed, match=said):
            any_sandbox.run_blocking(code, [AssertTest(source)], "f")
    assert any_sandbox.run_blocking(code, [CallTest((1,), expected=1)], "f").fraction == 1.0


@pytest.mark.parametrize(
    ("test", "said"),
    [
        (AssertTest("import numpy as np\nassert f(1) == 1"), "No module named 'numpy' in import numpy as np"),
        (AssertTest("assert f(1) == 1", setup="import numpy"), "No module named 'numpy'"),
        (AssertTest("assert Solution().f(1) == 1"), "NameError: name 'Solution' is not defined in assert Solution"),
        (AssertTest("assert helper(1) == f(1)"), "NameError: name 'helper' is not defined in assert helper"),
        (AssertTest("assert f.__code__\nassert f(1) == 1"), "assert f.__code__"),
    ],
)
def test_a_test_that_fails_before_it_calls_the_program_is_no_verdict_on_it(
    any_sandbox: Sandbox, test: AssertTest, said: str
) -> None:
    with pytest.raises(SandboxFailed, match=f"^a test fails before it calls the program: .*{re.escape(said)}"):
        any_sandbox.run_blocking("def f(n): return n", [AssertTest("assert f(1) == 1"), test], "f")


@pytest.mark.parametrize(
    "source",
    [
        "assert True, 'this prints if it fails'",
        "def test_f():\n    assert f(1) == 2",
        "import unittest\nclass T(unittest.TestCase):\n    def test(self): self.assertEqual(f(1), 2)",
        "for given, due in []:\n    assert f(given) == due",
    ],
)
def test_a_test_that_never_calls_the_program_is_no_verdict_on_it(any_sandbox: Sandbox, source: str) -> None:
    with pytest.raises(SandboxFailed, match=f"^a test never calls the program: {re.escape(source[:12])}"):
        any_sandbox.run_blocking("def f(n): return n", [AssertTest("assert f(1) == 1"), AssertTest(source)], "f")


def test_threads_of_a_test_call_the_program_one_after_another(any_sandbox: Sandbox) -> None:
    source = """
from concurrent.futures import ThreadPoolExecutor
with ThreadPoolExecutor(4) as pool:
    assert list(pool.map(f, range(50))) == list(range(50))
"""
    assert kinds(any_sandbox.run_blocking("def f(n): return n", [AssertTest(source)], "f")) == ["passed"]


def test_keywords_may_have_any_name(any_sandbox: Sandbox) -> None:
    names = ["self", "operation", "function", "cls", "number", "is_object", "name", "arguments", "keywords", "call"]
    given = ", ".join(f"'{name}': 1" for name in names)
    code = "def f(**given): return sorted(given)\nclass A:\n    def m(this, **given): return sorted(given)\n"
    tests = [AssertTest(f"assert f(**{{{given}}}) == {sorted(names)}\nf(**{{{given}}})")]
    tests += [AssertTest(f"assert A().m(**{{{given}}}) == {sorted(names)}", classes=("A",))]
    tests += [
        AssertTest(f"def g(**given): return len(given)\nassert f(g=g) == ['g'] and h(g) == {len(names)}", names=("h",))
    ]
    code += f"def h(g): return g(**{{{given}}})\n"
    assert kinds(any_sandbox.run_blocking(code, tests, "f")) == ["passed"] * 3


def test_generators_are_gone_through_as_far_as_a_test_asks(any_sandbox: Sandbox) -> None:
    code = "def f(n, last=None):\n    for i in range(n): yield i\n    if last: raise last(n)\n"
    sources = [f"assert list(f({n})) == list(range({n}))" for n in (0, 1, 63, 64, 65, 320, 321, 5000)]
    sources += ["g = f(500)\nassert sum(next(g) for _ in range(100)) == 4950 and next(g) == 100"]
    raising = (
        "seen = []\ntry:\n    for v in f(100, KeyError): seen.append(v)\n    assert False\nexcept KeyError: pass\n"
    )
    sources += [raising + "assert len(seen) == 100"]
    report = any_sandbox.run_blocking(code, [AssertTest(source) for source in sources], "f")
    assert kinds(report) == ["passed"] * len(sources)
