"""The machine-design document's `GRPO.update(batch)`, against the formulas worked out by hand."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf
from torch import Tensor
from torch.nn import Parameter

from covey.algorithm.credit.scores import Scores
from covey.algorithm.settings import AlgorithmConfig
from covey.config.shelves import presets
from covey.run.build import build_run
from covey.system.waits.timer import PhaseTimer
from covey.trainer.grpo_update import GRPO, DocumentBatch, check, clamped_advantage, pack, rollout

from ..support.small import scripted, small_config

REWARDS = [3.0, 1.0, 0.1, 0.0]
LOG_PROBS = [-20.0, -25.0, -10.0, -10.0]
REFERENCE = [-20.1, -24.0, -10.05, -10.0]


def batch(**changes: Any) -> DocumentBatch:
    made: dict[str, Any] = {
        "prompts": ["car", "car", "catapult", "catapult"],
        "responses": ["a", "b", "c", "d"],
        "rewards": REWARDS,
        "logprobs": torch.tensor(LOG_PROBS, dtype=torch.float64, requires_grad=True),
        "ref_logprobs": REFERENCE,
        "prompt_ids": [0, 0, 7, 7],
    }
    return made | changes  # type: ignore[return-value]


def test_the_loss_is_the_documents_formula() -> None:
    # Group means 2 and 0.05: advantages 1, -1, 0.05, -0.05, clamped to +-0.2.
    first = min(math.exp(0.1) * 0.2, 1.2 * 0.2)
    second = min(math.exp(-1.0) * -0.2, 0.8 * -0.2)  # below the range, with a negative advantage: clipped
    third = math.exp(0.05) * 0.05
    fourth = 1.0 * -0.05
    surrogate = (first + second + third + fourth) / 4
    kl = (0.1 - 1.0 + 0.05 + 0.0) / 4
    assert GRPO().update(batch()).item() == pytest.approx(-surrogate + 0.001 * kl, rel=1e-12)


def test_its_gradient_is_the_formulas_too() -> None:
    log_probs = torch.tensor(LOG_PROBS, dtype=torch.float64, requires_grad=True)
    GRPO().update(batch(logprobs=log_probs)).backward()
    assert log_probs.grad is not None
    by_hand = [-math.exp(0.1) * 0.2, 0.0, -math.exp(0.05) * 0.05, 0.05]
    assert log_probs.grad.tolist() == pytest.approx([(g + 0.001) / 4 for g in by_hand], rel=1e-12)


def test_the_reference_is_a_constant_though_its_log_probs_carry_a_gradient() -> None:
    reference = torch.tensor(REFERENCE, dtype=torch.float64, requires_grad=True)
    GRPO().update(batch(ref_logprobs=reference)).backward()
    assert reference.grad is None


def test_advantages_are_centred_in_each_group_and_clamped() -> None:
    assert GRPO().advantages(batch()).tolist() == pytest.approx([0.2, -0.2, 0.05, -0.05])


def test_floats_will_do_where_nothing_is_trained() -> None:
    assert GRPO().update(batch(logprobs=LOG_PROBS)).item() == pytest.approx(GRPO().update(batch()).item())


def test_numbers_may_be_tensors_one_by_one() -> None:
    log_probs = [torch.tensor(value, dtype=torch.float64, requires_grad=True) for value in LOG_PROBS]
    loss = GRPO().update(batch(logprobs=log_probs, rewards=list(torch.tensor(REWARDS, dtype=torch.float64))))
    loss.backward()
    assert loss.item() == pytest.approx(GRPO().update(batch()).item(), rel=1e-12)
    assert log_probs[0].grad is not None
    assert log_probs[0].grad.item() == pytest.approx((-math.exp(0.1) * 0.2 + 0.001) / 4)


@pytest.mark.parametrize("made", [list, lambda ids: ids], ids=["a list of them", "one"])
def test_ids_that_are_tensors_form_groups_by_their_numbers(made: Callable[[Tensor], Any]) -> None:
    loss = GRPO().update(batch(prompt_ids=made(torch.tensor([0, 0, 7, 7]))))
    assert loss.item() == pytest.approx(GRPO().update(batch()).item(), rel=1e-12)
    with pytest.raises(ValueError, match="a group must have one prompt, got two with prompt_id 0"):
        GRPO().update(batch(prompt_ids=made(torch.tensor([0, 0, 0, 0]))))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_log_probs_in_half_precision_round_neither_reference_nor_advantages(dtype: torch.dtype) -> None:
    given = torch.tensor(LOG_PROBS, dtype=dtype, requires_grad=True)
    loss = GRPO().update(batch(logprobs=given))
    loss.backward()
    assert loss.item() == pytest.approx(GRPO().update(batch()).item(), rel=1e-5)
    assert given.grad is not None
    assert given.grad.dtype == dtype


def test_further_entries_of_a_batch_are_left_alone() -> None:
    assert GRPO().update(batch(step=3, lengths=[5])).item() == GRPO().update(batch()).item()


def test_groups_are_told_by_their_ids_wherever_they_stand() -> None:
    order = [2, 0, 3, 1]
    mixed = {name: [list(values)[i] for i in order] for name, values in batch(logprobs=LOG_PROBS).items()}  # type: ignore[call-overload]
    assert GRPO().update(mixed).item() == pytest.approx(GRPO().update(batch()).item())  # type: ignore[arg-type]


def test_another_algorithm_changes_the_advantages() -> None:
    best = AlgorithmConfig(advantage="best_minus_second", advantage_options={"scale": "none"})
    assert GRPO(best).advantages(batch()).tolist() == pytest.approx([2.0, 0.0, 0.1, 0.0])


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        (
            {"kl_coef": 0.05, "kl_estimator": "k1", "kl_in": "reward"},
            "reads no algorithm.kl_in, got reward",
        ),
        ({"selection": "top_k", "selection_options": {"k": 1}}, "reads no algorithm.selection, got top_k"),
        ({"shaping": {"stop_properly": {"coef": 0.5}}}, "reads no algorithm.shaping"),
        ({"correction": "truncate"}, "reads no algorithm.correction, got truncate"),
        ({"loss": "clip_cov"}, "has log-probs of whole responses alone, got algorithm.loss=clip_cov"),
        (
            {"kl_coef": 0.1, "kl_estimator": "full"},
            "has log-probs of whole responses alone, got algorithm.kl_est",
        ),
    ],
)
def test_an_algorithm_is_refused_where_something_of_it_would_be_left_out(settings: dict[str, Any], line: str) -> None:
    with pytest.raises(ValueError, match=f"^GRPO.update {line}"):
        GRPO(AlgorithmConfig(**settings))


def test_an_algorithm_is_refused_outside_of_its_bounds() -> None:
    with pytest.raises(ValueError, match=r"algorithm\.ratio must be one of token, .*, got word"):
        GRPO(AlgorithmConfig(ratio="word"))
    with pytest.raises(ValueError, match=r"algorithm\.log_ratio_clamp must be > 0, got 0"):
        GRPO(AlgorithmConfig(log_ratio_clamp=0.0))
    with pytest.raises(ValueError, match=r"algorithm\.kl_estimator must be one of .*, got k4"):
        GRPO(AlgorithmConfig(kl_estimator="k4"))


def doubled(given: Scores) -> Tensor:
    return 2 * given.rewards_N


def test_rewards_that_differ_by_rounding_alone_are_equal() -> None:
    pairs = GRPO(AlgorithmConfig(advantage="pairwise"))
    assert pairs.advantages(batch(rewards=[0.8, 0.1 + 0.7, 0.0, 1.0])).tolist() == [0.0, 0.0, -0.5, 0.5]


def test_an_advantage_of_ones_own_is_taken() -> None:
    own = AlgorithmConfig(advantage=f"{__name__}:doubled")
    assert GRPO(own).advantages(batch()).tolist() == [2 * reward for reward in REWARDS]


def beside_answers(given: Scores, answers: Any) -> Tensor:
    return given.rewards_N


def test_an_advantage_that_reads_completions_is_refused() -> None:
    with pytest.raises(ValueError, match=r"must take scores alone in GRPO\.update"):
        GRPO(AlgorithmConfig(advantage=f"{__name__}:beside_answers"))


def test_its_formulas_are_those_of_the_preset() -> None:
    chosen = OmegaConf.load(presets("algorithm")["clamped_advantage"])
    del chosen["defaults"]  # type: ignore[union-attr]
    assert OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(AlgorithmConfig), chosen)) == clamped_advantage()


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"rewards": [1.0]}, "the lists of a batch must have one length >= 1, got prompts 4, responses 4, rewards 1"),
        ({name: [] for name in batch()}, "one length >= 1, got prompts 0"),
        ({"prompt_ids": [0, 0, 0, 0]}, "a group must have one prompt, got two with prompt_id 0"),
    ],
)
def test_lists_that_do_not_fit_together_are_refused(changes: dict[str, Any], line: str) -> None:
    with pytest.raises(ValueError, match=line):
        GRPO().update(batch(**changes))


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"rewards": [3.0, None, 0.1, 0.0]}, "rewards of a batch must be finite, got None for response 1"),
        ({"rewards": [3.0, math.nan, 0.1, 0.0]}, "rewards of a batch must be finite, got nan for response 1"),
        ({"logprobs": [-20.0, -25.0, -math.inf, -10.0]}, "logprobs of a batch must be finite, got -inf for response 2"),
        (
            {"ref_logprobs": torch.tensor([math.inf, 0, 0, 0])},
            "ref_logprobs of a batch must be finite, got inf for",
        ),
    ],
)
def test_numbers_that_are_not_finite_are_refused_by_name_and_place(changes: dict[str, Any], line: str) -> None:
    with pytest.raises(ValueError, match=line):
        GRPO().update(batch(**changes))
    if "rewards" in changes:
        with pytest.raises(ValueError, match=line):
            GRPO().advantages(batch(**changes))


def test_a_list_that_is_left_out_is_named() -> None:
    given = {name: values for name, values in batch().items() if name != "responses"}
    with pytest.raises(ValueError, match="it lacks responses"):
        GRPO().update(given)  # type: ignore[arg-type] # the slip


def test_rollout_and_pack_feed_the_update_and_its_gradient_reaches_the_weights() -> None:
    config = small_config(model__precision="float64", sampling__top_p=0.9, preflight__enabled=False)
    config.algorithm = clamped_advantage()
    run = build_run(config, scripted(), PhaseTimer())
    groups = [rollout(run.source, prompt, 4, seed=3) for prompt in run.environment.prompts("train")[:2]]
    packed = pack(groups, run.trainer)
    check(packed)
    assert packed["prompt_ids"] == [0] * 4 + [1] * 4
    assert packed["rewards"] == [reward for group in groups for reward in group.rewards]
    # Whole responses, as they were sampled; before the first update the policy is its own reference
    sampled = [sum(one.sampler_logprobs) for group in groups for one in group.rollouts]
    assert torch.as_tensor(packed["logprobs"]).tolist() == pytest.approx(sampled, abs=1e-4)
    assert torch.equal(torch.as_tensor(packed["logprobs"]), torch.as_tensor(packed["ref_logprobs"]))
    GRPO().update(packed).backward()
    gradients = [weight.grad for _, weight in run.policy.model.named_parameters() if isinstance(weight, Parameter)]
    assert all(gradient is not None and bool(gradient.isfinite().all()) for gradient in gradients)
    assert any(bool(gradient.any()) for gradient in gradients if gradient is not None)
    # Other responses for another seed, the same for the same
    again, other = (rollout(run.source, groups[0].prompt, 4, seed=seed) for seed in (3, 4))
    assert [one.target_ids for one in again.rollouts] == [one.target_ids for one in groups[0].rollouts]
    assert [one.target_ids for one in other.rollouts] != [one.target_ids for one in groups[0].rollouts]
    # One that has nothing to learn keeps its place, and the reference is scored over the nucleus of the policy
    masked = replace(groups[0].rollouts[0], loss_mask=(False,) * len(groups[0].rollouts[0].loss_mask))
    groups[0] = replace(groups[0], rollouts=(masked, *groups[0].rollouts[1:]))
    with torch.no_grad():
        for weight in run.policy.model.parameters():
            weight.mul_(1.5)
    later = pack(groups, run.trainer)
    assert torch.as_tensor(later["logprobs"]).tolist()[1:] != pytest.approx(sampled[1:], abs=1e-4)
    before = torch.as_tensor(packed["ref_logprobs"]).tolist()
    assert later["ref_logprobs"][0] == 0.0 != before[0]
    assert torch.as_tensor(later["ref_logprobs"]).tolist()[1:] != before[1:]
    run.close()


def test_without_a_reference_there_is_nothing_to_pack() -> None:
    run = build_run(small_config(preflight__enabled=False), scripted(), PhaseTimer())
    with pytest.raises(ValueError, match=r"^pack needs a reference beside the policy"):
        pack([rollout(run.source, "say:", 2)], run.trainer)
    run.close()
