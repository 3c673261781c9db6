import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from covey.algorithm.credit.scores import Scores, scores
from covey.algorithm.credit.selection import length_normalizer
from covey.algorithm.credit.shaping import (
    SHAPING,
    pass_rate_linear,
    repetition,
    soft_overlong,
    stop_properly,
)

NEEDED = {"soft_overlong": {"max_len": 10, "cache": 4}, "stop_properly": {"coef": 0.5}}


def inputs(lengths: list[int], truncated: list[bool] | None = None) -> Scores:
    n = len(lengths)
    lengths_N = torch.tensor(lengths, dtype=torch.int64)
    return replace(
        scores([0.0] * n, [0] * n),
        written_N=lengths_N,
        total_lengths_N=lengths_N + 4,
        turns_N=torch.ones(n, dtype=torch.int64),
        truncated_N=torch.tensor(truncated or [False] * n, dtype=torch.bool),
        token_ids=tuple((7,) * length for length in lengths),
    )


def rewards(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def test_long_completions_lose_linearly_near_the_limit() -> None:
    shaped_N = soft_overlong(rewards(1, 1, 1, 1), inputs([0, 6, 8, 12]), max_len=10, cache=4, factor=2.0)
    assert shaped_N.tolist() == [1.0, 1.0, 0.0, -1.0]


def test_without_a_floor_the_penalty_keeps_growing() -> None:
    shaped_N = soft_overlong(rewards(0, 0), inputs([10, 12]), max_len=10, cache=4, floor=False)
    assert shaped_N.tolist() == [-1.0, -1.5]


@pytest.mark.parametrize("cache", [0, 11])
def test_a_cache_outside_the_length_is_refused(cache: int) -> None:
    with pytest.raises(ValueError, match=rf"^cache must be in \[1, max_len=10\], got {cache}$"):
        soft_overlong(rewards(0), inputs([1]), max_len=10, cache=cache)


def test_a_truncated_rollout_is_scaled_or_replaced() -> None:
    cut = inputs([1, 1, 1], truncated=[True, False, True])
    given_N = rewards(0.8, 0.8, math.nan)
    torch.testing.assert_close(stop_properly(given_N, cut, coef=0.5), rewards(0.4, 0.8, math.nan), equal_nan=True)
    torch.testing.assert_close(stop_properly(given_N, cut, coef=-1.0), rewards(-1.0, 0.8, math.nan), equal_nan=True)


def test_repetition_counts_ngrams_that_came_before() -> None:
    # Bigrams of 1 2 1 2: (1,2) (2,1) (1,2), one of three repeats.
    given = replace(inputs([4, 3, 1, 0]), token_ids=[[1, 2, 1, 2], [1, 2, 3], [1], []])
    shaped_N = repetition(rewards(0, 0, 0, 0), given, ngram=2, max_penalty=-3.0)
    torch.testing.assert_close(shaped_N, rewards(-1.0, 0.0, 0.0, 0.0))
    assert repetition(rewards(1.0), inputs([5]), ngram=2).tolist() == [1.0 - 0.75]


@pytest.mark.parametrize(
    ("options", "message"),
    [({"ngram": 0}, "ngram must be >= 1, got 0"), ({"max_penalty": 0.5}, "max_penalty must be <= 0, got 0.5")],
)
def test_a_repetition_reward_is_refused(options: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}$"):
        repetition(rewards(0), inputs([2]), **options)


def test_length_costs_more_where_the_prompt_is_easy() -> None:
    shaped_N = pass_rate_linear(rewards(1, 0, math.nan), inputs([2, 4, 4]), w_out=0.5, w_in=0.0, w_turns=0.0)
    torch.testing.assert_close(shaped_N, rewards(1 - 0.5 * 0.25, -0.5 * 0.5, math.nan), equal_nan=True)
    assert pass_rate_linear(rewards(0, 0), inputs([2, 400])).tolist() == [0.0, 0.0]


def test_tokens_of_the_environment_and_turns_cost_each_by_the_most_of_the_group() -> None:
    talks = replace(
        inputs([2, 4, 5]),
        groups_N=torch.tensor([0, 0, 1]),
        total_lengths_N=torch.tensor([6, 12, 5]),
        turns_N=torch.tensor([1, 4, 1]),
    )
    # Of group 0, whose mean is 1/2: 0.25 * 2/4 + 0.1 * 4/8 + 0.1 * 1/4 and 0.25 + 0.1 + 0.1
    torch.testing.assert_close(pass_rate_linear(rewards(1, 0, 1), talks), rewards(1 - 0.1, -0.225, 1 - 0.35))


def test_length_weights_have_mean_1_over_rollouts_with_tokens() -> None:
    weights_N = length_normalizer(rewards(1, 1, 1, 1), torch.tensor([1, 2, 4, 0]), alpha=1.0)
    # 1, 1/2, 1/4 over their mean 7/12.
    torch.testing.assert_close(weights_N, rewards(12 / 7, 6 / 7, 3 / 7, 0.0))
    assert length_normalizer(rewards(1, 1), torch.tensor([0, 0])).tolist() == [0.0, 0.0]


@pytest.mark.parametrize("name", SHAPING)
def test_unscored_rollouts_stay_unscored_and_nothing_gives_nothing(name: str) -> None:
    options = NEEDED.get(name, {})
    shaped_N = SHAPING[name](rewards(math.nan, 1.0), inputs([9, 9], truncated=[True, True]), **options)
    assert shaped_N.isnan().tolist() == [True, False]
    assert SHAPING[name](rewards(), inputs([]), **options).shape == (0,)
