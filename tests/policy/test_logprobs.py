"""Scores of loss tokens: the same for every layout and chunk, and equal to plain transformers."""

import copy
import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from covey.algorithm.kl import full_kl
from covey.policy.logprobs import AllowedTokens, Compared, Scoring, allowed_tokens, exact_kl, score_tokens
from covey.policy.models.loading import load_policy
from covey.policy.policy import Policy
from covey.policy.reference import Reference
from covey.policy.settings import ModelConfig, chunk_within_bound
from covey.types import Group, Sampling

from ..support.builders import ARCHITECTURES, logprobs, make, make_policy, random_groups


def plain_logprobs(policy: Policy, groups: list[Group], temperature: float = 1.0) -> Tensor:
    """Rollout after rollout through transformers' own attention."""
    config = copy.deepcopy(policy.causal_lm.config)  # from_config writes the attention into it
    plain = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    plain.load_state_dict(policy.causal_lm.state_dict())
    plain = plain.to(policy.precision).eval()
    pieces = []
    for rollout in (r for g in groups for r in g.rollouts):
        with torch.no_grad():
            logits = plain(input_ids=torch.tensor([rollout.input_ids])).logits[0] / temperature
        target = torch.tensor(rollout.target_ids)
        logprob = logits.log_softmax(-1).gather(1, target[:, None])[:, 0]
        pieces.append(logprob[torch.tensor(rollout.loss_mask)])
    return torch.cat(pieces)


@pytest.mark.product
@pytest.mark.parametrize("architecture", list(ARCHITECTURES))
@pytest.mark.parametrize("packing", ["shared", "packed", "padded"])
def test_log_probs_equal_a_plain_forward_of_prompt_and_completion(architecture: str, packing: str) -> None:
    policy, groups = make_policy(architecture), random_groups()
    expected = plain_logprobs(policy, groups, temperature=0.7)
    assert expected.std() > 0.5
    for budget, chunk in itertools.product((12, 10_000), (0, 3)):
        got = logprobs(policy, make(groups, packing, budget).micro_batches, Scoring(Sampling(temperature=0.7), chunk))
        assert torch.allclose(got, expected, atol=1e-5, rtol=0), (got - expected).abs().max()


def test_filters_renormalise_over_the_kept_tokens_and_always_keep_the_sampled_one() -> None:
    policy, groups = make_policy("qwen2"), random_groups()
    batch = make(groups, "shared", 10_000)
    everything = logprobs(policy, batch.micro_batches, Scoring(Sampling(), 0))
    cut = logprobs(policy, batch.micro_batches, Scoring(Sampling(top_p=0.9, top_k=20), 0))
    assert bool(torch.isfinite(cut).all())
    assert bool((cut >= everything - 1e-6).all())
    assert float((cut - everything).max()) > 0.05


@pytest.mark.parametrize("chunk", [0, 3])
@pytest.mark.parametrize("top_p", [1.0, 0.9])
@pytest.mark.parametrize("architecture", ["qwen2", "gpt2"])
def test_the_entropy_is_that_at_the_sampling_temperature_before_filters(
    architecture: str, top_p: float, chunk: int
) -> None:
    policy, groups = make_policy(architecture), random_groups()
    (micro,) = make(groups, "shared").micro_batches
    with torch.no_grad():
        logits_LV = policy.logits(micro.input_ids_BT, micro.position_ids_BT, micro.layout)[micro.source_L]
        found = score_tokens(policy, micro, Scoring(Sampling(temperature=0.5, top_p=top_p), chunk)).entropy_L
    cold, warm = (torch.distributions.Categorical(logits=logits_LV / t).entropy() for t in (0.5, 1.0))
    assert torch.allclose(found, cold, atol=1e-5)
    assert float((warm - found).abs().min()) > 1e-3


def test_the_exact_kl_is_between_the_policies_at_the_sampling_temperature() -> None:
    policy, other = make_policy("qwen2"), make_policy("qwen2", seed=9)
    (micro,) = make(random_groups(), "shared").micro_batches
    place = (micro.input_ids_BT, micro.position_ids_BT, micro.layout)
    with torch.no_grad():
        log_p_LV, log_q_LV = ((p.logits(*place)[micro.source_L] / 0.5).log_softmax(-1) for p in (policy, other))
        scoring = Scoring(Sampling(temperature=0.5), 0)
        found = (
            score_tokens(policy, micro, scoring, compared={"r": exact_kl(Reference(other, None))}).compared["r"].value_L
        )
    assert found is not None
    assert torch.allclose(found, (log_p_LV.exp() * (log_p_LV - log_q_LV)).sum(-1), atol=1e-4)


def test_kept_entries_give_the_same_log_probs_as_the_filters_on_the_same_weights() -> None:
    policy, groups = make_policy("qwen2"), random_groups()
    (micro,) = make(groups, "shared", 10_000).micro_batches
    scoring = Scoring(Sampling(temperature=0.7, top_p=0.8), 7)
    with torch.no_grad():
        kept = allowed_tokens(policy, micro, scoring)
        assert torch.equal(
            score_tokens(policy, micro, scoring, kept).logprob_L, score_tokens(policy, micro, scoring).logprob_L
        )
    assert int(kept.count_L.min()) >= 1
    assert int(kept.count_L.max()) < 40


def test_kept_entries_of_some_loss_tokens_are_theirs_alone() -> None:
    found = AllowedTokens(torch.tensor([4, 7, 1, 9]), torch.tensor([1, 2, 1])).where(torch.tensor([False, True, True]))
    assert (found.entry_K.tolist(), found.count_L.tolist()) == ([7, 1, 9], [2, 1])


class Plain:
    """A frozen model whose head inputs are its logits."""

    @contextmanager
    def active(self) -> Iterator[SimpleNamespace]:
        yield SimpleNamespace(head_is_linear=False)


def test_the_rate_is_the_second_models_share_of_the_logits() -> None:
    rows = [torch.tensor([[0.0, 8.0]]), torch.tensor([[4.0, 0.0]])]
    mixed = Compared(full_kl, (Plain(), Plain()), rate=0.25)  # type: ignore[arg-type]
    for temperature, expected in ((None, [0.5, 3.0]), (0.5, [2.0, 12.0])):
        assert replace(mixed, temperature=temperature).logits(rows, Sampling(temperature=2.0)).tolist() == [expected]


def test_an_entropy_that_is_only_logged_has_no_gradient() -> None:
    policy, sampling = make_policy("qwen2"), Sampling(top_p=0.9)
    (micro,) = make(random_groups(), "shared").micro_batches
    for wanted in (False, True):
        found = score_tokens(policy, micro, Scoring(sampling, 0, entropy_gradient=wanted))
        assert (found.logprob_L.requires_grad, found.entropy_L.requires_grad) == (True, wanted)


def test_gradients_repeat_bit_for_bit_with_several_threads() -> None:
    policy = load_policy(ModelConfig(), seed=0)
    groups = [replace(g, rollouts=g.rollouts * 16) for seed in range(8) for g in random_groups(seed)]
    (micro,) = make(groups, "shared", 100_000).micro_batches

    def gradient() -> Tensor:
        policy.model.zero_grad()
        score_tokens(policy, micro, Scoring(Sampling(), 0)).logprob_L.sum().backward()
        return torch.cat([p.grad.flatten() for p in policy.model.parameters() if p.grad is not None])

    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        first = gradient()
        assert all(torch.equal(gradient(), first) for _ in range(4))
    finally:
        torch.set_num_threads(threads)


def test_the_nano_policy_is_a_pure_function_of_its_seed() -> None:
    state = torch.random.get_rng_state()
    first, again, other = (load_policy(ModelConfig(), seed=seed) for seed in (1, 1, 2))
    assert torch.equal(torch.random.get_rng_state(), state)
    weight = "model.layers.0.mlp.up_proj.weight"
    assert torch.equal(first.model.state_dict()[weight], again.model.state_dict()[weight])
    assert not torch.equal(first.model.state_dict()[weight], other.model.state_dict()[weight])
    assert first.head_is_linear
    assert 500_000 < sum(p.numel() for p in first.model.parameters()) < 1_500_000


def test_logits_of_a_long_vocabulary_are_held_for_fewer_tokens() -> None:
    assert [chunk_within_bound(4096, vocabulary) for vocabulary in (64, 32_768, 49_152, 151_936)] == [
        4096,
        4096,
        2730,
        883,
    ]
    assert chunk_within_bound(0, 151_936) == 0, "all of them"
