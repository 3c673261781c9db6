"""What public reports say graders get wrong, and further answers of each kind, right and wrong ones."""

import json
from pathlib import Path

import pytest

from covey_graders.math.judge import compare

CASES = [json.loads(line) for line in Path(__file__).with_name("report_cases.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("case", CASES, ids=[f"{case['kind']} {case['completion'][:40]}" for case in CASES])
def test_an_answer_of_a_reported_kind_is_judged_rightly(case: dict) -> None:
    question = case.get("question", "")
    assert compare(case["completion"], case["gold"], question) is case["right"]
    by_value = case.get("value", case["right"])
    assert compare(case["completion"], case["gold"], question, computed=False) is by_value
