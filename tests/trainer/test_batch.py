"""Layouts, micro-batches and counts."""

import sys
from dataclasses import replace
from types import FrameType
from typing import Any

import pytest
import torch

from covey.algorithm.settings import AlgorithmConfig
from covey.trainer.batch import count, count_work, make_batch, make_rows, unflatten
from covey.trainer.layouts import usable_layout
from covey.trainer.prepare import drop_zero_advantage_rows
from covey.types import Batch, Group, Prompt, Reward, Rollout
from tests.support.builders import credit_assigner

PROMPT = (5, 6, 7)


def rollout(completion: tuple[int, ...], finish_reason: str = "stop", prompt: tuple[int, ...] = PROMPT) -> Rollout:
    ids = (*prompt, *completion)
    context = len(prompt) - 1
    return Rollout(
        input_ids=ids[:-1],
        target_ids=ids[1:],
        loss_mask=(False,) * context + (True,) * len(completion),
        sampler_logprobs=(0.0,) * context + tuple(-0.1 * t for t in completion),
        reward=Reward(0.0, {}),
        text="",
        finish_reason=finish_reason,  # type: ignore[arg-type]
        policy_version=0,
    )


def group(name: str, *rollouts: Rollout) -> Group:
    return Group(Prompt(name, "test", name, {}), rollouts, ())


def batch(groups: list[Group], packing: str, budget: int = 1000, enough: int = sys.maxsize) -> Batch:
    rows = make_rows(groups, [[float(i + 1) for i in range(len(g.rollouts))] for g in groups])
    tokens, sequences = count(rows)
    return make_batch(
        rows,
        packing=packing,
        micro_batch_tokens=budget,
        totals=(tokens, sequences, sequences),
        device=torch.device("cpu"),
        enough=enough,
    )


def test_a_micro_batch_with_enough_tokens_ends_with_its_group() -> None:
    groups = [group(name, rollout((8, 8, 2)), rollout((9, 2))) for name in "abcd"]  # 6 tokens each
    for enough, expected in ((1, [6, 6, 6, 6]), (7, [12, 12]), (12, [12, 12]), (13, [18, 6]), (1000, [24])):
        found = batch(groups, "shared", enough=enough).micro_batches
        assert [micro.input_ids_BT.numel() for micro in found] == expected


def test_a_shared_prompt_is_in_the_stream_once() -> None:
    (micro,) = batch([group("a", rollout((8, 2)), rollout((9, 9, 2)))], "shared").micro_batches
    assert micro.input_ids_BT.tolist() == [[5, 6, 7, 8, 9, 9]]
    assert micro.position_ids_BT.tolist() == [[0, 1, 2, 3, 3, 4]]
    assert micro.source_L.tolist() == [2, 3, 2, 4, 5]
    assert micro.target_L.tolist() == [8, 2, 9, 9, 2]
    assert micro.row_L.tolist() == [0, 0, 1, 1, 1]
    assert micro.column_L.tolist() == [0, 1, 0, 1, 2]
    assert micro.advantage_L.tolist() == [1.0, 1.0, 2.0, 2.0, 2.0]
    assert micro.advantage_L.dtype == micro.sampler_logprob_L.dtype == torch.float64  # as exact as the policy may be


def test_packing_repeats_the_prompt_and_padding_makes_a_rectangle() -> None:
    groups = [group("a", rollout((8, 2)), rollout((9, 9, 2)))]
    (packed,) = batch(groups, "packed").micro_batches
    assert packed.input_ids_BT.tolist() == [[5, 6, 7, 8, 5, 6, 7, 9, 9]]
    (padded,) = batch(groups, "padded").micro_batches
    assert padded.input_ids_BT.tolist() == [[5, 6, 7, 8, 5], [5, 6, 7, 9, 9]]
    assert padded.source_L.tolist() == [2, 3, 7, 8, 9]


@pytest.mark.parametrize("packing", ["shared", "packed", "padded"])
def test_every_loss_token_is_in_exactly_one_micro_batch_at_any_budget(packing: str) -> None:
    groups = [group(name, *(rollout((8,) * n) for n in (1, 5, 3, 2))) for name in ("a", "b", "c")]
    whole = batch(groups, packing)
    for budget in (1, 7, 10, 20):
        parts = batch(groups, packing, budget)
        assert len(parts.micro_batches) > 1
        assert sum(len(m.target_L) for m in parts.micro_batches) == whole.num_loss_tokens == 33
        for micro in parts.micro_batches:
            assert micro.input_ids_BT.numel() <= max(budget, 7)


def test_the_stop_token_is_a_loss_token() -> None:
    (micro,) = batch([group("a", rollout((8, 2)))], "shared").micro_batches
    assert micro.target_L.tolist()[-1] == 2


def test_tokens_of_the_environment_in_the_middle_are_read_but_not_trained() -> None:
    turns = Rollout(
        input_ids=(5, 6, 8, 30, 31, 9),
        target_ids=(6, 8, 30, 31, 9, 2),
        loss_mask=(False, True, False, False, True, True),
        sampler_logprobs=(0.0, -1.0, 0.0, 0.0, -2.0, -3.0),
        reward=Reward(1.0, {}),
        text="",
        finish_reason="stop",
        policy_version=0,
    )
    (micro,) = batch([group("a", turns)], "shared").micro_batches
    assert micro.input_ids_BT.tolist() == [[5, 6, 8, 30, 31, 9]]
    assert micro.source_L.tolist() == [1, 4, 5]
    assert micro.target_L.tolist() == [8, 9, 2]
    assert micro.sampler_logprob_L.tolist() == [-1.0, -2.0, -3.0]


def test_a_rollout_longer_than_the_budget_gets_a_micro_batch_of_its_own() -> None:
    parts = batch([group("a", rollout((8,) * 50), rollout((8, 2)))], "shared", budget=10)
    assert [len(m.target_L) for m in parts.micro_batches] == [50, 2]


def test_a_budget_holds_a_tree_whose_tokens_are_as_many() -> None:
    """A prompt of 3 and completions of 4, 1 and 2 tokens that are read; 40 more begin two of them."""
    shared = tuple(range(100, 140))
    groups = [group("a", rollout((*shared, 8, 8, 8)), rollout((8, 2)), rollout((*shared, 2)))]
    num_tokens = 3 + 40 + 2 + 1
    (micro,) = batch(groups, "shared", num_tokens).micro_batches
    assert micro.input_ids_BT.numel() == num_tokens
    assert len(batch(groups, "shared", num_tokens - 1).micro_batches) == 2


@pytest.mark.parametrize("packing", ["shared", "packed", "padded"])
def test_branches_are_sequences_of_their_own_in_one_row(packing: str) -> None:
    """The second is read behind a rewritten history, of which the first token is the prompt's."""
    one = rollout((8, 2))
    ids, rest = (5, 30, 31, 9), (6, 7)
    branched = replace(
        one,
        input_ids=(*one.input_ids, *ids),
        target_ids=(*one.target_ids, 30, 31, *rest),
        loss_mask=(*one.loss_mask, False, False, True, True),
        sampler_logprobs=(*one.sampler_logprobs, 0.0, 0.0, -3.0, -4.0),
        branches=(0, 4),
    )
    (micro,) = batch([group("a", branched, one)], packing).micro_batches
    tokens, positions = micro.input_ids_BT.flatten().tolist(), micro.position_ids_BT.flatten().tolist()
    assert [tokens[place] for place in micro.source_L.tolist()] == [7, 8, 31, 9, 7, 8]
    assert [positions[place] for place in micro.source_L.tolist()] == [2, 3, 2, 3, 2, 3]
    assert micro.target_L.tolist() == [8, 2, 6, 7, 8, 2]
    assert micro.row_L.tolist() == [0, 0, 0, 0, 1, 1]
    assert micro.sampler_logprob_L.tolist()[2:4] == [-3.0, -4.0]


def test_branches_that_do_not_begin_in_order_from_0_are_refused() -> None:
    for branches in ((1,), (0, 2, 2), (0, 4), (0, 9)):
        with pytest.raises(AssertionError, match="branches begin at"):
            replace(rollout((8, 2)), branches=branches)


CUT = AlgorithmConfig(mask_truncated=True)


def test_truncated_completions_leave_the_loss_and_its_counts() -> None:
    groups = [group("a", rollout((8, 2)), rollout((8, 8, 8), "length"))]
    for algorithm, counts in ((CUT, (2, 1)), (AlgorithmConfig(), (5, 2))):
        credit = credit_assigner(algorithm).assign(groups)
        assert count(make_rows(groups, credit.advantages, credit.in_loss)) == counts


def test_unflatten_puts_loss_tokens_into_rows() -> None:
    (micro,) = batch([group("a", rollout((8, 2)), rollout((9, 9, 2)))], "shared").micro_batches
    assert unflatten(micro.target_L, micro).tolist() == [[8, 2, 0], [9, 9, 2]]


@pytest.mark.parametrize("packing", ["shared", "packed", "padded"])
def test_rollouts_of_one_group_that_begin_otherwise_are_each_read_whole(packing: str) -> None:
    """The environment may say something else at the beginning of each episode; two of three begin alike."""
    begun = [rollout((8, 2)), rollout((8, 2), prompt=(5, 6, 1)), rollout((9, 2), prompt=(5, 6, 1))]
    (micro,) = batch([group("a", *begun)], packing).micro_batches
    flat = micro.input_ids_BT.flatten().tolist()
    assert [flat[place] for place in micro.source_L.tolist()] == [7, 8, 1, 8, 1, 9]
    assert len(flat) == {"shared": 4 + 3 + 2}.get(packing, 12)


def lines_run(packing: str, num_tokens: int) -> int:
    """How many lines of covey's own run to lay out two groups whose completions have so many tokens."""
    completions = [tuple(range(start, start + num_tokens)) for start in (10, 510)]
    groups = [group(name, *map(rollout, completions)) for name in "ab"]
    seen = 0

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal seen
        if "covey" not in frame.f_globals.get("__name__", ""):
            return None
        seen += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        batch(groups, packing, budget=10_000)
    finally:
        sys.settrace(before)
    return seen


@pytest.mark.parametrize("packing", ["shared", "packed", "padded"])
def test_no_line_of_python_runs_for_each_token(packing: str) -> None:
    assert 0 < lines_run(packing, 400) == lines_run(packing, 100)


def test_given_answers_are_not_counted_as_trained_rollouts() -> None:
    (micro,) = batch([group("a", rollout((8, 2)), rollout((9, 2)), rollout((4, 2)))], "packed").micro_batches
    counted = count_work([micro, replace(micro, num_supervised=2), replace(micro, prompt_ids=())])
    assert counted == {"num_rollouts_trained": 4.0, "num_micro_batches": 2.0}


@pytest.mark.parametrize(
    ("attention", "expected"),
    [
        ("forked", ["shared", "packed", "padded"]),
        ("rows", ["padded", "packed", "padded"]),
        ("alone", ["packed", "packed", "packed"]),
    ],
)
def test_a_layout_that_the_attention_does_not_compute_is_replaced(attention: str, expected: list[str]) -> None:
    assert [usable_layout(packing, attention) for packing in ("shared", "packed", "padded")] == expected


def test_rows_without_any_advantage_are_dropped_and_those_whose_turns_cancel_are_not() -> None:
    (rows,) = make_rows([group("a", *[rollout((8, 9))] * 3)], [[0.0, 1.0, 2.0]])
    turns = [
        replace(row, advantages=given) for row, given in zip(rows, [(0.0, 0.0), (1.0, -1.0), (0.0, -2.0)], strict=True)
    ]
    assert drop_zero_advantage_rows([turns, turns[:1]]) == [turns[1:], []]
