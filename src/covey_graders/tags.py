"""The tags of a completion: hidden thoughts, and answers."""

import re

_HIDDEN = re.compile(r"<!--.*?(?:-->|\Z)|~~(?=\S)[^~\n]{1,80}(?<=\S)~~", re.DOTALL)
_THINK = re.compile(
    r"(?i)<(/?)(?:seed:)?(?:think(?:ing)?|thought)>|(?-i:\[(/?)THINK\])|\u25c1(/?)think\u25b7"
    r"|<\|(?:begin|start|(end))_(?:of_thought|thinking)\|>"
)
"""Marks of thoughts in templates of R1, Seed, EXAONE, Magistral, Kimi, Sky-T1 and Command; a group has closing ones."""


def without_thoughts(completion: str) -> str:
    """Return the completion without think blocks, opened in it or before."""
    kept: list[str] = []
    depth = position = 0
    # Text outside of thoughts counts; a closing tag without an opening one ends a thought too
    for tag in _THINK.finditer(completion):
        if depth == 0:
            kept = [] if any(tag.groups()) else [*kept, completion[position : tag.start()]]
        depth = max(0, depth - 1) if any(tag.groups()) else depth + 1
        position = tag.end()
    # An unclosed thought has no answer
    if depth == 0:
        kept.append(completion[position:])
    return "\n".join(part for part in kept if part)


def visible(completion: str) -> str:
    """Return the visible prose: no thoughts, comments or struck-out text."""
    return _HIDDEN.sub("", without_thoughts(completion))


def after_thoughts(completion: str) -> str:
    """Return the text after the last thought, trimmed.

    Nothing where a thought never ends.
    """
    tags = list(_THINK.finditer(completion))
    ends = [tag.end() for tag in tags if any(tag.groups())]
    if ends:
        return completion[ends[-1] :].strip()
    return "" if tags and not completion[: tags[0].start()].strip() else completion


def blocks(text: str, tag: str) -> list[str]:
    """Return the contents of a tag's closed blocks, in linear time."""
    *closed, _ = text.split(f"</{tag}>")
    return [after for _, opening, after in (piece.partition(f"<{tag}>") for piece in closed) if opening]


def first_block(text: str, tag: str) -> str:
    """Return the first closed block's content, trimmed, "" without one."""
    return next(iter(blocks(text, tag)), "").strip()
