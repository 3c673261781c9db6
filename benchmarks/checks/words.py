"""Check the English of `src`, `docs` and the tests' names against counts in `words.toml`: `make lint` runs it.

    python -m benchmarks.checks.words                 # counts, and what must not grow
    python -m benchmarks.checks.words --list dialect  # every place of a rule, or of all
    python -m benchmarks.checks.words --lower         # write the counts where they have fallen

Rules (docs/develop/glossary.md has the names): a public class name has one owner; functions are named by verbs, not by
a bare participle (`settled`, `asked`); a docstring names its noun instead of "Return what ..."; no sentence of
it or of an attribute's doc begins with "What is ..." or "Of each ...", and neither doc with "How ..." or "For ..."; its
first sentence has at most 12 words; words of `DIALECT` are not used; a test's name has at most 14 words.
"""

import argparse
import ast
import inspect
import re
import sys
import tomllib
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
COUNTS = Path(__file__).with_suffix(".toml")
MAX_WORDS = 12
SENTENCE_END = re.compile(r"(?<=[.!?])\s")
MAX_TEST_WORDS = 14
"""Words of a test's name, without `test`."""
RELATIVE = re.compile(r"(Return|Tell|Say|Give|Have) (what|whether|those|who|how)\b")
FREE_RELATIVE = re.compile(
    r"(?:\A|[.;:]\s+)(?:What|Of|Where)\b[^?]*?[.;:](?:\s|\Z)"
    r"|\A(?:What|Of|Where|Whose|Who|Which|How|Why|When|That|By|For|In|As|With|Between|So|At|On|Over|Since|Under) \w"
)
PARTICIPLE = re.compile(
    r"\w+ed|made|found|kept|held|written|drawn|shown|said|built|left|given|taken|known|meant|told|seen|gone|begun"
)
NO_PARTICIPLE = {"need", "feed", "embed", "seed", "speed", "shed", "proceed", "exceed", "indeed", "red", "fed"}
DIALECT = re.compile(
    r"\b(nobody|whoever|whatever|whichever|anew|afresh|ails?|sick|sickness|mend(s|ed|ing)?|lest|somebody"
    r"|in (the|its|their|your) stead|(comes?|came) to(?= (the same|nothing|an end|\d|be\b))|(goes|go|went|going) on"
    r"|so many|under way|gives? way|there (is|are) none|one's own|from here on|of its own accord|holds no longer)\b",
    re.IGNORECASE,
)
PLACES = ("docs/**/*.md", "README.md", "CONTRIBUTING.md")
Functions = ast.FunctionDef | ast.AsyncFunctionDef
Finding = tuple[str, str]
"""(rule, "file:line text")."""


def check_module(path: str, tree: ast.Module, owners: dict[str, list[str]]) -> Iterator[Finding]:
    """Yield findings of one module. Public class names are added to `owners`, for `check_owners`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            owners[node.name].append(f"{path}:{node.lineno}")
        if isinstance(node, Functions) and _is_bare_participle(node):
            yield "participle", f"{path}:{node.lineno} {node.name}"
        if isinstance(node, Functions | ast.ClassDef | ast.Module) and (text := ast.get_docstring(node)):
            line = node.body[0].lineno
            first = text.splitlines()[0]
            if RELATIVE.match(text):
                yield "relative", f"{path}:{line} {first}"
            if len(SENTENCE_END.split(first, maxsplit=1)[0].split()) > MAX_WORDS:
                yield "long", f"{path}:{line} {first}"
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            for found in FREE_RELATIVE.finditer(inspect.cleandoc(node.value.value)):
                yield "free relative", f"{path}:{node.lineno} {' '.join(found[0].split())}"
    yield from _dialect(path, tree)


def _is_bare_participle(node: Functions) -> bool:
    """Match one word that is a participle. Properties are nouns or states, and may be."""
    decorators = {ast.unparse(decorator).split("(")[0].split(".")[-1] for decorator in node.decorator_list}
    if decorators & {"property", "cached_property"}:
        return False
    name = node.name.strip("_")
    return bool(PARTICIPLE.fullmatch(name)) and "_" not in name and name not in NO_PARTICIPLE


def _dialect(path: str, tree: ast.Module) -> Iterator[Finding]:
    """Yield dialect words of all strings with a blank in them: docstrings, errors, log lines."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value.strip():
            for found in DIALECT.finditer(node.value):
                line = node.lineno + node.value.count("\n", 0, found.start())
                yield "dialect", f"{path}:{line} {found[0]}"


def check_owners(owners: dict[str, list[str]]) -> Iterator[Finding]:
    """Yield every owner of a public class name but the first."""
    for name, places in owners.items():
        yield from (("namesake", f"{place} {name} (also {places[0]})") for place in places[1:])


def check_pages(root: Path) -> Iterator[Finding]:
    """Yield dialect words of the documentation."""
    for file in sorted(file for pattern in PLACES for file in root.glob(pattern)):
        for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), 1):
            for found in DIALECT.finditer(line):
                yield "dialect of docs", f"{file.relative_to(root)}:{number} {found[0]}"


def check_tests(root: Path) -> Iterator[Finding]:
    """Yield dialect words of tests' names, and names that are too long."""
    for file in sorted((root / "tests").rglob("test_*.py")):
        for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), 1):
            if name := re.match(r"\s*(?:async )?def test_(\w+)", line):
                where, words = f"{file.relative_to(root)}:{number} test_{name[1]}", name[1].replace("_", " ")
                if DIALECT.search(words):
                    yield "dialect of tests", where
                if len(words.split()) > MAX_TEST_WORDS:
                    yield "long tests", where


def check(root: Path) -> list[Finding]:
    """Return all findings of a repository, in order of files."""
    findings: list[Finding] = []
    owners: dict[str, list[str]] = defaultdict(list)
    for file in sorted((root / "src").rglob("*.py")):
        tree = ast.parse(file.read_text(encoding="utf-8"))
        findings += check_module(file.relative_to(root).as_posix(), tree, owners)
    return [*findings, *check_owners(owners), *check_pages(root), *check_tests(root)]


def main(root: Path = ROOT, counts: Path = COUNTS) -> int:
    """Compare counts with those of the file. Return the exit code."""
    parser = argparse.ArgumentParser(description="Check the English of src, docs and tests' names.")
    parser.add_argument("--list", metavar="RULE", help="print every place of a rule, or of `all`")
    parser.add_argument("--lower", action="store_true", help="write counts that have fallen")
    options = parser.parse_args()
    findings, text = check(root), counts.read_text(encoding="utf-8")
    print("".join(f"{where}\n" for rule, where in findings if options.list in (rule, "all")), end="")
    failed = False
    for rule, limit in tomllib.loads(text).items():
        number = sum(found == rule for found, _ in findings)
        failed |= number > limit
        verdict = f"must be <= {limit}: --list '{rule}' shows them" if number > limit else f"limit {limit}"
        print(f"{number:8,}  {rule:20}{verdict}{', lower it by --lower' if number < limit else ''}")
        if options.lower and number < limit:
            text = re.sub(rf'^("?{rule}"? = )\d+', rf"\g<1>{number}", text, flags=re.MULTILINE)
    if options.lower:
        counts.write_text(text, encoding="utf-8")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
