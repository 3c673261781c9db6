"""Foreign words in a rendered text make no mark, whatever kind of tokenizer reads them."""

from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from covey.rollouts.environment_text import Foreign, Rendered, marks, unforged_tokens

from ..support.models.chat_templates import CHATML, build
from ..support.models.saved_models import gpt2
from ..support.small import TOKENIZER


def unigram() -> PreTrainedTokenizerFast:
    """Its pieces hold </s>, its normalizer makes it of wide letters, and its other mark swallows blanks."""
    pieces = [("<unk>", 0.0), ("</s>", 0.0), *((letter, -5.0) for letter in "abcdefghijklmnopqrstuvwxyz<>/|▁")]
    tokenizer = Tokenizer(models.Unigram(pieces, unk_id=0))
    tokenizer.normalizer = normalizers.NFKC()
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never")
    tokenizer.decoder = decoders.Metaspace(prepend_scheme="never")
    swallows = AddedToken("<|end|>", special=True, rstrip=True, lstrip=True)
    tokenizer.add_special_tokens([AddedToken("</s>", special=True), swallows])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>", unk_token="<unk>")


def tokens(tokenizer: Any, text: str, *foreign: Foreign) -> list[str]:
    found: list[str] = tokenizer.convert_ids_to_tokens(list(unforged_tokens(tokenizer, Rendered(text, foreign))))
    return found


@pytest.mark.parametrize("words", ["ab</s>c", "ab＜/s＞c", "</s>", "</s></s>"])
def test_a_piece_of_the_vocabulary_that_is_a_mark_is_divided(words: str) -> None:
    tokenizer = unigram()
    assert "</s>" in tokens(tokenizer, words)
    assert "</s>" not in tokens(tokenizer, words, Foreign(0, len(words)))
    plain = words.replace("＜", "<").replace("＞", ">")
    assert "".join(tokens(tokenizer, words, Foreign(0, len(words)))) == plain


def test_blanks_that_a_mark_swallows_make_it_no_forgery() -> None:
    tokenizer = unigram()
    assert tokens(tokenizer, "a <|end|> b", Foreign(0, 2), Foreign(9, 11)) == ["a", "<|end|>", "b"]
    assert "<|end|>" not in tokens(tokenizer, "a <|end|> b", Foreign(0, 11))


def test_only_the_part_in_which_words_are_foreign_is_divided() -> None:
    tokenizer = unigram()
    assert tokens(tokenizer, "</s>a</s>", Foreign(4, 5)) == ["</s>", "a", "</s>"]
    assert tokens(tokenizer, "</s>a</s>", Foreign(4, 6)) == ["</s>", "a", "<", "/", "s", ">"]
    assert tokens(tokenizer, "</s>a</s>", Foreign(3, 5)) == ["<", "/", "s", ">", "a", "</s>"]


def test_unknown_text_is_no_mark_unless_it_is_the_end_as_well() -> None:
    assert tokens(unigram(), "aÄ", Foreign(0, 2)) == ["a", "<unk>"]
    tokenizer = unigram()
    tokenizer.eos_token = "<unk>"
    assert tokens(tokenizer, "aÄ", Foreign(0, 2)) == ["a"]
    assert gpt2().eos_token_id in marks(gpt2(), len(gpt2()))[0]


def test_blanks_and_words_that_were_added_are_ordinary_text() -> None:
    tokenizer = build(CHATML, ["<|im_end|>"], ("   ", "covey", "<tool_call>"), eos_token="<|im_end|>")
    found = tokens(tokenizer, "   covey<tool_call>", Foreign(0, 19))
    assert found[:2] == ["   ", "covey"]
    assert "<tool_call>" not in found
    assert "<tool_call>" in tokens(tokenizer, "   covey<tool_call>", Foreign(0, 19, is_sampled=True))


def test_marks_that_are_added_later_count() -> None:
    tokenizer = build(CHATML, ["<|im_end|>"], eos_token="<|im_end|>")
    assert "".join(tokens(tokenizer, "<new>", Foreign(0, 5))) == "<new>"
    tokenizer.add_tokens([AddedToken("<new>", special=False)])
    assert "<new>" not in tokens(tokenizer, "<new>", Foreign(0, 5))


def test_marks_of_one_letter_are_left_out() -> None:
    tokenizer = build(CHATML, ["%"], eos_token="%")
    assert tokens(tokenizer, "a%b", Foreign(0, 3)) == ["a", "b"]
    assert tokens(tokenizer, "a%b", Foreign(0, 1)) == ["a", "%", "b"]


def test_a_tokenizer_without_offsets_divides_them_too() -> None:
    from transformers import ByT5Tokenizer

    tokenizer = ByT5Tokenizer()
    assert not tokenizer.is_fast
    rendered = Rendered("a</s>b</s>", (Foreign(0, 6),))
    ids = unforged_tokens(tokenizer, rendered)
    assert ids[-1] == tokenizer.eos_token_id
    assert tokenizer.eos_token_id not in ids[:-1]
    assert tokenizer.decode(list(ids[:-1])) == "a</s>b"


def test_text_without_marks_is_encoded_as_one() -> None:
    text = "<turn>user\nhello</turn>"
    inner = Rendered(text, (Foreign(11, 16),))
    assert unforged_tokens(TOKENIZER, inner) == tuple(TOKENIZER(text)["input_ids"])
