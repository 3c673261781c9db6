"""Numbers in the sentences of pages: written from measured data by `python -m benchmarks.figures`, compared by a test.

Which sentences, and what their numbers are, stands in sentences.yaml.
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import yaml

from benchmarks.figures.measured import RESULTS, ROOT

KEPT = Path(__file__).with_name("sentences.yaml")
HOLE = re.compile(r"\{(\w+) ([\w./]+) (.+?) (\S+)\}")
NUMBER = r"[-+]?\d[\d.,]*%?|\S+"
"""What stands in a hole of a page, right or wrong."""


def sentences() -> list[tuple[str, str]]:
    """Return pages and templates, whose line breaks are blanks."""
    pages: Mapping[str, Sequence[str]] = yaml.safe_load(KEPT.read_text(encoding="utf-8"))
    return [(page, " ".join(text.split())) for page, texts in pages.items() for text in texts]


def values_at(content: Any, path: Sequence[str]) -> Iterator[Any]:
    """Yield what stands at a path, whose parts may be patterns."""
    if not path:
        yield content
        return
    parts = content.items() if isinstance(content, dict) else enumerate(content) if isinstance(content, list) else ()
    for name, part in parts:
        if fnmatchcase(str(name), path[0]):
            yield from values_at(part, path[1:])


def number(value: Any) -> Any:
    """Return a number; of a text such as "4.81x" that of times."""
    found = re.search(r"([\d.]+)x", value) if isinstance(value, str) else None
    return float(found[1]) if found else value


def _short(cases: Sequence[Mapping[str, Any]]) -> int:
    (named,) = cases
    return sum(bool(one["at_least"]) and one["ratio"]["median"] < one["at_least"] for one in named.values())


REDUCTIONS: Mapping[str, Callable[[Sequence[Any]], Any]] = {
    "the": lambda values: values[0],
    "min": lambda values: min(map(number, values)),
    "max": lambda values: max(map(number, values)),
    "count": len,
    "short": _short,
}


def value_of(hole: re.Match[str]) -> str:
    """Return what stands in a hole by the data. ValueError where there is nothing at its path."""
    reduction, name, path, form = hole.groups()
    file = ROOT / name if "/" in name else RESULTS / f"{name}.json"
    found = list(values_at(json.loads(file.read_text(encoding="utf-8")), path.split("/")))
    if not found or (reduction == "the" and len(found) > 1):
        raise ValueError(f"{hole[0]} must name one value at least, and one alone for `the`, got {len(found)}")
    return format(REDUCTIONS[reduction](found), form).replace("%", " %")


def written(text: str, template: str) -> str:
    """Return a page with the numbers of one sentence as they are. ValueError where it does not stand there once."""
    holes = list(HOLE.finditer(template))
    literals = HOLE.sub("\0", template).split("\0")
    pattern = f"({NUMBER}|\\S+ %)".join(r"\s+".join(map(re.escape, re.split(r"\s+", part))) for part in literals)
    (*found,) = re.finditer(pattern, text)
    if len(found) != 1:
        raise ValueError(f"a sentence must stand once on its page, got {len(found)} times: {template[:80]}")
    for place in reversed(range(len(holes))):
        begin, end = found[0].span(place + 1)
        text = text[:begin] + value_of(holes[place]) + text[end:]
    return text


def write() -> None:
    """Write the numbers of all sentences into their pages."""
    for page, template in sentences():
        file = ROOT / page
        file.write_text(written(file.read_text(encoding="utf-8"), template), encoding="utf-8")
