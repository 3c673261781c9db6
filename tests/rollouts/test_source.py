"""Where groups come from: order and position of prompts, seeds of rollouts, refills and what is dropped."""

import random
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from covey.algorithm.credit.selection import zero_std
from covey.engine.base import EngineStats
from covey.engine.fake import FakeEngine
from covey.engine.native.engine import NativeEngine
from covey.environments.base import Environment
from covey.policy.models.loading import load_policy
from covey.rollouts.group_checks import GroupFilter, stop_where_nothing_is_scored
from covey.rollouts.sampler import Sampler
from covey.rollouts.settings import GroupSizeStep, group_size_at
from covey.rollouts.source import LocalSource
from covey.rollouts.stream import PromptStream, rollout_seed
from covey.run.evaluate import EvaluationConfig, answer
from covey.system import collectives
from covey.types import Failure, Group, Prompt, RunStopped, Sampling

from ..support.processes import on_two_ranks
from ..support.small import TOKENIZER, scripted, small_config, varied

NUM_PROMPTS = 6
WRITTEN = [TOKENIZER(text)["input_ids"][0] for text in "0123"]


@pytest.fixture(name="stack")
def _stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def prompts(count: int) -> list[Prompt]:
    return [Prompt(f"p{index}", "scripted", f"{index}:", {}) for index in range(count)]


def stream(count: int = NUM_PROMPTS, seed: int = 0, shuffle: bool = True) -> PromptStream:
    return PromptStream(prompts(count), seed, shuffle)


def ids(drawn: Sequence[tuple[Prompt, int]]) -> list[str]:
    return [prompt.id for prompt, _ in drawn]


def fake_source(
    stack: ExitStack, verdict: Any, *, keep: GroupFilter | None = None, rounds: int = 3, group_size: int = 2
) -> LocalSource:
    """Sample i of every prompt writes the digit i."""
    engine = FakeEngine(lambda prompt_ids, index: WRITTEN[index : index + 1], vocab_size=len(TOKENIZER))
    return source_of(stack, Sampler(engine, scripted(verdict, NUM_PROMPTS), TOKENIZER), group_size, keep, rounds)


def source_of(
    stack: ExitStack, sampler: Sampler, group_size: int, keep: GroupFilter | None = None, rounds: int = 3
) -> LocalSource:
    made = PromptStream(sampler.environment.prompts("train"), seed=0, shuffle=True)
    source = LocalSource(sampler, made, group_size, Sampling(max_tokens=5), keep, rounds)
    stack.callback(source.close)
    return source


def native_source(stack: ExitStack, environment: Environment | None = None) -> LocalSource:
    """Samples with a tiny policy of its own."""
    policy = load_policy(small_config().model, seed=0)
    engine = NativeEngine(policy, 1 << 24, max_rows=8)
    return source_of(stack, Sampler(engine, environment or scripted(varied, NUM_PROMPTS), policy.tokenizer), 3)


def written(groups: Sequence[Group]) -> list[tuple[str, list[tuple[int, ...]]]]:
    return [(group.prompt.id, [rollout.target_ids for rollout in group.rollouts]) for group in groups]


# ------------------------------------------------------------------------------------------------ prompts


def test_a_group_size_holds_from_its_step_on() -> None:
    schedule = [GroupSizeStep(step=2, group_size=4), GroupSizeStep(step=3, group_size=2)]
    assert [group_size_at(step, 8, schedule) for step in range(5)] == [8, 8, 4, 2, 2]


def test_every_prompt_comes_exactly_once_in_a_pass_however_it_is_drawn() -> None:
    made = stream(7)
    drawn = [pair for n in (3, 1, 5, 5) for pair in made.draw(n)]
    assert Counter(ids(drawn[:7])) == Counter(ids(drawn[7:])) == Counter(f"p{index}" for index in range(7))
    assert [epoch for _, epoch in drawn] == [0] * 7 + [1] * 7


def test_the_order_is_drawn_from_the_seed_and_is_another_one_in_each_pass() -> None:
    drawn = ids(stream(20).draw(40))
    assert drawn == ids(stream(20).draw(40))
    assert drawn[:20] != drawn[20:]
    assert drawn[:20] != ids(stream(20, seed=1).draw(20))
    assert drawn[:20] != [f"p{index}" for index in range(20)]


def test_without_shuffling_prompts_come_in_the_order_of_the_data() -> None:
    assert ids(stream(3, shuffle=False).draw(5)) == ["p0", "p1", "p2", "p0", "p1"]


def test_the_global_random_state_is_neither_read_nor_moved() -> None:
    random.seed(1)
    torch.manual_seed(1)
    before = random.getstate(), torch.get_rng_state()
    first = ids(stream().draw(12))
    assert (random.getstate(), torch.get_rng_state().tolist()) == (before[0], before[1].tolist())
    random.seed(2)
    torch.manual_seed(2)
    assert ids(stream().draw(12)) == first


def test_a_stream_continues_from_its_position() -> None:
    whole = ids(stream().draw(20))
    resumed = stream()
    resumed.position = 8
    assert ids(resumed.draw(12)) == whole[8:]


def test_seeds_differ_between_prompts_passes_and_runs_and_are_always_the_same() -> None:
    assert rollout_seed(0, "train-0", 0) == 3143625904250209942
    seeds = {rollout_seed(seed, f"p{p}", epoch) for seed in range(3) for p in range(3) for epoch in range(3)}
    assert len(seeds) == 27
    assert all(0 <= seed < 2**63 for seed in seeds)


# ------------------------------------------------------------------------------------------------ rollouts


def test_a_rollout_does_not_depend_on_what_else_is_sampled_with_it(stack: ExitStack) -> None:
    together = native_source(stack).take(NUM_PROMPTS)
    alone = native_source(stack)
    one_by_one = [alone.take(1)[0] for _ in range(NUM_PROMPTS)]
    assert written(one_by_one) == written(together)
    assert len({ids for _, texts in written(together) for ids in texts}) > NUM_PROMPTS


def test_the_next_pass_draws_new_answers_to_a_prompt(stack: ExitStack) -> None:
    source = native_source(stack)
    first, second = dict(written(source.take(NUM_PROMPTS))), dict(written(source.take(NUM_PROMPTS)))
    assert first.keys() == second.keys()
    assert all(first[prompt_id] != second[prompt_id] for prompt_id in first)


def test_two_groups_of_one_prompt_in_one_take_stay_two_groups(stack: ExitStack) -> None:
    groups = native_source(stack).take(NUM_PROMPTS + 2)
    counts = Counter(group.prompt.id for group in groups)
    assert sorted(counts.values()) == [1, 1, 1, 1, 2, 2]
    assert all(len(group.rollouts) == 3 for group in groups)
    assert len({ids for _, texts in written(groups) for ids in texts}) > 2 * NUM_PROMPTS


def test_a_restored_source_continues_exactly(stack: ExitStack) -> None:
    source = native_source(stack)
    source.take(4)
    state = source.state_dict()
    restored = native_source(stack)
    restored.load_state_dict(state)
    assert written(restored.take(5)) == written(source.take(5))


def test_an_evaluation_leaves_the_training_stream_where_it_is(stack: ExitStack) -> None:
    plain, looking = native_source(stack), native_source(stack)
    tests = looking.sampler.environment.prompts("test")
    assert written(plain.take(2)) == written(looking.take(2))
    looking.run(tests, 4, Sampling(max_tokens=3))
    assert written(plain.take(3)) == written(looking.take(3))


def test_an_evaluation_is_in_the_order_of_its_prompts_and_always_the_same(stack: ExitStack) -> None:
    source = native_source(stack)
    tests = source.sampler.environment.prompts("test")
    sampling = Sampling(max_tokens=3, seed=5)
    first = source.run(tests, 4, sampling)
    source.take(1)
    assert [group.prompt.id for group in first] == ["test-0", "test-1", "test-2"]
    assert written(source.run(tests, 4, sampling)) == written(first)
    assert written(source.run(tests, 4, Sampling(max_tokens=3, seed=6))) != written(first)


def test_scoring_time_and_engine_restarts_are_logged(stack: ExitStack, monkeypatch: pytest.MonkeyPatch) -> None:
    source = fake_source(stack, varied)
    clock = iter([10.0, 17.0])
    stats = iter([EngineStats(seconds=100.0, restarts=1), EngineStats(seconds=4.0, restarts=2)])
    monkeypatch.setattr("covey.rollouts.source.time", SimpleNamespace(monotonic=lambda: next(clock)))
    monkeypatch.setattr(source.sampler.engine, "take_stats", lambda: next(stats))
    source.take(1)
    assert [source.take_scoring_seconds() for _ in range(2)] == [3.0, 0.0]
    assert [source.take_metrics() for _ in range(2)] == [{"engine/restarts": 3.0}, {}]


def test_the_engine_frees_its_device_after_sampling_and_after_evaluation(stack: ExitStack) -> None:
    source, rests = fake_source(stack, varied), list[int]()
    engine: Any = source.sampler.engine
    engine.rest = lambda: rests.append(len(engine.calls))
    source.take(2)
    source.run(source.stream.prompts[:3], 2, Sampling(max_tokens=5))
    assert rests == [2, 5]  # after so many prompts


def test_published_weights_carry_their_version(stack: ExitStack) -> None:
    source = native_source(stack)
    source.publish(7)
    assert {rollout.policy_version for rollout in source.take(1)[0].rollouts} == {7}


# ------------------------------------------------------------------------------------------------ drops


def test_groups_without_spread_are_replaced_by_the_next_prompts(stack: ExitStack) -> None:
    def verdict(prompt: Prompt, text: str) -> float:
        kind = int(prompt.id.removeprefix("train-")) % 3
        return {0: float(text == "1"), 1: 1.0, 2: 0.0}[kind]

    source = fake_source(stack, verdict, keep=zero_std, rounds=9)
    groups = source.take(2)
    assert [sorted(group.rewards) for group in groups] == [[0.0, 1.0]] * 2
    drops = source.take_drops()
    assert drops["filtered_all_right"] + drops["filtered_all_wrong"] == source.stream.position - 2
    assert drops["filtered_all_right"] > 0
    assert drops["filtered_all_wrong"] > 0
    assert source.take_drops() == {}
    assert Counter(left_out.reason for left_out in source.dropped) == {k: n for k, n in drops.items() if n}
    for left_out in source.dropped:
        assert (left_out.reason == "filtered_all_right") == (left_out.group.rewards == (1.0, 1.0))


@pytest.mark.parametrize("rounds", [0, 1, 3])
def test_refills_end_at_the_bound_and_the_step_takes_what_there_is(stack: ExitStack, rounds: int) -> None:
    source = fake_source(stack, lambda prompt, text: 0.5, keep=zero_std, rounds=rounds)
    assert source.take(2) == []
    assert source.stream.position == 2 * (1 + rounds)
    assert source.take_drops() == {"unscored_rollouts": 0, "filtered_mixed": 2 * (1 + rounds)}
    assert source.take(1) == []
    assert len(source.dropped) == 1 + rounds  # those of the last step alone


def test_without_a_filter_nothing_is_drawn_again(stack: ExitStack) -> None:
    source = fake_source(stack, lambda prompt, text: 0.0)
    assert len(source.take(4)) == 4
    assert source.stream.position == 4


def test_a_group_with_fewer_than_two_scored_rollouts_is_dropped_and_counted(stack: ExitStack) -> None:
    def verdict(prompt: Prompt, text: str) -> float | Failure:
        num_bad = {"train-0": 2, "train-1": 3}.get(prompt.id, 0)
        return Failure("judge timed out") if int(text) < num_bad else 1.0

    source = fake_source(stack, verdict, group_size=3)
    groups = source.take(NUM_PROMPTS)
    assert {group.prompt.id for group in groups} == {f"train-{index}" for index in range(2, NUM_PROMPTS)}
    assert source.take_drops() == {"unscored_rollouts": 5, "unscored_groups": 2}


def test_a_group_of_one_rollout_that_is_scored_is_trained_on(stack: ExitStack) -> None:
    assert len(fake_source(stack, varied, group_size=1).take(2)) == 2


def test_a_group_that_lost_one_of_three_rollouts_is_trained_on(stack: ExitStack) -> None:
    source = fake_source(stack, lambda p, text: Failure("lost") if text == "0" else float(text), group_size=3)
    (group,) = source.take(1)
    assert (group.rewards, group.failures) == ((1.0, 2.0), (Failure("lost"),))


def test_nothing_scored_at_all_stops_the_run_and_says_why(stack: ExitStack) -> None:
    source = fake_source(stack, lambda prompt, text: Failure("no route to the judge"))
    with pytest.raises(RunStopped, match=r"^none of 6 completions could be scored: no route to the judge$"):
        source.take(3)


def test_an_evaluation_of_few_answers_that_all_fail_stops_no_run_and_is_told(
    stack: ExitStack, caplog: pytest.LogCaptureFixture
) -> None:
    source = fake_source(stack, lambda prompt, text: Failure("a judge said nan"))
    once = EvaluationConfig(num_samples=1)
    (group,) = answer(source, prompts(1), Sampling(), once).greedy
    assert (group.rollouts, group.failures) == ((), (Failure("a judge said nan"),))
    assert [len(group.failures) for group in answer(source, prompts(19), Sampling(), once).sampled] == [1] * 19
    said = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert said == [f"none of {count} completions could be scored: a judge said nan" for count in (1, 1, 19, 19)]
    with pytest.raises(RunStopped, match=r"^none of 20 completions could be scored: a judge said nan$"):
        answer(source, prompts(20), Sampling(), once)


def test_prompts_that_a_judge_has_nothing_to_say_about_stop_no_run() -> None:
    prompt = Prompt("a", "judged", "a?", {})
    stop_where_nothing_is_scored([Group(prompt, (), (Failure("not asked", is_fault=False),) * 2)])
    with pytest.raises(RunStopped, match=r"^none of 1 completions could be scored: lost$"):
        stop_where_nothing_is_scored([Group(prompt, (), (Failure("not asked", is_fault=False), Failure("lost")))])


def test_one_unscorable_prompt_among_the_refills_does_not_stop_the_run(stack: ExitStack) -> None:
    """The rule is about the whole step: a round may hold a single prompt."""

    def verdict(prompt: Prompt, text: str) -> float | Failure:
        if prompt.id in order[:3]:
            return float(text)
        return 1.0 if prompt.id == order[3] else Failure("lost")

    source = fake_source(stack, verdict, keep=zero_std, rounds=1)
    order = ids(stream_like(source).draw(NUM_PROMPTS))
    assert len(source.take(4)) == 3
    assert source.take_drops() == {"unscored_rollouts": 2, "filtered_all_right": 1, "unscored_groups": 1}


def stream_like(source: LocalSource) -> PromptStream:
    return PromptStream(source.stream.prompts, source.stream.seed, source.stream.shuffle)


# ------------------------------------------------------------------------------------------------ ranks


def test_ranks_share_the_stream_without_gap_or_overlap(stack: ExitStack, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collectives, "all_gather", lambda value: [value, value])
    taken: list[str] = []
    for rank in range(2):
        monkeypatch.setattr(collectives, "rank", lambda rank=rank: rank)
        source = fake_source(stack, varied)
        taken += [group.prompt.id for n in (2, 1) for group in source.take(n)]
        assert source.stream.position == 6
    assert sorted(taken) == [f"train-{index}" for index in range(NUM_PROMPTS)]


def test_ranks_share_an_evaluation_and_each_gets_all_groups_in_order(tmp_path: Path) -> None:
    def work() -> list[str]:
        with ExitStack() as stack:
            return [group.prompt.id for group in fake_source(stack, varied).run(prompts(5), 2, Sampling())]

    assert on_two_ranks(work, tmp_path) == [["p0", "p1", "p2", "p3", "p4"]] * 2


def test_a_rank_that_has_its_groups_moves_along_with_one_that_still_draws(
    stack: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank that left the round early would leave the other one waiting for ever."""
    monkeypatch.setattr(collectives, "all_gather", lambda value: [value, 1])
    source = fake_source(stack, lambda prompt, text: float(text), keep=zero_std, rounds=2)
    assert len(source.take(1)) == 1
    assert source.stream.position == 4
