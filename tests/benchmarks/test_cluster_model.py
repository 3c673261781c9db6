"""The models of a cluster, on cases that can be computed by hand, and against each other."""

import random
from dataclasses import replace

import pytest

from benchmarks import cluster_model
from benchmarks.scale.cluster_simulation import Cluster, Simulation, best_split, least_bound, predict, simulate, splits
from benchmarks.scale.weight_push import NET_400, PCIE, one_by_one_seconds, push_seconds
from covey.rollouts.buffer import Bound

ONE_SECOND = Cluster(
    samplers=1,
    trainers=1,
    groups_per_step=1,
    group_size=1,
    places=4,
    decode_seconds=0.01,
    decode_seconds_each=0.0,
    mean_tokens=100.0,
    sigma=0.0,
    train_seconds_per_token=0.01,
    push_seconds=0.0,
)
"""Sampling a group takes a second, training on it another one."""


def test_the_prediction_of_four_groups_at_bound_0() -> None:
    # Groups of 1 and 2 s: the step runs from 2 to 3. Those of 3 and 4 s start at 3: it runs from 7 to 8.
    found = predict([1.0, 2.0, 3.0, 4.0], 2, Bound(2, 0), 1.0)
    assert found.step_seconds == 5.0
    assert found.waited_share == pytest.approx(6 / 8)
    assert found.ages == (0, 0, 0, 0)


def test_the_prediction_of_the_same_groups_at_bound_1() -> None:
    # The third starts at 1 in the place of the first, the fourth at 2: the second step runs from 6 to 7.
    found = predict([1.0, 2.0, 3.0, 4.0], 2, Bound(2, 1), 1.0)
    assert found.step_seconds == 4.0
    assert found.waited_share == pytest.approx(5 / 7)
    assert found.ages == (0, 0, 1, 1)


def test_a_prediction_counts_the_push_only_where_groups_wait_for_it() -> None:
    seconds = [1.0] * 12
    assert predict(seconds, 2, Bound(2, 0), 1.0, push_seconds=0.5).step_seconds == 2.5
    assert predict(seconds, 2, Bound(2, 3), 1.0, push_seconds=0.5).step_seconds == 1.0


def test_weights_that_are_published_every_second_step_are_waited_for_there_alone() -> None:
    # Sampling 0 to 1, training 1 to 2, and 1 more as the next group needs no new weights; then again from 3.
    found = predict([1.0] * 6, 1, Bound(1, 0, publish_every=2), 1.0)
    assert found.ages == (0, 0, 0, 0, 0, 0)
    assert found.step_seconds == pytest.approx((9.0 - 2.0) / 5)


@pytest.mark.parametrize(
    ("longest", "train", "per_batch", "bound"), [(1.0, 1.0, 0.5, 1), (163.0, 46.0, 30.0, 4), (0.0, 1.0, 0.5, 0)]
)
def test_the_least_bound_at_which_the_trainer_need_not_wait(
    longest: float, train: float, per_batch: float, bound: int
) -> None:
    assert least_bound(longest, train, 0.0, per_batch) == bound


@pytest.mark.parametrize(("bound", "step", "busy", "age"), [(0, 2.0, 0.5, 0.0), (1, 1.0, 1.0, 1.0)])
def test_sampling_and_training_take_turns_at_bound_0_and_overlap_at_bound_1(
    bound: int, step: float, busy: float, age: float
) -> None:
    found = simulate(replace(ONE_SECOND, max_staleness=bound), steps=10)
    assert found.step_seconds == pytest.approx(step)
    assert found.trainer_busy == pytest.approx(busy)
    assert found.sampler_busy == pytest.approx(busy)
    assert found.mean_age == age


def test_steps_that_come_in_bursts_are_measured_over_whole_bursts() -> None:
    """Training takes no time, so four groups end together once a second."""
    cluster = replace(ONE_SECOND, max_staleness=3, train_seconds_per_token=0.0)
    assert [simulate(cluster, steps).step_seconds for steps in (1, 6)] == pytest.approx([0.25, 0.25])


def test_completions_of_one_sampler_slow_each_other() -> None:
    """Two at a time take (10 + 2 * 10) ms a token, so 100 tokens take 3 s."""
    cluster = replace(ONE_SECOND, group_size=2, decode_seconds_each=0.01)
    assert simulate(cluster, steps=4).step_seconds == pytest.approx(3.0 + 2.0)


def test_a_place_that_falls_free_speeds_the_others_up() -> None:
    """One of 100 and one of 200 tokens: 100 tokens at 30 ms each, then 100 at 20 ms."""
    simulation = Simulation(replace(ONE_SECOND, group_size=2, decode_seconds_each=0.01, train_seconds_per_token=0.0))
    lengths = iter((100, 200) * 9)
    simulation._length = lambda: next(lengths)  # type: ignore[method-assign]
    simulation.run(2)
    assert simulation.ends == pytest.approx([5.0, 10.0])


def test_a_sampler_decodes_nothing_during_a_push_so_each_step_takes_longer_by_it() -> None:
    """A push of half a second after each step; at bound 1 a group is under way all the time."""
    cluster = replace(ONE_SECOND, max_staleness=1, push_seconds=0.5)
    assert simulate(cluster, steps=10).step_seconds == pytest.approx(1.5)
    assert simulate(replace(cluster, max_staleness=0), steps=10).step_seconds == pytest.approx(2.5)


def test_draining_all_samplers_costs_more_than_each_for_itself_and_more_than_in_flight() -> None:
    cluster = replace(cluster_model.of_size(8, 2), groups_per_step=16)
    flight, each, together = (simulate(replace(cluster, drain=how), 20).step_seconds for how in ("none", "each", "all"))
    assert flight < each < together


def test_a_larger_bound_gains_nothing_where_the_trainer_waits_for_samplers_to_drain() -> None:
    cluster = replace(cluster_model.of_size(8), groups_per_step=16, drain="blocking")
    near, far = (simulate(replace(cluster, max_staleness=bound), 20).step_seconds for bound in (1, 4))
    assert far == pytest.approx(near, rel=0.05)
    assert simulate(replace(cluster, max_staleness=4, drain="all"), 20).step_seconds < 0.9 * far


def test_rewards_delay_a_step_but_not_the_samplers_that_are_ahead() -> None:
    late = replace(ONE_SECOND, reward_seconds=1.0)
    assert simulate(late, steps=200).step_seconds == pytest.approx(3.0, abs=0.3)
    assert simulate(replace(late, max_staleness=8), steps=200).step_seconds < 1.1


@pytest.mark.parametrize("bound", [0, 1, 2, 4])
def test_the_simulation_of_lonely_completions_is_the_prediction(bound: int) -> None:
    """Nothing slows anything, groups of one, a push that takes no time: both follow one rule."""
    places, steps = 5, 30
    cluster = replace(
        ONE_SECOND,
        groups_per_step=4,
        places=places,
        max_staleness=bound,
        sigma=0.8,
        train_seconds_per_token=0.0,
        switch_seconds=0.7,
    )
    simulation = Simulation(cluster, seed=5)
    simulation.run(steps)
    lengths = Simulation(cluster, seed=5)
    seconds = [0.01 * lengths._length() for _ in range(4 * steps)]
    expected = predict(seconds, places, Bound(4, bound), 0.7)
    first = bound + 1
    assert (simulation.ends[-1] - simulation.ends[first - 1]) / (steps - first) == pytest.approx(expected.step_seconds)
    assert [age for ages in simulation.ages[:steps] for age in ages] == list(expected.ages)


@pytest.mark.parametrize("bound", [0, 1, 3])
def test_no_group_of_a_simulation_is_older_than_the_bound(bound: int) -> None:
    """The buffer asserts it too; a pipeline that is full sits at the bound."""
    found = simulate(replace(cluster_model.of_size(8, bound), samplers=4, trainers=4), 20)
    assert found.max_age == bound


def test_all_devices_are_shared_between_samplers_and_trainers() -> None:
    assert list(splits(4)) == [(1, 3), (2, 2), (3, 1)]
    assert len(list(splits(16))) == len(list(splits(4096))) == 15


def test_the_best_split_is_the_best_of_all() -> None:
    cluster = replace(cluster_model.of_size(8, 1), groups_per_step=16)
    steps = {s: simulate(replace(cluster, samplers=s, trainers=t), 12).step_seconds for s, t in splits(8)}
    best, found = best_split(cluster, 12)
    assert found.step_seconds == min(steps.values())
    assert steps[best.samplers] == found.step_seconds


def test_the_prediction_of_the_prototype_is_near_what_was_measured() -> None:
    for bound, measured in cluster_model.MEASURED.items():
        _, least, most = cluster_model.predicted_prototype(bound, draws=10)
        assert 0.95 * least < measured < 1.05 * most


def test_pushing_weights_takes_their_bytes_over_the_bandwidth() -> None:
    assert push_seconds(50e9, NET_400) == pytest.approx(1.0, abs=1e-4)
    assert push_seconds(64e9, PCIE, receivers=11) == pytest.approx(1.0 + 10 * 0.1 / 64, abs=1e-3)
    assert one_by_one_seconds(50e9, NET_400, 16) == pytest.approx(16.0, abs=1e-3)


def test_the_page_says_first_that_it_is_modelled() -> None:
    assert cluster_model.TITLE.splitlines()[2].startswith("**Every figure on this page is modelled")


def test_lengths_have_the_mean_that_is_asked_for() -> None:
    simulation = Simulation(replace(ONE_SECOND, sigma=0.8, mean_tokens=200.0))
    simulation._random = random.Random(3)
    drawn = [simulation._length() for _ in range(20000)]
    assert sum(drawn) / len(drawn) == pytest.approx(200.0, rel=0.02)
