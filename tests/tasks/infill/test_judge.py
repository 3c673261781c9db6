"""Judges: trained from corrupted text, kept by content, batched without a difference."""

import asyncio
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from transformers import BertConfig, BertForSequenceClassification, LlamaConfig, LlamaForSequenceClassification

from covey.config.schema import Config
from covey.policy.models.nano import nano_masked_tokenizer
from covey_tasks.infill import build as build_module
from covey_tasks.infill.build import Corruption, NgramModel
from covey_tasks.infill.judge import Judge
from covey_tasks.infill.judge_training import Pair, accuracy, ensure_judge
from covey_tasks.infill.settings import InfillConfig
from covey_tasks.infill.texts import MASKINGS

CPU = InfillConfig(judge_device="cpu")
SMALL: dict[str, Any] = {"judge_hidden_size": 16, "judge_num_layers": 1}
TEXTS = ["a cat.", "a much longer text than that.", "", "dogs"]


CHANGES: list[dict[str, Any]] = [
    {"judge_hidden_size": 32}, {"judge_num_layers": 2}, {"judge_num_steps": 3}, {"judge_pairs": 3}, {"judge_lr": 1e-3},
]  # fmt: skip
"""What makes another judge."""


def tiny(cache: Path) -> InfillConfig:
    """The smallest judge, trained for two steps."""
    return InfillConfig(**SMALL, judge_num_steps=2, judge_pairs=2, judge_cache_dir=str(cache))


def letters(count: int, chance: random.Random) -> list[Pair]:
    """Real texts are all a; corrupted ones have a b."""
    return [("a" * 8, "a" * place + "b" + "a" * (7 - place)) for place in (chance.randrange(8) for _ in range(count))]


def classifier(folder: Path, num_labels: int) -> str:
    tokenizer = nano_masked_tokenizer()
    torch.manual_seed(0)
    shape = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    config = BertConfig(vocab_size=len(tokenizer), num_labels=num_labels, max_position_embeddings=64, **shape)
    BertForSequenceClassification(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def test_a_decoder_whose_configuration_names_no_padding_judges_as_one_by_one(tmp_path: Path) -> None:
    tokenizer = nano_masked_tokenizer()
    shape = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=len(tokenizer), num_labels=1, num_key_value_heads=2, **shape)
    LlamaForSequenceClassification(config).save_pretrained(tmp_path)
    tokenizer.pad_token = None
    tokenizer.save_pretrained(tmp_path)
    judge = Judge(str(tmp_path), CPU)
    alone = [judge.score([text])[0] for text in TEXTS]
    assert judge.score(TEXTS) == pytest.approx(alone, abs=1e-6)
    assert len({round(score, 4) for score in alone}) == len(TEXTS)


def test_a_judge_that_reads_less_than_a_whole_text_is_refused(tmp_path: Path) -> None:
    judge = Judge(classifier(tmp_path, 1), CPU)
    judge.check_lengths(["a" * 64])
    with pytest.raises(ValueError, match=r"environment\.window needs a judge that reads 65 tokens, .* reads 64"):
        judge.check_lengths(["dogs", "a" * 65])
    (cut,) = judge.score(["a" * 70])  # what a policy writes may be longer than any real text
    assert cut == judge.score(["a" * 64])[0]


@pytest.mark.long
def test_a_judge_learns_to_rank_real_above_corrupted_text(tmp_path: Path) -> None:
    settings = InfillConfig(**SMALL, judge_num_steps=60, judge_pairs=16, judge_lr=1e-2, judge_cache_dir=str(tmp_path))
    judge = Judge(str(ensure_judge(settings, 0, letters, [])), CPU)
    assert accuracy(judge, letters(64, random.Random(1))) > 0.95
    assert judge.is_frozen


def test_a_trained_judge_is_kept_by_all_that_it_follows_from(tmp_path: Path) -> None:
    asked: list[int] = []

    def counted(count: int, chance: random.Random) -> list[Pair]:
        asked.append(count)
        return letters(count, chance)

    settings = tiny(tmp_path)
    first = ensure_judge(settings, 0, counted, ["texts"])
    assert asked == [2, 2]
    assert ensure_judge(settings, 0, counted, ["texts"]) == first
    assert asked == [2, 2]
    others = [
        ensure_judge(settings, 0, counted, ["other texts"]),
        ensure_judge(settings, 1, counted, ["texts"]),
        *(ensure_judge(replace(settings, **changed), 0, counted, ["texts"]) for changed in CHANGES),
    ]
    assert len({first, *others}) == 8
    assert ensure_judge(replace(settings, judge_batch_size=3, judge_floor=0.5), 0, counted, ["texts"]) == first
    assert sorted(path.name for path in tmp_path.iterdir() if ".tmp" in path.name) == []


def test_a_judge_that_cannot_decide_is_right_half_of_the_time() -> None:
    judge: Any = SimpleNamespace(score=lambda texts: [float(text) for text in texts])
    assert accuracy(judge, [("3", "1"), ("2", "2"), ("1", "2"), ("5", "5")]) == 0.5


def test_a_judge_is_measured_on_held_out_texts_and_may_meet_the_floor(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, int, int]] = []
    read: list[str] = []
    judge = SimpleNamespace(name="mine", check_lengths=read.extend)
    monkeypatch.setattr(build_module, "Judge", lambda name, how: judge)
    monkeypatch.setattr(build_module, "accuracy", lambda judge, pairs: 0.75)

    def pairs(split: str, seed: int) -> Any:
        return lambda count, chance: asked.append((split, seed, count)) or [("real", "corrupted")]

    material: Any = SimpleNamespace(settings=InfillConfig(judge_floor=0.75), pairs=pairs)
    assert build_module.judged(material, "mine", 4).accuracy == 0.75
    assert asked == [("test", 4, 256)]
    assert read == ["real"]
    material.settings.judge_floor = 0.76
    with pytest.raises(ValueError, match=r"^environment\.judge_floor=0\.76 needs a judge .*, mine ranks 75\.0%; "):
        build_module.judged(material, "mine", 4)


def test_the_second_judge_learns_from_a_seed_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, int]] = []

    def judged(material: Any, name: str, seed: int) -> build_module.Judged:
        asked.append((name, seed))
        return build_module.Judged(cast(Judge, SimpleNamespace(name=name)), 1.0)

    monkeypatch.setattr(build_module, "judged", judged)
    monkeypatch.setattr(build_module, "load_tokenizer", lambda model: nano_masked_tokenizer())
    settings = InfillConfig(judge="mine", monitors=["second_judge"], num_train=1, num_test=1)
    build_module.build_infill(settings, Config(seed=3), say=print)
    assert asked == [("mine", 6), ("nano-judge", 7)]


def test_the_same_seed_makes_the_same_judge(tmp_path: Path) -> None:
    scores = [Judge(str(ensure_judge(tiny(tmp_path / n), 0, letters, [])), CPU).score(TEXTS) for n in "ab"]
    assert scores[0] == scores[1]


@pytest.mark.parametrize("batch_size", [1, 3, 64])
def test_scores_do_not_depend_on_what_is_scored_beside_them(batch_size: int, tmp_path: Path) -> None:
    name = classifier(tmp_path, 1)
    alone = [Judge(name, CPU).score([text])[0] for text in TEXTS[:2]]
    judge = Judge(name, InfillConfig(judge_device="cpu", judge_batch_size=batch_size))
    assert judge.score(TEXTS[:2] * 3) == pytest.approx(alone * 3, abs=1e-6)


def test_scores_are_bit_equal_beside_concurrent_calls(tmp_path: Path) -> None:
    judge = Judge(classifier(tmp_path, 1), CPU)
    calls = (TEXTS[:2], TEXTS[2:] * 2, [])

    async def run() -> list[list[float]]:
        return list(await asyncio.gather(*map(judge.scores, calls)))

    assert asyncio.run(run()) == [judge.score(texts) for texts in calls]


def test_a_score_is_the_probability_or_the_logit_of_a_label(tmp_path: Path) -> None:
    name = classifier(tmp_path, 3)

    def score(label: int, output: str) -> float:
        how = InfillConfig(judge_device="cpu", judge_output=output, judge_label=label)
        return Judge(name, how).score(["a cat."])[0]

    logits = [score(label, "logit") for label in range(3)]
    found = [score(label, "probability") for label in range(3)]
    assert found == pytest.approx(torch.tensor(logits).softmax(0).tolist(), abs=1e-6)
    with pytest.raises(ValueError, match=r"^label must be < 3 for the judge .*, got 3$"):
        score(3, "probability")


def test_a_special_token_that_is_spelled_out_is_read_as_its_letters(tmp_path: Path) -> None:
    judge = Judge(classifier(tmp_path, num_labels=1), CPU)
    spelled, empty = judge.score(["a<pad>b", "ab"])
    read: list[list[int]] = []
    inner = judge._loaded.model.forward
    judge._loaded.model.forward = lambda **inputs: read.append(inputs["input_ids"][0].tolist()) or inner(**inputs)
    judge.score(["a<pad>b"])
    assert "".join(judge._loaded.tokenizer.convert_ids_to_tokens(read[0])) == "a<pad>b"
    assert len(read[0]) == 7
    assert spelled != empty


def test_what_is_no_judge_is_refused_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="is no directory or reachable hub reward model"):
        Judge(str(tmp_path / "none"), CPU)


# ------------------------------------------------------------------------------------------------ corrupted text


def corruption(pool: Sequence[Sequence[int]] = ((1, 2, 3, 1, 2, 4), (5, 6, 7))) -> Corruption:
    return Corruption(pool, lambda n, count, chance: MASKINGS["random"](n, count, 4, chance), (0.5,), 20)


def test_corrupted_text_differs_in_one_token_to_the_largest_share() -> None:
    corrupt, real = corruption(), [1, 2, 3, 1, 2, 4, 5, 6]
    numbers = []
    for seed in range(300):
        found = corrupt(real, random.Random(seed))
        assert len(found) == len(real)
        numbers.append(sum(a != b for a, b in zip(real, found, strict=True)))
    assert set(numbers) == {1, 2, 3, 4}
    assert corrupt(real, random.Random(1)) == corrupt(real, random.Random(1))


def test_what_is_put_in_mostly_stands_between_the_same_neighbours_elsewhere() -> None:
    pool = [[1, middle, 2] for middle in (7, 8, 9)] + [[3, 4]] * 50
    corrupt = Corruption(pool, lambda n, count, chance: [1], (0.1,), 20)
    put_in = [corrupt([1, 7, 2], random.Random(seed))[1] for seed in range(300)]
    assert sum(token_id in (8, 9) for token_id in put_in) > 100
    assert 0 < sum(token_id not in (1, 2, 3, 4, 7, 8, 9) for token_id in put_in) < 30


# ------------------------------------------------------------------------------------------------ counted characters


def test_counted_characters_give_a_distribution_and_prefer_what_was_seen() -> None:
    model = NgramModel(["abab", "abac"], order=3)
    total = sum(
        2.718281828459045 ** (2 * model.log_prob("a" + chr(value)) - model.log_prob("a")) for value in range(256)
    )
    assert total == pytest.approx(1.0, abs=1e-9)
    assert model.log_prob("abab") > model.log_prob("acab") > model.log_prob("zzzz")
    assert model.log_prob("") == 0.0


def test_two_letters_by_hand() -> None:
    # Of "aa": after nothing a was seen twice, one kind; after a once, one kind.
    model = NgramModel(["aa"], order=2)
    first = (2 + 1 / 256) / (2 + 1)
    second = (1 + first) / (1 + 1)
    expected = torch.tensor([first, second], dtype=torch.float64).log().mean()
    assert model.log_prob("aa") == pytest.approx(float(expected), abs=1e-12)
