"""verl's `compute_score` as a reward, and asyncio objects of modules, which belong to one loop."""

import asyncio
from collections.abc import Mapping
from functools import partial
from typing import Any

import pytest

from covey.environments.reward_functions.call import RewardCall
from covey.environments.reward_functions.environment import RewardFunctions, RewardSettings, reward_functions
from covey.environments.reward_functions.verl import adapt
from covey.system.workers.pool import WorkerSettings
from covey.types import Failure, Reward
from covey_trl.judges import compute_score

from ...support.tools import run

ROW = {
    "prompt": [{"role": "user", "content": "5 + 4?"}],
    "data_source": "mine",
    "reward_model": {"style": "rule", "ground_truth": "9"},
    "extra_info": {"split": "train"},
}


def theirs(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None, scale: float = 1.0) -> float:
    assert (data_source, extra_info) == ("mine", {"split": "train"})
    return scale * (solution_str == ground_truth)


def mapping(solution_str: str, ground_truth: str, data_source: str, **extra: Any) -> Mapping[str, float]:
    return {"score": float(solution_str == ground_truth), "acc": 0.5}


async def waits(data_source: str, solution_str: str, ground_truth: str, extra_info: Any) -> float:
    async with SEMAPHORE:
        await asyncio.sleep(0)
    return float(solution_str == ground_truth)


SEMAPHORE = asyncio.Semaphore(1)


async def judge(completions: list[str], **columns: Any) -> list[float]:
    async def one(text: str) -> float:
        async with SEMAPHORE:
            await asyncio.sleep(0.001)
            return float(len(text))

    return list(await asyncio.gather(*map(one, completions)))


class Client:
    """Remembers the loop of its first call, as pools of connections do."""

    loop: Any = None

    async def ask(self, text: str) -> float:
        running = asyncio.get_running_loop()
        self.loop = self.loop or running
        assert self.loop is running, "bound to a different event loop"
        return float(len(text))


CLIENT = Client()


async def asks(completions: list[str], **columns: Any) -> list[float]:
    return [await CLIENT.ask(text) for text in completions]


def values(function: Any, *texts: str, row: Mapping[str, Any] = ROW, calls: int = 1, in_process: bool = False) -> Any:
    settings = RewardSettings(WorkerSettings(num_workers=1), in_process, max_failure_rate=1.0)
    made = RewardFunctions({"train": [row], "test": []}, reward_functions([function]), settings)
    prompt = made.prompts("train")[0]
    found = [
        [x.reason if isinstance(x, Failure) else x.value for x in run(made.score(prompt, texts))] for _ in range(calls)
    ]
    made.close()
    return found


@pytest.mark.parametrize("in_process", [False, True])
@pytest.mark.parametrize("function", [theirs, mapping, waits, compute_score], ids=lambda f: f.__name__)
def test_verls_function_is_a_reward_as_it_stands(function: Any, in_process: bool) -> None:
    row = ROW | {"data_source": "gsm8k"} if function is compute_score else ROW
    assert values(function, "9", "8", row=row, in_process=in_process) == [[1.0, 0.0]]


def test_verls_extra_arguments_are_the_entrys_and_extra_results_are_logged() -> None:
    entry = {"function": f"{__name__}:theirs", "args": {"scale": 0.5}}
    assert values(entry, "9", row=ROW | {"scale": 8.0}) == [[0.5]]
    made = RewardFunctions({"train": [ROW], "test": []}, reward_functions([mapping]), RewardSettings(in_process=True))
    (found,) = run(made.score(made.prompts("train")[0], ["9"]))
    assert found == Reward(1.0, {"mapping": 1.0}, {"acc": 0.5})


def test_its_truth_may_be_a_column_and_a_row_without_one_is_said() -> None:
    assert values(mapping, "9", row={"prompt": "?", "ground_truth": "9"}) == [[1.0]]
    (said,) = values(mapping, "9", row={"prompt": "?", "answer": "9"})[0]
    assert "mapping needs rows with reward_model.ground_truth or ground_truth (have: answer)" in said


def test_other_functions_stay_as_they_are() -> None:
    for function in (judge, asks, partial(judge), len):
        assert adapt(function) is function


@pytest.mark.parametrize("function", [judge, asks])
def test_objects_of_a_module_meet_one_loop_in_a_worker(function: Any) -> None:
    assert values(function, "a", "bb", "ccc", row={"prompt": "?"}, calls=4) == [[1.0, 2.0, 3.0]] * 4


def test_a_call_alone_keeps_the_loop_too() -> None:
    call = RewardCall(asks)
    for _ in range(3):
        assert call(2, {"prompts": ["?"] * 2, "completions": ["a", "bb"]})["values"] == [1.0, 2.0]


@pytest.mark.parametrize(
    "source", ["math_dapo", "aime2024", "AIME25", "aime_2024", "numina_olympiads", "BytedTsinghua/DAPO"]
)
def test_sources_of_mathematics_are_judged(source: str) -> None:
    assert compute_score(source, "Answer: 34", "34", {}) == 1.0
    assert compute_score(source, "Answer: 35", "34", {}) < 1.0


def test_a_setting_names_the_judge_of_another_source() -> None:
    assert compute_score("my/set", "#### 34", "34", {}, judge="gsm8k") == 1.0
    with pytest.raises(ValueError, match="no data source 'my/set'"):
        compute_score("my/set", "#### 34", "34", {})
    with pytest.raises(ValueError, match="no data source 'gsm'"):
        compute_score("my/set", "#### 34", "34", {}, judge="gsm")


def test_any_of_several_right_answers_is_paid() -> None:
    truths = (["0.5", "7"], '["0.5", "7"]')
    assert [compute_score("math", r"\boxed{7}", truth, {}) for truth in truths] == [1.0, 1.0]
    assert compute_score("math", r"\boxed{8}", truths[0], {}) < 1.0


def of_samples(samples: list[dict[str, Any]], bonus: float = 1.0, *, log_metric: Any = None) -> list[float]:
    log_metric("asked", len(samples))
    return [bonus * (sample["completion"] == sample["answer"]) for sample in samples]


def by_keyword(*, samples: list[dict[str, Any]]) -> list[float]:
    return [float(len(sample["completion"])) for sample in samples]


class OfSamples:
    def __init__(self, bonus: float) -> None:
        self.bonus = bonus

    def __call__(self, samples: list[dict[str, Any]], scale: float = 2.0) -> list[float]:
        return [self.bonus * scale for _ in samples]


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (of_samples, [1.0, 0.0]),
        (by_keyword, [1.0, 1.0]),
        (partial(of_samples, bonus=3.0), [3.0, 0.0]),
        ({"function": f"{__name__}:of_samples", "args": {"bonus": 0.5}}, [0.5, 0.0]),
        ({"function": f"{__name__}:OfSamples", "args": {"bonus": 4}}, [8.0, 8.0]),
    ],
)
def test_a_reward_of_samples_may_have_options_and_log(given: Any, expected: list[float]) -> None:
    rows = {"train": [{"prompt": "5 + 4 =", "answer": "9"}], "test": []}
    environment = RewardFunctions(rows, reward_functions([given]), RewardSettings(in_process=True))
    scored = run(environment.score(environment.prompts("train")[0], ["9", "8"]))
    assert [reward.value for reward in scored if isinstance(reward, Reward)] == expected
