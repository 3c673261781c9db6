"""Tiny random policies, groups of random rollouts, batches and trainers of them."""

import copy
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForSequenceClassification,
    PreTrainedConfig,
)

from covey.algorithm.build import build_credit, build_objective
from covey.algorithm.credit.groups import CreditAssigner
from covey.algorithm.settings import AlgorithmConfig
from covey.policy.attention.base import ATTENTION, DENSE, register
from covey.policy.logprobs import Scoring, score_tokens
from covey.policy.models import loading
from covey.policy.models.loading import load_policy
from covey.policy.models.nano import nano_masked_tokenizer, nano_tokenizer
from covey.policy.models.probe import remove_dropout
from covey.policy.policy import Policy
from covey.policy.reference import Reference
from covey.policy.settings import ModelConfig
from covey.rollouts.rollout import filled_rollout
from covey.trainer.batch import count, make_batch, make_rows
from covey.trainer.layouts import Row
from covey.trainer.optimizer import TrainerSettings
from covey.trainer.settings import OptimizerConfig
from covey.trainer.trainer import Trainer
from covey.types import Batch, Completion, Group, MicroBatch, Prompt, Reward, Rollout, Sampling

VOCABULARY = 40
CPU = torch.device("cpu")
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {},
    "qwen3": {},
    "mistral": {"sliding_window": 5},
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "bos_token_id": 0, "eos_token_id": 0},
}
MASKED: dict[str, dict[str, Any]] = {"bert": {}, "roberta": {}, "modernbert": {"global_attn_every_n_layers": 2}}
"""Architectures that fill in; every second layer of ModernBERT sees only what is near."""
MASK_ID = 39
SHAPE: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "pad_token_id": 0,
}


def make_policy(architecture: str, dtype: torch.dtype = torch.float32, seed: int = 3) -> Policy:
    """Weights four times as large as usual: what a model starts from is nearly uniform."""
    if architecture in MASKED:
        return make_masked_policy(architecture, dtype, seed)
    register()
    extra = ARCHITECTURES[architecture]
    shape = extra if architecture == "gpt2" else {**SHAPE, **extra}
    config = AutoConfig.for_model(architecture, vocab_size=VOCABULARY, **shape)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, attn_implementation=ATTENTION).to(dtype).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(4.0) if parameter.dim() > 1 else None
    remove_dropout(model)
    return Policy(model=model, tokenizer=nano_tokenizer(), precision=dtype, head_is_linear=True)


def make_masked_policy(architecture: str, dtype: torch.dtype = torch.float32, seed: int = 3) -> Policy:
    """The same of a masked policy, whose mask token is the last of the vocabulary."""
    register()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        chosen = masked_config(architecture, local_attention=6)
        model = AutoModelForMaskedLM.from_config(chosen, attn_implementation=ATTENTION).to(dtype).eval()
    # ModernBERT starts with larger weights than the others.
    scale = 3.0 if architecture == "modernbert" else 4.0
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(scale) if parameter.dim() > 1 else None
    remove_dropout(model)
    first = 1 if architecture == "roberta" else 0
    return Policy(model, nano_masked_tokenizer(), dtype, head_is_linear=True, mask_id=MASK_ID, first_position=first)


def masked_config(architecture: str, vocab_size: int = VOCABULARY, **more: Any) -> PreTrainedConfig:
    """Of a tiny masked model, with transformers' own defaults for all that is not size."""
    special = {"cls_token_id": 0, "sep_token_id": 0}
    shape = {name: value for name, value in SHAPE.items() if name not in ("num_key_value_heads", "head_dim")}
    more = more if architecture == "modernbert" else {}
    return AutoConfig.for_model(architecture, vocab_size=vocab_size, **shape, **special, **MASKED[architecture], **more)


def nano(seed: int = 0, **settings: Any) -> Policy:
    """A policy of a few thousand weights, loaded as runs load it."""
    small = {"nano_hidden_size": 32, "nano_num_layers": 2, "nano_num_heads": 2}
    with pytest.MonkeyPatch.context() as patch:
        keep_float16(patch)
        return load_policy(ModelConfig(**{**small, **settings}), seed=seed)


def keep_float16(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a CPU compute in float16, as GPUs do: another precision needs no loss scale."""
    monkeypatch.setattr(loading, "computable", lambda settings, device: settings)


def saved_model(folder: Path, architecture: str, **config: Any) -> str:
    """A random model of another make, saved by plain transformers; the folder."""
    own_names = "n_embd" in config or "word_embed_proj_dim" in config
    shape = config if own_names else {**SHAPE, **config}
    chosen = AutoConfig.for_model(architecture, **{"vocab_size": 260, **shape})
    return save_random(folder, AutoModelForCausalLM, chosen, seed=2)


def saved_classifier(folder: Path, num_labels: int) -> str:
    """A random reward model, saved by plain transformers; the folder."""
    chosen = AutoConfig.for_model("llama", vocab_size=260, num_labels=num_labels, **SHAPE)
    return save_random(folder, AutoModelForSequenceClassification, chosen, seed=0)


def save_random(folder: Path, kind: Any, config: PreTrainedConfig, seed: int) -> str:
    """Save a random model with weights large enough to tell inputs apart, and the tokenizer of the embedded ones."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = kind.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(4.0) if parameter.dim() > 1 else None
    model.save_pretrained(folder)
    nano_tokenizer().save_pretrained(folder)
    return str(folder)


@torch.no_grad()
def probe_logits(policy: Policy) -> Tensor:
    """Of the tokens 1, ..., 8."""
    probe = torch.arange(1, 9)[None]
    return policy.logits(probe, probe - 1, DENSE)


def random_groups(seed: int = 0, vocabulary: int = VOCABULARY) -> list[Group]:
    """Groups "a", "b" and "c" of 3, 2 and 4 rollouts; 9 sequences of 1 to 9 loss tokens, 43 together."""
    generator = torch.Generator().manual_seed(seed)

    def tokens(n: int) -> tuple[int, ...]:
        return tuple(torch.randint(1, vocabulary, (n,), generator=generator).tolist())

    groups = []
    for name, prompt_length, lengths in (("a", 7, (3, 9, 1)), ("b", 2, (5, 5)), ("c", 11, (4, 2, 8, 6))):
        prompt = tokens(prompt_length)
        rollouts = tuple(rollout_of(prompt, tokens(n)) for n in lengths)
        groups.append(Group(Prompt(name, "test", "", {}), rollouts, ()))
    return groups


def rollout_of(prompt: Sequence[int], completion: Sequence[int]) -> Rollout:
    ids = (*prompt, *completion)
    mask = (False,) * (len(prompt) - 1) + (True,) * len(completion)
    return Rollout(ids[:-1], ids[1:], mask, (0.0,) * len(mask), Reward(0.0, {}), "", "stop", policy_version=0)


def as_fills(groups: Sequence[Group], seed: int = 0) -> list[Group]:
    """Groups of as many fills, some in several passes; what had no loss token has none."""
    chance = random.Random(f"fills/{seed}")
    return [replace(group, rollouts=_fills(group, chance)) for group in groups]


def _fills(group: Group, chance: random.Random) -> tuple[Rollout, ...]:
    longest = max((rollout.target_ids for rollout in group.rollouts), key=len)
    text = [min(token_id, MASK_ID - 1) for token_id in (*longest, *longest[:1])]
    masked = sorted(chance.sample(range(len(text)), chance.randint(1, min(12, len(text) - 1))))
    given = [MASK_ID if position in masked else token_id for position, token_id in enumerate(text)]
    made = []
    for rollout in group.rollouts:
        tokens = tuple(chance.randrange(1, MASK_ID) for _ in masked)
        most = chance.choice((1, 1, 3))
        passes = tuple(chance.randrange(min(most, len(masked))) for _ in masked)
        completion = Completion(tokens, (0.0,) * len(tokens), "stop", 0, passes)
        fill = filled_rollout(given, MASK_ID, completion, rollout.reward, "")
        silent = replace(fill, loss_mask=(False,) * len(fill.loss_mask))
        made.append(fill if any(rollout.loss_mask) else silent)
    return tuple(made)


ADVANTAGES = ((1.0, -0.5, 0.25), (-1.5, 0.75), (0.5, -1.0, 2.0, -0.25))
"""For `random_groups`: none is 0."""


def make(
    groups: Sequence[Group],
    packing: str = "shared",
    budget: int = 10_000,
    advantages: Sequence[Sequence[float]] | None = None,
    keep: Callable[[Sequence[Sequence[Row]]], Sequence[Sequence[Row]]] = list,
    attention: str = "sdpa",
) -> Batch:
    """The groups as a batch; `keep` may leave rows out of the work, which stay in the counts."""
    rows = make_rows(groups, advantages or [[0.0] * len(g.rollouts) for g in groups])
    tokens, sequences = count(rows)
    totals = (tokens, sequences, sum(len(g.rollouts) for g in groups))
    how: dict[str, Any] = {"packing": packing, "micro_batch_tokens": budget, "attention": attention}
    return make_batch(keep(rows), totals=totals, device=CPU, **how)


def byte_batch() -> Batch:
    """For policies with the nano tokenizer: four micro-batches."""
    return make(random_groups(vocabulary=250), "shared", 20, ADVANTAGES)


def logprobs(policy: Policy, micro_batches: Sequence[MicroBatch], scoring: Scoring) -> Tensor:
    """Of all loss tokens, in batch order, without gradient."""
    with torch.no_grad():
        return torch.cat([torch.zeros(0), *(score_tokens(policy, m, scoring).logprob_L for m in micro_batches)])


def sampled_by(policy: Policy, groups: Sequence[Group], sampling: Sampling, noise: float = 0.0) -> list[Group]:
    """The groups with the sampler log-probs of this policy, give or take `noise`."""
    found = logprobs(policy, make(groups).micro_batches, Scoring(sampling, 0))
    generator = torch.Generator().manual_seed(5)
    found = found + noise * torch.randn(found.shape, generator=generator)
    values = iter(found.tolist())

    def scored(rollout: Rollout) -> Rollout:
        return replace(rollout, sampler_logprobs=tuple(next(values) if m else 0.0 for m in rollout.loss_mask))

    return [replace(group, rollouts=tuple(scored(r) for r in group.rollouts)) for group in groups]


SGD = OptimizerConfig(name="sgd", lr=0.1, max_grad_norm=0.0)
ADAMW = OptimizerConfig(lr=1e-2)


def make_trainer(
    policy: Policy,
    algorithm: AlgorithmConfig | None = None,
    optimizer: OptimizerConfig = SGD,
    reference: Reference | None = None,
    **settings: Any,
) -> Trainer:
    """A trainer of this very policy; `settings` are those of TrainerSettings."""
    algorithm = algorithm or AlgorithmConfig(loss="reinforce")
    defaults: dict[str, Any] = {"num_steps": 10, "sampling": Sampling(), "logprob_chunk": 0}
    chosen = TrainerSettings(
        objective=build_objective(algorithm, norm_length=16),
        algorithm=algorithm,
        optimizer=optimizer,
        **{**defaults, **settings},
    )
    return Trainer(policy, chosen, reference)


def credit_assigner(algorithm: AlgorithmConfig, part_weights: dict[str, float] | None = None) -> CreditAssigner:
    return CreditAssigner(build_credit(algorithm), part_weights or {})


def copied(policy: Policy) -> Policy:
    """The same policy in memory of its own."""
    return replace(policy, model=copy.deepcopy(policy.model))


def weights(policy: Policy) -> dict[str, Tensor]:
    """A copy of all weights."""
    return {name: tensor.detach().clone() for name, tensor in policy.model.state_dict().items()}


def same(first: dict[str, Tensor], second: dict[str, Tensor]) -> bool:
    """Bit for bit."""
    assert first.keys() == second.keys()
    return all(torch.equal(tensor, second[name]) for name, tensor in first.items())


def gradient(policy: Policy) -> Tensor:
    """What the last update left on the trained weights, as one vector."""
    trained = [p for p in policy.model.parameters() if p.requires_grad]
    return torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).flatten().double() for p in trained])


def relative_error(got: Tensor, expected: Tensor) -> float:
    assert float(expected.norm()) > 0
    return float((got - expected).norm() / expected.norm())


def normal(*size: int, seed: int = 0) -> Tensor:
    """Normal numbers that are the same for a seed."""
    return torch.randn(size, generator=torch.Generator().manual_seed(seed))
