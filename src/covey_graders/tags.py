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
    is_inside, position = False, 0
    for tag in _THINK.finditer(completion):
        ends = any(tag.groups())
        # A mark within a thought is a word of it; a closing mark without an opening one ends a thought too
        if not is_inside:
            kept = [] if ends else [*kept, completion[position : tag.start()]]
        is_inside, position = not ends, tag.end()
    # An unclosed thought has no answer
    return "\n".join(part for part in (*kept, "" if is_inside else completion[position:]) if part)


def visible(completion: str) -> str:
    """Return the visible prose: no thoughts, comments or struck-out text."""
    return _HIDDEN.sub("", without_thoughts(completion))


def after_thoughts(completion: str) -> str:
    """Return the completion without thoughts, trimmed where it has some."""
    said = without_thoughts(completion)
    return said if said == completion else said.strip()


def blocks(text: str, tag: str) -> list[str]:
    """Return the contents of a tag's closed blocks, in linear time."""
    *closed, _ = text.split(f"</{tag}>")
    return [after for _, opening, after in (piece.partition(f"<{tag}>") for piece in closed) if opening]


def first_block(text: str, tag: str) -> str:
    """Return the first closed block's content, trimmed, "" without one."""
    return next(iter(blocks(text, tag)), "").strip()
