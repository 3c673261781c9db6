"""Texts to fill in: the language, what is masked, what is judged."""

import asyncio
import random
from collections.abc import Sequence
from dataclasses import replace
from operator import itemgetter
from pathlib import Path
from typing import Any

import pytest

from covey.environments.data.rows import RowSettings
from covey.policy.models.nano import nano_masked_tokenizer
from covey.types import Prompt, Reward
from covey_tasks.infill.environment import (
    GRAMMAR,
    NOT_TEXT,
    Infill,
    Rule,
    gap_reference,
    make_prompts,
    written,
)
from covey_tasks.infill.grammar import is_sentence, sentence, sentences
from covey_tasks.infill.settings import InfillConfig
from covey_tasks.infill.texts import MASKINGS, Masker, Texts, load_texts, num_masked

TOKENIZER = nano_masked_tokenizer()
ROWS = RowSettings()


class FakeJudge:
    """Likes short texts, and notes what it was asked."""

    is_frozen = True

    def __init__(self) -> None:
        self.asked: list[str] = []

    async def scores(self, texts: Sequence[str]) -> list[float]:
        self.asked += texts
        return [1 / (1 + len(text)) for text in texts]


def masker(masking: str = "random", window: int = 64) -> Masker:
    return Masker(TOKENIZER, window, masking, 4)


def prompt_of(text: str, *places: int) -> Prompt:
    masked = "".join("<mask>" if place in places else letter for place, letter in enumerate(text))
    hidden = tuple(TOKENIZER(text[place])["input_ids"][0] for place in places)
    columns = {"input_ids": tuple(TOKENIZER(masked)["input_ids"]), "hidden": hidden, "ratio": 0.3}
    return Prompt("p", "infill", masked, columns)


def infill(**monitors: Any) -> Infill:
    made: Any = FakeJudge()
    return Infill({"train": [], "test": []}, TOKENIZER, made, monitors, {})


def ids_of(text: str) -> tuple[int, ...]:
    return tuple(TOKENIZER(text)["input_ids"])


# ------------------------------------------------------------------------------------------------ the language


def test_what_the_grammar_makes_it_accepts() -> None:
    chance = random.Random(3)
    drawn = [sentence(chance) for _ in range(3000)]
    assert all(is_sentence(text) for text in drawn)
    assert len(set(drawn)) > 1500


@pytest.mark.parametrize(
    "text",
    [
        "a owl sings.",
        "an cat sings.",
        "the cats sings.",
        "the cat sing.",
        "two cat sing.",
        "the old cat sings",
        "the old cat sings. ",
        "the cat sees.",
        "the cat sleeps the dog.",
        "the  cat sings.",
        "this cats sing.",
        "the cat see the dog.",
        "",
        ".",
    ],
)
def test_anything_else_is_no_sentence(text: str) -> None:
    assert not is_sentence(text)


def test_one_wrong_letter_is_hardly_ever_a_sentence() -> None:
    chance = random.Random(4)
    wrong = 0
    for text in (sentence(chance) for _ in range(500)):
        place = chance.randrange(len(text))
        changed = text[:place] + chance.choice("abcdefghijklmnopqrstuvwxyz .") + text[place + 1 :]
        wrong += is_sentence(changed) and changed != text
    assert wrong < 25


def test_the_sentences_of_both_splits_are_different_ones() -> None:
    train, test = sentences(800, "x", held_out=False), sentences(200, "x", held_out=True)
    assert len(set(train)) == 800
    assert set(train).isdisjoint(test)
    assert sentences(800, "x", held_out=False) == train


# ------------------------------------------------------------------------------------------------ masking


@pytest.mark.parametrize("name", MASKINGS)
def test_a_strategy_masks_an_exact_number_of_tokens_by_seed(name: str) -> None:
    for seed in range(50):
        found = MASKINGS[name](30, 9, 4, random.Random(seed))
        assert len(set(found)) == 9
        assert found == sorted(found)
        assert 0 <= found[0] <= found[-1] < 30
        assert found == MASKINGS[name](30, 9, 4, random.Random(seed))


def test_spans_are_stretches() -> None:
    def stretches(places: Sequence[int]) -> int:
        return sum(place - 1 not in places for place in places)

    spans = [stretches(MASKINGS["spans"](60, 12, 4, random.Random(seed))) for seed in range(100)]
    single = [stretches(MASKINGS["random"](60, 12, 4, random.Random(seed))) for seed in range(100)]
    assert sum(spans) / 100 < 5 < 8 < sum(single) / 100


def test_at_least_one_token_is_masked_and_one_is_seen() -> None:
    assert [num_masked(length, ratio) for length, ratio in ((2, 0.01), (2, 0.99), (10, 0.25), (10, 0.3))] == [
        1,
        1,
        2,
        3,
    ]


def test_a_masked_text_tells_what_stood_in_its_gaps() -> None:
    masked = masker().mask("the old cat sleeps.", 0.3, "seed")
    assert masked is not None
    assert masked.text.count("<mask>") == len(masked.hidden) == 6
    fills = iter(masked.hidden)
    ids = [next(fills) if i == TOKENIZER.mask_token_id else i for i in ids_of(masked.text)]
    assert TOKENIZER.decode(ids) == "the old cat sleeps."
    assert masker().mask("the old cat sleeps.", 0.3, "seed") == masked
    assert masker().mask("the old cat sleeps.", 0.3, "other") != masked


def test_a_text_that_names_the_mask_token_is_left_out() -> None:
    assert masker().mask("the cat <mask> sat", 0.2, "seed") is None
    assert masker().mask("the cat <pad> sat", 0.2, "seed") is not None


def test_a_character_of_several_bytes_is_masked_whole() -> None:
    for seed in range(20):
        masked = masker().mask("é€", 0.5, str(seed))
        assert masked is not None
        assert masked.text in ("<mask><mask>€", "é<mask><mask><mask>")


def test_a_text_is_cut_to_its_window_and_too_short_ones_are_skipped() -> None:
    assert masker(window=5).cut("abcdefgh") == "abcde"
    assert masker(window=3).cut("aéé") == "aé"
    assert masker().mask("a", 0.5, "") is None


# ------------------------------------------------------------------------------------------------ texts


def drawn(texts: Texts, split: Any = "train", count: int = 20) -> list[str]:
    return texts.draw(split, count, "seed")


def test_a_plain_text_file_is_cut_anywhere_and_its_end_is_held_out(tmp_path: Path) -> None:
    file = tmp_path / "play.txt"
    file.write_text("a" * 900 + "b" * 100)
    texts = load_texts(str(file), 4, ROWS)
    assert set(drawn(texts)) == {"a" * 32}
    assert set(drawn(texts, "test")) == {"b" * 32}
    assert drawn(texts) == drawn(texts)


def test_rows_have_a_column_of_text(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(f'{{"said": "row {n}"}}\n' for n in range(10)))
    texts = load_texts(str(file), 4, RowSettings(make=itemgetter("said"), test_fraction=0.2))
    assert len(set(drawn(texts))) == 8
    assert set(drawn(texts)).isdisjoint(drawn(texts, "test"))


def test_what_is_no_text_is_refused_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "short.txt").write_text("abc")
    (tmp_path / "bytes.txt").write_bytes(b"ab\xff" * 100)
    with pytest.raises(ValueError, match=r"short.txt has 3 characters, too few for environment.window=8 in each split"):
        load_texts(str(tmp_path / "short.txt"), 8, ROWS)
    with pytest.raises(ValueError, match=r"bytes.txt is not UTF-8 \(byte 2\)"):
        load_texts(str(tmp_path / "bytes.txt"), 8, ROWS)
    with pytest.raises(ValueError, match=r"data\.max_rows=3 needs data\.path with rows"):
        load_texts(str(tmp_path / "short.txt"), 8, RowSettings(max_rows=3))


@pytest.mark.shared
def test_shakespeare_makes_prompts_of_both_splits(shared: Path) -> None:
    texts = load_texts(str(shared / "data" / "text" / "tinyshakespeare.txt"), 64, ROWS)
    made = make_prompts(
        texts, masker("spans"), TOKENIZER, InfillConfig(mask_ratios=[0.1, 0.4], num_train=50, num_test=10)
    )
    assert [len(made["train"]), len(made["test"])] == [50, 10]
    assert {len(p.columns["input_ids"]) for p in made["train"]} == {64}
    assert [len(p.columns["hidden"]) for p in made["train"][:4]] == [6, 26, 6, 26]


# ------------------------------------------------------------------------------------------------ the environment


def test_prompts_are_the_same_each_time_and_say_how_hard_they_are() -> None:
    texts = load_texts(None, 64, ROWS)
    settings = InfillConfig(mask_ratios=[0.1, 0.5], num_train=6, num_test=4)
    first, again = (make_prompts(texts, masker(), TOKENIZER, settings) for _ in range(2))
    other = make_prompts(texts, masker(), TOKENIZER, replace(settings, problem_seed=1))
    assert first == again != other
    assert [infill().difficulty(prompt) for prompt in first["train"]] == [0.1, 0.5] * 3
    assert all(is_sentence(infill().completed(p, p.columns["hidden"])) for p in first["train"])


def test_the_judge_reads_the_completed_text_and_the_watches_are_only_logged() -> None:
    environment = infill(grammar=GRAMMAR, length=Rule(len))
    prompt = prompt_of("a cat sings.", 0, 6)
    found = asyncio.run(environment.score_tokens(prompt, ["", ""], [ids_of("as"), ids_of("xy")]))
    assert environment._judge.asked == ["a cat sings.", "x cat yings."]  # type: ignore[attr-defined]
    first, second = found
    assert isinstance(first, Reward)
    assert isinstance(second, Reward)
    assert first.value == second.value == first.parts["judge"] == 1 / 13
    assert first.parts == {"judge": 1 / 13, "grammar": 1.0, "length": 12.0, "gap": 1 / 13 - 1}
    assert second.parts["grammar"] == 0.0


def test_the_judge_is_compared_with_the_exact_grammar_where_there_is_one() -> None:
    found = [gap_reference(names) for names in (("second_judge", "grammar"), ("ngram", "second_judge"), ("ngram",))]
    assert found == ["grammar", "second_judge", None]


def test_a_token_that_is_no_text_cannot_leave_a_letter_out() -> None:
    prompt = prompt_of("a cat sings.", 0, 6)
    pad, end = TOKENIZER.pad_token_id, TOKENIZER.eos_token_id
    assert infill().completed(prompt, (pad, end)) == f"{NOT_TEXT} cat {NOT_TEXT}ings."
    assert written(TOKENIZER, [pad, *ids_of("ab"), 10_000]) == f"{NOT_TEXT}ab{NOT_TEXT}"


def test_text_that_does_not_fill_the_gaps_is_judged_as_nothing() -> None:
    environment = infill()
    asyncio.run(environment.score(prompt_of("a cat sings.", 0, 6), ["as", "a", "asd"]))
    assert environment._judge.asked == ["a cat sings.", "", ""]  # type: ignore[attr-defined]


def test_what_stood_in_the_gaps_is_demonstrated() -> None:
    prompt = prompt_of("a cat sings.", 0, 6)
    environment = Infill({"train": [prompt], "test": []}, TOKENIZER, FakeJudge(), {}, {})  # type: ignore[arg-type]
    assert environment.demonstrations("train") == [(prompt, ids_of("as"))]
