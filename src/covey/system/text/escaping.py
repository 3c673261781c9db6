"""Show model-written text without letting it act on terminals, logs or readers."""

import unicodedata


def escape(text: str, keep: str = "") -> str:
    r"""Escape control, bidirectional and invisible characters, as in `\x1b` or `\u202e`.

    Line breaks and tabs are written out too unless they are in `keep`. Backslashes stay single, so that formulas stay
    readable: the result is for eyes and cannot be turned back.

    >>> escape("red \x1b[31m\n")
    'red \\x1b[31m\\n'
    """
    return "".join(c if c in keep or is_visible(c) else c.encode("unicode_escape").decode("ascii") for c in text)


def is_visible(character: str) -> bool:
    """Return True for a blank or a character with a glyph."""
    return character.isprintable() or unicodedata.category(character) == "Zs"
