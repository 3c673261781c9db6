"""Promise 3: a run killed at any moment resumes, and ends with the same weights as a run that was never stopped."""

import os
import random
import shutil
import time
from pathlib import Path

import pytest

from .runs import (
    CURRICULUM,
    EPISODES,
    MASKED,
    NUM_STEPS,
    OF_DRAFTS,
    OF_THE_SAMPLER,
    SAVE_EVERY,
    SETTINGS,
    Process,
    fingerprint,
    finish,
    finish_well,
    kill,
    new_run,
    num_trained,
    resume,
    rows,
    saved_step,
    start,
    wait_until,
)

SLOWLY = {"REWARD_SECONDS": 0.01}
"""For runs that have to last until something happens to them."""


def kill_and_resume(folder: Path, name: str, seed: int, num_kills: int) -> None:
    """Kill the run num_kills times: after a random number of steps and a moment, or a random time after its start.

    The first kill comes after the first checkpoint, for a run that has none begins anew.
    """
    generator = random.Random(seed)
    run = folder / name
    process = new_run(folder, name, environment=SLOWLY, is_fresh=True)
    assert wait_until(lambda: saved_step(run) > 0, process)
    for index in range(num_kills):
        if index % 2 == 0:
            step = generator.randint(saved_step(run), NUM_STEPS - 2)
            wait_until(lambda step=step: num_trained(run) > step, process)  # type: ignore[misc]
            time.sleep(generator.uniform(0.0, 0.03))
        else:
            time.sleep(generator.uniform(0.0, 8.0))
        kill(process)
        if saved_step(run) == NUM_STEPS:
            return
        process = resume(folder, name, environment=SLOWLY)
    finish(process)


@pytest.fixture(scope="module")
def killed(reference: Path) -> Path:
    """A run that was killed twice."""
    kill_and_resume(reference, "killed", seed=7, num_kills=2)
    return reference / "killed"


@pytest.mark.long
def test_a_run_killed_at_random_moments_ends_with_the_same_weights_and_metrics(reference: Path, killed: Path) -> None:
    assert fingerprint(killed) == fingerprint(reference / "whole")


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("seed", range(7))
def test_seven_runs_killed_three_times_each_at_random_moments_end_alike(reference: Path, seed: int) -> None:
    kill_and_resume(reference, f"killed-{seed}", seed, num_kills=3)
    assert fingerprint(reference / f"killed-{seed}") == fingerprint(reference / "whole")
    shutil.rmtree(reference / f"killed-{seed}")


@pytest.mark.long
def test_no_step_is_counted_twice_or_left_out_in_the_logs(killed: Path) -> None:
    trained = [row["step"] for row in rows(killed) if row["kind"] == "train"]
    assert trained == list(range(1, NUM_STEPS + 1))
    sampled = [row["step"] for row in rows(killed, "rollouts.jsonl")]
    assert sampled == [step for step in range(1, NUM_STEPS + 1) for _ in range(8)]


@pytest.mark.long
def test_answers_of_evaluations_are_those_of_a_run_that_was_not_killed(reference: Path, killed: Path) -> None:
    assert rows(killed, "evaluations.jsonl") == rows(reference / "whole", "evaluations.jsonl")


def kill_again_and_again(folder: Path, name: str, seconds: tuple[float, float], most: int) -> int:
    """Kill the run again and again, so many seconds after it has taken a step, until it ends; how many kills that were.

    After each kill at most the steps since the last save are lost.
    """
    generator = random.Random(3)
    run = folder / name
    process = new_run(folder, name, environment=SLOWLY)
    for num_kills in range(most):
        done = num_trained(run)
        if not wait_until(lambda done=done: saved_step(run) > 0 and num_trained(run) != done, process):  # type: ignore[misc]
            return num_kills
        time.sleep(generator.uniform(*seconds))
        kill(process)
        # the save of the last multiple may have been under way
        assert saved_step(run) > num_trained(run) - 1 - SAVE_EVERY - num_trained(run) % SAVE_EVERY
        if saved_step(run) == NUM_STEPS:
            return num_kills + 1
        process = resume(folder, name, environment=SLOWLY)
    finish(process)
    return most


@pytest.mark.slow
def test_a_run_that_is_killed_again_and_again_gets_on_by_its_checkpoints(reference: Path) -> None:
    assert kill_again_and_again(reference, "harassed", (0.0, 0.1), most=2) == 2
    assert fingerprint(reference / "harassed") == fingerprint(reference / "whole")


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_run_that_is_killed_every_few_seconds_until_it_ends_is_the_same(reference: Path) -> None:
    assert kill_again_and_again(reference, "harassed-long", (0.1, 0.3), most=40) >= 4
    assert fingerprint(reference / "harassed-long") == fingerprint(reference / "whole")


@pytest.mark.slow
def test_a_run_with_a_torn_newest_checkpoint_resumes_from_the_one_before_exactly(reference: Path) -> None:
    run = reference / "torn"
    process = new_run(reference, "torn", environment=SLOWLY)
    assert wait_until(lambda: saved_step(run) >= 2 * SAVE_EVERY, process)
    kill(process)
    newest = sorted((run / "checkpoints").glob("step-??????"))[-1]
    os.truncate(newest / "state.pt", 1000)
    before = saved_step(run)
    output = finish_well(resume(reference, "torn"))
    assert f"checkpoint torn/checkpoints/{newest.name} is damaged (state.pt is not what was written)" in output
    assert f"resumed after step {before}" in output
    assert fingerprint(run) == fingerprint(reference / "whole")


def run_twice(reference: Path, name: str, settings: tuple[str, ...], kill_at: tuple[int, ...]) -> tuple[Path, Path]:
    """Make a run, and the same one killed and resumed at these steps. Returns both folders."""
    finish_well(new_run(reference, name, settings=settings))
    run = reference / f"{name}-killed"
    process = new_run(reference, run.name, settings=settings, environment=SLOWLY)
    for step in kill_at:
        assert wait_until(lambda step=step: num_trained(run) >= step and saved_step(run) > 0, process)  # type: ignore[misc]
        kill(process)
        process = resume(reference, run.name, environment=SLOWLY)
    finish_well(process)
    return reference / name, run


@pytest.mark.slow
def test_a_killed_run_with_a_curriculum_draws_the_prompts_it_would_have_drawn(reference: Path) -> None:
    # Before and after the group size changes
    whole, run = run_twice(reference, "taught", CURRICULUM, kill_at=(8, 23))
    assert fingerprint(run) == fingerprint(whole)
    assert [row["group_size"] for row in rows(run) if row["kind"] == "train"] == [4.0] * 20 + [3.0] * 20


@pytest.mark.slow
def test_a_killed_run_of_a_policy_that_fills_in_ends_with_the_same_weights(reference: Path) -> None:
    whole, run = run_twice(reference, "filled", (*SETTINGS, *MASKED), kill_at=(7, 23))
    assert fingerprint(run) == fingerprint(whole)
    assert all(row["kl"] > 0 for row in rows(run) if row["kind"] == "train" and row["step"] > 1)


@pytest.mark.slow
def test_a_killed_run_with_drafts_ends_with_the_weights_of_one_without(reference: Path) -> None:
    settings = (*SETTINGS, "model.nano_num_heads=1", "sampling.max_tokens=24", "sampling.temperature=0.3")
    finish_well(new_run(reference, "undrafted", settings=(*settings, "engine.speculation=off")))
    whole, run = run_twice(reference, "drafted", (*settings, "engine.speculation=on"), kill_at=(7, 23))
    assert fingerprint(run, OF_DRAFTS) == fingerprint(whole, OF_DRAFTS)
    assert fingerprint(run, OF_DRAFTS) == fingerprint(reference / "undrafted", OF_DRAFTS)
    assert sum(row.get("engine/draft_tokens", 0.0) for row in rows(run)) > 0


@pytest.mark.slow
def test_a_run_killed_amid_episodes_ends_with_the_same_weights(reference: Path) -> None:
    whole, run = run_twice(reference, "talked", EPISODES, kill_at=(7, 23))
    assert fingerprint(run, OF_THE_SAMPLER) == fingerprint(whole, OF_THE_SAMPLER)
    assert max(row["turns_max"] for row in rows(run) if row["kind"] == "train") == 3


# -------------------------------------------------------------------------------------------------------- the demo

DEMO = (
    "recipe=arithmetic",
    "num_steps=12",
    "groups_per_step=16",
    "evaluation.num_prompts=32",
    "output.save_every=1",
    "output.progress=false",
)


def start_demo(folder: Path, *words: str) -> Process:
    """With two threads, as the demo has them here, and the cold start shared by all runs of this machine."""
    cache = os.environ.get("COVEY_CACHE", str(folder / "cache"))
    return start(folder, *words, environment={"OMP_NUM_THREADS": "2", "COVEY_CACHE": cache}, is_fresh=True)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_demo_killed_ten_times_ends_with_equal_weights_and_metrics(tmp_path: Path) -> None:
    generator = random.Random(10)
    finish_well(start_demo(tmp_path, *DEMO, "hydra.run.dir=whole"))
    run = tmp_path / "killed"
    process = start_demo(tmp_path, *DEMO, "hydra.run.dir=killed")
    for num_kills in range(10):
        assert wait_until(lambda num_kills=num_kills: saved_step(run) > num_kills, process)  # type: ignore[misc]
        time.sleep(generator.uniform(0.0, 0.5))
        kill(process)
        process = start_demo(tmp_path, "resume=killed")
    finish_well(process)
    weights = "checkpoints/step-000012/policy/model.safetensors"
    assert (run / weights).read_bytes() == (tmp_path / "whole" / weights).read_bytes()
    assert rows(run) == rows(tmp_path / "whole")
    assert fingerprint(run) == fingerprint(tmp_path / "whole")
