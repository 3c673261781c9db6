"""Stop strings over pieces of text that don't end where tokens do."""

import random
from collections.abc import Sequence

import pytest
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from covey.engine.native.stops import Decode, QuietTokens, StopText
from covey.policy.models.nano import nano_tokenizer

BYTES = nano_tokenizer()


def decode(token_ids: Sequence[int]) -> str:
    return BYTES.decode(list(token_ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)


def stops_at(token_ids: Sequence[int], stop: Sequence[str]) -> int | None:
    """How many tokens there are when a stop string is complete."""
    return first_complete(token_ids, stop, decode)


def first_complete(token_ids: Sequence[int], stop: Sequence[str], decode: Decode) -> int | None:
    """The same however it is looked for: at each token, or not at those that are quiet."""
    found = []
    for quiet in ((), QuietTokens(stop, decode)):
        watcher = StopText(stop, decode, quiet)
        lengths = range(1, len(token_ids) + 1)
        found.append(next((n for n in lengths if watcher.completed_by_last(token_ids[:n])), None))
    assert found[0] == found[1]
    return found[0]


@pytest.mark.parametrize(
    ("text", "stop", "tokens"),
    [
        ("abc</answer>xyz", ("</answer>",), 12),
        ("aaab", ("aab",), 4),
        ("one two", ("three",), None),
        ("x\n\ny", ("\n\n", "y"), 3),
        ("x", ("x",), 1),
        ("gr\u00fc\u00dfe.", ("\u00fc\u00df",), 6),
        ("\u65e5\u672c\u8a9e", ("\u672c",), 6),
        ("\u65e5\u672c\u8a9e", ("\u672c\u8a9e",), 9),
    ],
)
def test_the_token_that_completes_a_stop_string_is_found(text: str, stop: tuple[str, ...], tokens: int | None) -> None:
    assert stops_at(BYTES.encode(text, add_special_tokens=False), stop) == tokens


def test_special_tokens_can_be_stop_strings() -> None:
    token_ids = BYTES.encode("ab", add_special_tokens=False) + BYTES.encode("</turn>", add_special_tokens=False)
    assert len(token_ids) == 3
    assert stops_at(token_ids, ("</turn>",)) == 3


def test_bytes_that_are_no_characters_do_not_hide_what_follows() -> None:
    lone_continuation = BYTES.encode("\u00fc", add_special_tokens=False)[1]
    token_ids = [lone_continuation] * 50 + BYTES.encode("end", add_special_tokens=False)
    assert stops_at(token_ids, ("end",)) == 53


def test_long_completions_are_decoded_in_a_short_window() -> None:
    longest = 0

    def watched(token_ids: Sequence[int]) -> str:
        nonlocal longest
        longest = max(longest, len(token_ids))
        return decode(token_ids)

    watcher = StopText(("never",), watched)
    token_ids = BYTES.encode("some text " * 100, add_special_tokens=False)
    for length in range(1, len(token_ids) + 1):
        watcher.completed_by_last(token_ids[:length])
    assert longest <= 3


def sentencepiece_like() -> PreTrainedTokenizerFast:
    """Words carry their leading space, which decoding drops at the start; bytes are tokens of last resort."""
    words = ["<unk>", "\u2581the", "\u2581end", "the", "<0xE2>", "<0x82>", "<0xAC>", "."]
    model = models.BPE({word: index for index, word in enumerate(words)}, [], byte_fallback=True, unk_token="<unk>")
    tokenizer = Tokenizer(model)
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


@pytest.mark.parametrize(
    ("token_ids", "stop", "tokens"),
    [
        ([1, 2, 7], ("the end",), 2),
        ([3, 1, 2, 7], ("the the end.",), 4),
        ([1, 2, 7], ("theend",), None),
        ([1, 4, 5, 6, 2], ("\u20ac end",), 5),
        ([1, 4, 5, 6], ("\u20ac",), 4),
    ],
)
def test_leading_spaces_and_byte_fallback_survive_incremental_decoding(
    token_ids: list[int], stop: tuple[str, ...], tokens: int | None
) -> None:
    pieces = sentencepiece_like()
    shown = first_complete(token_ids, stop, lambda ids: pieces.decode(list(ids), clean_up_tokenization_spaces=False))
    assert shown == tokens


@pytest.mark.parametrize("stop", [("</answer>",), (" ab", "ba "), ("aa",), ("b a", "c")])
def test_any_tokens_stop_where_they_would_if_all_were_looked_at(stop: tuple[str, ...]) -> None:
    draw = random.Random(3)
    pieces = ["a", "b", " ", "c", "</", "answer", ">", "\u00fc", "x"]
    for _ in range(200):
        text = "".join(draw.choice(pieces) for _ in range(30))
        stops_at(BYTES.encode(text, add_special_tokens=False), stop)


def test_tokens_that_have_nothing_in_common_with_a_stop_string_are_decoded_once() -> None:
    asked: list[int] = []

    def watched(token_ids: Sequence[int]) -> str:
        asked.append(len(token_ids))
        return decode(token_ids)

    token_ids = BYTES.encode("0123456789" * 30, add_special_tokens=False)
    watcher = StopText(("</answer>",), watched, QuietTokens(("</answer>",), watched))
    assert not any(watcher.completed_by_last(token_ids[:length]) for length in range(1, len(token_ids) + 1))
    assert asked == [1] * 10
