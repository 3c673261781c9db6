"""Golden values of reward shaping and of group filters."""

from dataclasses import replace

import torch
from torch import Tensor

from covey.algorithm.credit.advantages import group_center
from covey.algorithm.credit.scores import Scores, scores
from covey.algorithm.credit.selection import GROUP_FILTERS, balanced_indices, length_normalizer
from covey.algorithm.credit.shaping import SHAPING

from .cases import Case, check, check_all, golden, tensor

SHAPING_OPTIONS = ("max_len", "cache", "factor", "floor", "coef", "ngram", "max_penalty", "w_out", "w_in", "w_turns")


@golden("reward_length_penalty", where=lambda case: case.params["shaping"] in SHAPING)
def test_shaping_gives_the_golden_values(case: Case) -> None:
    info = inputs_of(case)
    rewards_N = tensor(case.inputs.get("rewards", [0.0] * len(info.groups_N)))
    shaped_N = SHAPING[case.params["shaping"]](rewards_N, info, **case.options(*SHAPING_OPTIONS))
    advantages_N = group_center(scores(shaped_N, info.groups_N))
    # Without rewards there is nothing but the penalty.
    check_all({"rewards": shaped_N, "penalty": shaped_N, "advantages": advantages_N}, case)


@golden("reward_length_penalty", where=lambda case: case.params["shaping"] == "length_normalizer")
def test_lengths_are_normalised_by_the_golden_weights(case: Case) -> None:
    advantages_N, lengths_N = tensor(case.inputs["advantages"]), tensor(case.inputs["lengths"])
    check(length_normalizer(advantages_N, lengths_N, **case.options("alpha")), case, "advantages")


@golden("group_filter")
def test_group_filters_drop_the_golden_groups(case: Case) -> None:
    rewards_N = tensor(case.inputs["rewards"])
    if case.params["filter"] == "balanced_subset":
        check(balanced_indices(rewards_N, **case.options("group_size", "low", "high")), case, "indices")
        return
    assert not case.params.get("inclusive", False), "only exclusive bounds exist"
    keep = GROUP_FILTERS[case.params["filter"]]
    groups_N = scores(rewards_N, case.inputs["groups"]).groups_N
    kept = [
        keep(rewards_N[groups_N == g], **case.options("atol", "low", "high")) for g in range(int(groups_N.max()) + 1)
    ]
    check([float(not k) for k in kept], case, "drop")


def inputs_of(case: Case) -> Scores:
    n = len(next(iter(case.inputs.values())))
    zeros_N = torch.zeros(n, dtype=torch.int64)

    def counts(name: str) -> Tensor:
        return torch.tensor(case.inputs[name]) if name in case.inputs else zeros_N

    return replace(
        scores([0.0] * n, case.inputs.get("groups", [0] * n)),
        written_N=counts("lengths" if "lengths" in case.inputs else "output_tokens"),
        total_lengths_N=counts("total_tokens"),
        turns_N=counts("turns"),
        truncated_N=torch.tensor(case.inputs.get("truncated", [False] * n)),
        token_ids=tuple(case.inputs.get("token_ids", [[]] * n)),
    )
