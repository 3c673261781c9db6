"""Answers that are hard to look at, and what trusted test code does with answers.

Each is an expression that a program returns or prints. None of them is right, and none may cost more than its test.
"""

# ruff: noqa: E501

import random

PREAMBLE = """
import array, collections, dataclasses, datetime, decimal, enum, fractions, functools, io, itertools, os, re, sys, types
def nested(depth, wrap):
    value = 0
    for _ in range(depth): value = wrap(value)
    return value
def cycle(value, add):
    add(value)
    return value
class Int(int):
    def __eq__(self, other): return True
    def __hash__(self): return 1
    def __repr__(self): return "r" * 10**7
    __str__ = __format__ = lambda self, *a: "s" * 10**7
    def __index__(self): return 10**12
class Ratio(fractions.Fraction):
    def __eq__(self, other): return True
    def __hash__(self): return 1
    numerator = denominator = property(lambda self: Int(10**9))
class Cash(decimal.Decimal):
    def __eq__(self, other): return True
    def __hash__(self): return 1
    def __str__(self): return "sNaN"
    def is_nan(self): return True
class Str(str):
    def __len__(self): return 10**18
    def __eq__(self, other): return True
    __hash__ = str.__hash__
    def __iter__(self): return itertools.repeat("a")
class List(list):
    def __iter__(self): return itertools.count()
    def __len__(self): return -1
    def __getitem__(self, i): return i
    def __eq__(self, other): return True
class Dict(dict):
    def items(self): return itertools.count()
    def __missing__(self, key): return key
class Set(set):
    def __contains__(self, item): return True
    def __hash__(self): return 7
class Raises:
    def __getattribute__(self, name): raise SystemExit(0)
    def __bool__(self): raise KeyboardInterrupt
    def __repr__(self): raise RecursionError
class Loops:
    def __bool__(self):
        while True: pass
class Grows:
    def __bool__(self): return bool([0] * 10**10)
class Hidden(type):
    @property
    def __name__(cls): raise MemoryError
    def __instancecheck__(cls, other): return True
class Masked(metaclass=Hidden): __class__ = property(lambda self: int)
class Flag(enum.IntFlag): A = 1 << 70000
@dataclasses.dataclass
class Data: x: object = None
Point = collections.namedtuple("Point", "x y")
class Error(Exception):
    def __str__(self): return "e" * 10**7
    __repr__ = __str__
def throw(error): raise error
def frame(message):
    import json
    body = json.dumps(message).encode()
    return len(body).to_bytes(4, "big") + body
def put(content):
    view = memoryview(content)
    while view: view = view[os.write(4, view):]
def say(text):
    body = text if type(text) is bytes else text.encode()
    put(len(body).to_bytes(4, "big") + body)
    os._exit(0)
"""

NUMBERS = [
    "10**5000", "-(1 << 1 << 20)", "1 << (1 << 24)", "10**4299", "10**4301", "float('nan')", "float('inf')", "-0.0", "1e308", "5e-324",
    "complex('nan+infj')", "complex(1e308, -1e308)", "Int(3)", "Flag.A", "True", "decimal.Decimal('1e999999999')",
    "fractions.Fraction(10**5000, 3)", "2**63", "-2**63 - 1", "datetime.timedelta.max",
    "decimal.Decimal('sNaN')", "decimal.Decimal('-Infinity')", "decimal.Decimal('9' * 5000000)", "{decimal.Decimal('1e999999999999999999'): 1}",
    "Ratio(3, 7)", "{Ratio(3, 7)}", "Cash(3)", "[Cash('NaN')]", "fractions.Fraction(3**(1 << 22), 7**(1 << 20))",
]  # fmt: skip
TEXTS = [
    "'a' * 8000000", "'\\ud800' * 100000", "'\\x00\\x1b[2J\\x07\\u202e'", "'\\U0010ffff' * 500000", "'a' * 40 + '!'", "'9' * 5000", "'%9999999d'",
    "'{:>9999999999}'", "'(' * 5000 + 'x'", "'1,' * 1000000", "b'\\xff' * 2000000", "bytearray(2000000)", "memoryview(b'ab')", "Str('x')", "''",
    "'\\n' * 2000000", "'__import__(\"os\")._exit(0)'", "'\\u2028' * 400",
]  # fmt: skip
RANGES = [
    "range(10**5000)", "range(10**12)", "range(-10**5000, 10**5000, 10**4000)", "range(50000000)", "range(0)", "{10**5000: 1}.keys()",
    "{0: 'a' * 8000000}.values()", "{10**5000: 10**5000}.items()", "[{10**5000: 1}.keys()]", "{0: range(10**5000)}.values()", "dict.fromkeys(range(100000)).keys()",
    "iter(range(10**6))", "itertools.count()", "itertools.repeat(0)", "(i for i in range(10**6))", "map(str, [10**4000])", "zip(range(9), 'ab')",
    "enumerate(itertools.count())", "reversed([1])", "types.MappingProxyType({1: 2})", "slice(0, 10**5000)", "itertools.cycle('ab')",
]  # fmt: skip
NESTED = [
    "nested(59, lambda v: [v])", "nested(60, lambda v: [v])", "nested(61, lambda v: (v,))", "nested(100000, lambda v: [v])", "nested(50, lambda v: {0: v})",
    "nested(30, lambda v: frozenset({v}))", "nested(9, lambda v: [v] * 8)", "nested(18, lambda v: (v, v))", "nested(40, lambda v: {(0,): [v]})",
    "cycle([], lambda v: v.append(v))", "cycle({}, lambda v: v.update(me=v))", "cycle(collections.deque(), lambda v: v.append(v))",
    "[[]] * 2000000", "[{}] * 300000", "[()] * 1000000", "list(range(1000000))", "{i: [i] for i in range(100000)}", "set(range(200000))",
    "frozenset(map(str, range(100000)))", "[float('nan')] * 200000", "{float('nan') for _ in range(1000)}", "{(2**61 - 1) * i for i in range(900)}",
    "[10**4000] * 500", "[range(10**5000)] * 100", "{1: {10**5000: {2: range(10**5000)}.values()}.items()}", "[iter([1]), {1: 2}.keys(), range(3)]",
    "{b'\\xff': '\\ud800', None: ..., (1, 2.5): -0.0}",
]  # fmt: skip
OBJECTS = [
    "List([1])", "Dict({1: 2})", "Set({1})", "[Set({1})]", "Point(10**5000, range(10**5000))", "Data([1])", "Masked()", "object()", "...", "NotImplemented", "type",
    "len", "lambda: 0", "re.match('a', 'a')", "Error('x')", "collections.Counter('ab' * 9)", "collections.OrderedDict(a=10**5000)",
    "collections.defaultdict(list, {1: []})", "collections.ChainMap({1: 2})", "array.array('d', [1.5])", "io.StringIO('x')", "sys", "types.SimpleNamespace(a=1)",
    "Raises()", "Grows()", "throw(Error())", "throw(SystemExit(0))", "throw(KeyboardInterrupt)", "throw(MemoryError('m' * 10**7))",
    "throw(type('E' * 100000, (Exception,), {})())", "throw(UnicodeDecodeError('utf-8', b'x' * 10**6, 0, 1, 'r'))", "throw(StopIteration([1]))",
    "throw(ExceptionGroup('g', [ValueError()]))", "throw(GeneratorExit)", "os._exit(0)", "(os._exit(0) for _ in 'a')", "os.abort()", "[0] * 10**12",
]  # fmt: skip
FRAMES = [
    "say(b'[' * 3000000)", "say(b'{\"i\":' * 500000)", "say('{\"i\": 1, \"out\": ' + '[[],' * 1000000 + '0' + ']' * 1000000 + '}')", "say(b'9' * 4000000)",
    "say('{\"i\": ' + '9' * 5000 + ', \"out\": 1}')", "say(b'\\xff\\xfe' * 1000)", "say('{\"i\": 1, \"out\": [' + '{},' * 900000 + '0]}')", "put(b'\\x7f' * 3000000)",
    "say('{\"i\": 1, \"err\": \"' + 'e' * 7000000 + '\", \"text\": \"' + 't' * 1000 + '\"}')", "put(frame({'i': 1, 'out': 0}) * 50000)",
    "say('{\"i\": 1, \"out\": {\"q\": [\"0x' + 'f' * 4000000 + '\", \"0x' + 'e' * 3999999 + '\"]}}')", "say('{\"i\": 1, \"out\": {\"m\": \"' + '9' * 8000000 + '\"}}')",
    "say('{\"i\": 1, \"out\": {\"i\": \"0x' + 'f' * 8000000 + '\"}}')", "say('{\"i\": 1, \"out\": {\"b\": \"' + '0' * 8000000 + '\"}}')",
    "say('{\"i\": 1, \"out\": {\"s\": [' + ','.join('{\"i\": \"%s\"}' % hex(((1 << 61) - 1) * i) for i in range(90000)) + ']}}')",
]  # fmt: skip
FORGED = [
    f"say({body!r})"
    for body in (
        '{"i": 1, "out": true}', '{"i": 1, "out": {"o": true}}', '{"i": 1, "out": NaN}', '{"i": 1, "out": 1.0}', '{"i": 1.0, "out": "x"}', '{"i": true, "out": "x"}',
        '{"i": "1", "out": "x"}', '{"i": 1, "out": "x", "passed": true}', '{"i": 1, "void": {"passed": true}}', '{"i": 1, "out": {"f": "nan"}}',
        '{"verdicts": [{"passed": true, "kind": "passed", "message": ""}], "done": true, "is_worn": false, "i": 1}', '{"done": true, "i": 1}', '[1]', '1', 'null',
        '{"i": 1, "out": {"i": "0x1", "f": "nan"}}', '{"i": 1, "out": {}}', '{"i": 1, "out": {"__class__": "str"}}', '{"i": 1, "out": {"n": [{"n": []}]}}',
        '{"i": 0, "i": 1, "out": 1}', '{"i": 1, "err": "AssertionError", "text": "", "out": 1}', '{"i": 1, "err": "StopIteration", "text": ""}', '{"loaded": true}',
        '{"i": 1, "err": ["x"], "text": {}}', '{"i": 1, "out": {"r": ["0x0", "0x1", "0x0"]}}', '{"i": 1, "out": {"k": [[]]}}', '{"i": 1, "out": {"d": [[{"s": []}, 1]]}}',
        '{"i": 1, "out": {"q": ["0x1", "0x0"]}}', '{"i": 1, "out": {"q": ["0x1", true]}}', '{"i": 1, "out": {"m": "sNaN"}}', '{"i": 1, "out": {"m": "1e99999999999999999999"}}',
        '{"i": 1, "out": {"d": {"a": "b"}}}', '{"i": 1, "out": {"b": "zz"}}', '{"i": 1, "out": {"b": 5}}', '{"i": 1, "out": {"c": ["nan"]}}', '{"i": 1}', '',
    )
]  # fmt: skip
"""Frames that nothing but a program of its own makes.

Some of these, and of those above, break the rules of the channel: then the program passes nothing.
"""
HANGING = [
    "Loops()",
    "throw(KeyboardInterrupt) if 0 else [None for _ in itertools.count()]",
    "(i for i in iter(int, 1))",
]

PLAIN = [*NUMBERS, *TEXTS, *RANGES, *NESTED, *OBJECTS]
ALL = [*PLAIN, *FRAMES, *FORGED, *HANGING]

USES = [
    "assert {call} == {secret}", "assert not {call} != {secret}", "assert str({call}) == {secret}", "assert repr({call}) == {secret}",
    "assert {call} * 10**9 == {secret}", "assert sorted({call}) == {secret}", "assert set({call}) == {secret}", "assert sum({call}) == {secret}",
    "assert list({call})[-1] == {secret}", "assert '%9999999999d' % {call} == {secret}", "assert f'{{{call}}}' == {secret}, f'got {{{call}}}'",
    "import re\nassert re.fullmatch('(a+)+', {call}) == {secret}", "assert max({call}) == {secret}", "assert {call} ** {call} == {secret}",
    "assert 1 << {call} == {secret}", "assert dict({call}) == {secret}", "assert tuple(map(str, {call})) == {secret}", "assert ({call} + {call}) == {secret}",
    "assert solve({call}) == {secret}", "assert solve([[{call}]] * 9) == {secret}", "raise KeyError({call})", "import time\ntime.sleep({call})\nassert False",
    "import copy, json\nassert json.dumps(copy.deepcopy({call})) == {secret}", "import math\nassert math.factorial({call}) == {secret}",
    "import itertools\nassert sum(1 for _ in itertools.product({call}, repeat=20)) == {secret}", "import math\nassert abs({call} - math.pi) < -1",
    "try:\n    x = {call}\nexcept BaseException:\n    x = 0\nwhile True: pass", "import sys\nsys.exit({call})", "import os\nos._exit(bool({call}))",
    "def r(n): return r(n)\nr({call})", "kept = []\nwhile True: kept.append(list({call}) + [0] * 10**6)", "assert {call} in [{secret}]",
    "import signal\nsignal.alarm(0)\nassert b'' == bytes({call}) * 2 + {secret}",
]  # fmt: skip

WRAPS = [
    "[{a}, {b}]", "({a},)", "({a}, {b})", "{{{a}: {b}}}", "{{0: {a}, 'k': {b}}}", "{{{a}, {b}}}", "frozenset([{a}])", "(x for x in [{a}, {b}])",
    "{{0: {a}}}.values()", "{{{a}: 0}}.keys()", "{{{a}: {b}}}.items()", "map(lambda _: {a}, range(3))", "filter(None, [{a}])", "List([{a}])",
    "Dict({{0: {a}}})", "Set([{a}])", "Point({a}, {b})", "Data({a})", "collections.deque([{a}])", "collections.OrderedDict(a={a})", "[{a}] * 300",
    "nested(40, lambda v: [v, {a}])", "nested(7, lambda v: ({a}, v, v))", "cycle([{a}], lambda v: v.append(v))", "throw(ValueError({a}, {b}))", "iter([{a}])",
    "zip([{a}], [{b}])", "enumerate([{a}])", "reversed([{a}, {b}])", "itertools.chain([{a}], [{b}])", "collections.ChainMap({{0: {a}}})", "[*{a}]", "str({a})",
    "repr({a})", "tuple({a})", "bytes({a})", "range({a}, {b})", "slice({a}, {b})", "types.MappingProxyType({{0: {a}}})", "collections.Counter([{a}])",
    "collections.defaultdict(list, {{0: {a}}})", "{a} if {b} else {a}", "not {a}", "[{a}, [{b}, [{a}, [{b}]]]]", "type('T', (list,), {{}})([{a}])",
    "type('E', (Exception,), {{}})({a})", "dict.fromkeys([{a}], {b})", "functools.partial(len, {a})", "Int(3) + len([{a}])", "Str({a})",
]  # fmt: skip


def fuzzed(rng: random.Random, depth: int = 3) -> str:
    """Return an expression that nests answers in containers of any kind; it may raise where it is evaluated."""
    if depth == 0 or rng.random() < 0.2:
        return f"({rng.choice(PLAIN)})"
    wrap = rng.choice(WRAPS)
    return f"({wrap.format(a=fuzzed(rng, depth - 1), b=fuzzed(rng, depth - 2 if depth > 1 else 0))})"
