"""Credit in time by hand: what each turn of an episode is trained with."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor

from covey.algorithm.credit.advantages import group_center, group_center_token_whiten, group_zscore, leave_one_out
from covey.algorithm.credit.assign import CreditFunctions, assign
from covey.algorithm.credit.scores import Scores, scores
from covey.algorithm.credit.turns import (
    TURN_CREDIT,
    Turns,
    anchor_state,
    anchored_fraction,
    as_turns,
    chosen_turn_credit,
    discounted,
    episode,
    outcomes,
    returns,
    shares_anchor,
    turn_mixed,
)
from covey.algorithm.settings import TURN_CREDITS

NAN = float("nan")
ONE_GROUP = scores([3.0, 1.0], [0, 0])
"""Of turns that earn 1 and 0, and 0.5: the outcomes are 2 and 0.5."""
THREE_TURNS = as_turns([0, 0, 1], [1.0, 0.0, 0.5], states=["s", "t", "s"])


def listed(values: Tensor) -> list[float]:
    return [pytest.approx(value, abs=1e-5) for value in values.tolist()]


def test_the_outcome_is_the_episodes_reward_less_its_turns() -> None:
    assert outcomes(ONE_GROUP, THREE_TURNS).tolist() == [2.0, 0.5]


def test_the_outcome_is_part_of_the_last_turn_and_later_rewards_are_discounted() -> None:
    assert returns(ONE_GROUP, THREE_TURNS, 1.0).tolist() == [3.0, 2.0, 1.0]
    assert returns(ONE_GROUP, THREE_TURNS, 0.5).tolist() == [2.0, 2.0, 1.0]
    assert returns(ONE_GROUP, THREE_TURNS, 0.0).tolist() == [1.0, 2.0, 1.0]


def test_four_turns_are_discounted_once_for_each_turn_between() -> None:
    one = scores([8.0], [0])
    assert returns(one, as_turns([0] * 4, [0.0] * 4), 0.5).tolist() == [1.0, 2.0, 4.0, 8.0]


def test_credit_by_episode_is_the_same_for_all_its_turns() -> None:
    assert episode(ONE_GROUP, THREE_TURNS, group_center).tolist() == [1.0, 1.0, -1.0]


def test_discounted_returns_are_compared_over_all_turns_of_the_group() -> None:
    """Returns 3, 2 and 1: their mean is 2, whichever turn of its episode each is."""
    assert discounted(ONE_GROUP, THREE_TURNS, group_center, gamma=1.0).tolist() == [1.0, 0.0, -1.0]
    assert discounted(ONE_GROUP, THREE_TURNS, group_zscore, gamma=1.0).tolist() == listed(torch.tensor([1.0, 0, -1]))


def test_an_episode_without_tokens_has_the_mean_advantage_of_its_turns() -> None:
    turns = replace(THREE_TURNS, lengths_M=torch.tensor([0.0, 0.0, 3.0], dtype=torch.float64))
    functions = CreditFunctions(
        estimate=group_center,
        takes_answers=False,
        shaping=(),
        turn_credit=partial(discounted, gamma=1.0),
        select=None,
        leaves_out=lambda rollout: False,
    )
    found = assign([replace(ONE_GROUP, turns=turns)], functions, {})
    assert found.of_turns_M is not None
    assert found.of_turns_M.tolist() == [1.0, 0.0, -1.0]
    logged = assign([replace(ONE_GROUP, turns=turns)], replace(functions, turn_metrics=anchored_fraction), {}).metrics
    assert (found.metrics, logged) == ({}, {"anchored_fraction": pytest.approx(2 / 3)})
    assert found.selected.advantages_N.tolist() == [0.5, -1.0]


def test_turns_of_an_episode_without_loss_tokens_are_in_no_token_statistic() -> None:
    given = scores([3.0, 1.0, 2.0], [0, 0, 0], lengths=[5, 3, 0])
    turns = as_turns([0, 0, 1, 2], [1.0, 0.0, 0.5, 0.0], lengths=[2, 3, 3, 9])
    first, second, other, _ = discounted(given, turns, group_center_token_whiten).tolist()
    assert 2 * first + 3 * second + 3 * other == pytest.approx(0.0, abs=1e-9)


def test_a_turn_of_its_own_is_added_to_the_outcome() -> None:
    """Outcomes 2 and 0.5, first turns 1 and 0.5; only one attempt has a second turn."""
    found = turn_mixed(ONE_GROUP, THREE_TURNS, group_center, weight=0.5, scale="none")
    assert found.tolist() == [0.75 + 0.125, 0.75, -0.75 - 0.125]
    zscores = turn_mixed(ONE_GROUP, THREE_TURNS, group_center, weight=1.0, eps=0.0)
    assert zscores.tolist() == [pytest.approx(0.75 + 0.5**0.5), 0.75, pytest.approx(-0.75 - 0.5**0.5)]


def test_turns_that_began_in_one_state_are_compared_besides_their_episodes() -> None:
    """In state s returns are 3 and 1 without discount; nothing else began in t."""
    found = anchor_state(ONE_GROUP, THREE_TURNS, group_center, weight=0.5, gamma=1.0, scale="none")
    assert found.tolist() == [1.5, 1.0, -1.5]
    assert shares_anchor(ONE_GROUP, THREE_TURNS).tolist() == [True, False, True]
    assert anchored_fraction(ONE_GROUP) == {}, "of no turns there is no share"


def test_states_of_other_groups_and_states_without_a_name_are_not_the_same() -> None:
    apart = scores([3.0, 1.0], [0, 1])
    unnamed = as_turns([0, 0, 1], [1.0, 0.0, 0.5])
    for given, turns in ((apart, THREE_TURNS), (ONE_GROUP, unnamed)):
        assert torch.equal(anchor_state(given, turns, group_center), episode(given, turns, group_center))
        assert not bool(shares_anchor(given, turns).any())


def test_a_state_that_an_episode_comes_back_to_counts_each_time() -> None:
    one = scores([4.0], [0])
    turns = as_turns([0, 0], [0.0, 0.0], states=["s", "s"])
    assert anchor_state(one, turns, group_center, gamma=0.5, scale="none").tolist() == [-1.0, 1.0]


# ------------------------------------------------------------------------------------------------ for all of them

ALL = pytest.mark.parametrize("name", TURN_CREDIT)


def by_turn(name: str, given: Scores, turns: Turns) -> Tensor:
    return TURN_CREDIT[name](given, turns, group_zscore)


def any_batch() -> tuple[Scores, Turns]:
    """Three groups of episodes of 1 to 4 turns, some in the same states."""
    generator = torch.Generator().manual_seed(3)
    lengths = [1, 3, 2, 4, 2, 2, 1]
    rows = [index for index, length in enumerate(lengths) for _ in range(length)]
    drawn = torch.rand(len(rows) + 7, generator=generator, dtype=torch.float64).tolist()
    states = ["abc"[index % 3] for index in range(len(rows))]
    return scores(drawn[:7], [0, 0, 0, 0, 1, 1, 2]), as_turns(rows, drawn[7:], lengths=[2] * len(rows), states=states)


@ALL
def test_episodes_of_one_turn_get_what_they_get_without_turns(name: str) -> None:
    given = scores([1.0, 0.0, 0.5, 2.0], [0, 0, 0, 1])
    turns = as_turns([0, 1, 2, 3], [0.0] * 4)
    torch.testing.assert_close(by_turn(name, given, turns), group_zscore(given))


@ALL
def test_what_is_not_scored_is_in_no_statistic(name: str) -> None:
    given, turns = any_batch()
    longer = scores([*given.rewards_N.tolist(), NAN, NAN], [*given.groups_N.tolist(), 0, 3])
    rows, rewards = [*turns.rollouts_M.tolist(), 7, 7, 8], [*turns.rewards_M.tolist(), 5.0, 6.0, 7.0]
    more = as_turns(rows, rewards, states=[*turns.states, "a", "b", "a"])
    found = by_turn(name, longer, more)
    assert found[-3:].tolist() == [0.0, 0.0, 0.0]
    torch.testing.assert_close(found[:-3], by_turn(name, given, turns))


@ALL
def test_the_order_of_episodes_does_not_matter(name: str) -> None:
    given, turns = any_batch()
    back = scores(given.rewards_N.flip(0), given.groups_N.flip(0).tolist())
    order = sorted(range(len(turns.states)), key=lambda m: (-int(turns.rollouts_M[m]), m))
    rows = [6 - int(turns.rollouts_M[m]) for m in order]
    other = as_turns(rows, [float(turns.rewards_M[m]) for m in order], states=[turns.states[m] for m in order])
    found = by_turn(name, back, other)
    torch.testing.assert_close(found, by_turn(name, given, turns)[order])


def exactly(on: Scores) -> Tensor:
    """A z-score that makes numbers of order 1 of the smallest gap."""
    return group_zscore(on, eps=0.0)


def test_large_rewards_of_turns_leave_large_rounding_in_the_outcomes() -> None:
    """0.3 and 0.4 less 0.1, of which the turns make 0.0999999999767."""
    given, turns = scores([0.3, 0.4], [0, 0]), as_turns([0, 0, 1, 1], [1e6, -1e6, 1e6 + 0.1, -1e6])
    assert outcomes(given, turns)[0] != outcomes(given, turns)[1]
    found = turn_mixed(given, turns, lambda on: group_zscore(on, eps=0.0), weight=0.0)
    assert found.tolist() == [0.0] * 4


def test_values_that_differ_by_rounding_alone_teach_nothing() -> None:
    """0.7 - (0.1 + 0.2) is not 0.7 - 0.3 in floating point."""
    given, turns = scores([0.7, 0.7], [0, 0]), as_turns([0, 0, 1], [0.1, 0.2, 0.3], states=["s", "", "s"])
    first, second = outcomes(given, turns).tolist()
    assert first != second
    assert turn_mixed(given, turns, exactly, weight=0.0).tolist() == [0.0, 0.0, 0.0]
    assert anchor_state(given, turns, exactly, gamma=1.0, eps=0.0).tolist() == [0.0, 0.0, 0.0]
    equal = as_turns([0, 1], [0.1 + 0.2, 0.3])
    assert discounted(scores([0.7, 0.7], [0, 0]), equal, exactly).tolist() == [0.0, 0.0]


@ALL
def test_a_batch_without_turns_has_no_advantages(name: str) -> None:
    assert by_turn(name, scores([], []), as_turns([], [])).tolist() == []
    assert by_turn(name, scores([NAN, NAN], [0, 0]), as_turns([], [])).tolist() == []


def test_with_discount_the_gradient_weight_of_a_group_is_still_centred_over_its_turns() -> None:
    given, turns = any_batch()
    found = discounted(given, turns, group_center, gamma=0.7)
    groups_M = given.groups_N[turns.rollouts_M]
    for group in range(3):
        assert float(found[groups_M == group].sum()) == pytest.approx(0.0, abs=1e-12)
    assert float(discounted(given, turns, leave_one_out, gamma=0.7).abs().max()) > 0.1


@pytest.mark.parametrize(
    ("name", "options", "line"),
    [
        ("discounted", {"gamma": 1.5}, "algorithm.turn_credit_options of discounted: gamma must be in [0, 1], got 1.5"),
        ("discounted", {"weight": 1.0}, "algorithm.turn_credit_options must be among gamma for discounted, got weight"),
        ("turn_mixed", {"weight": -1}, "algorithm.turn_credit_options of turn_mixed: weight must be >= 0, got -1"),
        (
            "anchor_state",
            {"scale": "mean"},
            "algorithm.turn_credit_options of anchor_state: scale must be one of std, none, got mean",
        ),
        ("episode", {"gamma": 1.0}, "algorithm.turn_credit_options must be empty for episode, got gamma"),
    ],
)
def test_options_that_mean_nothing_are_one_line(name: str, options: dict[str, float], line: str) -> None:
    with pytest.raises(ValueError) as caught:
        chosen_turn_credit(name, options)
    assert str(caught.value) == line


def test_the_settings_know_every_turn_credit() -> None:
    assert tuple(TURN_CREDIT) == TURN_CREDITS
