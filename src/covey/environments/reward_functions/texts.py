"""The policy's text in any trainer's form."""

from collections.abc import Mapping, Sequence
from typing import Any

Completion = str | Sequence[Mapping[str, Any]]
"""Text, or the messages the policy added to a conversation."""


def final_text(completion: Completion) -> str:
    """Return the text, or the assistant's last message.

    >>> final_text("4"), final_text([{"role": "assistant", "content": "4"}])
    ('4', '4')
    """
    if isinstance(completion, str):
        return completion
    written = [
        message.get("content") or "" for message in completion if message.get("role", "assistant") == "assistant"
    ]
    return str(written[-1]) if written else ""
