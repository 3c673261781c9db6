"""In one process every collective is the identity."""

from pathlib import Path
from typing import Any

import torch

from covey.system import collectives

from ..support.processes import on_two_ranks


def test_one_process_is_rank_0_of_1() -> None:
    assert not collectives.is_distributed()
    assert (collectives.rank(), collectives.world_size()) == (0, 1)


def test_sums_over_one_process_are_the_values_themselves() -> None:
    tensor = torch.tensor([1.0, 2.0])
    assert collectives.all_sum(tensor) is tensor
    assert collectives.all_sum_ints(3, 0, 5) == (3, 0, 5)
    assert collectives.all_sum_ints() == ()


def test_one_process_gathers_its_own_value() -> None:
    value = {"any": [object()]}
    assert collectives.all_gather(value) == [value]
    assert collectives.all_gather(None) == [None]


def test_gradients_of_one_process_stay_as_they_are() -> None:
    with_gradient, without = (torch.nn.Parameter(torch.ones(2)) for _ in range(2))
    with_gradient.grad = torch.tensor([1.0, -2.0])
    collectives.sum_gradients([with_gradient, without])
    assert with_gradient.grad.tolist() == [1.0, -2.0]
    assert without.grad is None


def test_a_weight_that_no_rank_has_a_gradient_of_gets_none(tmp_path: Path) -> None:
    """Zeros in its place would let weight decay and momentum move it, as they do not in one process."""

    def work() -> list[list[float] | None]:
        of_both, of_one, of_none = (torch.nn.Parameter(torch.ones(2)) for _ in range(3))
        of_both.grad = torch.tensor([1.0, -2.0])
        if collectives.rank() == 1:
            of_one.grad = torch.tensor([3.0, 4.0])
        collectives.sum_gradients([of_both, of_one, of_none])
        return [None if p.grad is None else p.grad.tolist() for p in (of_both, of_one, of_none)]

    assert on_two_ranks(work, tmp_path) == [[[2.0, -4.0], [3.0, 4.0], None]] * 2


def test_two_ranks_add_up_share_out_and_compare_what_they_have(tmp_path: Path) -> None:
    def work() -> dict[str, Any]:
        rank = collectives.rank()
        return {
            "sums": collectives.all_sum_ints(1 + rank, 10),
            "largest": collectives.all_max_int(3 + 5 * rank),
            "largest of each": collectives.all_max({"a": float(rank), "b": -float(rank)}),
            "pairs": collectives.all_sum_pairs([{"a": (torch.tensor(1.0 + rank), torch.tensor(2.0))}]),
            "shares": [collectives.local_share(n) for n in (4, 5)],
        }

    found = on_two_ranks(work, tmp_path)
    assert [each.pop("shares") for each in found] == [[2, 3], [2, 2]]
    expected = {
        "sums": (3, 20),
        "largest": 8,
        "largest of each": {"a": 1.0, "b": 0.0},
        "pairs": [{"a": (1.0, 2.0)}, {"a": (2.0, 2.0)}],
    }
    assert found == [expected, expected]


def test_pairs_of_micro_batches_are_kept_apart_and_in_order() -> None:
    parts = [{"a": (torch.tensor(1.0), torch.tensor(2.0))}, {"b": (torch.tensor(3.0), torch.tensor(4.0))}]
    assert collectives.all_sum_pairs(parts) == parts
    assert collectives.all_sum_pairs([]) == []


def test_the_largest_values_of_one_process_are_its_own() -> None:
    assert collectives.all_max({"a": 1.0, "b": float("-inf")}) == {"a": 1.0, "b": float("-inf")}
    assert collectives.all_max({}) == {}
