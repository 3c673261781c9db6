"""How often each scheme agrees with labels that others gave to answers, and why not always."""

import asyncio
import json
from pathlib import Path

import pytest

from covey.types import Failure, Reward
from covey_graders.math.symbolic import math_verify_accuracy
from covey_tasks.math.gsm8k import DEMONSTRATIONS, GSM8K, INSTRUCTIONS
from covey_tasks.math.mathematics import Mathematics
from covey_tasks.math.settings import Gsm8kConfig, MathConfig

MARKS = {"verl_strict": "#### ", "torchrl": "<answer>", "trl": "\\boxed"}
"""What a scheme reads and nothing else."""


def judged(environment: GSM8K | Mathematics, completions: list[str]) -> list[float | None]:
    """Whether each completion answers its own problem; None for a Failure."""

    async def all_of_them() -> list[list[Reward | Failure]]:
        pairs = zip(environment.prompts("train"), completions, strict=True)
        return await asyncio.gather(*(environment.score(prompt, [completion]) for prompt, completion in pairs))

    verdicts = [verdict for (verdict,) in asyncio.run(all_of_them())]
    environment.close()
    return [verdict.parts["correct"] if isinstance(verdict, Reward) else None for verdict in verdicts]


def word_problems(rows: list[dict], scheme: str) -> GSM8K:
    return GSM8K(
        {"train": [{"question": "?", "answer": f"#### {row['gold']}"} for row in rows]}, Gsm8kConfig(scheme=scheme)
    )


@pytest.mark.shared
@pytest.mark.parametrize("scheme", sorted(INSTRUCTIONS))
def test_schemes_disagree_with_labels_of_real_solutions_only_for_want_of_their_mark(shared: Path, scheme: str) -> None:
    rows = solutions(shared)
    verdicts = judged(word_problems(rows, scheme), [row["completion"] for row in rows])
    different = [row for row, verdict in zip(rows, verdicts, strict=True) if verdict != row["is_correct"]]
    # These completions end in `A: 42`, which covey and verl_flexible read. The others give none of the 200 right ones
    # full marks, and each for the same reason: what they look for is not there.
    assert 400 - len(different) == {"covey": 400, "values": 400, "verl_flexible": 400}.get(scheme, 200)
    assert all(row["is_correct"] and MARKS[scheme] not in row["completion"] for row in different)


@pytest.mark.shared
@pytest.mark.parametrize("scheme", sorted(INSTRUCTIONS))
def test_every_scheme_agrees_with_all_400_labels_once_answers_are_in_its_form(shared: Path, scheme: str) -> None:
    rows = solutions(shared)
    parts = [row["completion"].rpartition("A: ") for row in rows]
    asked = [DEMONSTRATIONS[scheme].format(solution=body.strip(), gold=number.strip()) for body, _, number in parts]
    verdicts = judged(word_problems(rows, scheme), asked)
    assert verdicts == [float(row["is_correct"]) for row in rows]


@pytest.mark.long
@pytest.mark.shared
@pytest.mark.parametrize(
    ("scheme", "column"),
    [
        ("trl", "trl_accuracy"),
        ("math_verify", "math_verify"),
        ("covey", "correct"),
        ("values", "correct"),
    ],
)
def test_the_math_environment_gives_the_recorded_verdicts(shared: Path, scheme: str, column: str) -> None:
    rows = answers(shared)
    problems = [{"problem": "?", "answer": row["gold"]} for row in rows]
    verdicts = judged(Mathematics({"train": problems}, MathConfig(scheme=scheme)), [row["completion"] for row in rows])
    recorded = [row["correct"] if column == "correct" else row["external"][column] for row in rows]
    pairs = zip(rows, verdicts, recorded, strict=True)
    different = {row["id"] for row, verdict, expected in pairs if verdict != expected}
    # What computes nothing: 6/8, a root of 12, 2^{10} and a binomial.
    undone = {"ma-s-031", "ma-s-045", "ma-s-066", "ma-s-067"}
    # Debatable: "eighteen", "thirty", and 1 dozen for 12, which are read.
    in_words = {"ma-s-018", "ma-s-095", "ma-s-101"}
    # 0.35 against 35\%: the parser of math-verify that is installed here (latex2sympy2_extended 1.11) reads the gold as
    # 35, so TRL and math-verify themselves say 0 today, which the test below holds.
    parsed = {"ma-s-041"}
    known = {"trl": parsed, "math_verify": parsed, "covey": undone | in_words, "values": in_words}
    assert different == known.get(scheme, set())


@pytest.mark.shared
def test_the_installed_libraries_themselves_say_zero_to_the_one_row_that_differs(shared: Path) -> None:
    rewards = pytest.importorskip("trl.rewards")
    from math_verify import parse, verify

    (row,) = (row for row in answers(shared) if row["id"] == "ma-s-041")
    gold = f"${row['gold']}$"
    assert rewards.accuracy_reward([[{"role": "assistant", "content": row["completion"]}]], [gold]) == [0.0]
    assert not verify(parse(gold), parse(row["completion"]))
    assert math_verify_accuracy(row["completion"], row["gold"]) == 0.0


def solutions(shared: Path) -> list[dict]:
    return read(shared / "data" / "gsm8k" / "model_solutions.jsonl")


def answers(shared: Path) -> list[dict]:
    return read(shared / "data" / "math_answers.jsonl")


def read(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]
