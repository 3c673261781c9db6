"""The official checkers' verdicts on real, altered and hand-made responses."""

import json
from pathlib import Path
from typing import Any

import pytest

from covey_graders.ifeval.checks.languages import detect
from covey_graders.ifeval.checks.sentences import sentences
from covey_graders.ifeval.checks.text_checks import count_capital_words, count_words
from covey_graders.ifeval.instructions import Verdicts, verdicts

pytestmark = pytest.mark.shared


def rows(shared: Path, name: str) -> list[dict[str, Any]]:
    with (shared / "data" / "ifeval" / f"{name}.jsonl").open(encoding="utf-8") as file:
        return [json.loads(line) for line in file]


@pytest.fixture(scope="module")
def prompts(shared: Path) -> dict[int, dict[str, Any]]:
    return {row["key"]: row for row in rows(shared, "prompts")}


def judged(row: dict[str, Any], prompts: dict[int, dict[str, Any]]) -> Verdicts:
    prompt = prompts[row["key"]]
    return verdicts(row["response"], prompt["instruction_id_list"], prompt["kwargs"])


@pytest.mark.parametrize(("name", "num_verdicts"), [("responses_with_verdicts", 427), ("mutated_responses", 600)])
def test_every_stable_verdict_is_the_official_one(
    shared: Path, prompts: dict[int, dict[str, Any]], name: str, num_verdicts: int
) -> None:
    others = []
    num_compared = 0
    for row in rows(shared, name):
        found = judged(row, prompts)
        stable = row.get("stable", [True] * len(found.strict))
        official = zip(row["follow_instruction_list_strict"], row["follow_instruction_list_loose"], strict=True)
        for ours, theirs, counts in zip(zip(found.strict, found.loose, strict=True), official, stable, strict=True):
            num_compared += counts
            if counts and ours != theirs:
                others.append((row["key"], row.get("mutation"), ours, theirs))
    assert others == []
    assert num_compared == num_verdicts


def test_the_totals_are_the_official_ones(shared: Path, prompts: dict[int, dict[str, Any]]) -> None:
    found = [judged(row, prompts) for row in rows(shared, "responses_with_verdicts")]
    assert (len(found), sum(v.all_strict for v in found), sum(v.all_loose for v in found)) == (270, 204, 214)
    assert sum(len(v.strict) for v in found) == 427
    assert (sum(sum(v.strict) for v in found), sum(sum(v.loose) for v in found)) == (356, 367)


def test_every_boundary_case_is_judged_as_the_official_code_does(shared: Path) -> None:
    cases = rows(shared, "instruction_cases")
    found = [verdicts(case["response"], [case["instruction_id"]], [case["kwargs"]]) for case in cases]
    others = [
        case["id"]
        for case, ours in zip(cases, found, strict=True)
        if (ours.strict, ours.loose) != ((case["strict"],), (case["loose"],))
    ]
    assert others == []
    assert len({case["instruction_id"] for case in cases}) == 25


def test_counts_agree_with_the_trained_tokenizers_as_the_page_says(shared: Path) -> None:
    texts = [(row["response"], row["counts"]) for row in rows(shared, "responses_with_verdicts")]
    assert sum(count_words(text) == counts["words"] for text, counts in texts) == 270
    assert sum(count_capital_words(text) == counts["capital_words"] for text, counts in texts) == 270
    assert sum(len(sentences(text)) == counts["sentences"] for text, counts in texts) == 266
    assert sum(detect(text) == counts["lang"] for text, counts in texts) == 270


def test_rows_with_every_argument_and_nulls_are_read_like_rows_without(shared: Path) -> None:
    """The copy on the hub fills every dictionary with all argument names."""
    names = {name for row in rows(shared, "prompts") for kwargs in row["kwargs"] for name in kwargs}
    for row in rows(shared, "prompts")[:40]:
        filled = [dict.fromkeys(names) | kwargs for kwargs in row["kwargs"]]
        text = f"{row['prompt']}\n\nP.S. a, b"
        assert verdicts(text, row["instruction_id_list"], filled) == verdicts(
            text, row["instruction_id_list"], row["kwargs"]
        )
