"""In one process every collective is the identity."""

import re
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from covey.system import collectives, ranks
from covey.types import RunStopped

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


def test_ranks_take_their_machines_gpus_in_turn_or_the_only_visible_one() -> None:
    assert [collectives.own_gpu("auto", rank, num_gpus=4) for rank in range(4)] == [0, 1, 2, 3]
    assert [collectives.own_gpu("cuda", rank, num_gpus=1) for rank in range(4)] == [0, 0, 0, 0]
    assert collectives.own_gpu("cuda:2", 0, num_gpus=4) == 2


def test_two_ranks_on_one_gpu_are_refused_by_name() -> None:
    collectives.check_one_rank_a_gpu([("a", "GPU-1"), ("a", "GPU-2"), ("b", "GPU-1")])
    with pytest.raises(ValueError, match=r"^ranks 0 and 2 have one GPU of a: start as many processes on a machine"):
        collectives.check_one_rank_a_gpu([("a", "GPU-1"), ("b", "GPU-1"), ("a", "GPU-1")])


def test_a_policy_on_the_cpu_takes_no_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "set_device", lambda index: pytest.fail(f"took GPU {index}"))
    monkeypatch.setattr(collectives, "is_distributed", lambda: False)
    monkeypatch.setattr(ranks, "world_size", lambda: 2)
    joined: list[str] = []
    monkeypatch.setattr(dist, "init_process_group", lambda backend, **how: joined.append(backend))
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("MASTER_PORT", "29511")
    with collectives.process_group(5.0, "cpu"):
        assert joined == ["gloo"]


@pytest.mark.long
def test_the_barrier_names_a_missing_rank_also_where_gloo_is_one_of_several_backends(tmp_path: Path) -> None:
    def work() -> str:
        if collectives.rank() == 1:
            time.sleep(3.0)
            return ""
        with pytest.raises(RunStopped) as stopped:
            collectives.barrier("the start")
        return str(stopped.value)

    said, _ = on_two_ranks(work, tmp_path, backend="cpu:gloo", timeout=timedelta(seconds=1))
    # Two seconds on a busy machine
    assert re.fullmatch("rank 0 has waited [12] s for rank 1 to come to the start", said), said
