"""A teacher's part in an update: the plain formula in float64, in every layout, and what it costs."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.checks.architectures import save
from covey.algorithm.build import build_objective
from covey.algorithm.settings import AlgorithmConfig
from covey.policy.attention.base import DENSE
from covey.policy.logprobs import Scoring
from covey.policy.models.loading import load_policy
from covey.policy.policy import Policy
from covey.policy.reference import Reference, make_reference
from covey.policy.teacher import Teacher, teacher_distance, teacher_logprobs
from covey.trainer import forward
from covey.trainer.optimizer import OptimizerConfig, TrainerSettings
from covey.trainer.prepare import Packing, make_training_batches
from covey.trainer.trainer import Trainer
from covey.types import Group, MicroBatch, Reward, Rollout, RunStopped, Sampling
from tests.support.builders import credit_assigner, make, make_policy, random_groups, rollout_of

HINT = (3, 1, 4, 1, 5)
PLAIN_SGD = OptimizerConfig(name="sgd", lr=1.0, max_grad_norm=0.0)
LAYOUTS = [("shared", 10_000), ("shared", 30), ("packed", 25), ("padded", 40)]


def rewarded() -> list[Group]:
    """Groups of unequal rewards, in some of which the environment wrote the third and fourth token."""
    made = []
    for group in random_groups():
        rollouts = [replace(one, reward=Reward(float(place % 2))) for place, one in enumerate(group.rollouts)]
        rollouts = [replace(one, loss_mask=interrupted(one.loss_mask)) for one in rollouts]
        made.append(replace(group, rollouts=tuple(rollouts)))
    return made


def interrupted(mask: Sequence[bool]) -> tuple[bool, ...]:
    start = mask.index(True)
    return tuple(own and (sum(mask) < 6 or place - start not in (2, 3)) for place, own in enumerate(mask))


def hinted(group: Group) -> list[Rollout | None]:
    """What a teacher reads: a hint before the prompt, and nothing of the second rollout."""
    return [None if place == 1 else after(HINT, one) for place, one in enumerate(group.rollouts)]


def after(hint: Sequence[int], rollout: Rollout) -> Rollout:
    tokens = (*hint, *rollout.input_ids, rollout.target_ids[-1])
    mask = (False,) * len(hint) + rollout.loss_mask
    return replace(
        rollout, input_ids=tokens[:-1], target_ids=tokens[1:], loss_mask=mask, sampler_logprobs=(0.0,) * len(mask)
    )


def trainer_of(
    policy: Policy,
    teacher: Teacher,
    algorithm: AlgorithmConfig,
    teach: Callable[[Group], Sequence[Rollout | None]] | None = hinted,
    **more: Any,
) -> Trainer:
    settings = TrainerSettings(
        objective=build_objective(algorithm, norm_length=16),
        algorithm=algorithm,
        optimizer=PLAIN_SGD,
        num_steps=10,
        sampling=Sampling(temperature=0.8),
        logprob_chunk=more.pop("chunk", 0),
        teach=teach,
        answers=more.pop("answers", None),
    )
    return Trainer(policy, settings, more.pop("reference", None), teacher=teacher)


def moved(trainer: Trainer, groups: Sequence[Group], packing: str, budget: int) -> dict[str, Tensor]:
    """Return minus the gradient: how far a step of rate 1 moves the weights."""
    before = {name: value.detach().clone() for name, value in trainer.policy.model.named_parameters()}
    assigner = credit_assigner(trainer.algorithm)
    batches, _ = make_training_batches(groups, trainer, assigner, Packing(packing, budget), 0)
    trainer.step(batches, 0)
    return {name: value.detach() - before[name] for name, value in trainer.policy.model.named_parameters()}


def tempered(policy: Policy, rollout: Rollout) -> Tensor:
    """Return the logits of a rollout's loss tokens, alone and without covey's layouts."""
    ids = torch.tensor([rollout.input_ids])
    logits = policy.logits(ids, torch.arange(ids.shape[1])[None], DENSE)
    return logits[torch.tensor(rollout.loss_mask)] / 0.8


def alone(policy: Policy, rollout: Rollout) -> Tensor:
    """The same by the model's own forward pass."""
    logits = policy.causal_lm(torch.tensor([rollout.input_ids]), use_cache=False).logits[0]
    return logits[torch.tensor(rollout.loss_mask)] / 0.8


def plain_loss(
    policy: Policy,
    teacher: Policy,
    groups: Sequence[Group],
    algorithm: AlgorithmConfig,
    scored: Callable[[Policy, Rollout], Tensor] = tempered,
) -> Tensor:
    """The definition, token by token: reverse KL of sampled tokens or of the vocabulary, over all tokens."""
    total, count = torch.zeros((), dtype=torch.float64), 0
    for group in groups:
        rewards = torch.tensor(group.rewards, dtype=torch.float64)
        advantages = rewards - rewards.mean()
        for rollout, read, advantage in zip(group.rollouts, hinted(group), advantages, strict=True):
            targets = torch.tensor(rollout.target_ids)[torch.tensor(rollout.loss_mask)]
            log_p = scored(policy, rollout).log_softmax(-1)
            own = log_p.gather(1, targets[:, None])[:, 0]
            count += len(targets)
            total = total - (advantage * own).sum()
            if read is None:
                continue
            with torch.no_grad():
                log_q = scored(teacher, read).log_softmax(-1)
            gap = own - log_q.gather(1, targets[:, None])[:, 0]
            if algorithm.teacher_term == "divergence":
                total = total + algorithm.teacher_coef * (log_p.exp() * (log_p - log_q)).sum()
            elif algorithm.teacher_options.get("form") == "k2":
                total = total + algorithm.teacher_coef * (gap**2 / 2).sum()
            else:
                places = torch.tensor(rollout.loss_mask).nonzero()[:, 0]
                apart, gamma = places[None] - places[:, None], algorithm.teacher_options.get("discount", 0.0)
                later = torch.where(apart < 0, 0.0, gamma ** apart.clamp(min=0).double()).to(gap)
                total = total + algorithm.teacher_coef * (later @ gap.detach() * own).sum()
    return total / count


def settings_of(**changes: Any) -> AlgorithmConfig:
    return AlgorithmConfig(
        teacher="self", loss="reinforce", advantage="group_center", teacher_coef=0.7, teacher_max_ratio=None, **changes
    )


WAYS = {
    "advantage": settings_of(),
    "discount": settings_of(teacher_options={"discount": 0.9}),
    "sampled": settings_of(teacher_term="sampled", teacher_options={"form": "k2"}),
    "divergence": settings_of(teacher_term="divergence", teacher_options={"top_k": None}),
}


@pytest.mark.parametrize("way", WAYS)
def test_an_update_with_a_teacher_is_the_plain_formula_in_every_layout(way: str) -> None:
    groups, teacher = rewarded(), make_policy("gpt2", torch.float64, seed=8)
    plain = make_policy("gpt2", torch.float64)
    plain_loss(plain, teacher, groups, WAYS[way]).backward()
    expected = {name: -p.grad for name, p in plain.model.named_parameters() if p.grad is not None}
    assert float(max(g.abs().max() for g in expected.values())) > 1e-3
    for packing, budget in LAYOUTS:
        policy = make_policy("gpt2", torch.float64)
        trainer = trainer_of(policy, Teacher(Reference(teacher, None, is_own=True)), WAYS[way], chunk=5)
        found = moved(trainer, groups, packing, budget)
        gaps = {name: float((found[name] - expected[name]).abs().max()) for name in expected}
        assert max(gaps.values()) < 1e-9, (packing, budget, max(gaps.values()))


@pytest.mark.parametrize("way", ["discount", "divergence"])
@pytest.mark.parametrize("architecture", ["bloom", "codegen", "mamba"])
def test_a_model_of_the_general_path_is_taught_by_the_plain_formula(
    architecture: str, way: str, tmp_path: Path
) -> None:
    def load(name: str, spread: float) -> Policy:
        save(architecture, str(tmp_path / name))
        policy = load_policy(tmp_path / name)
        assert policy.path == "general"
        with torch.no_grad():
            for number, weight in enumerate(policy.model.parameters()):
                weight.add_(spread * torch.randn(weight.shape, generator=torch.Generator().manual_seed(number)))
        return policy

    teacher, plain, policy = load("teacher", 0.05), load("plain", 0.0), load("policy", 0.0)
    policy.model.load_state_dict(plain.model.state_dict())
    plain_loss(plain, teacher, rewarded(), WAYS[way], alone).backward()
    expected = {name: -p.grad for name, p in plain.model.named_parameters() if p.grad is not None}
    trainer = trainer_of(policy, Teacher(Reference(teacher, None, is_own=True)), WAYS[way], chunk=5)
    found = moved(trainer, rewarded(), "shared", 30)
    size = float(max(gradient.abs().max() for gradient in expected.values()))
    gaps = {name: float((found[name] - expected[name]).abs().max()) for name in expected}
    assert max(gaps.values()) < 2e-5 * max(size, 1.0), (size, max(gaps.values()))


@pytest.mark.parametrize("term", ["advantage", "divergence"])
def test_a_teacher_that_is_the_policy_has_no_gap_on_any_token(term: str) -> None:
    policy = make_policy("gpt2", torch.float64)
    algorithm = settings_of(teacher_term=term, reward_weight=0.0)
    found = moved(trainer_of(policy, Teacher(make_reference(policy, refreshed=False)), algorithm, None), rewarded(),
                  "shared", 30)  # fmt: skip
    assert max(float(change.abs().max()) for change in found.values()) < 1e-12


def test_a_teacher_equal_to_the_reference_costs_no_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    policy, passes = make_policy("llama"), []
    reference = make_reference(policy, refreshed=False)
    algorithm = replace(WAYS["advantage"], kl_coef=0.1)
    real = forward.reference_logprobs
    monkeypatch.setattr(forward, "reference_logprobs", lambda *given: passes.append("reference") or real(*given))
    monkeypatch.setattr(forward, "teacher_logprobs", lambda *given: pytest.fail("a second pass"))
    trainer = trainer_of(policy, Teacher(reference), algorithm, None, reference=reference)
    moved(trainer, rewarded(), "shared", 10_000)
    assert passes == ["reference"]


@pytest.mark.parametrize("temperature", [None, 0.5])
def test_a_mixed_teacher_has_logits_between_two_models(temperature: float | None) -> None:
    groups, first, live = rewarded(), make_policy("gpt2", torch.float64, seed=8), make_policy("gpt2", torch.float64)
    (batch,) = make(groups).micro_batches
    teacher = Teacher(Reference(first, None, is_own=True), Reference(live, None, is_own=True), 0.25, False, temperature)
    found_L = teacher_logprobs(teacher, batch, Scoring(Sampling(temperature=0.8), 7), None)()
    asked = teacher_distance(teacher, lambda own_LV, other_LV: own_LV[:, 0], live)
    found_LV = asked.logits(asked.rows(live, batch), Sampling(temperature=0.8))
    logits, expected = [], []
    for rollout in (one for group in groups for one in group.rollouts):
        mixed = (0.75 * tempered(first, rollout) + 0.25 * tempered(live, rollout)) * 0.8 / (temperature or 0.8)
        targets = torch.tensor(rollout.target_ids)[torch.tensor(rollout.loss_mask)]
        logits.append(mixed)
        expected.append(mixed.log_softmax(-1).gather(1, targets[:, None])[:, 0])
    assert float((found_L - torch.cat(expected)).abs().max()) < 1e-9
    assert float((found_LV - torch.cat(logits)).abs().max()) < 1e-9


def test_an_ema_teacher_follows_every_step_and_is_restored() -> None:
    policy = make_policy("gpt2", torch.float64)
    algorithm = replace(WAYS["advantage"], teacher_weights="ema", teacher_rate=0.25)
    teacher = Teacher(make_reference(policy, refreshed=True), rate=0.25, follows=True)
    trainer = trainer_of(policy, teacher, algorithm)
    first = {name: value.detach().clone() for name, value in policy.model.named_parameters()}
    moved(trainer, rewarded(), "shared", 10_000)
    own = dict(teacher.follower.policy.model.named_parameters()) if teacher.follower else {}
    for name, value in policy.model.named_parameters():
        assert torch.allclose(own[name], 0.75 * first[name] + 0.25 * value, atol=1e-12)
    saved = {name: value.clone() for name, value in trainer.state_dict()["teacher"].items()}
    fresh = make_policy("gpt2", torch.float64)
    other = Teacher(make_reference(fresh, refreshed=True), rate=0.25, follows=True)
    resumed = trainer_of(fresh, other, algorithm)
    resumed.load_state_dict({**trainer.state_dict(), "teacher": saved})
    assert all(torch.equal(resumed.state_dict()["teacher"][name], value) for name, value in saved.items())


class Silent:
    """A teacher elsewhere that answers with one number for every token."""

    def __init__(self, value: float) -> None:
        self.value = value

    def logprobs(self, batch: MicroBatch, scoring: Scoring, kept: object) -> Callable[[], Tensor]:
        return lambda: torch.full_like(batch.sampler_logprob_L, self.value)


def test_a_missing_log_prob_of_a_teacher_ends_the_run() -> None:
    trainer = trainer_of(make_policy("llama"), Teacher(Silent(float("nan"))), WAYS["advantage"])
    with pytest.raises(RunStopped, match="the teacher gave no log-prob of"):
        moved(trainer, rewarded(), "shared", 10_000)


def test_a_token_the_teacher_never_writes_counts_as_a_gap_of_20() -> None:
    trainer = trainer_of(make_policy("llama"), Teacher(Silent(-float("inf"))), WAYS["advantage"])
    batches, _ = make_training_batches(
        rewarded(), trainer, credit_assigner(trainer.algorithm), Packing("shared", 10_000), 0
    )
    metrics = trainer.step(batches, 0)
    assert metrics["teacher/kl"] == pytest.approx(20.0)
    assert metrics["teacher/impossible_fraction"] == 1.0
    # The second rollouts of three groups, of 7, 5 and 2 tokens, have no teacher
    assert metrics["teacher/token_fraction"] == pytest.approx((37 - 14) / 37)


def test_given_answers_are_learnt_over_their_own_tokens_beside_the_policy() -> None:
    groups, algorithm = rewarded(), AlgorithmConfig(loss="reinforce", advantage="group_center", sft_coef=0.3)
    answers = {group.prompt.id: rollout_of((7, 8), (9, 10, 11)) for group in groups}
    plain = make_policy("gpt2", torch.float64)
    total, count = torch.zeros((), dtype=torch.float64), 0
    for rollout in answers.values():
        targets = torch.tensor(rollout.target_ids)[torch.tensor(rollout.loss_mask)]
        total = total - tempered(plain, rollout).log_softmax(-1).gather(1, targets[:, None]).sum()
        count += len(targets)
    without = replace(algorithm, sft_coef=0.0)
    policies = [make_policy("gpt2", torch.float64) for _ in range(2)]
    given = trainer_of(policies[0], None, algorithm, None, answers=lambda group: [answers[group.prompt.id]])  # type: ignore[arg-type]
    alone = trainer_of(policies[1], None, without, None)  # type: ignore[arg-type]
    both, one = moved(given, groups, "shared", 30), moved(alone, groups, "shared", 30)
    (0.3 * total / count).backward()
    gaps = [float((both[n] - one[n] + p.grad).abs().max()) for n, p in plain.model.named_parameters()
            if p.grad is not None]  # fmt: skip
    assert max(gaps) < 1e-9
