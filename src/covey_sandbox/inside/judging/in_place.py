"""Find the calls of a test that may change their arguments.

A program must not gain by changing the test's data: `assert f(x) == sorted(x)`. So changes are kept only for a bare
call (`reverse(x)`), and for a call whose argument the test compares with a literal (`k = f(x)`, then `assert x[:2] ==
[1, 2]`), or with a name of one.
"""

import ast
from typing import Any

IN_PLACE, SAME = "__in_place__", "__same__"
"""The names that marked calls, and `is`, go through."""
_EQUALITIES = ("assertEqual", "assertListEqual", "assertDictEqual", "assertSetEqual", "assertCountEqual")


def mark_calls(tree: ast.Module) -> ast.Module:
    """Mark such calls in a test's code."""
    written = {name for node in ast.walk(tree) for name in _named_literals(node)}
    looked_at = {name for node in ast.walk(tree) for name in _find_compared(node, written)}
    alone = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for call in [node for node in ast.walk(tree) if isinstance(node, ast.Call)]:
        if id(call) in alone or not looked_at.isdisjoint(_bare(call.args)):
            call.args.insert(0, call.func)
            call.func = ast.Name(IN_PLACE, ast.Load())
    return ast.fix_missing_locations(_Identity().visit(tree))


class _Identity(ast.NodeTransformer):
    """The identity of a program's object, through proxies."""

    def visit_Compare(self, node: ast.Compare) -> ast.expr:
        """Ask for `is` between operands that are not constants."""
        self.generic_visit(node)
        sides, operator = [node.left, *node.comparators], node.ops[0]
        if not isinstance(operator, ast.Is | ast.IsNot) or any(isinstance(side, ast.Constant) for side in sides):
            return node
        asked = ast.Call(ast.Name(SAME, ast.Load()), sides, [])
        return asked if isinstance(operator, ast.Is) else ast.UnaryOp(ast.Not(), asked)


def _named_literals(node: ast.AST) -> set[str]:
    """Return the names that a statement assigns literals to."""
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.For) else []
    value = node.value if isinstance(node, ast.Assign) else node.iter if isinstance(node, ast.For) else None
    if value is None or not _is_literal(value, set()):
        return set()
    return {name.id for target in targets for name in ast.walk(target) if isinstance(name, ast.Name)}


def _is_literal(side: ast.expr, written: set[str]) -> bool:
    inner = [node for node in ast.walk(side) if isinstance(node, ast.Name | ast.Call)]
    return all(isinstance(node, ast.Name) and node.id in written for node in inner)


def _find_compared(node: ast.AST, written: set[str]) -> set[str]:
    """Return the names that a node compares with a literal."""
    sides: list[ast.expr] = []
    if isinstance(node, ast.Compare):
        sides = [node.left, node.comparators[0]]
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in _EQUALITIES:
        sides = node.args[:2] if len(node.args) > 1 else []
    return {
        name
        for one, other in ((sides, sides[::-1]) if sides else ())
        if _is_literal(other, written)
        for name in _bare([one])
    }


def _bare(sides: list[ast.expr]) -> set[str]:
    """Return the sides that are a name, or part of its value."""
    found = [side.value if isinstance(side, ast.Subscript) else side for side in sides]
    return {side.id for side in found if isinstance(side, ast.Name)}


def write_back(old: Any, new: Any) -> Any:
    """Return `old` with the content of `new` if mutable, else `new`."""
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
