"""What stands between two turns of a conversation, as tokens.

Sampled tokens are never tokenised again: the environment's words, and what the chat template puts around them, are
appended to the tokens as they were sampled.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from covey.environments.base import split_prefill
from covey.types import Completion, Message, Prompt

PLACE = "(here stands what was sampled)"
"""Stands for the policy's turn while the template is asked what follows it."""


@dataclass(frozen=True, slots=True)
class Turn:
    """What the policy sampled in one go, and what it was told before.

    >>> Turn(reply_ids=(7, 9), completion=Completion((8, 2), (-0.1, -0.2), "stop", policy_version=3))
    """

    reply_ids: tuple[int, ...]
    """The environment's tokens since the turn before; empty in the first one."""
    completion: Completion
    reply: Message | None = None
    """The same as the environment said it; None in the first turn."""


def messages_so_far(prompt: Prompt, text: str) -> tuple[Message, ...]:
    """Return the conversation with the policy's first answer at its end."""
    messages = ({"role": "user", "content": prompt.text},) if isinstance(prompt.text, str) else prompt.text
    opening, begun = split_prefill(messages)
    return (*opening, {"role": "assistant", "content": begun + text})


def reply_tokens(
    tokenizer: PreTrainedTokenizerBase, prompt: Prompt, sampled: Sequence[int], reply: Message
) -> tuple[int, ...]:
    """The tokens from the end of a sampled turn to the begin of the next one.

    With plain text that is what the reply says. With messages it is what the chat template puts there; where that
    begins with the stop token that was sampled, it is not said twice. ValueError where a template drops the turn.
    """
    if isinstance(prompt.text, str):
        return tuple(tokenizer(reply["content"], add_special_tokens=False)["input_ids"])
    conversation = [dict(message) for message in (*messages_so_far(prompt, PLACE), reply)]
    rendered = str(tokenizer.apply_chat_template(conversation, add_generation_prompt=True, tokenize=False))
    _, place, tail = rendered.rpartition(PLACE)
    if not place:
        raise ValueError("the chat template drops the assistant's turn, so no second turn can follow it")
    ids = tuple(tokenizer(tail, add_special_tokens=False)["input_ids"])
    return ids[1:] if sampled and ids[:1] == tuple(sampled[-1:]) else ids


def turn_seed(seed: int, sample_index: int) -> int:
    """The seed of a sample's next turn, a pure function of the seed of the first turns and the sample's index."""
    digest = hashlib.blake2b(f"{seed}/turn 2/{sample_index}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1
