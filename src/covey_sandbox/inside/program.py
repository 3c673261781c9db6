"""Run one program and answer calls, in the isolated process.

Nothing here is trusted: the program can change any of it, and send anything. It holds code, arguments and answers;
expected values are elsewhere. Before the program runs, suspicious imports are reported.
"""

import ast
import atexit
import builtins
import contextlib
import functools
import importlib
import os
import sys
import threading
import types
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

from covey_sandbox.inside import codec, wire
from covey_sandbox.inside.operations import OPERATIONS

STDIN, STDOUT, STDERR, JOB, RESULT = range(5)
"""All descriptors a program has."""
FILE_NAME = "<program>"
MAX_TEXT = 300
"""Characters of an error's message."""
MAX_BASES = 20
"""Classes of an exception that are told."""


class ResultChannel:
    """The result channel, unless the program changes it."""

    def __init__(self, descriptor: int, max_bytes: int) -> None:
        self._descriptor = descriptor
        self._max_bytes = max_bytes

    def send(self, message: dict[str, Any]) -> None:
        wire.write_all(self._descriptor, wire.pack(codec.dumps(message)))

    def send_value(self, index: int, value: Any, keep: Any = None, **more: Any) -> None:
        """Send the answer to a call, and more values."""
        encoder = codec.Encoder(self._max_bytes, keep=keep)
        encoded = codec.dumps(
            {"i": index, "out": encoder.encode(value), **{k: encoder.encode(v) for k, v in more.items()}}
        )
        if len(encoded) > self._max_bytes:
            raise codec.Unencodable("the value is too large")
        wire.write_all(self._descriptor, wire.pack(encoded))

    def send_error(self, error: BaseException, **place: Any) -> None:
        """Send an exception: its type's name and a short text."""
        self.send({**place, "err": name_of(error), "text": text_of(error)})


def serve(limits: dict[str, Any]) -> NoReturn:
    """Run one program from its order to its end."""
    answers = ResultChannel(RESULT, limits["output_bytes"])
    answers.send({"ready": True})
    order = codec.loads(read_frame(JOB))
    answers.send({"imports": imports(order["code"], order["suspicious"])})
    try:
        if order["is_script"]:
            run_script(order["code"])
            answers.send({"i": 0, "out": None})
        else:
            function = load(order["code"], order["entry_point"])
            answers.send({"loaded": True})
            objects = Objects(answers, function)
            while (call := next_call()) is not None:
                objects.answer(call)
    except BaseException as error:  # SystemExit as well: where a program is to define a function, leaving is failing
        answers.send_error(error, **({"i": 0} if order["is_script"] else {}))
    os._exit(0)


def read_frame(descriptor: int) -> bytes:
    return wire.read_exactly(descriptor, int.from_bytes(wire.read_exactly(descriptor, wire.LENGTH), "big"))


def imports(code: str, suspicious: list[str]) -> list[str]:
    """Return the suspicious modules that the code's text imports."""
    if not any(name in code for name in suspicious):
        return []
    try:
        tree = ast.parse(code)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return []
    found = {name.partition(".")[0] for node in ast.walk(tree) for name in imported_names(node)}
    return sorted(found & set(suspicious))


def imported_names(node: ast.AST) -> list[str]:
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
    """Open Python's streams on the current descriptors; printing never fails."""
    for name, descriptor, mode, errors in (
        ("stdin", STDIN, "r", "surrogateescape"),
        ("stdout", STDOUT, "w", "backslashreplace"),
        ("stderr", STDERR, "w", "backslashreplace"),
    ):
        stream = open(descriptor, mode, encoding="utf-8", errors=errors, closefd=False)  # noqa: SIM115  # stays open
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)


def module_of(name: str) -> types.ModuleType:
    """Make a module that the standard library finds by its name."""
    module = types.ModuleType(name)
    module.__file__ = sys.argv[0]
    sys.modules[name] = module
    return module


def load(code: str, entry_point: str) -> Callable[..., Any]:
    """Load the function to call. `Class.method` is the method of `Class()`."""
    module = module_of("program")
    exec(compile(code, FILE_NAME, "exec", dont_inherit=True), module.__dict__)
    name, *attributes = entry_point.split(".")
    found = find_definition(name)
    for attribute in attributes:
        found = getattr(found() if isinstance(found, type) else found, attribute)
    if not callable(found):
        raise TypeError(f"{entry_point} is not callable")
    return found


def run_script(code: str) -> None:
    """Run it as `python program.py` would, threads and exit handlers included."""
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
    """Return True for a module, class, function or the like."""
    return callable(value) or isinstance(value, types.ModuleType)


def flush_output() -> None:
    """Flush printed output, even of a replaced or closed stream."""
    for stream in (sys.stdout, sys.__stdout__):
        # At its exit Python itself goes on whatever this raises, and a stream of the program's own may raise anything
        with contextlib.suppress(Exception):
            stream.flush()  # type: ignore[union-attr]


def next_call() -> dict[str, Any] | None:
    """Return the next call's encoded arguments, None after the last."""
    try:
        frame = read_frame(JOB)
    except EOFError:
        return None
    return dict(codec.loads(frame))


class Objects:
    """The objects that test code may name."""

    def __init__(self, answers: ResultChannel, function: Callable[..., Any]) -> None:
        self._answers = answers
        self._function = function
        self._kept: list[Any] = []
        self._places: dict[int, int] = {}

    def answer(self, call: dict[str, Any]) -> None:
        """Carry out a request, and answer; without `do`, call the function."""
        index = call["i"]
        try:
            arguments = codec.decode(call.pop("args"), refer=self._resolve)
            keywords = codec.decode(call.pop("kwargs"), refer=self._resolve)
            if "do" not in call:
                self._answers.send_value(index, self._function(*arguments, **keywords))
                return
            value = OPERATIONS[call["do"]](*arguments, **keywords)
            if call["do"] == "make":
                self._answers.send({"i": index, "out": self._keep(value)})
            else:
                back = {"back": [arguments[1:], keywords]} if call["is_back"] else {}
                self._answers.send_value(index, value, self._keep, **back)
        except BaseException as error:
            more = {"more": self._told_of(error)} if "do" in call else {}
            self._answers.send_error(error, i=index, **more)

    def _keep(self, value: Any) -> Any:
        """Encode an object by its place, None for finite iterators."""
        kind = type(value)
        if (
            issubclass(kind, Iterator)
            and kind.__module__ in ("builtins", "itertools")
            and kind is not types.GeneratorType
        ):
            return None
        if id(value) not in self._places:
            self._places[id(value)] = len(self._kept)
            self._kept.append(value)
        return {"o": self._places[id(value)]}

    def _told_of(self, error: BaseException) -> dict[str, Any]:
        """Describe an exception: kinds, arguments and text."""
        bases = [str.__str__(kind.__name__)[:MAX_TEXT] for kind in type(error).__mro__[:MAX_BASES]]
        try:
            arguments = codec.Encoder(1 << 16, is_strict=True).encode(list(error.args))
        except Exception:
            arguments = None
        return {"bases": bases, "args": arguments, "text": text_of(error, is_placed=False), **self._keep(error)}

    def _resolve(self, tag: str, content: Any) -> Any:
        if tag == "g":
            module, name = content
            return functools.reduce(getattr, name.split("."), importlib.import_module(module))
        if tag == "h":
            return self._function_of_test(*content)
        if tag == "x":
            return self._make_object(content)
        if type(content) is int:
            return self._kept[content]
        return self._function if content == "" else find_definition(content)

    def _make_object(self, described: list[Any]) -> Any:
        """Make an object of the program's class from its description."""
        made = [find_definition(name).__new__(find_definition(name)) for name, _ in described]

        def refer(tag: str, content: Any) -> Any:
            return made[content] if tag == "x" else self._resolve(tag, content)

        for one, (_, attributes) in zip(made, described, strict=True):
            vars(one).update(codec.decode(attributes, refer=refer))
        return made[0]

    def _function_of_test(self, number: int, name: str) -> Callable[..., Any]:
        def function(*arguments: Any, **keywords: Any) -> Any:
            return self._ask(number, *arguments, **keywords)

        function.__name__ = function.__qualname__ = name
        return function

    def _ask(self, number: int, /, *arguments: Any, **keywords: Any) -> Any:
        """Call a test's function, which may call back."""
        encoder = codec.Encoder(1 << 20, keep=self._keep)
        self._answers.send({"ask": number, "args": encoder.encode(arguments), "kwargs": encoder.encode(keywords)})
        while (frame := next_call()) is not None:
            if "told" in frame:
                return codec.decode(frame["told"], refer=self._resolve)
            if "err" in frame:
                raise vars(builtins).get(frame["err"], RuntimeError)(frame["text"])
            self.answer(frame)
        raise EOFError


def find_definition(name: str) -> Any:
    module = sys.modules["program"]
    if name not in module.__dict__:
        raise NameError(f"the program does not define {name}")
    return module.__dict__[name]


def name_of(error: BaseException) -> str:
    """Return the name of an exception's type, unforged."""
    try:
        return str.__str__(type(error).__name__)[:MAX_TEXT]
    except BaseException:
        return "Exception"


def text_of(error: BaseException, is_placed: bool = True) -> str:
    """Return an exception's message on one line, with the program's line."""
    try:
        text = " ".join(str.__str__(str(error)).split())[:MAX_TEXT]
        line, trace = 0, error.__traceback__
        while trace is not None:
            line = trace.tb_lineno if trace.tb_frame.f_code.co_filename == FILE_NAME else line
            trace = trace.tb_next
        return f"{text} (line {line})" if line and is_placed else text
    except BaseException:
        return ""
