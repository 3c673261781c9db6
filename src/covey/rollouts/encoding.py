"""Encode prompts: plain text as it is, messages by the chat template."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from covey.environments.base import ends_with_assistant, text_of, with_content
from covey.types import Message, Prompt

Tools = Sequence[Mapping[str, Any]]
"""JSON schemas of the functions that a chat template shows the policy."""


def encode_prompt(tokenizer: PreTrainedTokenizerBase, prompt: Prompt, tools: Tools = ()) -> list[int]:
    """Return a prompt's token ids, messages by the chat template.

    A conversation with a begun answer is continued; else the template opens the answer.
    """
    if isinstance(prompt.text, str):
        ids: Any = _text_ids(tokenizer, prompt.text)
    else:
        if tokenizer.chat_template is None:
            raise ValueError(f"prompt {prompt.id} holds messages, but the model's tokenizer has no chat template")
        goes_on = ends_with_assistant(prompt.text)
        with refused_by_template(prompt.text):
            ids = tokenizer.apply_chat_template(
                [with_content(message) for message in prompt.text],
                tools=[dict(tool) for tool in tools] or None,
                add_generation_prompt=not goes_on,
                continue_final_message=goes_on,
                return_dict=False,
            )
    if not ids:
        raise ValueError(f"prompt {prompt.id} is empty; a policy needs at least one token to continue")
    return list(ids)


def _text_ids(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Return the tokens of a text, begun and left open.

    A rendered text brings its beginning along. Some tokenizers end each text, which a policy would continue after.
    """
    is_rendered = bool(tokenizer.bos_token) and text.startswith(str(tokenizer.bos_token))
    ids = list(tokenizer(text, add_special_tokens=not is_rendered)["input_ids"])
    is_ended = ids[-1:] == [tokenizer.eos_token_id] and not text.endswith(str(tokenizer.eos_token))
    return ids[:-1] if is_ended and tokenizer.mask_token_id not in ids else ids


@contextmanager
def refused_by_template(messages: Sequence[Message]) -> Iterator[None]:
    """Raise ValueError where a chat template raises."""
    try:
        yield
    except (TemplateError, TypeError, KeyError, RecursionError) as error:
        roles = ", ".join(dict.fromkeys(message["role"] for message in messages))
        said = " ".join(str(error).split())
        raise ValueError(f"the chat template refuses a conversation of the roles {roles}: {said}") from error


def as_conversation(text: str | Sequence[Message]) -> tuple[Message, ...]:
    """Return a prompt as messages: plain text is the user's."""
    return ({"role": "user", "content": text},) if isinstance(text, str) else tuple(text)


def extend_prompt(prompt: Prompt, said: str | Sequence[Message]) -> Prompt:
    """Return the prompt extended by an episode's opening.

    >>> extend_prompt(Prompt("p", "guess", "?", {}), " 0 to 31").text
    '? 0 to 31'
    """
    if not said:
        return prompt
    if isinstance(prompt.text, str):
        added = said if isinstance(said, str) else "".join(map(text_of, said))
        return replace(prompt, text=prompt.text + added)
    if not isinstance(said, str):
        return replace(prompt, text=(*prompt.text, *said))
    *before, last = prompt.text
    if last["role"] != "user":
        return replace(prompt, text=(*prompt.text, {"role": "user", "content": said}))
    return replace(prompt, text=(*before, {**last, "content": text_of(last) + said}))
