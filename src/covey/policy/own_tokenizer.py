"""Wrap any two functions as a tokenizer of transformers."""

import re
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from typing import Any

from transformers import AddedToken, PreTrainedTokenizerBase

ENDS = ("eos_token_id", "eot_token", "eos_id", "end_id")
"""Names in tokenizers for the token that ends a text."""
BRACKETS = re.compile(r"[<\[{].+[>\]}]")
"""Marks of roles, such as <|user|> and [INST]."""


class OwnTokenizer(PreTrainedTokenizerBase):
    """Two functions: text to token ids, and back."""

    is_fast = False

    def __init__(
        self,
        encode: Callable[[str], Any],
        decode: Callable[[list[int]], str],
        end: int | None,
        size: int,
        template: str | None = None,
    ) -> None:
        super().__init__()
        vars(self).update(_encode=encode, _decode_ids=decode, _end=end, _size=size, chat_template=template)

    @cached_property
    def added_tokens_decoder(self) -> dict[int, AddedToken]:
        """Return the tokens in brackets that the chat template writes."""
        named = {number: text for number, text in self._known.items() if BRACKETS.fullmatch(text)}
        return {number: AddedToken(text, special=True) for number, text in named.items() if text in self._template}

    @property
    def _template(self) -> str:
        return self.chat_template or ""

    @property
    def eos_token_id(self) -> int | None:
        return vars(self)["_end"]

    @property
    def eos_token(self) -> str | None:
        return None if self.eos_token_id is None else self._text([self.eos_token_id])

    @property
    def pad_token_id(self) -> int:  # texts are padded with tokens of their own
        return self.eos_token_id or 0

    @property
    def all_special_ids(self) -> list[int]:
        return [] if self.eos_token_id is None else [self.eos_token_id]

    def __call__(self, text: Any, *_: object, **__: object) -> dict[str, Any]:
        """Return token ids of texts. ValueError where the function raises."""
        if not isinstance(text, str):
            return {"input_ids": [self(one)["input_ids"] for one in text]}
        try:
            found = vars(self)["_encode"](text)
            return {"input_ids": [int(number) for number in getattr(found, "ids", found)]}
        except Exception as error:  # foreign code
            said = " ".join(f"{type(error).__name__}: {error}".split())[:100]
            raise ValueError(f"the tokenizer's encode must take every prompt, {text[:40]!r} raises {said}") from error

    def decode(self, token_ids: Any, skip_special_tokens: bool = False, **_: object) -> str:
        """Return the text of those token ids that are known."""
        ids = [int(token_ids)] if isinstance(token_ids, int) else [int(number) for number in token_ids]
        ends = self.all_special_ids if skip_special_tokens else []
        return self._text([number for number in ids if number not in ends and number in self._known])

    @cached_property
    def _known(self) -> dict[int, str]:
        return dict(self._decodable())

    def get_vocab(self) -> dict[str, int]:
        """Return every token that the function can decode, named by its number."""
        return {f"{number}:{text}": number for number, text in self._known.items()}

    def __len__(self) -> int:
        return len(self._known)

    def save_pretrained(self, *_: object, **__: object) -> tuple[str, ...]:
        """Write nothing: functions stay with the program."""
        return ()

    def _text(self, ids: list[int]) -> str:
        return str(vars(self)["_decode_ids"](ids))

    def _decodable(self) -> Iterator[tuple[int, str]]:
        for number in range(vars(self)["_size"]):
            try:
                yield number, self._text([number])
            except Exception:  # foreign code: fewer tokens than logits
                continue


def own_tokenizer(given: Any, size: int) -> PreTrainedTokenizerBase:
    """Return a tokenizer of transformers as it is, or wrap two functions.

    `given` is a pair (encode, decode), with the number of the token that ends a text as third where there is one, or an
    object with these methods, and a `chat_template` where it has one, whose marks `encode` reads as tokens. `size`
    counts the logits.
    """
    if isinstance(given, PreTrainedTokenizerBase):
        return given
    if isinstance(given, Sequence) and not isinstance(given, str) and 2 <= len(given) <= 3:
        encode, decode, end = [*given, None][:3]
        template = None
    else:
        template = getattr(given, "chat_template", None)
        encode, decode = getattr(given, "encode", None), getattr(given, "decode", None)
        end = next((number for name in ENDS if (number := getattr(given, name, None)) is not None), None)
        end = end() if callable(end) else end
    if not callable(encode) or not callable(decode):
        raise ValueError(
            f"tokenizer must be (encode, decode), with the end token's number as third if there is one, or an object "
            f"with these methods, got {given!r:.80}"
        )
    return OwnTokenizer(encode, decode, end if end is None else int(end), size, template)
