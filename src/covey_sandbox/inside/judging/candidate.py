"""The program as a test sees it: calls return values, objects or exceptions."""

import builtins
import sys
import threading
import time
import types
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

from covey_sandbox.inside import codec, wire
from covey_sandbox.inside.case import LoadFailed, ProgramCase, answer_of, decode_value
from covey_sandbox.inside.host import Ended, TimedOut, Unjudged, Violation
from covey_sandbox.inside.judging.in_place import write_back
from covey_sandbox.inside.judging.remote import Instance, Named, ProgramError, Remote, named_class
from covey_sandbox.inside.judging.shown import MAX_CHARACTERS, short_repr, shown_call
from covey_sandbox.inside.link import Verdict, failed_verdict

CANDIDATE = "candidate"
TEST_NAME, SETUP_NAME, TEST_MODULE = "<test>", "<setup>", "test"
"""Files that test code is compiled as, and the module that its classes are of."""
_CHANGING = (list, dict, set, str, deque)
"""Kinds whose bound methods a test may give to the program."""


class GivenUp(BaseException):
    """The test has its verdict: a call hung or ended its process.

    No `except` of a test may catch it.
    """


class Candidate:
    """The program as one test sees it."""

    def __init__(self, case: ProgramCase, num_left: int) -> None:
        self._case = case
        self._num_left = num_left
        self._began = time.monotonic()
        self._deadline: float | None = None
        """There is one from the first call on."""
        self._turn = threading.RLock()
        """Threads of a test take turns: there is one program."""
        self.is_uncalled = True
        """Nothing was asked of the program, so that it is not to blame for anything."""
        self._has_answered = self._is_in_place = False
        self._classes: dict[str, Named] = {}
        self._objects: dict[tuple[int, bool], Remote] = {}
        self._given: list[Callable[..., Any]] = []
        """Functions of the test that the program may call."""
        self.verdict: Verdict | None = None
        """Verdict on a call that gave no answer, or one that the test cannot use."""
        self.fault: Exception | None = None
        """Reason why the program passes no test, or gets no verdict. Kept here: tests may catch what they like."""
        self.last = ""
        """The last call and its result."""

    def names_for(self, test: dict[str, Any]) -> dict[str, Any]:
        """Return the program's names that a test uses."""
        self._classes = {name: named_class(self, name) for name in test["classes"]}
        entry_point = self._case.entry_point
        function = self._classes.get(entry_point, Remote(self, "", entry_point))
        others = [name for name in test["names"] if name not in self._classes]
        found = {name: self._find_definition(name) for name in others}
        self.is_uncalled = all(isinstance(value, Remote) for value in found.values())
        return {**self._classes, **found, entry_point: function, CANDIDATE: function}

    def _find_definition(self, name: str) -> Any:
        """Return the program's definition of a name, or fail the test."""
        try:
            return self.ask("value", Remote(self, name, name))
        except Exception:
            self.verdict = failed_verdict("load", f"the program does not define {name}")
            raise GivenUp from None

    def in_place(self, function: Any, /, *arguments: Any, **keywords: Any) -> Any:
        """Call a function that may change its arguments if it is the program's."""
        self._is_in_place = isinstance(function, Remote | Named)
        return function(*arguments, **keywords)

    def refuse(self, why: str) -> BaseException:
        """Fail the test for an unsupported use of an answer."""
        self.verdict = self.verdict or failed_verdict("wrong", f"{self.last}: {why}")
        return GivenUp()

    def ask(self, operation: str, /, *operands: Any, **keywords: Any) -> Any:
        """Return the program's answer, or raise its exception by name."""
        with self._turn:
            text = text_of_call(operation, operands, keywords)
            if self.verdict is not None or self.fault is not None:
                raise GivenUp
            order = {"do": operation, "is_back": self._is_in_place and operation == "call"}
            self._is_in_place = False
            # Turn every way a call can end into a verdict, a fault or a value
            try:
                return self._answer(order, operands, keywords, text)
            except TimedOut:
                self.verdict = failed_verdict("timeout", f"{text} took too long")
            except Ended:
                self.verdict = failed_verdict("crash", f"{text} ended its process")
            except (Violation, Unjudged) as error:
                self.fault = error
            except LoadFailed as error:
                self.verdict = failed_verdict("load", str(error))
            except codec.Unencodable as error:
                self._refuse_arguments(f"a test passes on what a program cannot be given: {text}: {error}")
            except Raised as error:
                raise error.found from None
            except Exception as error:
                self.verdict = failed_verdict("error", f"{text} cannot be judged: {type(error).__name__}")
            raise GivenUp

    def _answer(self, order: dict[str, Any], operands: Any, keywords: dict[str, Any], text: str) -> Any:
        refer = partial(self._object, order["do"] == "make", text)
        frame, index = self._exchange(order, operands, keywords)
        has_value, value = answer_of(frame, index, refer)
        self._has_answered = True
        self.last = f"{text} returned {short_repr(value)}" if has_value else f"{text} raised {value}"
        if not has_value:
            raise Raised(self._error(frame, value))
        if order["is_back"] and "back" in frame:
            back = decode_value(frame["back"], refer)
            if type(back) is not list or [*map(type, back)] != [list, dict]:
                raise Violation("arguments of unknown shape")
            write_back(list(operands[1:]), back[0])
            write_back(keywords, back[1])
        return value

    def _object(self, is_made: bool, text: str, tag: str, content: Any) -> Remote:
        """Return the program's object of this number, always the same one."""
        if tag != "o" or type(content) is not int or content < 0:
            raise ValueError("no object")
        kind = Instance if is_made else Remote
        path = text if len(text) < MAX_CHARACTERS else f"{text[:MAX_CHARACTERS]}..."
        return self._objects.setdefault((content, is_made), kind(self, content, path))

    def _exchange(self, order: dict[str, Any], operands: Any, keywords: dict[str, Any]) -> tuple[dict[str, Any], int]:
        program = self._case.program
        assert program is not None
        # Encode strictly: what a program cannot be given must not pass a test
        index = program.num_calls
        order |= {"i": index, "args": self._encode(list(operands)), "kwargs": self._encode(keywords)}
        # Time of the test before its first call is the judge's, not the program's
        if self._deadline is None:
            self._case.excuse(time.monotonic() - self._began)
            self._deadline = self._case.expect(self._num_left)
        self.is_uncalled = self.is_uncalled and order["do"] == "value"
        program.send(wire.pack(codec.dumps(order)))
        program.num_calls += 1
        while "ask" in (frame := program.receive(self._deadline)):
            program.send(wire.pack(codec.dumps(self._answer_call(frame))))
        return frame, index

    def _answer_call(self, frame: dict[str, Any]) -> dict[str, Any]:
        """Return the answer of a test's function that the program has called."""
        refer = partial(self._object, False, "what the test's function was given")
        if set(frame) != {"ask", "args", "kwargs"} or frame["ask"] not in range(len(self._given)):
            raise Violation("a call of a function that it was not given")
        arguments, keywords = decode_value(frame["args"], refer), decode_value(frame["kwargs"], refer)
        if type(arguments) is not tuple or type(keywords) is not dict or {*map(type, keywords)} > {str}:
            raise Violation("arguments of unknown shape")
        try:
            return {"told": self._encode(self._given[frame["ask"]](*arguments, **keywords))}
        except codec.Unencodable:
            raise
        except Exception as error:
            return {"err": type(error).__name__, "text": f"{error}"[:MAX_CHARACTERS]}

    def _encode(self, value: Any) -> Any:
        return codec.Encoder(self._case.limits["output_bytes"], is_strict=True, keep=self._reference).encode(value)

    def _reference(self, value: Any) -> Any:
        """Return the program's reference to an object or function, else None."""
        if isinstance(value, Remote | Named):
            return {"o": value._reference}
        code = value.__code__ if isinstance(value, types.FunctionType | types.MethodType) else None
        is_bound = isinstance(value, types.BuiltinMethodType) and type(value.__self__) in _CHANGING
        if is_bound or (code is not None and code.co_filename in (TEST_NAME, SETUP_NAME)):
            self._given.append(value)
            return {"h": [len(self._given) - 1, value.__name__]}
        if type(value).__module__ == TEST_MODULE and not isinstance(value, type):
            return {"x": self._describe(value)}
        is_shared = isinstance(
            value, type | types.BuiltinFunctionType | types.FunctionType | types.MethodDescriptorType
        )
        module = (
            (value.__objclass__ if isinstance(value, types.MethodDescriptorType) else value).__module__
            if is_shared
            else ""
        )
        return {"g": [module, value.__qualname__]} if module in sys.stdlib_module_names else None

    def _describe(self, made: Any) -> list[Any]:
        """Describe an object of a shared class, and those it leads to."""
        places, found, described = {id(made): 0}, [made], []

        def reference(value: Any) -> Any:
            if type(value).__module__ != TEST_MODULE or isinstance(value, type):
                return self._reference(value)
            if id(value) not in places:
                places[id(value)] = len(found)
                found.append(value)
            return {"x": places[id(value)]}

        encoder = codec.Encoder(self._case.limits["output_bytes"], is_strict=True, keep=reference)
        for one in found:  # which grows meanwhile
            described.append([type(one).__name__, encoder.encode(vars(one))])
        return described

    def _refuse_arguments(self, why: str) -> None:
        """Blame the program if answers may be in the arguments, else the test."""
        if self._has_answered:
            self.verdict = failed_verdict("error", why)
        else:
            self.fault = Unjudged(why)

    def _error(self, frame: dict[str, Any], told: str) -> Exception:
        """Return an exception of the program's kinds, as far as known here."""
        more = frame.get("more", {"bases": [], "args": None, "text": told})
        if type(more) is not dict:
            raise Violation("an exception of unknown shape")
        bases, text = more.get("bases"), more.get("text")
        if type(bases) is not list or {*map(type, bases)} > {str} or type(text) is not str:
            raise Violation("an exception of unknown shape")
        given = decode_value(more.get("args"), None)
        named = [self._classes[name] for name in bases if name in self._classes]
        about = self._object(False, f"{self.last}, which", "o", more["o"]) if type(more.get("o")) is int else None
        return exception_of(frame["err"][:100], named, bases, given if type(given) is list else [text], (text, about))


class Raised(Exception):
    def __init__(self, found: Exception) -> None:
        super().__init__()
        self.found = found


def exception_of(
    name: str, named: list[Named], bases: list[str], arguments: list[Any], told: tuple[str, Any]
) -> Exception:
    """Return a built-in exception, else one of a class of that name.

    Never one that ends processes or loops.
    """
    plain = next((found for base in bases if (found := builtin_error(base)) is not None), None)
    text, about = told
    try:
        if plain is not None and not named and plain.__name__ == name:
            return plain(*arguments)
        own_kinds: list[type] = [*named] or [ProgramError]
        kinds = (*own_kinds, *([plain] if plain not in (None, Exception) else []))
        own = {"__str__": lambda self: text, "__module__": "program"}
        if about is not None:
            own["__getattr__"] = lambda self, asked: getattr(about, asked)
        make: Any = type(kinds[0])
        made = make(name, kinds, own)
        error: Exception = made.__new__(made, *arguments)
        error.args = tuple(arguments)
        return error
    except TypeError:  # UnicodeDecodeError wants more than a message
        return ProgramError(text)


def builtin_error(name: str) -> type[Exception] | None:
    """Return the built-in exception of that name that tests may meet."""
    found = builtins.__dict__.get(name)
    is_plain = isinstance(found, type) and issubclass(found, Exception) and not issubclass(found, StopIteration)
    return found if is_plain else None


def text_of_call(operation: str, operands: tuple[Any, ...], keywords: dict[str, Any]) -> str:
    """Return a call as a test would write it, cut short."""
    first, *others = operands
    if isinstance(first, Remote):
        path = first._path
    else:
        path = first.__name__ if isinstance(first, Named) else short_repr(first)
    if operation in ("call", "make"):
        return shown_call(path, others, keywords)
    return f"{path}.{others[0]}" if operation == "getattr" else f"{operation} of {shown_call(path, others, {})}"
