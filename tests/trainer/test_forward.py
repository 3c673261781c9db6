"""What the trainer asks the policy: no pass too many, frozen values that stay frozen, the sampler's distribution."""

import asyncio
from collections.abc import Sequence
from dataclasses import fields, replace

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from covey.algorithm.build import build_objective
from covey.algorithm.loss_inputs import ObjectiveInputs
from covey.algorithm.settings import AlgorithmConfig
from covey.engine.native.engine import NativeEngine
from covey.environments.episode import Answer, Episode, Observation
from covey.policy.logprobs import AllowedTokens, Scoring, allowed_tokens, score_tokens
from covey.policy.models.nano import ARCHITECTURES
from covey.policy.policy import Policy
from covey.policy.reference import make_reference
from covey.rollouts.rollout import roll_out
from covey.rollouts.sampler import EpisodeLimits, Sampler
from covey.system import collectives
from covey.trainer.forward import ScoringContext, gather_rows, objective_inputs, score, score_frozen, stack
from covey.trainer.settings import OptimizerConfig
from covey.types import Batch, Group, Prompt, Sampling
from tests.support.scripted import Scripted

from ..support.builders import (
    ADVANTAGES,
    SGD,
    byte_batch,
    copied,
    logprobs,
    make,
    make_policy,
    make_trainer,
    nano,
    random_groups,
    sampled_by,
)

CUT = Sampling(temperature=0.7, top_p=0.9)
FILTERS = {
    "all": Sampling(temperature=0.7, max_tokens=8),
    "top_p": Sampling(temperature=0.7, top_p=0.9, max_tokens=8),
    "top_k": Sampling(temperature=1.3, top_k=7, max_tokens=8),
    "min_p": Sampling(min_p=0.05, max_tokens=8),
}


def rolled_out(policy: Policy, sampling: Sampling) -> list[Group]:
    """Groups sampled by the native engine, as a run gets them."""
    environment = Scripted({"train": ["12+7=", "a", "what is this? "]}, lambda prompt, text: float(len(text)))
    sampler = Sampler(NativeEngine(policy, 1 << 24, 64), environment, policy.tokenizer)

    async def run() -> list[Group]:
        prompts = enumerate(environment.prompts("train"))
        return await asyncio.gather(*(roll_out(sampler, p, 4, replace(sampling, seed=i)) for i, p in prompts))

    return asyncio.run(run())


def flat(groups: Sequence[Group]) -> list[float]:
    """The recorded log-probs of all loss tokens."""
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    return [v for r in rollouts for v, m in zip(r.sampler_logprobs, r.loss_mask, strict=True) if m]


@pytest.mark.parametrize("filters", sorted(FILTERS))
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_the_engine_records_the_log_probs_that_the_trainer_finds(architecture: str, filters: str) -> None:
    policy, sampling = nano(nano_architecture=architecture), FILTERS[filters]
    groups = rolled_out(policy, sampling)
    recorded = torch.tensor(flat(groups))
    assert len(recorded) > 50
    for packing, budget in (("shared", 10_000), ("packed", 30), ("padded", 60)):
        batch = make(groups, packing, budget)
        found = logprobs(policy, batch.micro_batches, Scoring(sampling, 5))
        assert float((found - recorded).abs().max()) < 1e-4
    if filters != "all":
        unfiltered = logprobs(policy, batch.micro_batches, Scoring(replace(sampling, top_p=1.0, top_k=0, min_p=0.0), 0))
        assert float((unfiltered - recorded).abs().max()) > 0.05


@pytest.mark.parametrize("filters", sorted(FILTERS))
def test_on_its_own_samples_the_mismatch_is_nil_and_every_ratio_1(filters: str) -> None:
    policy, sampling = nano(), FILTERS[filters]
    groups = rolled_out(policy, sampling)
    advantages = [[1.0, -1.0, 0.5, -0.5]] * len(groups)
    trainer = make_trainer(policy, AlgorithmConfig(), sampling=sampling, logprob_chunk=16)
    metrics = trainer.step(make(groups, "shared", 40, advantages), 0)
    assert metrics["mismatch_max"] < 1e-4
    assert metrics["mismatch_kl"] == pytest.approx(0.0, abs=1e-7)
    assert metrics["ess_fraction"] == pytest.approx(1.0, abs=1e-4)
    assert (metrics["ratio"], metrics["ratio_max"], metrics["clip_fraction"]) == (1.0, 1.0, 0.0)
    assert trainer.step(make(groups, "shared", 40, advantages), 1)["mismatch_max"] > 1e-3


class Chat(Episode):
    """Says the same to every answer."""

    async def reply(self, answer: Answer) -> Observation:
        return Observation(({"role": "user", "content": "go on, then"},))


class Chatting(Scripted):
    """Talks with the policy until a limit ends it."""

    def episode(self, prompt: Prompt, seed: int) -> Episode:
        return Chat()


def conversed(policy: Policy, sampling: Sampling, history: str) -> list[Group]:
    """Episodes of three turns on the native engine; a history that is rendered anew closes every turn by itself."""
    environment = Chatting({"train": []}, lambda prompt, text: float(len(text)))
    limits = EpisodeLimits(max_turns=3, history=history)
    sampler = Sampler(NativeEngine(policy, 1 << 24, 64), environment, policy.tokenizer, limits=limits)
    asked = [Prompt(str(i), "talks", ({"role": "user", "content": "ask " * 9 + str(i)},), {}) for i in range(2)]

    async def run() -> list[Group]:
        return await asyncio.gather(*(roll_out(sampler, p, 3, replace(sampling, seed=i)) for i, p in enumerate(asked)))

    return asyncio.run(run())


@pytest.mark.parametrize("filters", ["all", "top_p"])
@pytest.mark.parametrize("history", ["append", "template"])
def test_on_every_turn_the_engine_records_the_log_probs_that_the_trainer_finds(history: str, filters: str) -> None:
    """Also of branches, which the trainer reads each by itself or as a tree."""
    policy, sampling = nano(), replace(FILTERS[filters], stop=tuple(map(chr, range(33, 127))))
    groups = conversed(policy, sampling, history)
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    assert {len(rollout.turns) for rollout in rollouts} >= {3}
    assert any(rollout.branches for rollout in rollouts) == (history == "template")
    recorded, num_read = torch.tensor(flat(groups)), {}
    for packing, budget in (("shared", 10_000), ("packed", 90), ("padded", 400)):
        batch = make(groups, packing, budget)
        num_read[packing] = sum(micro_batch.input_ids_BT.numel() for micro_batch in batch.micro_batches)
        found = logprobs(policy, batch.micro_batches, Scoring(sampling, 5))
        assert float((found - recorded).abs().max()) < 1e-4
    # Branches repeat much of what was said: a tree reads at most half of it
    assert num_read["shared"] < num_read["packed"] * (0.5 if history == "template" else 1.0)


STILL = OptimizerConfig(name="sgd", lr=0.0)
"""No update moves anything: whatever two passes disagree in is their own doing."""


@pytest.mark.parametrize("updates", [1, 2])
@pytest.mark.parametrize("filters", sorted(FILTERS))
def test_frozen_and_live_passes_agree_exactly_on_the_same_weights(filters: str, updates: int) -> None:
    policy = make_policy("qwen2")
    algorithm = AlgorithmConfig(kl_coef=0.1)
    settings = {"sampling": FILTERS[filters], "logprob_chunk": 7, "updates_per_batch": updates}
    trainer = make_trainer(policy, algorithm, STILL, make_reference(policy, refreshed=False), **settings)
    metrics = trainer.step(make(random_groups(), "shared", 20, ADVANTAGES), 0)
    assert (metrics["ratio"], metrics["ratio_max"], metrics["approx_kl"], metrics["kl"]) == (1.0, 1.0, 0.0, 0.0)


def scored(policy: Policy, batch: Batch, kept: list[AllowedTokens]) -> Tensor:
    with torch.no_grad():
        pairs = zip(batch.micro_batches, kept, strict=True)
        return torch.cat([score_tokens(policy, m, Scoring(CUT, 0), k).logprob_L for m, k in pairs])


def kept_by(policy: Policy, batch: Batch) -> list[AllowedTokens]:
    with torch.no_grad():
        return [allowed_tokens(policy, m, Scoring(CUT, 0)) for m in batch.micro_batches]


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"ratio_denominator": "behaviour"},
        {"ratio_denominator": "behaviour", "loss": "cispo"},
    ],
)
def test_the_second_update_is_scored_over_the_entries_the_sampling_policy_kept(settings: dict[str, str]) -> None:
    policy = make_policy("gpt2", torch.float64)
    groups = sampled_by(policy, random_groups(), CUT)
    batch = make(groups, "shared", 20, ADVANTAGES)
    before = copied(policy)
    once = copied(policy)
    make_trainer(once, AlgorithmConfig(**settings), SGD, sampling=CUT).step(batch, 0)
    trainer = make_trainer(policy, AlgorithmConfig(**settings), SGD, sampling=CUT, updates_per_batch=2)
    metrics = trainer.step(batch, 0)

    kept = kept_by(before, batch)
    ratio = (scored(once, batch, kept) - scored(before, batch, kept)).exp()
    assert metrics["last_update/ratio"] == pytest.approx(float(ratio.mean()), rel=1e-6)
    assert metrics["last_update/ratio_max"] == pytest.approx(float(ratio.max()), rel=1e-6)
    anew = (scored(once, batch, kept_by(once, batch)) - scored(before, batch, kept)).exp()
    assert abs(float(anew.mean()) - metrics["last_update/ratio"]) > 1e-3


def test_the_reference_is_scored_over_the_entries_the_policy_kept() -> None:
    policy, other = make_policy("gpt2", torch.float64), make_policy("gpt2", torch.float64, seed=9)
    batch = make(random_groups(), "shared", 20, ADVANTAGES)
    algorithm = AlgorithmConfig(kl_coef=0.1, kl_estimator="k1")
    trainer = make_trainer(copied(policy), algorithm, SGD, make_reference(other, refreshed=False), sampling=CUT)
    kept = kept_by(policy, batch)
    expected = (scored(policy, batch, kept) - scored(other, batch, kept)).mean()
    assert trainer.step(batch, 0)["kl"] == pytest.approx(float(expected), rel=1e-9)
    own = (scored(policy, batch, kept) - scored(other, batch, kept_by(other, batch))).mean()
    assert abs(float(own - expected)) > 1e-2


@pytest.mark.parametrize(
    ("settings", "updates", "policy_passes", "reference_passes"),
    [
        ({"loss": "reinforce"}, 1, 1, 0),
        ({"loss": "clip"}, 1, 1, 0),
        ({"loss": "reinforce"}, 3, 3, 0),
        ({"loss": "clip"}, 2, 3, 0),
        ({"loss": "clip", "ratio_denominator": "behaviour"}, 2, 2, 0),
        ({"loss": "clip", "kl_coef": 0.1}, 1, 1, 1),
        ({"loss": "clip", "kl_coef": 0.1}, 2, 3, 1),
        ({"loss": "clip_cov"}, 1, 2, 0),
    ],
)
def test_no_pass_is_made_that_nothing_reads(
    settings: dict[str, float], updates: int, policy_passes: int, reference_passes: int
) -> None:
    policy = make_policy("qwen2")
    algorithm = AlgorithmConfig(**settings)  # type: ignore[arg-type]
    reference = make_reference(policy, refreshed=False)
    passes: list[str] = []
    policy.causal_lm.base_model.register_forward_hook(lambda *_: passes.append("policy"))
    reference.policy.causal_lm.base_model.register_forward_hook(lambda *_: passes.append("reference"))
    batch = make(random_groups(), "shared", 20, ADVANTAGES)
    make_trainer(policy, algorithm, SGD, reference, updates_per_batch=updates).step(batch, 0)
    num = len(batch.micro_batches)
    assert (passes.count("policy"), passes.count("reference")) == (num * policy_passes, num * reference_passes)


def forward(policy: Policy, **settings: object) -> ScoringContext:
    objective = build_objective(AlgorithmConfig(**settings), 16)  # type: ignore[arg-type]
    return ScoringContext(policy, make_reference(policy, refreshed=False), objective, Scoring(Sampling(), 0))


def test_before_the_first_update_the_old_policy_is_the_current_one_without_gradient() -> None:
    asked = forward(make_policy("qwen2"))
    (micro,) = make(random_groups(), advantages=ADVANTAGES).micro_batches
    prepared = score_frozen(asked, micro, several=False, keep_old=False)
    assert (prepared.old, prepared.reference, prepared.kept) == (None, None, None)
    inputs = objective_inputs(prepared, score(asked, prepared))
    assert inputs.log_probs_NT.requires_grad
    assert not inputs.old_log_probs_NT.requires_grad
    assert torch.equal(inputs.old_log_probs_NT, inputs.log_probs_NT)
    assert inputs.mask_NT.sum(1).tolist() == [3, 9, 1, 5, 5, 4, 2, 8, 6]
    assert inputs.advantages[:, 0].tolist() == [1.0, -0.5, 0.25, -1.5, 0.75, 0.5, -1.0, 2.0, -0.25]
    assert (inputs.ref_log_probs_NT, inputs.full_kl_NT) == (None, None)


def test_what_is_frozen_before_the_first_update_carries_no_gradient() -> None:
    asked = forward(make_policy("qwen2"), kl_coef=0.1)
    (micro,) = make(random_groups(), advantages=ADVANTAGES).micro_batches
    prepared = score_frozen(asked, micro, several=True, keep_old=True)
    assert prepared.old is not None
    reference_L = prepared.reference_logprobs()
    assert reference_L is not None
    assert not prepared.old.logprob_L.requires_grad
    assert torch.equal(reference_L, prepared.old.logprob_L)


def test_frozen_log_probs_are_scored_without_dropout_after_an_update() -> None:
    policy = nano(lora_rank=2, lora_dropout=0.5)
    make_trainer(policy).step(byte_batch(), 0)  # else the adapters add nothing
    assert policy.model.training
    asked, micro = forward(policy), byte_batch().micro_batches[0]
    olds = [score_frozen(asked, micro, several=True, keep_old=True).old for _ in range(2)]
    first, again = (old.logprob_L for old in olds if old is not None)
    assert torch.equal(first, again)


def test_micro_batches_are_stacked_in_order_and_padded_to_the_longest() -> None:
    asked = forward(make_policy("qwen2"), kl_coef=0.1)

    def inputs(budget: int) -> list:
        batch = make(random_groups(), "shared", budget, ADVANTAGES)
        prepared = [score_frozen(asked, m, several=False, keep_old=False) for m in batch.micro_batches]
        return [objective_inputs(p, score(asked, p)) for p in prepared]

    parts, (whole,) = inputs(20), inputs(10_000)
    assert len({part.mask_NT.shape[1] for part in parts}) > 1
    stacked = stack(parts)
    assert torch.equal(stacked.mask_NT, whole.mask_NT)
    assert torch.equal(stacked.advantages, whole.advantages)
    assert torch.allclose(stacked.log_probs_NT, whole.log_probs_NT, atol=1e-5)
    assert stacked.ref_log_probs_NT is not None
    assert torch.allclose(stacked.ref_log_probs_NT, whole.ref_log_probs_NT, atol=1e-5)
    assert not stacked.log_probs_NT.requires_grad
    assert stacked.full_kl_NT is None


def test_rows_cross_between_ranks_on_the_host_and_come_back_to_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pickled tensor of a GPU would come back on the GPU of the rank that sent it."""
    sent: list[ObjectiveInputs] = []
    monkeypatch.setattr(collectives, "is_distributed", lambda: True)
    monkeypatch.setattr(collectives, "all_gather", lambda own: sent.append(own) or [own, None])
    with FakeTensorMode():
        values_NT = torch.zeros(2, 3, device="cuda")
        own = ObjectiveInputs(values_NT, values_NT, values_NT, values_NT, values_NT > 0, values_NT, values_NT, None)
        received, nothing = gather_rows(own, torch.device("meta"))  # stands for the rank's own GPU
    assert received is not None
    assert nothing is None
    assert devices(sent[0]) == ["cpu"] * 7
    assert devices(received) == ["meta"] * 7


def devices(inputs: ObjectiveInputs) -> list[str]:
    tensors = (getattr(inputs, field.name) for field in fields(inputs))
    return [tensor.device.type for tensor in tensors if tensor is not None]
