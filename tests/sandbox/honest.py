"""Honest programs of many kinds: functions that must return "x", and scripts with what they read and print."""

# ruff: noqa: E501

FUNCTIONS = """
import os
def f(name): return globals()[name]()
def copied(copy):
    with open("a", "w") as file: file.write("x")
    copy("a", "b")
    return open("b").read()
def copy():
    import shutil
    return copied(shutil.copy)
def copy2():
    import shutil
    return copied(shutil.copy2)
def copytree():
    import shutil
    os.makedirs("tree/d")
    open("tree/d/a", "w").write("x")
    shutil.copytree("tree", "other")
    return open("other/d/a").read()
def modes():
    open("m", "w").write("x")
    os.chmod("m", 0o600), os.chmod(b"m", 0o600), os.chmod(os.path.abspath("m"), 0o600), os.utime("m"), os.utime("m", (1, 2))
    return open("m").read()
def modes_of_what_is_not_there():
    for change in (lambda: os.chmod("gone", 0o600), lambda: os.utime("gone"), lambda: os.truncate("gone", 1)):
        try: change()
        except FileNotFoundError: continue
        return "no error"
    return "x"
def truncate():
    open("t", "w").write("xyz")
    os.truncate("t", 2)
    with open("t", "r+") as file: os.truncate(file.fileno(), 1)
    return open("t").read()
def touch():
    from pathlib import Path
    Path("p").touch(), Path("p").touch()
    return Path("p").write_text("x") and Path("p").read_text()
def shelf():
    import shelve
    with shelve.open("s") as kept: kept["a"] = "x"
    with shelve.open("s") as kept: return kept["a"]
def archive():
    import tarfile
    open("a", "w").write("x")
    with tarfile.open("t.tgz", "w:gz") as tar: tar.add("a")
    with tarfile.open("t.tgz") as tar: tar.extractall("out")
    return open("out/a").read()
def thread_pools():
    from multiprocessing.pool import ThreadPool
    from multiprocessing.dummy import Pool
    with ThreadPool(2) as one, Pool(2) as other:
        return "x" if one.map(abs, [-1, 2]) == other.map(abs, [-1, 2]) == [1, 2] else ""
def locks_of_multiprocessing():
    import multiprocessing as m, threading
    lock, again, both, queue, event = m.Lock(), m.RLock(), m.BoundedSemaphore(2), m.Queue(), m.Event()
    total = [0]
    def work():
        for _ in range(200):
            with lock: total[0] += 1
        queue.put(1)
    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads: thread.start()
    for thread in threads: thread.join()
    with again, again: assert not in_a_thread(lambda: again.acquire(False))
    assert in_a_thread(lambda: again.acquire(False))
    assert both.acquire() and both.acquire() and not both.acquire(timeout=0.01) and not both.acquire(block=False)
    both.release(), both.release()
    for give in (both.release, lock.release):
        try: give()
        except ValueError: continue
        return "released too often"
    threading.Timer(0.05, event.set).start()
    return "x" if event.wait(5) and total == [600] and [queue.get() for _ in range(3)] == [1, 1, 1] else ""
def in_a_thread(act):
    import threading
    found = []
    thread = threading.Thread(target=lambda: found.append(act()))
    thread.start(), thread.join()
    return found[0]
def no_process():
    import multiprocessing
    try: multiprocessing.Process(target=print).start()
    except PermissionError: return "x"
def executor():
    from concurrent.futures import ThreadPoolExecutor
    with ThreadPoolExecutor(3) as pool: return "".join(pool.map(str.lower, ["X"]))
def timeout_of_asyncio():
    import asyncio
    async def main():
        async with asyncio.timeout(5): await asyncio.sleep(0)
        assert asyncio.current_task() in asyncio.all_tasks()
        return await asyncio.to_thread(str.lower, "X")
    return asyncio.run(main())
def locale_of_the_user():
    import locale
    return "x" if locale.setlocale(locale.LC_ALL, "") else ""
def time_zone():
    import datetime, zoneinfo
    return "x" if datetime.datetime(2024, 7, 1, tzinfo=zoneinfo.ZoneInfo("Europe/Berlin")).utcoffset().seconds == 7200 else ""
def database():
    import sqlite3
    base = sqlite3.connect("base")
    base.execute("create table t(a)"), base.execute("insert into t values('x')"), base.commit()
    return base.execute("select a from t").fetchone()[0]
def signals():
    import signal
    found = []
    signal.signal(signal.SIGALRM, lambda *arguments: found.append("x"))
    signal.setitimer(signal.ITIMER_REAL, 0.02)
    signal.pause()
    return found[0]
def pickled():
    import copy, pickle
    global Plain
    class Plain: value = "x"
    return pickle.loads(pickle.dumps(copy.deepcopy(Plain()))).value
def unit_tests():
    import io, unittest
    class Case(unittest.TestCase):
        def test(self): self.assertEqual(1, 1)
    tests = unittest.defaultTestLoader.loadTestsFromTestCase(Case)
    return "x" if unittest.TextTestRunner(stream=io.StringIO()).run(tests).wasSuccessful() else ""
"""
NAMES = [line[4:-3] for line in FUNCTIONS.splitlines() if line.startswith("def ") and line.endswith("():")]

SCRIPTS = {
    "a main with arguments": (
        "import argparse, sys\ndef main(argv=None):\n    p = argparse.ArgumentParser()\n    p.add_argument('--by', type=int, default=1)\n"
        "    by = p.parse_args(argv).by\n    print(sum(map(int, sys.stdin)) * by)\n    return 3\nif __name__ == '__main__': sys.exit(main())",
        "1\n2",
        "3",
    ),
    "input to its end": (
        "n = 0\nwhile True:\n    try: n += int(input('? ') or 0)\n    except EOFError: break\nprint(n)",
        "1\r\n\r\n2",
        "? ? ? ? 3",
    ),
    "a deep recursion in a thread": (
        "import sys, threading\nsys.setrecursionlimit(1 << 20)\nthreading.stack_size(1 << 27)\n"
        "def f(n): return n and 1 + f(n - 1)\nt = threading.Thread(target=lambda: print(f(int(input()))))\nt.start()\nt.join()",
        "60000",
        "60000",
    ),
    "streams of its own": (
        "import io, os, sys\nclass Out(io.IOBase):\n    def __init__(self, file): self.fd, self.kept = file.fileno(), []\n"
        "    def write(self, text): self.kept.append(text)\n    def flush(self): os.write(self.fd, ''.join(self.kept).encode()); self.kept.clear()\n"
        "sys.stdout = Out(sys.stdout)\nread = io.BytesIO(os.read(0, os.fstat(0).st_size or 8192)).readline\nprint(int(read()) + int(read()))",
        "1\n2\n",
        "3",
    ),
    "a task that is too slow": (
        "import asyncio\nasync def main():\n    try:\n        async with asyncio.timeout(0.01): await asyncio.sleep(9)\n"
        "    except TimeoutError: print('slow')\nasyncio.run(main())",
        "",
        "slow",
    ),
    "workers with a queue": (
        "import queue, threading\nq, out = queue.Queue(), []\ndef work():\n    while (n := q.get()) is not None: out.append(n)\n"
        "ts = [threading.Thread(target=work) for _ in range(4)]\nfor t in ts: t.start()\nfor n in range(9): q.put(n)\nfor t in ts: q.put(None)\n"
        "for t in ts: t.join()\nprint(sum(out))",
        "",
        "36",
    ),
    "a pool of as many threads as there are processors": (
        "from multiprocessing.pool import ThreadPool\nprint(ThreadPool().map(lambda n: n * n, range(3)))",
        "",
        "[0, 1, 4]",
    ),
    "numbers as Python prints them": (
        "from decimal import Decimal\nfrom fractions import Fraction\nimport random\nrandom.seed(42)\n"
        "print(0.1 + 0.2, 1e16, 1e-7, Decimal('1.10') + 1, Fraction(2, 4), random.random(), 7 // -2, -7 % 3)",
        "",
        "0.30000000000000004 1e+16 1e-07 2.10 1/2 0.6394267984578837 -4 2",
    ),
    "types that name this module": (
        "from __future__ import annotations\nfrom dataclasses import dataclass, field\nimport typing\n@dataclass(order=True, slots=True)\n"
        "class P:\n    x: int\n    y: list = field(default_factory=list, compare=False)\nprint(max(P(1), P(2, [3])), typing.get_type_hints(P)['x'].__name__)",
        "",
        "P(x=2, y=[3]) int",
    ),
    "part of its input": ("print(input())", "\n".join(map(str, range(100_000))), "0"),
    "what goes to stderr": (
        "import logging, sys, traceback, warnings\nlogging.warning('a')\nwarnings.warn('b')\nprint('c', file=sys.stderr)\n"
        "try: 1 / 0\nexcept ZeroDivisionError: traceback.print_exc()\nprint('d')",
        "",
        "d",
    ),
    "an error in a thread": (
        "import threading\nt = threading.Thread(target=lambda: 1 / 0)\nt.start()\nt.join()\nprint('a')",
        "",
        "a",
    ),
    "a goodbye of objects": (
        "class A:\n    def __del__(self): print('bye')\ndef g():\n    try: yield\n    finally: print('done')\nb = A()\nkept = g()\nnext(kept)",
        "",
        "done\nbye",
    ),
    "a doctest of itself": (
        'import doctest\ndef f(n):\n    """\n    >>> f(1)\n    2\n    """\n    return n + 1\nfound = doctest.testmod()\nprint(found.attempted, found.failed)',
        "",
        "1 0",
    ),
    "lines with carriage returns": ("if True:\r\n\tprint(input(), end=' ')\r\n\tprint('é')\r\n", "ü\r\n", "ü é"),
}
