"""The environment of programs: rewards, what is run again, what is counted, and what goes back to the policy."""

import asyncio
import logging
import re
from collections.abc import Sequence
from typing import Any

import pytest

from covey.types import Failure, Prompt, Reward
from covey_sandbox.types import Report, SandboxFailed, Test, TestResult
from covey_tasks.code.environment import (
    CORRECT_IT,
    MAX_MESSAGE,
    NO_PROGRAM,
    Code,
    is_chosen,
    reward_of,
)
from covey_tasks.code.formats import problem_of
from covey_tasks.code.problems import generate_problems
from covey_tasks.code.settings import CodeConfig

from .code_runners import Here, Told, report

DOUBLE = {
    "prompt": "Double it.",
    "entry_point": "f",
    "tests": [{"args": [n], "expected": 2 * n} for n in (1, 2, 3, 4)],
    "solution": "def f(n): return 2 * n",
    "difficulty": 3,
}
RIGHT = "Sure:\n```python\ndef f(n): return 2 * n\n```"
HALF = "def f(n): return 2 * n if n < 3 else 0"
WRONG = "def f(n): return n - 100"


def environment(runner: Any = None, **settings: Any) -> Code:
    problem = problem_of(DOUBLE)
    return Code({"train": [problem], "test": [problem]}, runner or Here(), CodeConfig(**settings))


def scores(code: Code, *completions: str) -> list[Reward | Failure]:
    return asyncio.run(code.score(code.prompts("train")[0], completions))


def values(code: Code, *completions: str) -> list[float]:
    return [found.value if isinstance(found, Reward) else float("nan") for found in scores(code, *completions)]


# ------------------------------------------------------------------------------------------------ rewards


def test_all_tests_are_worth_1_and_some_of_them_half_of_their_share() -> None:
    assert scores(environment(), RIGHT, HALF, WRONG, "no program") == [
        Reward(1.0, {"solved": 1.0, "tests_passed": 1.0}),
        Reward(0.25, {"solved": 0.0, "tests_passed": 0.5}),
        Reward(0.0, {"solved": 0.0, "tests_passed": 0.0}),
        Reward(0.0, {"solved": 0.0, "tests_passed": 0.0}),
    ]


@pytest.mark.parametrize(("weight", "value"), [(0.0, 0.0), (0.5, 0.375), (1.0, 0.75)])
def test_the_weight_of_a_part_can_be_set(weight: float, value: float) -> None:
    assert reward_of(report(True, True, False, True), weight).value == value
    assert reward_of(report(True, True, True, True), weight).value == 1.0


def test_an_empty_completion_is_worth_nothing_and_runs_nothing() -> None:
    runner = Here()
    assert values(environment(runner), "", "  \n", "<think>\ndef f(n): return 2 * n") == [0.0, 0.0, 0.0]
    assert runner.asked == []


def test_a_sandbox_that_fails_is_no_fault_of_the_program() -> None:
    def verdict(code: str, tests: Sequence[Test]) -> Report:
        raise SandboxFailed("the judge is gone")

    assert scores(environment(Told(verdict)), RIGHT) == [Failure("sandbox: the judge is gone")]


def test_a_group_of_equal_programs_runs_one() -> None:
    runner = Here()
    code = environment(runner, recheck_rate=0.0)
    assert values(code, RIGHT, RIGHT, HALF, RIGHT) == [1.0, 1.0, 0.25, 1.0]
    assert values(code, HALF) == [0.25]
    assert len(runner.asked) == 2
    metrics = code.metrics()
    assert (metrics["programs"], metrics["run_fraction"]) == (5.0, 0.4)


def test_settings_out_of_range_are_refused() -> None:
    for name, value in (("partial_weight", 1.5), ("recheck_rate", -0.1), ("cache_size", -1)):
        with pytest.raises(ValueError, match=f"{name} must be .*, got {value}"):
            environment(**{name: value})


# ------------------------------------------------------------------------------------------------ prompts, solutions


def test_it_shows_and_knows_solutions_and_says_how_hard_they_are() -> None:
    code = environment()
    (prompt,) = code.prompts("train")
    assert prompt.id == "train-0"
    assert prompt.text[0]["content"].startswith("Double it.")  # type: ignore[index]
    assert code.demonstrations("train") == [(prompt, DOUBLE["solution"])]
    assert (code.gold(prompt), code.difficulty(prompt)) == (DOUBLE["solution"], 3)
    assert values(code, code.gold(prompt) or "") == [1.0]


def test_problems_without_a_solution_are_trained_on_but_not_shown() -> None:
    problem = problem_of({name: value for name, value in DOUBLE.items() if name != "solution"})
    code = Code({"train": [problem], "test": []}, Here())
    assert code.demonstrations("train") == []
    assert code.gold(code.prompts("train")[0]) is None


def test_closing_it_closes_what_runs_programs() -> None:
    runner = Here()
    environment(runner).close()
    assert runner.closed


def test_it_says_what_isolates_programs_and_marks_runs_without_it(caplog: pytest.LogCaptureFixture) -> None:
    safe = environment()
    assert safe.facts() == {"tier": "here"}
    assert "unsafe_no_isolation" not in safe.metrics()
    assert caplog.records == []
    unsafe = environment(Told(lambda code, tests: report(True), tier="unsafe_no_isolation"))
    assert "WITHOUT ISOLATION" in caplog.text
    assert unsafe.facts() == {"tier": "unsafe_no_isolation"}
    assert unsafe.metrics()["unsafe_no_isolation"] == 1.0


# ------------------------------------------------------------------------------------------------ forged rewards


def test_programs_of_full_score_run_again_on_inputs_they_have_not_seen(caplog: pytest.LogCaptureFixture) -> None:
    problems = generate_problems("line", 1, {"train": 1, "test": 1}, 0)
    problem = problems["train"][0]
    seen = {test.args[0]: test.expected for test in problem.tests}  # type: ignore[union-attr]
    forged = f"def {problem.entry_point}(n): return {seen}[n]"
    runner = Here()
    code = Code(problems, runner, CodeConfig(recheck_rate=1.0))
    assert values(code, problem.solution or "", forged) == [1.0, 1.0]
    metrics = code.metrics()
    assert (metrics["rechecked"], metrics["recheck_disagreements"]) == (2.0, 1.0)
    assert len(runner.asked) == 4
    assert "train-0: full score, but run again: KeyError" in caplog.text
    assert forged in caplog.text


def test_no_two_second_runs_ask_about_the_same_inputs() -> None:
    problems = generate_problems("line", 1, {"train": 1, "test": 1}, 0)
    runner = Told(lambda code, tests: report(True))
    solution = problems["train"][0].solution or ""
    values(Code(problems, runner, CodeConfig(recheck_rate=1.0)), solution, f"{solution}\n\nlast = 1")
    first, second = (tests for _, tests in runner.asked if tests != problems["train"][0].tests)
    assert first != second


def test_a_program_without_full_score_is_not_run_again() -> None:
    runner = Here()
    code = environment(runner, recheck_rate=1.0)
    values(code, HALF)
    assert (code.metrics()["rechecked"], len(runner.asked)) == (0.0, 1)


def test_a_sandbox_that_fails_on_a_second_run_takes_no_reward_away(caplog: pytest.LogCaptureFixture) -> None:
    def verdict(code: str, tests: Sequence[Test]) -> Report:
        if len(runner.asked) > 1:
            raise SandboxFailed("the judge is gone")
        return report(True)

    runner = Told(verdict)
    code = environment(runner, recheck_rate=1.0)
    assert values(code, RIGHT) == [1.0]
    assert code.metrics()["recheck_disagreements"] == 0.0
    assert "could not be run again: the judge is gone" in caplog.text


def test_about_the_set_share_is_chosen_and_always_the_same() -> None:
    chosen = [is_chosen(f"program {number}", 0.01) for number in range(20_000)]
    assert 150 <= sum(chosen) <= 250
    assert chosen == [is_chosen(f"program {number}", 0.01) for number in range(20_000)]
    assert not any(is_chosen(f"program {number}", 0.0) for number in range(100))
    assert all(is_chosen(f"program {number}", 1.0) for number in range(100))


def test_programs_that_import_suspicious_modules_are_counted_with_what_they_win() -> None:
    imports = {"a": ("os", "sys"), "b": ("sys",), "c": ()}
    runner = Told(lambda code, tests: report(code != "b", imports=imports[code]))
    code = environment(runner, recheck_rate=0.0)
    values(code, "a", "b", "c", "c", "a")
    metrics = code.metrics()
    assert (metrics["imports/os"], metrics["imports/sys"], metrics["imports/gc"]) == (2.0, 3.0, 0.0)
    assert metrics["imports/reward_share"] == 0.5
    assert code.metrics()["imports/os"] == 0.0


def test_what_hangs_and_what_hands_nothing_in_is_counted() -> None:
    code = environment(Told(lambda code, tests: report(False, True, kind="timeout")), recheck_rate=0.0)
    values(code, "x", "")
    metrics = code.metrics()
    assert (metrics["timeouts"], metrics["without_program"]) == (1.0, 1.0)


# ------------------------------------------------------------------------------------------------ second turn


def replied(code: Code, answer: str) -> str | None:
    prompt = code.prompts("train")[0]
    messages = (*prompt.text, {"role": "assistant", "content": answer})
    reply = asyncio.run(code.reply(prompt, messages))  # type: ignore[arg-type]
    assert reply is None or reply["role"] == "user"
    return None if reply is None else reply["content"]


def test_the_test_that_failed_goes_back_once_it_is_asked_for() -> None:
    assert not environment().can_reply
    code = environment(max_turns=2)
    assert replied(code, WRONG) == f"f(1,) returned -99, expected 2\n{CORRECT_IT}"
    assert replied(code, "") == f"{NO_PROGRAM}\n{CORRECT_IT}"
    assert replied(code, RIGHT) is None
    assert code.metrics()["further_turns"] == 2.0


def test_of_a_test_that_is_not_told_only_the_kind_goes_back() -> None:
    assert replied(environment(max_turns=2), HALF) == f"A test that is not told fails (wrong).\n{CORRECT_IT}"
    alone = Code(
        {"train": [problem_of({**DOUBLE, "tests": DOUBLE["tests"][:1]})], "test": []}, Here(), CodeConfig(max_turns=2)
    )
    assert replied(alone, WRONG) == f"A test that is not told fails (wrong).\n{CORRECT_IT}"


def test_with_further_turns_the_share_is_that_of_the_tests_that_are_not_told() -> None:
    told = "def f(n): return {1: 2}.get(n)"
    assert (values(environment(), told), values(environment(max_turns=2), told)) == ([0.125], [0.0])
    assert values(environment(max_turns=2), RIGHT, HALF) == [1.0, pytest.approx(0.5 / 3)]


def copied(code: Code, prompt: Prompt, turns: int) -> float:
    """Return what a policy earns that never programs: it returns what it was told of the failing test."""
    known: dict[str, str] = {}
    answer = ""
    for _ in range(turns):
        branches = "".join(f"    if repr(a) == {call!r}: return {due}\n" for call, due in known.items())
        answer = f"def {prompt.columns['problem'].entry_point}(*a):\n{branches}    return None\n"
        reply = asyncio.run(code.reply(prompt, [{"role": "assistant", "content": answer}]))
        found = re.match(r"\w+(\(.*\)) returned .*, expected (.*)", str((reply or {}).get("content")))
        known |= {found[1]: found[2]} if found else {}
    (verdict,) = asyncio.run(code.score(prompt, [answer]))
    assert isinstance(verdict, Reward)
    return verdict.value


def test_copying_the_feedback_earns_nothing_over_one_turn() -> None:
    problems = generate_problems("all", None, {"train": 20, "test": 1}, 0)
    one, four = (Code(problems, Here(), CodeConfig(max_turns=turns)) for turns in (1, 4))
    earned = [
        [copied(code, prompt, turns) for prompt in code.prompts("train")] for code, turns in ((one, 1), (four, 4))
    ]
    assert sum(earned[1]) <= sum(earned[0]) + 1e-9


def test_a_message_that_goes_back_is_short() -> None:
    long = Report((TestResult(False, "wrong", "x" * 10_000),), (), 0.0)
    long = Report(long.results * 4, (), 0.0)
    said = replied(environment(Told(lambda code, tests: long), max_turns=2), WRONG)
    assert said == "x" * MAX_MESSAGE + f"\n{CORRECT_IT}"


def test_a_teacher_is_told_a_failure_of_tests_kept_back_only_its_kind() -> None:
    results = (TestResult(True, "passed", ""), TestResult(False, "wrong", "f(3) gave 5" + "!" * 10_000))
    ran = Report(results, (), 0.0)
    assert reward_of(ran, 0.5).extra["feedback"] == ("f(3) gave 5" + "!" * 10_000)[:MAX_MESSAGE]
    for num_told in (0, 1):
        assert reward_of(ran, 0.5, num_told).extra["feedback"] == "A test that is not told fails (wrong)."
    assert "feedback" not in reward_of(Report(results[:1], (), 0.0), 0.5).extra
    (nothing,) = asyncio.run(environment().score(environment().prompts("train")[0], [""]))
    assert isinstance(nothing, Reward)
    assert nothing.extra == {"feedback": "No program was found."}


def test_the_reply_and_the_reward_of_an_answer_take_one_run() -> None:
    runner = Here()
    code = environment(runner, max_turns=2, recheck_rate=0.0)
    replied(code, HALF)
    values(code, HALF)
    assert len(runner.asked) == 1


def test_logging_is_quiet_where_all_is_well(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "covey")
    values(environment(recheck_rate=1.0), RIGHT, HALF, WRONG)
    assert caplog.records == []
