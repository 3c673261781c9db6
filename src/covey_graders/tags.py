"""What stands in the tags of a completion: thoughts, which no reader sees, and answers. Pure, in linear time."""

import re

_HIDDEN = re.compile(r"<!--.*?(?:-->|\Z)|~~(?=\S)[^~\n]{1,80}(?<=\S)~~", re.DOTALL)
_THINK = re.compile(r"<(/?)think(?:ing)?>", re.IGNORECASE)
THINK_END = "</think>"


def without_thoughts(completion: str) -> str:
    """Return the completion less its think blocks; a closing tag alone ends one that the prompt opened."""
    kept: list[str] = []
    depth = position = 0
    # Text outside of thoughts counts; a closing tag without an opening one ends a thought too
    for tag in _THINK.finditer(completion):
        if depth == 0:
            kept = [] if tag[1] else [*kept, completion[position : tag.start()]]
        depth = max(0, depth - 1) if tag[1] else depth + 1
        position = tag.end()
    # An unclosed thought has no answer
    if depth == 0:
        kept.append(completion[position:])
    return "\n".join(part for part in kept if part)


def visible(completion: str) -> str:
    """Return what a reader sees of prose: no think block, comment or struck-out text. In programs they are code."""
    return _HIDDEN.sub("", without_thoughts(completion))


def after_thoughts(completion: str) -> str:
    """Return what follows the last `</think>`, trimmed; nothing where a thought never ends, all where there is none."""
    if THINK_END in completion:
        return completion.rpartition(THINK_END)[2].strip()
    return "" if completion.lstrip().startswith("<think>") else completion


def blocks(text: str, tag: str) -> list[str]:
    """Return the contents of all closed blocks of a tag. A pattern would look for each opening's end anew."""
    *closed, _ = text.split(f"</{tag}>")
    return [after for _, opening, after in (piece.partition(f"<{tag}>") for piece in closed) if opening]


def first_block(text: str, tag: str) -> str:
    """Return the trimmed content of the first closed block of a tag. "" where there is none."""
    return next(iter(blocks(text, tag)), "").strip()
