"""Programs that run elsewhere: a local server that speaks SandboxFusion's interface, and what becomes of its faults."""

import asyncio
import contextlib
import json
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from covey.environments.code.remote_judge import RemoteRunner, named_imports
from covey.sandbox.types import AssertTest, CallTest, Limits, OutputTest, Report, SandboxFailed, Test

SECRET = 7203441
LIMITS = Limits(wall_seconds=2.0, total_seconds=20.0)
SMALL = Limits(wall_seconds=2.0, total_seconds=20.0, memory_bytes=64 << 20, output_bytes=1 << 20)
Answer = Callable[[dict[str, Any]], tuple[int, dict[str, Any]]]


def run_here(body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
    """What such a server does, for the trusted programs of these tests."""
    try:
        done = subprocess.run(
            [sys.executable, "-I", "-c", body["code"]],
            input=body["stdin"],
            capture_output=True,
            text=True,
            timeout=body["run_timeout"],
        )
    except subprocess.TimeoutExpired:
        return 200, {"status": "Failed", "message": "", "run_result": {"status": "TimeLimitExceeded", "stdout": ""}}
    status = "Failed" if done.returncode else "Success"
    result = {"status": "Finished", "return_code": done.returncode, "stdout": done.stdout, "stderr": done.stderr}
    return 200, {"status": status, "message": "", "run_result": result}


@dataclass
class Served:
    """A server, what it was asked, and how it answers."""

    url: str
    bodies: list[dict[str, Any]] = field(default_factory=list)
    answer: Answer = run_here


@pytest.fixture
def server() -> Iterator[Served]:
    served = Served("")

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            served.bodies.append(body | {"path": self.path})
            code, answer = served.answer(body)
            content = json.dumps(answer).encode()
            with contextlib.suppress(BrokenPipeError):  # it may have been given up
                self.send_response(code)
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

        def log_message(self, format: str, *arguments: Any) -> None:
            """Quietly."""

    http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    served.url = f"http://127.0.0.1:{http.server_port}"
    thread = threading.Thread(target=http.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    yield served
    http.shutdown()
    http.server_close()
    thread.join()


def judged(url: str, code: str, *tests: Test, margin: float = 10.0, limits: Limits = LIMITS) -> Report:
    runner = RemoteRunner(url, num_slots=1, margin=margin, limits=limits)
    try:
        return asyncio.run(runner.run(code, tests, "f"))
    finally:
        runner.close()


def kinds(report: Report) -> list[str]:
    return [result.kind for result in report.results]


def doubles(*numbers: int) -> list[CallTest]:
    return [CallTest((number,), expected=2 * number) for number in numbers]


def test_answers_are_compared_here_and_all_calls_go_in_one_request(server: Served) -> None:
    report = judged(server.url, "def f(n): return 2 * n if n != 3 else 7", *doubles(1, 2, 3, 4))
    assert kinds(report) == ["passed", "passed", "wrong", "passed"]
    assert report.results[2].message == "f(3) should be 6, got 7"
    assert [body["path"] for body in server.bodies] == ["/run_code"]
    assert (server.bodies[0]["language"], server.bodies[0]["memory_limit_MB"]) == ("python", 512)
    assert 0 < server.bodies[0]["run_timeout"] <= 20


def test_a_worker_that_judges_does_not_wait_for_torch() -> None:
    code = f"import sys, {RemoteRunner.__module__}; print(sys.modules.keys() & {{'torch', 'numpy'}})"
    assert subprocess.check_output([sys.executable, "-c", code], text=True) == "set()\n"


def test_the_server_never_learns_what_is_expected(server: Served) -> None:
    tests = [CallTest((1,), expected=SECRET), AssertTest(f"assert f(2) == {SECRET}"), OutputTest("3", str(SECRET))]
    report = judged(server.url, "def f(n): return n", *tests)
    assert report.fraction == 0.0
    assert len(server.bodies) >= 3
    assert not any(str(SECRET) in json.dumps(body) or hex(SECRET) in json.dumps(body) for body in server.bodies)


@pytest.mark.long
def test_a_call_that_hangs_crashes_or_leaves_fails_alone(server: Served) -> None:
    code = """
import os, sys, time
def f(n):
    if n == 1: time.sleep(60)
    if n == 2: os._exit(0)
    if n == 3: sys.exit(0)
    if n == 4: raise KeyError(n)
    return 2 * n
"""
    report = judged(server.url, code, *doubles(0, 1, 2, 3, 4, 5))
    assert kinds(report) == ["passed", "timeout", "crash", "error", "error", "passed"]
    assert report.suspicious_imports == ("os", "sys")


@pytest.mark.long
@pytest.mark.parametrize("code", ["def f(n) return n", "def g(n): return n", "1 / 0", "import sys; sys.exit(0)"])
def test_a_program_that_cannot_be_loaded_passes_nothing(server: Served, code: str) -> None:
    expects_any_error = AssertTest(
        "try:\n    f(1)\n    assert False, 'should raise'\nexcept ZeroDivisionError:\n    pass"
    )
    assert kinds(judged(server.url, code, *doubles(1, 2))) == ["load", "load"]
    assert kinds(judged(server.url, code, expects_any_error)) == ["load"]


def test_what_a_program_prints_is_no_answer(server: Served) -> None:
    code = 'import json\ndef f(n):\n    print(json.dumps({"i": 0, "out": 2}))\n    return 0'
    assert kinds(judged(server.url, code, *doubles(1))) == ["wrong"]


def test_a_program_that_forges_the_channel_passes_nothing(server: Served) -> None:
    code = """
import os
def f(n):
    for descriptor in range(3, 12):
        try: os.write(descriptor, b'{"i": 9, "out": 2}\\n')
        except OSError: pass
    return 2 * n
"""
    assert set(kinds(judged(server.url, code, *doubles(1, 2)))) == {"channel"}


@pytest.mark.long
def test_assert_tests_call_the_program_there_and_compare_here(server: Served) -> None:
    tests = [
        AssertTest("assert f(2) == 4"),
        AssertTest("def check(candidate):\n    for n in range(3):\n        assert candidate(n) == 2 * n"),
        AssertTest("assert f(5) == 11"),
    ]
    assert kinds(judged(server.url, "def f(n): return 2 * n", *tests)) == ["passed", "passed", "wrong"]


def test_a_script_is_judged_by_what_it_prints(server: Served) -> None:
    code = "n = int(input())\nassert n != 3\nprint(2 * n)"
    report = judged(server.url, code, OutputTest("2\n", "4"), OutputTest("3\n", "6"), OutputTest("4\n", "9"))
    assert kinds(report) == ["passed", "error", "wrong"]


def test_values_that_json_lacks_go_there_and_come_back(server: Served) -> None:
    value = {(1, 2): {3.5, float("inf")}, "b": [b"\x00", 2**80, None, True]}
    assert judged(server.url, "def f(x): return x", CallTest((value,), expected=value)).fraction == 1.0


@pytest.mark.parametrize(
    ("answer", "kind"),
    [
        ("range(10**5000)", "wrong"),
        ("{10**5000: 1}.keys()", "wrong"),
        ("{0: 'a' * 1500000}.values()", "error"),  # more than output_bytes
        ("'\\ud800' * 90000", "wrong"),
        ("[[]] * 100000", "wrong"),
        ("[[[[[[[10**4400]]]]]]]", "wrong"),
    ],
)
def test_a_wrong_answer_that_is_hard_to_look_at_fails_its_test_alone(server: Served, answer: str, kind: str) -> None:
    report = judged(server.url, f"def f(n): return {answer} if n == 2 else 2 * n", *doubles(1, 2, 3), limits=SMALL)
    assert kinds(report) == ["passed", kind, "passed"]
    assert max(len(result.message) for result in report.results) <= 300


def test_large_work_made_of_a_small_answer_fails_its_test_alone(server: Served) -> None:
    uses = ["sum(f(1)) == 1", "set(f(1)) == {1}", "__import__('time').sleep(f(2))", "__import__('os')._exit(f(2))"]
    tests = [
        AssertTest("assert f(0) == 0"),
        *(AssertTest(f"assert {use}") for use in uses),
        AssertTest("assert f(3) == 3"),
    ]
    code = "def f(n): return range(10**12) if n == 1 else 10**8 if n == 2 else n"
    report = judged(server.url, code, *tests, limits=SMALL)
    assert kinds(report) == ["passed", "timeout", "error", "timeout", "crash", "passed"]


@pytest.mark.long
def test_more_output_than_is_allowed_is_the_programs_failure_and_not_the_servers(server: Served) -> None:
    code = """
import os, sys
def f(n):
    if n == 2:
        for descriptor in range(3, 9):
            try: os.write(descriptor, b"x" * 9000000)
            except OSError: pass
    return 2 * n
if __name__ == "__main__" and sys.stdin.read() == "1": print("x" * 9000000)
"""
    report = judged(server.url, code, OutputTest("1", "x"), *doubles(1, 2), OutputTest("2", ""), limits=SMALL)
    assert kinds(report) == ["output", "passed", "output", "passed"]


@pytest.mark.parametrize(
    "answer",
    [
        (500, {}),
        (404, {"detail": "Not Found"}),
        (200, {"status": "SandboxError", "message": "no room", "run_result": None}),
        (200, {"status": "Success"}),
    ],
)
def test_a_server_that_fails_gives_no_verdict(server: Served, answer: tuple[int, dict[str, Any]]) -> None:
    server.answer = lambda body: answer
    for test in (doubles(1)[0], AssertTest("try:\n    f(1)\nexcept BaseException:\n    pass")):
        with pytest.raises(SandboxFailed, match=server.url):
            judged(server.url, "def f(n): return 2 * n", test)


def test_a_server_that_fails_in_the_middle_of_a_test_gives_no_verdict_whatever_the_test_catches(server: Served) -> None:
    server.answer = lambda body: run_here(body) if len(server.bodies) == 1 else (500, {})
    catches_all = AssertTest("try:\n    f(1)\nexcept BaseException:\n    pass")
    with pytest.raises(SandboxFailed, match="HTTP Error 500"):
        judged(server.url, "def f(n): return n", catches_all)
    assert len(server.bodies) == 2


def test_a_server_that_is_not_there_gives_no_verdict() -> None:
    with pytest.raises(SandboxFailed, match=r"http://127\.0\.0\.1:9/run_code: URLError: .*refused"):
        judged("http://127.0.0.1:9", "def f(n): return n", *doubles(1))


@pytest.mark.long
def test_a_server_that_does_not_answer_is_given_up(server: Served) -> None:
    released = threading.Event()
    server.answer = lambda body: (released.wait(60), (200, {}))[1]
    try:
        with pytest.raises(SandboxFailed, match=r"has not answered for 1\.\d+ s"):
            judged(server.url, "def f(n): return n", *doubles(1), margin=0.5, limits=Limits(1.0, total_seconds=1.0))
    finally:
        released.set()


def test_suspicious_imports_are_read_off_the_text() -> None:
    assert named_imports("import math, os\nfrom sys import path") == ["os", "sys"]
    assert named_imports("import os.path as p, sys as s; import inspect") == ["inspect", "os", "sys"]
    assert named_imports("  import gc\nx = __import__('ctypes')\nimport osmium") == ["ctypes", "gc"]
    assert named_imports("# the os module\nprint('import os')\nfrom osmium import x") == []
    assert named_imports("import " + "a , " * 5000 + "b") == []
