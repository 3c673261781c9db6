"""Split test code of data sets into tests, and read its demands.

A file of asserts, a `check` of asserts, test functions of pytest and methods of unittest classes give one test each;
anything else stays whole.
"""

import ast
import builtins
import importlib.util
import re
import sys
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import cast

from covey_graders.tables import table_beside
from covey_sandbox.types import USUAL_MODULES, AssertTest

PROGRAM_MODULES = ("solution", "solutions", "main", "program", "submission", "answer", "your_module")
"""Names under which test files import the module that they test."""
_RUNNERS = ("unittest.main", "pytest.main", "sys.exit", "exit")
_RAISING = ("raises", "assertRaises", "assertRaisesRegex", "isinstance", "issubclass", "assertIsInstance")
"""Calls that take classes."""


@dataclass(frozen=True)
class Suite:
    """Test code, and known facts about the program that it tests."""

    source: str
    setup: str = ""
    entry_point: str = ""
    given: str = ""
    """Texts that tell which names the program must define: a solution, a starter, the prompt."""
    packages: Collection[str] = ()
    """Packages that test code may import if installed, besides the standard library."""


def suite_tests(suite: Suite) -> list[AssertTest]:
    """Return its tests. Raises ValueError if it could judge no program."""
    tree = _without_imports(suite)
    source = suite.source if ast.dump(tree) == ast.dump(parsed(suite.source)) else ast.unparse(tree)
    # Every name is the test's own, or the program's
    setup = parsed(suite.setup)
    packages = _packages(tree, suite.packages) | _packages(setup, suite.packages)
    _check_needs(tree)
    names = _names(tree, setup, suite)
    classes = tuple(name for name in (*names, suite.entry_point) if _is_class(name, tree, suite.given))
    _check_classes(tree, suite, classes)
    made = AssertTest("", suite.setup, names=names, classes=classes, packages=tuple(sorted(packages)))
    return [replace(made, source=text, call=call) for text, call in split_tests(source, suite.entry_point)]


def parsed(source: str) -> ast.Module:
    """Return the tree of test code. Raises ValueError where it is none."""
    try:
        return ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise ValueError(f"tests are not Python code: {source!r:.80}") from error


def split_tests(source: str, entry_point: str) -> list[tuple[str, str]]:
    """Split test code into pairs of text and call, to pass in parts.

    An assert that cannot fail (`assert True`) is no test.
    """
    tree = parsed(source)
    asserts = [node for node in tree.body if isinstance(node, ast.Assert)]
    imports = [node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)]
    if asserts and len(asserts) + len(imports) == len(tree.body):
        head = [node for node in imports if not _is_usual(node)]
        alone = [ast.unparse(ast.Module([*head, node], [])) for node in asserts if _can_fail(node)]
        return [(text, "") for text in alone or [source]]
    functions = [name for node in tree.body for name in _tests_in(node)]
    if functions:
        # Other statements of a file are run for each of its tests, but for those that run tests
        kept = [node for node in tree.body if not _runs(node, functions)]
        text = source if len(kept) == len(tree.body) else ast.unparse(ast.Module(kept, []))
        return [(text, name) for name in functions]
    return [(text, "") for text in _split_check(source, tree, entry_point)]


def _is_usual(node: ast.stmt) -> bool:
    """Return True if an import brings names that test code has anyway."""
    return isinstance(node, ast.Import) and all(one.name in USUAL_MODULES and not one.asname for one in node.names)


def _split_check(source: str, tree: ast.Module, entry_point: str) -> list[str]:
    checks = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == "check"]
    if len(checks) != 1:
        return [source]
    place, asserts = tree.body.index(checks[0]), checks[0].body
    called = {ast.unparse(node).replace("()", "") for node in tree.body[place + 1 :]}
    is_only_called = called <= {f"check({entry_point})", "check(candidate)"}
    if not is_only_called or len(asserts) < 2 or not all(isinstance(node, ast.Assert) for node in asserts):
        return [source]
    # Each gets the text before them
    head = ast.unparse(ast.Module(tree.body[:place], [])) + f"\n\ndef check({ast.unparse(checks[0].args)}):\n    "
    return [f"{head}{ast.unparse(node)}\n\ncheck(candidate)\n" for node in asserts if _can_fail(node)] or [source]


def _can_fail(node: ast.stmt) -> bool:
    """Return False for asserts of a constant or of `callable(...)`."""
    if not isinstance(node, ast.Assert):
        return True
    if isinstance(node.test, ast.Call):
        return not (isinstance(node.test.func, ast.Name) and node.test.func.id == "callable")
    return not (isinstance(node.test, ast.Constant) and node.test.value)


def _tests_in(node: ast.stmt) -> Iterator[str]:
    """Yield the test functions of a statement: its own name, or `Class.method`."""
    if isinstance(node, ast.FunctionDef) and node.name.startswith("test"):
        yield node.name
    elif isinstance(node, ast.ClassDef) and (
        node.name.startswith("Test") or "TestCase" in " ".join(map(ast.unparse, node.bases))
    ):
        yield from (f"{node.name}.{name}" for inner in node.body for name in _tests_in(inner) if "." not in name)


def _runs(node: ast.stmt, functions: Sequence[str]) -> bool:
    """Return True if a statement runs tests, such as `unittest.main()`."""
    if isinstance(node, ast.If):
        return "__name__" in ast.unparse(node.test)
    call = node.value if isinstance(node, ast.Expr) else None
    return isinstance(call, ast.Call) and ast.unparse(call.func) in (*_RUNNERS, *functions)


class _OfProgram(ast.NodeTransformer):
    """Removes the program's module from test code."""

    def __init__(self, suite: Suite) -> None:
        self._own = {suite.entry_point, *re.findall(r"^(?:def|class) (\w+)", suite.given, re.MULTILINE)}
        self._modules: set[str] = set()

    def visit_ImportFrom(self, node: ast.ImportFrom) -> ast.stmt | list[ast.stmt]:
        """Keep the names that an import renames."""
        is_own = node.module not in sys.stdlib_module_names and any(alias.name in self._own for alias in node.names)
        if not (is_own or node.level or node.module in PROGRAM_MODULES):
            return node
        return ast.parse("\n".join(f"{one.asname} = {one.name}" for one in node.names if one.asname) or "pass").body

    def visit_Import(self, node: ast.Import) -> ast.stmt:
        """Note the names that the module goes by."""
        found = {alias.asname or alias.name for alias in node.names if alias.name in PROGRAM_MODULES}
        self._modules |= found
        return ast.Pass() if found else node

    def visit_Attribute(self, node: ast.Attribute) -> ast.expr:
        """Write `solution.f` as `f`."""
        self.generic_visit(node)
        is_own = isinstance(node.value, ast.Name) and node.value.id in self._modules
        return ast.Name(node.attr, node.ctx) if is_own else node


def _without_imports(suite: Suite) -> ast.Module:
    tree = _OfProgram(suite).visit(parsed(suite.source))
    tree.body = [node for node in tree.body if not isinstance(node, ast.Pass)]
    return ast.fix_missing_locations(cast("ast.Module", tree))


def called_name(source: str) -> str:
    """Return the program's function that test code calls first. ValueError."""
    tree = _without_imports(Suite(source))
    bound = _bound(tree) | set(dir(builtins)) | USUAL_MODULES
    asserts = [node for node in ast.walk(tree) if isinstance(node, ast.Assert)]
    calls = [node.func for place in (*asserts, tree) for node in ast.walk(place) if isinstance(node, ast.Call)]
    for node in (*calls, *ast.walk(tree)):
        if isinstance(node, ast.Name) and node.id not in bound:
            return node.id
    raise ValueError(f"has no column 'entry_point', and {source!r:.80} calls no function of the program")


def _bound(tree: ast.AST) -> set[str]:
    """Return all names that code binds, in any scope."""
    bound: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
            bound.add(node.id)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            bound.update((alias.asname or alias.name).partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.arg):
            bound.add(node.arg)
        elif isinstance(node, ast.FunctionDef | ast.ClassDef | ast.ExceptHandler) and node.name:
            bound.add(node.name)
    return bound


def _names(tree: ast.Module, setup: ast.Module, suite: Suite) -> tuple[str, ...]:
    """Return names of the program that test code uses besides the entry point.

    Raises ValueError for a name unknown to the program.
    """
    known = _bound(tree) | _bound(setup) | set(dir(builtins)) | USUAL_MODULES | {suite.entry_point, "candidate"}
    is_open = any(
        alias.name == "*" for node in ast.walk(setup) if isinstance(node, ast.ImportFrom) for alias in node.names
    )
    free = dict.fromkeys(node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and node.id not in known)
    untold = [name for name in free if not re.search(rf"\b{name}\b", suite.given)]
    if untold and not is_open:
        raise ValueError(f"its tests use {untold[0]!r}, which neither they nor the row define or name")
    return tuple(name for name in free if name not in untold)


def _is_class(name: str, tree: ast.Module, given: str) -> bool:
    """Return True if a name is a class, by definition or use."""
    if re.search(rf"^\s*class\s+{name}\s*[(:]", given, re.MULTILINE):
        return True
    if not name.isidentifier() or re.search(rf"^\s*def\s+{name}\b", given, re.MULTILINE):
        return False
    if name[0].isupper() and re.search(rf"\bclass\s+[`'\"]?{name}\b", given):
        return True
    # It is caught, or passed to a call that takes classes
    nodes = list(ast.walk(tree))
    taken = [node.type for node in nodes if isinstance(node, ast.ExceptHandler) and node.type is not None]
    for call in (node for node in nodes if isinstance(node, ast.Call)):
        taken += call.args if ast.unparse(call.func).rpartition(".")[2] in _RAISING else []
    if any(name in _read(node) for node in taken if not isinstance(node, ast.Call)):
        return True
    # Its name is written like a class's, and what it returns is asked for something, or compared with its like
    objects = _made_of(name, nodes)
    asked = (node for node in nodes if isinstance(node, ast.Attribute) and _is_of(node.value, name, objects))
    compared = (node for node in nodes if isinstance(node, ast.Compare) and name in _read(node.left))
    is_used = any(asked) or any(name in _read(node.comparators[0]) for node in compared)
    return is_used and re.match(r"[A-Z]\w*[a-z]|[A-Z]\b", name) is not None


def _made_of(name: str, nodes: Sequence[ast.AST]) -> set[str]:
    """Return the names that hold results of a class or function."""
    targets: list[ast.expr | None] = []
    for node in nodes:
        if isinstance(node, ast.Assign) and _calls(node.value, name):
            targets += node.targets
        elif isinstance(node, ast.withitem) and _calls(node.context_expr, name):
            targets.append(node.optional_vars)
    return {ast.unparse(target) for target in targets if target is not None}


def _is_of(node: ast.expr, name: str, objects: set[str]) -> bool:
    """Return True for an instance of a class, or its name."""
    return _calls(node, name) or (isinstance(node, ast.Name | ast.Attribute) and ast.unparse(node) in objects)


def _calls(node: ast.AST, name: str) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == name


def _read(node: ast.AST) -> set[str]:
    return {inner.id for inner in ast.walk(node) if isinstance(inner, ast.Name)}


def imported(tree: ast.Module) -> list[str]:
    """Return the packages that code imports besides the standard library."""
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found.add(node.module.partition(".")[0])
    return sorted(found - sys.stdlib_module_names)


def _packages(tree: ast.Module, allowed: Collection[str]) -> set[str]:
    """Return test code's packages. Raises ValueError for forbidden ones."""
    found = [name for name in imported(tree) if name != "pytest"]
    for name in found:
        if name not in allowed:
            raise ValueError(f"its tests import {name}; they may import Python's standard library{_also(allowed)}")
        if importlib.util.find_spec(name) is None:
            raise ValueError(f"its tests import {name}, which is not installed: pip install {name}")
    return set(found)


def _also(allowed: Collection[str]) -> str:
    return f", {', '.join(sorted(allowed))} (environment.test_packages)" if allowed else ""


def _check_needs(tree: ast.Module) -> None:
    """Raise ValueError for tests that need the program's own process."""
    for node in ast.walk(tree):
        for what in _named_by(node):
            if what in NEEDS:
                raise ValueError(f"its tests use {what}: {NEEDS[what]}")


def _check_classes(tree: ast.Module, suite: Suite, classes: Sequence[str]) -> None:
    """Raise ValueError for tests that pass or compare objects."""
    nodes = list(ast.walk(tree))
    for node in nodes:
        if isinstance(node, ast.ClassDef) and not [*_tests_in(node)]:
            if any(_calls(call, node.name) for call in nodes):
                raise ValueError(f"its tests make objects of a class of their own, {node.name!r}")
            if set(classes) & {name for base in node.bases for name in _read(base)}:
                raise ValueError(f"its tests derive {node.name!r} from a class of the program")
    for name in classes:
        # Subclasses of plain values can be compared
        is_kind = re.search(rf"class {name}\(.*(?:tuple|Tuple|int|str|list|dict|set|float|Int|Str)", suite.given)
        objects = _made_of(name, nodes)
        for node in (node for node in nodes if isinstance(node, ast.Compare)):
            sides = [node.left, *node.comparators] if isinstance(node.ops[0], ast.Eq | ast.NotEq) else []
            is_object = any(_is_of(side, name, objects) for side in sides)
            if is_object and not is_kind and any(_is_value(side) for side in sides):
                raise ValueError(f"its tests compare an object of {name!r} with a value, which only the program could")


def _is_value(node: ast.expr) -> bool:
    """Return True for a literal other than None."""
    is_open = any(isinstance(inner, ast.Name | ast.Call) for inner in ast.walk(node))
    return not is_open and not (isinstance(node, ast.Constant) and node.value is None)


def _named_by(node: ast.AST) -> list[str]:
    """Return the feature that a node uses, as NEEDS writes it."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        return [node.module or "", *(f"{node.module}.{alias.name}" for alias in node.names)]
    if isinstance(node, ast.Attribute):
        return [node.attr if node.attr.startswith("__") else ast.unparse(node)]
    if isinstance(node, ast.FunctionDef) and node.name.startswith("test"):
        return [argument.arg for argument in node.args.args]
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
        return [node.func.id]
    return ["async"] if isinstance(node, ast.AsyncFunctionDef | ast.Await) else []


NEEDS = {name: why for why, names in table_beside(__file__)["needs"].items() for name in names.split()}
"""Features unavailable to tests -> the reason."""
