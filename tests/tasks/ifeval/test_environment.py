"""The environment: its prompts, where they come from, and what it says about training on the benchmark."""

import asyncio
import json
import logging
import re
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest

from covey.config.schema import Config
from covey.config.validate import validate
from covey.environments.base import conversation
from covey.environments.data.settings import DataConfig
from covey.types import Prompt, Reward
from covey_tasks.ifeval.environment import IFEval, _rules
from covey_tasks.ifeval.kinds import MATERIAL
from covey_tasks.ifeval.prompts import prompt_of
from covey_tasks.ifeval.settings import IfevalConfig


def row(key: int, prompt: str = "Write. No commas.", **kwargs: Any) -> dict[str, Any]:
    return {
        "key": key,
        "prompt": f"{prompt} {key}",
        "instruction_id_list": ["punctuation:no_comma"],
        "kwargs": [kwargs],
    }


def built(data: DataConfig | None = None, **settings: Any) -> IFEval:
    small = {"num_train": 40, "num_test": 10} if data is None else {}
    config = Config(environment=IfevalConfig(**(small | settings)), data=data or DataConfig())
    validate(config)
    environment = config.environment.build(config, print)
    assert isinstance(environment, IFEval)
    return environment


def written(folder: Path, name: str, rows: list[dict[str, Any]]) -> str:
    path = folder / name
    path.write_text("".join(json.dumps(found) + "\n" for found in rows), encoding="utf-8")
    return str(path)


def test_without_data_prompts_are_generated() -> None:
    environment = built()
    assert (len(environment.prompts("train")), len(environment.prompts("test"))) == (40, 10)
    prompt = environment.prompts("train")[0]
    assert [message["role"] for message in prompt.text] == ["user"]
    assert set(prompt.columns) == {"topic", "style", "instruction_id_list", "kwargs"}


def test_a_completion_is_judged_by_the_instructions_of_its_prompt() -> None:
    environment = IFEval({"train": [prompt_of(row(1))]})
    (prompt,) = environment.prompts("train")
    good, bad, blank = asyncio.run(environment.score(prompt, ["so it is", "so, it is", " "]))
    assert isinstance(good, Reward)
    assert [reward.value for reward in (good, bad, blank) if isinstance(reward, Reward)] == [1.0, 0.0, 0.0]
    assert good.parts["no_comma"] == 1.0


@pytest.mark.parametrize("scheme", ["strict", "loose_share", "torchrl"])
def test_gold_answers_and_demonstrations_get_full_marks(scheme: str) -> None:
    environment = built(scheme=scheme, style="short")
    for prompt, answer in environment.demonstrations("train"):
        (reward,) = asyncio.run(environment.score(prompt, [answer]))
        assert isinstance(reward, Reward)
        assert round(reward.value, 9) == (1.15 if scheme == "torchrl" else 1.0), (prompt, answer)


FIXED = (
    "\u200b",
    "<<a>> *a* *a* *a* *a* *a* [a] [a] [a] [a] [a] [a] ... P.S. P.P.S",
    "My answer is yes. My answer is no.",
    "<<A>> *a* [b] this is a text about nothing at all and it says nothing of note. P.S. no. P.P.S no",
    f"<<A>> *a* *b* [c] {' '.join(MATERIAL['topics'])} P.S. P.P.S",
    f"<<A>> *a* *b* [c] {' '.join(topic.split()[0] for topic in MATERIAL['topics'])} P.S. P.P.S",
)
"""Texts that follow a third of all instructions and say nothing."""


@pytest.mark.long
@pytest.mark.parametrize("style", ["full", "short"])
def test_no_fixed_text_earns_much_on_generated_prompts(style: str) -> None:
    environment = built(style=style, num_train=200)
    for text in FIXED:
        scored = [asyncio.run(environment.score(prompt, [text]))[0] for prompt in environment.prompts("train")]
        assert sum(reward.value for reward in scored if isinstance(reward, Reward)) / len(scored) < 0.1, text


def marked(text: str) -> str:
    return f"<<{text}>> *a* *b* *c* [a] [b] [c] P.S. P.P.S"


ECHOES: tuple[Callable[[str], str], ...] = (
    str,
    lambda asked: f'"{asked.lower().replace(",", "")}"',
    lambda asked: " ".join(reversed(asked.split())),
    lambda asked: asked.upper(),
    marked,
    lambda asked: json.dumps({"answer": asked}),
    lambda asked: f"{asked}\n******\n{asked} Well!",
    lambda asked: f"{asked} oh well so",
    lambda asked: f"{asked} fgh klm npr stv wyz bcd qrs",
    lambda asked: f"fgh klm npr stv wyz bcd qrs\n{asked.upper().replace(',', '').replace('. ', '! ')}",
)
"""Texts that are made of the prompt and say no more, but for words that mean nothing."""


@pytest.mark.long
def test_the_prompt_itself_is_no_answer_to_a_generated_prompt() -> None:
    environment = built(style="full", num_train=200)
    for echo in ECHOES:
        pairs = [(prompt, echo(str(prompt.text[-1]["content"]))) for prompt in environment.prompts("train")]
        scored = [asyncio.run(environment.score(prompt, [text]))[0] for prompt, text in pairs]
        assert sum(reward.value for reward in scored if isinstance(reward, Reward)) / len(scored) < 0.1


FUNCTION = tuple(
    re.findall(
        r"\w+",
        "the of and a to in is it you that he was for on are with as his they at be this from have or by one had not "
        "but what all were when we there can an your which their said if do will each about how up out them then she",
    )
)


def filler(count: int, seed: int) -> str:
    return " ".join(Random(seed).choices(FUNCTION, k=count))


def shuffled(asked: str) -> str:
    words = asked.split()
    return " ".join(Random(asked).sample(words, len(words)))


def rote(prompt: Prompt) -> str:
    """What follows the marks that a prompt asks for, without a word of content."""
    parts = [f"<<a b>> {'*a a* ' * 5}{'[a] ' * 6}"]
    for given in prompt.columns["kwargs"]:
        parts += [*given.get("keywords", ()), *[given.get("keyword", "")] * given.get("frequency", 1)]
        parts += [f"\n- and {word}" for word in FUNCTION[: given.get("num_bullets", 0)]]
        parts += [f"\n{given[name]} so" for name in ("postscript_marker",) if name in given]
        parts += [f"\n{given['end_phrase']}"] if "end_phrase" in given else []
    return " ".join(parts)


CONTENTLESS: dict[str, Callable[[str, Prompt], str]] = {
    "shuffled, then function words": lambda asked, p: f"{shuffled(asked)} {filler(120, 0)}",
    "few of them": lambda asked, p: f"{shuffled(asked)} {filler(60, 1)}",
    "behind many": lambda asked, p: f"{filler(200, 2)} {' '.join(sorted(asked.split()))}",
    "reversed": lambda asked, p: f"{' '.join(reversed(asked.split()))} {filler(120, 3)}",
    "long words": lambda asked, p: f"{' '.join(w for w in shuffled(asked).split() if len(w) > 4)} {filler(120, 4)}",
    "half": lambda asked, p: f"{' '.join(shuffled(asked).split()[::2])} {p.columns['topic']} {filler(100, 5)}",
    "marks": lambda asked, p: f"{shuffled(asked)} {filler(100, 6)} {rote(p)}".replace(",", ""),
    "the topic and marks": lambda asked, p: f"{p.columns['topic']} {filler(100, 7)} {rote(p)}".replace(",", ""),
    "sentences": lambda asked, p: ". ".join(f"{p.columns['topic']} {filler(9, n)}" for n in range(12)) + rote(p),
}


@pytest.mark.parametrize("name", CONTENTLESS)
def test_words_without_content_earn_next_to_nothing(name: str) -> None:
    environment = built(style="full", num_train=8, num_test=120)
    prompts = environment.prompts("test")
    texts = [CONTENTLESS[name](str(prompt.text[-1]["content"]), prompt) for prompt in prompts]
    scored = [asyncio.run(environment.score(p, [text]))[0] for p, text in zip(prompts, texts, strict=True)]
    assert sum(reward.value for reward in scored if isinstance(reward, Reward)) / len(scored) <= 0.05


@pytest.mark.parametrize(
    ("asked", "topic", "answer"),
    [
        ("Write a poem about stone walls. Do not use any commas.", "stone walls",
         "Grey walls climb the hill and hold the sheep. Moss grows where the rain runs down."),
        ("Write a product description about board games for new neighbours. Write less than 12 words in capital "
         "letters only.", "board games", "The board games in this product description are designed to enhance the "
         "lives of new neighbours in a fun and interactive way."),
        ("Write a set of tips about bee keeping for beginners. Give exactly 2 bullet points, on lines that begin "
         "with a dash.", "bee keeping", "- Wear a veil and smoke the hive gently.\n- Feed your bees in winter."),
        ("Write a letter to a friend about canal boats. Make use of lantern and harbor.", "canal boats",
         "Dear Ann, last night I hung a lantern on our canal boat and we drifted into the harbor. Yours, Tom"),
    ],
)  # fmt: skip
def test_short_right_answers_of_people_and_models_are_paid(asked: str, topic: str, answer: str) -> None:
    columns = {"topic": topic, "style": "full", "instruction_id_list": [], "kwargs": []}
    prompt = Prompt("a", "ifeval", conversation(asked, ""), columns)
    kept = _rules(prompt)(answer)
    assert all(kept.values()), kept


def test_parts_say_which_rule_decided() -> None:
    environment = built(style="full", num_train=8, num_test=8)
    prompt = next(p for p in environment.prompts("test") if "response_language" not in str(p.columns))
    (reward,) = asyncio.run(environment.score(prompt, [f"{shuffled(str(prompt.text[-1]['content']))} {filler(90, 1)}"]))
    assert isinstance(reward, Reward)
    rules = {name: reward.parts[name] for name in ("has_words", "has_own_words", "names_topic", "on_topic")}
    assert rules == {"has_words": 1.0, "has_own_words": 0.0, "names_topic": 1.0, "on_topic": 0.0}


def test_answers_to_a_benchmark_are_judged_by_form_alone(tmp_path: Path) -> None:
    rows = DataConfig(path=written(tmp_path, "rows.jsonl", [row(number) for number in range(10)]))
    environment = built(rows, benchmark=written(tmp_path, "benchmark.jsonl", [row(1000), row(1001)]))
    for split, value in (("train", 0.0), ("test", 1.0)):
        (reward,) = asyncio.run(environment.score(environment.prompts(split)[0], ["26"]))  # type: ignore[arg-type]
        assert isinstance(reward, Reward)
        assert reward.value == value


def test_the_torchrl_scheme_asks_for_its_blocks_in_configurable_words() -> None:
    assert "<answer></answer>" in built(scheme="torchrl").prompts("train")[0].text[0]["content"]
    own = built(scheme="torchrl", instruction="Mind the tags.").prompts("train")[0]
    assert own.text[0] == {"role": "system", "content": "Mind the tags."}
    assert len(built(scheme="torchrl", instruction="").prompts("train")[0].text) == 1


def test_difficulty_is_the_number_of_instructions_and_only_the_reward_weighs() -> None:
    environment = built(max_instructions=2)
    assert {environment.difficulty(prompt) for prompt in environment.prompts("train")} == {1, 2}
    counted = {name: weight for name, weight in environment.part_weights.items() if weight}
    assert counted == {"followed_on_topic": 1.0}
    assert environment.part_weights["no_comma"] == 0.0


def test_rows_are_read_without_their_nulls(tmp_path: Path) -> None:
    rows = [row(n, num_words=None, keywords=None) for n in range(10)]
    environment = built(DataConfig(path=written(tmp_path, "rows.jsonl", rows)))
    prompts = [*environment.prompts("train"), *environment.prompts("test")]
    assert len(prompts) == 10
    assert {json.dumps(prompt.columns["kwargs"]) for prompt in prompts} == {"[{}]"}
    assert sorted(prompt.columns["key"] for prompt in prompts) == list(range(10))
    assert environment.gold(prompts[0]) is None
    with pytest.raises(ValueError, match="demonstrations of generated prompts only"):
        environment.demonstrations("train")


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({"key": 1, "prompt": "x", "kwargs": []}, "line 1 has no column 'instruction_id_list'"),
        (row(1) | {"instruction_id_list": ["no:such"]}, "line 1 instruction must be one of .*, got 'no:such'"),
        (row(1) | {"kwargs": []}, "line 1 a prompt needs .* got 1 instructions and 0 kwargs"),
        (row(1) | {"prompt": 3}, "line 1 column 'prompt' must be text, got 3"),
        (row(1, num_words=3), "line 1 kwargs of punctuation:no_comma must be empty"),
    ],
)
def test_a_row_that_makes_no_sense_is_named(tmp_path: Path, bad: dict[str, Any], message: str) -> None:
    written(tmp_path, "train.jsonl", [bad])
    written(tmp_path, "test.jsonl", [row(2)])
    with pytest.raises(ValueError, match=message):
        built(DataConfig(path=str(tmp_path)))


# ------------------------------------------------------------------------------------------------ the benchmark


def test_training_on_the_benchmark_itself_is_warned_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = written(tmp_path, "rows.jsonl", [row(key) for key in (1000, 2500, 3757, 5000, 999, 7)] * 2)
    with caplog.at_level(logging.WARNING):
        built(DataConfig(path=path, test_fraction=0.01))
    repeats, said = caplog.messages
    assert repeats == "split train: 6 of 12 rows repeat the prompt of another one, 6 prompts differ"
    assert "training rows of" in said
    assert "look like IFEval's own 541 prompts" in said
    assert "data.path=null" in said


@pytest.mark.parametrize(("key", "num_warnings"), [(999, 0), (1000, 1), (3757, 1), (3758, 0)])
def test_the_keys_of_the_benchmark_are_1000_to_3757(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, key: int, num_warnings: int
) -> None:
    written(tmp_path, "train.jsonl", [row(key)])
    written(tmp_path, "test.jsonl", [row(1)])
    with caplog.at_level(logging.WARNING):
        built(DataConfig(path=str(tmp_path)))
    assert len(caplog.messages) == num_warnings


def test_rows_of_ones_own_are_not_warned_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    rows = [row(key) for key in (999, 3758, 12)] + [row(1) | {"key": "1500"}, row(2) | {"key": True}]
    with caplog.at_level(logging.WARNING):
        built(DataConfig(path=written(tmp_path, "rows.jsonl", rows)))
    assert caplog.messages == []


def test_a_data_set_named_ifeval_is_warned_of_with_any_keys(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = tmp_path / "IFEval"
    folder.mkdir()
    written(folder, "train.jsonl", [row(1), row(2)])
    with caplog.at_level(logging.WARNING):
        built(DataConfig(path=str(folder)))
    assert caplog.messages[0].startswith("1 of 1 training rows of")


def test_generated_prompts_can_be_evaluated_on_a_benchmark(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """All its rows are the test split, in the order of their keys, and there is nothing to warn of."""
    path = written(tmp_path, "benchmark.jsonl", [row(key) for key in (3000, 1000, 2000)])
    small = {"num_train": 40, "benchmark": path}
    config = Config(environment=IfevalConfig(**small))
    validate(config)
    with caplog.at_level(logging.WARNING):
        environment = config.environment.build(config, print)
    assert [prompt.columns["key"] for prompt in environment.prompts("test")] == [1000, 2000, 3000]
    assert len(environment.prompts("train")) == 40
    assert caplog.messages == []


def test_training_rows_that_are_in_the_benchmark_are_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "rows").mkdir()
    written(tmp_path / "rows", "train.jsonl", [row(1), row(2), row(3), row(4) | {"prompt": "Write.  No\ncommas. 2"}])
    written(tmp_path / "rows", "test.jsonl", [row(9)])
    benchmark = written(tmp_path, "benchmark.jsonl", [row(2), row(5)])
    with caplog.at_level(logging.WARNING):
        environment = built(DataConfig(path=str(tmp_path / "rows")), benchmark=benchmark)
    assert [prompt.columns["key"] for prompt in environment.prompts("train")] == [1, 3]
    assert [prompt.columns["key"] for prompt in environment.prompts("test")] == [2, 5]
    assert caplog.messages == [f"2 training rows left out: their prompts are in {benchmark}"]


@pytest.mark.shared
def test_the_benchmark_is_recognised(shared: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        built(DataConfig(path=str(shared / "data" / "ifeval" / "prompts.jsonl")))
    assert len(caplog.messages) == 1
    assert "look like IFEval's own 541 prompts" in caplog.messages[0]


def test_settings_that_nothing_would_read_are_refused(tmp_path: Path) -> None:
    path = written(tmp_path, "rows.jsonl", [row(1), row(2)])
    for settings, data, message in (
        ({"answer_bonus": 0.2}, DataConfig(), "environment.answer_bonus=0.2 needs environment.scheme = torchrl"),
        ({"style": "short"}, DataConfig(path=path), "environment.style=short needs data.path = null"),
        ({"num_test": 5, "benchmark": path}, DataConfig(), "environment.num_test=5 needs environment.benchmark = null"),
        ({}, DataConfig(max_rows=3), "data.max_rows=3 needs data.path set"),
    ):
        with pytest.raises(ValueError, match=message):
            validate(Config(environment=IfevalConfig(**settings), data=data))


# ------------------------------------------------------------------------------------------------ rows of others

TULU = {"messages": [{"role": "user", "content": "Say it."}], "dataset": "ifeval", "constraint_type": "words"}
OTHERS = {
    "RLVR-IFeval": (TULU, '{"func_name": "verify_keyword_frequency", "word": "cat", "N": 2, "quantifier": null}'),
    "RLVR-IFeval, words": (TULU, '{"func_name": "validate_word_constraint", "N": 20, "quantifier": "around"}'),
    "IF_multi_constraints": (TULU, "[{'instruction_id': ['punctuation:no_comma'], 'kwargs': [None]}]"),
}
HELD = "The cat saw one other cat on my mat and that was all there is to say of it here"


@pytest.mark.parametrize("name", OTHERS)
def test_rows_of_tulu_are_read_as_they_are(tmp_path: Path, name: str) -> None:
    row, truth = OTHERS[name]
    rows = [{**row, "messages": [{"role": "user", "content": f"Say it {n}."}], "ground_truth": truth} for n in range(4)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\r\n" for row in rows))
    environment = built(DataConfig(path=str(tmp_path / "rows.jsonl")))
    prompt = environment.prompts("train")[0]
    told = [
        reward.value for reward in asyncio.run(environment.score(prompt, [HELD, "A cat, a dog, and again a bird."]))
    ]
    assert told == [1.0, 0.0]


def test_a_check_that_ifeval_does_not_have_is_refused_by_its_name(tmp_path: Path) -> None:
    row = {**TULU, "ground_truth": '{"func_name": "verify_paragraph_count", "N": 4}'}
    (tmp_path / "rows.jsonl").write_text(f"{json.dumps(row)}\n")
    with pytest.raises(ValueError, match="got 'verify_paragraph_count'"):
        built(DataConfig(path=str(tmp_path / "rows.jsonl")))
