"""Runs cases in the format of the shared attack file, and looks at what they left behind.

As a script, `python attack_run.py TIER UID FILE` becomes an ordinary user first, with what it needs already loaded: the
repository may lie where that user cannot look.
"""

import glob
import json
import os
import shutil
import site
import socket
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from covey_sandbox import CallTest, Limits, Sandbox

Case = dict[str, Any]
CANARY = Path("/tmp/sbx_canary")
HONEST = "def solve(x):\n    return x + 1"
TAGS = {
    "$tuple": lambda items: tuple(map(plain, items)),
    "$set": lambda items: set(map(plain, items)),
    "$frozenset": lambda items: frozenset(map(plain, items)),
    "$dict": lambda pairs: {plain(key): plain(value) for key, value in pairs},
    "$int": lambda text: int(text, 16),
    "$float": float,
    "$bytes": bytes.fromhex,
}


def plain(node: Any) -> Any:
    """A value from its tagged JSON."""
    if isinstance(node, list):
        return [plain(item) for item in node]
    if isinstance(node, dict):
        tag = next(iter(node), "")
        return TAGS[tag](node[tag]) if tag in TAGS else {key: plain(value) for key, value in node.items()}
    return node


def tests_of(case: Case) -> list[CallTest]:
    return [
        CallTest(plain(test["args"]), expected=plain(test["expected"]), **test.get("tol", {})) for test in case["tests"]
    ]


def problems(sandbox: Sandbox, case: Case) -> list[str]:
    """What is wrong with how a case went; nothing if it held."""
    checks = case.get("checks", {})
    limits = Limits(wall_seconds=case["limits"]["wall_s"], memory_bytes=case["limits"]["memory_mb"] << 20)
    found = []
    with planted(case.get("needs") or {}), Usage() as usage:
        for _ in range(checks.get("repeat", 1)):
            started = time.monotonic()
            report = sandbox.run_blocking(case["code"], tests_of(case), case["function"], limits)
            if report.fraction != case["reward"]:
                found.append(f"reward {report.fraction}, not {case['reward']}: {report.results}")
            if time.monotonic() - started > checks.get("max_seconds", 60):
                found.append("it took too long")
        found += left_behind(checks)
    if usage.descendants > checks.get("max_rss_mb", 1 << 20):
        found.append(f"it used {usage.descendants} MB")
    if usage.grown > checks.get("max_parent_growth_mb", 1 << 20):
        found.append(f"this process grew by {usage.grown} MB")
    honest = sandbox.run_blocking(HONEST, [CallTest((1,), expected=2)], "solve").fraction
    return [f"{case['name']}: {problem}" for problem in [*found, *(["the next one failed"] if honest != 1.0 else [])]]


def left_behind(checks: dict[str, Any]) -> list[str]:
    """Files and processes that must not be there, and files that must."""
    places = {"~": os.path.expanduser("~"), "<cwd>": os.getcwd(), "<site-packages>": site.getsitepackages()[0]}
    patterns = list(checks.get("no_file", []))
    for pattern in checks.get("no_file_glob", []):
        for name, place in places.items():
            pattern = pattern.replace(name, place)
        patterns.append(pattern)
    found = [f"{path} is there" for pattern in patterns for path in glob.glob(pattern)]
    for path, content in checks.get("intact", {}).items():
        if not os.path.isfile(path) or Path(path).read_text() != content:
            found.append(f"{path} is not intact")
    lines = [line for pid, line in processes() if pid != os.getpid()]
    names = checks.get("no_process", []) + checks.get("no_process_comm", [])
    return found + [f"a process {name} is there" for name in names if any(name in line for line in lines)]


def processes() -> list[tuple[int, str]]:
    """Number, name and command line of all."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            text = (path / "comm").read_text() + (path / "cmdline").read_bytes().decode("latin1").replace("\0", " ")
        except OSError:
            continue
        found.append((int(path.name), text))
    return found


def named(name: str, among: Iterable[int]) -> list[int]:
    """Those of the processes that have this name."""
    return [pid for pid, line in processes() if pid in among and line.startswith(name)]


def own_folders(sandbox: Sandbox) -> list[Path]:
    """Where the folders of its programs are; none in the namespace tier."""
    return [Path(one._folder) for one in sandbox._slots if one._folder is not None]


def num_descriptors(pid: int) -> int:
    """0 where it is gone, or nobody may look."""
    try:
        return len(os.listdir(f"/proc/{pid}/fd"))
    except OSError:
        return 0


@contextmanager
def planted(needs: dict[str, Any]) -> Iterator[None]:
    """What a case tries to reach: variables, files, a server."""
    shutil.rmtree(CANARY, ignore_errors=True)
    CANARY.mkdir(mode=0o777)
    CANARY.chmod(0o777)
    for path, content in needs.get("file", {}).items():
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).write_text(content)
        Path(path).chmod(0o666)
    os.environ.update(needs.get("env", {}))
    server = serve(needs["listener"]) if "listener" in needs else None
    try:
        yield
    finally:
        for name in needs.get("env", {}):
            del os.environ[name]
        if server is not None:
            server.shutdown(socket.SHUT_RDWR)  # a thread that waits in accept would keep it open
            server.close()
        shutil.rmtree(CANARY, ignore_errors=True)


def serve(needs: dict[str, Any]) -> socket.socket:
    """Tells its secret to whoever connects."""
    server = socket.create_server((needs["host"], needs["port"]))

    def answer() -> None:
        while True:
            try:
                client, _ = server.accept()
            except OSError:
                return
            with client:
                client.sendall(needs["sends"].encode())

    threading.Thread(target=answer, daemon=True).start()
    return server


class Usage:
    """Most memory of all descendants together, and how much this process grew, in MB, while it is entered.

    Processes that other tests left running, and that are none of a sandbox's, do not count.
    """

    def __enter__(self) -> "Usage":
        self.descendants = 0
        running = set(descendants(os.getpid()))
        self._others = running - set(named("covey-", running))
        self._before = resident(os.getpid())
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._is_over.set()
        self._thread.join()
        self.grown = resident(os.getpid()) - self._before

    def _watch(self) -> None:
        while not self._is_over.wait(0.02):
            of_sandboxes = set(descendants(os.getpid())) - self._others
            self.descendants = max(self.descendants, sum(map(resident, of_sandboxes)))


def descendants(pid: int) -> list[int]:
    """Children, their children, and so on."""
    found = []
    for path in glob.glob(f"/proc/{pid}/task/*/children"):
        try:
            children = [int(child) for child in Path(path).read_text().split()]
        except OSError:
            continue
        found += [one for child in children for one in (child, *descendants(child))]
    return found


def resident(pid: int) -> int:
    """Memory of a process alone (what it shares is counted elsewhere), in MB."""
    try:
        _, total, shared, *_ = Path(f"/proc/{pid}/statm").read_text().split()
    except OSError:
        return 0
    return (int(total) - int(shared)) * os.sysconf("SC_PAGE_SIZE") >> 20


def become(uid: int) -> None:
    """An ordinary user, for good."""
    os.setgroups([])
    os.setresgid(uid, uid, uid)
    os.setresuid(uid, uid, uid)
    os.chdir("/")
    os.environ["HOME"] = "/nonexistent"


def main(tier: Any, uid: int, file: str) -> int:
    cases = [json.loads(line) for line in Path(file).read_text().splitlines()]
    become(uid)
    with Sandbox(2, tier) as sandbox:
        assert sandbox.tier == tier
        found = [problem for case in cases for problem in problems(sandbox, case)]
    print("\n".join([*found, f"{len(cases)} cases, {len(found)} problems"]))
    return len(found) > 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], int(sys.argv[2]), sys.argv[3]))
