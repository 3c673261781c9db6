"""The style of a chat template's tool calls, found by rendering one.

Any call has the text of a known one around its name and arguments.
"""

import ast
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

TOOL, FIRST, SECOND, WORDS, NUMBER = "probe_tool", "first_key", "second_key", "two words", 7
"""The call that is rendered, its arguments and their values."""
ARGUMENTS = {FIRST: WORDS, SECOND: NUMBER}
ONE_TWO_NONE: Sequence[Sequence[Mapping[str, Any]]] = ([ARGUMENTS], [ARGUMENTS] * 2, [{}])
PROPERTIES = {FIRST: {"type": "string", "description": "One."}, SECOND: {"type": "integer", "description": "Two."}}
SCHEMA: Mapping[str, Any] = {
    "type": "function",
    "function": {
        "name": TOOL,
        "description": "Try it.",
        "parameters": {"type": "object", "properties": PROPERTIES, "required": [FIRST, SECOND]},
    },
}
NAME = re.compile(r"\s*([\w.-]*\w)")
BLANKS = re.compile(r"\s*")
HALF_A_TAG = re.compile(r"(?:[^\w<\[({]*(?=[<\[({])|\s+\Z)?")
"""Remainder of the previous tag where two texts end alike."""
FAR = 200
"""Characters between a name and its arguments."""
VALUES = {"true": True, "false": False, "null": None}
MAX_LITERAL = 10_000
"""Characters of a value that is no JSON, and read as Python's."""
PIECE = re.compile(r"""'(?:[^'\\]|\\.)*(?:'|\Z)|"(?:[^"\\]|\\.)*(?:"|\Z)|[()\[\]{}]""", re.DOTALL)
"""A string or a bracket of Python. An unclosed string is scanned once, not from each quote."""

Schemas = Sequence[Mapping[str, Any]]


class CallBody(Protocol):
    """The form of a call, without its surroundings."""

    @property
    def begins(self) -> str:
        """Return a pattern that tells a call from an answer."""

    @property
    def form(self) -> str: ...

    def __call__(self, text: str, place: int, schemas: Schemas) -> tuple[Any, int]:
        """Return the call at a place and its end. ValueError without one."""


@dataclass(frozen=True, slots=True)
class InObject:
    """A JSON object with the name and the arguments."""

    name: str = "name"
    arguments: str = "arguments"
    form: ClassVar[str] = "JSON"

    @property
    def begins(self) -> str:
        return rf'\{{(?=[^{{}}]{{0,{FAR}}}"{re.escape(self.name)}"\s*:)(?=[\s\S]*"{re.escape(self.arguments)}")'

    def __call__(self, text: str, place: int, schemas: Schemas) -> tuple[Any, int]:
        found, end = json.JSONDecoder().raw_decode(text, BLANKS.match(text, place).end())  # type: ignore[union-attr]
        if isinstance(found, Mapping) and self.name in found:
            arguments = found.get(self.arguments, found.get("parameters", {}))
            found = {"name": found[self.name], "arguments": arguments}
        return found, end


@dataclass(frozen=True, slots=True)
class BeforeObject:
    """A name followed by a JSON object of arguments."""

    form: ClassVar[str] = "a name and JSON"
    begins: ClassVar[str] = r"[\w.-]+[^{]{0,200}\{"

    def __call__(self, text: str, place: int, schemas: Schemas) -> tuple[Any, int]:
        name, behind = _name_at(text, place)
        begin = text.find("{", behind, behind + FAR)
        if begin < 0:
            raise ValueError("no arguments follow the name")
        found, end = json.JSONDecoder().raw_decode(text, begin)
        return {"name": name, "arguments": found}, end


@dataclass(frozen=True, slots=True)
class InPython:
    """A call in Python's form, `name(key='text')`."""

    form: ClassVar[str] = "Python"
    begins: ClassVar[str] = r"[\w.-]+\("

    def __call__(self, text: str, place: int, schemas: Schemas) -> tuple[Any, int]:
        name, behind = _name_at(text, place)
        depth = 0
        for piece in PIECE.finditer(text, behind):
            depth += {"(": 1, "[": 1, "{": 1, ")": -1, "]": -1, "}": -1}.get(piece[0], 0)
            if depth <= 0 or depth > FAR or not text.startswith("(", behind):
                break
        else:
            raise ValueError("the brackets are not closed")
        try:
            made = ast.parse(f"f{text[behind : piece.end()]}", mode="eval").body
            assert isinstance(made, ast.Call), "it begins with a bracket"
            assert not made.args, "keywords alone"
            given = {str(keyword.arg): _literal(keyword.value) for keyword in made.keywords}
            return {"name": name, "arguments": given}, piece.end()
        except (AssertionError, SyntaxError, TypeError, MemoryError) as error:
            raise ValueError("the arguments must be written as in f(key='text')") from error


@dataclass(frozen=True, slots=True)
class InTags:
    """A name with marked arguments: patterns, and the quote of texts."""

    opens: str
    equals: str
    parts: str
    closes: str
    empty: str
    quote: str
    end: str
    """The last words of a call, without blanks."""
    form: ClassVar[str] = "a tag for each argument"
    begins: ClassVar[str] = r"[\w.-]+"

    def __call__(self, text: str, place: int, schemas: Schemas) -> tuple[Any, int]:
        name, place = _name_at(text, place)
        if self.empty and (end := re.compile(self.empty).match(text, place)):
            return {"name": name, "arguments": {}}, end.end()
        mark = re.compile(self.opens).match(text, place) if text.find(self.end, place) >= 0 else None
        stops, kinds, arguments = re.compile(f"({self.closes})|{self.parts}"), _kinds(schemas, name), {}
        while mark and (equals := re.compile(f"{NAME.pattern}{self.equals}").match(text, mark.end())):
            key, begin = equals[1], equals.end()
            if self.quote and text.startswith(self.quote, begin):
                end_of_text = text.find(self.quote, begin + len(self.quote))
                mark = stops.match(text, end_of_text + len(self.quote)) if end_of_text >= 0 else None
                arguments[key] = text[begin + len(self.quote) : end_of_text]
            elif mark := stops.search(text, begin):
                arguments[key] = _typed(text[begin : mark.start()], kinds.get(key))
                if self.quote and isinstance(arguments[key], str):
                    raise ValueError(f"{key[:40]} has no value that can be read")
            if mark and mark[1] is not None:
                return {"name": name, "arguments": arguments}, mark.end()
        raise ValueError("an argument has another form, or is not closed")


@dataclass(frozen=True, slots=True)
class Style:
    """The style of calls, by default that of Hermes and Qwen."""

    opening: str = "<tool_call>"
    """Text before a call. One without words in it begins the answer."""
    closing: str = "</tool_call>"
    body: CallBody = InObject()
    between: str | None = None
    """Separator of calls behind one opening; None where each has its own."""


def styles(one: str, two: str, none: str) -> Iterator[Style]:
    """Yield possible styles from turns with one, two and empty calls."""
    for body in _bodies(one, two, none):
        for begin, _ in _places(one, body):
            before = one[:begin].rpartition("</think>")[2]
            several = list(_places(two, body))
            parting = two[several[0][1] : several[1][0]] if len(several) > 1 else ""
            shared = _shared(before[::-1], parting[::-1])[::-1]
            shared = shared[len(HALF_A_TAG.match(shared)[0]) :]  # type: ignore[index] # matches always
            if shared:
                yield Style(shared.strip(), parting.removesuffix(shared).strip(), body)
            else:
                yield Style(before.strip(), "", body, parting.strip())


def turns(tokenizer: Any) -> list[str]:
    """Render turns of one, two and empty calls, "" on failure."""
    return [turn_of(tokenizer, SCHEMA, calls) for calls in ONE_TWO_NONE]


def turn_of(tokenizer: Any, schema: Mapping[str, Any], calls: Sequence[Mapping[str, Any]]) -> str:
    """Return the assistant's turn with calls of a tool, "" on failure."""
    user, name = {"role": "user", "content": "?"}, schema["function"]["name"]
    for written in (dict, json.dumps):
        functions = [{"name": name, "arguments": written(arguments)} for arguments in calls]
        made = [{"id": f"call0000{n}", "type": "function", "function": f} for n, f in enumerate(functions)]
        said = [user, {"role": "assistant", "content": "", "tool_calls": made}]
        with suppress(Exception):  # foreign code
            how = {"tools": [dict(schema)], "tokenize": False}
            asked = tokenizer.apply_chat_template([user], add_generation_prompt=True, **how)
            whole = tokenizer.apply_chat_template(said, **how)
            turn = str(whole).removeprefix(_shared(asked, whole))
            return turn if name in turn else ""
    return ""


def _bodies(one: str, two: str, none: str) -> Iterator[CallBody]:
    for brace in re.finditer(r"\{", one):
        with suppress(ValueError):
            found, _ = json.JSONDecoder().raw_decode(one, brace.start())
            name = next((key for key, value in found.items() if value == TOOL), None)
            given = next((key for key, value in found.items() if value in (ARGUMENTS, json.dumps(ARGUMENTS))), None)
            if name is not None and given is not None:
                yield InObject(name, given)
    yield BeforeObject()
    yield InPython()
    marks = rf"(?P<opens>.*?){FIRST}(?P<equals>.*?){WORDS}(?P<parts>.*?){SECOND}(?P<is>.*?){NUMBER}(?P<closes>.*)"
    if found := re.search(rf"{TOOL}(?!.*{TOOL}.*{FIRST}){marks}", one, re.DOTALL):
        quote = found["equals"].removeprefix(found["is"])
        quote = "" if quote == found["equals"] else quote
        behind = re.search(rf"{WORDS}.*?{SECOND}.*?{NUMBER}(.*)", two, re.DOTALL)
        closes = _shared(found["closes"], behind[1]) if behind else found["closes"]
        closes = closes[: max(map(closes.rfind, ">])}")) + 1]
        rest = none.rpartition(TOOL)[2]
        last = (closes.split() or [""])[-1]
        empty = rest[: rest.find(last) + len(last)] if last and last in rest else ""
        parts = found["parts"].removeprefix(quote)
        if closes and parts:
            opens, equals, parts, closes, empty = map(pattern, (found["opens"], found["is"], parts, closes, empty))
            yield InTags(opens, equals, parts, closes, empty, quote, last)


def _places(text: str, body: CallBody) -> Iterator[tuple[int, int]]:
    end = 0
    for begin in (found.start() for found in re.finditer(rf"\{{|{TOOL}", text)):
        with suppress(ValueError, RecursionError):
            found, behind = body(text, begin, [SCHEMA]) if begin >= end else (None, end)
            given = found["arguments"] if isinstance(found, Mapping) and found.get("name") == TOOL else None
            if given in (ARGUMENTS, json.dumps(ARGUMENTS)):
                yield begin, (end := behind)


def pattern(literal: str) -> str:
    """Return a pattern for a text with any blanks."""
    inner = r"\s*".join(map(re.escape, literal.split()))
    if not inner:
        return re.escape(literal)
    before, _, after = literal.partition(literal.strip())
    return f"(?:{re.escape(before)})?{inner}(?:{re.escape(after)})?"


def _shared(text: str, other: str) -> str:
    return text[
        : next((i for i, (a, b) in enumerate(zip(text, other, strict=False)) if a != b), min(len(text), len(other)))
    ]


def _name_at(text: str, place: int) -> tuple[str, int]:
    found = NAME.match(text, place)
    if found is None:
        raise ValueError("it names no tool")
    return found[1], found.end()


def _kinds(schemas: Schemas, name: str) -> dict[str, Any]:
    functions = [schema.get("function", schema) for schema in schemas]
    properties: Mapping[str, Any] = next(
        (f.get("parameters", {}).get("properties", {}) for f in functions if f.get("name") == name), {}
    )
    return {key: value.get("type") for key, value in properties.items() if isinstance(value, Mapping)}


def _typed(said: str, kind: Any) -> Any:
    """Return text for a text schema, else the parsed JSON."""
    if kind == "string" or (isinstance(kind, list) and "string" in kind):
        return said
    with suppress(ValueError, RecursionError):
        return json.loads(said)
    with suppress(ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
        return _literal(ast.parse(said[:MAX_LITERAL].strip(), mode="eval").body)
    return said


class _OfJson(ast.NodeTransformer):
    def visit_Name(self, node: ast.Name) -> ast.AST:
        return ast.Constant(VALUES[node.id]) if node.id in VALUES else node


def _literal(node: ast.expr) -> Any:
    """Return the value of a Python literal with JSON's names. ValueError, TypeError."""
    return json.loads(json.dumps(ast.literal_eval(_OfJson().visit(node))))
