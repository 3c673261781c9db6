"""From rewards to advantages: the order of the steps, and what is carried from batch to batch."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from covey.algorithm.build import build_credit
from covey.algorithm.credit.assign import estimate_advantages
from covey.algorithm.credit.groups import Credit, CreditAssigner
from covey.algorithm.credit.scores import ScoredCompletion, Scores, scores
from covey.algorithm.metrics import group_metrics, value
from covey.algorithm.settings import TURN_CREDITS, AlgorithmConfig
from covey.system import collectives
from covey.trainer.batch import make_rows
from covey.trainer.forward import StreamedGroup, StreamedWork
from covey.types import Failure, Group, Prompt, Reward, Rollout, RunStopped, Turn
from tests.support.builders import credit_assigner

from ..support.small import group, rollout


def assigner(*, part_weights: dict[str, float] | None = None, **algorithm: Any) -> CreditAssigner:
    return credit_assigner(AlgorithmConfig(**algorithm), part_weights)


def of(*rollouts: Rollout) -> Group:
    return Group(Prompt("p", "test", "?", {}), rollouts, ())


def near(*expected: list[float]) -> list[Any]:
    return [pytest.approx(values, abs=1e-4) for values in expected]


# ------------------------------------------------------------------------------------------------ the order


def test_without_options_an_advantage_is_the_z_score_in_the_group() -> None:
    credit = assigner().assign([group(1.0, 0.0), group(0.0, 0.0, 3.0)])
    assert credit.advantages == near([0.7071, -0.7071], [-0.5774, -0.5774, 1.1547])
    assert credit.keep == [[True, True], [True, True, True]]


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"advantage_options": {"eps": 0.0}}, [[0.0, 0.0, 0.0], [-1.0, 0.0, 1.0]]),
        ({"advantage": "pairwise"}, [[0.0, 0.0, 0.0], [-0.5, 0.0, 0.5]]),
        ({"advantage": "gpg"}, [[0.0, 0.0, 0.0], [-2.0, 0.0, 2.0]]),
        ({"advantage": "none"}, [[0.1 + 0.7] * 3, [0.0, 1.0, 2.0]]),
    ],
)
def test_rewards_that_differ_by_rounding_alone_are_equal(settings: dict[str, Any], expected: list[list[float]]) -> None:
    assert 0.1 + 0.7 != 0.8
    groups = [group(0.8, 0.1 + 0.7, 0.8, num_failures=1), group(0.0, 1.0, 2.0)]
    assert assigner(**settings).assign(groups).advantages == [pytest.approx(values) for values in expected]


def test_baselines_of_roles_move_from_batch_to_batch_and_are_kept() -> None:
    settings = {"advantage": "role_ema", "advantage_options": {"decay": 0.5}}
    credit, resumed = assigner(**settings), assigner(**settings)
    assert [credit.assign([group(1.0)]).advantages for _ in range(2)] == [[[1.0]], [[0.5]]]
    resumed.load_state_dict(credit.state_dict())
    assert resumed.assign([group(1.0)]).advantages == [[0.25]]


ONE_TRUNCATED = of(rollout(1.0, num_tokens=2), rollout(1.0, num_tokens=4, finish_reason="length"))
PENALTY = [[0.0, 0.2]]
HALVED = {"advantage": "group_center", "shaping": {"stop_properly": {"coef": 0.5}}}


@pytest.mark.parametrize(
    ("settings", "kl", "expected"),
    [
        (HALVED, None, [0.25, -0.25]),
        (HALVED, PENALTY, [0.35, -0.35]),  # 1 - (0.5 - 0.2), halved; a penalty before the shaping gives 0.3
        (HALVED | {"length_normalizer": 1.0}, PENALTY, [0.4667, -0.2333]),
        (HALVED | {"length_normalizer": 1.0, "advantage_clip": 0.3}, PENALTY, [0.3, -0.2333]),
        (HALVED | {"advantage": "none", "advantage_clip": 0.6}, PENALTY, [0.6, 0.3]),
    ],
)
def test_credit_applies_shaping_kl_baseline_length_weight_and_clip_in_order(
    settings: dict[str, Any], kl: list[list[float]] | None, expected: list[float]
) -> None:
    credit = assigner(**settings).assign([ONE_TRUNCATED], kl)
    assert credit.advantages == near(expected)


def test_selection_comes_last_and_its_advantages_are_clipped() -> None:
    settings = {"advantage": "group_center", "advantage_clip": 0.3, "selection": "top_k", "selection_options": {"k": 2}}
    credit = assigner(**settings).assign([group(1.0, 0.0, 0.2), group(0.0, 0.0, 0.0)])
    assert credit.advantages == near([0.3, 0.0, -0.2], [0.0, 0.0, 0.0])
    assert credit.keep == [[True, False, True], [True, True, False]]


def test_the_mean_length_weight_is_that_of_what_a_selection_keeps() -> None:
    settings = {"advantage": "group_center", "selection": "top_k", "selection_options": {"k": 2}}
    answers = of(rollout(1.0, num_tokens=2), rollout(0.0, num_tokens=1), rollout(0.2, num_tokens=4))
    credit = assigner(**settings, length_normalizer=1.0).assign([answers])
    assert credit.advantages == near([0.8, 0.0, -0.1333])  # 0.6 and -0.2, of 1/2 and 1/4 over their mean 3/8


@pytest.mark.parametrize("turn_credit", ["episode", "discounted"])
def test_a_masked_rollout_does_not_count_in_the_mean_length_weight(turn_credit: str) -> None:
    settings = {"advantage": "group_center", "mask_truncated": True, "turn_credit": turn_credit}
    cut = rollout(0.2, num_tokens=4, finish_reason="length")
    answers = of(rollout(1.0, num_tokens=2), rollout(0.0, num_tokens=1), cut)
    credit = assigner(**settings, length_normalizer=1.0).assign([answers])
    assert credit.advantages == near([0.4, -0.5333, 0.0])  # 0.6 and -0.4, of 1/2 and 1 over their mean 3/4


def test_shaping_goes_in_the_order_of_the_settings() -> None:
    halve, shorten = {"stop_properly": {"coef": 0.5}}, {"soft_overlong": {"max_len": 4, "cache": 2}}
    first = assigner(advantage="none", shaping=halve | shorten).assign([ONE_TRUNCATED])
    second = assigner(advantage="none", shaping=shorten | halve).assign([ONE_TRUNCATED])
    assert first.advantages == [[1.0, -0.5]]
    assert second.advantages == [[1.0, 0.0]]


def test_the_rewards_that_are_logged_are_the_shaped_ones() -> None:
    credit = assigner(**HALVED).assign([ONE_TRUNCATED], PENALTY)
    assert credit.scores.rewards_N.tolist() == [1.0, pytest.approx(0.3)]


def test_a_penalty_on_the_reward_teaches_even_where_rewards_are_equal() -> None:
    credit = assigner(advantage="group_center").assign([group(1.0, 1.0)], [[0.5, 0.1]])
    assert credit.advantages == near([-0.2, 0.2])


def test_a_step_whose_groups_were_all_dropped_has_no_credit_and_can_be_logged() -> None:
    credit = assigner().assign([])
    assert (credit.advantages, credit.keep) == ([], [])
    assert group_metrics(credit.scores).keys() >= {"reward_mean"}


def test_a_second_turn_is_charged_where_turns_are() -> None:
    """Both wrote two tokens; the second one was answered with two tokens in between."""
    once, twice = rollout(1.0, 2), rollout(1.0, 4)
    twice = replace(twice, loss_mask=(False, True, False, False, True))
    charge = {"w_out": 0.0, "w_in": 0.0, "w_turns": 0.2}
    credit = assigner(advantage="none", shaping={"pass_rate_linear": charge}).assign([of(once, twice)])
    assert credit.advantages == near([0.9, 0.8])


def test_the_first_token_of_every_branch_is_charged_with_what_was_read() -> None:
    """Two of four tokens were read, and three of seven, of which each branch begins with one."""
    once, branched = rollout(1.0, 2), replace(rollout(1.0, 4), branches=(0, 3))
    charge = {"w_out": 0.0, "w_in": 0.3, "w_turns": 0.0}
    credit = assigner(advantage="none", shaping={"pass_rate_linear": charge}).assign([of(once, branched)])
    assert credit.advantages == near([0.8, 0.7])


def test_a_fill_in_several_passes_is_one_turn() -> None:
    fill = replace(rollout(1.0, 5), loss_mask=(True, False, False, False, True, False), input_length=3)
    shaping = {"pass_rate_linear": {"w_out": 0.0, "w_in": 0.0, "w_turns": 0.2}}
    at_once = replace(fill, loss_mask=(True, True, False, False, False, False))
    assert assigner(advantage="none", shaping=shaping).assign([of(fill, at_once)]).advantages == near([0.8, 0.8])


def test_masked_truncated_completions_count_only_in_their_groups_mean() -> None:
    """Whitening is over the tokens in the loss; the baseline is over all rewards of the group."""
    cut = rollout(0.0, num_tokens=40, finish_reason="length")
    groups = [of(rollout(1.0, 2), rollout(0.0, 4), rollout(1.0, 3), cut), of(rollout(1.0, 1), rollout(0.0, 5))]
    settings = {"advantage": "group_center_token_whiten", "mask_truncated": True}
    credit = assigner(**settings).assign(groups)
    values = [a for found in credit.advantages for a in found]
    lengths = [2, 4, 3, 0, 1, 5]
    mean = sum(a * n for a, n in zip(values, lengths, strict=True)) / 15
    variance = sum(n * (a - mean) ** 2 for a, n in zip(values, lengths, strict=True)) / 14
    assert (mean, variance) == (pytest.approx(0.0, abs=1e-9), pytest.approx(1.0, abs=1e-6))
    assert values[0] - values[1] == pytest.approx(values[4] - values[5])  # both groups have the mean 1/2


@pytest.mark.parametrize(("rank_by", "kept"), [("length", 2), ("reward_per_token", 1)])
def test_a_masked_truncated_completion_is_not_the_shortest(rank_by: str, kept: int) -> None:
    """A selection ranks by what was written, in the loss or not."""
    cut = rollout(0.9, num_tokens=40, finish_reason="length")
    settings = {"selection": "top_k", "selection_options": {"k": 1, "rank_by": rank_by}, "mask_truncated": True}
    credit = assigner(**settings).assign([of(cut, rollout(1.0, 3), rollout(0.0, 2))])
    assert credit.keep == [[index == kept for index in range(3)]]


# ------------------------------------------------------------------------------------------------ turns


def in_turns(reward: float, *earned: float, void: bool = False, finish_reason: str = "stop") -> Rollout:
    """An episode whose turns wrote two tokens each, the last one three; the first began in state s."""
    ends = [2 * (index + 1) for index in range(len(earned))]
    turns = tuple(
        Turn(end - 2, end + (end == ends[-1]), value, "s" if end == 2 else "", void and end == 2)
        for end, value in zip(ends, earned, strict=True)
    )
    return replace(rollout(reward, ends[-1] + 1, finish_reason), turns=turns)


EPISODES = of(in_turns(3.0, 1.0, 0.0), in_turns(1.0, 0.5))
"""Outcomes 2 and 0.5."""
CENTRED = {"advantage": "group_center"}


@pytest.mark.parametrize(
    ("credit", "options", "expected"),
    [
        ("discounted", {"gamma": 1.0}, [(1.0, 0.0), (-1.0,)]),
        ("turn_mixed", {"weight": 0.5, "scale": "none"}, [(0.875, 0.75), (-0.875,)]),
        ("anchor_state", {"weight": 0.5, "gamma": 1.0, "scale": "none"}, [(1.5, 1.0), (-1.5,)]),
    ],
)
def test_every_turn_is_trained_with_its_own_advantage(
    credit: str, options: dict[str, Any], expected: list[tuple[float, ...]]
) -> None:
    found = assigner(**CENTRED, turn_credit=credit, turn_credit_options=options).assign([EPISODES])
    assert found.of_turns == [[pytest.approx(values) for values in expected]]
    (rows,) = make_rows([EPISODES], found.row_advantages)
    first, last = expected[0]
    assert rows[0].advantages == pytest.approx([first] * 2 + [last] * 3)
    assert rows[1].advantages == pytest.approx([expected[1][0]] * 3)
    assert found.advantages[0] == pytest.approx([(2 * first + 3 * last) / 5, expected[1][0]])


def test_shaping_and_the_kl_penalty_belong_to_the_outcome() -> None:
    """0.4 less for the first episode, which only its last turn and, discounted by half, its first answer for."""
    by_turn = assigner(**CENTRED, turn_credit="discounted", turn_credit_options={"gamma": 0.5})
    plain, charged = (by_turn.assign([EPISODES], kl) for kl in (None, [[0.4, 0.0]]))
    gaps = [a - b for a, b in zip(plain.group_advantages[0], charged.group_advantages[0], strict=True)]
    mean = (0.2 + 0.4) / 3
    assert gaps == pytest.approx([0.2 - mean, 0.4 - mean, -mean])


def test_length_weights_are_of_whole_episodes_and_the_clip_is_of_each_turn() -> None:
    settings = {"turn_credit": "discounted", "turn_credit_options": {"gamma": 1.0}, "length_normalizer": 1.0}
    found = assigner(**CENTRED, **settings).assign([EPISODES])
    weights = [(1 / n) / ((1 / 5 + 1 / 3) / 2) for n in (5, 3)]
    assert found.group_advantages[0] == pytest.approx([weights[0], 0.0, -weights[1]])
    clipped = assigner(**CENTRED, **settings, advantage_clip=0.8).assign([EPISODES])
    assert clipped.group_advantages[0] == pytest.approx([weights[0], 0.0, -0.8])


@pytest.mark.parametrize("credit", ["discounted", "turn_mixed", "anchor_state"])
def test_failures_beside_episodes_are_in_no_statistic_of_turns(credit: str) -> None:
    alone, later = assigner(turn_credit=credit).assign([EPISODES]), replace(EPISODES, failures=(Failure("broke"),))
    found = assigner(turn_credit=credit).assign([later, EPISODES])
    assert found.of_turns == [alone.of_turns[0]] * 2 if alone.of_turns else False


@pytest.mark.parametrize("credit", ["discounted", "turn_mixed", "anchor_state"])
def test_credit_of_a_group_alone_is_that_beside_the_others_of_its_step(credit: str) -> None:
    """What streaming inside a step rests on; a difference in one turn is found though the mean of turns is the same."""
    groups = [EPISODES, of(in_turns(1.0, 0.0, 0.3), in_turns(0.0, 0.2, 0.0), in_turns(0.3, 0.1))]
    whole = assigner(turn_credit=credit).assign(groups)
    for index, one in enumerate(groups):
        assert assigner(turn_credit=credit).assign([one], alone=True).group_advantages[0] == pytest.approx(
            whole.group_advantages[index]
        )
    ahead = StreamedWork(trained={id(groups[0]): StreamedGroup(groups[0], whole.group_advantages[0], None)})
    ahead.check(groups, whole.group_advantages)
    first, second, *others = whole.group_advantages[0]
    for gap in (0.1, 1e-7):
        with pytest.raises(RunStopped, match="the advantages of prompt p depend on other groups"):
            ahead.check(groups, [[first + 3 * gap, second - 2 * gap, *others], whole.group_advantages[1]])


def test_every_turn_carries_its_reward_where_a_rollout_says_nothing_of_turns() -> None:
    plain = group(1.0, 0.0, 0.5)
    expected = assigner().assign([plain]).advantages
    for credit in ("discounted", "turn_mixed", "anchor_state"):
        found = assigner(turn_credit=credit).assign([plain])
        assert found.advantages[0] == pytest.approx(expected[0])
        assert [row.advantages for row in make_rows([plain], found.row_advantages)[0]] == [
            pytest.approx((value, value)) for value in expected[0]
        ]


def test_a_custom_advantage_sees_turns_or_episodes_with_the_answer_of_each() -> None:
    def credited(turn_credit: str) -> Credit:
        name = f"{__name__}:of_answers"
        return assigner(advantage=name, turn_credit=turn_credit).assign([replace(EPISODES, failures=(Failure("x"),))])

    assert credited("discounted").group_advantages == [[pytest.approx(v) for v in (1.8 + 5, 2.0 + 5, 1.0 + 3)]]
    assert credited("discounted").metrics == {"rows": 3.0}
    assert credited("turn_mixed").metrics == {"rows": 3.0}  # two episodes and a failure


def test_custom_functions_say_nothing_of_what_was_not_scored() -> None:
    lost = replace(of(rollout(1.0, 2), rollout(0.0, 2)), failures=(Failure("x"),))
    shaped = assigner(advantage="group_center", shaping={f"{__name__}:at_least_0": {}}).assign([lost])
    assert shaped.advantages == near([0.5, -0.5])  # the failure, for which it says 0, is in no mean
    estimate = build_credit(AlgorithmConfig(advantage=f"{__name__}:one_each")).estimate
    assert estimate_advantages(estimate, scores([1.0, math.nan], [0, 0]))[0].tolist() == [1.0, 0.0]


def at_least_0(rewards_N: Tensor, info: Scores) -> Tensor:
    return rewards_N.nan_to_num(nan=0.0).clamp(min=0)


def one_each(scores: Scores) -> Tensor:
    return torch.ones_like(scores.rewards_N)


def of_answers(scores: Scores, answers: list[ScoredCompletion]) -> tuple[Tensor, dict[str, float]]:
    """The reward and the number of tokens of its episode."""
    lengths = torch.tensor([float(len(answer.token_ids)) for answer in answers])
    return scores.rewards_N.nan_to_num() + lengths, {"rows": float(len(answers))}


def test_episodes_with_a_void_turn_leave_the_loss_not_the_group() -> None:
    groups = [of(in_turns(1.0, 0.0, void=True), in_turns(0.0, 0.0), in_turns(0.5, 0.0, 0.0))]
    settings = {"advantage": "group_center_token_whiten", "drop_void_turns": True}
    credit = assigner(**settings).assign(groups)
    assert credit.scores.lengths_N.tolist() == [0.0, 3.0, 5.0]
    assert credit.scores.rewards_N.tolist() == [1.0, 0.0, 0.5]
    assert credit.keep == [[True, True, True]]
    assert [row.rollout.reward.value for row in make_rows(groups, credit.row_advantages, credit.in_loss)[0]] == [
        0.0,
        0.5,
    ]
    assert assigner(advantage="group_center_token_whiten").assign(groups).in_loss == credit.keep


def test_a_step_trains_all_groups_that_were_trained_early() -> None:
    early = of(in_turns(1.0, 0.0))
    ahead = StreamedWork(trained={id(early): StreamedGroup(early, [0.5], None)})
    ahead.check([early], [[0.5]])
    with pytest.raises(ValueError, match="must train all groups that streaming=true has begun with, got 1 fewer"):
        ahead.check([], [])


def test_turns_must_cover_all_loss_tokens_of_a_rollout() -> None:
    short = replace(in_turns(1.0, 0.0), turns=(Turn(0, 2),))
    with pytest.raises(AssertionError, match="2 tokens in turns, 3 loss tokens"):
        make_rows([of(short)], [[(1.0,)]])


# ------------------------------------------------------------------------------------------------ failures


def test_failures_have_no_advantage_and_are_in_no_baseline() -> None:
    credit = assigner(advantage="group_center").assign([group(1.0, 0.0, num_failures=2), group(1.0, 0.0)])
    assert credit.advantages == [[0.5, -0.5], [0.5, -0.5]]
    metrics = {name: value(average) for name, average in group_metrics(credit.scores).items()}
    assert metrics["reward_mean"] == 0.5
    assert metrics["unscored_fraction"] == pytest.approx(1 / 3)


def test_failures_count_in_the_size_of_a_group_so_that_k_still_fits() -> None:
    passk = assigner(advantage="passk", advantage_options={"k": 2})
    assert passk.assign([group(1.0, 0.0, 0.0, num_failures=1)]).advantages == near([0.7071, -0.3536, -0.3536])
    best_of_4 = assigner(advantage="passk", advantage_options={"k": 4})
    assert best_of_4.assign([group(1.0, 0.0, 0.0, num_failures=1)]).advantages == [[0.0, 0.0, 0.0]]
    with pytest.raises(ValueError, match=r"^k must be <= group_size = 3, got 4$"):
        best_of_4.assign([group(1.0, 0.0, 0.0)])


# ------------------------------------------------------------------------------------------------ state and parts


def test_baselines_of_roles_are_carried_from_step_to_step() -> None:
    settings = {"advantage": "role_ema", "advantage_options": {"decay": 0.5}}
    running = assigner(**settings)
    groups = [group(1.0, 1.0, environment="white"), group(0.0, 1.0, environment="black")]
    assert running.assign(groups).advantages == [[1.0, 0.5], [0.0, 1.0]]
    assert running.state_dict() == {"baselines": {"white": 0.75, "black": 0.5}}
    restored = assigner(**settings)
    restored.load_state_dict(running.state_dict())
    for each in (running, restored):
        assert each.assign(groups).advantages == [[0.25, 0.125], [-0.5, 0.75]]


def test_gdpo_counts_what_turns_did_not_earn_as_nothing() -> None:
    """Only an episode whose turns earned something has parts for it; its siblings earned 0 and lost."""
    rewards = Reward(1.0, {"outcome": 0.0, "turns": 1.0}), Reward(0.0), Reward(0.0), Reward(1.0)
    made = [replace(in_turns(0.0, value), reward=reward) for value, reward in zip((1.0, 0, 0, 0), rewards, strict=True)]
    found = assigner(advantage="gdpo").assign([of(*made)])
    # z-scores of outcomes (0, 0, 0, 1) and turns (1, 0, 0, 0) add up to (1, -1, -1, 1)
    assert found.advantages == near([0.866, -0.866, -0.866, 0.866])


def test_gdpo_weighs_each_part_after_standardising_it() -> None:
    groups = [
        of(rollout(1.0, correct=1.0, form=0.0), rollout(1.0, correct=0.0, form=1.0)),
        of(rollout(1.0, correct=1.0, form=0.0), rollout(0.0, correct=0.0, form=0.0)),
    ]
    weighted = assigner(advantage="gdpo", part_weights={"correct": 2.0}).assign(groups)
    plain = assigner(advantage="gdpo").assign(groups)
    assert weighted.advantages == [pytest.approx([0.5477, -0.5477], rel=1e-3), pytest.approx([1.0954, -1.0954], 1e-3)]
    assert plain.advantages == [pytest.approx([0.0, 0.0], abs=1e-9), pytest.approx([1.2247, -1.2247], rel=1e-3)]


def test_a_part_that_only_some_rollouts_have_counts_where_it_is() -> None:
    groups = [of(rollout(1.0, correct=1.0), rollout(1.0, correct=0.0), rollout(0.5, form=0.5))]
    assert assigner(advantage="gdpo").assign(groups).advantages == near([0.9999, -0.9999, 0.0])


# ------------------------------------------------------------------------------------------------ ranks


@pytest.mark.parametrize("turn_credit", TURN_CREDITS)
def test_the_ranks_of_a_step_share_their_statistics(monkeypatch: pytest.MonkeyPatch, turn_credit: str) -> None:
    """The batch's standard deviation, and so every advantage, is that of all groups in one process."""
    settings = {"advantage": "group_center_batch_std", "turn_credit": turn_credit}
    first = EPISODES if turn_credit != "episode" else group(1.0, 0.0)
    groups = [first, group(5.0, 0.0, num_failures=1), group(2.0, 2.0)]
    whole = assigner(**settings).assign(groups)
    of_ranks: list[Any] = []
    monkeypatch.setattr(collectives, "all_gather", lambda facts: [*of_ranks, facts])
    parts: list[Credit] = []
    for rank, share in enumerate((groups[:2], groups[2:])):
        monkeypatch.setattr(collectives, "rank", lambda rank=rank: rank)
        monkeypatch.setattr(collectives, "all_gather", lambda facts: of_ranks.append(facts) or of_ranks)
        assigner(**settings).assign(share)
    for rank, share in enumerate((groups[:2], groups[2:])):
        monkeypatch.setattr(collectives, "rank", lambda rank=rank: rank)
        monkeypatch.setattr(collectives, "all_gather", lambda facts: of_ranks)
        parts.append(assigner(**settings).assign(share))
    assert [*parts[0].row_advantages, *parts[1].row_advantages] == whole.row_advantages
    assert whole.group_advantages[2] == [0.0, 0.0] or turn_credit == "discounted"  # there a row is a turn of any group


# ------------------------------------------------------------------------------------------------ mistakes


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        ({"turn_credit": "discount"}, "algorithm.turn_credit must be one of episode, discounted, .*got discount"),
        ({"turn_credit": "discounted", "turn_credit_options": {"gamma": 2}}, "gamma must be in .*got 2"),
        ({"advantage": "group_zscor"}, "expected one of .*group_zscore.* or module:function, got group_zscor"),
        ({"advantage": "nowhere:f"}, "nowhere:f needs module nowhere, which cannot be imported"),
        (
            {"advantage_options": {"epsilon": 1}},
            "algorithm.advantage_options must be among ddof, eps, eps_mode, singleton for group_zscore, got epsilon",
        ),
        ({"shaping": {"overlong": {}}}, "expected one of .*soft_overlong.*, got overlong"),
        ({"shaping": {"soft_overlong": {"cache": 1}}}, "algorithm.shaping must set max_len for soft_overlong"),
        ({"selection": "top_p"}, "expected one of .*top_k.*, got top_p"),
        ({"selection": "top_k"}, r"algorithm.selection_options must set k for top_k, got \[\]"),
        ({"selection": "top_k", "selection_options": {"k": 1, "n": 2}}, "algorithm.selection_options must be among"),
    ],
)
def test_unknown_names_and_options_are_one_line_before_anything_is_sampled(settings: dict[str, Any], line: str) -> None:
    with pytest.raises(ValueError, match=line) as caught:
        assigner(**settings)
    assert "\n" not in str(caught.value)
