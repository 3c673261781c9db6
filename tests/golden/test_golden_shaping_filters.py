"""Golden values of reward shaping and of group filters."""

import torch
from torch import Tensor

from covey.advantages import group_center
from covey.scores import scores
from covey.selection import GROUP_FILTERS, balanced_indices
from covey.shaping import (
    SHAPING,
    ShapingInputs,
    length_normalizer,
    pass_rate_linear,
    repetition_penalty,
    soft_overlong_penalty,
)

from .cases import Case, check, check_all, golden, tensor


@golden("reward_length_penalty")
def test_shaping_gives_the_golden_values(case: Case) -> None:
    shaped = {
        "soft_overlong": soft_overlong_output,
        "stop_properly": stop_properly_output,
        "repetition": repetition_output,
        "pass_rate_linear": pass_rate_output,
        "length_normalizer": length_normalizer_output,
    }
    check_all(shaped[case.params["shaping"]](case), case)


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


def inputs_of(case: Case) -> ShapingInputs:
    n = len(next(iter(case.inputs.values())))
    zeros_N = torch.zeros(n, dtype=torch.int64)

    def counts(name: str) -> Tensor:
        return torch.tensor(case.inputs[name]) if name in case.inputs else zeros_N

    return ShapingInputs(
        groups_N=scores([0.0] * n, case.inputs.get("groups", [0] * n)).groups_N,
        lengths_N=counts("output_tokens"),
        total_lengths_N=counts("total_tokens"),
        turns_N=counts("turns"),
        truncated_N=torch.tensor(case.inputs.get("truncated", [False] * n)),
        token_ids=case.inputs.get("token_ids", [[]] * n),
    )


def soft_overlong_output(case: Case) -> dict[str, Tensor]:
    options = case.options("max_len", "cache", "factor", "floor")
    return {"penalty": soft_overlong_penalty(tensor(case.inputs["lengths"]), **options)}


def stop_properly_output(case: Case) -> dict[str, Tensor]:
    shape = SHAPING["stop_properly"]
    return {"rewards": shape(tensor(case.inputs["rewards"]), inputs_of(case), **case.options("coef"))}


def repetition_output(case: Case) -> dict[str, Tensor]:
    return {"penalty": repetition_penalty(case.inputs["token_ids"], **case.options("ngram", "max_penalty"))}


def pass_rate_output(case: Case) -> dict[str, Tensor]:
    options = case.options("w_out", "w_in", "w_turns")
    shaped_N = pass_rate_linear(tensor(case.inputs["rewards"]), inputs_of(case), **options)
    return {"advantages": group_center(scores(shaped_N, case.inputs["groups"]))}


def length_normalizer_output(case: Case) -> dict[str, Tensor]:
    advantages_N, lengths_N = tensor(case.inputs["advantages"]), tensor(case.inputs["lengths"])
    return {"advantages": length_normalizer(advantages_N, lengths_N, **case.options("alpha"))}
