"""A grammar of one's own: what it draws, what it recognises, and what is wrong with its file."""

import random
from itertools import product
from pathlib import Path

import pytest

from covey.environments.infill.grammar import is_sentence, sentence
from covey.environments.infill.own_grammar import Grammar, read_grammar

SINGERS = """
# who sings
<sentence> ::= <who> sings . | <who> sees <who> .
<who> ::= the <animal>
    | <who> and <who>
<animal> ::= cat | owl | fox
"""


def grammar(tmp_path: Path, text: str) -> Grammar:
    (tmp_path / "mine.txt").write_text(text)
    return read_grammar(str(tmp_path / "mine.txt"))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("the cat sings.", True),
        ("the cat and the owl and the fox sees the cat.", True),
        ("the cat sings", False),
        ("the cat  sings.", False),
        ("the cat sings .", False),
        ("the cat sings. ", False),
        ("cat sings.", False),
        ("the cats sings.", False),
        ("", False),
        ("the cat and sings.", False),
        ("the cat sings.the cat sings.", False),
    ],
)
def test_a_text_is_a_sentence_or_not(text: str, expected: bool, tmp_path: Path) -> None:
    assert grammar(tmp_path, SINGERS).has(text) is expected


@pytest.mark.long
def test_what_is_drawn_is_a_sentence_ends_and_is_a_function_of_the_seed(tmp_path: Path) -> None:
    found = grammar(tmp_path, SINGERS)
    drawn = [found.sentence(random.Random(seed)) for seed in range(200)]
    assert all(map(found.has, drawn))
    assert len(set(drawn)) > 50
    assert found.sentences({"train": 40, "test": 8}, "a") == found.sentences({"train": 40, "test": 8}, "a")
    assert found.sentences({"train": 40, "test": 8}, "a") != found.sentences({"train": 40, "test": 8}, "b")


def test_no_sentence_is_in_both_splits_and_none_comes_twice(tmp_path: Path) -> None:
    splits = grammar(tmp_path, SINGERS).sentences({"train": 200, "test": 40}, "x")
    both = [*splits["train"], *splits["test"]]
    assert len(set(both)) == len(both) == 240


def test_a_grammar_that_branches_more_than_it_ends_still_ends(tmp_path: Path) -> None:
    wild = grammar(tmp_path, "<s> ::= <s> <s> <s> | <s> <s> | a")
    assert all(wild.has(wild.sentence(random.Random(seed))) for seed in range(5))


@pytest.mark.parametrize(
    "rules",
    ["<s> ::= a | <s> b", "<s> ::= a | b <s>", "<s> ::= a | <s> <s> | b <t>\n<t> ::= <s>", "<s> ::= a | b <s> a"],
)
def test_every_text_of_a_few_words_is_told_apart_as_by_rewriting(rules: str, tmp_path: Path) -> None:
    found = grammar(tmp_path, rules)
    language = rewritten(found, most=4)
    for length in range(1, 5):
        for words in product("ab", repeat=length):
            assert found.has(" ".join(words)) is (words in language), words


def rewritten(found: Grammar, most: int) -> set[tuple[str, ...]]:
    """Every sentence of at most so many words, by replacing the first name in all ways."""
    forms, seen = [(found.start,)], {(found.start,)}
    for form in forms:  # grows while it is walked through
        place = next((place for place, symbol in enumerate(form) if symbol in found.rules), None)
        for one in () if place is None else found.rules[form[place]]:
            new = (*form[: place or 0], *one, *form[(place or 0) + 1 :])
            if len(new) <= most and new not in seen:
                seen.add(new)
                forms.append(new)
    return {form for form in seen if not any(symbol in found.rules for symbol in form)}


def test_coveys_own_sentences_written_as_rules_are_the_same_language(tmp_path: Path) -> None:
    nouns = ("cat", "dog", "owl", "ant", "fox", "king")
    one = " | ".join(f"{d} {n}" for n in nouns for d in ("the", "one", "this", "an" if n[0] in "ao" else "a"))
    found = grammar(tmp_path, f"<s> ::= <one> sleeps .\n<one> ::= {one}")
    drawn = [found.sentence(random.Random(seed)) for seed in range(100)]
    assert all(map(is_sentence, drawn))
    others = [sentence(random.Random(seed)) for seed in range(300)]
    assert all(found.has(text) == (text.endswith(" sleeps.") and text.count(" ") == 2) for text in others)


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("", "has no rules: write <sentence> ::= words or <names> | others"),
        ("sentence ::= a", "line 1: sentence is no name in angle brackets"),
        ("::= a", "line 1: what stands before ::= is no name in angle brackets"),
        ("<s> ::= a\n<s> ::= b", "line 2: <s> is there twice"),
        ("<s> : a", "line 1: must be <name> ::= words or <names> | others, got '<s> : a'"),
        ("| a", "line 1: must be <name> ::= words or <names> | others, got '| a'"),
        ("<s> ::= a |", "line 1: an alternative of <s> is empty"),
        ("<s> ::= a <t>", "has no rule <t>, which <s> names"),
        ("<s> ::= a\n<t> ::= b", "has a rule that nothing leads to from <s>: <t>"),
        ("<s> ::= a | <t>\n<t> ::= b <t>", "has a rule that never ends: <t>"),
    ],
)
def test_what_is_wrong_with_a_grammar_is_one_line(text: str, line: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError) as refusal:
        grammar(tmp_path, text)
    assert str(refusal.value) == f"environment.grammar={tmp_path / 'mine.txt'} {line}"


def test_a_file_that_is_not_there_and_a_language_of_few_sentences_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"^environment.grammar=nowhere cannot be read: "):
        read_grammar("nowhere")
    few = grammar(tmp_path, "<s> ::= a | b | c")
    with pytest.raises(
        ValueError, match=r"^environment.grammar has too few different sentences: \d to train and \d to t"
    ):
        few.sentences({"train": 100, "test": 10}, "x")
