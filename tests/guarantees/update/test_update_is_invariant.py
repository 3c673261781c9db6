"""Promise 1: the update does not depend on how it was computed. GPT-2 in float64: exact up to rounding.

Other architectures cast to float32 inside. That the checker finds mistakes is shown in
test_update_mistakes_are_found.py; losses, aggregations and rules: test_update_is_invariant_for_every_loss.py.
"""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from covey.algorithm.settings import AlgorithmConfig
from covey.policy.policy import Policy
from covey.types import Batch, Group, MicroBatch, Rollout

from ...support.builders import copied, gradient, random_groups
from .updates import (
    EVERY_LOSS,
    EVERYTHING_ON,
    WAYS,
    WHOLE,
    Distance,
    How,
    UpdateCase,
    algorithm_of,
    any_groups,
    any_way,
    batch_of,
    distance,
    farthest,
    make_case,
    one_update,
    policy_of,
    trainer_of,
)

EXACT, FLOAT32 = 1e-9, 1e-5
PLACES = [
    ("gpt2", torch.float64, EXACT),
    ("llama", torch.float32, FLOAT32),
    ("qwen2", torch.float32, FLOAT32),
    ("qwen3", torch.float32, FLOAT32),
    ("mistral", torch.float32, FLOAT32),
    ("bert", torch.float64, EXACT),
    ("roberta", torch.float64, EXACT),
    ("modernbert", torch.float32, FLOAT32),
]
"""The last three fill in masked tokens."""
KINDS = pytest.mark.parametrize("architecture", ["gpt2", "bert"])
"""A policy that continues its prompts, and one that fills them in."""
EVERYWHERE = pytest.mark.parametrize(
    ("architecture", "dtype", "tolerance", "lora_rank"),
    [
        pytest.param(
            *place,
            lora_rank,
            id=f"{place[0]}-{'lora' if lora_rank else 'full'}",
            marks=[pytest.mark.slow] if lora_rank and place[0] in ("llama", "mistral", "bert") else [],
        )
        for place in PLACES
        for lora_rank in (0, 4)
    ],
)


def holds(found: Distance, tolerance: float) -> None:
    assert found.gradient < tolerance, found
    assert found.metric < tolerance, found


IN_EVERY_WAY = ("gpt2-full", "gpt2-lora", "qwen3-full", "bert-full", "modernbert-full")
"""For every run of the tests; the others are computed in micro-batches of several, of each layout."""


def places_and_ways() -> Iterator[Any]:
    for (architecture, dtype, tolerance), lora_rank, way in itertools.product(PLACES, (0, 4), WAYS):
        name = f"{architecture}-{'lora' if lora_rank else 'full'}"
        is_seldom = lora_rank and architecture in ("llama", "mistral", "bert")
        is_quick = name in IN_EVERY_WAY or (way == "several in a micro-batch" and not is_seldom)
        marks = [] if is_quick else [pytest.mark.slow]
        yield pytest.param(architecture, dtype, tolerance, lora_rank, way, id=f"{way}-{name}", marks=marks)


@pytest.mark.parametrize(("architecture", "dtype", "tolerance", "lora_rank", "way"), places_and_ways())
def test_gradient_and_metrics_are_the_same_however_they_are_computed(
    architecture: str, dtype: torch.dtype, tolerance: float, lora_rank: int, way: str
) -> None:
    holds(farthest(make_case(architecture, dtype, EVERYTHING_ON, lora_rank=lora_rank), WAYS[way]), tolerance)


@pytest.mark.long
@pytest.mark.parametrize("architecture", ["llama", "qwen3", "mistral"])
def test_attention_in_c_gives_the_same_gradient_and_metrics(architecture: str) -> None:
    """The last has a window; all have two queries a key."""
    case = make_case(architecture, torch.float32, EVERYTHING_ON)
    ways = [("shared", 10_000), ("shared", 20), ("shared", 1), ("packed", 25)]
    holds(farthest(case, [How(*way, attention="compiled") for way in ways]), FLOAT32)
    holds(farthest(case, [How("shared", 20, attention="compiled", checkpointing=True, chunk=7)]), FLOAT32)


@pytest.mark.long
@pytest.mark.parametrize(
    ("architecture", "dtype", "tolerance"), [PLACES[0], PLACES[4]], ids=["gpt2 in float64", "mistral's window"]
)
def test_attention_of_varying_lengths_gives_the_same_gradient_and_metrics(
    architecture: str, dtype: torch.dtype, tolerance: float
) -> None:
    """Through its reference kernel; random groups have rollouts without tokens of their own."""
    for groups in (None, any_groups(1)):
        case = make_case(architecture, dtype, EVERYTHING_ON, groups)
        ways = [How("shared", 10_000), How("shared", 20, checkpointing=True, chunk=7), How("packed", 25)]
        holds(farthest(case, [replace(way, attention="varlen") for way in ways]), tolerance)


# ------------------------------------------------------------------------------------- the plainest way, by hand


def plain_gradient(case: UpdateCase) -> Tensor:
    """Of the mean over all loss tokens of -A log pi: rollout after rollout through transformers' own attention."""
    policy = copied(policy_of(case.architecture, case.dtype, case.lora_rank))
    policy.causal_lm.set_attn_implementation("eager")
    rollouts = [rollout for group in case.groups for rollout in group.rollouts]
    advantages = [value for values in case.advantages for value in values]
    num_tokens = sum(sum(rollout.loss_mask) for rollout in rollouts)
    for rollout, advantage in zip(rollouts, advantages, strict=True):
        if any(rollout.loss_mask):
            (-advantage * plain_logprob(policy, rollout, case.sampling.temperature) / num_tokens).backward()
    return gradient(policy)


def plain_logprob(policy: Policy, rollout: Rollout, temperature: float) -> Tensor:
    """Of the tokens the policy wrote, summed."""
    inputs = torch.tensor(rollout.input_ids).view(-1, rollout.input_length or len(rollout.input_ids))
    logits_TV = policy.model(input_ids=inputs).logits.flatten(0, 1) / temperature
    logprob_T = logits_TV.log_softmax(-1).gather(1, torch.tensor(rollout.target_ids)[:, None])[:, 0]
    return logprob_T[torch.tensor(rollout.loss_mask)].sum()


@EVERYWHERE
def test_the_gradient_is_the_formula_written_out_over_plain_transformers(
    architecture: str, dtype: torch.dtype, tolerance: float, lora_rank: int
) -> None:
    algorithm = AlgorithmConfig(loss="reinforce")
    case = make_case(architecture, dtype, algorithm, any_groups(8), lora_rank=lora_rank, num_updates=1)
    expected = plain_gradient(case)
    for how in (WHOLE, How("shared", 20, chunk=3)):
        got = one_update(case, how).gradient
        assert float((got - expected).norm() / expected.norm()) < tolerance


# ------------------------------------------------------------------------------------- anything, drawn from a seed


def any_case(seed: int) -> UpdateCase:
    """Any groups of either kind of policy under any loss and aggregation, with or without penalties."""
    aggregations = ("token_mean", "seq_mean_token_mean", "seq_mean_token_sum_norm", "token_sum")
    algorithm = replace(
        algorithm_of(EVERY_LOSS[seed % len(EVERY_LOSS)]),
        aggregation=aggregations[seed % 5 % 4],
        kl_coef=0.1 * (seed % 2),
        entropy_coef=0.01 * (seed % 3 == 0),
        count_empty=seed % 4 == 0,
    )
    architecture = ("gpt2", "gpt2", "gpt2", "bert", "gpt2", "gpt2", "gpt2", "roberta")[seed % 8]
    return make_case(architecture, torch.float64, algorithm, any_groups(seed), lora_rank=4 * (seed % 7 == 0))


def any_ways(case: UpdateCase, seed: int, count: int) -> list[How]:
    return [any_way(1000 * seed + index, len(case.groups)) for index in range(count)]


@pytest.mark.parametrize("seed", range(16))
def test_any_groups_give_the_same_update_in_any_way(seed: int) -> None:
    case = any_case(seed)
    holds(farthest(case, any_ways(case, seed, 3)), EXACT)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(100, 400))
def test_hundreds_of_random_groups_give_the_same_update_in_any_way(seed: int) -> None:
    case = any_case(seed)
    holds(farthest(case, any_ways(case, seed, 6)), EXACT)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(10))
@EVERYWHERE
def test_random_groups_give_the_same_update_in_any_way_on_every_architecture(
    architecture: str, dtype: torch.dtype, tolerance: float, lora_rank: int, seed: int
) -> None:
    case = make_case(architecture, dtype, EVERYTHING_ON, any_groups(seed), lora_rank=lora_rank)
    holds(farthest(case, any_ways(case, seed, 4)), tolerance)


def test_the_random_groups_are_unequal_and_some_have_no_loss_token() -> None:
    drawn = [group for seed in range(16) for group in any_groups(seed)]
    rollouts = [rollout for group in drawn for rollout in group.rollouts]
    assert {len(group.rollouts) for group in drawn} == {1, 2, 3, 4, 5}
    assert {0, 1, 2} < {rollout.num_loss_tokens for rollout in rollouts}
    assert any(not any(rollout.num_loss_tokens for rollout in group.rollouts) for group in drawn)
    written = [rollout.loss_mask[rollout.loss_mask.index(True) :] for rollout in rollouts if any(rollout.loss_mask)]
    assert sum(not all(mask) for mask in written) > 20  # with tokens of a tool among their own


# ------------------------------------------------------------------------------------- parts without loss tokens


def silenced(group: Group) -> Group:
    """The group with no loss token."""
    rollouts = (replace(r, loss_mask=(False,) * len(r.loss_mask)) for r in group.rollouts)
    return replace(group, rollouts=tuple(rollouts))


@KINDS
@pytest.mark.parametrize("count_empty", [False, True])
def test_a_group_without_loss_tokens_counts_as_rollouts_and_nothing_else(count_empty: bool, architecture: str) -> None:
    algorithm = AlgorithmConfig(aggregation="seq_mean_token_mean", count_empty=count_empty)
    a, b, c = random_groups()
    with_silent = make_case(architecture, algorithm=algorithm, groups=[a, silenced(b), c])
    holds(farthest(with_silent, [How("packed", 25), How("shared", 1), How("shared", order=(1, 2, 0))]), EXACT)
    without = replace(with_silent, groups=with_silent.groups[::2], advantages=with_silent.advantages[::2])
    more, fewer = (one_update(replace(case, num_updates=1)).gradient for case in (without, with_silent))
    share = 7 / 9 if count_empty else 1.0
    assert float((share * more - fewer).norm() / fewer.norm()) < EXACT


def without_tokens(micro_batch: MicroBatch) -> MicroBatch:
    return replace(
        micro_batch,
        source_L=micro_batch.source_L[:0],
        target_L=micro_batch.target_L[:0],
        row_L=micro_batch.row_L[:0],
        column_L=micro_batch.column_L[:0],
        advantage_L=micro_batch.advantage_L[:0],
        sampler_logprob_L=micro_batch.sampler_logprob_L[:0],
    )


def with_a_silent_micro_batch(batch: Batch) -> Batch:
    first, *others = batch.micro_batches
    return replace(batch, micro_batches=(without_tokens(first), first, *others))


@KINDS
@pytest.mark.parametrize("loss", ["clip", "clip_cov"])
def test_a_micro_batch_without_loss_tokens_changes_nothing(loss: str, architecture: str) -> None:
    algorithm = algorithm_of(loss, kl_coef=0.1, entropy_coef=0.01, aggregation="seq_mean_token_mean")
    case = make_case(architecture, algorithm=algorithm)
    how = How("shared", 20, chunk=7)
    expected, got = one_update(case, how), one_update(case, how, with_a_silent_micro_batch)
    trained = {"num_rollouts_trained": expected.metrics["num_rollouts_trained"]}
    holds(distance(replace(got, metrics=got.metrics | trained), expected), EXACT)


@KINDS
@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_gradients_of_uneven_rank_shares_add_up(world_size: int, architecture: str) -> None:
    """In one process, before anything is sent; of three groups the fourth rank has none, of the first none speaks."""
    a, b, c = random_groups()
    algorithm = AlgorithmConfig(ratio_denominator="behaviour", entropy_coef=0.01)
    case = make_case(architecture, algorithm=algorithm, groups=[silenced(a), b, c], num_updates=1)
    parts = [one_update(case, How("shared", 20, share=(rank, world_size))) for rank in range(world_size)]
    assert sum(float(part.gradient.norm()) > 0 for part in parts) == 2
    total, expected = torch.stack([part.gradient for part in parts]).sum(0), one_update(case).gradient
    assert float((total - expected).norm() / expected.norm()) < EXACT


@KINDS
def test_a_batch_without_any_loss_token_leaves_the_weights_alone(architecture: str) -> None:
    case = make_case(architecture, groups=[silenced(group) for group in random_groups()])
    update = one_update(case)
    assert not bool(update.gradient.any())
    assert (update.metrics["skipped"], update.metrics["num_rollouts_trained"]) == (0.0, 0.0)


# ------------------------------------------------------------------------------------- the ways are really different


def layer_calls(case: UpdateCase, how: How) -> int:
    """How often the first norm of the policy ran in one phase."""
    policy = copied(policy_of(case.architecture, case.dtype, case.lora_rank))
    calls: list[nn.Module] = []
    policy.causal_lm.base_model.h[0].ln_1.register_forward_pre_hook(lambda module, arguments: calls.append(module))
    trainer_of(case, policy, how).step(batch_of(case, how), 0)
    return len(calls)


def test_recomputing_activations_really_runs_the_layers_again() -> None:
    case = make_case(algorithm=AlgorithmConfig(loss="reinforce"), num_updates=1)
    assert layer_calls(case, How("shared", 20)) == len(batch_of(case, How("shared", 20)).micro_batches)
    assert layer_calls(case, How("shared", 20, checkpointing=True)) == 2 * layer_calls(case, How("shared", 20))


def test_the_ways_split_lay_out_and_order_the_batch_differently() -> None:
    case = make_case()

    def shape(how: How) -> Sequence[object]:
        batch = batch_of(case, how)
        return [(tuple(m.input_ids_BT.shape), m.prompt_ids) for m in batch.micro_batches]

    ways = [How(p, b) for p, b in itertools.product(("padded", "packed", "shared"), (1, 30, 10_000))]
    ways += [How(order=(2, 0, 1)), How("shared", 30, order=(2, 0, 1))]
    assert len({str(shape(how)) for how in ways}) == len(ways) - 2  # one rollout at a time there is only one layout
    assert [len(batch_of(case, how).micro_batches) for how in (How(budget=1), How("shared", 20), WHOLE)] == [9, 5, 1]
