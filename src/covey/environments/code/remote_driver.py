"""Runs one program on somebody else's machine and prints its answers, one JSON object a line. It is sent as text.

Nothing it prints is trusted: the program can change any of it, and say anything. It is given code and arguments; what
the answers should be stays where it was sent from. Standard library only.
"""

import faulthandler
import json
import os
import sys
import types
from collections.abc import Callable, Mapping
from typing import Any

MAX_TEXT = 300
"""Characters of an error's message."""


def main(order: Mapping[str, Any]) -> None:
    """Load the program, make the calls of the order, print what came of each, leave."""
    channel = os.dup(1)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)  # what the program prints is no answer
    codec = _module("codec", order["codec"])

    def say(message: Mapping[str, Any]) -> None:
        line = codec.dumps(message) + b"\n"
        while line:
            line = line[os.write(channel, line) :]

    _within(order["wall_seconds"])
    try:
        function = _load(order["code"], order["entry_point"])
    except BaseException as error:
        say({"err": type(error).__name__, "text": _text(error)})
        os._exit(0)
    say({"loaded": True})
    # Answer one call after the other, each within its own time
    for call in order["calls"]:
        _within(order["wall_seconds"])
        try:
            say(_answered(codec, function, call, order["max_bytes"]))
        except BaseException as error:
            say({"i": call["i"], "err": type(error).__name__, "text": _text(error)})
    os._exit(0)


def _within(seconds: float) -> None:
    """End the process where that time passes before the next call of this. A thread in C sees to it."""
    faulthandler.dump_traceback_later(seconds, exit=True, file=2)


def _module(name: str, source: str) -> Any:
    module = types.ModuleType(name)
    sys.modules[name] = module
    exec(compile(source, f"<{name}>", "exec"), module.__dict__)
    return module


def _load(code: str, entry_point: str) -> Callable[..., Any]:
    """Load the function to call. `Class.method` is the method of `Class()`."""
    found: Any = _module("program", code)
    for attribute in entry_point.split("."):
        found = getattr(found() if isinstance(found, type) else found, attribute)
    if not callable(found):
        raise TypeError(f"{entry_point} is not callable")
    return found


def _answered(codec: Any, function: Callable[..., Any], call: Mapping[str, Any], max_bytes: int) -> dict[str, Any]:
    value = function(*codec.decode(call["args"]), **codec.decode(call["kwargs"]))
    return {"i": call["i"], "out": codec.Encoder(max_bytes).encode(value)}


def _text(error: BaseException) -> str:
    try:
        return " ".join(str.__str__(str(error)).split())[:MAX_TEXT]
    except BaseException:
        return ""


if __name__ == "__main__":
    main(json.loads(ORDER))  # type: ignore[name-defined]  # noqa: F821  # the line before this text defines it
