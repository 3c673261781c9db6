"""Promise 1 can be broken: each mistake others made is put in on purpose, and the checker of the promise must see it.

A mistake is a change of the batch or of an aggregation, the two seams between counting and dividing.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from covey.algorithm import objective
from covey.algorithm.aggregation import AGGREGATIONS, Denominators, Reduction, StepCounts
from covey.algorithm.settings import AlgorithmConfig
from covey.policy.attention.base import DENSE
from covey.policy.attention.bidirectional import WHOLE, InputsLayout
from covey.types import Batch, MicroBatch

from ...support.builders import MASKED
from .updates import Distance, How, Tamper, UpdateCase, farthest, make_case

FOUND = 1e-3
"""A relative error that no rounding explains: a hundred times what float32 is allowed, a million times float64."""
SPLITS = [How("padded", 1), How("packed", 25), How("shared", 20)]
LAYOUTS = [How("packed"), How("shared")]
ONCE = AlgorithmConfig(ratio_denominator="behaviour")

Weighting = Callable[[Tensor, Denominators], Tensor]


def with_counts(tokens: Callable[[Batch], int], sequences: Callable[[Batch], int]) -> Tamper:
    return lambda batch: replace(batch, num_loss_tokens=tokens(batch), num_sequences=sequences(batch))


def each(change: Callable[[MicroBatch], MicroBatch]) -> Tamper:
    return lambda batch: replace(batch, micro_batches=tuple(change(m) for m in batch.micro_batches))


number_of_parts = with_counts(lambda batch: len(batch.micro_batches), lambda batch: len(batch.micro_batches))


def mean_of_token_means(counts_N: Tensor, denominators: Denominators) -> Tensor:
    """With `number_of_parts` as the global count."""
    return torch.ones_like(counts_N) / counts_N.sum() / denominators.tokens


def mean_of_sequence_means(counts_N: Tensor, denominators: Denominators) -> Tensor:
    return 1 / counts_N.clamp(min=1) / len(counts_N) / denominators.sequences


def sum_of_token_means(counts_N: Tensor, denominators: Denominators) -> Tensor:
    return torch.ones_like(counts_N) / counts_N.sum()


def sum_of_sequence_means(counts_N: Tensor, denominators: Denominators) -> Tensor:
    return 1 / counts_N.clamp(min=1) / len(counts_N)


def group_means(micro_batch: MicroBatch) -> MicroBatch:
    """Each prompt weighs the same in a micro-batch, however many tokens of it are there."""
    of_prompt = Counter(micro_batch.prompt_ids[row] for row in micro_batch.row_L.tolist())
    weights = [1 / of_prompt[micro_batch.prompt_ids[row]] for row in micro_batch.row_L.tolist()]
    return replace(micro_batch, advantage_L=micro_batch.advantage_L * torch.tensor(weights))


def double_shift(micro_batch: MicroBatch) -> MicroBatch:
    """Log-probs are looked up one position late."""
    last = micro_batch.input_ids_BT.numel() - 1
    return replace(micro_batch, source_L=(micro_batch.source_L + 1).clamp(max=last))


def no_walls(micro_batch: MicroBatch) -> MicroBatch:
    """Rollouts of a packed stream see those before them."""
    return replace(micro_batch, layout=WHOLE if isinstance(micro_batch.layout, InputsLayout) else DENSE)


def positions_run_on(micro_batch: MicroBatch) -> MicroBatch:
    """In a packed stream positions don't begin again with each rollout, only where the policy has no more of them."""
    positions_BT = torch.arange(micro_batch.position_ids_BT.shape[1]).expand_as(micro_batch.position_ids_BT) % 120
    return replace(micro_batch, position_ids_BT=positions_BT)


def batch_normalised(micro_batch: MicroBatch) -> MicroBatch:
    """Advantages are whitened over the micro-batch."""
    advantage_L = micro_batch.advantage_L
    return replace(micro_batch, advantage_L=(advantage_L - advantage_L.mean()) / (1 + advantage_L.std(correction=0)))


@dataclass(frozen=True)
class Mistake:
    """What is done wrong, and the ways in which it shows."""

    tamper: Tamper = lambda batch: batch
    weighting: Weighting | None = None
    """Put in the place of the case's aggregation."""
    aggregation: str = "token_mean"
    ways: tuple[How, ...] = tuple(SPLITS)


MISTAKES = {
    "mean of micro-batch means": Mistake(number_of_parts, mean_of_token_means),
    "mean of micro-batch means of sequences": Mistake(number_of_parts, mean_of_sequence_means, "seq_mean_token_mean"),
    "local token counts": Mistake(weighting=sum_of_token_means),
    "local sequence counts": Mistake(weighting=sum_of_sequence_means, aggregation="seq_mean_token_mean"),
    "mean within each group": Mistake(each(group_means), aggregation="token_sum"),
    "advantages normalised by micro-batch": Mistake(each(batch_normalised)),
    "targets shifted twice": Mistake(each(double_shift), ways=tuple(LAYOUTS)),
    "rollouts that see each other": Mistake(each(no_walls), ways=tuple(LAYOUTS)),
    "positions that run on": Mistake(each(positions_run_on), ways=tuple(LAYOUTS)),
    "a micro-batch left out": Mistake(lambda batch: replace(batch, micro_batches=batch.micro_batches[:4])),
}


def ways_of(case: UpdateCase, mistake: Mistake) -> list[How]:
    """Fills read more tokens than rollouts that go on: a micro-batch that is to hold several of them is larger."""
    factor = 3 if case.architecture in MASKED else 1
    return [replace(how, budget=factor * how.budget) for how in mistake.ways]


def seen(case: UpdateCase, mistake: Mistake, monkeypatch: pytest.MonkeyPatch) -> Distance:
    if mistake.weighting is not None:
        monkeypatch.setitem(AGGREGATIONS, mistake.aggregation, mistake.weighting)
    return farthest(case, ways_of(case, mistake), mistake.tamper)


@pytest.mark.parametrize("architecture", ["gpt2", "bert"])
@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_put_in_on_purpose_is_found(name: str, architecture: str, monkeypatch: pytest.MonkeyPatch) -> None:
    mistake = MISTAKES[name]
    case = make_case(architecture, algorithm=replace(ONCE, aggregation=mistake.aggregation), num_updates=1)
    assert farthest(case, ways_of(case, mistake)).gradient < 1e-9
    found = seen(case, mistake, monkeypatch)
    assert found.gradient > FOUND, found
    assert found.metric > FOUND, found


@pytest.mark.parametrize("name", ["mean of micro-batch means", "targets shifted twice", "local token counts"])
def test_a_mistake_is_found_in_float32_and_under_lora_too(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    mistake = MISTAKES[name]
    algorithm = replace(ONCE, aggregation=mistake.aggregation)
    case = make_case("qwen2", torch.float32, algorithm, lora_rank=4, num_updates=1)
    assert seen(case, mistake, monkeypatch).gradient > FOUND


def padded_width(values_NT: Tensor, mask_NT: Tensor, totals: StepCounts, reduction: Reduction) -> Tensor:
    """The length of a completion is taken to be that of the longest beside it."""
    return torch.where(mask_NT, values_NT, 0.0).mean(1).sum() / totals.num_sequences


def test_dividing_by_the_padded_width_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(objective, "aggregate", padded_width)
    found = farthest(make_case(algorithm=replace(ONCE, aggregation="seq_mean_token_mean"), num_updates=1), SPLITS)
    assert found.gradient > FOUND
    assert found.metric > FOUND


SOME_ZERO = ((1.0, 0.0, 0.25), (0.0, 0.0), (0.5, -1.0, 0.0, -0.25))


@pytest.mark.parametrize("aggregation", ["token_mean", "seq_mean_token_mean"])
def test_counting_only_rollouts_with_an_advantage_is_found(aggregation: str) -> None:
    algorithm = replace(ONCE, aggregation=aggregation)
    case = make_case(algorithm=algorithm, advantages=SOME_ZERO, num_updates=1)
    present = with_counts(
        lambda batch: sum(len(m.target_L) for m in batch.micro_batches),
        lambda batch: sum(m.num_rows for m in batch.micro_batches),
    )
    skipping = [How("shared", 20, skip_zero=True)]
    assert farthest(case, skipping).gradient < 1e-9
    assert farthest(case, skipping, present).gradient > FOUND
