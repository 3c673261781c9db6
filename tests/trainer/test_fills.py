"""Fills as rollouts and as tensors: nothing is shifted, a group reads its input once."""

import torch

from covey.policy.attention.bidirectional import inputs_layout
from covey.rollouts.rollout import filled_rollout, finished_rollout
from covey.trainer.batch import MicroBatch, make_batch, make_rows
from covey.types import Completion, Group, Prompt, Reward, Rollout

from ..support.builders import CPU, MASK_ID

M = MASK_ID
GIVEN = (5, M, 7, M)


def fill(*tokens: int, passes: tuple[int, ...] = (), given: tuple[int, ...] = GIVEN) -> Rollout:
    logprobs = tuple(-0.1 * (index + 1) for index in range(len(tokens)))
    return filled_rollout(given, M, Completion(tokens, logprobs, "stop", 3, passes), Reward(1.0, {}), "text")


def packed(rollouts: list[list[Rollout]], packing: str, budget: int = 1000) -> tuple[MicroBatch, ...]:
    groups = [Group(Prompt(f"p{i}", "test", "", {}), tuple(own), ()) for i, own in enumerate(rollouts)]
    rows = make_rows(groups, [[1.0] * len(own) for own in rollouts])
    batch = make_batch(rows, packing=packing, micro_batch_tokens=budget, totals=(1, 1, 1), device=CPU)
    return batch.micro_batches


def test_a_masked_position_reads_the_mask_and_predicts_its_own_token() -> None:
    rollout = fill(8, 9)
    assert rollout.input_ids == (5, M, 7, M)
    assert rollout.target_ids == (5, 8, 7, 9)
    assert rollout.loss_mask == (False, True, False, True)
    assert rollout.sampler_logprobs == (0.0, -0.1, 0.0, -0.2)
    assert (rollout.input_length, rollout.policy_version, rollout.text) == (4, 3, "text")


def test_after_several_passes_each_token_is_learnt_where_it_was_filled_in() -> None:
    rollout = fill(8, 9, passes=(1, 0))
    assert rollout.input_ids == (5, M, 7, M, 5, M, 7, 9)
    assert rollout.target_ids == (5, 8, 7, 9) * 2
    assert rollout.loss_mask == (False, False, False, True, False, True, False, False)
    assert rollout.sampler_logprobs == (0.0, 0.0, 0.0, -0.2, 0.0, -0.1, 0.0, 0.0)
    assert rollout.input_length == 4


def test_an_input_without_gaps_has_no_loss_token_and_leaves_the_batch() -> None:
    whole = fill(given=(5, 6))
    assert whole.num_loss_tokens == 0
    assert packed([[whole, whole]], "shared") == ()


def test_the_kind_of_policy_decides_how_a_completion_becomes_a_rollout() -> None:
    completion = Completion((8, 9), (-0.1, -0.2), "stop", 0)
    causal = finished_rollout(None, (5, 6), completion, Reward(0.0, {}), "")
    assert (causal.input_ids, causal.target_ids, causal.input_length) == ((5, 6, 8), (6, 8, 9), None)
    assert finished_rollout(M, GIVEN, completion, Reward(0.0, {}), "").target_ids == (5, 8, 7, 9)


def test_a_group_reads_its_input_once_and_every_fill_points_into_it() -> None:
    (batch,) = packed([[fill(8, 9), fill(6, 6)], [fill(4, given=(M, 3))]], "shared")
    assert batch.input_ids_BT.tolist() == [[5, M, 7, M, M, 3]]
    assert batch.position_ids_BT.tolist() == [[0, 1, 2, 3, 0, 1]]
    assert batch.source_L.tolist() == [1, 3, 1, 3, 4]
    assert batch.target_L.tolist() == [8, 9, 6, 6, 4]
    assert (batch.row_L.tolist(), batch.column_L.tolist()) == ([0, 0, 1, 1, 2], [0, 1, 0, 1, 0])


def test_of_several_passes_only_equal_inputs_are_shared() -> None:
    (batch,) = packed([[fill(8, 9, passes=(1, 0)), fill(6, 9, passes=(1, 0)), fill(6, 4, passes=(1, 0))]], "shared")
    assert batch.input_ids_BT.tolist() == [[5, M, 7, M, 5, M, 7, 9, 5, M, 7, 4]]
    assert batch.source_L.tolist() == [3, 5, 3, 5, 3, 9]
    assert batch.target_L.tolist() == [9, 8, 9, 6, 4, 6]


def test_packed_and_padded_each_fill_has_inputs_of_its_own() -> None:
    rollouts = [[fill(8, 9), fill(6, 6)], [fill(4, given=(M, 3))]]
    (one,) = packed(rollouts, "packed")
    assert one.input_ids_BT.tolist() == [[5, M, 7, M, 5, M, 7, M, M, 3]]
    assert one.source_L.tolist() == [1, 3, 5, 7, 8]
    (padded,) = packed(rollouts, "padded")
    assert padded.input_ids_BT.tolist() == [[5, M, 7, M], [5, M, 7, M], [M, 3, 0, 0]]
    assert padded.source_L.tolist() == [1, 3, 5, 7, 8]
    assert padded.layout.real_BT.tolist() == [[True] * 4, [True] * 4, [True, True, False, False]]


def test_a_budget_counts_what_is_read_once_for_a_group_only_once() -> None:
    group = [fill(8, 9), fill(6, 6), fill(3, 3)]
    assert [batch.num_rows for batch in packed([group, group], "shared", budget=4)] == [3, 3]
    assert [batch.num_rows for batch in packed([group, group], "shared", budget=8)] == [6]
    assert [batch.num_rows for batch in packed([group, group], "packed", budget=8)] == [2, 2, 2]
    assert [batch.num_rows for batch in packed([group, group], "padded", budget=12)] == [3, 3]


def test_inputs_of_like_length_share_a_block_and_come_back_in_order() -> None:
    layout = inputs_layout([3, 2, 9, 3], CPU)
    assert [block.token_RQ.shape for block in layout.blocks] == [torch.Size([3, 3]), torch.Size([1, 9])]
    flat = torch.cat([block.token_RQ.flatten() for block in layout.blocks])
    assert flat[layout.order_T].tolist() == list(range(17))
