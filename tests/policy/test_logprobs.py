"""Scores of loss tokens: the same for every layout and chunk, and equal to plain transformers."""

import copy
import itertools

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from covey.batch import count, make_batch, make_rows
from covey.config import ModelConfig
from covey.engine.base import Sampling
from covey.policy.attention import ATTENTION, register
from covey.policy.loading import load_policy
from covey.policy.logprobs import Scoring, kept_entries, score_tokens
from covey.policy.nano import nano_tokenizer
from covey.policy.policy import Policy
from covey.types import Batch, Group, Prompt, Reward, Rollout

ARCHITECTURES = {
    "llama": {},
    "qwen2": {},
    "qwen3": {},
    "mistral": {"sliding_window": 5},
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "bos_token_id": 0, "eos_token_id": 0},
}


def make_policy(architecture: str, dtype: torch.dtype = torch.float32) -> Policy:
    register()
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    grouped = {"num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 128}
    extra = ARCHITECTURES[architecture]
    shape = extra if architecture == "gpt2" else {**sizes, **grouped, "bos_token_id": 0, "eos_token_id": 0, **extra}
    config = AutoConfig.for_model(architecture, vocab_size=40, **shape)
    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_config(config, attn_implementation=ATTENTION).to(dtype).eval()
    with torch.no_grad():
        for parameter in model.parameters():  # the default initialisation is nearly uniform: sharpen it
            parameter.mul_(4.0) if parameter.dim() > 1 else None
    return Policy(model=model, tokenizer=nano_tokenizer(), precision=dtype, plain_head=True)


def random_groups(seed: int = 0) -> list[Group]:
    generator = torch.Generator().manual_seed(seed)

    def tokens(n: int) -> tuple[int, ...]:
        return tuple(torch.randint(1, 40, (n,), generator=generator).tolist())

    groups = []
    for name, prompt_length, lengths in (("a", 7, (3, 9, 1)), ("b", 2, (5, 5)), ("c", 11, (4, 2, 8, 6))):
        prompt = tokens(prompt_length)
        rollouts = []
        for n in lengths:
            ids = (*prompt, *tokens(n))
            mask = (False,) * (prompt_length - 1) + (True,) * n
            rollouts.append(
                Rollout(ids[:-1], ids[1:], mask, (0.0,) * len(mask), Reward(0.0, {}), "", "stop", policy_version=0)
            )
        groups.append(Group(Prompt(name, "test", "", {}), tuple(rollouts), ()))
    return groups


def make(groups: list[Group], packing: str, budget: int) -> Batch:
    rows = make_rows(groups, [[0.0] * len(g.rollouts) for g in groups])
    tokens, sequences = count(rows)
    totals = (tokens, sequences, sequences)
    return make_batch(
        rows, packing=packing, micro_batch_tokens=budget, totals=totals, device=torch.device("cpu")
    )


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


def logprobs(policy: Policy, batch: Batch, scoring: Scoring) -> Tensor:
    with torch.no_grad():
        return torch.cat([score_tokens(policy, m, scoring).logprob_L for m in batch.micro_batches])


@pytest.mark.parametrize("architecture", list(ARCHITECTURES))
@pytest.mark.parametrize("packing", ["shared", "packed", "padded"])
def test_log_probs_equal_a_plain_forward_of_prompt_and_completion(architecture: str, packing: str) -> None:
    policy, groups = make_policy(architecture), random_groups()
    expected = plain_logprobs(policy, groups, temperature=0.7)
    assert expected.std() > 0.5
    for budget, chunk in itertools.product((12, 10_000), (0, 3)):
        got = logprobs(policy, make(groups, packing, budget), Scoring(Sampling(temperature=0.7), chunk))
        assert torch.allclose(got, expected, atol=1e-5, rtol=0), (got - expected).abs().max()


def test_gradients_do_not_depend_on_layout_split_or_chunk_in_float64() -> None:
    policy, groups = make_policy("gpt2", torch.float64), random_groups()
    weights = torch.linspace(-1, 1, 43, dtype=torch.float64)

    def gradient(packing: str, budget: int, chunk: int) -> Tensor:
        policy.model.zero_grad()
        batch = make(groups, packing, budget)
        start = 0
        for micro in batch.micro_batches:
            scores = score_tokens(policy, micro, Scoring(Sampling(), chunk))
            stop = start + len(micro.target_L)
            ((scores.logprob_L + 0.1 * scores.entropy_L) * weights[start:stop]).sum().backward()
            start = stop
        assert start == len(weights)
        return torch.cat([p.grad.flatten() for p in policy.model.parameters() if p.grad is not None])

    expected = gradient("padded", 10_000, 0)
    for packing, budget, chunk in itertools.product(("shared", "packed", "padded"), (12, 10_000), (0, 5)):
        got = gradient(packing, budget, chunk)
        assert float((got - expected).norm() / expected.norm()) < 1e-9


def test_filters_renormalise_over_the_kept_tokens_and_always_keep_the_sampled_one() -> None:
    policy, groups = make_policy("qwen2"), random_groups()
    batch = make(groups, "shared", 10_000)
    everything = logprobs(policy, batch, Scoring(Sampling(), 0))
    cut = logprobs(policy, batch, Scoring(Sampling(top_p=0.9, top_k=20), 0))
    assert bool(torch.isfinite(cut).all())
    assert bool((cut >= everything - 1e-6).all())
    assert float((cut - everything).max()) > 0.05


def test_kept_entries_give_the_same_log_probs_as_the_filters_on_the_same_weights() -> None:
    policy, groups = make_policy("qwen2"), random_groups()
    (micro,) = make(groups, "shared", 10_000).micro_batches
    scoring = Scoring(Sampling(temperature=0.7, top_p=0.8), 7)
    with torch.no_grad():
        kept = kept_entries(policy, micro, scoring)
        assert torch.equal(
            score_tokens(policy, micro, scoring, kept).logprob_L, score_tokens(policy, micro, scoring).logprob_L
        )
    assert int(kept.count_L.min()) >= 1
    assert int(kept.count_L.max()) < 40


def test_the_nano_policy_is_a_pure_function_of_its_seed() -> None:
    state = torch.random.get_rng_state()
    first, again, other = (load_policy(ModelConfig(), seed=seed) for seed in (1, 1, 2))
    assert torch.equal(torch.random.get_rng_state(), state)
    weight = "model.layers.0.mlp.up_proj.weight"
    assert torch.equal(first.model.state_dict()[weight], again.model.state_dict()[weight])
    assert not torch.equal(first.model.state_dict()[weight], other.model.state_dict()[weight])
    assert first.plain_head
    assert 500_000 < sum(p.numel() for p in first.model.parameters()) < 1_500_000
