"""Each kind of instruction at its edges: what follows it and what does not."""

import pytest

from covey_graders.ifeval.instructions import CHECKS, instruction

FOLLOWED: dict[str, list[tuple[dict, list[str], list[str]]]] = {
    "keywords:existence": [
        (
            {"keywords": ["sun", "ice cream"]},
            ["On Sunday: Ice Cream!"],
            ["sun ice  cream", "sun ice\ncream", "ice cream"],
        ),
        ({"keywords": ["c++"]}, ["C++ is old"], ["ccc"]),
    ],
    "keywords:frequency": [
        ({"keyword": " aa ", "frequency": 2, "relation": "at least"}, ["aaaa", "xAAxaa"], ["aaa", "a a a a"]),
        ({"keyword": "so", "frequency": 2, "relation": "less than"}, ["also", "none"], ["soso", "So also"]),
    ],
    "keywords:forbidden_words": [
        (
            {"forbidden_words": ["cat", "very good"]},
            ["cats", "cat_name", "concatenate", "very  good"],
            ["the Cat's bowl", "cat-like", "a VERY GOOD one", "cat"],
        ),
    ],
    "keywords:letter_frequency": [
        ({"letter": "E", "let_frequency": 2, "let_relation": "at least"}, ["Ee", "tree"], ["é e", "the"]),
        ({"letter": "#", "let_frequency": 1, "let_relation": "less than"}, ["no"], ["#1"]),
    ],
    "language:response_language": [
        (
            {"language": "de"},
            ["Der Sommer war lang und warm, und die Kinder spielten am Fluss.", "123 !!", "😀"],
            ["The summer was long and warm, and the children played by the river."],
        ),
    ],
    "length_constraints:number_sentences": [
        ({"num_sentences": 2, "relation": "at least"}, ["One. Two.", "One! Two"], ["One\nTwo", "At 3.14 it ends."]),
        ({"num_sentences": 2, "relation": "less than"}, ["One only"], ["One. Two."]),
    ],
    "length_constraints:number_paragraphs": [
        (
            {"num_paragraphs": 2},
            ["a\n***\nb", "a***b", "***\na\n***\nb\n***", "a****b", " ***a *** b"],
            ["a\n\nb", "a", "a***b***c", "a * * * b", "a\n***\n\n***\nb"],
        ),
        ({"num_paragraphs": 3}, ["x ***bold*** y"], ["x **bold** y"]),
    ],
    "length_constraints:number_words": [
        ({"num_words": 3, "relation": "at least"}, ["don't go", "a-b-c", "1,000.50"], ["two words", "snake_case one"]),
        ({"num_words": 3, "relation": "less than"}, ["don't", "日本語"], ["a b c"]),
    ],
    "length_constraints:nth_paragraph_first_word": [
        (
            {"num_paragraphs": 2, "nth_paragraph": 2, "first_word": "However"},
            ["One.\n\nHowever, two.", 'One.\n\n\'"however" two.', "One.\n\nhowever's two.", "a\n\n\thowever\n\n"],
            [
                "However one.\n\ntwo",
                "a\n\n**However** b",
                "a\n\n\n\nhowever",
                "a\n \nhowever",
                "a\n\nhowever\n\nb",
                "\n\na\n\nhowever",
            ],
        ),
        ({"num_paragraphs": 1, "nth_paragraph": 1, "first_word": "so"}, ["so it is", "so.it"], ["(so) it is", "\"'so"]),
    ],
    "detectable_content:number_placeholders": [
        (
            {"num_placeholders": 2},
            ["[a] [b]", "x[0][1]", "- [ ] a\n- [ ] b", "[] []"],
            ["[[a]]", "[a\nb] [c]", "[a] [b"],
        ),
    ],
    "detectable_content:postscript": [
        (
            {"postscript_marker": "P.S."},
            ["p.s. x", "P. S. x", "P.P.S. x", "the U.P.S. van"],
            ["PS: x", "P.S x", "p.  s. x"],
        ),
        ({"postscript_marker": "P.P.S"}, ["p.p.s", "P. P. S.", "p.p. s"], ["P.S.", "PPS", "p.  p.s"]),
        ({"postscript_marker": "N.B"}, ["N.B. x", "so n.b"], ["NB", "nxb"]),
        ({"postscript_marker": "(a+)+$"}, ["see (A+)+$ there"], ["a" * 40 + "!", "aaa"]),
    ],
    "detectable_format:number_bullet_lists": [
        (
            {"num_bullets": 2},
            ["* a\n* b", "- a\n* b", "*a* x\n-5", "\n\n  * a\n\n\n---", "**b**\n* a\n- c", "*\na\n* b"],
            ["* a", "* a\n- b\n* c", "+ a\n+ b", "1. a\n2. b", "• a\n• b", "** a\n** b", "x * a\nx - b", "*\n* b"],
        ),
    ],
    "detectable_format:constrained_response": [
        (
            {},
            ["My answer is yes.", "Well: My answer is no. So."],
            ["my answer is yes.", "My answer is yes", "My answer is  no."],
        ),
    ],
    "detectable_format:number_highlighted_sections": [
        (
            {"num_highlights": 2},
            ["*a* *b*", "**a** **b**", "***a***", "* x *y* z*"],
            ["*a*", "**a**", "_a_ _b_", "****", "* * *\n*"],
        ),
    ],
    "detectable_format:multiple_sections": [
        (
            {"section_spliter": "Day", "num_sections": 2},
            ["Day 1\nx\nDay 2\ny", "Day1Day2", "Day\n1 Day 1"],
            ["day 1 day 2", "Day I Day II", "Day  1 Day 2", "Day: 1 Day: 2", "DAY 1 DAY 2"],
        ),
    ],
    "detectable_format:json_format": [
        (
            {},
            [
                '{"a": 1}',
                "42",
                "true",
                "NaN",
                '```json\n{"a": 1}\n```',
                "```JSON\n[]```",
                "```\n1\n```",
                '```Json"a"',
                "  [1] ",
            ],
            ["{'a': 1}", '{"a": 1,}', 'Sure: {"a": 1}', "```python\n1\n```", "yes", "[" * 100_000],
        ),
    ],
    "detectable_format:title": [
        (
            {},
            ["<<a>>", "x <<a b>> y", "<<<a>>>", "1 << 2 and 8 >> 1", "<<> >>"],
            ["<a>", "<< >>", "<<>>", "<<a\nb>>", "<<<>>>", ">> a <<"],
        ),
    ],
    "combination:two_responses": [
        (
            {},
            ["a******b", "a\n******\nb\n******", "******a******b", "a*******b"],
            ["a", "a******a", "a****** a ", "a******b******c", "a************b", "******a"],
        ),
    ],
    "combination:repeat_prompt": [
        (
            {"prompt_to_repeat": " Write it. "},
            [" write IT. Here", "Write it."],
            ['"Write it."', "Write it", "I write it."],
        ),
    ],
    "startend:end_checker": [
        (
            {"end_phrase": "The end! "},
            ["x the END!", '"So. The end!"  ', "The end!"],
            ["The end", "The end!.", '"The end! "', "“The end!”"],
        ),
    ],
    "startend:quotation": [({}, ['"a"', ' "a" b "c"\n', '""'], ["“a”", '"a', '"', 'a"', '"a".'])],
    "change_case:capital_word_frequency": [
        (
            {"capital_frequency": 2, "capital_relation": "at least"},
            ["I AM", "DON'T"],
            ["I am", "Stop Here", "WORLD-WIDE"],
        ),
        ({"capital_frequency": 2, "capital_relation": "less than"}, ["I am", "2024"], ["A B"]),
    ],
    "change_case:english_capital": [
        (
            {},
            ["THE MAN'S HAT IS ON THE TABLE AND HIS COAT IS HANGING BEHIND THE DOOR OF THE OLD HOUSE."],
            [
                "The hat is on the table.",
                "123",
                "DER SOMMER WAR LANG UND WARM, UND DIE KINDER SPIELTEN JEDEN TAG AM FLUSS.",
            ],
        ),
    ],
    "change_case:english_lowercase": [
        (
            {},
            ["in 2024 we sold 1,500 books and earned a lot from the new edition!"],
            ["In 2024 we sold books.", "2024", "der sommer war lang und warm, und die kinder spielten am fluss."],
        ),
    ],
    "punctuation:no_comma": [({}, ["a; b", "a، b", "a， b", "a、b"], ["a, b", "1,000"])],
}

CASES = [
    (kind, arguments, text, verdict)
    for kind, groups in FOLLOWED.items()
    for arguments, followed, broken in groups
    for texts, verdict in ((followed, True), (broken, False))
    for text in texts
]


@pytest.mark.parametrize(("kind", "arguments", "text", "verdict"), CASES, ids=[f"{c[0]} {c[2][:20]!r}" for c in CASES])
def test_a_text_follows_an_instruction_or_does_not(kind: str, arguments: dict, text: str, verdict: bool) -> None:
    assert instruction(kind, arguments).holds(text) is verdict


def test_there_are_cases_of_all_25_kinds() -> None:
    assert list(FOLLOWED) == list(CHECKS)
    assert len(CHECKS) == 25


@pytest.mark.parametrize("kind", FOLLOWED)
def test_a_blank_text_follows_nothing(kind: str) -> None:
    arguments = FOLLOWED[kind][-1][0]
    assert not instruction(kind, arguments).holds("")
    assert not instruction(kind, arguments).holds(" \n\t ")


@pytest.mark.parametrize("kind", FOLLOWED)
@pytest.mark.parametrize(
    "nonsense", ["[<<*", "*", "\n", " *", "- ", "<answer>", "Day ", "p.", '"', "[", ",", "***", "\t\n"]
)
def test_nonsense_of_megabytes_is_judged_in_a_moment(kind: str, nonsense: str) -> None:
    if kind.startswith(("language", "change_case:english")):
        return  # langdetect reads no more than 10,000 characters
    instruction(kind, FOLLOWED[kind][0][0]).holds(nonsense * 50_000 + "x")


@pytest.mark.parametrize(
    ("kind", "arguments", "message"),
    [
        ("no_comma", {}, "instruction must be one of keywords:existence, .*, got 'no_comma'"),
        ("keywords:existence", {"keywords": None}, "kwargs of keywords:existence must set keywords for existence"),
        ("keywords:existence", {"keywords": []}, r"keywords of keywords:existence must be a list of words, got \[\]"),
        ("punctuation:no_comma", {"num": 1}, "kwargs of punctuation:no_comma must be empty for no_comma, got num"),
        (
            "length_constraints:number_words",
            {"num_words": 5, "relation": "more than"},
            "relation of length_constraints:number_words must be one of less than, at least, at most, exactly, around, "
            "got 'more than'",
        ),
        (
            "length_constraints:number_words",
            {"num_words": 5.5, "relation": "at least"},
            "num_words of length_constraints:number_words must be a whole number >= 0, got 5.5",
        ),
        (
            "length_constraints:nth_paragraph_first_word",
            {"num_paragraphs": 2, "nth_paragraph": 3, "first_word": "so"},
            "nth_paragraph of length_constraints:nth_paragraph_first_word must be <= num_paragraphs=2, got 3",
        ),
        (
            "keywords:letter_frequency",
            {"letter": "ab", "let_frequency": 1, "let_relation": "at least"},
            "letter of keywords:letter_frequency must be one character, got 'ab'",
        ),
        (
            "detectable_format:number_bullet_lists",
            {"num_bullets": float("inf")},
            "num_bullets of detectable_format:number_bullet_lists must be a whole number >= 0, got inf",
        ),
        (
            "detectable_format:number_bullet_lists",
            {"num_bullets": float("nan")},
            "num_bullets of detectable_format:number_bullet_lists must be a whole number >= 0, got nan",
        ),
        (
            "language:response_language",
            {"language": "zh"},
            "language of language:response_language must be one of af, .*, zh-cn, zh-tw, got zh",
        ),
    ],
)
def test_instructions_that_make_no_sense_are_refused_in_one_line(kind: str, arguments: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message) as error:
        instruction(kind, arguments)
    assert "\n" not in str(error.value)


def test_a_whole_number_may_come_as_a_fraction() -> None:
    asked = instruction("detectable_format:number_bullet_lists", {"num_bullets": 2.0, "num_words": None})
    assert asked.arguments == {"num_bullets": 2}
