"""The orders of prompts: what they prefer, when they move on, and that state and outcomes alone decide what comes."""

import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from statistics import fmean
from typing import Any

import pytest

from covey.rollouts.curriculum import (
    EasyToHard,
    Promotion,
    SuccessRateCurriculum,
    WeightedRoundRobin,
    Window,
    is_scheduled,
)
from covey.rollouts.group_checks import Outcome
from covey.rollouts.stream import PromptSampler, PromptStream
from covey.types import Prompt

Drawn = Sequence[tuple[Prompt, int]]


def prompts(count: int, environment: str = "sums") -> list[Prompt]:
    return [Prompt(f"{environment}/{index}", environment, f"{index}:", {}) for index in range(count)]


def ids(drawn: Drawn) -> list[str]:
    return [prompt.id for prompt, _ in drawn]


def told(drawn: Drawn, success: Callable[[Prompt], float]) -> list[Outcome]:
    return [Outcome(prompt.environment, prompt.id, success(prompt)) for prompt, _ in drawn]


def near(count: int, window: Window | None = None, seed: int = 0, shuffle: bool = True) -> SuccessRateCurriculum:
    """One success rate a prompt."""
    lanes = {prompt.id: [prompt] for prompt in prompts(count)}
    return SuccessRateCurriculum(lanes, window or Window(0.3, 0.5), seed, shuffle=shuffle)


def climbing(rule: Promotion | None = None, sizes: Sequence[int] = (4, 4, 4), shuffle: bool = False) -> EasyToHard:
    """Levels 1, 2, 3 of so many prompts each, sums/0 being of level 1."""
    levels = [level for level, size in enumerate(sizes, start=1) for _ in range(size)]
    rule = rule or Promotion(promote_at=0.75, num_groups=4)
    return EasyToHard(prompts(len(levels)), levels, rule, seed=0, shuffle=shuffle)


def levels_of(drawn: Drawn, size: int = 4) -> list[int]:
    return [1 + int(prompt.id.partition("/")[2]) // size for prompt, _ in drawn]


def rate(prompt: Prompt) -> float:
    """Different for neighbours, always the same: 0, 0.25, 0.5, 0.75 or 1."""
    return int(prompt.id.partition("/")[2]) * 7 % 5 / 4


def rotation() -> WeightedRoundRobin:
    streams: dict[str, PromptSampler] = {
        "sums": EasyToHard(prompts(6), [1, 1, 2, 2, 3, 3], Promotion(0.5, 2, earlier_share=0.25), 0, shuffle=True),
        "words": SuccessRateCurriculum({p.id: [p] for p in prompts(9, "words")}, Window(0.3, 0.5), 0, shuffle=True),
        "plain": PromptStream(prompts(5, "plain"), 0, True),
    }
    return WeightedRoundRobin(streams, {"sums": 2.0, "words": 1.0, "plain": 1.0}, seed=0)


KINDS: Mapping[str, Callable[[], Any]] = {
    "success of prompts": lambda: near(12),
    "success of difficulties": lambda: SuccessRateCurriculum(
        {"1": prompts(5), "2": prompts(7, "others")}, Window(0.3, 0.5, explore=0.5), 0, shuffle=True
    ),
    "difficulty": lambda: climbing(Promotion(0.5, 3, demote_below=0.3, earlier_share=0.25), shuffle=True),
    "rotation": rotation,
}
kinds = pytest.mark.parametrize("make", KINDS.values(), ids=list(KINDS))


def history(stream: Any, num_steps: int, n: int = 5) -> list[list[tuple[str, int]]]:
    """What each step draws, when every step tells the stream what came of it."""
    found = []
    for _ in range(num_steps):
        drawn = stream.draw(n)
        found.append([(prompt.id, times) for prompt, times in drawn])
        stream.learn(told(drawn, rate))
    return found


# ------------------------------------------------------------------------------------------------ all of them


@kinds
def test_the_same_outcomes_give_the_same_prompts_and_nothing_else_decides(make: Callable[[], Any]) -> None:
    random.seed(1)
    first = history(make(), 12)
    random.seed(2)
    assert history(make(), 12) == first


@kinds
@pytest.mark.parametrize("num_steps", [0, 1, 7])
def test_a_restored_stream_continues_exactly(make: Callable[[], Any], num_steps: int) -> None:
    whole = make()
    history(whole, num_steps)
    state = whole.state_dict()
    expected = history(whole, 9)
    restored = make()
    restored.load_state_dict(state)  # what the first stream did since must not show in it
    assert history(restored, 9) == expected
    assert restored.state_dict() == whole.state_dict()
    assert restored.position == (num_steps + 9) * 5


def test_a_restored_level_remembers_the_groups_it_was_judged_by() -> None:
    before, after = climbing(Promotion(0.75, 2)), climbing(Promotion(0.75, 2))
    before.learn([Outcome("sums", "sums/0", 1.0)])
    after.load_state_dict(before.state_dict())
    after.learn([Outcome("sums", "sums/1", 0.5)])
    assert after.take_metrics()["level"] == 2.0


@kinds
def test_a_stream_can_be_put_back_to_where_it_was(make: Callable[[], Any]) -> None:
    stream = make()
    state = stream.state_dict()
    first = history(stream, 8)
    stream.load_state_dict(state)
    assert stream.state_dict() == state == make().state_dict()
    assert history(stream, 8) == first


@kinds
def test_a_prompt_that_comes_again_never_has_the_same_number(make: Callable[[], Any]) -> None:
    pairs = [pair for step in history(make(), 20) for pair in step]
    assert len(set(pairs)) == len(pairs) == 100


@kinds
def test_outcomes_matter(make: Callable[[], Any]) -> None:
    deaf, listening = make(), make()
    assert [[(p.id, t) for p, t in deaf.draw(5)] for _ in range(20)] != history(listening, 20)


@kinds
def test_every_prompt_comes_sooner_or_later(make: Callable[[], Any]) -> None:
    stream = make()
    seen = {name for step in history(stream, 60) for name, _ in step}
    assert seen == {prompt.id for prompt in stream.prompts}


@kinds
def test_the_state_of_another_kind_is_refused_in_one_line(make: Callable[[], Any]) -> None:
    with pytest.raises(ValueError, match=r"^the checkpoint's prompt stream holds position, lanes?, speed, this run's "):
        make().load_state_dict({"position": 3, "lane": 1, "speed": 2})
    with pytest.raises(ValueError, match=r"curriculum\.name and the kind of environment cannot change within a run$"):
        PromptStream(prompts(3), 0, True).load_state_dict(make().state_dict())


@kinds
def test_the_state_of_other_prompts_is_refused_by_the_name_of_one(make: Callable[[], Any]) -> None:
    stream = make()
    history(stream, 3)
    state = stream.state_dict()
    inner = next(iter(part for part in (state.get("lanes"), state.get("levels"), state.get("parts")) if part))
    inner["gone"] = next(iter(inner.values()))
    with pytest.raises(ValueError, match=r"^the checkpoint's curriculum and this run have different .*: gone$"):
        make().load_state_dict(state)


# ------------------------------------------------------------------------------------------------ by success


def test_without_outcomes_a_window_takes_every_prompt_once_in_the_plain_order() -> None:
    plain = PromptStream(prompts(12), 0, True)
    assert near(12).draw(12) == plain.draw(12)
    assert ids(near(4, shuffle=False).draw(4)) == ["sums/0", "sums/1", "sums/2", "sums/3"]


def test_prompts_inside_the_window_are_preferred_and_rest_equally_long() -> None:
    stream = near(12, Window(0.3, 0.5, explore=0.0))
    inside = {"sums/3", "sums/5", "sums/7"}
    stream.learn(told(stream.draw(12), lambda prompt: 0.4 if prompt.id in inside else 1.0))
    rounds = [ids(stream.draw(3)) for _ in range(3)]
    assert all(set(found) == inside for found in rounds)
    assert rounds[0] == rounds[1] == rounds[2]


def test_new_prompts_come_before_resting_ones_which_return_in_order() -> None:
    stream = near(6, Window(0.3, 0.5, explore=0.0), shuffle=False)
    rates = {"sums/0": 0.4, "sums/1": 0.8, "sums/2": 1.0, "sums/3": 0.0, "sums/4": 0.1, "sums/5": 0.9}
    stream.learn(told(stream.draw(4), lambda prompt: rates[prompt.id]))
    drawn = stream.draw(3)
    assert ids(drawn) == ["sums/0", "sums/4", "sums/5"]
    stream.learn(told(drawn, lambda prompt: rates[prompt.id]))
    assert ids(stream.draw(6)) == ["sums/0", "sums/4", "sums/1", "sums/3", "sums/5", "sums/2"]


def test_what_is_outside_rests_the_longer_the_farther_outside_it_is() -> None:
    stream = near(2, Window(0.3, 0.5, explore=0.0), shuffle=False)
    stream.learn([Outcome("sums", "sums/0", 0.4), Outcome("sums", "sums/1", 0.75)])
    names = [name for _ in range(16) for name in ids(stream.draw(1))]
    assert [index for index, name in enumerate(names) if name == "sums/1"] == [6, 13]
    stream.learn([Outcome("sums", "sums/1", 1.0), Outcome("sums", "sums/1", 1.0)])
    names = [name for _ in range(24) for name in ids(stream.draw(1))]
    assert [16 + index for index, name in enumerate(names) if name == "sums/1"] == [23, 33]


def test_no_prompt_comes_twice_in_one_draw_while_there_are_others() -> None:
    stream = near(10, Window(0.3, 0.5, explore=0.0))
    stream.learn(told(stream.draw(10), lambda prompt: 0.4))
    assert Counter(ids(stream.draw(25))).most_common()[0][1] == 3
    assert len(set(ids(stream.draw(10)))) == 10


def test_what_is_explored_in_a_draw_is_none_that_it_has_already() -> None:
    stream = near(10, Window(0.3, 0.5, explore=0.25), shuffle=False)
    stream.learn(told(stream.draw(10), lambda prompt: 0.4))
    # The fourth of every four positions explores, in plain order from the first prompt on
    assert ids(stream.draw(4)) == ["sums/0", "sums/1", "sums/2", "sums/3"]
    assert [len(set(ids(stream.draw(4)))) for _ in range(20)] == [4] * 20
    assert Counter(ids(stream.draw(25))).most_common()[0][1] == 3


def test_a_share_of_the_draws_goes_through_all_prompts_in_plain_order() -> None:
    stream = near(40, Window(0.3, 0.5, explore=0.25), shuffle=False)
    stream.learn(told(stream.draw(40), lambda prompt: 0.4 if prompt.id == "sums/0" else 1.0))
    explored = [ids(stream.draw(1))[0] for _ in range(40)][3::4]
    assert explored == [f"sums/{index}" for index in range(10)]


def test_a_success_rate_is_a_moving_average_of_the_groups() -> None:
    window = Window(0.3, 0.5, decay=0.75)
    assert window.renewed(None, 0.5) == 0.5
    assert window.renewed(0.5, 1.0) == 0.625
    stream = near(1, window)
    for success in (0.5, 1.0, 0.0):
        stream.learn([Outcome("sums", "sums/0", success)])
    assert stream.state_dict()["lanes"] == {"sums/0": [0, 0.46875, -1]}


@pytest.mark.parametrize(
    ("success", "distance"), [(0.3, 0.0), (0.5, 0.0), (0.4, 0.0), (0.25, 0.05), (0.0, 0.3), (0.75, 0.25), (1.0, 0.5)]
)
def test_the_ends_of_the_window_are_inside(success: float, distance: float) -> None:
    assert Window(0.3, 0.5).distance(success) == pytest.approx(distance)


def test_prompts_of_a_difficulty_share_one_success_rate() -> None:
    lanes = {"1": prompts(8, "easy"), "2": prompts(8, "middle"), "3": prompts(8, "hard")}
    stream = SuccessRateCurriculum(lanes, Window(0.3, 0.5, explore=0.25), seed=0, shuffle=True)
    success = {"easy": 0.9, "middle": 0.4, "hard": 0.0}
    for _ in range(3):
        drawn = stream.draw(8)
        stream.learn(told(drawn, lambda prompt: success[prompt.environment]))
    counts = Counter(prompt.environment for prompt, _ in stream.draw(8))
    assert counts["middle"] >= 6
    assert stream.take_metrics() == {"explored": 1.0, "in_window": 1 / 3, "success": pytest.approx(0.4, abs=0.2)}


def test_difficulties_inside_the_window_take_turns_within_a_draw() -> None:
    lanes = {"1": prompts(8, "easy"), "2": prompts(8, "middle"), "3": prompts(8, "hard")}
    stream = SuccessRateCurriculum(lanes, Window(0.3, 0.5, explore=0.0), seed=0, shuffle=False)
    stream.learn(told(stream.draw(3), lambda prompt: 1.0 if prompt.environment == "hard" else 0.4))
    assert [prompt.environment for prompt, _ in stream.draw(6)] == ["easy", "middle"] * 3


def test_the_window_logs_what_it_found_since_it_was_asked_last() -> None:
    stream = near(4)
    assert stream.take_metrics() == {"explored": 0.0}
    stream.learn([Outcome("sums", "sums/0", 0.5), Outcome("sums", "sums/1", 0.0)])
    assert stream.take_metrics() == {"explored": 0.5, "in_window": 0.5, "success": 0.25}
    assert stream.take_metrics() == {"explored": 0.5, "in_window": 0.5}


def mean_difficulty(stream: Any, solved: Sequence[float], num_steps: int) -> float:
    """Mean chance of success of the prompts of the second half, where each is tried 8 times by a policy whose chances
    do not change."""
    generator = random.Random(4)

    def chance(prompt: Prompt) -> float:
        return solved[int(prompt.id.partition("/")[2])]

    means: list[float] = []
    for _ in range(num_steps):
        drawn = stream.draw(32)
        means.append(fmean(chance(prompt) for prompt, _ in drawn))
        if isinstance(stream, SuccessRateCurriculum):
            stream.learn(told(drawn, lambda prompt: sum(generator.random() < chance(prompt) for _ in range(8)) / 8))
    return fmean(means[num_steps // 2 :])


@pytest.mark.parametrize(
    ("population", "plain"),
    [
        ([index / 1000 for index in range(1000)], 0.5),
        ([0.0] * 700 + [index / 300 for index in range(300)], 0.15),
        ([1.0] * 700 + [index / 300 for index in range(300)], 0.85),
    ],
    ids=["evenly spread", "mostly too hard", "mostly solved"],
)
def test_a_window_keeps_the_mean_success_within_it_on_simulated_populations(
    population: Sequence[float], plain: float
) -> None:
    assert mean_difficulty(PromptStream(prompts(1000), 0, True), population, 100) == pytest.approx(plain, abs=0.03)
    assert 0.3 <= mean_difficulty(near(1000, Window(0.3, 0.5, explore=0.1)), population, 100) <= 0.5


# ------------------------------------------------------------------------------------------------ by difficulty


def test_the_next_level_comes_when_the_mean_over_the_last_groups_reaches_the_threshold() -> None:
    stream = climbing(Promotion(promote_at=0.75, num_groups=4))
    for success, level in ((0.0, 1), (0.5, 1), (1.0, 1), (0.75, 1), (0.75, 2)):
        drawn = stream.draw(1)
        assert levels_of(drawn) == [1]
        stream.learn(told(drawn, lambda prompt, success=success: success))
        assert stream.take_metrics()["level"] == level
    assert levels_of(stream.draw(6)) == [2] * 6


def test_too_few_groups_for_the_mean_never_promote() -> None:
    stream = climbing(Promotion(promote_at=0.75, num_groups=4))
    for level in (1.0, 1.0, 1.0, 2.0):
        stream.learn(told(stream.draw(1), lambda prompt: 1.0))
        assert stream.take_metrics()["level"] == level


def test_what_is_left_of_a_batch_after_a_promotion_does_not_count() -> None:
    stream = climbing(Promotion(promote_at=0.75, num_groups=4))
    stream.learn(told(stream.draw(12), lambda prompt: 1.0))
    assert stream.take_metrics() == {"level": 2.0}


def test_the_last_level_stays() -> None:
    stream = climbing(Promotion(promote_at=0.5, num_groups=2))
    for _ in range(6):
        stream.learn(told(stream.draw(4), lambda prompt: 1.0))
    assert stream.take_metrics() == {"level": 3.0, "success": 1.0}


def test_a_level_goes_back_only_where_that_is_asked_for() -> None:
    for demote_below, success, expected in ((None, 0.0, 2.0), (0.25, 0.0, 1.0), (0.25, 0.25, 2.0)):
        stream = climbing(Promotion(0.75, 4, demote_below))
        stream.learn(told(stream.draw(4), lambda prompt: 1.0))
        stream.learn(told(stream.draw(4), lambda prompt, success=success: success))
        assert stream.take_metrics()["level"] == expected
        stream.learn(told(stream.draw(4), lambda prompt: 0.0))  # there is nothing below the first


def test_earlier_levels_keep_their_share_and_take_turns() -> None:
    stream = climbing(Promotion(promote_at=0.5, num_groups=1, earlier_share=0.25), sizes=(4, 4, 4))
    stream.learn([Outcome("sums", "sums/0", 1.0), Outcome("sums", "sums/4", 1.0)])
    levels = levels_of(stream.draw(80))
    assert Counter(levels) == {3: 60, 1: 10, 2: 10}
    assert all(levels[index : index + 4].count(3) == 3 for index in range(0, 80, 4))


def test_earlier_levels_are_not_counted_for_the_promotion() -> None:
    stream = climbing(Promotion(promote_at=0.5, num_groups=2))
    stream.learn(told(stream.draw(2), lambda prompt: 1.0))
    stream.learn([Outcome("sums", "sums/0", 1.0)] * 5)
    assert stream.take_metrics() == {"level": 2.0}


def test_levels_are_in_numeric_order_not_the_datas() -> None:
    stream = EasyToHard(prompts(4), [7, 0.5, 7, 3], Promotion(0.5, 1), seed=0, shuffle=False)
    order = []
    for _ in range(3):
        (drawn,) = stream.draw(1)
        order.append(drawn[0].id)
        stream.learn(told([drawn], lambda prompt: 1.0))
    assert order == ["sums/1", "sums/3", "sums/0"]


@pytest.mark.parametrize("share", [0.0, 0.1, 0.2, 0.25, 0.5, 0.9])
def test_turns_are_evenly_spread(share: float) -> None:
    turns = [is_scheduled(position, share) for position in range(1000)]
    assert abs(sum(turns) - 1000 * share) <= 1
    assert all(abs(sum(turns[start : start + 50]) - 50 * share) <= 1 for start in range(950))


# ------------------------------------------------------------------------------------------------ several environments


def test_environments_take_turns_by_their_weights() -> None:
    streams: dict[str, PromptSampler] = {name: PromptStream(prompts(7, name), 0, True) for name in ("a", "b", "c")}
    stream = WeightedRoundRobin(streams, {"a": 3.0, "b": 1.0, "c": 0.5}, seed=0)
    turns = [prompt.environment for prompt, _ in stream.draw(90)]
    assert Counter(turns) == {"a": 60, "b": 20, "c": 10}
    for end in range(1, 91):
        for name, share in (("a", 6 / 9), ("b", 2 / 9), ("c", 1 / 9)):
            assert abs(turns[:end].count(name) - end * share) <= 1


def test_turns_do_not_depend_on_how_many_are_drawn_at_a_time() -> None:
    whole = ids(rotation().draw(30))
    stream = rotation()
    assert [name for n in (1, 4, 10, 15) for name in ids(stream.draw(n))][:30] == whole


def test_each_environment_learns_only_from_its_own_prompts_and_logs_under_its_name() -> None:
    stream = rotation()
    stream.learn([Outcome("sums", "sums/0", 1.0), Outcome("sums", "sums/1", 1.0), Outcome("words", "words/3", 0.0)])
    assert stream.take_metrics() == {
        "sums/level": 2.0,
        "words/explored": pytest.approx(1 / 9),
        "words/in_window": 0.0,
        "words/success": 0.0,
    }
