"""Encode the text between two turns of a conversation.

Sampled tokens are never tokenised again: the environment's text and the template's are appended to them.
"""

import hashlib
import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from numbers import Integral
from typing import Any

from transformers import PreTrainedTokenizerBase

from covey.environments.base import ends_with_assistant, text_of, with_content
from covey.rollouts.encoding import Tools, encode_prompt, extend_prompt, refused_by_template
from covey.rollouts.environment_text import Foreign, Rendered, locate, marks, place_in, readable, unforged_tokens
from covey.types import Completion, CutText, Message, Prompt


def as_messages(said: str | Sequence[Message]) -> tuple[Message, ...]:
    """Return a reply as messages: text is the user's."""
    if isinstance(said, str):
        return ({"role": "user", "content": said},) if said else ()
    return tuple(dict(message) for message in said)


def observed_tokens(
    tokenizer: PreTrainedTokenizerBase,
    conversation: str | Sequence[Message],
    messages: str | Sequence[Message],
    sampled: Sequence[int],
    tools: Tools = (),
) -> tuple[int, ...]:
    """Return the tokens between the last sampled turn and the next.

    `conversation` ends with the policy's last answer, `sampled` are its tokens, and `messages` is what the environment
    says to it: text after a conversation of messages is the user's. With plain text they are encoded as they are. With
    messages the chat template says what closes the turn, what lies between, and what opens the next one. A stop token
    that was sampled is not said twice; a turn that was cut gets the template's close.

    The environment's words make no special tokens, so that they cannot forge a role; the first prompt, which the user
    wrote, is encoded by `encode_prompt` with any tokens it names. ValueError where a template drops the turn or
    refuses the messages.
    """
    if isinstance(conversation, str):
        words = messages if isinstance(messages, str) else "".join(text_of(message) for message in messages)
        return unforged_tokens(tokenizer, Rendered(words, (Foreign(0, len(words)),)))
    said = as_messages(messages)
    rendered = _first_that_renders(tokenizer, conversation, said, tools)
    return _following(tokenizer, unforged_tokens(tokenizer, rendered), sampled)


def _first_that_renders(
    tokenizer: PreTrainedTokenizerBase, conversation: Sequence[Message], said: Sequence[Message], tools: Tools
) -> Rendered:
    """Return the template's text after the last turn, trying several ways.

    Some templates count turns and refuse several calls in a row: a short past does for them. Others write what a tool
    says only after a turn that is known to have called it. ValueError is that of the plain way.
    """
    asked = next((i for i, message in enumerate(conversation) if message["role"] == "user"), len(conversation))
    short = conversation[: min(asked + 1, len(conversation) - 1)]
    names = [re.sub(r"\W", "_", str(message.get("name", "tool")))[:64] for message in said if message["role"] == "tool"]
    # Fall back on ways that ask less of the template
    try:
        return _rendered_after(tokenizer, conversation[:-1], said, tools)
    except ValueError as error:
        ways = [lambda: _rendered_after(tokenizer, short, said, tools)] if len(short) + 1 < len(conversation) else []
        ways += [lambda: _rendered_after_call(tokenizer, short, said, tools, names)] if names else []
        for way in ways:
            with suppress(ValueError):
                return way()
        raise error


def _rendered_after_call(
    tokenizer: PreTrainedTokenizerBase,
    before: Sequence[Message],
    said: Sequence[Message],
    tools: Tools,
    names: Sequence[str],
) -> Rendered:
    calls = [{"type": "function", "function": {"name": name, "arguments": {}}} for name in names]
    turn = {"role": "assistant", "content": "", "tool_calls": calls}
    alone = _render(tokenizer, (*before, turn), tools, opens=False)
    # The turn's own close is its last mark
    encoded = tokenizer(alone, add_special_tokens=False, return_offsets_mapping=True)
    known = marks(tokenizer, len(tokenizer))[1]
    places = zip(encoded["input_ids"], encoded["offset_mapping"], strict=True)
    found = [start for token, (start, _) in places if token in known]
    close = found[-1] if found else len(alone)

    def after(messages: Sequence[Message]) -> str:
        whole = _render(tokenizer, (*before, turn, *messages), tools)
        if not whole.startswith(alone):
            raise ValueError("the chat template rewrites a turn that called tools when they answer")
        return whole[close:]

    return locate(after, said)


def _rendered_after(
    tokenizer: PreTrainedTokenizerBase, before: Sequence[Message], said: Sequence[Message], tools: Tools
) -> Rendered:
    # Mark the turn's place by a word that no message can hold
    place = place_in(([dict(message) for message in (*before, *said)], "turn"))

    def after(messages: Sequence[Message]) -> str:
        whole = _render(tokenizer, (*before, {"role": "assistant", "content": place}, *messages), tools)
        _, found, tail = whole.rpartition(place)
        if not found:
            raise ValueError("the chat template drops the assistant's turn, so no further turn can follow it")
        return tail

    return locate(after, said)


def _following(tokenizer: PreTrainedTokenizerBase, ids: tuple[int, ...], sampled: Sequence[int]) -> tuple[int, ...]:
    """Drop the beginning of `ids` that the sampled tokens end with."""
    for length in range(min(len(sampled), len(ids)), 0, -1):
        if tuple(sampled[-length:]) == ids[:length]:
            return ids[length:]
    # Some templates put a blank before the stop token.
    if sampled and sampled[-1] in ids and sampled[-1] in marks(tokenizer, len(tokenizer))[0]:
        stop = ids.index(sampled[-1])
        if not str(tokenizer.decode(list(ids[:stop]))).strip():
            return ids[stop + 1 :]
    return ids


def open_prompt(
    tokenizer: PreTrainedTokenizerBase, prompt: Prompt, said: str | Sequence[Message], tools: Tools = ()
) -> tuple[Prompt, tuple[int, ...]]:
    """Return the extended prompt and its tokens; added words make no marks.

    If they extend the user's last message, all of it makes none.
    """
    whole = extend_prompt(prompt, said)
    if said and not isinstance(whole.text, str) and not ends_with_assistant(whole.text):
        num_given = sum(mine is given for mine, given in zip(whole.text, prompt.text, strict=False))
        return whole, rendered_tokens(tokenizer, whole.text, tools, num_given)
    if not said or not isinstance(whole.text, str):
        return whole, tuple(encode_prompt(tokenizer, whole, tools))
    # Plain text stands between what the tokenizer puts around every text
    text = readable(whole.text)
    ids = encode_prompt(tokenizer, replace(whole, text=text))
    bare = tokenizer(text, add_special_tokens=False)["input_ids"]
    start = next(place for place in range(len(ids)) if ids[place : place + len(bare)] == bare)
    honest = unforged_tokens(tokenizer, Rendered(text, (Foreign(len(prompt.text), len(text)),)))
    return whole, (*ids[:start], *honest, *ids[start + len(bare) :])


def rendered_tokens(
    tokenizer: PreTrainedTokenizerBase, conversation: Sequence[Message], tools: Tools = (), num_given: int | None = None
) -> tuple[int, ...]:
    """Render a conversation with the next turn's opening, for `history=template`.

    The first `num_given` messages are the prompt's (None: those before the assistant's first). In later
    messages, the environment's words make no marks at all, and the policy's no special tokens. ValueError as in
    `observed_tokens`.
    """
    first = next((i for i, message in enumerate(conversation) if message["role"] == "assistant"), len(conversation))
    given = conversation[: first if num_given is None else num_given]
    rendered = locate(lambda since: _render(tokenizer, (*given, *since), tools), conversation[len(given) :])
    return unforged_tokens(tokenizer, rendered)


def _render(tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message], tools: Tools, opens: bool = True) -> str:
    """Render messages, with the next turn's opening if asked."""
    given = [with_content(message) for message in messages]
    shown: list[Any] | None = [dict(tool) for tool in tools] or None
    with refused_by_template(given):
        return str(tokenizer.apply_chat_template(given, tools=shown, add_generation_prompt=opens, tokenize=False))


def roles_are_marks(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Return True if the template marks roles by unforgeable tokens.

    False where roles are plain text, as Llama 2 writes [INST]: an environment could then speak for the policy.
    """
    talk: tuple[Message, ...] = ({"role": "user", "content": "a"}, {"role": "assistant", "content": "b"})
    rendered = _rendered_after(tokenizer, talk[:1], ({"role": "user", "content": "c"},), ())
    opening = rendered.text[rendered.foreign[-1].end :] if rendered.foreign else rendered.text
    ids = tokenizer(opening, add_special_tokens=False)["input_ids"]
    return any(token in marks(tokenizer, len(tokenizer))[1] for token in ids)


def turn_seed(seed: int, sample_index: int, turn: int) -> int:
    """Return the seed of a later turn from the first turn's."""
    digest = hashlib.blake2b(f"{seed}/turn {turn}/{sample_index}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def known_ids(tokenizer: PreTrainedTokenizerBase, ids: tuple[int, ...]) -> tuple[int, ...]:
    """Return a program's tokens. ValueError for none or unknown ones."""
    if not ids:
        raise ValueError("a policy needs at least one token to continue, got none")
    wrong = [token for token in ids if not (isinstance(token, Integral) and 0 <= token < len(tokenizer))]
    if wrong:
        raise ValueError(f"token {wrong[0]!r:.60} is none of the {len(tokenizer)} of the tokenizer")
    return ids


def decode_tokens(tokenizer: PreTrainedTokenizerBase, token_ids: Sequence[int], with_special: bool = False) -> str:
    """Return the text of tokens, without special tokens unless asked for."""
    return str(tokenizer.decode(list(token_ids), skip_special_tokens=not with_special))


def to_judge(tokenizer: PreTrainedTokenizerBase, completion: Completion) -> str:
    """Return a completion's text, marked if cut."""
    text = decode_tokens(tokenizer, completion.token_ids)
    return CutText(text) if completion.finish_reason == "length" else text
