"""Read shell scripts and files of settings as words of a command."""

import ast
import json
import operator
import re
import shlex
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any

import yaml

from covey.config.checks import format_value, refuse_aliases, yaml_fault
from covey.system.disk import read_regular
from covey_trl.translation import is_program

MAX_BYTES = 1 << 20
READERS: Mapping[str, Callable[[str], Any]] = {
    **{".json": json.loads, ".toml": tomllib.loads},
    **dict.fromkeys((".yaml", ".yml"), yaml.safe_load),
}
"""Readers of settings files, by suffix; any other file is a script."""
SCRIPTS = (".sh", ".bash", ".sbatch", ".slurm", ".zsh")
OF_PYTHON = "a script of TRL runs with `from covey.trl import GRPOTrainer, GRPOConfig` in place of its import from trl"
LISTS = ("reward_funcs", "reward_weights", "lora_target_modules", "report_to", "target_modules")
"""Flags that take several words."""
PAIRS = re.compile(
    r"(.*\.)?(eps_clip_low_high|(adam_)?betas|dynamic_filtering_(reward_)?range|vllm_is_truncated_threshold|"
    r"is_correction_threshold)|reward[_.]clip_range"
)
"""Flags that take at most two."""
ENDS = ("|", "||", "&&", ";", "&", ">", ">>", "2>&1", "&>")
"""Words that end a command in a shell."""
NAME = r"[A-Za-z_]\w*"
ARRAY = re.compile(rf"^\s*({NAME})(\+?)=\(([^()]*)\)", re.MULTILINE)
SUM = re.compile(r"\$\(\(([^()]*(?:\([^()]*\)[^()]*)*)\)\)")
HOLE = re.compile(rf"\$\{{({NAME}|[0-9@*])(?:\[[@*]\])?(?:(:?[-=])([^{{}}]*))?\}}|\$({NAME}|[0-9@*])")
SUMS: Mapping[type, Callable[[Any, Any], Any]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul,
    ast.Div: operator.floordiv, ast.FloorDiv: operator.floordiv, ast.Mod: operator.mod, ast.Pow: operator.pow,
}  # fmt: skip


def read_file(path: Path, arguments: Sequence[str] = ()) -> list[str]:
    """Read a script or file of settings into words. ValueError without any."""
    if not path.is_file():
        raise ValueError(f"{path} is no file")
    try:
        text = read_regular(path, MAX_BYTES).decode()
    except ValueError as error:
        raise ValueError(f"{path} cannot be read: {error}") from error
    if path.suffix in (".py", ".ipynb"):
        if (literals := literal_assignments(text)) is None:
            raise ValueError(f"{path} is Python: {OF_PYTHON}; a command line that starts it is translated behind --")
        return [f"{name}={as_text(value)}" for name, value in flat(literals)]
    if path.suffix not in READERS:
        return words_of_script(text, arguments)
    try:
        content = READERS[path.suffix](text)
        refuse_aliases("" if path.suffix in (".json", ".toml") else text)
    except yaml.MarkedYAMLError as error:
        raise ValueError(f"{path} cannot be read: {yaml_fault(error, text)}") from error
    except (ValueError, yaml.YAMLError, RecursionError) as error:
        raise ValueError(f"{path} cannot be read: {str(error).splitlines()[0]}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} holds no settings: it is no mapping")
    return [f"{name}={as_text(value)}" for name, value in flat(content)]


def literal_assignments(text: str) -> dict[str, Any] | None:
    """Read Python of literal assignments alone, None for other code."""
    found: dict[str, Any] = {}
    try:
        for node in ast.parse(text).body:
            match node:
                case (
                    ast.Assign(targets=[ast.Name(id=name)], value=value)
                    | ast.AnnAssign(target=ast.Name(id=name), value=ast.expr() as value)
                ):
                    found[name] = ast.literal_eval(value)
                case ast.Expr(value=ast.Constant()):
                    continue
                case _:
                    return None
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    return found


def flat(content: Mapping[Any, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Flatten settings to dotted names; keyword arguments of TRL stay whole."""
    for name, value in content.items():
        is_whole = not prefix and str(name).endswith("_kwargs")
        if isinstance(value, Mapping) and value and not is_whole:
            yield from flat(value, f"{prefix}{name}.")
        elif value is not None and value != {}:
            yield f"{prefix}{name}", value


def as_text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value) if isinstance(value, Mapping) else format_word(value)


def format_word(value: Any) -> str:
    """Format a value for the command line."""
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{name}:{format_word(one)}" for name, one in value.items()) + "}"
    if isinstance(value, float) and value in (float("inf"), float("-inf")):
        return "inf" if value > 0 else "-inf"
    return format_value(value)


def words_of_script(text: str, arguments: Sequence[str] = ()) -> list[str]:
    """Extract the training command of a script. ValueError without one.

    It is the one that starts a known program, else the one that sets most.
    """
    given = {str(place): word for place, word in enumerate(arguments, 1)}
    variables = {"HOME": str(Path.home()), **given, **dict.fromkeys("@*", shlex.join(arguments))}
    commands: list[list[str]] = []
    text = re.sub(r"\\[ \t]*\n", " ", text)
    text = re.sub(rf'"(\$@|\$\{{{NAME}\[@\]\}})"', r"\1", text)  # quoted lists are several words all the same
    text = ARRAY.sub(lambda found: f"{found[1]}{found[2]}={shlex.quote(_array(found[3]))}", text)
    for line in text.splitlines():
        filled = fill_in(line, variables)
        try:
            words = shlex.split(filled, comments=True)
        except ValueError:  # an open quotation: no command that sets anything
            continue
        rest = [word for word in words if word not in ("export", "declare", "local", "readonly", ":")]
        if rest and all(re.match(rf"{NAME}\+?=", word) for word in rest):
            for word in rest:
                name, _, value = word.rstrip(";").partition("=")
                before = variables.get(name[:-1], "") if name.endswith("+") else ""
                variables[name.rstrip("+")] = f"{before} {value}".strip() if before else value
            continue
        commands.append(list(takewhile(lambda word: word not in ENDS, unfold(words))))
    known = [words for words in commands if any(map(is_program, words))]
    best = max(known or commands, key=lambda words: sum("=" in w or w.startswith("--") for w in words), default=[])
    if not best:
        raise ValueError("the script holds no command with settings")
    return best


def unfold(words: Sequence[str]) -> Iterator[str]:
    """Yield words, quoted commands word by word."""
    for word in words:
        inner = word.split() if any(map(is_program, word.split()[:8])) else []
        yield from shlex.split(word) if len(inner) > 1 else [word]


def _array(text: str) -> str:
    return " ".join(line.partition(" #")[0].strip() for line in text.splitlines() if not line.strip().startswith("#"))


def fill_in(line: str, variables: dict[str, str]) -> str:
    """Fill in variables, defaults and sums of a shell.

    >>> fill_in("n=$((A * 2)) ${B:-c} $D", {"A": "4"})
    'n=8 c $D'
    """

    def value(found: re.Match[str]) -> str:
        name, how, default = found[1] or found[4], found[2], found[3]
        known = variables.get(name)
        if how and (known is None or (known == "" and how.startswith(":"))):
            known = fill_in(default, variables)
            if how.endswith("="):
                variables[name] = known
        return found[0] if known is None else known

    for _ in range(5):  # defaults within defaults
        before, line = line, HOLE.sub(value, line)
        line = SUM.sub(lambda found: _sum(found, variables), line)
        if line == before:
            break
    return line


def _sum(found: re.Match[str], variables: Mapping[str, str]) -> str:
    named = re.sub(NAME, lambda one: variables.get(one[0], one[0]), found[1])
    try:
        return str(_value(ast.parse(named.strip(), mode="eval").body))
    except (SyntaxError, ValueError, ArithmeticError):
        return found[0]


def _value(node: ast.expr) -> int:
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return node.value
    if isinstance(node, ast.BinOp) and type(node.op) in SUMS:
        left, right = _value(node.left), _value(node.right)
        if isinstance(node.op, ast.Pow) and right > 64:
            raise ValueError("too large")
        return int(SUMS[type(node.op)](left, right))
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_value(node.operand)
    raise ValueError("no sum of whole numbers")


def pairs_of(tokens: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield (name, value) of settings and flags; a flag alone is true."""
    rest = list(tokens)
    while rest:
        word = rest.pop(0)
        is_flag = word.startswith("-")
        name, equals, value = word.lstrip("-+~").partition("=")
        if not name or (not equals and not is_flag) or (equals and name.isupper()):  # a program, or its environment
            continue
        if is_flag:
            name = name.replace("-", "_")
        if not equals:
            most = None if name in LISTS else 2 if PAIRS.fullmatch(name) else 1
            values = list(takewhile(_is_value, rest[:most]))
            del rest[: len(values)]
            value = ",".join(values) or "true"
        if word not in ("-m", "--multirun"):  # a module of Python's, or a sweep of Hydra's
            yield name, value


def _is_value(word: str) -> bool:
    """Check that a word behind a flag is its value."""
    return "=" not in word and (not word.startswith("-") or re.fullmatch(r"-[\d.]+(e-?\d+)?", word) is not None)
