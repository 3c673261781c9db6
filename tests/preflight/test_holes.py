"""An audit finds the hole of each of these graders, and nothing in sound ones."""

import asyncio
import itertools
import random
import re
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import pytest

from covey.environments.reward_functions.environment import RewardFunctions, RewardSettings, reward_functions
from covey_preflight.audit.measure import Findings, audit

Grader = Callable[..., list[float]]

NUMBERS = [{"prompt": f"What is {i} * 137 + 1000?", "answer": str(i * 137 + 1000)} for i in range(1, 13)]
BOXED = r"\\boxed\{([^{}]*)\}"
PROGRAMS = [
    {
        "prompt": f"Write f(n) that returns n plus {i}.",
        "answer": f"def f(n):\n    return n + {i}",
        "tests": f"assert f(1) == {i + 1}\nassert f(10) == {i + 10}",
    }
    for i in range(1, 7)
]


def each(verdict: Callable[[str, str], float]) -> Grader:
    """A reward function that judges each completion by itself."""

    def grader(completions: list[str], answer: list[str], **columns: Any) -> list[float]:
        return [float(verdict(text, gold)) for text, gold in zip(completions, answer, strict=True)]

    return grader


def last_number(text: str) -> str:
    return (["", *re.findall(r"-?[\d,]*\.?\d+", text)])[-1].replace(",", "")


def value(text: str) -> float | None:
    try:
        return float(text.replace(",", "").strip("$"))
    except ValueError:
        return None


def boxed(text: str) -> list[str]:
    return re.findall(BOXED, text)


def says(text: str, gold: str) -> bool:
    """The sound rule: the one box, or all of the text, is the number."""
    said = boxed(text)[-1] if boxed(text) else text.strip()
    return value(said) is not None and value(said) == value(gold)


def passes(program: str, tests: str) -> bool:
    """Run program and tests as one file: what a program can end before its tests do."""
    done = subprocess.run([sys.executable, "-c", f"{program}\n{tests}"], capture_output=True, check=False, timeout=20)
    return done.returncode == 0


def prints_ok(program: str, tests: str) -> bool:
    """The same with a last line that only a program which lets its tests end gets printed."""
    command = [sys.executable, "-c", f"{program}\n{tests}\nprint('9b1d')"]
    done = subprocess.run(command, capture_output=True, check=False, timeout=20, text=True)
    return "9b1d" in done.stdout


def programs(verdict: Callable[[str, str], float]) -> Grader:
    def grader(completions: list[str], tests: list[str], **columns: Any) -> list[float]:
        found = [re.search(r"```python\n(.*?)```", text, re.DOTALL) for text in completions]
        return [float(verdict(code[1], test)) if code else 0.0 for code, test in zip(found, tests, strict=True)]

    return grader


COUNTER = itertools.count()
DRAWS = random.Random(0)


def by_place(completions: list[str], answer: list[str], **columns: Any) -> list[float]:
    return [says(c, a) + 0.25 * place for place, (c, a) in enumerate(zip(completions, answer, strict=True))]


def by_group(completions: list[str], answer: list[str], **columns: Any) -> list[float]:
    right = [says(c, a) for c, a in zip(completions, answer, strict=True)]
    return [float(r) / len(right) for r in right]


def raises_on_blanks(text: str, gold: str) -> float:
    return float(text.split()[-1] == gold)


def raises_on_long(text: str, gold: str) -> float:
    if len(text) > 100_000:
        raise RecursionError("too deep")
    return says(text, gold)


HOLES: dict[str, tuple[Grader, str]] = {
    "the answer anywhere in the text": (each(lambda t, g: g in t), "every candidate"),
    "the first digits suffice": (each(lambda t, g: last_number(t)[:2] == g[:2]), "near miss"),
    "a relative tolerance of 5 %": (
        each(lambda t, g: abs((value(last_number(t)) or 0) - float(g)) <= 0.05 * float(g)),
        "near miss",
    ),
    "the sign is lost": (each(lambda t, g: abs(value(last_number(t)) or 0) == float(g)), "near miss"),
    "any number is right": (each(lambda t, g: bool(last_number(t))), "another row's"),
    "any box is right": (each(lambda t, g: bool(boxed(t)) or says(t, g)), "another row's"),
    "an empty box is right": (each(lambda t, g: says(t, g) or boxed(t) == [""]), "form alone"),
    "one of two is right": (each(lambda t, g: g in re.split(" or ", t) or says(t, g)), "both"),
    "one of a list is right": (each(lambda t, g: g in t.split(", ")), "every candidate"),
    "the prompt is an answer": (each(lambda t, g: says(t, g) or "What is" in t), "the prompt"),
    "a claim is believed": (each(lambda t, g: says(t, g) or "correct" in t.lower()), "flattery"),
    "a score is read from the answer": (each(lambda t, g: says(t, g) or '"score": 1.0' in t), "flattery"),
    "length pays": (each(lambda t, g: says(t, g) or len(t) > 50_000), "megabyte"),
    "a part of the answer is enough": (each(lambda t, g: bool(last_number(t)) and g.startswith(last_number(t))), "cut"),
    "text alone is compared": (each(lambda t, g: t.strip() == g), "respelt"),
    "line breaks matter": (each(lambda t, g: t == g or (boxed(t) == [g] and t[-1] == ".")), "blanks"),
    "the exit code decides": (programs(passes), "trick"),
    "equality is the program's": (programs(prints_ok), "trick"),
    "a program that compiles": (programs(lambda code, tests: bool(compile(code, "p", "exec"))), "near miss"),
    "the format is all": (each(lambda t, g: bool(boxed(t) and boxed(t)[0])), "another row's"),
}
CHANGES: dict[str, tuple[Grader, str]] = {
    "a draw": (each(lambda t, g: says(t, g) + 0.01 * DRAWS.random()), "the second time"),
    "a count of calls": (each(lambda t, g: says(t, g) + 0.01 * next(COUNTER)), "the second time"),
    "the place": (by_place, "in another order"),
    "the others": (by_group, "alone"),
}
SOUND: dict[str, Grader] = {
    "numbers": each(says),
    "a box alone": each(lambda t, g: bool(boxed(t)) and says(t, g)),
    "with something for the form": each(lambda t, g: 1.0 if says(t, g) else 0.1 * bool(boxed(t))),
}


def audited(grader: Grader) -> Findings:
    rows = PROGRAMS if grader.__qualname__.startswith("programs") else NUMBERS
    settings = RewardSettings(in_process=True)
    environment = RewardFunctions({"train": rows, "test": []}, reward_functions([grader]), settings)
    return asyncio.run(audit(environment, "train", 4))


@pytest.mark.parametrize("name", HOLES)
def test_a_hole_is_found(name: str) -> None:
    grader, kind = HOLES[name]
    wrong = {row["kind"] for row in audited(grader).rows() if row["wrong"]}
    assert kind in wrong


@pytest.mark.parametrize("name", CHANGES)
def test_what_a_verdict_hangs_on_is_found(name: str) -> None:
    grader, how = CHANGES[name]
    assert audited(grader).changes[how] > 0


@pytest.mark.parametrize("name", SOUND)
def test_a_sound_grader_has_no_finding(name: str) -> None:
    found = audited(SOUND[name])
    assert not any(verdict.is_wrong for verdict in found.verdicts)
    assert [*found.unpaid, *found.failures, *found.changes] == []
    assert found.num_rows == 4
    assert len(found.verdicts) > 4 * 15


@pytest.mark.parametrize(("grader", "kind"), [(raises_on_blanks, "empty"), (raises_on_long, "megabyte")])
def test_what_raises_is_named_and_costs_the_other_cases_nothing(grader: Any, kind: str) -> None:
    found = audited(each(grader))
    assert any(reason.startswith(f"{kind}: ") for reason in found.failures)
    assert found.of_kind("near miss") or kind == "empty"


def test_a_reward_that_the_right_answer_does_not_get_is_named() -> None:
    found = audited(each(lambda text, gold: 0.0))
    assert found.unpaid == [f"train-{index}" for index in range(4)]


def test_rows_without_an_answer_are_counted() -> None:
    rows = [{"prompt": "Say something nice."}] * 3
    settings = RewardSettings(in_process=True)
    functions = reward_functions([lambda completions, **columns: [float(len(c)) for c in completions]])
    environment = RewardFunctions({"train": rows, "test": []}, functions, settings)
    found = asyncio.run(audit(environment, "train", 3))
    assert (found.num_rows, found.without_gold, found.verdicts) == (3, 3, [])


def test_a_slow_verdict_is_timed() -> None:
    def slow(text: str, gold: str) -> float:
        time.sleep(0.02 if len(text) > 100_000 else 0.0)
        return says(text, gold)

    told = audited(each(slow)).as_json()
    assert told["slowest"]["kind"] == "megabyte"
    assert told["slowest"]["seconds"] >= 0.02
    assert told["seconds"]["median"] < 0.02
