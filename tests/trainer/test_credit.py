"""From rewards to advantages: the order of the steps, and what is carried from batch to batch."""

from dataclasses import replace
from typing import Any

import pytest

from covey.algorithm.metrics import group_metrics, value
from covey.algorithm.settings import AlgorithmConfig
from covey.system import collectives
from covey.trainer.credit import Credit, CreditAssigner
from covey.types import Group, Prompt, Rollout

from ..support.small import group, rollout


def assigner(*, part_weights: dict[str, float] | None = None, **algorithm: Any) -> CreditAssigner:
    return CreditAssigner(AlgorithmConfig(**algorithm), part_weights or {})


def of(*rollouts: Rollout) -> Group:
    return Group(Prompt("p", "test", "?", {}), rollouts, ())


def near(*expected: list[float]) -> list[Any]:
    return [pytest.approx(values, abs=1e-4) for values in expected]


# ------------------------------------------------------------------------------------------------ the order


def test_without_options_an_advantage_is_the_z_score_in_the_group() -> None:
    credit = assigner().assign([group(1.0, 0.0), group(0.0, 0.0, 3.0)])
    assert credit.advantages == near([0.7071, -0.7071], [-0.5774, -0.5774, 1.1547])
    assert credit.keep == [[True, True], [True, True, True]]


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
def test_shaping_comes_first_then_the_kl_penalty_the_baseline_the_length_weight_and_the_clip(
    settings: dict[str, Any], kl: list[list[float]] | None, expected: list[float]
) -> None:
    credit = assigner(**settings).assign([ONE_TRUNCATED], kl)
    assert credit.advantages == near(expected)


def test_selection_comes_last_and_its_advantages_are_clipped() -> None:
    settings = {"advantage": "group_center", "advantage_clip": 0.3, "selection": "top_k", "selection_options": {"k": 2}}
    credit = assigner(**settings).assign([group(1.0, 0.0, 0.2), group(0.0, 0.0, 0.0)])
    assert credit.advantages == near([0.3, 0.0, -0.2], [0.0, 0.0, 0.0])
    assert credit.keep == [[True, False, True], [True, True, False]]


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


def test_a_fill_in_several_passes_is_one_turn() -> None:
    fill = replace(rollout(1.0, 5), loss_mask=(True, False, False, False, True, False), input_length=3)
    shaping = {"pass_rate_linear": {"w_out": 0.0, "w_in": 0.0, "w_turns": 0.2}}
    assert assigner(advantage="none", shaping=shaping).assign([of(fill, fill)]).advantages == near([0.8, 0.8])


def test_masked_truncated_completions_are_in_no_token_statistic_but_in_the_mean_of_their_group() -> None:
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


def test_a_masked_truncated_completion_is_not_the_shortest() -> None:
    """A selection ranks by what was written, in the loss or not."""
    cut = rollout(0.0, num_tokens=40, finish_reason="length")
    settings = {"selection": "top_k", "selection_options": {"k": 1, "rank_by": "length"}, "mask_truncated": True}
    assert assigner(**settings).assign([of(cut, rollout(1.0, 3), rollout(0.0, 2))]).keep == [[False, False, True]]


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


def test_the_ranks_of_a_step_share_their_statistics(monkeypatch: pytest.MonkeyPatch) -> None:
    """The batch's standard deviation, and so every advantage, is that of all groups in one process."""
    settings = {"advantage": "group_center_batch_std"}
    groups = [group(1.0, 0.0), group(5.0, 0.0, num_failures=1), group(2.0, 2.0)]
    whole = assigner(**settings).assign(groups)
    of_ranks: list[Any] = []
    monkeypatch.setattr(collectives, "all_gather", lambda facts: [*of_ranks, facts])
    parts: list[Credit] = []
    for rank, share in enumerate((groups[:2], groups[2:])):
        monkeypatch.setattr(collectives, "rank", lambda rank=rank: rank)
        monkeypatch.setattr(collectives, "all_gather", lambda facts: of_ranks.append(facts) or [facts])
        assigner(**settings).assign(share)
    for rank, share in enumerate((groups[:2], groups[2:])):
        monkeypatch.setattr(collectives, "rank", lambda rank=rank: rank)
        monkeypatch.setattr(collectives, "all_gather", lambda facts: of_ranks)
        parts.append(assigner(**settings).assign(share))
    assert parts[0].advantages + parts[1].advantages == whole.advantages
    assert whole.advantages[2] == [0.0, 0.0]


# ------------------------------------------------------------------------------------------------ mistakes


@pytest.mark.parametrize(
    ("settings", "line"),
    [
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
