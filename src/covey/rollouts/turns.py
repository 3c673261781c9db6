"""Write what lies between two turns of a conversation as tokens.

Sampled tokens are never tokenised again: the environment's words, and what the chat template puts around them, are
appended to the tokens as they were sampled.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace

from transformers import PreTrainedTokenizerBase

from covey.environments.base import split_prefill
from covey.types import Completion, Message, Prompt

MAX_TURNS = 2
"""Turns of the policy in one conversation."""
PLACE = "(here stands what was sampled)"
"""Stands for the policy's last turn while the template is asked what follows it."""


@dataclass(frozen=True, slots=True)
class Turn:
    """Hold what the policy sampled in one go, and what it was told before.

    >>> Turn((7, 9), Completion((8, 2), (-0.1, -0.2), "stop", policy_version=3), "8", {"role": "user", "content": "no"})
    """

    reply_ids: tuple[int, ...]
    """The environment's tokens since the turn before; empty in the first one."""
    completion: Completion
    text: str = ""
    """The completion, decoded without special tokens."""
    reply: Message | None = None
    """The same as `reply_ids` as the environment said it; None in the first turn."""

    @property
    def token_ids(self) -> tuple[int, ...]:
        """Return all tokens of the turn, the environment's first."""
        return (*self.reply_ids, *self.completion.token_ids)


def messages_of(turns: Sequence[Turn]) -> tuple[Message, ...]:
    """Return what policy and environment said since the prompt."""
    messages: list[Message] = []
    for turn in turns:
        if turn.reply is not None:
            messages.append(turn.reply)
        messages.append({"role": "assistant", "content": turn.text})
    return tuple(messages)


def messages_so_far(prompt: Prompt, turns: Sequence[Turn]) -> tuple[Message, ...]:
    """Return the conversation from its first message to the policy's last answer."""
    asked = ({"role": "user", "content": prompt.text},) if isinstance(prompt.text, str) else prompt.text
    opening, begun = split_prefill(asked)
    first, *later = messages_of(turns)
    return (*opening, {"role": "assistant", "content": begun + first["content"]}, *later)


def reply_tokens(
    tokenizer: PreTrainedTokenizerBase, prompt: Prompt, turns: Sequence[Turn], reply: Message
) -> tuple[int, ...]:
    """Return the tokens from the end of the last sampled turn to the begin of the next one.

    With plain text that is what the reply says. With messages it is what the chat template puts there; where that
    begins with the stop token that was sampled, it is not said twice. ValueError where a template drops the turn.
    """
    if isinstance(prompt.text, str):
        return tuple(tokenizer(reply["content"], add_special_tokens=False)["input_ids"])
    # Render the conversation with a mark for the last turn: what follows the mark is the template's.
    marked = (*turns[:-1], replace(turns[-1], text=PLACE))
    conversation = [dict(message) for message in (*messages_so_far(prompt, marked), reply)]
    rendered = str(tokenizer.apply_chat_template(conversation, add_generation_prompt=True, tokenize=False))
    _, place, tail = rendered.rpartition(PLACE)
    if not place:
        raise ValueError("the chat template drops the assistant's turn, so no further turn can follow it")
    # Leave out a stop token that is there already.
    ids = tuple(tokenizer(tail, add_special_tokens=False)["input_ids"])
    sampled = turns[-1].completion.token_ids
    return ids[1:] if sampled and ids[:1] == sampled[-1:] else ids


def turn_seed(seed: int, sample_index: int, turn: int) -> int:
    """Return the seed of a sample's turn (2, 3, ...), a pure function of the first turns' seed and these numbers."""
    digest = hashlib.blake2b(f"{seed}/turn {turn}/{sample_index}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1
