"""The program of a worker process; it imports the standard library alone.

Protocol, over one connection: the parent sends pickled bytes (its own functions and arguments), the worker answers in
JSON with the number of the call: nothing but data comes back. Run as `python -P process.py DESCRIPTOR PARENT`.
"""

import ctypes
import importlib
import io
import itertools
import json
import os
import pickle
import resource
import runpy
import signal
import sys
import traceback
import types
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

MAX_ANSWER = 1 << 28  # bytes
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36


def die_with_parent(parent: int) -> None:
    """Let the kernel (Linux) end this process with its parent."""
    if sys.platform == "linux":
        library = ctypes.CDLL(None)
        library.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        library.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    if os.getppid() != parent:  # it ended before the line above
        os._exit(1)


def import_main(path: str, module: str | None) -> None:
    """Make the parent's script importable, for functions defined in it."""
    name = "__mp_main__"  # what multiprocessing calls it; the script's `if __name__ == "__main__"` part does not run
    content = runpy.run_module(module, None, name, True) if module else runpy.run_path(path, run_name=name)
    main = types.ModuleType(name)
    vars(main).update(content)
    sys.modules["__main__"] = sys.modules[name] = main


def load(setup: bytes) -> list[Any]:
    # Import as the parent does
    instructions = pickle.loads(setup)
    sys.path[:] = instructions["path"]
    if instructions["main"] is not None:
        import_main(*instructions["main"])
    for module in instructions["preload"]:
        importlib.import_module(module)
    # Limit the address space after the imports, which count in it
    functions: list[Any] = pickle.loads(instructions["functions"])
    if instructions["address_bytes"] is not None:
        resource.setrlimit(resource.RLIMIT_AS, (instructions["address_bytes"],) * 2)
    return functions


def loader_of(function: Any) -> Callable[[], object]:
    """Return the loader of a function, called before its first call."""
    # The class is asked: an object's own __getattr__ may answer anything
    return function.prepare if hasattr(type(function), "prepare") else lambda: None


def prepare(functions: list[Any]) -> int:
    """Let functions prepare, and return the bytes of memory they then hold."""
    before = resident_bytes("self")
    for function in functions:
        loader_of(function)()
    return max(0, resident_bytes("self") - before)


def resident_bytes(process: int | str) -> int:
    """Return a process's resident memory in bytes, 0 if unknown."""
    try:
        with open(f"/proc/{process}/statm") as file:
            pages = file.read().split()[1]
    except (OSError, IndexError):
        return 0
    return int(pages) * resource.getpagesize()


def describe(error: BaseException) -> str:
    """Describe an error in one line: type, message and place."""
    frames = traceback.extract_tb(error.__traceback__)
    place = f" ({os.path.basename(frames[-1].filename)}:{frames[-1].lineno})" if frames else ""
    message = " ".join(str(error).split())[:500]
    return f"{type(error).__name__}: {message}{place}" if message else f"{type(error).__name__}{place}"


def answer(functions: list[Any], request: bytes) -> dict[str, Any]:
    """Return the result of one call, or its error."""
    try:
        index, keywords = pickle.loads(request)
        result = functions[index](**keywords)
        size = len(json.dumps(result))
        if size > MAX_ANSWER:
            raise ValueError(f"result must be <= {MAX_ANSWER} bytes of JSON, got {size}")
    except (Exception, SystemExit) as error:
        return {"error": describe(error)}
    return {"result": result}


def main(descriptor: int, parent: int) -> None:
    die_with_parent(parent)
    os.dup2(2, 1)  # what functions print must not mix with the output of the run
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True)  # into a pipe it would be kept back, and lost with the process
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os.set_inheritable(descriptor, False)
    connection = Connection(descriptor)
    try:
        functions = load(connection.recv_bytes())
        held = prepare(functions)
    except (Exception, SystemExit) as error:
        connection.send_bytes(json.dumps({"call": 0, "error": describe(error)}).encode())
        return
    connection.send_bytes(json.dumps({"call": 0, "result": "ready", "held": held}).encode())
    for number in itertools.count(1):
        try:
            request = connection.recv_bytes()
        except EOFError:
            return
        said = answer(functions, request)
        if os.getppid() != parent:  # a function forked, and both returned
            os._exit(0)
        connection.send_bytes(json.dumps({"call": number, **said}).encode())


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
    sys.stderr.flush()
    os._exit(0)  # do not wait for threads that functions left behind
