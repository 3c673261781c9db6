"""Find pictures, films and sound in rows: policies read text."""

import re
from collections.abc import Mapping
from typing import Any

KINDS = ("image", "video", "audio")
"""Beginnings of the names of columns, and of the types of a message's parts, that are no text."""
FILE = re.compile(r"data:(image|video|audio)/|\S+\.(png|jpe?g|webp|gif|bmp|tiff?|mp4|webm|wav|mp3|flac)(\?\S*)?$", re.I)
"""A text that leads to a picture, or spells one."""


def picture_in(row: Mapping[str, Any]) -> str:
    """Describe a picture in a row, "" for text alone.

    >>> picture_in({"prompt": [{"role": "user", "content": [{"type": "image"}]}], "answer": "a fox"})
    "a part of type image in message 1 of column 'prompt'"
    """
    for column, value in row.items():
        if part := _part_in(value):
            return f"{part} of column {column!r}"
        if _is_picture(value) or (column.lower().startswith(KINDS) and _leads_to_picture(value)):
            return f"a picture, film or sound in column {column!r}"
    return ""


def _part_in(value: object) -> str:
    messages = value if isinstance(value, list | tuple) else ()
    for number, message in enumerate(messages, 1):
        content = message.get("content") if isinstance(message, Mapping) else None
        for part in content if isinstance(content, list | tuple) else ():
            if kind := _kind(part):
                return f"a part of type {kind} in message {number}"
    return ""


def _kind(part: object) -> str:
    """Return a part's kind, "" for text; null keys are absent."""
    if not isinstance(part, Mapping):
        return "image" if _is_picture(part) else ""
    said = [str(part.get("type") or ""), *(str(key) for key, value in part.items() if value is not None)]
    return next((kind for name in said for kind in KINDS if kind in name.lower()), "")


def _is_picture(value: object) -> bool:
    """Return True for pictures of PIL, and for files in tables."""
    if isinstance(value, list | tuple):
        return any(map(_is_picture, value))
    if isinstance(value, Mapping):
        return value.keys() == {"bytes", "path"} or isinstance(value.get("bytes"), bytes)
    return type(value).__module__.partition(".")[0] == "PIL"


def _leads_to_picture(value: object) -> bool:
    if isinstance(value, list | tuple):
        return any(map(_leads_to_picture, value))
    if isinstance(value, Mapping):
        return any(map(_leads_to_picture, value.values()))
    return isinstance(value, bytes) or (isinstance(value, str) and FILE.match(value) is not None)
