"""What a report says of programs: fractions, kinds, messages."""

import asyncio
import sys
import time

import pytest

from covey_sandbox import AssertTest, CallTest, Limits, OutputTest, Report, Sandbox, TestResult, Tier, run_tests
from covey_sandbox.types import Kind

NOT_THERE = (
    *("curses", "readline", "tkinter", "turtle", "test", "ensurepip", "idlelib", "turtledemo", "antigravity", "this"),
    *("crypt", "nis", "ossaudiodev", "msilib", "msvcrt", "nt", "winreg", "winsound"),  # gone, or of other systems
)
HANGS = "def f(n):\n    while n == 0: pass\n    return n\n"


def kinds(report: Report) -> list[str]:
    return [result.kind for result in report.results]


def calls(*pairs: tuple[object, object]) -> list[CallTest]:
    """One test for each (argument, expected value)."""
    return [CallTest((argument,), expected=expected) for argument, expected in pairs]


# ------------------------------------------------------------------------------------------------ calls


def test_the_fraction_is_exact_and_each_failure_says_what_happened(sandbox: Sandbox) -> None:
    code = "def f(n):\n    return 12 // n"
    report = sandbox.run_blocking(code, calls((3, 4), (0, 0), (5, 3), (6, 2)), "f")
    assert report.fraction == 0.5
    assert kinds(report) == ["passed", "error", "wrong", "passed"]
    assert report.results[1].message == ("f(0) raised ZeroDivisionError: integer division or modulo by zero (line 2)")
    assert report.results[2].message == "f(5) should be 3, got 2"


@pytest.mark.long
def test_a_test_that_hangs_fails_alone(sandbox: Sandbox) -> None:
    limits = Limits(wall_seconds=2.0, total_seconds=60.0)
    report = sandbox.run_blocking(HANGS, calls((1, 1), (0, 0), (2, 2), (3, 3)), "f", limits)
    assert kinds(report) == ["passed", "timeout", "passed", "passed"]


@pytest.mark.parametrize(
    "leaving",
    ["os._exit(0)", "os.kill(os.getpid(), 11) or ctypes.string_at(0)", "os.close(4)", "ctypes.string_at(0)"],
)
def test_a_test_that_ends_its_process_fails_alone(sandbox: Sandbox, leaving: str) -> None:
    code = f"import os, ctypes\ndef f(n):\n    if n == 0: {leaving}\n    return n\n"
    report = sandbox.run_blocking(code, calls((1, 1), (0, 0), (0, 0), (2, 2)), "f")
    assert kinds(report) == ["passed", "crash", "crash", "passed"]


def test_a_test_is_not_blamed_for_what_an_earlier_one_did_to_the_process(sandbox: Sandbox) -> None:
    code = """
import os, threading, time
def f(n):
    if n == 0: threading.Timer(0.2, os._exit, (0,)).start()
    if n == 1: time.sleep(1)
    return n
"""
    assert sandbox.run_blocking(code, calls((0, 0), (1, 1), (2, 2)), "f").fraction == 1.0


def test_tests_that_were_not_run_count_like_failed_ones() -> None:
    kinds: tuple[Kind, ...] = ("passed", "not_run", "timeout", "not_run")
    assert Report(tuple(TestResult(kind == "passed", kind, "") for kind in kinds), (), 0.0).fraction == 0.25


@pytest.mark.long
def test_after_one_test_has_timed_out_the_others_share_what_is_left(sandbox: Sandbox) -> None:
    limits = Limits(wall_seconds=1.0, total_seconds=2.0)
    started = time.monotonic()
    report = sandbox.run_blocking(HANGS, calls(*[(0, 0)] * 8, (1, 1)), "f", limits)
    assert time.monotonic() - started < 30
    assert set(kinds(report)[:8]) <= {"timeout", "not_run"}
    assert report.fraction <= 1 / 9


@pytest.mark.long
def test_a_program_that_cannot_be_loaded_gets_nothing(sandbox: Sandbox) -> None:
    limits = Limits(wall_seconds=1.0)
    for code, said in [
        ("def f(n:", "SyntaxError: '(' was never closed"),
        ("raise ValueError('no')", "ValueError: no (line 1)"),
        ("def g(n): return n", "NameError: the program does not define f"),
        ("f = 3", "TypeError: f is not callable"),
        ("import sys; sys.exit(0)", "SystemExit"),
        ("import os; os._exit(0)", "its process ended while loading it"),
        ("while True: pass", "loading it took longer than 1 s"),
    ]:
        report = sandbox.run_blocking(code, calls((1, 1), (2, 2)), "f", limits)
        assert kinds(report) == ["load", "load"], code
        assert said in report.results[0].message


@pytest.mark.long
def test_a_method_of_a_class_can_be_the_entry_point(any_sandbox: Sandbox) -> None:
    code = "class Solution:\n    def twice(self, n): return 2 * n\n"
    assert any_sandbox.run_blocking(code, calls((1, 2), (4, 8)), "Solution.twice").fraction == 1.0


def test_arguments_keep_their_types_and_keywords_arrive(any_sandbox: Sandbox) -> None:
    value = [None, {1, 2}, (3, [True, "s"]), {"a": {1: b"x"}}, 1 << 70, -0.0]
    code = "def f(x, *, y): return [repr(x), x, y]"
    report = any_sandbox.run_blocking(code, [CallTest((value,), {"y": (1,)}, [repr(value), value, (1,)])], "f")
    assert report.fraction == 1.0, report


def test_a_tolerance_holds_for_its_test(any_sandbox: Sandbox) -> None:
    tests = [
        CallTest((3,), expected=0.333, rel=0.01),
        CallTest((3,), expected=0.333),
        CallTest((4,), expected=1, abs=1.0),
        CallTest((4,), expected=0.5, abs=0.3),
    ]
    found = kinds(any_sandbox.run_blocking("def f(n): return 1 / n", tests, "f"))
    assert found == ["passed", "wrong", "wrong", "passed"]


# ------------------------------------------------------------------------------------------------ limits


@pytest.mark.long
def test_reading_a_program_is_on_its_account(sandbox: Sandbox) -> None:
    code = "import os\nx = [" + "1," * 90_000 + "]\ndef f(n): os._exit(0)"
    started = time.monotonic()
    report = sandbox.run_blocking(code, calls(*[(n, n) for n in range(60)]), "f", Limits(1.0, total_seconds=1.0))
    assert report.fraction == 0.0
    assert report.results[-1].kind in ("not_run", "load")
    assert time.monotonic() - started < 4


def test_memory_is_limited(sandbox: Sandbox) -> None:
    code = "def f(n): return len(bytearray(n << 20))"
    limits = Limits(memory_bytes=256 << 20)
    assert sandbox.run_blocking(code, calls((300, 300 << 20)), "f").fraction == 1.0  # usual limits
    report = sandbox.run_blocking(code, calls((128, 128 << 20), (300, 300 << 20), (1, 1 << 20)), "f", limits)
    assert kinds(report) == ["passed", "error", "passed"]
    assert "MemoryError" in report.results[1].message


@pytest.mark.long
def test_cpu_time_is_limited(sandbox: Sandbox) -> None:
    limits = Limits(wall_seconds=60, total_seconds=120, cpu_seconds=1)
    report = sandbox.run_blocking(HANGS, calls((0, 0), (1, 1)), "f", limits)
    assert kinds(report) == ["crash", "passed"]


def test_files_are_limited_one_by_one_and_together(sandbox: Sandbox) -> None:
    code = """
import time
def one(n):
    with open("a", "wb") as file: file.write(b"x" * n)
    return n
def together(n):
    for index in range(n):
        with open(str(index), "wb") as file: file.write(b"x" * 900_000)
    time.sleep(2)
    return n
"""
    limits = Limits(file_bytes=1 << 20)
    assert kinds(sandbox.run_blocking(code, calls((1 << 19, 1 << 19), (2 << 20, 2 << 20)), "one", limits)) == [
        "passed",
        "error",
    ]
    assert kinds(sandbox.run_blocking(code, calls((5, 5)), "together", limits))[0] in ("error", "crash")


@pytest.mark.long
def test_threads_are_limited_and_some_are_allowed(sandbox: Sandbox) -> None:
    code = """
import threading, time
threading.stack_size(1 << 16)
def f(n):
    threads = [threading.Thread(target=time.sleep, args=(0.5,), daemon=True) for _ in range(n)]
    for thread in threads: thread.start()
    time.sleep(2)
    return n
"""
    report = sandbox.run_blocking(code, calls((8, 8), (2000, 2000)), "f", Limits(num_processes=32))
    assert kinds(report)[0] == "passed"
    assert kinds(report)[1] in ("error", "crash")


def test_an_answer_is_limited_and_honest_ones_below_it_pass(sandbox: Sandbox) -> None:
    code = "def f(n): return 'x' * n"
    limits = Limits(output_bytes=100_000)
    report = sandbox.run_blocking(code, calls((90_000, "x" * 90_000), (200_000, "x" * 200_000)), "f", limits)
    assert kinds(report) == ["passed", "error"]


# ------------------------------------------------------------------------------------------------ scripts


def test_a_script_is_judged_by_what_it_prints(sandbox: Sandbox) -> None:
    code = "n = int(input())\nprint(*range(n))\nprint()\nprint('done   ')"
    tests = [OutputTest("3\n", "0 1 2\n\ndone"), OutputTest("1", "0\n\ndone\n\n"), OutputTest("2", "0 1 done")]
    report = sandbox.run_blocking(code, tests)
    assert kinds(report) == ["passed", "passed", "wrong"]
    assert report.results[2].message == "for the input '2' it should print '0 1 done', got '0 1\\n\\ndone'"


def test_a_script_prints_as_many_decimals_as_it_likes(sandbox: Sandbox) -> None:
    printed = "print(1 / 3, 2e6 / 3, 'x')\nprint('0.50')"
    due = [
        *("0.333333 666666.666667 x\n0.5", "0.33 666666.666667 x\n0.5", "0.333333 666666.666667 y\n0.5"),
        *("0.333333  666666.666667 x\n0.5", "0.333333 666666.666667 x\n.5", "0.333333 666666.666667 x 1.5\n0.5"),
        "0.333333 666666.666667 x\n0",
    ]
    report = sandbox.run_blocking(printed, [OutputTest("", text) for text in due])
    assert kinds(report) == ["passed", "wrong", "wrong", "wrong", "passed", "wrong", "wrong"]
    enormous = ["1" + "0" * 400 + ".5", "2" + "0" * 400 + ".5"]
    assert kinds(sandbox.run_blocking(f"print('{enormous[0]}')", [OutputTest("", enormous[1])])) == ["wrong"]


def test_a_script_may_leave_as_it_likes_but_not_raise(sandbox: Sandbox) -> None:
    main = "import sys, os, atexit, threading\nif __name__ == '__main__': print('a', flush=True)\n"
    for ending, kind in [
        ("sys.exit(3)", "passed"),
        ("exit()", "passed"),
        ("quit()", "passed"),
        ("os._exit(1)", "passed"),
        ("raise ValueError('b')", "error"),
        ("raise EOFError", "error"),
        ("input()", "error"),
        ("print('b')", "wrong"),
        ("atexit.register(print, 'b')", "wrong"),
        ("threading.Timer(0.1, print, ('b',)).start()", "wrong"),
    ]:
        assert kinds(sandbox.run_blocking(main + ending, [OutputTest("", "a")])) == [kind], ending


@pytest.mark.parametrize(
    "code",
    [
        "print(sum(map(int, sys.stdin.buffer.read(1 << 20).split())))",
        "print(int(sys.stdin.buffer.peek(1)[:1]) + int(sys.stdin.buffer.read1(2)) - 1 + sum(map(int, sys.stdin)))",
        "sys.stdin = io.TextIOWrapper(sys.stdin.buffer)\nprint(sum(map(int, sys.stdin)))",
        "sys.stdin.reconfigure(encoding='utf-8')\nprint(sum(map(int, sys.stdin)))",
        "assert 'r' in sys.stdin.mode and 'r' not in sys.stdout.mode\nprint(sum(map(int, open(0))))",
    ],
)
def test_a_script_may_read_in_all_the_usual_ways(sandbox: Sandbox, code: str) -> None:
    text = "1\n" * 50_000  # more than a pipe holds
    report = sandbox.run_blocking(f"import io, sys\n{code}", [OutputTest(text, "50000")])
    assert kinds(report) == ["passed"], report


@pytest.mark.parametrize(
    "code",
    [
        "import io, sys\nsys.stdout = io.StringIO()\nprint('a')\nsys.__stdout__.write(sys.stdout.getvalue())",
        "import atexit, io, sys\nsys.stdout = io.StringIO()\n"
        "atexit.register(lambda: sys.__stdout__.write(sys.stdout.getvalue()))\nprint('a')",
        "import io, sys\nsys.stdout = io.TextIOWrapper(sys.stdout.buffer)\nprint('a')",
        "import io, sys\nsys.stdout = io.TextIOWrapper(sys.stdout.detach())\nprint('a')",
        "import os, sys\nprint('a')\nsys.stdout = open(os.devnull, 'w')\nprint('b')",
        "import sys\nprint('a')\nsys.stdout.close()",
        "import sys\nprint('a', flush=True)\nsys.stdout = None",
        "out = open(1, 'w')\nout.write('a')",
        "def lines():\n    try: yield\n    finally: print('a')\nkept = lines()\nnext(kept)",
        "import sys\nclass Last:\n    def __del__(self): sys.stdout.write('a')\nlast = Last()",
        "out = open(1, 'w')\ndef main(): out.write('a')\nmain()",
    ],
)
def test_what_a_script_has_printed_is_there_however_it_did_it(sandbox: Sandbox, code: str) -> None:
    assert kinds(sandbox.run_blocking(code, [OutputTest("", "a")])) == ["passed"]


@pytest.mark.long
def test_a_script_that_prints_without_end_or_never_ends_fails_alone(sandbox: Sandbox) -> None:
    code = "n = input()\nwhile n == 'loud': print('x' * 1000)\nwhile n == 'still': pass\nprint(n)"
    tests = [OutputTest(word, word) for word in ("a", "loud", "still", "b")]
    report = sandbox.run_blocking(code, tests, limits=Limits(wall_seconds=2.0, output_bytes=1 << 20))
    assert kinds(report) == ["passed", "output", "timeout", "passed"]


def test_much_input_and_much_output_arrive(any_sandbox: Sandbox) -> None:
    text = "\n".join(str(number) for number in range(100_000))
    assert any_sandbox.run_blocking("import sys\nprint(sys.stdin.read())", [OutputTest(text, text)]).fraction == 1.0


# ------------------------------------------------------------------------------------------------ around


def test_a_program_has_the_standard_library(sandbox: Sandbox) -> None:
    names = [name for name in sorted(sys.stdlib_module_names) if name[0] != "_" and name not in NOT_THERE]
    code = (
        "import importlib, warnings\nwarnings.simplefilter('ignore')\ndef f(n): return importlib.import_module(n) and n"
    )
    limits = Limits(total_seconds=60.0, memory_bytes=1 << 30)
    report = sandbox.run_blocking(code, calls(*zip(names, names, strict=True)), "f", limits)
    assert [result.message for result in report.results if not result.passed] == []


def test_kinds_of_tests_can_be_mixed(any_sandbox: Sandbox) -> None:
    tests = [
        CallTest((1,), expected=1),
        AssertTest("assert f(2) == 2"),
        OutputTest("", "5"),
        CallTest((3,), expected=4),
    ]
    report = any_sandbox.run_blocking("def f(n): return n\nif __name__ == '__main__': print(f(5))", tests, "f")
    assert kinds(report) == ["passed", "passed", "passed", "wrong"]


def test_a_test_of_another_kind_has_a_fresh_process(any_sandbox: Sandbox) -> None:
    code = "import time\ndef f(n): return time.sleep(9) if n == 0 else n\nif __name__ == '__main__': print(f(5))"
    tests = [OutputTest("", "5"), AssertTest("assert f(2) == 2"), CallTest((0,)), AssertTest("assert f(3) == 3")]
    limits = Limits(wall_seconds=1.0)
    found = [kinds(any_sandbox.run_blocking(code, tests, "f", limits)) for _ in range(3)]
    assert found == [["passed", "passed", "timeout", "passed"]] * 3


@pytest.mark.parametrize(
    ("code", "found"),
    [
        ("import os.path, math", ("os",)),
        ("from ctypes import *\nimport gc as g", ("ctypes", "gc")),
        ("def f():\n    import inspect\n    __import__('sys')", ("inspect", "sys")),
        ("import importlib\nimportlib.import_module('os')", ("os",)),
        ("cost = 'os sys gc'", ()),
        ("import os, sys\nsys.modules.clear(); os._exit(0)", ("os", "sys")),
    ],
)
def test_suspicious_imports_are_named(any_sandbox: Sandbox, code: str, found: tuple[str, ...]) -> None:
    assert any_sandbox.run_blocking(code, calls((1, 1)), "f").suspicious_imports == found


@pytest.mark.long
def test_programs_run_side_by_side(any_sandbox: Sandbox) -> None:
    async def several() -> list[Report]:
        codes = [f"def f(n): return n + {number}" for number in range(12)]
        return await asyncio.gather(*[any_sandbox.run(code, calls((1, 4)), "f") for code in codes])

    assert [report.fraction for report in asyncio.run(several())] == [float(number == 3) for number in range(12)]


@pytest.mark.long
def test_run_tests_shares_one_sandbox() -> None:
    for _ in range(2):
        assert run_tests("def f(n): return n", calls((1, 1)), "f").fraction == 1.0


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("", [], "f"), "tests must not be empty"),
        (("", [CallTest((1,))], None), "entry_point must name"),
        (("", [CallTest((print,))], "f"), "args of a test must be plain values"),
        (("", [CallTest((), expected=object())], "f"), "expected of a test must be plain values"),
    ],
)
def test_tests_that_cannot_be_run_are_the_callers_mistake(
    any_sandbox: Sandbox, arguments: tuple[str, list[CallTest], str | None], said: str
) -> None:
    with pytest.raises(ValueError, match=said):
        any_sandbox.run_blocking(*arguments)


def test_limits_and_choices_are_checked() -> None:
    for args in (1, "ab", b"ab"):
        with pytest.raises(
            ValueError, match=rf"^args must be a tuple or a list of arguments, got {args!r}; one is written \(x,\)$"
        ):
            CallTest(args=args)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="memory_bytes must be > 0, got 0"):
        Limits(memory_bytes=0)
    with pytest.raises(ValueError, match=r"total_seconds must be >= wall_seconds=5\.0, got 1\.0"):
        Limits(total_seconds=1.0)
    with pytest.raises(ValueError, match="num_slots must be >= 1, got 0"):
        Sandbox(0)
    tier: Tier = "docker"  # type: ignore[assignment]
    with pytest.raises(
        ValueError, match="tier must be one of auto, namespace, landlock, unsafe_no_isolation, got docker"
    ):
        Sandbox(1, tier)
