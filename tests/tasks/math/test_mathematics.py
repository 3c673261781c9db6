"""Mathematics with any kind of answer: rows, prompts, schemes, and answers that no algebra survives."""

import asyncio
import re
import time
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import pytest

from covey.system.workers.pool import WorkerPool, WorkerSettings
from covey.types import CutText, Failure, Reward
from covey_graders.math.equal import same_formula
from covey_graders.math.symbolic import torchrl_equal
from covey_tasks.math.mathematics import INSTRUCTIONS, Mathematics
from covey_tasks.math.settings import MathConfig
from covey_tasks.math.verifier import MathVerifier

ROW = {"problem": "What is $\\frac12+\\frac14$?", "answer": "\\frac{3}{4}", "level": "Level 2"}
TOWER = "9^{9^{9^9}}"
GOLDS = (
    *("42", "-3", "1,250", "\\frac{1}{2}", "-\\frac34", "35\\%", ".5", "\\$5", "5\\text{ cm}", "3^{\\circ}", "10_2"),
    *("\\pi", "2\\sqrt{3}", "11\\sqrt2", "\\sqrt[3]{2}", "\\frac{\\pi}{2}", "\\frac{270}7\\text{ degrees}", "\\infty"),
    *("x+1", "(x+1)^2", "y=2x+3", "6r^2-4r-24", "[2,5)", "(-\\infty,-4)\\cup(-4,\\infty)", "x \\in [-2,7]", "2,3,5"),
    *("\\{1,2\\}", "(3,-1)", "\\begin{pmatrix}1\\\\2\\end{pmatrix}", "\\text{no}", "\\text{(A)}", "C", "\\emptyset"),
)
"""Kinds of answers that MATH has."""


def environment(*rows: dict, **settings: object) -> Mathematics:
    return Mathematics({"train": rows or (ROW,), "test": ()}, MathConfig(**settings))


def scores(made: Mathematics, completions: Sequence[str]) -> list[Reward | Failure]:
    verdicts = asyncio.run(made.score(made.prompts("train")[0], completions))
    made.close()
    return verdicts


def values(made: Mathematics, *completions: str) -> list[float]:
    return [verdict.value for verdict in scores(made, completions) if isinstance(verdict, Reward)]


def test_a_cut_answer_counts_where_it_is_marked_and_not_by_its_last_formula() -> None:
    said = "So it is $x+1$", CutText("So it is $x+1$"), CutText("It is \\boxed{x+1}, for"), CutText("It is \\boxed{x+")
    assert values(environment({"problem": "?", "answer": "x+1"}), *said) == [1.0, 0.0, 1.0, 0.0]
    number = CutText("which is 7"), CutText("The answer is 7. Now")
    assert values(environment({"problem": "?", "answer": "7"}), *number) == [0.0, 1.0]


# ------------------------------------------------------------------------------------------------ rows


def test_the_gold_is_the_answer_or_the_last_box_of_the_solution() -> None:
    rows = [
        {"problem": "?", "answer": " $\\frac{1}{2}$ ", "solution": "So $\\boxed{7}$."},
        {"problem": "?", "solution": "First $\\boxed{6}$, no, $\\boxed{7}$."},
        {"problem": "?", "answer": None, "solution": "\\boxed{8}"},
        {"problem": "?", "answer": 9},
    ]
    assert [prompt.columns["gold"] for prompt in environment(*rows).prompts("train")] == ["\\frac{1}{2}", "7", "8", "9"]


def test_a_prompt_asks_for_the_schemes_form_or_says_what_it_is_told() -> None:
    (prompt,) = environment(scheme="torchrl").prompts("train")
    assert prompt.text == (
        {"role": "system", "content": INSTRUCTIONS["torchrl"]},
        {"role": "user", "content": ROW["problem"]},
    )
    assert environment(instruction="").prompts("train")[0].text == ({"role": "user", "content": ROW["problem"]},)
    assert environment(instruction="Be brief.").prompts("train")[0].text[0]["content"] == "Be brief."


def test_columns_may_have_other_names_and_the_whole_row_is_kept() -> None:
    row = {"question": "6*7?", "final": "42", "source": "book"}
    (prompt,) = environment(row, problem_column="question", answer_column="final", solution_column="worked").prompts(
        "train"
    )
    assert (prompt.columns["gold"], prompt.columns["source"]) == ("42", "book")


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        ({"problem": "?"}, "has no column 'answer' or 'solution' (has: problem)"),
        ({"problem": "?", "solution": "42"}, "has no \\boxed{} in column 'solution'"),
        ({"problem": "?", "answer": " $ $ "}, "has no answer in column 'answer', got ' $ $ '"),
        ({"problem": "?", "answer": "proof"}, "has no answer in column 'answer', got 'proof'"),
        ({"problem": "?", "answer": float("nan")}, "has no answer in column 'answer', got nan"),
        ({"problem": "?", "answer": "notfound"}, "has no answer in column 'answer', got 'notfound'"),
        ({"problem": "?", "answer": []}, "has no answer in column 'answer', got []"),
        (
            {"problem": "?", "answer": "It is true that the function has a limit."},
            "column 'answer' must be an answer, got the sentence 'It is true that the function has a limit.'",
        ),
        ({"problem": "?", "answer": "so\n#### 42"}, "has a '####' in column 'answer', which environment=gsm8k reads"),
        ({"problem": "?", "answer": [{}]}, "column 'answer' must be text, a number or a list of these, got {}"),
        ({"problem": "?", "solution": 42}, "column 'solution' must be text, got 42"),
        ({"question": "?", "answer": "42"}, "column 'problem' must be text, got None"),
    ],
)
def test_a_row_without_a_problem_or_a_gold_answer_is_refused_by_its_number(row: dict, problem: str) -> None:
    with pytest.raises(ValueError, match=f"^train row 2 {re.escape(problem)}$"):
        environment(ROW, row)


@pytest.mark.parametrize(
    "answer",
    [
        ["0.5", "1/2"],
        "['0.5', '1/2']",
        np.array(["0.5", "1/2"], dtype=object),
        ["n/a", "\\frac12"],
        '["0.5", "0.50"]',
        "The answer is $\\frac12$.",
    ],
)
def test_any_of_several_gold_answers_is_right(answer: object) -> None:
    made = environment({"problem": "?", "answer": answer})
    assert values(made, "\\boxed{0.5}", "\\boxed{\\frac12}", "\\boxed{2}") == [1.0, 1.0, 0.1]


def test_the_best_of_several_gold_answers_counts() -> None:
    made = environment({"problem": "?", "answer": ["x=1", "y=2"]})
    assert values(made, "\\boxed{x=1}", "\\boxed{y=2}", "\\boxed{x=2}", "\\boxed{1, 2}") == [1.0, 1.0, 0.1, 0.1]


def test_the_level_of_a_row_is_its_difficulty() -> None:
    made = environment(ROW, ROW | {"level": 5}, ROW | {"level": "Level ?"}, {"problem": "?", "answer": "1"})
    assert [made.difficulty(prompt) for prompt in made.prompts("train")] == [2, 5, None, None]


@pytest.mark.parametrize(
    "settings", [{"scheme": "verl_gsm8k"}, {"format_reward": 1.0}, {"timeout": 0.0}, {"num_workers": 0}]
)
def test_impossible_settings_are_refused(settings: dict) -> None:
    with pytest.raises(ValueError, match=r"must be (one of|<|>)"):
        environment(**settings)


# ------------------------------------------------------------------------------------------------ schemes


def test_covey_accepts_any_form_of_the_answer_and_rewards_one_box() -> None:
    right = ["\\boxed{\\frac{3}{4}}", "\\boxed{0.75}", "\\boxed{75\\%}", "The answer is 3/4.", "#### .75"]
    assert values(environment(), *right) == [1.0] * 5
    wrong = ["\\boxed{1}", "\\boxed{1} or \\boxed{2}", "\\boxed{}", "<think>\\boxed{1}</think> one", "1", ""]
    assert values(environment(), *wrong) == [0.1, 0.0, 0.0, 0.0, 0.0, 0.0]
    assert values(environment(format_reward=0.3), "\\boxed{1}") == [0.3]


@pytest.mark.parametrize(("scheme", "undone"), [("covey", 0.1), ("values", 1.0)])
def test_expressions_are_compared_exactly_and_covey_wants_them_computed(scheme: str, undone: float) -> None:
    made = environment({"problem": "?", "answer": "2\\sqrt{3}"}, scheme=scheme)
    found = values(made, "\\boxed{2\\sqrt3}", "\\boxed{\\sqrt{12}}", "\\boxed{3.464}", "\\boxed{2\\sqrt{2}}")
    assert found == [1.0, undone, 0.1, 0.1]


def test_the_other_form_of_a_task_about_form_is_wrong() -> None:
    made = environment({"problem": "Factor $x^2+5x+6$.", "answer": "(x+2)(x+3)"})
    assert values(made, "\\boxed{(x+3)(x+2)}", "\\boxed{x^2+5x+6}", "\\boxed{6+5x+x^2}") == [1.0, 0.1, 0.1]


def test_a_step_of_hostile_answers_keeps_no_worker_busy() -> None:
    made = environment({"problem": "?", "answer": "\\sqrt{2}"})
    began = time.process_time()
    assert values(made, *[f"\\boxed{{(x+y+z+w)^{{{99 - n}}}}}" for n in range(64)]) == [0.1] * 64
    assert made.metrics()["math_calls"] == 0.0
    assert time.process_time() - began < 2


def test_trl_reads_latex_only_and_a_gold_it_cannot_read_is_a_failure() -> None:
    assert values(environment(scheme="trl"), "\\boxed{0.75}", "0.75", "\\boxed{1}") == [1.0, 0.0, 0.0]
    unreadable = environment({"problem": "?", "answer": "\\"}, scheme="trl")
    assert scores(unreadable, ["\\boxed{1}"]) == [Failure("math-verify cannot read the gold answer '\\\\'")]


@pytest.mark.long
def test_math_verify_finds_the_answer_anywhere() -> None:
    assert values(environment(scheme="math_verify"), "it is 0.75", "\\boxed{3/4}", "it is 1") == [1.0, 1.0, 0.0]


@pytest.mark.long
def test_torchrl_takes_the_first_answer_tag_and_pays_for_a_wrong_one() -> None:
    made = environment({"problem": "?", "answer": "42"}, scheme="torchrl")
    completions = ["<answer>42</answer><answer>7</answer>", "<think>42</think><answer>7</answer>", "42", "\\boxed{42}"]
    assert scores(made, completions) == [
        Reward(1.0, {"correct": 1.0, "answer": 1.0, "think": 0.0}),
        Reward(0.1, {"correct": 0.0, "answer": 1.0, "think": 1.0}),
        Reward(0.0, {"correct": 0.0, "answer": 0.0, "think": 0.0}),
        Reward(0.0, {"correct": 0.0, "answer": 0.0, "think": 0.0}),
    ]


def test_the_torchrl_scheme_claims_no_gold_for_latex_references() -> None:
    assert torchrl_equal("42", "42.0")
    assert not torchrl_equal("\\pi", "\\pi")
    assert not torchrl_equal("$\\pi$", "\\pi")
    made = environment({"problem": "?", "answer": "\\pi"}, {"problem": "?", "answer": "42"}, scheme="torchrl")
    assert [made.gold(prompt) for prompt in made.prompts("train")] == [None, "<answer>42</answer>"]


@pytest.mark.parametrize("scheme", sorted(INSTRUCTIONS))
def test_gold_answers_of_every_kind_score_full_marks_in_every_scheme(scheme: str) -> None:
    alone = [{"problem": "?", "answer": gold} for gold in GOLDS]
    worked = [{"problem": "?", "answer": gold, "solution": f"So it is $\\boxed{{{gold}}}$."} for gold in GOLDS]
    made = environment(*alone, *worked, scheme=scheme)

    async def low() -> list[str]:
        known = [(prompt, made.gold(prompt)) for prompt in made.prompts("train")]
        judged = [(text, (await made.score(prompt, [text]))[0]) for prompt, text in known if text is not None]
        assert len(judged) == {"torchrl": 8}.get(scheme, 2 * len(GOLDS))
        return [text for text, verdict in judged if not (isinstance(verdict, Reward) and verdict.value == 1.0)]

    assert asyncio.run(low()) == []
    made.close()


# ------------------------------------------------------------------------------------------------ limits


@pytest.mark.long
@pytest.mark.parametrize(
    ("scheme", "completion", "value"),
    [
        pytest.param("trl", f"\\boxed{{{TOWER}}}", 0.0, marks=pytest.mark.slow),
        ("math_verify", f"\\boxed{{{TOWER}}}", 0.0),
        pytest.param("torchrl", "<answer>$\\binom{999999999}{499999999}$</answer>", 0.1, marks=pytest.mark.slow),
    ],
)
def test_what_hangs_algebra_is_wrong_and_counted(scheme: str, completion: str, value: float) -> None:
    made = environment({"problem": "?", "answer": "\\sqrt{2}"}, scheme=scheme, timeout=2.0)
    began = time.monotonic()
    assert values(made, completion) == [value]
    assert time.monotonic() - began < 60
    counts = made.metrics()
    assert counts["math_calls"] == 1.0
    assert counts["math_timeouts"] + counts["math_crashes"] == 1.0


def test_a_tower_of_powers_is_refused_at_sight_by_covey() -> None:
    made = environment()
    assert values(made, f"\\boxed{{{TOWER}}}") == [0.1]
    assert made.metrics()["math_calls"] == 0.0


TOWERS = r"""
9^{9^{9^9}} 9^9^9 9**9**9 9^(9^9) 9^((9)^9999) 9^\left(9^{9999}\right) 9^\bigl(9^9\bigr) 9^{(9^{9999})} 9^[9^9] 9^-(9^9)
9^{{9}^{9}} 9^{9}^{9} 9^{9}{^9} 9^{\left(9\right)^{9}} 9^\frac{9^9}{2} 9^{\frac{9^9}{2}} 9^\sqrt{9^9} 9^{\{9^9\}}
9^|9^9| 9^{x(y+1)^9} 9^{)9^9} 9^{(}9^9) 9^{99999} 9^(99999) 9^\left(99999\right) 9^\left(9\right)^9 9^\lvert9^9\rvert
99999! 9!!
"""


def test_one_expression_is_no_point_list_or_set() -> None:
    nested = "(" * 25 + "x" + ")" * 25
    assert [same_formula(nested, gold) for gold in ("(1,2)", "1,2", "\\{1,2\\}")] == [False, False, False]
    assert same_formula("\\mathbb{R}", "(-\\infty,\\infty)")
    assert same_formula("1\\pm\\sqrt2", "1+\\sqrt2,1-\\sqrt2")


def test_towers_of_powers_are_no_other_formula_and_take_no_time() -> None:
    began = time.process_time()
    assert [text for text in TOWERS.split() if same_formula(text, "x^2+y^2")] == []
    assert time.process_time() - began < 0.5


def test_a_worker_has_no_more_memory_than_it_may_have() -> None:
    pool = WorkerPool([partial(bytes, 1 << 30)], WorkerSettings(num_workers=1, address_bytes=512 << 20))
    verdict = asyncio.run(pool.call(0, {}))
    pool.close()
    assert isinstance(verdict, Failure)
    assert verdict.reason.startswith("raised MemoryError")


class Broken:
    """A pool in which every call ends so."""

    def __init__(self, reason: str) -> None:
        self.reason = reason

    async def call(self, index: int, keywords: Mapping[str, Any]) -> Failure:
        return Failure(self.reason)


@pytest.mark.parametrize(
    ("reason", "verdict", "counts"),
    [
        ("raised MemoryError", Reward(0.0, {"correct": 0.0}), (1.0, 0.0, 1.0)),
        ("ended its process (signal 11)", Reward(0.0, {"correct": 0.0}), (1.0, 0.0, 1.0)),
        ("took longer than 10 s", Reward(0.0, {"correct": 0.0}), (1.0, 1.0, 0.0)),
        ("no worker process: it did not start", Failure("no worker process: it did not start"), (0.0, 0.0, 0.0)),
    ],
)
def test_an_answer_that_breaks_a_worker_is_wrong_no_worker_is_a_failure(
    reason: str, verdict: Reward | Failure, counts: tuple[float, ...]
) -> None:
    verifier = MathVerifier()
    verifier._pool = Broken(reason)  # type: ignore[assignment]
    assert asyncio.run(verifier.trl("\\boxed{1}", "1")) == verdict
    assert tuple(verifier.metrics().values()) == counts


@pytest.mark.long
def test_a_worker_that_was_killed_is_replaced() -> None:
    made = environment(scheme="trl", timeout=3.0, num_workers=1)
    assert values(made, f"\\boxed{{{TOWER}}}", "\\boxed{\\frac{3}{4}}") == [0.0, 1.0]


def test_megabytes_of_nonsense_take_no_time() -> None:
    made = environment()
    for unit in ("\\boxed{", "\\boxed ", "<answer>", "}{", "Answer:", "\\frac", "\\text{ "):
        began = time.process_time()
        assert max(values(made, unit * (1_000_000 // len(unit)))) <= 0.1
        assert time.process_time() - began < 5
