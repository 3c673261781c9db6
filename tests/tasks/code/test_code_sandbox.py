"""Programs in the real sandbox: the shared data sets, completions around them, and a run full of attacks."""

import asyncio
import json
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from covey.loop import train
from covey.types import Failure, Prompt, Reward
from covey_sandbox import CallTest, Sandbox
from covey_tasks.code.environment import CachedRunner, Code
from covey_tasks.code.formats import problem_of
from covey_tasks.code.problems import Problem, generate_problems
from covey_tasks.code.settings import CodeConfig

from ...support.small import small_config


@pytest.fixture(scope="module")
def sandbox() -> Iterator[Sandbox]:
    with Sandbox(num_slots=2) as found:
        yield found


def environment(sandbox: Sandbox, problems: Sequence[Problem], **settings: Any) -> Code:
    return Code({"train": problems, "test": []}, sandbox, CodeConfig(**settings))


def score(code: Code, pairs: Sequence[tuple[Prompt, str]]) -> list[Reward | Failure]:
    async def all_at_once() -> list[list[Reward | Failure]]:
        return await asyncio.gather(*(code.score(prompt, [text]) for prompt, text in pairs))

    return [verdict for verdicts in asyncio.run(all_at_once()) for verdict in verdicts]


def values(verdicts: Sequence[Reward | Failure]) -> list[float]:
    assert not [verdict for verdict in verdicts if isinstance(verdict, Failure)]
    return [verdict.value for verdict in verdicts if isinstance(verdict, Reward)]


@pytest.mark.long
def test_reports_and_the_cache_of_verdicts_hold_no_answers(sandbox: Sandbox) -> None:
    async def ask() -> None:
        for index in range(3):
            code = f"def f(n): return {{{index}: 'a' * 8000000}}.values()"
            await cache.run(code, [CallTest((n,), expected=n) for n in range(10)], "f")

    cache = CachedRunner(sandbox, 65536)
    asyncio.run(ask())
    assert 0 < cache._verdicts.num_bytes < 3 * 10 * 2000
    results = next(iter(cache._verdicts._kept.values())).report.results
    assert max(len(result.message) for result in results) < 300


@pytest.mark.long
def test_answers_that_are_hard_to_look_at_are_low_rewards_and_no_failures(sandbox: Sandbox) -> None:
    tests = [{"args": [n], "expected": n} for n in range(4)]
    called = problem_of({"prompt": "Return n.", "entry_point": "f", "tests": tests})
    used = problem_of(
        {"prompt": "Return n.", "entry_point": "f", "tests": [f"assert {{*[f({n})]}} == {{{n}}}" for n in range(4)]}
    )
    limits = {"timeout": 1.0, "total_seconds": 4.0}
    code = environment(sandbox, [called, used], partial_weight=0.5, **limits)
    prompts = code.prompts("train")
    answers = ["range(10**5000)", "{10**5000: 1}.keys()", "[{10**5000: range(10**5000)}.items()]", "'a' * 7000000"]
    programs = [f"def f(n): return {answer} if n == 1 else n" for answer in answers]
    assert values(score(code, [(prompt, program) for prompt in prompts for program in programs])) == [0.375] * 8
    assert values(score(code, [(prompts[0], f"def f(n): return {answer}") for answer in answers])) == [0.0] * 4


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture(scope="module")
def problems(shared: Path) -> dict[str, Problem]:
    both = [*rows(shared / "data/code/humaneval.jsonl"), *rows(shared / "data/code/mbpp_sanitized.jsonl")]
    return {row["task_id"]: problem_of(row) for row in both}


@pytest.mark.long
def test_made_up_problems_of_every_family_are_solved_by_their_own_programs(sandbox: Sandbox) -> None:
    drawn = generate_problems("all", None, {"train": 24, "test": 1}, 0)["train"]
    code = environment(sandbox, drawn, recheck_rate=1.0)
    assert values(score(code, code.demonstrations("train"))) == [1.0] * len(drawn)
    metrics = code.metrics()
    assert (metrics["rechecked"], metrics["recheck_disagreements"]) == (len(drawn), 0.0)


def test_the_message_of_a_failed_test_names_call_answer_and_expectation(sandbox: Sandbox) -> None:
    (problem, *_) = generate_problems("line", 1, {"train": 1, "test": 1}, 0)["train"]
    code = environment(sandbox, [problem], max_turns=2)
    prompt = code.prompts("train")[0]
    answer = f"def {problem.entry_point}(n): return 'no'"
    reply = asyncio.run(code.reply(prompt, [{"role": "assistant", "content": answer}]))
    assert reply is not None
    first = problem.tests[0]
    assert f"{problem.entry_point}({first.args[0]})" in reply["content"]  # type: ignore[union-attr]
    assert str(first.expected) in reply["content"]  # type: ignore[union-attr]


@pytest.mark.long
def test_a_run_writes_down_what_isolated_its_programs_and_what_they_were_like(tmp_path: Path) -> None:
    config = small_config(
        environment=CodeConfig(problem="line", num_train=8, num_test=2, max_turns=2, num_slots=2),
        sampling__stop=[chr(code) for code in range(32, 127)],  # so that completions end, and get a reply
        sampling__max_tokens=40,
    )
    train(config, tmp_path)
    summary = json.loads((tmp_path / "summary.json").read_text())
    (manifest,) = tmp_path.glob("checkpoints/*/manifest.json")
    assert summary["environment"]["tier"] in ("namespace", "landlock")
    assert json.loads(manifest.read_text())["environment"] == summary["environment"]
    assert summary["reward_hacking"] is None
    steps = [row for row in rows(tmp_path / "metrics.jsonl") if row["kind"] == "train"]
    assert all(row["environment/programs"] > 0 for row in steps)
    assert all(row["environment/further_turns"] > 0 for row in steps)
    said = [row["completion"][1]["content"] for row in rows(tmp_path / "rollouts.jsonl") if len(row["completion"]) == 3]
    assert any("Write the corrected program." in text for text in said)


@pytest.mark.long
@pytest.mark.shared
def test_every_solution_of_the_shared_data_sets_scores_1(sandbox: Sandbox, problems: dict[str, Problem]) -> None:
    code = environment(sandbox, list(problems.values()), recheck_rate=0.0)
    verdicts = values(score(code, code.demonstrations("train")))
    names = [name for name, value in zip(problems, verdicts, strict=True) if value != 1.0]
    assert len(verdicts) == 296
    assert names == []


@pytest.mark.shared
@pytest.mark.slow
def test_shared_completions_score_as_expected(sandbox: Sandbox, problems: dict[str, Problem], shared: Path) -> None:
    """All of them, those included that depend on a choice: the rule of extraction is the one that they expect."""
    limits = {"timeout": 2.0, "total_seconds": 8.0}
    completions = rows(shared / "data/code/completions.jsonl")
    code = environment(sandbox, [problems[row["task_id"]] for row in completions], recheck_rate=0.0, **limits)
    pairs = list(zip(code.prompts("train"), (row["completion"] for row in completions), strict=True))
    verdicts = score(code, pairs)
    wrong = []
    for row, verdict in zip(completions, verdicts, strict=True):
        assert isinstance(verdict, Reward)
        expected = row["expected"] or 0.5 * row.get("expected_fraction", verdict.parts["tests_passed"])
        if abs(verdict.value - expected) > 1e-6 or (row["expected"] == 1.0) != (verdict.value == 1.0):
            wrong.append((row["id"], row["kind"], verdict))
    assert len(verdicts) == 62
    assert wrong == []


@pytest.mark.shared
@pytest.mark.slow
def test_no_attack_among_the_completions_of_a_step_gets_more_than_it_is_due(sandbox: Sandbox, shared: Path) -> None:
    """One completion in ten comes from the attack file; honest ones beside them keep their rewards."""
    cases = [row for row in rows(shared / "sandbox/attacks.jsonl") if not row.get("needs")]
    attacks = [problem_of({**row, "prompt": row["must"]}) for row in cases]
    honest = generate_problems("starters", None, {"train": 9 * len(attacks), "test": 1}, 0)["train"]
    limits = {"timeout": 3.0, "total_seconds": 12.0}
    code = environment(sandbox, [*attacks, *honest], recheck_rate=0.0, **limits)
    texts = [row["code"] for row in cases] + [problem.solution or "" for problem in honest]
    due = [row["reward"] if row["reward"] == 1.0 else 0.5 * row["reward"] for row in cases] + [1.0] * len(honest)
    order = list(range(len(texts)))
    random.Random(0).shuffle(order)
    prompts = code.prompts("train")
    found = values(score(code, [(prompts[index], texts[index]) for index in order]))
    names = [row["name"] for row in cases] + ["honest"] * len(honest)
    wrong = [(names[index], value) for index, value in zip(order, found, strict=True) if value != due[index]]
    assert len(attacks) >= 45
    assert wrong == []
