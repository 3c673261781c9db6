"""The curriculum in a source and in a run: several ranks agree, group sizes follow their schedule, and it is logged."""

import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict, replace
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from covey.algorithm.credit.selection import zero_std
from covey.config.schema import Config, EvaluationConfig
from covey.engine.fake import FakeEngine
from covey.environments.arithmetic import Arithmetic
from covey.environments.mixture import Mixture
from covey.environments.settings import ArithmeticConfig
from covey.loop import train
from covey.rollouts.curriculum import EasyToHard, Promotion, SuccessRateCurriculum, Window
from covey.rollouts.sampler import Sampler
from covey.rollouts.settings import CurriculumConfig, GroupSizeStep
from covey.rollouts.source import LocalSource
from covey.rollouts.stream import PromptSampler, PromptStream
from covey.run.build import training_stream
from covey.run.evaluate import evaluate, evaluation_from
from covey.run.records.summary import RunFacts, summary
from covey.system import collectives
from covey.types import Failure, Prompt, Sampling
from covey_report.runs.tables import before_after

from ..support.small import TOKENIZER, rows, scripted, small_config, use

NUM_PROMPTS = 12
WRITTEN = [TOKENIZER(text)["input_ids"][0] for text in "01234567"]


@pytest.fixture(name="stack")
def _stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def number(prompt: Prompt) -> int:
    return int(prompt.id.rpartition("-")[2])


def solved(prompt: Prompt, text: str) -> float:
    """Sample i writes the digit i; the first `number % 5` of four samples are right."""
    return float(int(text) < number(prompt) % 5)


def window(prompts: Sequence[Prompt]) -> SuccessRateCurriculum:
    return SuccessRateCurriculum({prompt.id: [prompt] for prompt in prompts}, Window(0.3, 0.5), 0, shuffle=True)


def levels(prompts: Sequence[Prompt]) -> EasyToHard:
    difficulties = [number(prompt) % 3 for prompt in prompts]
    return EasyToHard(prompts, difficulties, Promotion(0.4, 3, earlier_share=0.25), 0, shuffle=True)


def source_of(stack: ExitStack, make: Any = window, verdict: Any = solved, **settings: Any) -> LocalSource:
    engine = FakeEngine(lambda prompt_ids, index: WRITTEN[index : index + 1], vocab_size=len(TOKENIZER))
    environment = scripted(verdict, NUM_PROMPTS)
    source = LocalSource(
        Sampler(engine, environment, TOKENIZER),
        make(environment.prompts("train")),
        settings.pop("group_size", 4),
        Sampling(max_tokens=5),
        **settings,
    )
    stack.callback(source.close)
    return source


# ------------------------------------------------------------------------------------------------ outcomes


def test_a_success_is_a_reward_of_at_least_the_threshold(stack: ExitStack) -> None:
    source = source_of(stack, verdict=lambda prompt, text: int(text) / 4, correct_above=0.5)
    source.take(1)
    assert source.take_metrics()["curriculum/success"] == 0.5
    source = source_of(stack, verdict=lambda prompt, text: int(text) / 4, correct_above=0.75)
    source.take(1)
    assert source.take_metrics()["curriculum/success"] == 0.25


def test_what_could_not_be_scored_is_no_failure_of_the_policy(stack: ExitStack) -> None:
    def verdict(prompt: Prompt, text: str) -> float | Failure:
        return Failure("lost") if number(prompt) == 0 or text == "0" else float(text == "1")

    source = source_of(stack, verdict=verdict)
    source.take(NUM_PROMPTS)
    measured = {name: success for name, (_, success, _) in source.state_dict()["lanes"].items()}
    assert measured == {f"train-{index}": 1 / 3 if index else None for index in range(NUM_PROMPTS)}


def test_groups_that_a_filter_refuses_are_learnt_from_all_the_same(stack: ExitStack) -> None:
    source = source_of(stack, verdict=lambda prompt, text: 1.0, keep=zero_std, filter_rounds=2)
    assert source.take(3) == []
    assert source.stream.position == 9
    assert source.take_metrics() == {
        "curriculum/explored": 0.75,
        "curriculum/in_window": 0.0,
        "curriculum/success": 1.0,
    }


def test_evaluations_teach_a_curriculum_nothing(stack: ExitStack) -> None:
    source = source_of(stack)
    before = source.state_dict()
    source.run(source.sampler.environment.prompts("train"), 4, Sampling(max_tokens=5))
    assert source.state_dict() == before


def test_without_a_curriculum_nothing_is_gathered_and_nothing_logged(
    stack: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    gathered: list[Any] = []
    monkeypatch.setattr(collectives, "all_gather", lambda value: gathered.append(value) or [value])
    source = source_of(stack, lambda prompts: PromptStream(prompts, 0, True))
    source.take(2)
    assert gathered == [2]
    assert source.take_metrics() == {}
    assert source.state_dict() == {"position": 2}


# ------------------------------------------------------------------------------------------------ ranks


class Ranks:
    """Two threads that are the ranks of a run, and meet where those gather."""

    def __init__(self) -> None:
        self._own = threading.local()
        self._barrier = threading.Barrier(2)
        self._values: list[Any] = [None, None]

    def rank(self) -> int:
        return int(self._own.rank)

    def all_gather(self, value: Any) -> list[Any]:
        self._values[self.rank()] = value
        self._barrier.wait(timeout=60)
        found = list(self._values)
        self._barrier.wait(timeout=60)
        return found

    def take(self, source: LocalSource, rank: int, share: int, num_steps: int) -> list[list[str]]:
        self._own.rank = rank
        return [[group.prompt.id for group in source.take(share)] for _ in range(num_steps)]


@pytest.mark.parametrize("make", [window, levels])
@pytest.mark.parametrize("shares", [(2, 2), (3, 1), (4, 0)])
def test_two_ranks_share_one_curriculums_draws_and_its_state(
    stack: ExitStack, monkeypatch: pytest.MonkeyPatch, make: Any, shares: tuple[int, int]
) -> None:
    ranks, sources = Ranks(), [source_of(stack, make) for _ in range(2)]
    with monkeypatch.context() as patch, ThreadPoolExecutor(2) as pool:
        patch.setattr(collectives, "rank", ranks.rank)
        patch.setattr(collectives, "all_gather", ranks.all_gather)
        jobs = [pool.submit(ranks.take, sources[rank], rank, shares[rank], 8) for rank in range(2)]
        first, second = (job.result(timeout=120) for job in jobs)
    alone = source_of(stack, make)
    assert [[*ours, *theirs] for ours, theirs in zip(first, second, strict=True)] == [
        [group.prompt.id for group in alone.take(4)] for _ in range(8)
    ]
    assert [(len(ours), len(theirs)) for ours, theirs in zip(first, second, strict=True)] == [shares] * 8
    assert sources[0].state_dict() == sources[1].state_dict() == alone.state_dict()
    assert sources[0].take_metrics() == sources[1].take_metrics() == alone.take_metrics()


# ------------------------------------------------------------------------------------------------ group sizes


def test_group_sizes_follow_their_schedule_by_the_version_that_samples(stack: ExitStack) -> None:
    schedule = [GroupSizeStep(2, 3), GroupSizeStep(3, 2)]
    source = source_of(stack, group_size=5, later_sizes=schedule)
    sizes = []
    for version in range(5):
        source.publish(version)
        (group,) = source.take(1)
        sizes.append(len(group.rollouts))
        source.publish(version + 1)  # as a step does before it is logged
        assert source.take_metrics()["group_size"] == sizes[-1]
    assert sizes == [5, 5, 3, 2, 2]


def test_an_evaluation_has_its_own_number_of_samples(stack: ExitStack) -> None:
    source = source_of(stack, later_sizes=[GroupSizeStep(1, 2)])
    source.publish(1)
    (group,) = source.run(source.sampler.environment.prompts("test")[:1], 5, Sampling(max_tokens=5))
    assert len(group.rollouts) == 5


# ------------------------------------------------------------------------------------------------ evaluation


def test_an_evaluation_of_several_environments_says_it_of_each(stack: ExitStack) -> None:
    parts = {"good": scripted(lambda prompt, text: 1.0), "half": scripted(lambda prompt, text: float(text == "1"))}
    source = source_of(stack)
    source.sampler = replace(source.sampler, environment=Mixture(parts, {}))
    prompts = source.sampler.environment.prompts("test")
    asked = EvaluationConfig(num_samples=2, k=[1, 2])
    found = evaluate(source, prompts, Sampling(max_tokens=5), asked)
    assert found.reward_mean.value == 0.75
    assert {name: part.reward_mean.value for name, part in found.parts.items()} == {"good": 1.0, "half": 0.5}
    assert [part.num_prompts for part in found.parts.values()] == [3, 3]
    assert found.parts["half"].pass_at_k[2].value == 1.0
    assert evaluation_from(asdict(found)) == found
    assert evaluate(source, prompts[:3], Sampling(max_tokens=5), asked).parts == {}
    told = summary(RunFacts("completed", 0, 1, 1.0, {}), found, found)
    assert told["after"]["parts"]["half"]["reward_mean"]["value"] == 0.5
    assert told["gain"]["parts"]["good"]["accuracy"]["value"] == 0.0
    shown = Console(width=120, record=True, file=StringIO())
    shown.print(before_after(told))
    assert {line.split()[0] for line in shown.export_text().splitlines() if line} >= {"good,", "half,"}


# ------------------------------------------------------------------------------------------------ from settings


def stream_of(**curriculum: Any) -> PromptSampler:
    environment = Arithmetic([1, 2], 8, 4)
    config = Config(environment=ArithmeticConfig(levels=[1, 2]), curriculum=CurriculumConfig(**curriculum))
    return training_stream(config, environment, environment.prompts("train"))


def test_the_settings_choose_the_order() -> None:
    assert isinstance(stream_of(), PromptStream)
    assert isinstance(stream_of(name="success"), SuccessRateCurriculum)
    easy = stream_of(name="difficulty")
    assert isinstance(easy, EasyToHard)
    assert {prompt.columns["level"] for prompt, _ in easy.draw(8)} == {1}
    per = stream_of(name="success", per="difficulty")
    assert per.state_dict().keys() == {"position", "tour", "lanes"}
    per.draw(8)
    assert per.state_dict()["lanes"].keys() == {"1", "2"}


@pytest.mark.long
def test_a_run_logs_its_level_and_its_group_size_and_resumes_with_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The policy is random, so every sum is wrong; a reward of 0 counts as a success here."""
    use(monkeypatch, Arithmetic([1, 2, 3], 24, 6))
    config = small_config(num_steps=4, evaluation__correct_above=0.0, curriculum__name="difficulty")
    config.curriculum.promotion_groups = 3
    config.group_size_schedule = [GroupSizeStep(2, 3)]
    train(config, tmp_path)
    found = rows(tmp_path / "metrics.jsonl", "train")
    assert [row["curriculum/level"] for row in found] == [1.0, 2.0, 2.0, 3.0]
    assert [row["group_size"] for row in found] == [4.0, 4.0, 3.0, 3.0]
    assert [row["completion_length_max"] <= 4 for row in found] == [True] * 4
