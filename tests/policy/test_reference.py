"""The reference of a KL penalty: frozen, refreshed by formula, and never in the way of the policy."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from covey.algorithm.settings import AlgorithmConfig
from covey.policy.policy import Policy
from covey.policy.reference import Reference, make_reference, refresh_reference
from covey.trainer.settings import OptimizerConfig

from ..support.builders import (
    ADVANTAGES,
    byte_batch,
    copied,
    gradient,
    make,
    make_policy,
    make_trainer,
    nano,
    probe_logits,
    random_groups,
    relative_error,
    same,
    weights,
)

KL = AlgorithmConfig(kl_coef=0.5)
FULL_KL = AlgorithmConfig(kl_coef=0.5, kl_estimator="full")
FAST = OptimizerConfig(name="sgd", lr=0.5, max_grad_norm=0.0)


def adapted(**settings: object) -> Policy:
    return nano(lora_rank=4, **settings)


def reference_logits(reference: Reference) -> Tensor:
    with reference.active() as policy:
        return probe_logits(policy)


def trained(policy: Policy) -> Policy:
    """After two steps of plain REINFORCE."""
    trainer = make_trainer(policy, optimizer=FAST)
    for step in range(2):
        trainer.step(byte_batch(), step)
    return policy


@pytest.mark.parametrize("refreshed", [False, True])
@pytest.mark.parametrize("make_one", [nano, adapted])
def test_the_reference_is_the_policy_before_its_first_step_and_stays_so(
    make_one: Callable[[], Policy], refreshed: bool
) -> None:
    policy = make_one()
    start = probe_logits(policy)
    reference = make_reference(policy, refreshed=refreshed)
    assert torch.equal(reference_logits(reference), start)
    trained(policy)
    assert float((probe_logits(policy) - start).abs().max()) > 0.1
    assert torch.equal(reference_logits(reference), start)


@pytest.mark.parametrize("refreshed", [False, True])
@pytest.mark.parametrize("settings", [KL, FULL_KL, AlgorithmConfig(ratio_denominator="reference")])
def test_no_gradient_flows_into_the_reference(settings: AlgorithmConfig, refreshed: bool) -> None:
    for policy in (nano(), adapted()):
        reference = make_reference(policy, refreshed=refreshed)
        trainable = {name for name, p in policy.model.named_parameters() if p.requires_grad}
        make_trainer(policy, settings, FAST, reference).step(byte_batch(), 0)
        if reference.adapter is None and reference.policy is not policy:
            assert not any(p.requires_grad or p.grad is not None for p in reference.policy.model.parameters())
        with_gradient = {name for name, p in policy.model.named_parameters() if p.grad is not None}
        assert with_gradient == trainable
        assert not any(".reference." in name for name in with_gradient)


@pytest.mark.parametrize("refreshed", [False, True])
def test_using_the_reference_leaves_adapters_gradients_and_mode_as_they_were(refreshed: bool) -> None:
    policy = trained(adapted())
    reference = make_reference(policy, refreshed=refreshed)
    trained(policy)
    expected = probe_logits(policy)
    flags = {name: p.requires_grad for name, p in policy.model.named_parameters()}
    assert {name for name, flag in flags.items() if flag} == {n for n in flags if "lora" in n and ".default." in n}
    for mode in (True, False):
        policy.model.train(mode)
        with pytest.raises(KeyError):
            _fail_inside(reference)
        assert policy.model.training == mode
        assert torch.is_grad_enabled()
        assert {name: p.requires_grad for name, p in policy.model.named_parameters()} == flags
        assert torch.equal(probe_logits(policy), expected)


def _fail_inside(reference: Reference) -> None:
    with reference.active() as policy:
        assert not policy.model.training
        assert not torch.is_grad_enabled()
        raise KeyError("cleaned up all the same")


@pytest.mark.parametrize("refreshed", [False, True])
def test_the_reference_of_pretrained_adapters_is_their_policy_not_the_base(
    refreshed: bool,
) -> None:
    policy = trained(adapted())
    start = probe_logits(policy)
    reference = make_reference(policy, refreshed=refreshed)
    assert torch.equal(reference_logits(reference), start)
    trained(policy)
    assert torch.equal(reference_logits(reference), start)
    assert not torch.equal(probe_logits(policy), start)


@pytest.mark.parametrize(("refreshed", "expected"), [(False, None), (True, "reference")])
def test_only_adapters_that_add_nothing_and_stay_need_no_second_one(refreshed: bool, expected: str | None) -> None:
    policy = adapted()
    assert make_reference(policy, refreshed=refreshed).adapter == expected
    assert make_reference(trained(adapted()), refreshed=refreshed).adapter == "reference"


@pytest.mark.long
def test_under_lora_the_reference_is_the_same_model_with_the_adapter_off() -> None:
    policy = adapted()
    before = {id(p) for p in policy.model.parameters()}
    reference = make_reference(policy, refreshed=False)
    assert {id(p) for p in reference.policy.model.parameters()} == before
    trained(policy)
    assert torch.equal(reference_logits(reference), probe_logits(nano()))


def test_a_refreshed_reference_under_lora_costs_one_more_adapter_and_leaves_the_random_numbers() -> None:
    policy = adapted()
    total, adapter = _count(policy), sum(p.numel() for p in policy.model.parameters() if p.requires_grad)
    state = torch.random.get_rng_state()
    make_reference(policy, refreshed=True)
    assert torch.equal(torch.random.get_rng_state(), state)
    assert _count(policy) == total + adapter


def _count(policy: Policy) -> int:
    return sum(p.numel() for p in policy.model.parameters())


def test_without_adapters_the_reference_is_a_frozen_copy() -> None:
    policy = nano()
    reference = make_reference(policy, refreshed=False)
    ours, theirs = ({id(p) for p in each.model.parameters()} for each in (policy, reference.policy))
    assert not ours & theirs
    assert not any(p.requires_grad for p in reference.policy.model.parameters())
    assert all(p.requires_grad for p in policy.model.parameters())


@pytest.mark.parametrize("alpha", [0.3, 1.0])
def test_a_refresh_mixes_the_policy_into_every_weight_of_the_reference(alpha: float) -> None:
    policy = nano(precision="float64")
    reference = make_reference(policy, refreshed=True)
    old = weights(reference.policy)
    new = weights(trained(policy))
    refresh_reference(reference, policy, alpha)
    found = weights(reference.policy)
    assert all(torch.allclose(found[n], (1 - alpha) * old[n] + alpha * new[n], rtol=1e-12, atol=1e-15) for n in old)
    assert same(weights(policy), new)
    if alpha == 1.0:
        assert same(found, new)
    else:
        assert not same(found, new)
        assert not same(found, old)


def test_three_small_refreshes_of_a_weight_are_these_numbers() -> None:
    policy = make_policy("qwen2", torch.float64)
    reference = make_reference(policy, refreshed=True)
    for model, value in ((reference.policy.model, 1.0), (policy.model, 2.0)):
        with torch.no_grad():
            next(model.parameters()).fill_(value)
    seen = []
    for _ in range(3):
        refresh_reference(reference, policy, 0.3)
        seen.append(float(next(reference.policy.model.parameters())[0, 0]))
    assert seen == pytest.approx([1.3, 1.51, 1.657])


def test_a_refresh_under_lora_copies_the_adapter_which_then_stays_fixed() -> None:
    policy = adapted()
    reference = make_reference(policy, refreshed=True)
    trained(policy)
    refresh_reference(reference, policy, 1.0)
    refreshed = probe_logits(policy)
    assert torch.equal(reference_logits(reference), refreshed)
    trained(policy)
    assert not torch.equal(probe_logits(policy), refreshed)
    assert torch.equal(reference_logits(reference), refreshed)


@pytest.mark.long
@pytest.mark.parametrize("settings", [KL, FULL_KL], ids=["k3", "full"])
@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("refreshed", [False, True])
def test_the_gradient_does_not_depend_on_how_the_reference_is_kept(
    settings: AlgorithmConfig, refreshed: bool, checkpointing: bool
) -> None:
    """The adapter switched off in the middle of a step against a copy of the model elsewhere."""

    def second_gradient(policy: Policy, reference: Reference) -> Tensor:
        trainer = make_trainer(policy, settings, FAST, reference, logprob_chunk=7, updates_per_batch=2)
        assert trainer.step(byte_batch(), 0)["kl"] > 1e-4
        return gradient(policy)

    policy = adapted(precision="float64", gradient_checkpointing=checkpointing)
    elsewhere = make_reference(nano(precision="float64"), refreshed=False)
    expected = second_gradient(copied(policy), elsewhere)
    got = second_gradient(policy, make_reference(policy, refreshed=refreshed))
    assert relative_error(got, expected) < 1e-6


def test_a_reference_of_another_policy_gives_the_kl_between_the_two() -> None:
    policy, other = make_policy("gpt2", torch.float64), make_policy("gpt2", torch.float64, seed=9)
    reference = make_reference(other, refreshed=False)
    (whole,) = make(random_groups(), advantages=ADVANTAGES).micro_batches
    with torch.no_grad():
        place = (whole.input_ids_BT, whole.position_ids_BT, whole.layout)
        ours, theirs = (p.logits(*place)[whole.source_L].log_softmax(-1) for p in (policy, other))
    expected = float((ours.exp() * (ours - theirs)).sum(-1).mean())
    trainer = make_trainer(policy, replace(FULL_KL), reference=reference, logprob_chunk=7)
    metrics = trainer.step(make(random_groups(), "shared", 20, ADVANTAGES), 0)
    assert metrics["kl"] == pytest.approx(expected, rel=1e-9)
    assert metrics["kl_loss"] == pytest.approx(0.5 * expected, rel=1e-9)
