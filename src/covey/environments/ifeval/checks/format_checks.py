"""Checks of marks and layout. Each is true where the text follows the instruction. The time is linear in the text."""

import json
import re

_ANSWERS = ("My answer is yes.", "My answer is no.", "My answer is maybe.")
_FENCES = ("```json", "```Json", "```JSON", "```")
_STAR_BULLET = re.compile(r"^[^\S\n]*\*[^*].*$", re.MULTILINE)
_DASH_BULLET = re.compile(r"^[^\S\n]*-", re.MULTILINE)
_HIGHLIGHT = re.compile(r"\*([^\n*]*)\*")
_BOLD = re.compile(r"\*\*([^\n*]*)\*\*")
_POSTSCRIPTS = {"P.P.S": r"p\.\s?p\.\s?s", "P.S.": r"p\.\s?s\."}


def number_placeholders(text: str, *, num_placeholders: int) -> bool:
    """Check for at least so many `[...]` on one line each. Empty ones count, and `[[a]]` is one."""
    return sum(map(_placeholders, text.split("\n"))) >= num_placeholders


def _placeholders(line: str) -> int:
    count, end = 0, -1
    while (begin := line.find("[", end + 1)) >= 0 and (end := line.find("]", begin)) >= 0:
        count += 1
    return count


def postscript(text: str, *, postscript_marker: str) -> bool:
    """Check that the marker occurs anywhere, in any case. P.S. and P.P.S may have white space inside."""
    marker = postscript_marker.strip()
    return re.search(_POSTSCRIPTS.get(marker, re.escape(marker.lower())), text.lower()) is not None


def number_bullet_lists(text: str, *, num_bullets: int) -> bool:
    """Check for exactly so many lines that begin with `-`, or with `*` and anything else, which may be on the next
    line."""
    stars, dashes = _STAR_BULLET.findall(text), _DASH_BULLET.findall(text)
    return len(stars) + len(dashes) == num_bullets


def constrained_response(text: str) -> bool:
    """Check that one of the three answers occurs, letter by letter."""
    return any(answer in text for answer in _ANSWERS)


def number_highlighted_sections(text: str, *, num_highlights: int) -> bool:
    """Check for at least so many `*...*` and `**...**` that are not blank, each form counted on its own."""
    found = [*_HIGHLIGHT.findall(text), *_BOLD.findall(text)]
    return sum(bool(inside.strip()) for inside in found) >= num_highlights


def multiple_sections(text: str, *, section_spliter: str, num_sections: int) -> bool:
    """Check for at least so many times the word, in this case, and a number, with at most one blank between."""
    return len(re.findall(rf"{re.escape(section_spliter.strip())}\s?\d+", text)) >= num_sections


def json_format(text: str) -> bool:
    """Check for any JSON value, NaN included, fenced or not, with nothing around it."""
    value = text.strip()
    for fence in _FENCES:
        value = value.removeprefix(fence)
    try:
        json.loads(value.removesuffix("```").strip())
    except (ValueError, RecursionError):
        return False
    return True


def title(text: str) -> bool:
    """Check for something that is not blank between `<<` and the last `>>` of a line."""
    return any(map(_has_title, text.split("\n")))


def _has_title(line: str) -> bool:
    begin, end = line.find("<<"), line.rfind(">>")
    return 0 <= begin < end - 2 and bool(line[begin : end + 2].lstrip("<").rstrip(">").strip())
