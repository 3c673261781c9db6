"""Encode the environment's text so that it forges no template marks.

A role is a mark: a special token, or an added token in brackets such as <tool_response>. The template alone may write
them. So the rendered text is divided into what the template wrote and what depends on the environment's words, and a
mark that would stand in the latter is broken into ordinary tokens. Text without such marks is encoded as it is, with
the tokens that a fresh rendering would have. If a template writes roles in plain text, nothing can tell them from
the environment's words: see `roles_are_marks`.
"""

import functools
import hashlib
import itertools
import re
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from transformers import PreTrainedTokenizerBase

from covey.types import Message

Render = Callable[[Sequence[Message]], str]
"""Render a conversation in which these messages are the foreign ones."""


@dataclass(frozen=True, slots=True)
class Foreign:
    """A span [start, end) of rendered text that the template did not write."""

    start: int
    end: int
    is_sampled: bool = False
    """Whether the policy wrote them: its own brackets (<think>, <tool_call>) are then tokens."""


@dataclass(frozen=True, slots=True)
class Rendered:
    """A rendered text with its foreign spans, in order.

    >>> Rendered("<turn>user\\nhello</turn>", (Foreign(11, 16),))
    """

    text: str
    foreign: tuple[Foreign, ...] = ()


def unforged_tokens(tokenizer: PreTrainedTokenizerBase, rendered: Rendered) -> tuple[int, ...]:
    """Return a rendered text's tokens, without marks in foreign spans.

    A mark there is divided after its first character; one of a single character is left out. Halves of characters,
    which no tokenizer takes, become question marks.
    """
    rendered = replace(rendered, text=readable(rendered.text))
    if not tokenizer.is_fast:
        return _divided_tokens(tokenizer, rendered)
    breaks: set[int] = set()
    while True:
        ids, found = _encode(tokenizer, rendered, sorted({0, *breaks, len(rendered.text)}))
        if found <= breaks:
            return ids
        breaks |= found


def readable(text: str) -> str:
    """Return text of the same length that every tokenizer reads."""
    return text.encode("utf-8", "replace").decode("utf-8")


def _encode(
    tokenizer: PreTrainedTokenizerBase, rendered: Rendered, edges: Sequence[int]
) -> tuple[tuple[int, ...], set[int]]:
    """Return the tokens between edges, and where forged marks must be divided."""
    ids: list[int] = []
    found: set[int] = set()
    all_marks = marks(tokenizer, len(tokenizer))[1]
    for begin, end in itertools.pairwise(edges):
        piece = tokenizer(rendered.text[begin:end], add_special_tokens=False, return_offsets_mapping=True)
        for token, (first, last) in zip(piece["input_ids"], piece["offset_mapping"], strict=True):
            # Special tokens that foreign text spells out are divided
            start, stop = _core(rendered.text, begin + first, begin + last)
            if token not in all_marks or not _is_foreign(tokenizer, rendered, token, start, stop):
                ids.append(token)
            elif stop - start > 1:
                found.add(start + 1)
    return tuple(ids), found


def _is_foreign(tokenizer: PreTrainedTokenizerBase, rendered: Rendered, mark: int, start: int, stop: int) -> bool:
    """Return True if text that may not write this mark takes part."""
    special, all_marks = marks(tokenizer, len(tokenizer))
    first = bisect_right(rendered.foreign, start, key=lambda part: part.end)
    touched = itertools.takewhile(lambda part: part.start < stop, rendered.foreign[first:])
    return any(mark in (special if part.is_sampled else all_marks) for part in touched)


def _core(text: str, start: int, end: int) -> tuple[int, int]:
    """Leave out the blanks that some marks swallow on either side."""
    inner = text[start:end]
    return start + len(inner) - len(inner.lstrip()), end - len(inner) + len(inner.rstrip())


def _divided_tokens(tokenizer: PreTrainedTokenizerBase, rendered: Rendered) -> tuple[int, ...]:
    """Encode foreign parts separately, for tokenizers without offsets."""
    ids: list[int] = []
    place = 0
    for part in rendered.foreign:
        ids += tokenizer(rendered.text[place : part.start], add_special_tokens=False)["input_ids"]
        words = rendered.text[part.start : part.end]
        inner = tokenizer(words, add_special_tokens=False, split_special_tokens=not part.is_sampled)["input_ids"]
        refused = marks(tokenizer, len(tokenizer))[0 if part.is_sampled else 1]
        ids += [token for token in inner if token not in refused]
        place = part.end
    return (*ids, *tokenizer(rendered.text[place:], add_special_tokens=False)["input_ids"])


@functools.lru_cache(maxsize=8)
def marks(tokenizer: PreTrainedTokenizerBase, size: int) -> tuple[frozenset[int], frozenset[int]]:
    """Return special tokens, and these with bracketed added tokens.

    `size` is its length, so that tokens added later count. The token of unknown text is a mark only where it is
    another special token at once.
    """
    added = tokenizer.added_tokens_decoder
    named = [getattr(tokenizer, f"{name}_token_id", None) for name in ("bos", "eos", "pad", "sep", "cls")]
    unknown = {tokenizer.unk_token_id} - set(named)
    special = {token for token, entry in added.items() if entry.special} | set(tokenizer.all_special_ids)
    brackets = {token for token, entry in added.items() if _in_brackets(str(entry))}
    return frozenset(special - unknown), frozenset((special | brackets) - unknown)


def _in_brackets(mark: str) -> bool:
    inner = mark.strip()
    return len(inner) > 2 and not inner[0].isalnum() and not inner[-1].isalnum()


# ---- which part of a rendered text is whose


def locate(render: Render, messages: Sequence[Message], where: str = "the environment's words") -> Rendered:
    """Render messages, and find the characters of their text.

    Text unchanged when the words are exchanged is the template's; trimming and escaping are kept. Each string of a
    message counts, but not its role. ValueError if the template's own part depends on the words, or leaves the
    content of a message out.
    """
    real = render(messages)
    styles = itertools.product((True, False), ("$", r"\Z"))
    refused: ValueError | None = None
    for places in dict.fromkeys(_places(messages, *style) for style in styles):
        try:
            return _locate(render, messages, places, real, where)
        except ValueError as error:
            refused = refused or error
    assert refused is not None
    raise refused


def _locate(render: Render, messages: Sequence[Message], places: Sequence[str], real: str, where: str) -> Rendered:
    words = _words(messages)
    bare = render(_replace_texts(messages, places))
    _check_heard(messages, places, bare)
    # Most templates write words as they are
    found = _fill(bare, places, words, messages)
    if found.text == real:
        return found
    # Others trim or escape them: put back one after the other
    written = [_as_written(render, messages, places, index, bare) for index in range(len(words))]
    if None in written or (found := _fill(bare, places, [str(text) for text in written], messages)).text != real:
        raise ValueError(f"the chat template's own marks depend on {where}, so that the two cannot be told apart")
    return found


def _check_heard(messages: Sequence[Message], places: Sequence[str], bare: str) -> None:
    """Raise ValueError where nothing of a message's content is rendered."""
    begin = 0
    for message in messages:
        before = list(message)[: list(message).index("content")] if "content" in message else list(message)
        first = begin + len(_words([{key: message[key] for key in before}]))
        last = first + len(_words([{"content": message.get("content")}]))
        if last > first and not any(place in bare for place in places[first:last]):
            raise ValueError(f"the chat template drops what the {message['role']} says")
        begin += len(_words([message]))


def _as_written(
    render: Render, messages: Sequence[Message], places: Sequence[str], index: int, bare: str
) -> str | None:
    """Return the rendering of one string, None if more changes with it."""
    words = _words(messages)
    alone = render(_replace_texts(messages, [*places[:index], words[index], *places[index + 1 :]]))
    around = bare.split(places[index])
    times = len(around) - 1
    if times == 0:
        return ""
    length = (len(alone) - sum(map(len, around))) // times
    found = alone[len(around[0]) : len(around[0]) + max(length, 0)]
    return found if found.join(around) == alone else None


def _fill(bare: str, places: Sequence[str], texts: Sequence[str], messages: Sequence[Message]) -> Rendered:
    sampled = _are_sampled(messages)
    by_place = {place: number for number, place in enumerate(places)}
    if not places:
        return Rendered(bare)
    written, parts, length = [], [], 0
    for piece in re.split("(" + "|".join(map(re.escape, places)) + ")", bare):
        number = by_place.get(piece)
        text = piece if number is None else texts[number]
        if number is not None and text:
            parts.append(Foreign(length, length + len(text), sampled[number]))
        written.append(text)
        length += len(text)
    return Rendered("".join(written), tuple(parts))


def place_in(said: object) -> str:
    """Return a placeholder that does not occur in `said`."""
    return "x" + hashlib.blake2b(repr(said).encode(errors="replace"), digest_size=16).hexdigest() + "x"


def _places(messages: Sequence[Message], keeps_sampled: bool, end: str) -> tuple[str, ...]:
    """Return a placeholder per string, keeping its outer tags.

    Templates look at such tags (Qwen3: <tool_response>).
    Some trim the text before, so that its last tag may stand before a line break (`end`), and some drop all that the
    policy said before </think>, with which a place that ended so would be gone (unless `keeps_sampled`).
    """
    secret = place_in([dict(message) for message in messages])
    pairs = zip(_words(messages), _are_sampled(messages), strict=True)
    return tuple(
        f"{secret}{number}x"
        if is_sampled and not keeps_sampled
        else _part(r"\A<\w+>", text) + f"{secret}{number}x" + _part(rf"</\w+>{end}", text)
        for number, (text, is_sampled) in enumerate(pairs)
    )


def _are_sampled(messages: Sequence[Message]) -> list[bool]:
    """Return True for each string that the policy wrote."""
    return [message["role"] == "assistant" for message in messages for _ in _words([message])]


def _words(messages: Sequence[Message]) -> list[str]:
    """Return every string of messages that could hold a mark, in order."""
    found: list[str] = []

    def note(text: str) -> str:
        found.append(text)
        return text

    for message in messages:
        _map_texts(message, note)
    return found


def _replace_texts(messages: Sequence[Message], texts: Sequence[str]) -> list[dict[str, Any]]:
    following = iter(texts)
    return [_map_texts(message, lambda _: next(following)) for message in messages]


def _map_texts(value: Any, change: Callable[[str], str], key: str = "") -> Any:
    """Change every string in nested values, except roles, kinds and plain names."""
    if isinstance(value, str):
        stays = key in ("role", "type") or (key in ("id", "tool_call_id") and re.fullmatch(r"[\w-]*", value))
        return value if stays or not value.strip() else change(value)
    if isinstance(value, Mapping):
        return {
            name if re.fullmatch(r"\w+", str(name)) else change(str(name)): _map_texts(inner, change, str(name))
            for name, inner in value.items()
        }
    if isinstance(value, list | tuple):
        return [_map_texts(inner, change) for inner in value]
    return value


def _part(pattern: str, text: str) -> str:
    return found.group() if (found := re.search(pattern, text)) else ""
