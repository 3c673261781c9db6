"""Rewards that raise, lie, hang or leak: the run goes on without them, counts them, and stops where they are many."""

import asyncio
import itertools
import logging
import sys
import textwrap
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from covey.environments.reward_functions.environment import RewardFunctions, RewardSettings, reward_functions
from covey.environments.reward_functions.settings import RewardFunctionsConfig
from covey.loop import train
from covey.system.workers.pool import WorkerPool, WorkerSettings
from covey.types import Failure, Reward, RunStopped

from ...support.small import equal, rows, saved_weights, small_config, timeless

LATE = 10.0
"""Seconds by which a loaded machine may be late."""
MODULE = """
    import asyncio, ctypes, functools, json, os, threading, time

    def value(text): return sum(text.encode()) % 5 / 4
    def good(completions, **columns): return [value(text) for text in completions]
    def in_training(function):
        @functools.wraps(function)
        def called(prompts, completions, **columns):
            if "test" in prompts[0]:
                return good(completions)
            return function(prompts=prompts, completions=completions, **columns)
        return called

    def bad_text(text): return sum(text.encode()) % 3 == 0
    @in_training
    def or_none(completions, **columns): return [None if bad_text(text) else value(text) for text in completions]
    @in_training
    def or_nan(completions, **columns): return [float("nan") if bad_text(text) else value(text) for text in completions]
    @in_training
    def or_raise(completions, **columns):
        if any(bad_text(text) for text in completions):
            raise RuntimeError("cannot read this")
        return good(completions)

    def second(bad):
        def faulty(completions, **columns): return [value(completions[0]), bad, *good(completions[2:])]
        return in_training(faulty)
    nan, inf, minus_inf = second(float("nan")), second(float("inf")), second(float("-inf"))
    text, huge, pair, number = second("1.0"), second(1e308), second([1.0, 2.0]), second(1j)

    def at(prompts, answer, completions):
        return answer if prompts[0] == "number 1: " else good(completions)
    def too_short(prompts, completions, **columns): return at(prompts, [1.0], completions)
    def too_long(prompts, completions, **columns): return at(prompts, [1.0] * 5, completions)
    def scalar(prompts, completions, **columns): return at(prompts, 1.0, completions)
    def by_index(prompts, completions, **columns): return at(prompts, {3: 1.0, 2: 0.5, 1: 0.0, 0: 0.0}, completions)
    def nothing(prompts, completions, **columns): return at(prompts, None, completions)
    @in_training
    def broken(completions, **columns): raise KeyError("answer")

    def hangs_with(hang, prompts):
        if "test" in prompts[0]:
            return
        try:
            open("has-hung", "x").close()  # the first call of all workers
        except FileExistsError:
            return
        hang()
    def deadlock():
        lock = threading.Lock(); lock.acquire(); lock.acquire()
    def spin():
        while True: pass
    def sleeps(prompts, completions, **columns): hangs_with(lambda: time.sleep(600), prompts); return good(completions)
    def spins(prompts, completions, **columns): hangs_with(spin, prompts); return good(completions)
    def holds_the_gil(prompts, completions, **columns):
        hangs_with(lambda: sum(range(10**14)), prompts)
        return good(completions)
    def deadlocks(prompts, completions, **columns): hangs_with(deadlock, prompts); return good(completions)
    def leaves(prompts, completions, **columns): hangs_with(lambda: os._exit(3), prompts); return good(completions)
    def crashes(prompts, completions, **columns):
        hangs_with(lambda: ctypes.string_at(0), prompts)
        return good(completions)
    async def waits(prompts, completions, **columns):
        if prompts[0] == "number 1: " and "has-hung" not in os.listdir("."):
            open("has-hung", "w").close()
            await asyncio.sleep(600)
        return good(completions)

    async def later(prompts, completions, **columns):
        number = int(prompts[0])
        await asyncio.sleep(0.3 - number / 20)
        return [number + index / 10 for index in range(len(completions))]

    HELD, FILES = [], []
    def leaks(completions, **columns):
        HELD.append(bytearray(1_000_000))
        FILES.append(open(os.devnull))
        threading.Thread(target=time.sleep, args=(600,), daemon=True).start()
        held = {"pid": os.getpid(), "megabytes": len(HELD), "threads": threading.active_count(),
                "descriptors": len(os.listdir("/proc/self/fd"))}
        with open("held", "a") as file:
            file.write(json.dumps(held) + chr(10))
        return good(completions)

    def resident():
        HELD.append(b"1" * 30_000_000)
        return [os.getpid(), int(open("/proc/self/statm").read().split()[1]) * 4096]
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The current folder of a run, with its rows and its rewards."""
    (tmp_path / "faulty_rewards.py").write_text(textwrap.dedent(MODULE))
    for split, prompts in {"train": "number", "test": "test"}.items():
        lines = [f'{{"prompt": "{prompts} {n}: "}}\n' for n in range(8)]
        (tmp_path / f"{split}.jsonl").write_text("".join(lines))
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "faulty_rewards", raising=False)
    yield tmp_path
    sys.modules.pop("faulty_rewards", None)


def run(name: str, into: Path, **settings: Any) -> list[dict[str, Any]]:
    """Train with a reward of the module; the rows of the steps."""
    of_environment = {"in_process": True, "max_failure_rate": 1.0} | settings.pop("environment", {})
    config = small_config(
        num_steps=3,
        groups_per_step=3,
        environment=RewardFunctionsConfig(**of_environment),
        rewards=[f"faulty_rewards:{name}"],
        data__path=".",
        preflight__enabled=False,
        **settings,
    )
    train(config, into)
    return rows(into / "metrics.jsonl", "train")


# ------------------------------------------------------------------------------------------------ it raises


@pytest.mark.long
@pytest.mark.parametrize("name", ["or_raise", "or_nan"])
def test_completions_that_fail_are_as_if_they_were_absent(name: str, folder: Path) -> None:
    """None says that there is no reward to give; a failure must come to the same weights, bit for bit."""
    absent, failing = run("or_none", folder / "absent"), run(name, folder / "failing")
    assert equal(saved_weights(folder / "absent"), saved_weights(folder / "failing"))
    assert {row["dropped/unscored_rollouts"] for row in failing} != {0}
    renamed = [{key.replace(f"/{name}", "/or_none"): v for key, v in row.items()} for row in timeless(failing)]
    assert renamed == timeless(absent)


def test_the_group_of_a_completion_that_fails_is_normalised_without_it(folder: Path) -> None:
    run("or_raise", folder / "run", output__rollouts_per_step=100, algorithm__advantage="group_center")
    shown = [row for row in rows(folder / "run" / "rollouts.jsonl") if row["dropped"] is None]
    groups = [list(group) for _, group in itertools.groupby(shown, key=lambda row: (row["step"], row["prompt_id"]))]
    assert min(map(len, groups)) < 4
    for group in groups:
        mean = sum(row["reward"] for row in group) / len(group)
        assert [row["advantage"] for row in group] == pytest.approx([row["reward"] - mean for row in group], abs=1e-6)


def test_a_function_that_always_raises_stops_the_run_with_its_error(folder: Path) -> None:
    raised = r"raised KeyError: 'answer' \(faulty_rewards\.py:\d+\) for compl"
    reason = rf"none of \d+ completions could be scored: reward function \"broken\" {raised}"
    with pytest.raises(RunStopped, match=reason):
        run("broken", folder / "run")


@pytest.mark.long
def test_failures_above_the_rate_stop_the_run_and_below_it_do_not(folder: Path) -> None:
    with pytest.raises(RunStopped, match=r"of the last \d+ rewards failed \(max_failure_rate=0.05\); last: reward fun"):
        run("or_raise", folder / "strict", environment={"max_failure_rate": 0.05})
    assert len(run("or_raise", folder / "lenient", environment={"max_failure_rate": 0.9})) == 3


# ------------------------------------------------------------------------------------------------ it lies

VALUES = {
    "nan": "returned nan for completion 1",
    "inf": "returned inf for completion 1",
    "minus_inf": "returned -inf for completion 1",
    "text": "returned str '1.0' for completion 1",
    "huge": "returned 1e+308, beyond 3.4e+38, for completion 1",
    "pair": "returned list [1.0, 2.0] for completion 1",
    "number": "returned complex 1j for completion 1",
}
LISTS = {
    "too_short": "returned 1 values for 4 completions",
    "too_long": "returned 5 values for 4 completions",
    "scalar": "returned float 1.0, not a list of numbers",
    "by_index": "returned dict {3: 1.0, 2: 0.5, 1: 0.0, 0: 0.0}, not a list of numbers",
    "nothing": "returned NoneType None, not a list of numbers",
}


@pytest.mark.parametrize("name", VALUES)
def test_what_is_no_reward_is_refused_by_function_index_and_value(
    name: str, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "covey.rollouts.rollout")
    steps = run(name, folder / "run", output__rollouts_per_step=100)
    assert [row["dropped/unscored_rollouts"] for row in steps] == [3, 3, 3]  # one of each group
    shown = Counter((row["step"], row["prompt_id"]) for row in rows(folder / "run" / "rollouts.jsonl"))
    assert set(shown.values()) == {3}
    said = f'1 of 4 completions were not scored: reward function "faulty" {VALUES[name]}'
    assert sum(record.message.endswith(said) for record in caplog.records) >= 9


@pytest.mark.long
@pytest.mark.parametrize("name", LISTS)
def test_a_list_of_another_length_or_kind_is_never_spread_over_the_group(
    name: str, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "covey.rollouts.rollout")
    steps = run(name, folder / "run", output__rollouts_per_step=100)
    assert sum(row.get("dropped/unscored_groups", 0) for row in steps) == 1  # of eight prompts, nine groups
    assert "number 1: " not in {row["prompt"] for row in rows(folder / "run" / "rollouts.jsonl")}
    said = f'4 of 4 completions were not scored: reward function "{name}" {LISTS[name]}'
    assert any(record.message.endswith(said) for record in caplog.records)


@pytest.mark.parametrize("in_process", [True, False])
def test_answers_that_come_in_another_order_stay_with_their_prompts(in_process: bool, folder: Path) -> None:
    """The first prompt's function answers last."""
    data = {"train": [{"prompt": str(n)} for n in range(6)], "test": []}
    settings = RewardSettings(WorkerSettings(num_workers=3, timeout=60.0), in_process)
    made = RewardFunctions(data, reward_functions(["faulty_rewards:later"]), settings)

    async def score_all() -> list[list[Reward | Failure]]:
        return await asyncio.gather(*(made.score(prompt, ["a", "b"]) for prompt in made.prompts("train")))

    found = asyncio.run(score_all())
    made.close()
    values = [[judged.value for judged in scores if isinstance(judged, Reward)] for scores in found]
    assert values == [[n, n + 0.1] for n in range(6)]


# ------------------------------------------------------------------------------------------------ it hangs


HANGS = dict.fromkeys(["sleeps", "spins", "holds_the_gil", "deadlocks"], "took longer than 1.5 s")
CRASHES = {"leaves": "ended its process (exit status 3)", "crashes": "ended its process (signal 11)"}


@pytest.mark.long
@pytest.mark.parametrize(("name", "reason"), [*HANGS.items(), *CRASHES.items()])
def test_a_call_that_hangs_or_crashes_costs_its_group_and_at_most_its_deadline(
    name: str, reason: str, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "covey.rollouts.rollout")
    steps = run(name, folder / "run", environment={"in_process": False, "timeout": 1.5})
    assert (folder / "has-hung").exists()
    assert [row["num_groups"] for row in steps] == [2, 3, 3]  # the next worker scores what comes
    assert [row["dropped/unscored_rollouts"] for row in steps] == [4, 0, 0]
    assert any(record.message.endswith(f'reward function "{name}" {reason}') for record in caplog.records)
    assert (1.5 if name in HANGS else 0) <= steps[0]["seconds"] < 1.5 + LATE


@pytest.mark.long
def test_an_async_function_that_hangs_in_process_is_given_up(folder: Path) -> None:
    steps = run("waits", folder / "run", environment={"timeout": 1.5})
    assert [row["num_groups"] for row in steps] == [2, 3, 3]
    assert 1.5 <= steps[0]["seconds"] < 1.5 + LATE


@pytest.mark.long
def test_others_are_scored_while_a_call_hangs(folder: Path) -> None:
    """One worker hangs for four seconds; the other has scored thirty prompts by then."""
    data = {"train": [{"prompt": str(n)} for n in range(31)], "test": []}
    settings = RewardSettings(WorkerSettings(num_workers=2, timeout=4.0), max_failure_rate=1.0)
    made = RewardFunctions(data, reward_functions(["faulty_rewards:spins"]), settings)
    ended: dict[str, float] = {}

    async def score(prompt: Any) -> list[Reward | Failure]:
        scores = await made.score(prompt, ["a"])
        ended[prompt.id] = time.monotonic()
        return scores

    async def score_all() -> list[list[Reward | Failure]]:
        return await asyncio.gather(*(score(prompt) for prompt in made.prompts("train")))

    found = asyncio.run(score_all())
    made.close()
    hung = [index for index, scores in enumerate(found) if isinstance(scores[0], Failure)]
    assert len(hung) == 1
    assert found[hung[0]] == [Failure('reward function "spins" took longer than 4 s')]
    assert max(ended, key=lambda name: ended[name]) == f"train-{hung[0]}"


# ------------------------------------------------------------------------------------------------ it leaks


@pytest.mark.long
def test_what_a_function_leaks_is_bounded_by_the_calls_of_a_worker(folder: Path) -> None:
    data = {"train": [{"prompt": "?"}], "test": []}
    settings = RewardSettings(WorkerSettings(num_workers=1, timeout=60.0, max_calls=10))
    made = RewardFunctions(data, reward_functions(["faulty_rewards:leaks"]), settings)
    for _ in range(35):
        asyncio.run(made.score(made.prompts("train")[0], ["a"]))
    made.close()
    held = rows(folder / "held")
    assert [row["megabytes"] for row in held] == [*(list(range(1, 11)) * 3), 1, 2, 3, 4, 5]
    assert len({row["pid"] for row in held}) == 4
    assert max(row["threads"] for row in held) <= 1 + 10
    assert max(row["descriptors"] for row in held) <= min(row["descriptors"] for row in held) + 9


@pytest.mark.long
def test_the_memory_that_a_worker_holds_is_bounded(folder: Path) -> None:
    """A call leaks 30 MB; a worker that holds more than 150 MB is replaced after its call."""
    import faulty_rewards

    settings = WorkerSettings(num_workers=1, timeout=60.0, max_bytes=150_000_000)
    pool = WorkerPool([faulty_rewards.resident], settings)
    found = [asyncio.run(pool.call(0, {})) for _ in range(12)]
    pool.close()
    assert len({pid for pid, _ in found}) >= 3
    assert max(resident for _, resident in found) < 185_000_000


@pytest.mark.slow
def test_a_thousand_leaking_calls_leave_the_run_as_it_was(folder: Path) -> None:
    data = {"train": [{"prompt": "?"}], "test": []}
    settings = RewardSettings(WorkerSettings(num_workers=2, timeout=60.0, max_calls=50))
    made = RewardFunctions(data, reward_functions(["faulty_rewards:leaks"]), settings)

    async def score_all() -> None:
        for _ in range(100):
            await asyncio.gather(*(made.score(made.prompts("train")[0], ["a"]) for _ in range(10)))

    before = len(list(Path("/proc/self/fd").iterdir()))
    asyncio.run(score_all())
    after = len(list(Path("/proc/self/fd").iterdir()))
    made.close()
    held = rows(folder / "held")
    assert len(held) == 1000
    assert max(row["megabytes"] for row in held) == 50
    assert len({row["pid"] for row in held}) >= 20
    assert after <= before + 8
