"""Which calls of a test are to change their arguments, found in its text: everywhere else arguments are copies.

A program must not gain by changing what the test goes on to compare its answer with: `assert f(x) == sorted(x)`. So
only a call that stands for itself (`reverse(x)`) gives its changes back, and one whose argument the test compares as
it stands with a value that is written out (`k = f(x)`, then `assert x[:2] == [1, 2]`).
"""

import ast
from typing import Any

IN_PLACE = "__in_place__"
"""The name that marked calls go through."""
_EQUALITIES = ("assertEqual", "assertListEqual", "assertDictEqual", "assertSetEqual", "assertCountEqual")


def marked(tree: ast.Module) -> ast.Module:
    """Return test code in which such calls are marked."""
    looked_at = {name for node in ast.walk(tree) for name in _compared(node)}
    alone = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for call in [node for node in ast.walk(tree) if isinstance(node, ast.Call)]:
        if id(call) in alone or not looked_at.isdisjoint(_bare(call.args)):
            call.args.insert(0, call.func)
            call.func = ast.Name(IN_PLACE, ast.Load())
    return ast.fix_missing_locations(tree)


def _compared(node: ast.AST) -> set[str]:
    """Return the names that a comparison with a value that is written out looks at."""
    sides: list[ast.expr] = []
    if isinstance(node, ast.Compare) and len(node.comparators) == 1:
        sides = [node.left, *node.comparators]
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in _EQUALITIES:
        sides = node.args[:2]
    has_literal = any(not any(isinstance(inner, ast.Name | ast.Call) for inner in ast.walk(side)) for side in sides)
    return _bare(sides) if has_literal else set()


def _bare(sides: list[ast.expr]) -> set[str]:
    """Return which of them are a name, or a part of what it names."""
    found = [side.value if isinstance(side, ast.Subscript) else side for side in sides]
    return {side.id for side in found if isinstance(side, ast.Name)}


def write_back(old: Any, new: Any) -> Any:
    """Return `old` with the content of `new`, where it is of a kind that can change, else `new`."""
    if type(old) is not type(new):
        return new
    if isinstance(old, list | tuple):
        items = [write_back(*pair) for pair in zip(old, new, strict=False)] + list(new[len(old) :])
        if isinstance(old, tuple):
            return tuple(items)
        old[:] = items
    elif isinstance(old, dict):
        pairs = {key: write_back(old[key], value) if key in old else value for key, value in new.items()}
        old.clear()
        old.update(pairs)
    elif isinstance(old, set):
        old.clear()
        old.update(new)
    elif isinstance(old, bytearray):
        old[:] = new
    else:
        return new
    return old
