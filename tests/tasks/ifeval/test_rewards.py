"""What verdicts are worth: the plain schemes and TorchRL's."""

from typing import Any

import pytest

from covey_graders.ifeval.instructions import instruction
from covey_graders.ifeval.topics import is_about, num_different_words
from covey_graders.tags import after_thoughts
from covey_tasks.ifeval.kinds import MATERIAL
from covey_tasks.ifeval.rewards import PLAIN, Scheme
from covey_tasks.ifeval.settings import IfevalConfig

ASKED = (
    instruction("punctuation:no_comma", {}),
    instruction("startend:end_checker", {"end_phrase": "bye"}),
)
THINK, RIGHT, HALF, LOOSE = "<think>so, yes</think>", "it is bye", "it is, bye", "it is *bye*"


def made(scheme: str = "strict_share", **settings: Any) -> Scheme:
    return Scheme(IfevalConfig(scheme=scheme, **settings))


def value(scheme: Scheme, completion: str) -> float:
    return round(scheme.reward(completion, ASKED).value, 10)


@pytest.mark.parametrize(
    ("name", "worth"),
    [
        ("strict", (1.0, 0.0, 0.0)),
        ("strict_share", (1.0, 0.5, 0.5)),
        ("loose", (1.0, 0.0, 1.0)),
        ("loose_share", (1.0, 0.5, 1.0)),
    ],
)
def test_a_plain_reward_is_one_of_the_four_measures(name: str, worth: tuple[float, ...]) -> None:
    assert tuple(value(made(name), text) for text in (RIGHT, HALF, LOOSE)) == worth


@pytest.mark.parametrize(
    ("completion", "reward"),
    [
        (f"{THINK}<answer>{RIGHT}</answer>", 1.15),
        (f"<answer>{RIGHT}</answer>", 1.10),
        (f"{THINK}<answer>a, b</answer>", 0.15),  # wrong in full format
        (THINK, 0.05),  # no answer
        (RIGHT, 0.0),  # nothing but the answer block is judged
        ("", 0.0),
        (f"{THINK}<answer>{HALF}</answer>", 0.15 + 0.3 * 0.5 + 0.1 * 0.5),
        (f"{THINK}<answer>{LOOSE}</answer>", 0.15 + 0.3 * 0.5 + 0.2 + 0.1),
        (f"{THINK}{THINK}<answer>{RIGHT}</answer>", 1.10),
        (f"{THINK}<answer>{RIGHT}</answer><answer>x</answer>", 1.05),  # the first counts, the bonus is for exactly one
        (f"<think>hm <answer>{RIGHT}</answer></think>", 1.15),  # an answer inside a thought is an answer
        (f"{THINK}<answer>{RIGHT}", 0.05),  # never closed
        (f"{THINK}<answer>Sure:\n\n{RIGHT}\n</answer>", 1.15),  # lines around are part of it
        (f"{THINK}<answer></answer>", 0.15),
    ],
)
def test_the_torchrl_reward_is_a_weighted_sum_and_bonuses(completion: str, reward: float) -> None:
    assert value(made("torchrl"), completion) == round(reward, 10)


def test_weights_and_bonuses_of_torchrl_can_be_changed_and_switched_off() -> None:
    answer = f"{THINK}<answer>{HALF}</answer>"
    assert value(made("torchrl", answer_bonus=0, think_bonus=0), answer) == 0.2
    assert value(made("torchrl", measure_weights=[0, 1, 0, 0], answer_bonus=0, think_bonus=0), answer) == 0.5
    assert value(made("torchrl", measure_weights=[0, 0, 0, 0]), answer) == 0.15
    assert made("torchrl", answer_bonus=0, think_bonus=0).reward(f"<answer>{RIGHT}</answer>", ASKED).value == 1.0


def test_the_parts_say_what_the_reward_is_made_of() -> None:
    reward = made("torchrl").reward(f"<answer>{HALF}</answer>", ASKED)
    assert reward.parts == {
        **{"all_strict": 0.0, "share_strict": 0.5, "all_loose": 0.0, "share_loose": 0.5},
        **{"answer_block": 1.0, "think_block": 0.0, "no_comma": 0.0, "end_checker": 1.0},
    }


def test_a_kind_that_is_asked_for_twice_is_followed_where_both_are() -> None:
    asked = [instruction("keywords:existence", {"keywords": [word]}) for word in ("sun", "bye")]
    assert made().reward("it is bye", asked).parts["existence"] == 0.0
    assert made().reward("bye it is sun", asked).parts["existence"] == 1.0


@pytest.mark.parametrize("name", [*PLAIN, "torchrl"])
def test_the_reward_is_its_weighted_parts(name: str) -> None:
    scheme = made(name)
    reward = scheme.reward(f"{THINK}<answer>{HALF}</answer>", ASKED)
    total = sum(weight * reward.parts[part] for part, weight in scheme.part_weights.items())
    assert reward.value == pytest.approx(total, abs=1e-12)


@pytest.mark.parametrize("name", [*PLAIN, "torchrl"])
def test_an_answer_in_form_gets_full_marks(name: str) -> None:
    scheme = made(name)
    expected = sum(scheme.part_weights.values())  # its last bit depends on the version of Python
    assert value(scheme, scheme.in_form(RIGHT)) == pytest.approx(expected, rel=1e-15)


def test_thoughts_are_not_judged_by_the_plain_schemes() -> None:
    assert after_thoughts("<think>a, b</think>\n\n x") == "x"
    assert after_thoughts("a</think> b </think> c\n") == "c"
    assert after_thoughts(" <think>never ends") == ""
    assert after_thoughts(" as it is \n") == " as it is \n"
    assert value(made("strict"), f"{THINK}\n{RIGHT}") == 1.0


def test_an_answer_of_few_different_words_earns_nothing() -> None:
    assert value(made("strict"), "it is bye") == 1.0
    assert value(made("strict"), "bye it bye") == 0.0
    assert value(made("loose_share", min_words=4), "it is bye") == 0.0
    assert value(made("strict", min_words=0), "bye") == 1.0
    assert value(made("torchrl"), "<answer>bye</answer>") == 1.10


@pytest.mark.parametrize(
    "text", ["\u200b", "***", "7", "<<a>> *a* *a* [a] [a] ... P.S. P.P.S", '"', "{}", "a, a. A! bye bye"]
)
def test_marks_without_words_earn_nothing(text: str) -> None:
    assert value(made("loose_share"), text) == 0.0


def test_words_of_scripts_without_blanks_are_counted_by_their_letters() -> None:
    assert (
        num_different_words("\u4eca\u65e5\u306f\u3068\u3066\u3082\u5929\u6c17\u304c\u3044\u3044\u3067\u3059\u306d") >= 3
    )
    assert num_different_words("Das Wetter ist das Wetter") == 3


def test_a_text_is_about_its_topic_where_it_names_it_and_few_others() -> None:
    assert is_about("WE WENT TO SWIM ALL WINTER", "winter swimming", MATERIAL["topics"])
    assert is_about("handmade shoes", "hand-made shoes", MATERIAL["topics"])
    assert not is_about("A cold winter.", "winter swimming", MATERIAL["topics"])
    assert not is_about("It has been a long walk.", "bee keeping", MATERIAL["topics"])
    assert is_about(", ".join(MATERIAL["topics"][:6]), MATERIAL["topics"][0], MATERIAL["topics"])
    assert not is_about(", ".join(MATERIAL["topics"][:30]), MATERIAL["topics"][0], MATERIAL["topics"])


@pytest.mark.parametrize(
    ("topic", "text"),
    [
        ("paper kites", "[name] makes a kite of bamboo and wood."),
        ("second-hand books", "A [name] of a [family] came to buy a book."),
        ("snow shelters", "<<Superheroes of the Snow>> A guide to winter safety."),
        ("tree houses", "The treehouses of our street are old."),
        ("bee keeping", "Bees need flowers, and a beekeeper needs bees."),
        ("old libraries", "Every library has its smell."),
        ("chess clubs", "Chess is played on Tuesdays."),
    ],
)
def test_a_topic_is_named_by_the_word_that_says_what_it_is(topic: str, text: str) -> None:
    assert is_about(text, topic, MATERIAL["topics"])
    assert not is_about("It is a fine day and the sun is out.", topic, MATERIAL["topics"])


def test_parts_say_what_was_followed_and_what_was_off_the_topic() -> None:
    reward = made("strict").reward(RIGHT, ASKED, rules=lambda text: {"names_topic": "sun" in text})
    assert reward.value == 0.0
    assert reward.parts == {
        **{"followed_on_topic": 0.0, "on_topic": 0.0, "no_comma": 1.0, "end_checker": 1.0, "names_topic": 0.0},
        **dict.fromkeys(("has_words", "has_own_words", "is_no_echo"), 1.0),
        **dict.fromkeys(("all_strict", "share_strict", "all_loose", "share_loose"), 1.0),
    }
    assert made("strict").reward(f"the sun, {RIGHT}", ASKED).parts["on_topic"] == 1.0


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"scheme": "plain"}, "scheme must be one of strict, strict_share, loose, loose_share, torchrl, got plain"),
        ({"measure_weights": [1.0]}, r"measure_weights must be four numbers, got \[1.0\]"),
    ],
)
def test_impossible_schemes_are_refused(settings: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        made(**settings)


def test_a_teacher_is_told_the_instructions_and_rules_that_were_not_followed() -> None:
    words = (*ASKED, instruction("keywords:existence", {"keywords": ["lantern", "harbor"]}))
    said = [made(name).reward("it is, *bye*", words).extra["feedback"] for name in ("strict", "loose")]
    ends = "Not followed: startend end checker, end phrase bye."
    comma, kept = "Not followed: punctuation no comma.", "Not followed: keywords existence, keywords lantern, harbor."
    few = "The answer has too few words."
    assert said == [f"{comma}\n{ends}\n{kept}", f"{comma}\n{kept}"]
    assert made("strict").reward("no", ASKED[:1]).extra["feedback"] == few
    assert made("strict").reward(RIGHT, ASKED).extra == {}
