"""Rows of programs as the world has them, in the sandbox: a right program earns 1, a wrong one less."""

# ruff: noqa: E501  # rows are long

import asyncio
import base64
import json
import logging
import pickle
import re
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from covey.loop import train
from covey.types import Reward
from covey_sandbox import Sandbox
from covey_tasks.code.environment import Code
from covey_tasks.code.formats import PROMPTS, problem_of
from covey_tasks.code.settings import CodeConfig

from ...support.small import rows, small_config
from .code_runners import Here
from .further_rows import FURTHER

Row = dict[str, Any]


@pytest.fixture(scope="module")
def sandbox() -> Iterator[Sandbox]:
    with Sandbox(num_slots=1) as found:
        yield found


def earned(sandbox: Sandbox, row: Row, *programs: str) -> list[float]:
    """Return what programs earn, each in a fenced block."""
    code = Code({"train": [problem_of(row)], "test": []}, sandbox, CodeConfig(recheck_rate=0.0))
    (prompt,) = code.prompts("train")
    found = asyncio.run(code.score(prompt, [f"```python\n{program}\n```" for program in programs]))
    assert all(isinstance(verdict, Reward) for verdict in found), found
    return [verdict.value for verdict in found if isinstance(verdict, Reward)]


SUM = "n = int(input())\nprint(sum(map(int, input().split())))"
FIXED = "input()\nprint(6)"
ADD, SUBTRACT = "def add(a, b): return a + b", "def add(a, b): return a - b"
TWO_SUM = """class Solution:
    def twoSum(self, nums: List[int], target: int) -> List[int]:
        seen = defaultdict(int)
        for i, n in enumerate(nums):
            if target - n in seen: return [seen[target - n], i]
            seen[n] = i
"""
NO_SUM = "class Solution:\n    def twoSum(self, nums, target): return [1, 0]"
SCRIPTS = {"inputs": ["3\n1 2 3\n", "2\n5 6\n"], "outputs": ["6\n", "11\n"]}
CASES = [
    {"input": "3\n1 2 3", "output": "6", "testtype": "stdin"},
    {"input": "1\n7\n", "output": "7\n", "testtype": "stdin"},
]
TWO_SUMS = [{"input": "[2,7,11]\n9", "output": "[0, 1]", "testtype": "functional"}]
STARTER = "class Solution:\n    def twoSum(self, nums: List[int], target: int) -> List[int]:\n        "
PRIVATE = base64.b64encode(zlib.compress(pickle.dumps(json.dumps(CASES)))).decode()

DATA = {
    "apps": ({"question": "add", "input_output": json.dumps(SCRIPTS), "starter_code": "", "difficulty": "introductory"}, SUM, FIXED),
    "apps, lines as lists": ({"question": "add", "input_output": {"inputs": [["3", "1 2 3"], ["1", "4"]], "outputs": [["6"], ["4"]]}}, SUM, FIXED),
    "taco": ({"question": "add", "input_output": '{"fn_name": "add", "inputs": [[1, 2], [5, 5]], "outputs": [3, 10]}'}, ADD, SUBTRACT),
    "apps, answers in lists of one": ({"question": "add", "input_output": {"fn_name": "add", "inputs": [[1, 2], [5, 5]], "outputs": [[3], [10]]}}, ADD, SUBTRACT),
    "a tuple for a list": ({"question": "p", "input_output": {"fn_name": "f", "inputs": [[1]], "outputs": [[1, 2]]}}, "def f(a): return (a, a + 1)", "def f(a): return [a, a]"),
    "deepcoder, lists": ({"prompt": "sum", "tests": json.dumps(SCRIPTS)}, SUM, FIXED),
    "deepcoder, cases": ({"problem": "sum", "tests": json.dumps([{"type": "stdin_stdout", **case} for case in CASES])}, SUM, FIXED),
    "deepcoder, calls": ({"problem": "sum", "tests": json.dumps([{"fn_name": "add", "input": [1, 2], "output": [3], "type": "function_call"}, {"fn_name": "add", "input": [2, 2], "output": [4], "type": "function_call"}])}, ADD, SUBTRACT),
    "livecodebench, stdin": ({"question_content": "sum", "public_test_cases": json.dumps(CASES), "private_test_cases": json.dumps(CASES[:1]), "metadata": "{}", "starter_code": ""}, SUM, FIXED),
    "livecodebench, functional": ({"question_content": "two sum", "public_test_cases": json.dumps(TWO_SUMS), "metadata": '{"func_name": "twoSum"}', "starter_code": STARTER}, TWO_SUM, NO_SUM),
    "parquet's text": ({"prompt": "p", "entry_point": "add", "test_list": '["assert add(1, 1) == 2", "assert add(2, 1) == 3"]'}, ADD, SUBTRACT),
    "a table of CSV's text": ({"text": "p", "test_list": "['assert add(1, 1) == 2', 'assert add(2, 1) == 3']"}, ADD, SUBTRACT),
    "mbpp, its challenge tests": ({"text": "p", "code": ADD, "test_list": ["assert add(1, 1) == 2"], "challenge_test_list": ["assert add(2, 1) == 3"]}, ADD, "def add(a, b): return 2"),
    "opencoder": ({"instruction": "p", "entry_point": "add", "testcase": ["assert add(1, 1) == 2"]}, ADD, SUBTRACT),
    "synthetic-1": ({"prompt": "sum", "verification_info": json.dumps({"language": "python", "test_cases": [{"type": "stdin_stdout", "fn_name": None, **case} for case in CASES]})}, SUM, FIXED),
    "skywork, asserts in a mapping": ({"prompt": "p", "tests": json.dumps({"assert_case": ["assert add(1, 1) == 2"]})}, ADD, SUBTRACT),
    "eurus, code in a mapping": ({"prompt": "p", "tests": {"functional": "def check(candidate):\n    assert candidate(1, 1) == 2\n\ncheck(add)\n"}, "entry_point": "add"}, ADD, SUBTRACT),
    "leetcode": ({"prompt": "two sum", "entry_point": "Solution().twoSum", "test": "def check(candidate):\n    assert candidate(nums=[3,3], target=6) == [0,1]\n    assert candidate(nums = [1,2,3],target = 5) == [1,2]\n"}, TWO_SUM, NO_SUM),
    "leetcode, its name without ()": ({"prompt": "two sum", "entry_point": "Solution.twoSum", "starter_code": STARTER, "test": "def check(candidate):\n    assert candidate([3,3], 6) == [0,1]\n    assert candidate([3,3,1], 4) == [1,2]\n\ncheck(Solution().twoSum)\n"}, TWO_SUM, NO_SUM),
    "skywork, a method in a mapping": ({"prompt": "p", "tests": json.dumps({"functional": "def check(candidate):\n    assert candidate([3,3], 6) == [0,1]\n    assert candidate([3,3,1], 4) == [1,2]\n\n\ncheck(Solution().twoSum)"})}, TWO_SUM, NO_SUM),
    "codeforces": ({"description": "sum", "input_format": "n", "output_format": "s", "generated_checker": None, "official_tests": CASES}, SUM, FIXED),
    "leetcode, as a class": ({"prompt": "two sum", "entry_point": "Solution", "test": "s=Solution()\nassert s.twoSum([2,7],9)==[0,1]"}, TWO_SUM.replace("List[int]", "list"). replace("defaultdict(int)", "{}"), NO_SUM),
    "leetcode, its helpers": ({"problem_description": "two sum", "prompt": "from typing import *\nfrom collections import *\ndef same(a, b): return sorted(a) == sorted(b)\n", "entry_point": "Solution().twoSum", "test": "def check(candidate):\n    assert same(candidate([3,3], 6), [1,0])\n"}, TWO_SUM, NO_SUM.replace("[1, 0]", "[1, 1]")),
    "leetcode's dataset, its calls shown once more": ({"prompt": "from typing import *\nfrom collections import *", "problem_description": "two sum", "entry_point": "Solution().twoSum", "starter_code": STARTER, "input_output": [{"input": "nums = [3,3], target = 6", "output": "[0, 1]"}], "test": "def check(candidate):\n    assert candidate(nums=[3,3], target=6) == [0,1]\n    assert candidate(nums = [1,2,3],target = 5) == [1,2]\n"}, TWO_SUM, NO_SUM),
    "leetcode's dataset, its calls alone": ({"problem_description": "two sum", "entry_point": "Solution().twoSum", "starter_code": STARTER, "input_output": [{"input": "nums = [3,3],\ntarget = 6", "output": "[0, 1]"}]}, TWO_SUM, NO_SUM),
    "values by name as JSON spells them": ({"prompt": "p", "entry_point": "f", "test_cases": [{"input": "a = null, b = true", "output": "None"}, {"input": "a = 1, b = false", "output": "[True, 'x']"}]}, "def f(a, b): return None if b else [True, 'x']", "def f(a, b): return None"),
    "cases of a function that a column names": ({"prompt": "p", "entry_point": "twice", "test_cases": [{"input": 3, "output": 6}, {"input": [4], "expected_output": 8}]}, "def twice(n): return 2 * n", "print(6)"),
    "cases of a function by its first line": ({"description": "p", "function_signature": "def twice(n: int) -> int:", "tests": [{"input": [4], "expected": 8}]}, "def twice(n): return 2 * n", "def twice(n): return n"),
    "cases of a function that is begun": ({"prompt": "p", "starter_code": "def twice(n: int) -> int:\n    ", "inputs": [[3]], "outputs": [6]}, "def twice(n): return 2 * n", "print(6)"),
    "lines of text are a script's, though a function is begun": ({"prompt": "sum", "starter_code": "def solve():\n    ", "input_output": SCRIPTS}, SUM, FIXED),
    "main is a script": ({"prompt": "sum", "entry_point": "main", "inputs": SCRIPTS["inputs"], "outputs": SCRIPTS["outputs"]}, SUM, FIXED),
    "in place": ({"prompt": "reverse", "entry_point": "rev", "test_list": ["x=[1,2,3]\nrev(x)\nassert x==[3,2,1]"]}, "def rev(x): x.reverse()", "def rev(x): return x[::-1]"),
    "in place, with an answer": ({"prompt": "p", "entry_point": "f", "test_list": ["x=[1,1,2]\nk=f(x)\nassert k==2\nassert x[:k]==[1,2]"]}, "def f(x):\n    x[:] = sorted(set(x)) + [0]\n    return 2", "def f(x): return 2"),
    "in place, nested": ({"prompt": "p", "entry_point": "f", "test": "def test_f():\n    m = [[1, 2], [3, 4]]\n    row = m[0]\n    f(m)\n    assert m == [[0, 2], [3, 4]] and row == [0, 2]\n"}, "def f(m): m[0][0] = 0", "def f(m): m[0] = 0"),
    "in place, a mapping": ({"prompt": "p", "entry_point": "f", "test": "import unittest\nclass T(unittest.TestCase):\n    def test_f(self):\n        d = {'a': [1]}\n        f(d)\n        self.assertEqual(d, {'a': [1, 2], 'b': 3})\n"}, "def f(d):\n    d['a'].append(2)\n    d['b'] = 3", "def f(d): return {'a': [1, 2], 'b': 3}"),
    "a class": ({"prompt": "stack", "entry_point": "Stack", "test_list": ["s=Stack()\ns.push(1)\nassert s.pop()==1"]}, "class Stack:\n    def __init__(self): self.x = []\n    def push(self, a): self.x.append(a)\n    def pop(self): return self.x.pop()", "class Stack:\n    def push(self, a): pass\n    def pop(self): return None"),
    "operators of a class": ({"prompt": "Write a class Vec with +, == and len", "entry_point": "Vec", "test_list": ["assert Vec(1, 2) + Vec(3, 4) == Vec(4, 6)", "assert len(Vec(1, 2)) == 2 and repr(Vec(0)) == 'Vec(0)'", "assert [*Vec(1, 2)] == [1, 2]", "v = Vec(1, 2)\nv[0] = 5\nassert v[0] == 5 and 5 in v"]}, "class Vec:\n    def __init__(self, *x): self.x = [*x]\n    def __add__(self, o): return Vec(*(a + b for a, b in zip(self.x, o.x)))\n    def __eq__(self, o): return self.x == o.x\n    def __len__(self): return len(self.x)\n    def __iter__(self): return iter(self.x)\n    def __getitem__(self, i): return self.x[i]\n    def __setitem__(self, i, v): self.x[i] = v\n    def __contains__(self, v): return v in self.x\n    def __repr__(self): return f\"Vec({', '.join(map(str, self.x))})\"", "class Vec:\n    def __init__(self, *x): pass"),
    "a closure": ({"prompt": "counter", "entry_point": "make", "test_list": ["c = make(3)\nassert c() == 4\nassert c() == 5", "assert make(0)() == 1"]}, "def make(n):\n    def step():\n        nonlocal n\n        n += 1\n        return n\n    return step", "def make(n): return lambda: n + 1"),
    "a decorator": ({"prompt": "memoize", "entry_point": "memo", "test": "def test_once():\n    seen = []\n    @memo\n    def slow(n):\n        seen.append(n)\n        return n * 2\n    assert slow(2) == 4 and slow(2) == 4\n    assert seen == [2]\n"}, "def memo(g):\n    kept = {}\n    def inner(n):\n        if n not in kept: kept[n] = g(n)\n        return kept[n]\n    return inner", "def memo(g): return g"),
    "a generator without end": ({"prompt": "squares", "entry_point": "squares", "test_list": ["g = squares()\nassert [next(g) for _ in range(3)] == [0, 1, 4]"]}, "def squares():\n    n = 0\n    while True:\n        yield n * n\n        n += 1", "def squares(): yield 0"),
    "a date": ({"prompt": "p", "entry_point": "f", "test_list": ["import datetime\nassert f()==datetime.date(2020,1,1)"]}, "import datetime\ndef f(): return datetime.date(2020, 1, 1)", "def f(): return '2020-01-01'"),
    "its own exception": ({"prompt": "p", "entry_point": "f", "test": "try:\n    f(1)\n    assert False\nexcept Exception as e:\n    assert type(e).__name__=='MyErr'"}, "class MyErr(Exception): pass\ndef f(n): raise MyErr(n)", "def f(n): raise ValueError(n)"),
    "its own exception, named": ({"question": "f raises `Broke`", "test": "import pytest\nfrom solution import f, Broke\n\ndef test_a():\n    with pytest.raises(Broke, match='too small') as found:\n        f(-1)\n    assert found.value.low == -1\n\ndef test_b():\n    with pytest.raises(ValueError):\n        f(-2)\n\ndef test_c():\n    assert f(1) == 1\n"}, "class Broke(ValueError):\n    def __init__(self, low):\n        super().__init__(f'{low} is too small')\n        self.low = low\ndef f(n):\n    if n < 0: raise Broke(n)\n    return n", "def f(n): return n"),
    "functions of pytest": ({"prompt": "p", "entry_point": "f", "test": "def test_a():\n    assert f(1)==1\ndef test_b():\n    assert f(2)==2"}, "def f(n): return n", "def f(n): return 1"),
    "pytest's parameters": ({"question": "p", "test": "import pytest\nfrom solution import f as g\n\n@pytest.fixture\ndef one():\n    return 1\n\n@pytest.mark.parametrize('n, due', [(1, 1.0), (2, 4.0)])\ndef test_a(n, due):\n    assert g(n) == pytest.approx(due)\n\nclass TestF:\n    def setup_method(self):\n        self.n = 3\n    def test_b(self, one):\n        assert round(g(self.n)) == 9 and round(g(one)) == 1\n"}, "def f(n): return n * n + 1e-9", "def f(n): return n"),
    "unittest": ({"prompt": "p", "entry_point": "f", "test": "import unittest\nclass T(unittest.TestCase):\n    def test_a(self):\n        self.assertEqual(f(1),1)\n\nunittest.main()"}, "def f(n): return n", "def f(n): return 0"),
    "bigcodebench": ({"instruct_prompt": "add", "code_prompt": "import math\ndef task_func(a, b):\n", "complete_prompt": "import math\ndef task_func(a, b):\n    '''Add.'''\n", "canonical_solution": "    return math.fsum([a, b])\n", "entry_point": "task_func", "test": "import unittest\nclass TestCases(unittest.TestCase):\n    def setUp(self):\n        self.a = 1\n    def test_case_1(self):\n        self.assertEqual(task_func(self.a, 2), 3)\n    def test_case_2(self):\n        with self.assertRaises(TypeError):\n            task_func('a', 2)\nif __name__ == '__main__':\n    unittest.main()\n"}, "import math\ndef task_func(a, b): return math.fsum([a, b])", "def task_func(a, b): return 3"),
    "several functions": ({"question": "`enc` and `dec`", "test": "import solution\n\ndef test_a():\n    assert solution.dec(solution.enc('abc')) == 'abc'\n    assert solution.enc('a') == 'b'\n"}, "def enc(s): return ''.join(chr(ord(c) + 1) for c in s)\ndef dec(s): return ''.join(chr(ord(c) - 1) for c in s)", "def enc(s): return s\ndef dec(s): return s"),
    "mbppplus": ({"prompt": "p", "test_list": ["assert set(f((3,4),(4,5)))=={4}"], "test": "import numpy as np\ninputs = [[(3,4),(4,5)], [(1,2),(3,)]]\nresults = [(4,), ()]\nfor inp, exp in zip(inputs, results):\n    assert set(f(*inp)) == set(exp)"}, "def f(a, b): return tuple(set(a) & set(b))", "def f(a, b): return (4,)"),
    "mbppplus without a list": ({"prompt": "p", "code": "def half(n): return n / 2", "test": "import numpy as np\ndef is_floats(x): return isinstance(x, (float, np.ndarray))\ndef assertion(out, exp, atol):\n    if atol == 0 and is_floats(exp): atol = 1e-6\n    if out != exp and atol: assert np.allclose(out, exp, rtol=1e-07, atol=atol)\n    else: assert out == exp\ninputs = [[1], [3]]\nresults = [0.5, 1.5]\nfor i, (inp, exp) in enumerate(zip(inputs, results)):\n    assertion(half(*inp), exp, 0)\n"}, "def half(n): return n / 2 + 1e-9", "def half(n): return 0.5"),
    "humanevalplus": ({"prompt": "def half(n):\n    '''Half of n.'''\n", "entry_point": "half", "canonical_solution": "    return n / 2\n", "test": "import numpy as np\n\ndef check(candidate):\n    for n, due in [([1, 2],), ([3], 1.5)][1:]:\n        assert np.isclose(candidate(*n), due)\n"}, "def half(n): return n / 2", "def half(n): return n"),
}  # fmt: skip


@pytest.mark.parametrize("name", [*DATA, *FURTHER])
def test_a_right_program_earns_1_and_a_wrong_one_less(sandbox: Sandbox, name: str) -> None:
    row, right, wrong = (DATA | FURTHER)[name]
    one, less = earned(sandbox, row, right, wrong)
    assert one == 1.0
    assert less < 1.0


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"test": "import pandas as pd\nassert f(pd.DataFrame()) == 1"}, "its tests import pandas"),
        ({"test": "from scipy.stats import norm\nassert f(1) == norm"}, "its tests import scipy"),
        ({"test": "assert helper(f(1)) == 1"}, "its tests use 'helper', which neither they nor the row"),
        ({"test": "import asyncio\nassert asyncio.run(f(1)) == 1"}, "its tests use asyncio: coroutines"),
        ({"test": "async def test_a():\n    assert await f(1) == 1"}, "its tests use async: coroutines"),
        ({"test": "from unittest.mock import patch\ndef test_a():\n    with patch('builtins.print'): f(1)"}, "unittest.mock"),
        ({"test": "def test_a(capsys):\n    f(1)\n    assert capsys.readouterr().out == '1'"}, "its tests use capsys: what the"),
        ({"test": "def test_a(tmp_path):\n    f(tmp_path)\n"}, "its tests use tmp_path: the program has files"),
        ({"test": "def test_a(monkeypatch):\n    f(1)\n"}, "its tests use monkeypatch"),
        ({"test": "import inspect\nassert 'for' not in inspect.getsource(f)"}, "its tests use inspect"),
        ({"test": "assert f.__doc__\nassert f(1) == 1"}, "its tests use __doc__"),
        ({"test": "import io, contextlib\nwith contextlib.redirect_stdout(io.StringIO()) as o:\n    f(1)\nassert o"}, "redirect_stdout"),
        ({"test": None, "input_output": {"inputs": ["1"], "outputs": []}}, "inputs and outputs must be lists of the same length"),
        ({"test": None, "input_output": [{"input": "x = y", "output": "1"}]}, "must be values by name, got 'x = y'"),
        ({"test": None, "input_output": [{"input": "x = 1, x = 2", "output": "1"}]}, "must be values by name, got 'x = 1, x = 2'"),
        ({"test": None, "input_output": [{"input": "x = 1, **{}", "output": "1"}]}, "must be values by name"),
        ({"test": None, "private_test_cases": PRIVATE}, "private_test_cases is a pickle in base64, which nothing here reads"),
        ({"test": None, "tests": [{"input": "1", "output": "2", "testtype": "functional"}], "entry_point": None}, "call a function that no column names"),
        ({"test": "assert f(1) =="}, "tests are not Python code"),
        ({"test": "assert f(1) == 1", "solution": "import pandas as pd\ndef f(n): return n"}, "its program imports pandas"),
        ({"test": "assert f(1) == 1", "prompt": "from torch import nn\ndef f(n):\n    'N.'\n"}, "its program imports torch"),
        ({"test": None, "tests": CASES, "generated_checker": "print(1)"}, "has outputs that a program of its own judges"),
        ({"test": "lu = require('luaunit')", "language": "lua"}, "asks for a program in lua, and programs are Python's"),
        ({"test": None, "verification_info": json.dumps({"language": "javascript", "test_cases": CASES})}, "asks for a program in javascript"),
        ({"test": None, "tests": 3}, "tests must be code or a list, got 3"),
        ({"test": "class Fake:\n    x = 1\nassert f(Fake()) == 1"}, "its tests make objects of a class of their own, 'Fake'"),
        ({"prompt": "class Money", "entry_point": "Money", "test": "m = Money(5)\nassert m == 5"}, "compare an object of 'Money' with a value"),
        ({"prompt": "class Base", "entry_point": "Base", "test": "class Sub(Base):\n    pass\nassert Sub.x == 1"}, "derive 'Sub' from a class of the program"),
    ],
)  # fmt: skip
def test_what_no_program_can_be_judged_by_is_refused_by_name_before_anything_runs(change: Row, said: str) -> None:
    with pytest.raises(ValueError, match=re.escape(said)):
        problem_of({"prompt": "p", "entry_point": "f", **change})


def test_a_pickle_is_left_out_with_a_line_where_other_tests_judge(
    sandbox: Sandbox, caplog: pytest.LogCaptureFixture
) -> None:
    row = {"question_content": "sum", "public_test_cases": json.dumps(CASES), "private_test_cases": PRIVATE}
    with caplog.at_level(logging.WARNING):
        assert earned(sandbox, row, SUM, FIXED) == [1.0, 0.25]
    assert "tests of 1 problems are left out: private_test_cases is a pickle in base64" in caplog.text


def test_packages_are_what_the_settings_allow() -> None:
    row = {"prompt": "p", "test": "import numpy as np\nassert np.isclose(f(1), 1)"}
    assert problem_of(row).tests[0].packages == ("numpy",)  # type: ignore[union-attr]
    with pytest.raises(ValueError, match="its tests import numpy; they may import Python's standard library"):
        problem_of(row, ())
    with pytest.raises(ValueError, match="its tests import nothing_such, which is not installed"):
        problem_of({"prompt": "p", "entry_point": "f", "test": "import nothing_such\nassert f(1)"}, ("nothing_such",))


def test_what_codeforces_says_beside_a_description_is_shown() -> None:
    row = {"description": "Add.", "input_format": "Two numbers.", "output_format": "One.", "note": None}
    assert problem_of({**row, "tests": CASES}).statement.startswith(
        "Add.\n\nInput\n\nTwo numbers.\n\nOutput\n\nOne.\n\n"
    )
    assert problem_of({**row, "prompt": "Whole.", "tests": CASES}).statement.startswith("Whole.\n\nThe program")


def test_difficulty_may_be_a_word() -> None:
    row = {"prompt": "p", "test_list": ["assert f(1) == 1"], "difficulty": "easy"}
    code = Code({"train": [problem_of(row)], "test": []}, Here())
    assert problem_of(row).difficulty == "easy"
    assert code.difficulty(code.prompts("train")[0]) is None


def test_a_prompt_says_what_is_to_be_defined() -> None:
    def said(name: str, **more: Any) -> str:
        return problem_of({**DATA[name][0], **more}).statement

    assert "reads its input from standard input" in said("apps")
    assert "Name the function `add`." in said("taco")
    assert "Name the class `Stack`." in said("a class")
    assert f"Begin with this:\n\n```python\n{STARTER}\n```" in said("livecodebench, functional")
    assert "Name the function `f`. Define `Broke` as well." in said("its own exception, named")
    assert "Name the function `enc`." not in said("several functions")
    assert "Name the function `dec`. Define `enc` as well." in said("several functions")


SHAPES = (
    *("apps", "taco", "livecodebench, stdin", "livecodebench, functional", "deepcoder, cases", "leetcode"),
    *("its own exception, named", "bigcodebench", "mbppplus", "humanevalplus"),
)


@pytest.mark.long
@pytest.mark.parametrize("shape", SHAPES)
def test_two_steps_are_made_with_rows_of_each_shape(tmp_path: Path, shape: str) -> None:
    row = {**DATA[shape][0], "solution": DATA[shape][1]}
    column = next(name for name in PROMPTS if name in row)
    numbered = [{**row, column: f"{row[column]}\n# {number}\n"} for number in range(6)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in numbered))
    config = small_config(environment=CodeConfig(num_slots=1), data__path=str(tmp_path / "rows.jsonl"))
    train(config, tmp_path / "run")
    steps = [step for step in rows(tmp_path / "run" / "metrics.jsonl") if step["kind"] == "train"]
    assert [step["environment/programs"] > 0 for step in steps] == [True, True]
