"""Prompts of a user's rows: text or conversation, checked."""

import logging
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from covey.environments.base import Split, ends_with_assistant, is_message, text_of
from covey.environments.data.columns import as_messages
from covey.types import Message, Prompt

LOGGER = logging.getLogger(__name__)

Row = Mapping[str, Any]

ROLES = ("system", "developer", "user", "assistant", "tool")
"""Roles of a conversation. Many chat templates drop the words of any other without a sound."""
SPELLED_MESSAGES = re.compile(r"""\s*\[\s*\{\s*(["'])(?:role|content)\1\s*:\s*["']""")
"""Begin of messages as text, in JSON or as a table of CSV spells Python's."""


@dataclass(frozen=True, slots=True)
class PromptFormat:
    """The place of a row's prompt, and of its begun answer."""

    column: str = "prompt"
    answer_column: str | None = None
    prefill: bool = False
    said: str = "data.answer_column=NAME moves it into a column, data.prefill=true has the policy continue it"
    """Remedy for an answer at the end."""

    def read(self, row: Row) -> Row:
        """Return the row with a checked prompt, its answer moved if asked.

        ValueError describes the prompt's error, without the place of the row.
        """
        if not isinstance(row, Mapping):
            raise ValueError(f"must be a mapping of columns, got {row!r:.80}")
        if self.column not in row:
            raise ValueError(f"has no column {self.column!r} (has: {', '.join(row)})")
        prompt = row[self.column]
        if isinstance(prompt, str):
            _check_text(prompt)
            return row
        messages = _conversation(prompt)
        if ends_with_assistant(messages) and not self.prefill:
            return self._without_answer(row, messages)
        return {**row, self.column: messages}

    def check_use(self, rows: Iterable[Row]) -> None:
        """Refuse a setting that no row needs."""
        if self.prefill and not any(_goes_on(row[self.column]) for row in rows):
            raise ValueError("data.prefill=true needs a conversation that ends with the assistant's message, got none")
        if self.answer_column is not None and not any(row.get(self.answer_column) is not None for row in rows):
            raise ValueError(
                f"data.answer_column={self.answer_column} needs a conversation that ends with the assistant's message, "
                "got none"
            )

    def _without_answer(self, row: Row, messages: list[dict[str, Any]]) -> Row:
        """Return the row with its assistant's last message as answer column."""
        if self.answer_column is None:
            raise ValueError(f"has a prompt that ends with the assistant's message ({self.said})")
        if row.get(self.answer_column) is not None:
            raise ValueError(
                f"has an answer at the end of its prompt and one in column {self.answer_column!r}; "
                "name another data.answer_column"
            )
        *rest, answer = messages
        if not rest or rest[-1]["role"] == "assistant":
            raise ValueError("has a prompt in which nobody speaks before the assistant's last message")
        return {**row, self.column: rest, self.answer_column: text_of(answer)}


def _goes_on(prompt: Any) -> bool:
    return not isinstance(prompt, str) and ends_with_assistant(prompt)


def _check_text(prompt: str) -> None:
    if not prompt:
        raise ValueError("has an empty prompt")
    if SPELLED_MESSAGES.match(prompt):
        raise ValueError("has a prompt of text that spells a list of messages; give the list itself, as in JSON lines")


def _conversation(prompt: Any) -> list[dict[str, Any]]:
    """Return a prompt's messages as dictionaries. ValueError."""
    prompt = as_messages(prompt)
    if not isinstance(prompt, Sequence) or not all(isinstance(m, Mapping) and "role" in m for m in prompt):
        raise ValueError(
            f"has a prompt that must be text or a list of messages with role and content, got {prompt!r:.80}"
        )
    if not prompt:
        raise ValueError("has an empty prompt")
    messages = [_message(message) for message in prompt]
    if not any(text_of(message).strip() for message in messages):
        raise ValueError("has an empty prompt")
    return messages


def _message(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return a message without the null keys of tables."""
    # Data sets give absent keys as null
    message = {key: value for key, value in given.items() if value is not None}
    role = message["role"]
    if role not in ROLES:
        raise ValueError(f"has a prompt with the unknown role {role!r} (known: {', '.join(ROLES)})")
    if not is_message(message):
        content = message.get("content")
        what = "has no content" if content is None else f"has content that is no text: {content!r:.60}"
        raise ValueError(f"has a prompt in which the {role}'s message {what}")
    return message if "content" in message else {**message, "content": ""}


def prompts_of(split: Split, rows: Sequence[Row], columns: Sequence[str], how: PromptFormat) -> tuple[Prompt, ...]:
    """Return a prompt per row, missing columns as None."""
    others = [name for name in columns if name != how.column]
    return tuple(
        Prompt(
            id=f"{split}-{index}",
            environment="reward_functions",
            text=_text(row, how, f"{split} row {index}"),
            columns={name: row.get(name) for name in others},
        )
        for index, row in enumerate(rows)
    )


def _text(row: Row, how: PromptFormat, place: str) -> str | tuple[Message, ...]:
    try:
        prompt = how.read(row)[how.column]
    except ValueError as error:
        raise ValueError(f"{place} {error}") from error
    return prompt if isinstance(prompt, str) else tuple(prompt)


def warn_of_silent_users(prompts: Mapping[Split, Sequence[Prompt]]) -> None:
    """Warn of conversations that end with an instruction."""
    spoken = [p for of_split in prompts.values() for p in of_split if not isinstance(p.text, str)]
    instructed = [p for p in spoken if p.text[-1]["role"] in ("system", "developer")]  # type: ignore[index]
    if instructed:
        text = "prompts that end with a system message, so that no user asks anything: %d, first: %s"
        LOGGER.warning(text, len(instructed), instructed[0].id)
