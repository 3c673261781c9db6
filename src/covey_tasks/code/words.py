"""The words of programming problems, all that a policy reads.

Whoever asks for a program says what the function is called, what it takes, one example and where the answer goes; a
model that has to guess the name writes good programs that no test can call.
"""

import ast
from collections.abc import Mapping, Sequence
from typing import Any

from covey_sandbox.types import CallTest

TASK = "{task}\n\n{called}{examples}\n\nAnswer with the program alone in a ```python block."
SIGNATURE = "The function's signature is `{signature}`."
NAME = "Name the {kind} `{name}`."
ALSO = "Define {names} as well."
BEGIN = "Begin with this:\n\n```python\n{starter}\n```"
SCRIPT = "The program reads its input from standard input and prints its answer to standard output."
EXAMPLES = "\n\nFor example:\n{lines}"
COMPLETION = (
    "Complete this Python function. Answer with the whole function alone in a ```python block.\n\n"
    "```python\n{opening}\n```"
)
KINDS = {False: "function", True: "class"}
MADE_UP = "Write a Python function. {told}."


def asked(task: str, called: str, examples: Sequence[str] = ()) -> str:
    shown = EXAMPLES.format(lines="\n".join(examples)) if examples else ""
    return TASK.format(task=task.strip(), called=called, examples=shown)


def to_define(name: str, signature: str | None, starter: str = "", is_class: Mapping[str, bool] | None = None) -> str:
    """Return the signature to define, or the name if unknown (None).

    is_class: of each name that tests use, whether it is that of a class.
    """
    kinds = is_class or {}
    called = (
        SIGNATURE.format(signature=signature)
        if signature
        else NAME.format(kind=KINDS[kinds.get(name, False)], name=name)
    )
    others = [other for other in kinds if other not in (name, name.partition(".")[0])]
    return " ".join(
        [
            BEGIN.format(starter=starter.strip("\n")) if starter.strip() else called,
            *([ALSO.format(names=", ".join(f"`{other}`" for other in others))] if others else []),
        ]
    )


def to_script(task: str, starter: str = "") -> str:
    begin = [BEGIN.format(starter=starter.strip("\n"))] if starter.strip() else []
    return asked(task, "\n\n".join([SCRIPT, *begin]))


def to_complete(opening: str) -> str:
    return COMPLETION.format(opening=opening.strip())


def shown_call(name: str, test: CallTest) -> str:
    given = [*map(repr, test.args), *(f"{key}={value!r}" for key, value in test.kwargs.items())]
    return f"{name}({', '.join(given)}) returns {test.expected!r}"


def signature_of(solution: str | None, name: str, calls: Sequence[CallTest] = ()) -> str | None:
    """Return a function's first line without colon, None if undefined.

    Types that the program does not tell are those of the values in `calls`.

    >>> signature_of("def f(n): return n + 7", "f", [CallTest((3,), expected=10)])
    'def f(n: int) -> int'
    """
    try:
        found = [node for node in ast.parse(solution or "").body if isinstance(node, ast.FunctionDef)]
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    function = next((node for node in reversed(found) if node.name == name), None)
    if function is None:
        return None
    taken, returned = function.args, function.returns
    for place, parameter in enumerate(taken.args):
        values = [call.args[place] for call in calls if place < len(call.args)]
        parameter.annotation = parameter.annotation or _parse(hint(values))
    returned = returned or _parse(hint([call.expected for call in calls]))
    return f"def {name}({ast.unparse(taken)})" + (f" -> {ast.unparse(returned)}" if returned else "")


def hint(values: Sequence[Any]) -> str:
    """Write the values' type as an annotation, such as `list[int | str]`."""
    if values and all(isinstance(value, list) for value in values):
        inner = hint([item for value in values for item in value])
        return f"list[{inner}]" if inner else "list"
    return " | ".join(sorted({"None" if value is None else type(value).__name__ for value in values}))


def _parse(annotation: str) -> ast.expr | None:
    return ast.parse(annotation, mode="eval").body if annotation else None
