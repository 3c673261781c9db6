"""The benchmark of antibodies: reads become domains, splits share no kin, rewards say what they should."""

import random
from pathlib import Path

import pytest

from benchmarks.real.antibody_judges import Counted, Gap, is_whole, liabilities, shown, sound
from benchmarks.real.antibody_rows import CODONS, Domain, common, domain_of, families, split, stretches

TEXT = "SVKVSCKASGYNFTSYGISWVRQAPGQGLEWMGWISAYNGNTNYAQKLQGRVTMTTDTSTSTAYMELRSLRSDDTAVYYCARGSVVGAFDIWGQGTMVTVSS"
PROMPT = f"EDTAVYYC{'[MASK]' * 5}WGQGTL"
BACK = {acid: codon for codon, acid in CODONS.items()}


def read(text: str, before: str = "") -> str:
    return before + "".join(BACK[acid] for acid in text)


def test_a_read_is_translated_in_three_frames_between_stops() -> None:
    assert list(stretches("ATGTAGNTT")) == ["M", "X", "CX", "VX"]


@pytest.mark.parametrize("before", ["", "G", "GG"])
def test_a_domain_is_found_in_any_frame_with_its_loop_between_cysteine_and_tryptophan(before: str) -> None:
    found = domain_of("one", read(TEXT, before))
    assert found is not None
    assert found.text == TEXT
    assert found.loop == "ARGSVVGAFDI"
    assert found.row["prompt"] == TEXT.replace("ARGSVVGAFDI", "[MASK]" * 11)


@pytest.mark.parametrize("broken", [TEXT[:60], TEXT.replace("VYYC", "VYYA"), TEXT.replace("WGQG", "AGQG")])
def test_a_read_without_a_part_of_a_domain_is_none(broken: str) -> None:
    assert domain_of("one", read(broken)) is None


def test_likeness_is_the_longest_common_subsequence() -> None:
    masks = {letter: sum(1 << i for i, own in enumerate("ABCBDAB") if own == letter) for letter in "ABCD"}
    assert common(masks, 7, "BDCABA") == 4


def test_kin_of_kin_are_one_family() -> None:
    texts = ["AAAAAAAAAA", "AAAAAAAACC", "AAAAAACCCC", "DDDDDDDDDD"]
    assert sorted(map(sorted, families(texts, 0.8))) == [[0, 1, 2], [3]]


def test_no_family_is_in_both_splits() -> None:
    chance = random.Random(0)
    domains = []
    for number in range(12):
        text = "".join(chance.choices("ACDEFGHIKLMNPQRSTVWY", k=40))
        domains += [Domain(f"{number}", text, 5, 10), Domain(f"{number}", text[:-1] + "A", 5, 10)]
    splits = split(domains)
    names = {side: {domain.name for domain in found} for side, found in splits.items()}
    assert all(names.values())
    assert not names["train"] & names["test"]


@pytest.mark.parametrize(
    ("fill", "found"),
    [
        ("ARWFD", []),
        ("ANASD", ["glycosylation"]),
        ("ANPSD", []),
        ("ARNGD", ["deamidation"]),
        ("ARDGY", ["isomerisation"]),
        ("ARCFD", ["free cysteine"]),
        ("CRCFD", []),
        ("ARYYN", []),
    ],
)
def test_liabilities_of_a_loop_are_named(fill: str, found: list[str]) -> None:
    assert liabilities(PROMPT, fill) == found
    assert sound([PROMPT], [fill]) == [float(not found)]


def test_a_motif_across_the_loops_end_counts_one_in_the_frame_does_not() -> None:
    assert liabilities(PROMPT.replace("WGQG", "GGQG"), "ARYYD") == ["isomerisation"]
    assert liabilities(PROMPT.replace("WGQG", "WDGG"), "ARYYY") == []


@pytest.mark.parametrize("fill", ["ARYY", "ARYYYY", "ARXYY", "ar-yy", ""])
def test_a_loop_of_another_length_or_of_other_letters_earns_nothing(fill: str) -> None:
    assert not is_whole(PROMPT, fill)
    assert sound([PROMPT], [fill]) == [0.0]


def test_a_judge_sees_the_loop_between_four_letters_of_the_frame() -> None:
    assert shown(PROMPT, "ARDYF") == "VYYCARDYFWGQG"


def test_counts_leave_out_the_half_of_the_true_loop(tmp_path: Path) -> None:
    file = tmp_path / "test.jsonl"
    file.write_text("".join(f'{{"loop": "{loop}"}}\n' for loop in ["AAAAAA", "CCCCCC"] * 4))
    counted = Counted(str(file))
    of_a, of_c = counted(["AAAAAA", "AAAAAA"], ["CCCCCC", "AAAAAA"])
    assert of_a > -1 > of_c


def test_what_a_judge_is_to_refuse_is_never_the_natural_loop() -> None:
    gap = Gap({"loop": "ARDYFDY"}, ["ARDYFDY"] * 4, ["ARDYFDY"], "ARGGGDY")
    chance = random.Random(0)
    assert {gap.wrong(chance) for _ in range(200)} >= {"ARGGGDY"}
    assert all(gap.wrong(chance) != "ARDYFDY" for _ in range(200))
