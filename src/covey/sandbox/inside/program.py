"""Runs one program and answers calls, in the process that is shut in.

Nothing here is trusted: the program can change any of it, and say anything. It holds code, arguments and answers;
the expected values are elsewhere. Before any of the program runs, this reports which suspicious modules it imports.
"""

import ast
import atexit
import contextlib
import os
import sys
import threading
import types
from collections.abc import Callable
from typing import Any, NoReturn

from covey.sandbox.inside import codec, wire

STDIN, STDOUT, STDERR, JOB, RESULT = range(5)
"""All descriptors a program has."""
FILE_NAME = "<program>"
MAX_TEXT = 300
"""Characters of an error's message."""


class Answers:
    """The result channel, as long as the program leaves it alone."""

    def __init__(self, descriptor: int, max_bytes: int) -> None:
        self._descriptor = descriptor
        self._max_bytes = max_bytes

    def send(self, message: dict[str, Any]) -> None:
        """Send one frame."""
        wire.write_all(self._descriptor, wire.pack(codec.dumps(message)))

    def send_value(self, index: int, value: Any) -> None:
        """Send the answer to a call."""
        encoded = codec.dumps({"i": index, "out": codec.Encoder(self._max_bytes).encode(value)})
        if len(encoded) > self._max_bytes:
            raise codec.Unencodable("the value is too large")
        wire.write_all(self._descriptor, wire.pack(encoded))

    def send_error(self, error: BaseException, **place: int) -> None:
        """Send an exception: the name of its type and a short text, whatever it is."""
        self.send({**place, "err": name_of(error), "text": text_of(error)})


def serve(limits: dict[str, Any]) -> NoReturn:
    """Run one program from its order to its end. The parent sees the channel close."""
    # Say that the process is ready, then read the program
    answers = Answers(RESULT, limits["output_bytes"])
    answers.send({"ready": True})
    order = codec.loads(read_frame(JOB))
    answers.send({"imports": imports(order["code"], order["suspicious"])})
    # Run it: a script once, a function for each call
    try:
        if order["is_script"]:
            run_script(order["code"])
            answers.send({"i": 0, "out": None})
        else:
            function = load(order["code"], order["entry_point"])
            answers.send({"loaded": True})
            while (call := next_call()) is not None:
                answer(answers, function, call)
    except BaseException as error:  # SystemExit as well: where a program is to define a function, leaving is failing
        answers.send_error(error, **({"i": 0} if order["is_script"] else {}))
    os._exit(0)


def read_frame(descriptor: int) -> bytes:
    """Read the payload of one frame."""
    return wire.read_exactly(descriptor, int.from_bytes(wire.read_exactly(descriptor, wire.LENGTH), "big"))


def imports(code: str, suspicious: list[str]) -> list[str]:
    """Return which of these modules an import of the code names. Looks at its text only, none of it runs."""
    if not any(name in code for name in suspicious):
        return []
    try:
        tree = ast.parse(code)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return []
    found = {name.partition(".")[0] for node in ast.walk(tree) for name in imported(node)}
    return sorted(found & set(suspicious))


def imported(node: ast.AST) -> list[str]:
    """Return the modules that one node imports."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        return [node.module or ""]
    if isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
        called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        if called in ("__import__", "import_module"):
            return [str(node.args[0].value)]
    return []


def open_streams() -> None:
    """Open Python's own streams on what the descriptors are now: printing is never an error."""
    for name, descriptor, mode, errors in (
        ("stdin", STDIN, "r", "surrogateescape"),
        ("stdout", STDOUT, "w", "backslashreplace"),
        ("stderr", STDERR, "w", "backslashreplace"),
    ):
        stream = open(descriptor, mode, encoding="utf-8", errors=errors, closefd=False)  # noqa: SIM115  # stays open
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)


def module_of(name: str) -> types.ModuleType:
    """Make a module that the standard library finds by the name that classes and functions carry."""
    module = types.ModuleType(name)
    module.__file__ = sys.argv[0]
    sys.modules[name] = module
    return module


def load(code: str, entry_point: str) -> Callable[..., Any]:
    """Load the function to call. `Class.method` is the method of `Class()`."""
    module = module_of("program")
    exec(compile(code, FILE_NAME, "exec", dont_inherit=True), module.__dict__)
    # Find the entry point, instances made on the way
    name, *attributes = entry_point.split(".")
    if name not in module.__dict__:
        raise NameError(f"the program does not define {name}")
    found = module.__dict__[name]
    for attribute in attributes:
        found = getattr(found() if isinstance(found, type) else found, attribute)
    if not callable(found):
        raise TypeError(f"{entry_point} is not callable")
    return found


def run_script(code: str) -> None:
    """Run it as `python program.py` would, up to the end of its threads and what it left to do at exit."""
    # Its streams are pipes, of which what was opened on the zygote's descriptors knows nothing
    open_streams()
    module = module_of("__main__")
    with contextlib.suppress(SystemExit):
        exec(compile(code, FILE_NAME, "exec", dont_inherit=True), module.__dict__)
    # Then as at Python's own exit: threads, what was registered, output
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    flush_output()
    # Files and other objects say goodbye, the youngest first, while the functions that they may call are there
    scope = module.__dict__
    for name in reversed([name for name, value in scope.items() if not is_code(value)]):
        scope.pop(name, None)
    flush_output()


def is_code(value: Any) -> bool:
    """Return whether it is a module, a class, a function or the like."""
    return callable(value) or isinstance(value, types.ModuleType)


def flush_output() -> None:
    """Send what was printed, also where the program has put something else in place of the stream, or closed it."""
    for stream in (sys.stdout, sys.__stdout__):
        # At its exit Python itself goes on whatever this raises, and a stream of the program's own may raise anything
        with contextlib.suppress(Exception):
            stream.flush()  # type: ignore[union-attr]


def next_call() -> dict[str, Any] | None:
    """Return what is to be called with, encoded. None after the last."""
    try:
        frame = read_frame(JOB)
    except EOFError:
        return None
    return dict(codec.loads(frame))


def answer(answers: Answers, function: Callable[..., Any], call: dict[str, Any]) -> None:
    """Make one call and send its answer."""
    index = call["i"]
    try:
        arguments, keywords = codec.decode(call.pop("args")), codec.decode(call.pop("kwargs"))
        answers.send_value(index, function(*arguments, **keywords))
    except BaseException as error:
        answers.send_error(error, i=index)


def name_of(error: BaseException) -> str:
    """Return the name of its type, were it what types say of themselves or not."""
    try:
        return str.__str__(type(error).__name__)[:MAX_TEXT]
    except BaseException:
        return "Exception"


def text_of(error: BaseException) -> str:
    """Return its message on one line, and the line of the program where it was raised."""
    try:
        text = " ".join(str.__str__(str(error)).split())[:MAX_TEXT]
        line, trace = 0, error.__traceback__
        while trace is not None:
            line = trace.tb_lineno if trace.tb_frame.f_code.co_filename == FILE_NAME else line
            trace = trace.tb_next
        return f"{text} (line {line})" if line else text
    except BaseException:
        return ""
