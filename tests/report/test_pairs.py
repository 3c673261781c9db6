"""The same prompts before and after, and of several runs: which answers are compared, and of how many."""

import random
from pathlib import Path
from typing import Any

import pytest

from covey_report.compare import comparison, difference, groups_of, measures_of
from covey_report.logs.read import RunFiles
from covey_report.page.content import pairs_of
from covey_report.page.curves import prompts_of


def test_prompts_are_paired_by_their_id_and_those_that_were_lost_come_first() -> None:
    def answer(step: int, name: str, correct: bool) -> dict[str, Any]:
        own = {"prompt_id": name, "prompt": name, "completion": str(step), "reward": float(correct)}
        return {"step": step, "greedy": True, "correct": correct, **own}

    before = [answer(0, "a", True), answer(0, "b", False), answer(0, "c", True), answer(0, "gone", True)]
    run = RunFiles(Path("run"), answers=[*before, answer(5, "c", False), answer(5, "b", True), answer(5, "a", True)])
    found = pairs_of(run, 10_000)
    assert found["steps"] == [0, 5]
    assert found["counts"] == {"lost": 1, "gained": 1, "stayed the same": 0, "stayed wrong": 0, "stayed right": 1}
    assert [(row["id"], row["kind"]) for row in found["rows"]] == [
        ("c", "lost"),
        ("b", "gained"),
        ("a", "stayed right"),
    ]
    many = [
        answer(step, f"{right}{n}", right == (step == 0))
        for step in (0, 5)
        for n in range(9)
        for right in (True, False)
    ]
    kinds = [row["kind"] for row in pairs_of(RunFiles(Path("run"), answers=many), 10_000)["rows"]]
    assert kinds == ["lost"] * 9 + ["gained"] * 9


def test_rewards_that_do_not_say_what_is_right_are_more_or_less() -> None:
    def answer(step: int, name: str, reward: float) -> dict[str, Any]:
        return {"step": step, "greedy": True, "prompt_id": name, "prompt": name, "completion": "", "reward": reward}

    before, after = {"a": 3.0, "b": 4.0, "c": 5.0}, {"a": 2.0, "b": 4.0, "c": 9.5}
    answers = [answer(step, *one) for step, of in ((0, before), (5, after)) for one in of.items()]
    rows = pairs_of(RunFiles(Path("run"), answers=answers), 10_000)["rows"]
    assert [(row["id"], row["kind"]) for row in rows] == [("a", "lost"), ("c", "gained"), ("b", "stayed the same")]


def run(right: int, prompts: int = 100, **settings: Any) -> RunFiles:
    names = [str(k) for k in range(prompts)]
    marks = "1" * right + "0" * (prompts - right)
    first = {"step": 0, "prompts": names, "ids": names, "right": "0" * prompts, "rewards": [0.0] * prompts}
    row = {"step": 9, "prompts": names, "ids": names, "right": marks, "rewards": [float(mark) for mark in marks]}
    counts = {"num_right": [2 * int(mark) for mark in marks], "num_scored": [4] * prompts}
    return RunFiles(Path("run"), {"num_steps": 9} | settings, verdicts=[first, row | counts])


def test_runs_are_compared_prompt_by_prompt_and_by_the_settings_that_differ() -> None:
    found = comparison([run(40, seed=0, loss=None), run(60, seed=1, lr=1e-3, loss={})], ["one", "other"])
    assert found["settings"] == [("seed", ["0", "1"]), ("lr", ["null", "0.001"])]
    (gain,) = found["gains"]
    value, low, high = gain["measures"]["accuracy"]
    assert (gain["num_prompts"], value, gain["state"]) == (100, 0.2, "shown")
    assert 0.1 < low < 0.2 < high < 0.3
    assert [*gain["measures"]] == ["accuracy", "pass@1", "pass@2", "pass@4", "reward_mean"]
    assert gain["measures"]["pass@1"][0] == 0.1
    assert gain["measures"]["pass@2"][0] == pytest.approx(0.2 * 5 / 6, rel=1e-3)
    assert gain["lines"][0] == "other against one, 100 prompts, a run each: other seeds may differ by more"
    assert gain["lines"][1].startswith("accuracy +20.0 points [11.")
    assert gain["lines"][1].endswith("], 40.0 → 60.0 %")
    assert gain["lines"][-1].endswith("], 0.400 → 0.600")


def test_only_passes_of_as_many_samples_as_every_run_has_are_compared() -> None:
    rows = [{"num_scored": [samples] * 2, "right": "+-"} for samples in (4, 2)]
    assert measures_of(*rows) == ["accuracy", "pass@1", "pass@2", "reward_mean"]
    assert measures_of({"num_scored": [4], "right": "-"}) == ["reward_mean"]


def test_runs_that_answer_every_prompt_alike_are_said_to_be_the_same() -> None:
    one, other = run(40), run(40, lr=1e-3)
    words = "no difference shown, the same rewards on every prompt"
    assert comparison([one, other], ["one", "other"])["gains"][0]["words"] == words
    for side in (one, other):
        side.answers[:] = [{"step": step, "prompt": "0", "completion": f"{step}"} for step in (0, 9)]
    (same,) = comparison([one, other], ["one", "other"])["gains"]
    assert same["words"] == "the same answers"
    assert same["measures"]["accuracy"] == [0.0, None, None]
    assert same["lines"][:2] == ["other against one, 100 prompts, a run each", "accuracy +0.0 points, 40.0 → 40.0 %"]
    other.answers[-1]["completion"] = "another"
    assert comparison([one, other], ["one", "other"])["gains"][0]["words"] == words
    assert comparison([run(40), run(41, lr=1e-3)], ["one", "other"])["gains"][0]["words"] == "no difference shown"


@pytest.mark.parametrize("judged", ["1" * 50 + "-" * 50, "-" * 100])
def test_runs_without_a_prompt_that_both_could_judge_have_nothing_in_common(judged: str) -> None:
    one, other = run(40, seed=0), run(0, seed=1)
    for side, marks in ((one, judged), (other, judged[::-1])):
        rewards = [None if mark == "-" else 1.0 for mark in marks]
        counts = {"num_right": [0] * 100, "num_scored": [0] * 100}
        side.verdicts[-1] |= {"right": marks, "rewards": rewards} | counts
    found = comparison([one, other], ["one", "other"])
    assert found["together"] == "one group of runs, alike but for the seed"
    other.settings["lr"] = 1e-3
    (gain,) = comparison([one, other], ["one", "other"])["gains"]
    assert (gain["words"], gain["lines"]) == ("nothing in common", ["other against one"])


@pytest.mark.parametrize(
    ("name", "judges"),
    [
        ("rewards", True),
        ("reward_weights", True),
        ("environment.form", True),
        ("environment.num_train", False),
        ("environment.turn_timeout", False),
        ("optimizer.lr", False),
    ],
)
def test_rewards_of_other_judges_are_not_compared(name: str, judges: bool) -> None:
    (gain,) = comparison([run(40, **{name: 1}), run(90, **{name: 2})], ["one", "other"])["gains"]
    assert gain["words"] == (f"not comparable, as other settings judged: {name}" if judges else "better, shown")
    assert gain["state"] == ("none" if judges else "shown")


def test_runs_of_several_seeds_are_one_group_with_the_spread_of_seeds() -> None:
    first = [run(right, seed=seed) for seed, right in enumerate((40, 50, 60))]
    second = [run(right, seed=seed, lr=1e-3) for seed, right in enumerate((50, 62, 70))]
    found = comparison([*first, *second], list("abcdef"))
    (gain,) = found["gains"]
    assert (found["base"], gain["name"], gain["seeds"]) == ("a and 2 more seeds", "d and 2 more seeds", [3, 3])
    # Deviations of 0.1 and of 0.1007 between seeds: Welch's t(4) is 2.776, the standard error 0.0819
    value, low, high = gain["measures"]["accuracy"]
    assert value == pytest.approx(0.1067, abs=1e-3)
    assert gain["levels"]["accuracy"] == [0.5, 0.6067], "means over all seeds"
    assert low < 0.1067 - 2.776 * 0.0819
    assert high > 0.1067 + 2.776 * 0.0819
    assert gain["words"] == "no difference shown"
    one_side = comparison([*first, second[0]], list("abcd"))["gains"][0]
    assert one_side["lines"][0].endswith("3 and 1 runs: other seeds may differ by more")
    alone = comparison([first[1], second[1]], ["a", "b"])["gains"][0]
    assert alone["measures"]["accuracy"][1] > 0  # of prompts alone


@pytest.mark.parametrize(
    ("name", "is_one"),
    [
        ("seed", True),
        ("output.save_every", True),
        ("cold_start.cache_dir", True),
        ("cold_start.num_steps", False),
        ("optimizer.lr", False),
    ],
)
def test_runs_of_one_group_differ_in_nothing_that_trains(name: str, is_one: bool) -> None:
    assert groups_of([run(40, **{name: 1}), run(40, **{name: 2})]) == ([[0, 1]] if is_one else [[0], [1]])


def test_runs_of_one_group_are_taken_together_and_each_is_compared_with_the_first() -> None:
    found = comparison([run(right, seed=seed) for seed, right in enumerate((40, 50, 60))], list("abc"))
    assert [(gain["name"], gain["seeds"]) for gain in found["gains"]] == [("b", [1, 1]), ("c", [1, 1])]
    said, interval = found["together"].split("; together accuracy 50.0 ")
    assert said == "one group of runs, alike but for the seed"
    # Deviations of 0.1 between three seeds: Student's t(2) is 4.303, the standard error 0.0577
    low, high = map(float, interval.removesuffix(" on 100 prompts")[1:-1].split(", "))
    assert low < 50 - 430.3 * 0.0577
    assert high > 50 + 430.3 * 0.0577
    assert comparison([run(40, seed=0), run(50, seed=0, lr=1e-3)], ["a", "b"])["together"] is None
    assert comparison([run(40, seed=0)] * 2, ["a", "b"])["together"] == "runs of the same settings and seed"


def saved_policy(root: Path, seed: int, step: int) -> str:
    """Make the run folder of a training and return its policy's name."""
    run_folder = root / f"run-{seed}"
    run_folder.mkdir(exist_ok=True)
    (run_folder / "config.yaml").write_text(f"seed: {seed}\nnum_steps: 40\n")
    return f"{run_folder}/checkpoints/step-{step:06d}/policy"


def test_evaluations_of_policies_that_differ_in_the_seed_alone_are_one_group(tmp_path: Path) -> None:
    names = {(seed, step): saved_policy(tmp_path, seed, step) for seed in (0, 1) for step in (20, 40)}
    looks = [run(40, **{"model.name": names[of]}) for of in ((0, 20), (1, 20), (0, 40), (1, 40))]
    (gain,) = comparison(looks, list("abcd"))["gains"]
    assert (gain["name"], gain["seeds"]) == ("c and 1 more seed", [2, 2])
    steps = comparison([looks[0], looks[2]], ["early", "late"])
    assert (steps["together"], steps["gains"][0]["name"]) == (None, "late")
    assert comparison([looks[0], looks[1]], ["a", "b"])["together"].startswith("one group of runs")


def test_seeds_are_held_to_what_chance_says() -> None:
    """Two algorithms that are the same, three seeds each: the interval holds 0 in 95 % of cases."""
    draw, held = random.Random(0), 0
    ease = [draw.random() for _ in range(60)]
    for _ in range(300):
        sides = [[[float(draw.random() < one + shift) for one in ease] for shift in shifts] for shifts in
                 ([draw.gauss(0, 0.05) for _ in range(3)] for _ in range(2))]  # fmt: skip
        gain = difference(*sides)
        held += gain.low <= 0 <= gain.high
    assert held >= 279  # 93 %


def test_few_prompts_are_too_few_to_tell_between_runs_too() -> None:
    (gain,) = comparison([run(0, 19), run(19, 19, lr=1e-3)], ["a", "b"])["gains"]
    assert (gain["state"], gain["words"]) == ("few", "too few to tell")


def test_prompts_of_equal_names_that_ask_for_something_else_are_not_compared() -> None:
    def answer(step: int, prompt: str, correct: bool) -> dict[str, Any]:
        own = {"prompt": prompt, "correct": correct, "reward": float(correct), "completion": "1"}
        return {"step": step, "greedy": True, "prompt_id": "test-0", **own}

    verdict = {"step": 9, "ids": ["test-0"], "right": "1", "rewards": [1.0]}
    ends = [
        RunFiles(Path("run"), {"lr": prompt}, verdicts=[verdict | {"prompts": [prompt]}]) for prompt in ("1+1=", "2+2=")
    ]
    (gain,) = comparison(ends, ["a", "b"])["gains"]
    assert (gain["num_prompts"], gain["lines"]) == (0, ["b against a"])
    resumed = RunFiles(Path("run"), answers=[answer(0, "1+1=", False), answer(9, "2+2=", True)])
    assert pairs_of(resumed, 10_000)["rows"] == []


def test_the_interval_of_an_unfinished_run_is_over_all_its_prompts() -> None:
    assert prompts_of(run(3, 512)) == 512
    assert prompts_of(RunFiles(Path("run"), {"evaluation.num_prompts": 512})) == 0
