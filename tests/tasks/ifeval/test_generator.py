"""Generated prompts: new, answerable, apart from each other and from the benchmark."""

import json
import re
from collections import Counter
from pathlib import Path

import pytest

from covey_graders.ifeval.instructions import CHECKS, instructions_of, judge
from covey_tasks.ifeval.environment import gold_answer
from covey_tasks.ifeval.generator import Request, check_kinds
from covey_tasks.ifeval.generator import generate as generate_of
from covey_tasks.ifeval.kinds import MATERIAL, STYLES, compatible
from covey_tasks.ifeval.settings import IfevalConfig


def generate(num_train: int, num_test: int, **settings: object) -> dict[str, list[Request]]:
    return generate_of(IfevalConfig(num_train=num_train, num_test=num_test, **settings))


def many(style: str) -> list[Request]:
    found = generate(1500, 100, style=style)
    return [*found["train"], *found["test"]]


def test_of_one_thing_a_prompt_speaks_in_the_singular() -> None:
    said = " ".join(request.text for request in many("full"))
    assert " 1 placeholder " in said
    assert " 1 passage " in said
    assert not re.search(r"\b1 \w+s\b", said)
    assert re.search(r"[Tt]he word \w+ must occur", said)
    assert not re.search(r"[Tt]he words \w+( must occur|\.)", said)


@pytest.mark.long
@pytest.mark.parametrize("style", ["full", "short"])
def test_every_prompt_can_be_answered_and_its_gold_answer_follows_it(style: str) -> None:
    others = []
    for request in many(style):
        asked = instructions_of(request.instruction_id_list, request.kwargs)
        gold = gold_answer(request.topic, style, asked)
        if not all(judge(gold, asked).strict):
            others.append((request, gold))
    assert others == []


def test_every_kind_is_generated_and_asked_for_in_words() -> None:
    counts = Counter(kind for request in many("full") for kind in request.instruction_id_list)
    assert set(counts) == set(STYLES["full"]) == set(CHECKS)
    assert min(counts.values()) >= 40
    assert Counter(len(request.instruction_id_list) for request in many("full")).keys() == {1, 2, 3}


def test_a_prompt_says_what_its_arguments_say() -> None:
    for request in many("full"):
        for arguments in request.kwargs:
            for name, value in arguments.items():
                shown = (
                    [MATERIAL["languages"][value][0]]
                    if name == "language"
                    else value
                    if isinstance(value, list)
                    else [value]
                )
                assert all(str(part) in request.text for part in shown), request


def test_no_prompt_joins_kinds_that_do_not_go_together() -> None:
    for request in many("full"):
        kinds = request.instruction_id_list
        assert all(compatible(one, other) for i, one in enumerate(kinds) for other in kinds[i + 1 :])
    assert not compatible("change_case:english_capital", "change_case:english_lowercase")
    assert not compatible("language:response_language", "keywords:existence")
    assert not compatible("detectable_format:title", "detectable_format:title")
    assert compatible("punctuation:no_comma", "startend:quotation")


def test_the_splits_share_no_prompt_and_a_seed_gives_the_same_prompts() -> None:
    first, again, other = generate(300, 100), generate(300, 100), generate(300, 100, problem_seed=1)
    assert first == again
    assert first != other
    texts = [{request.text for request in first[split]} for split in ("train", "test")]
    assert [len(found) for found in texts] == [300, 100]
    assert not texts[0] & texts[1]


def test_kinds_and_their_number_can_be_chosen() -> None:
    found = generate(50, 10, kinds=["punctuation:no_comma", "startend:quotation"], max_instructions=1)["train"]
    assert {request.instruction_id_list for request in found} == {("punctuation:no_comma",), ("startend:quotation",)}


@pytest.mark.shared
def test_no_prompt_is_one_of_the_benchmark(shared: Path) -> None:
    with (shared / "data" / "ifeval" / "prompts.jsonl").open(encoding="utf-8") as file:
        benchmark = [" ".join(json.loads(line)["prompt"].lower().split()) for line in file]
    for style in ("full", "short"):
        for request in many(style):
            ask = " ".join(request.text.lower().split()[:9])
            assert not any(ask in text for text in benchmark), request.text


def test_stock_sentences_break_no_instruction_by_themselves() -> None:
    texts = [sentence.format(topic=topic) for sentence in MATERIAL["sentences"] for topic in MATERIAL["topics"]]
    for text in [*texts, *MATERIAL["phrases"]]:
        words = set(text.lower().replace(".", "").split())
        assert not words & {*MATERIAL["forbidden"]}, text
        assert not any(keyword in text.lower() for keyword in MATERIAL["keywords"]), text
        assert not set(text.lower()) & {*MATERIAL["rare letters"], *",*[]<>"}, text


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"style": "long"}, "style must be one of full, short, got long"),
        ({"kinds": ("no_comma",)}, "kinds of style full must be among keywords:existence, .*, got no_comma"),
        (
            {"style": "short", "kinds": ("startend:quotation", "detectable_format:json_format")},
            "got detectable_format:json",
        ),
        ({"kinds": ("punctuation:no_comma",) * 2}, "kinds must be different, got punctuation:no_comma, punctuation"),
        ({"max_instructions": 0}, "max_instructions must be >= 1, got 0"),
    ],
)
def test_impossible_recipes_are_refused(settings: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_kinds(IfevalConfig(**settings))


def test_more_prompts_than_there_are_is_refused_with_their_number() -> None:
    few: dict = {"style": "short", "kinds": ["punctuation:no_comma"]}
    num_topics = len(MATERIAL["short topics"])
    assert len(generate(num_topics - 1, 1, **few)["train"]) == num_topics - 1
    with pytest.raises(
        ValueError, match=f"needs more kinds or instructions: {num_topics} different prompts were found"
    ):
        generate(50, 10, **few)
    with pytest.raises(ValueError, match="num_train must be >= 1, got 0"):
        generate(0, 1, **few)


def test_the_short_style_has_a_wording_for_each_of_its_kinds() -> None:
    assert len(STYLES["short"]) == 8
    assert all(kind.wordings for kind in [*STYLES["full"].values(), *STYLES["short"].values()])
