"""One optimiser phase: what it computes by hand, what it leaves alone, what it steers, when it gives up."""

import math
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import GPT2Config, GPT2LMHeadModel

from covey.algorithm.loss_inputs import LossInputs
from covey.algorithm.settings import AlgorithmConfig
from covey.policy.logprobs import Scoring
from covey.policy.models.nano import nano_tokenizer
from covey.policy.policy import Policy
from covey.policy.reference import make_reference
from covey.system import collectives
from covey.trainer.prepare import drop_zero_advantage_rows
from covey.trainer.settings import OptimizerConfig
from covey.types import Batch, Group, Prompt, Rollout, RunStopped, Sampling

from ..support.builders import (
    ADAMW,
    ADVANTAGES,
    SGD,
    byte_batch,
    copied,
    gradient,
    logprobs,
    make,
    make_policy,
    make_trainer,
    nano,
    random_groups,
    relative_error,
    rollout_of,
    same,
    sampled_by,
    weights,
)

UNIT = OptimizerConfig(name="sgd", lr=1.0, max_grad_norm=0.0)


def bias_only_policy() -> Policy:
    """No layers, a final norm that answers (1, 0) to everything, a head of zeros: four tokens of probability 1/4.

    The first column of the head is then the logits, and its gradient is that of the logits.
    """
    config = GPT2Config(
        vocab_size=4, n_embd=2, n_layer=0, n_head=1, tie_word_embeddings=False, bos_token_id=0, eos_token_id=0
    )
    model = GPT2LMHeadModel(config).double().eval()
    with torch.no_grad():
        model.lm_head.weight.zero_()
        model.transformer.ln_f.weight.zero_()
        model.transformer.ln_f.bias.copy_(torch.tensor([1.0, 0.0]))
    return Policy(model=model, tokenizer=nano_tokenizer(), precision=torch.float64, head_is_linear=True)


def logits_of(policy: Policy) -> Tensor:
    return policy.causal_lm.get_output_embeddings().weight.detach()[:, 0].clone()


def two_answers() -> list[Group]:
    """(1, 3) and (2,) to the prompt (0,)."""
    return [Group(Prompt("p", "test", "", {}), (rollout_of([0], [1, 3]), rollout_of([0], [2])), ())]


@pytest.mark.parametrize(
    ("aggregation", "expected"),
    [
        # Advantages 1 and -1. Of each token A (1[v = token] - 1/4), over 3 tokens:
        ("token_mean", [-1 / 12, 3 / 12, -5 / 12, 3 / 12]),
        # ... the mean over a sequence's tokens, then over 2 sequences:
        ("seq_mean_token_mean", [0.0, 1 / 4, -1 / 2, 1 / 4]),
        # ... the sum over a sequence's tokens, then the mean over 2 sequences:
        ("seq_mean_token_sum", [-1 / 8, 3 / 8, -5 / 8, 3 / 8]),
    ],
)
def test_the_first_step_of_gradient_descent_is_the_one_computed_by_hand(
    aggregation: str, expected: list[float]
) -> None:
    policy = bias_only_policy()
    trainer = make_trainer(policy, AlgorithmConfig(loss="reinforce", aggregation=aggregation), UNIT)
    metrics = trainer.step(make(two_answers(), advantages=[[1.0, -1.0]]), 0)
    assert logits_of(policy).tolist() == pytest.approx(expected, abs=1e-12)
    log4 = math.log(4)
    assert metrics["loss"] == pytest.approx(
        {"token_mean": log4 / 3, "seq_mean_token_mean": 0.0}.get(aggregation, log4 / 2)
    )
    assert metrics["entropy"] == pytest.approx(log4)
    assert metrics["learning_rate"] == 1.0


def test_the_temperature_divides_the_logits_and_so_the_gradient() -> None:
    policy = bias_only_policy()
    trainer = make_trainer(policy, optimizer=UNIT, sampling=Sampling(temperature=0.5))
    trainer.step(make(two_answers(), advantages=[[1.0, -1.0]]), 0)
    assert logits_of(policy).tolist() == pytest.approx([-1 / 6, 3 / 6, -5 / 6, 3 / 6], abs=1e-12)


def test_the_ratio_of_the_second_update_is_against_the_weights_before_the_first() -> None:
    policy = bias_only_policy()
    trainer = make_trainer(policy, AlgorithmConfig(), UNIT, updates_per_batch=2)
    metrics = trainer.step(make(two_answers(), advantages=[[1.0, -1.0]]), 0)
    assert (metrics["first_update/ratio"], metrics["first_update/ratio_max"]) == (1.0, 1.0)
    after_one = torch.tensor([-1 / 12, 3 / 12, -5 / 12, 3 / 12], dtype=torch.float64).softmax(0)
    ratios = 4 * after_one[torch.tensor([1, 3, 2])]
    assert metrics["last_update/ratio"] == pytest.approx(float(ratios.mean()), rel=1e-12)
    assert metrics["ratio"] == pytest.approx((1 + float(ratios.mean())) / 2, rel=1e-12)
    assert metrics["ratio_max"] == metrics["last_update/ratio_max"] == pytest.approx(float(ratios.max()), rel=1e-12)
    assert metrics["ratio_max"] > 1.2


def test_metrics_of_several_updates_are_of_all_of_them() -> None:
    policy = bias_only_policy()

    def after(updates: int) -> dict[str, float]:
        trainer = make_trainer(copied(policy), AlgorithmConfig(), UNIT, updates_per_batch=updates)
        return trainer.step(make(two_answers(), advantages=[[1.0, -1.0]]), 0)

    one, two, three = after(1), after(2), after(3)
    assert not any("update/" in name for name in one)
    for name in ("loss", "grad_norm", "entropy", "approx_kl", "clip_fraction"):
        each = [one[name], two[f"last_update/{name}"], three[f"last_update/{name}"]]
        assert three[name] == pytest.approx(sum(each) / 3, rel=1e-12)
        assert three[f"first_update/{name}"] == one[name]
    assert three["last_update/clip_fraction"] > 0
    assert three["skipped"] == 0.0


def test_old_log_probs_stay_exact_through_many_updates() -> None:
    groups = random_groups()
    many, twin = make_policy("gpt2", torch.float64), make_policy("gpt2", torch.float64)
    batch = make(groups, "shared", 20, ADVANTAGES)
    metrics = make_trainer(many, AlgorithmConfig(), SGD, updates_per_batch=4).step(batch, 0)
    before = logprobs(twin, batch.micro_batches, Scoring(Sampling(), 0))
    make_trainer(twin, AlgorithmConfig(), SGD, updates_per_batch=3).step(batch, 0)
    after = logprobs(twin, batch.micro_batches, Scoring(Sampling(), 0))
    assert metrics["last_update/ratio"] == pytest.approx(float((after - before).exp().mean()), rel=1e-9)
    assert metrics["last_update/ratio_max"] == pytest.approx(float((after - before).exp().max()), rel=1e-9)


def test_every_update_has_the_gradient_of_its_own_batch_alone() -> None:
    policy = make_policy("gpt2", torch.float64)
    trainer = make_trainer(policy)
    trainer.step(make(random_groups(1), advantages=ADVANTAGES), 0)
    twin = copied(policy)
    twin.model.zero_grad()
    second = make(random_groups(2), advantages=ADVANTAGES)
    trainer.step(second, 1)
    make_trainer(twin).step(second, 1)
    assert torch.equal(gradient(policy), gradient(twin))


@pytest.mark.parametrize("loss", ["clip", "reinforce_ratio", "cispo", "gmpo", "sapo", "dppo_tv", "topr"])
def test_on_policy_every_ratio_loss_has_the_gradient_of_reinforce(loss: str) -> None:
    def first_gradient(name: str) -> Tensor:
        policy = make_policy("gpt2", torch.float64)
        algorithm = AlgorithmConfig(loss=name, aggregation="seq_mean_token_mean")
        metrics = make_trainer(policy, algorithm).step(make(random_groups(), advantages=ADVANTAGES), 0)
        assert metrics["ratio"] == 1.0
        return gradient(policy)

    assert relative_error(first_gradient(loss), first_gradient("reinforce")) < 1e-9


def test_a_batch_without_rows_changes_nothing_not_even_the_moments_of_adam() -> None:
    policy = make_policy("qwen2")
    trainer = make_trainer(policy, AlgorithmConfig(), ADAMW)
    trainer.step(make(random_groups(), advantages=ADVANTAGES), 0)
    before, state = weights(policy), _flat(trainer.state_dict())
    empty = make(random_groups(), advantages=[[0.0] * len(row) for row in ADVANTAGES], keep=drop_zero_advantage_rows)
    assert empty.micro_batches == ()
    metrics = trainer.step(empty, 1)
    assert same(weights(policy), before)
    assert _flat(trainer.state_dict()) == state
    counts = {name: metrics[name] for name in ("skipped", "num_rollouts_trained", "num_micro_batches", "grad_norm")}
    assert counts == {"skipped": 0.0, "num_rollouts_trained": 0.0, "num_micro_batches": 0.0, "grad_norm": 0.0}


def test_a_batch_without_rows_is_fine_under_rules_over_the_whole_batch_and_float16() -> None:
    policy = replace(make_policy("qwen2"), precision=torch.float16)
    algorithm = AlgorithmConfig(loss="kl_cov", m2po_threshold=0.1)
    metrics = make_trainer(policy, algorithm, ADAMW, updates_per_batch=2).step(make([]), 0)
    assert metrics["skipped"] == 0


def _flat(value: Any) -> Any:
    """With lists for tensors, so that states can be compared with ==."""
    if isinstance(value, Tensor):
        return value.tolist()
    if isinstance(value, dict):
        return {key: _flat(item) for key, item in value.items()}
    return [_flat(item) for item in value] if isinstance(value, list | tuple) else value


POISONED = {
    "inf advantage": (((1.0, -0.5, 0.25), (math.inf, 0.75), (0.5, -1.0, 2.0, -0.25)), False),
    "nan advantage": (((1.0, -0.5, 0.25), (-1.5, math.nan), (0.5, -1.0, 2.0, -0.25)), False),
    "nan sampler": (ADVANTAGES, True),
}


def poisoned(name: str) -> Batch:
    """Something about prompt "b" is not finite."""
    advantages, spoil_sampler = POISONED[name]
    groups = random_groups()
    if spoil_sampler:
        bad = replace(groups[1].rollouts[0], sampler_logprobs=(0.0,) + (math.nan,) * 5)
        groups[1] = replace(groups[1], rollouts=(bad, groups[1].rollouts[1]))
    return make(groups, "shared", 20 if spoil_sampler else 10_000, advantages)


@pytest.mark.parametrize("name", sorted(POISONED))
def test_nonfinite_losses_change_nothing_and_finally_stop_the_run_naming_the_prompt(
    name: str,
) -> None:
    policy = make_policy("qwen2")
    algorithm = AlgorithmConfig(correction="truncate") if name == "nan sampler" else AlgorithmConfig()
    trainer = make_trainer(policy, algorithm, replace(ADAMW, max_nonfinite_steps=3))
    good, bad = make(random_groups(), advantages=ADVANTAGES), poisoned(name)
    trainer.step(good, 0)
    before, moments = weights(policy), _flat(trainer.state_dict()["optimizer"])
    assert [trainer.step(bad, step)["skipped"] for step in (1, 2)] == [1.0, 1.0]
    assert same(weights(policy), before)
    assert _flat(trainer.state_dict()["optimizer"]) == moments
    with pytest.raises(RunStopped, match=r"not finite 3 times in a row \(optimizer.max_nonfinite_steps\).*it: b$"):
        trainer.step(bad, 3)
    assert same(weights(policy), before)


@pytest.mark.parametrize(("skipped", "moves"), [(0.0, True), (1.0, False)])
def test_a_skipped_step_moves_no_controller(skipped: float, moves: bool) -> None:
    algorithm = AlgorithmConfig(kl_coef=0.1, target_kl=0.01, target_entropy=0.2, max_kl=5.0)
    policy = make_policy("qwen2")
    trainer = make_trainer(policy, algorithm, reference=make_reference(copied(policy), refreshed=False))
    before = trainer.controller, trainer.entropy
    trainer._update_controllers({"skipped": skipped, "kl_sequence_mean": 4.0, "entropy": 0.1}, 8, 0)
    assert [now != then for now, then in zip((trainer.controller, trainer.entropy), before, strict=True)] == [moves] * 2


def test_a_good_step_resets_the_count_and_an_empty_step_does_not() -> None:
    trainer = make_trainer(make_policy("qwen2"), AlgorithmConfig(), replace(ADAMW, max_nonfinite_steps=2))
    good, bad = make(random_groups(), advantages=ADVANTAGES), poisoned("inf advantage")
    for step in range(3):
        assert trainer.step(bad, step)["skipped"] == 1
        assert trainer.step(good, step)["skipped"] == 0
    trainer.step(bad, 3)
    assert trainer.step(make([]), 4)["skipped"] == 0
    with pytest.raises(RunStopped):
        trainer.step(bad, 5)


def test_a_resumed_trainer_keeps_its_count_of_bad_steps() -> None:
    patient = replace(ADAMW, max_nonfinite_steps=2)
    stopped, resumed = (make_trainer(make_policy("qwen2"), AlgorithmConfig(), patient) for _ in range(2))
    stopped.step(poisoned("inf advantage"), 0)
    resumed.load_state_dict(stopped.state_dict())
    with pytest.raises(RunStopped):
        resumed.step(poisoned("inf advantage"), 1)


def test_a_random_selection_draws_again_at_every_update() -> None:
    """The first updates of two steps, from the same weights on the same batch."""
    options = {"cov_ratio": 0.1, "cov_low": 0.0, "cov_high": 50.0}
    gradients = []
    for step in (0, 1):
        policy = make_policy("qwen2")
        trainer = make_trainer(policy, AlgorithmConfig(loss="clip_cov", loss_options=options))
        trainer.step(make(random_groups(), advantages=ADVANTAGES), step)
        gradients.append(gradient(policy))
    assert not torch.equal(*gradients)


def test_no_two_updates_of_a_run_draw_from_one_seed() -> None:
    seeds: list[int] = []

    def noted(inputs: LossInputs, seed: int) -> Tensor:
        seeds.append(seed)
        return torch.zeros_like(inputs.mask_NT)

    trainer = make_trainer(make_policy("gpt2"), AlgorithmConfig(loss="clip_cov"), updates_per_batch=2, seed=100)
    objective = trainer.objective
    noting = replace(objective, loss=replace(objective.loss, selector=noted))
    trainer.settings = replace(trainer.settings, objective=noting)
    for step in range(3):
        trainer.step(make(random_groups(), advantages=ADVANTAGES), step)
    assert seeds == [*range(100, 106)], "the run's seed and the number of the update"


def test_dropout_follows_from_seed_update_and_rank_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def drawn(seed: int, update: int, rank: int) -> float:
        monkeypatch.setattr(collectives, "rank", lambda: rank)
        before = torch.get_rng_state()
        with make_trainer(nano(), seed=seed)._dropout_of(update):
            found = float(torch.rand(()))
        assert torch.equal(torch.get_rng_state(), before)
        return found

    others = [drawn(*place) for place in ((0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1))]
    assert len(set(others)) == 4
    assert drawn(0, 0, 0) == others[0]


def test_weights_that_are_not_finite_blame_the_prompts_they_were_met_with() -> None:
    policy = make_policy("qwen2")
    with torch.no_grad():
        policy.causal_lm.get_output_embeddings().weight[0, 0] = math.nan
    trainer = make_trainer(policy, AlgorithmConfig(), replace(ADAMW, max_nonfinite_steps=1))
    with pytest.raises(RunStopped, match="prompts that cause it: a"):
        trainer.step(make(random_groups(), "shared", 20, ADVANTAGES), 0)


def test_every_skipped_update_of_a_batch_is_counted() -> None:
    trainer = make_trainer(make_policy("qwen2"), AlgorithmConfig(), ADAMW, updates_per_batch=3)
    assert trainer.step(poisoned("inf advantage"), 0)["skipped"] == 3
    assert trainer.state_dict()["nonfinite_in_a_row"] == 3


def test_the_loss_scale_of_float16_keeps_what_it_has_found() -> None:
    """After an overflow halved it, it stays halved, and it counts the good steps since."""
    trainer = make_trainer(nano(precision="float16"), AlgorithmConfig(), ADAMW)
    batch = byte_batch()
    huge = replace(batch, micro_batches=tuple(replace(m, advantage_L=1e4 * m.advantage_L) for m in batch.micro_batches))
    assert trainer.step(huge, 0)["skipped"] == 1
    scales = [trainer.state_dict()["scaler"]["scale"]]
    for step in (1, 2, 3):
        assert trainer.step(batch, step)["skipped"] == 0
        scaler = trainer.state_dict()["scaler"]
        scales.append(scaler["scale"])
        assert scaler["_growth_tracker"] == step
    assert scales == [32768.0] * 4


def test_an_overflow_at_the_smallest_loss_scale_is_counted() -> None:
    trainer = make_trainer(nano(precision="float16"), AlgorithmConfig(), replace(ADAMW, max_nonfinite_steps=1))
    batch = byte_batch()
    huge = tuple(replace(m, advantage_L=1e12 * m.advantage_L) for m in batch.micro_batches)
    assert trainer.step(replace(batch, micro_batches=huge), 0)["skipped"] == 1  # the search for a scale goes on
    state = trainer.state_dict()
    trainer.load_state_dict({**state, "scaler": {**state["scaler"], "scale": 1.0}})
    with pytest.raises(RunStopped, match="not finite 1 times in a row"):
        trainer.step(replace(batch, micro_batches=huge), 1)


def test_the_entropy_is_that_of_the_distribution_sampled_from() -> None:
    policy = bias_only_policy()
    trainer = make_trainer(policy, optimizer=UNIT, sampling=Sampling(temperature=0.5))
    trainer.step(make(two_answers(), advantages=[[1.0, -1.0]]), 0)
    probabilities = (logits_of(policy) / 0.5).softmax(0)
    expected = -float((probabilities * probabilities.log()).sum())
    metrics = trainer.step(make(two_answers(), advantages=[[1.0, -1.0]]), 1)
    assert metrics["entropy"] == pytest.approx(expected, abs=1e-9)
    assert expected < math.log(4) - 0.1


def test_gradients_are_scaled_down_to_the_norm_allowed_and_not_up_to_it() -> None:
    def step(limit: float) -> tuple[dict[str, float], Tensor]:
        policy = make_policy("gpt2", torch.float64)
        trainer = make_trainer(policy, AlgorithmConfig(), replace(SGD, max_grad_norm=limit))
        return trainer.step(make(random_groups(), advantages=ADVANTAGES), 0), gradient(policy)

    metrics, free = step(0.0)
    norm = metrics["grad_norm"]
    assert norm == pytest.approx(float(free.norm()), rel=1e-9)
    assert metrics["grad_clipped"] == 0
    metrics, clipped = step(norm / 4)
    assert (metrics["grad_norm"], metrics["grad_clipped"]) == (pytest.approx(norm), 1.0)
    assert float(clipped.norm()) == pytest.approx(norm / 4, rel=1e-5)
    assert relative_error(4 * clipped, free) < 1e-5
    metrics, untouched = step(norm * 4)
    assert metrics["grad_clipped"] == 0
    assert torch.equal(untouched, free)


def test_the_learning_rate_of_a_step_is_that_of_its_schedule() -> None:
    policy = bias_only_policy()
    trainer = make_trainer(policy, optimizer=replace(UNIT, schedule="linear"), num_steps=3)
    batch = make(two_answers(), advantages=[[1.0, -1.0]])
    rates = [trainer.step(batch, step)["learning_rate"] for step in (0, 1, 2)]
    assert rates == pytest.approx([1.0, 2 / 3, 1 / 3])


def test_what_is_logged_counts_every_rollout_and_every_loss_once() -> None:
    policy = make_policy("qwen2")
    batch = make(random_groups(), "shared", 20, ADVANTAGES)
    metrics = make_trainer(policy, AlgorithmConfig()).step(batch, 0)
    assert (metrics["num_rollouts_trained"], metrics["num_micro_batches"]) == (9.0, float(len(batch.micro_batches)))
    lengths = [(3, 9, 1), (5, 5), (4, 2, 8, 6)]
    signed = sum(n * a for ns, values in zip(lengths, ADVANTAGES, strict=True) for n, a in zip(ns, values, strict=True))
    assert metrics["loss"] == pytest.approx(-signed / 43, rel=1e-5)


def test_the_sequence_kl_of_a_rollout_is_summed_over_its_tokens_in_batch_order() -> None:
    policy, other = make_policy("qwen2"), make_policy("qwen2", seed=9)
    groups, algorithm = random_groups(), AlgorithmConfig(kl_coef=0.1, kl_in="reward", kl_estimator="k1")
    trainer = make_trainer(policy, algorithm, SGD, make_reference(other, refreshed=False))
    expected = [
        float(sum(mine.sampler_logprobs) - sum(theirs.sampler_logprobs))
        for ours, others in zip(
            sampled_by(policy, groups, Sampling()), sampled_by(other, groups, Sampling()), strict=True
        )
        for mine, theirs in zip(ours.rollouts, others.rollouts, strict=True)
    ]
    before = weights(policy)
    for packing, budget in (("shared", 10_000), ("padded", 12)):
        assert trainer.sequence_kl(make(groups, packing, budget)) == pytest.approx(expected, abs=1e-3)
    assert same(weights(policy), before)
    assert all(p.grad is None for p in policy.model.parameters())


def test_a_copy_trained_alike_ends_with_the_same_weights_bit_for_bit() -> None:
    policy = make_policy("qwen2")
    twin = copied(policy)
    for each in (policy, twin):
        trainer = make_trainer(each, AlgorithmConfig(), ADAMW, updates_per_batch=2)
        for step in range(2):
            trainer.step(make(random_groups(step), "shared", 20, ADVANTAGES), step)
    assert same(weights(policy), weights(twin))


# ------------------------------------------------------------------------------------------------ sampler and trainer


def apart_by(nats: float, policy: Policy) -> Batch:
    """Rollouts of this policy whose sampler log-probs are so far from its own."""
    groups = sampled_by(policy, random_groups(vocabulary=250), Sampling())
    moved = [replace(group, rollouts=tuple(_moved(r, nats) for r in group.rollouts)) for group in groups]
    return make(moved, advantages=ADVANTAGES)


def _moved(rollout: Rollout, nats: float) -> Rollout:
    known = zip(rollout.sampler_logprobs, rollout.loss_mask, strict=True)
    return replace(rollout, sampler_logprobs=tuple(logprob - nats if own else 0.0 for logprob, own in known))


def test_the_largest_of_a_step_is_also_that_of_what_was_trained_ahead() -> None:
    def largest(ahead: float, rest: float) -> list[float]:
        trainer = make_trainer(nano(), AlgorithmConfig(), OptimizerConfig(name="sgd", lr=0.0))
        early = apart_by(ahead, trainer.policy)
        trainer.accumulate(early, 0)
        metrics = trainer.step(apart_by(rest, trainer.policy), 0)
        return [metrics[name] for name in ("mismatch_max", "mismatch", "num_rollouts_trained")]

    # In float32, so that sampler and trainer are 1e-6 apart by themselves
    assert largest(0.2, 0.0) == pytest.approx([0.2, 0.1, 18], abs=1e-4)
    assert largest(0.0, 0.2) == pytest.approx([0.2, 0.1, 18], abs=1e-4)


def test_a_mismatch_that_is_no_rounding_is_one_warning_until_it_is_gone(caplog: pytest.LogCaptureFixture) -> None:
    policy = nano()
    trainer = make_trainer(policy, AlgorithmConfig(), OptimizerConfig(name="sgd", lr=0.0))
    for nats in (0.0, 0.05, 0.2, 0.2, 0.0, 0.3):
        trainer.step(apart_by(nats, policy), 0)
    assert [line.split(", more")[0] for line in caplog.messages] == [
        "log-probs of sampler and trainer differ by 0.2 nats per token",
        "log-probs of sampler and trainer differ by 0.3 nats per token",
    ]


def test_later_updates_on_a_batch_move_away_from_its_sampler_and_stop_nothing() -> None:
    policy = nano()
    algorithm = AlgorithmConfig(loss="reinforce", max_mismatch=0.01)  # keeps no log-probs of the weights before
    trainer = make_trainer(policy, algorithm, replace(SGD, lr=1.0), updates_per_batch=2)
    assert trainer.step(apart_by(0.0, policy), 0)["mismatch"] > 0.01


@pytest.mark.parametrize("updates", [1, 3])
def test_a_mismatch_beyond_the_limit_stops_the_run_before_the_update(updates: int) -> None:
    policy = nano()
    trainer = make_trainer(policy, AlgorithmConfig(max_mismatch=0.5), updates_per_batch=updates)
    trainer.step(apart_by(0.4, policy), 0)
    before = weights(policy)
    with pytest.raises(RunStopped, match=r"^log-probs of sampler and trainer differ by 0.6 nats per token, algo"):
        trainer.step(apart_by(0.6, policy), 1)
    assert same(before, weights(policy))


class Casts(TorchDispatchMode):
    """Counts the copies of weights in another type."""

    def __init__(self, policy: Policy) -> None:
        super().__init__()
        self.count = 0
        self._weights = {weight.data_ptr() for weight in policy.model.parameters() if weight.dim() > 1}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        is_cast = func is torch.ops.aten._to_copy.default and args[0].data_ptr() in self._weights
        self.count += is_cast and args[0].dtype == torch.float32
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("settings", "is_kept"), [({}, True), ({"gradient_checkpointing": True}, False)])
def test_weights_are_cast_once_for_all_micro_batches_of_an_update(settings: dict[str, Any], is_kept: bool) -> None:
    """With the gradient of casts made for each."""
    found = []
    for budget, keeps in ((10_000, True), (24, True), (24, False)):
        policy = nano(precision="bfloat16", kernels="torch", **settings)
        batch = make(random_groups(vocabulary=250), "packed", budget, ADVANTAGES)
        with pytest.MonkeyPatch.context() as patch:
            if not keeps:
                patch.setattr(Policy, "keeping_casts", lambda policy: nullcontext())
            with Casts(policy) as casts:
                make_trainer(policy).step(batch, 0)
        found.append((len(batch.micro_batches), casts.count, weights(policy)))
    (one, once, _), (several, kept, mine), (_, again, wanted) = found
    assert (one, several) == (1, 6)
    assert again == several * once
    assert kept == (once + 2 * (several - 1) if is_kept else again), "the head casts its own"
    assert same(mine, wanted)
