"""A program gains nothing by objects where values are due, by lies about them, and by changes of its arguments."""

# ruff: noqa: E501

import pytest

from covey_sandbox import AssertTest, Report, Sandbox, SandboxFailed

EVIL = """
import itertools
turn = itertools.count()
def yes(*a, **k): return True
class Meta(type):
    __eq__ = __instancecheck__ = __subclasscheck__ = yes
    __hash__ = type.__hash__
class Evil(metaclass=Meta):
    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = __contains__ = yes
    __sub__ = __rsub__ = __mod__ = __rmod__ = __abs__ = __round__ = __len__ = __index__ = __int__ = lambda s, *a: 0
    __float__ = lambda s: 0.0
    __hash__ = lambda s: next(turn) % 2
    __bool__ = yes
    __getitem__ = lambda s, i: s
    __getattr__ = lambda s, n: yes
    __call__ = yes
    __repr__ = __str__ = lambda s: "3" if next(turn) % 2 else "[1, 2]"
    __iter__ = lambda s: iter([1, 2] if next(turn) % 2 else [2, 1])
    def __del__(s): raise SystemExit(0)
def f(*arguments, **keywords): return Evil()
class Solution(Evil):
    def f(self, *a): return Evil()
    def g(self, *a): return self
"""
FORGERIES = [
    "assert f(1) == 3",
    "assert 3 == f(1)",
    "assert not f(1) != 3",
    "assert f(1) != 4",
    "assert f(1) in [3, 4]",
    "assert [f(1)] == [3]",
    "assert {'a': (f(1),)} == {'a': (3,)}",
    "assert {f(1)} == {3}",
    "assert f(1) is True",
    "assert abs(f(1) - 3.5) < 1e-6",
    "assert f(1) <= 3 or f(1) > 3",
    "assert f(1) % 3 == 0",
    "assert 9 - f(1) == 0",
    "assert math.isclose(f(1), 3.5)",
    "assert round(f(1), 2) == 0",
    "assert len(f(1)) == 0",
    "assert 5 in f(1)",
    "assert f(1)[0] == 5",
    "assert f('a').startswith('expected')",
    "assert f('a').count('b') == True",
    "assert sorted(f(1)) == [1, 2] and f(1) != [1, 2]",
    "assert isinstance(f(1), int)",
    "assert type(f(1)) == list",
    "r = f(1)\nassert str(r) == '3' and r != 4",
    "assert int(f(1)) == 0",
    "assert sum([f(1)]) == 0",
    "import unittest\nclass T(unittest.TestCase):\n    def test(self): self.assertEqual(f(1), 3)\nT('test').debug()",
    "import unittest\nclass T(unittest.TestCase):\n    def test(self): self.assertAlmostEqual(f(1), 3)\nT('test').debug()",
    "import pytest\nassert f(1) == pytest.approx(3)",
    "import pytest\nassert pytest.approx([1, 2]) == f(1)",
    "import collections\nassert collections.Counter(f(1)) == f(1)",
    "try:\n    assert f(1) == 3\nexcept BaseException: pass",
    "class Any:\n    def __eq__(self, other): return NotImplemented\nassert f(1) == 3 or f(1) == Any()",
]


def kinds(report: Report) -> list[str]:
    return [result.kind for result in report.results]


def test_an_object_in_place_of_a_value_passes_nothing(sandbox: Sandbox) -> None:
    report = sandbox.run_blocking(EVIL, [AssertTest(source) for source in FORGERIES], "f")
    passed = [source for source, result in zip(FORGERIES, report.results, strict=True) if result.passed]
    assert passed == []


def test_nor_does_one_that_a_method_returns(any_sandbox: Sandbox) -> None:
    for method in ("f", "g"):
        sources = [source.replace("f(", f"Solution().{method}(") for source in FORGERIES if "def " not in source]
        tests = [AssertTest(source, classes=("Solution",)) for source in sources]
        report = any_sandbox.run_blocking(EVIL, tests, "Solution")
        assert [one for one, result in zip(sources, report.results, strict=True) if result.passed] == []


@pytest.mark.parametrize(
    "source",
    [
        "x = [3, 1, 2]\nassert f(x) == sorted(x)",
        "x = [3, 1, 2]\nr = f(x)\nassert len(r) == len(x) and set(r) == set(x)",
        "x = {'a': 1}\nassert f(x) == len(x) * [1]",
        "def due(x): return max(x) if x else []\nx = [3, 1, 2]\nassert f(x) == due(x)",
        "for x in ([1], [2, 3]):\n    y = list(x)\n    assert f(y) == y",
        "x = [[1], [2]]\nassert f(x[0]) == x[0]",
        "import unittest\nclass T(unittest.TestCase):\n    def test(self):\n        x = [3]\n        self.assertEqual(f(x), x)\nT('test').debug()",
    ],
)  # fmt: skip
def test_a_program_cannot_change_what_its_answer_is_compared_with(any_sandbox: Sandbox, source: str) -> None:
    assert kinds(any_sandbox.run_blocking("def f(x): x.clear(); return []", [AssertTest(source)], "f")) == ["wrong"]


def test_a_program_is_given_no_function_that_runs_its_text(any_sandbox: Sandbox) -> None:
    code = "def f(g, text):\n    try: return g(text)\n    except Exception as e: return type(e).__name__"
    tests = [AssertTest("assert f(eval, 'os.getpid()') != os.getpid()"), AssertTest("assert f(len, 'abc') == 3")]
    tests += [AssertTest("import subprocess\nassert f(subprocess.getoutput, 'echo out') != 'out'")]
    assert kinds(any_sandbox.run_blocking(code, tests, "f")) == ["passed"] * 3
    with pytest.raises(SandboxFailed, match="cannot be given"):
        any_sandbox.run_blocking(code, [AssertTest("import functools\nf(functools.partial(eval), '1')")], "f")


FRAMES = """
import json, os
def send(frame):
    body = json.dumps(frame).encode()
    os.write(4, len(body).to_bytes(4, "big") + body)
def f(what):
    send({BODY})
    return 1
"""


@pytest.mark.parametrize(
    "body",
    [
        '{"ask": 0, "args": {"t": []}, "kwargs": {"d": []}}',
        '{"ask": True, "args": {"t": []}, "kwargs": {"d": []}}',
        '{"ask": -1, "args": {"t": []}, "kwargs": {"d": []}}',
        '{"ask": [0], "args": 3, "kwargs": None}',
        '{"i": 0, "out": {"o": -1}}',
        '{"i": 0, "out": {"o": "f"}}',
        '{"i": 0, "out": {"h": 0}}',
        '{"i": 0, "out": {"g": ["os", "system"]}}',
        '{"i": 0, "out": {"w": ["date", [2020, 1, "1"], None]}}',
        '{"i": 0, "out": {"w": ["eval", [1], None]}}',
        '{"i": 0, "out": {"w": ["timedelta", [10**30, 0, 0], None]}}',
        '{"i": 0, "err": "E", "text": "t", "more": 3}',
        '{"i": 0, "err": "E", "text": "t", "more": {"bases": [1], "args": None, "text": ""}}',
        '{"i": 0, "out": 1, "back": [[2], {"d": []}], "more": 3}',
    ],
)  # fmt: skip
def test_frames_of_unknown_shape_void_the_program(any_sandbox: Sandbox, body: str) -> None:
    report = any_sandbox.run_blocking(FRAMES.replace("{BODY}", body), [AssertTest("f(1)\nf(2)")] * 2, "f")
    assert kinds(report) == ["channel", "channel"]


def test_a_program_that_calls_a_tests_function_without_end_is_late(any_sandbox: Sandbox) -> None:
    code = "def f(g):\n    while True: g(1)"
    (result,) = any_sandbox.run_blocking(code, [AssertTest("assert f(lambda n: n)")], "f").results
    assert result.kind == "timeout"


def test_a_missing_name_fails_the_test_not_the_sandbox(any_sandbox: Sandbox) -> None:
    tests = [AssertTest("assert f(g(1)) == 1", names=("g",)), AssertTest("assert G().x == 1", classes=("G",))]
    report = any_sandbox.run_blocking("def f(n): return n", tests, "f")
    assert kinds(report) == ["load", "error"]
    code = "class Lazy:\n    def __bool__(s): raise SystemExit\n    __len__ = __bool__\ng = Lazy()\ndef f(n): return n"
    assert kinds(any_sandbox.run_blocking(code, tests[:1], "f")) == ["error"]
