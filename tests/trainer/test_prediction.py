"""d loss / d log-prob before the pass: what is known of it is right to the bit, and saves a product of every chunk."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from covey.algorithm.aggregation import StepCounts
from covey.algorithm.build import build_objective
from covey.algorithm.loss_inputs import LEVELS, ObjectiveInputs
from covey.algorithm.losses import LOSSES
from covey.algorithm.settings import AlgorithmConfig
from covey.policy.logprobs import Scoring
from covey.policy.reference import make_reference
from covey.trainer.forward import (
    FrozenLogProbs,
    ScoringContext,
    objective_inputs,
    precompute_logprob_grad,
    score,
    score_frozen,
)
from covey.types import Sampling

from ..guarantees.update.updates import algorithm_of
from ..policy.test_head import Products
from ..support.builders import (
    ADVANTAGES,
    SGD,
    make,
    make_policy,
    make_trainer,
    random_groups,
    same,
    sampled_by,
    weights,
)

CHUNK = 7
TOTALS = StepCounts(43, 9, 9)


def asked(algorithm: AlgorithmConfig, chunk: int = CHUNK) -> ScoringContext:
    policy = make_policy("qwen2")
    scoring = Scoring(Sampling(), chunk, algorithm.entropy_coef != 0)
    return ScoringContext(policy, make_reference(policy, refreshed=False), build_objective(algorithm, 16), scoring)


def prepared_by(forward: ScoringContext, *, keep_old: bool = False) -> FrozenLogProbs:
    groups = sampled_by(forward.policy, random_groups(), Sampling(), noise=0.3)
    (micro,) = make(groups, advantages=ADVANTAGES).micro_batches
    return score_frozen(forward, micro, several=keep_old, keep_old=keep_old)


def predicted_and_found(forward: ScoringContext, prepared: FrozenLogProbs) -> tuple[Tensor | None, Tensor]:
    objective = forward.objective
    statistics = None
    if objective.needs_batch_selection:
        with torch.no_grad():
            statistics = objective.batch_statistics(objective_inputs(prepared, score(forward, prepared)), 0)

    def loss_of(inputs: ObjectiveInputs) -> Tensor:
        return objective(inputs, TOTALS, kl_coef=0.1, statistics=statistics)[0]

    scores = score(forward, prepared)
    (found_L,) = torch.autograd.grad(loss_of(objective_inputs(prepared, scores)), scores.logprob_L)
    return precompute_logprob_grad(forward, prepared, loss_of), found_L


ON_POLICY = [
    (loss, ratio) for loss in sorted(LOSSES) for ratio in LEVELS if ratio == "token" or LOSSES[loss].any_ratio_level
]


@pytest.mark.parametrize(("loss", "ratio"), ON_POLICY)
def test_before_the_first_update_the_coefficients_of_every_loss_are_known_to_the_bit(loss: str, ratio: str) -> None:
    forward = asked(algorithm_of(loss, ratio=ratio))
    predicted, found = predicted_and_found(forward, prepared_by(forward))
    assert predicted is not None
    assert torch.equal(predicted, found)
    assert float(found.abs().max()) > 0


WITH_OLD: list[dict[str, Any]] = [
    {"kl_coef": 0.1},
    {"sampler_kl_coef": 0.1},
    {"ratio_denominator": "behaviour"},
    {"correction": "truncate"},
    {"rejection": "token_k1", "rejection_thresholds": "0.9_1.2"},
    {"off_policy_mask_delta": 0.1},
]
"""What reads the log-probs themselves: known only where those of the old policy are."""


@pytest.mark.parametrize("settings", WITH_OLD)
def test_what_reads_the_log_probs_themselves_is_known_where_they_are(settings: dict[str, Any]) -> None:
    forward = asked(AlgorithmConfig(**settings))
    assert predicted_and_found(forward, prepared_by(forward))[0] is None
    predicted, found = predicted_and_found(forward, prepared_by(forward, keep_old=True))
    assert predicted is not None
    assert torch.equal(predicted, found)


@pytest.mark.parametrize("settings", [{"entropy_coef": 0.01}, {"kl_coef": 0.1, "kl_estimator": "full"}])
def test_gradients_through_all_of_the_vocabulary_are_not_predicted(settings: dict[str, Any]) -> None:
    objective = build_objective(AlgorithmConfig(**settings), 16)
    assert not objective.grad_is_known_before_forward(is_current=True, old_is_given=True)


@pytest.mark.parametrize("loss", sorted(LOSSES))
def test_after_an_update_only_losses_without_a_ratio_are_predicted(loss: str) -> None:
    forward = asked(algorithm_of(loss))
    prepared = replace(prepared_by(forward), is_current=False)
    predicted, found = predicted_and_found(forward, prepared)
    assert (predicted is not None) == (not LOSSES[loss].reads_old)
    assert predicted is None or torch.equal(predicted, found)


def test_nothing_is_predicted_where_logits_are_not_made_again_or_weights_are_gathered() -> None:
    prepared = prepared_by(asked(AlgorithmConfig()))
    for chunk, is_predicted in ((1, True), (42, True), (43, False), (0, False)):
        assert (predicted_and_found(asked(AlgorithmConfig(), chunk), prepared)[0] is not None) == is_predicted
    forward = asked(AlgorithmConfig())
    gathered = replace(forward, policy=replace(forward.policy, sharded=True))
    assert precompute_logprob_grad(gathered, prepared, lambda inputs: inputs.log_probs_NT.sum()) is None


def products_of_a_step(**settings: Any) -> int:
    policy = make_policy("qwen2")
    trainer = make_trainer(policy, AlgorithmConfig(**settings), SGD, logprob_chunk=CHUNK)
    with Products() as products:
        trainer.step(make(random_groups(), "shared", 40, ADVANTAGES), 0)
    return products.count


def test_a_step_saves_one_product_of_every_chunk_where_there_are_several() -> None:
    lengths = [len(m.target_L) for m in make(random_groups(), "shared", 40, ADVANTAGES).micro_batches]
    num_chunks = sum(-(-length // CHUNK) for length in lengths if length > CHUNK)
    assert num_chunks > 4
    assert products_of_a_step(ratio_denominator="behaviour") - products_of_a_step() == num_chunks


@pytest.mark.parametrize("updates", [1, 3])
def test_an_update_is_the_same_bits_without_predictions(updates: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def moved() -> dict[str, Tensor]:
        policy = make_policy("qwen2")
        trainer = make_trainer(policy, AlgorithmConfig(), SGD, logprob_chunk=CHUNK, updates_per_batch=updates)
        trainer.step(make(random_groups(), "shared", 40, ADVANTAGES), 0)
        return weights(policy)

    expected = moved()
    monkeypatch.setattr("covey.trainer.trainer.precompute_logprob_grad", lambda *_: None)
    assert same(moved(), expected)


@pytest.mark.parametrize(("loss", "again"), [("clip", False), ("reinforce", True)])
def test_the_trainer_asks_for_what_holds_at_each_update(
    loss: str, again: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[bool] = []

    def noted(*asked: Any) -> Tensor | None:
        predicted = precompute_logprob_grad(*asked)
        found.append(predicted is not None)
        return predicted

    monkeypatch.setattr("covey.trainer.trainer.precompute_logprob_grad", noted)
    trainer = make_trainer(make_policy("qwen2"), algorithm_of(loss), SGD, logprob_chunk=1, updates_per_batch=3)
    batch = make(random_groups(), "shared", 10_000, ADVANTAGES)
    trainer.step(batch, 0)
    trainer.step(batch, 1)
    assert found == [True, again, again] * 2
