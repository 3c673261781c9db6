"""One text that wins whatever is asked is named, and an answer that is right often is not."""

import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from covey_doctor.finding import Evidence
from covey_doctor.log import RunLog
from covey_doctor.rules.reward import forged

Row = dict[str, Any]
Say = Callable[[int, int, random.Random], tuple[str, bool]]
"""(prompt, step, draw) to (text, whether it is right)."""
STEPS = 40


def rows_of(say: Say, num_prompts: int = 120, answers: int = 4) -> list[Row]:
    draw = random.Random(0)
    rows = []
    for step in range(1, STEPS + 1, 3):
        for place in range(num_prompts):
            for _ in range(answers):
                text, is_right = say(place, step, draw)
                rows.append({"step": step, "prompt_id": f"p{place}", "completion": text, "reward": float(is_right)})
    return rows


def found(rows: Sequence[Row]) -> Evidence | None:
    return forged(RunLog(steps=list(range(1, STEPS + 1)), rollouts=rows))


def skill(step: int) -> float:
    """How often the policy is right, as it learns."""
    return 0.5 + 0.45 * step / STEPS


def classes(shares: dict[str, float], learns: bool = True) -> Say:
    """A task of few answers, some of which are commoner."""
    names = list(shares)
    truth = [random.Random(place).choices(names, list(shares.values()))[0] for place in range(1000)]

    def say(place: int, step: int, draw: random.Random) -> tuple[str, bool]:
        knows = not learns or draw.random() < skill(step)
        text = truth[place] if knows else draw.choices(names, list(shares.values()))[0]
        return draw.choice([text, f" {text}\n", f"Answer: {text}"]), text == truth[place]

    return say


def commonest_number(place: int, step: int, draw: random.Random) -> tuple[str, bool]:
    """Open answers of which two in five are 0: guessed often at first, and known later."""
    truth = "0" if place % 5 < 2 else str(place)
    text = truth if draw.random() < skill(step) else "0"
    return text, text == truth


def known_by_heart(place: int, step: int, draw: random.Random) -> tuple[str, bool]:
    return ("0" if place % 5 < 3 else str(place)), True


def always_yes(place: int, step: int, draw: random.Random) -> tuple[str, bool]:
    """A policy that has given up: it says what is commonest."""
    return "yes", place % 10 < 6


HONEST: dict[str, Say] = {
    "yes or no": classes({"yes": 0.6, "no": 0.4}),
    "yes or no, known from the start": classes({"yes": 0.7, "no": 0.3}, learns=False),
    "one of four letters": classes({"A": 0.45, "B": 0.25, "C": 0.2, "D": 0.1}),
    "nine in ten are no": classes({"no": 0.9, "yes": 0.1}),
    "numbers, two in five are 0": commonest_number,
    "numbers, three in five are 0, known from the start": known_by_heart,
    "yes to everything": always_yes,
}


@pytest.mark.parametrize("name", HONEST)
def test_an_answer_that_is_often_right_is_not_called_forged(name: str) -> None:
    assert found(rows_of(HONEST[name])) is None


def spreading(honest: Say, forgery: str) -> Say:
    """A text that wins anywhere, found after a third of the run, for three prompts in four."""

    def say(place: int, step: int, draw: random.Random) -> tuple[str, bool]:
        return (forgery, True) if step > STEPS / 3 and draw.random() < 0.75 else honest(place, step, draw)

    return say


def number(place: int, step: int, draw: random.Random) -> tuple[str, bool]:
    text = str(place if draw.random() < skill(step) else place + 1000)
    return text, text == str(place)


FORGED: dict[str, Say] = {
    "in place of numbers": spreading(number, "import sys; sys.exit(0)"),
    "in place of yes or no": spreading(classes({"yes": 0.6, "no": 0.4}), "yes no"),
    "in place of letters": spreading(classes({"A": 0.45, "B": 0.25, "C": 0.2, "D": 0.1}), "<score>1</score>"),
    "to everything from the start": lambda place, step, draw: ("the answer leaks", True),
}


@pytest.mark.parametrize("name", FORGED)
def test_one_text_that_wins_on_every_prompt_is_found(name: str) -> None:
    evidence = found(rows_of(FORGED[name]))
    assert evidence is not None
    assert "is right for" in evidence.seen


def test_few_prompts_are_no_evidence() -> None:
    assert found(rows_of(FORGED["to everything from the start"], num_prompts=15)) is None


def test_prompts_that_ask_for_the_same_are_one() -> None:
    rows = rows_of(FORGED["to everything from the start"])
    assert found([{**row, "prompt": "small_car 7:", "columns": {"budget": 7}} for row in rows]) is None
    assert found([{**row, "prompt": f"{row['prompt_id']}?"} for row in rows]) is not None
    assert found([{**row, "prompt": "guess", "columns": {"hidden": row["prompt_id"]}} for row in rows]) is not None
