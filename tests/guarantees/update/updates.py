"""One optimiser phase, computed in any way: what the guarantee tests compare, in this process or in workers.

    case = make_case("gpt2", torch.float64, algorithm=AlgorithmConfig(loss="cispo"))
    distance(one_update(case, How("shared", budget=20)), one_update(case, WHOLE)).gradient < 1e-9

Everything here follows from its arguments, so that processes that call it with the same ones hold the same case.
"""

import copy
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor

from covey.algorithm.losses import LOSSES
from covey.algorithm.settings import AlgorithmConfig
from covey.policy.policy import Policy
from covey.policy.reference import Reference
from covey.trainer.batch import Advantage, count, make_batch, make_rows
from covey.trainer.prepare import drop_zero_advantage_rows
from covey.trainer.settings import OptimizerConfig
from covey.trainer.trainer import Trainer
from covey.types import Batch, Group, Prompt, Reward, Rollout, Sampling

from ...support.builders import (
    ADVANTAGES,
    MASKED,
    as_fills,
    copied,
    gradient,
    make_policy,
    make_trainer,
    random_groups,
    sampled_by,
)

SAMPLING = Sampling(temperature=0.8)
MOVING = OptimizerConfig(name="sgd", lr=0.02, max_grad_norm=0.0)
"""Of two updates the first moves the ratio away from 1; the second is looked at."""
LOSS_OPTIONS: dict[str, dict[str, Any]] = {
    "dro": {"beta": 0.3},
    # Shares large enough to choose some of a few dozen tokens.
    "clip_cov": {"cov_ratio": 0.1, "cov_low": 0.1, "cov_high": 50.0},
    "kl_cov": {"cov_ratio": 0.1},
}
EVERY_LOSS = sorted(LOSSES)


@dataclass(frozen=True)
class UpdateCase:
    """All that may decide an update: the policy, the rollouts with what they are worth, the algorithm."""

    architecture: str
    dtype: torch.dtype
    lora_rank: int
    """0 trains all weights."""
    groups: tuple[Group, ...]
    advantages: tuple[tuple[Advantage, ...], ...]
    algorithm: AlgorithmConfig
    sampling: Sampling = SAMPLING
    num_updates: int = 2
    """On the same batch; the last one is looked at."""


@dataclass(frozen=True)
class How:
    """All that must not decide it."""

    packing: str = "padded"
    budget: int = 10_000
    chunk: int = 0
    order: tuple[int, ...] | None = None
    """The groups in another order."""
    checkpointing: bool = False
    skip_zero: bool = False
    """Leave rollouts of advantage 0 out of the work, as the loop does where they have no gradient."""
    share: tuple[int, int] = (0, 1)
    """(i, n): only every n-th group from the i-th on, what rank i of n gets; the counts are still those of all."""
    attention: str = "sdpa"
    device: str = "cpu"


WHOLE = How()
"""Everything in one padded micro-batch: the plainest way there is."""
WAYS = {
    "a rollout at a time": [How("padded", budget=1), How("shared", budget=1)],
    "several in a micro-batch": [How("padded", 40), How("packed", 25), How("shared", 20)],
    "all in one": [How("packed"), How("shared")],
    "logits in chunks": [How("shared", chunk=1), How("packed", 25, chunk=7), How("padded", chunk=10_000)],
    "groups in another order": [How("shared", 20, order=(2, 0, 1)), How(order=(1, 2, 0))],
    "activations recomputed": [How("shared", 20, checkpointing=True), How(chunk=7, checkpointing=True)],
}
"""One update, computed in every way that must not matter."""
EVERYTHING_ON = AlgorithmConfig(kl_coef=0.1, entropy_coef=0.01, correction="truncate", correction_max=1.5)
"""Each penalty and correction has a part in the loss."""


@dataclass(frozen=True)
class Update:
    """What came of it."""

    gradient: Tensor
    """Of all trained weights, one float64 vector."""
    metrics: dict[str, float]


@dataclass(frozen=True)
class Distance:
    """Between two updates; both numbers are relative."""

    gradient: float
    metric: float
    """Of the metric that differs most."""
    name: str
    """That metric."""


Tamper = Callable[[Batch], Batch]
"""A mistake to be found out."""


def make_case(
    architecture: str = "gpt2",
    dtype: torch.dtype = torch.float64,
    algorithm: AlgorithmConfig | None = None,
    groups: Sequence[Group] | None = None,
    *,
    lora_rank: int = 0,
    advantages: Sequence[Sequence[Advantage]] | None = None,
    sampling: Sampling = SAMPLING,
    num_updates: int = 2,
) -> UpdateCase:
    """Groups as this policy would have sampled them, give or take 0.3 nats per token.

    Without `groups` those of `builders.random_groups`; without `advantages` numbers that are never 0.
    """
    given = groups if groups is not None else random_groups()
    given = as_fills(given) if architecture in MASKED else given
    if advantages is None:
        advantages = ADVANTAGES if groups is None else numbers(given)
    scored = sampled_by(policy_of(architecture, dtype, lora_rank), given, sampling, noise=0.3)
    worth = tuple(tuple(values) for values in advantages)
    chosen = algorithm or AlgorithmConfig()
    return UpdateCase(architecture, dtype, lora_rank, tuple(scored), worth, chosen, sampling, num_updates)


def algorithm_of(loss: str, **settings: Any) -> AlgorithmConfig:
    """This loss, with options under which its rules choose something."""
    return AlgorithmConfig(loss=loss, loss_options=LOSS_OPTIONS.get(loss, {}), **settings)


def one_update(case: UpdateCase, how: How = WHOLE, tamper: Tamper = lambda batch: batch) -> Update:
    """The last update on the case's batch, always from the same weights."""
    policy = _on(how, copied(policy_of(case.architecture, case.dtype, case.lora_rank)))
    trainer = trainer_of(case, policy, how)
    metrics = trainer.step(tamper(batch_of(case, how)), 0)
    return Update(gradient(policy).cpu(), metrics)


def _on(how: How, policy: Policy) -> Policy:
    """Move a policy that nobody else has."""
    return replace(policy, model=policy.model.to(how.device))


def trainer_of(case: UpdateCase, policy: Policy, how: How) -> Trainer:
    """A trainer of this very policy."""
    if how.checkpointing:
        policy.causal_lm.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return make_trainer(
        policy,
        case.algorithm,
        MOVING,
        reference_on(case, policy, how),
        updates_per_batch=case.num_updates,
        sampling=case.sampling,
        logprob_chunk=how.chunk,
    )


def batch_of(case: UpdateCase, how: How) -> Batch:
    """The groups as micro-batches, with the counts of all of them."""
    order = list(how.order) if how.order is not None else list(range(len(case.groups)))
    groups = [case.groups[index] for index in order]
    rows = make_rows(groups, [case.advantages[index] for index in order])
    tokens, sequences = count(rows)
    first, world_size = how.share
    mine = [group for group in rows[first::world_size] if group]
    return make_batch(
        drop_zero_advantage_rows(mine) if how.skip_zero else mine,
        packing=how.packing,
        micro_batch_tokens=how.budget,
        totals=(tokens, sequences, sum(len(group.rollouts) for group in groups)),
        device=torch.device(how.device),
        attention=how.attention,
    )


@cache
def policy_of(architecture: str, dtype: torch.dtype, lora_rank: int) -> Policy:
    """The policy every update of a case starts from; copy it before training. Adapters begin with B other than 0."""
    return adapted(make_policy(architecture, dtype), lora_rank) if lora_rank else make_policy(architecture, dtype)


def adapted(policy: Policy, rank: int) -> Policy:
    """The policy with random adapters in both factors, in its own type, on every linear layer."""
    settings = LoraConfig(
        r=rank,
        lora_alpha=rank,
        target_modules="all-linear",
        init_lora_weights=False,
        fan_in_fan_out=policy.causal_lm.config.model_type == "gpt2",  # its layers are stored transposed
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(6)
        model = get_peft_model(policy.causal_lm, settings)
    return replace(policy, model=model.to(policy.precision))


def reference_of(case: UpdateCase, policy: Policy) -> Reference:
    """The base model under adapters, else another random model of the same make: never the policy itself."""
    if case.lora_rank:
        return Reference(policy, None)
    return Reference(_other_policy(case.architecture, case.dtype), None)


def reference_on(case: UpdateCase, policy: Policy, how: How) -> Reference:
    """The same where the update is computed."""
    reference = reference_of(case, policy)
    is_elsewhere = reference.policy.device != policy.device
    return replace(reference, policy=_on(how, copied(reference.policy))) if is_elsewhere else reference


@cache
def _other_policy(architecture: str, dtype: torch.dtype) -> Policy:
    made = make_policy(architecture, dtype, seed=4)
    return replace(made, model=copy.deepcopy(made.model).requires_grad_(False))


def distance(got: Update, expected: Update) -> Distance:
    """Relative difference of the gradients, and of the logged numbers, against 0.1 where they are smaller: many are
    means of signed log-prob gaps, and a float32 log-prob of 4 nats is itself only known to 2e-7.

    The number of micro-batches is the only metric that may differ. Where no token has a gradient, none may have one.
    """
    assert got.metrics.keys() == expected.metrics.keys(), got.metrics.keys() ^ expected.metrics.keys()
    norm = float(expected.gradient.norm()) or 1.0
    # A chi-squared is of squared weights: twice the rounding of their logarithms
    gaps = {
        name: abs(got.metrics[name] - value) / max(abs(value), 0.1) / (2 if "chi2" in name else 1)
        for name, value in expected.metrics.items()
        if name != "num_micro_batches"
    }
    worst = max(gaps, key=lambda name: math.inf if math.isnan(gaps[name]) else gaps[name])
    return Distance(float((got.gradient - expected.gradient).norm()) / norm, gaps[worst], worst)


def farthest(
    case: UpdateCase, ways: Sequence[How], tamper: Tamper = lambda batch: batch, plainest: How = WHOLE
) -> Distance:
    """The checker of promise 1: the largest distances from the plainest way."""
    expected = one_update(case, plainest, tamper)
    found = [distance(one_update(case, how, tamper), expected) for how in ways]
    worst = max(found, key=lambda each: math.inf if math.isnan(each.metric) else each.metric)
    return Distance(max(each.gradient for each in found), worst.metric, worst.name)


# --------------------------------------------------------------------------------------------- random cases and ways


def numbers(groups: Sequence[Group], seed: int = 0) -> list[list[float]]:
    """An advantage for each rollout, none of them 0."""
    chance = random.Random(f"advantages/{seed}")
    return [[chance.choice((-1, 1)) * chance.uniform(0.25, 2.0) for _ in group.rollouts] for group in groups]


def any_groups(seed: int) -> list[Group]:
    """1 to 6 groups of 1 to 5 rollouts of very unequal lengths.

    Some rollouts hold tokens of a tool in their middle, some (whole groups, too) have no loss token at all.
    """
    chance = random.Random(f"groups/{seed}")
    shares = [0.0, *(chance.choice((0.0, 0.3, 1.0)) for _ in range(chance.randint(0, 5)))]
    return [_any_group(chance, f"p{index}", silent) for index, silent in enumerate(shares)]


def _any_group(chance: random.Random, name: str, silent: float) -> Group:
    """`silent`: how likely a rollout has no loss token."""
    prompt = [chance.randrange(1, 40) for _ in range(chance.choice((1, 2, 7, 15)))]
    rollouts = tuple(_any_rollout(chance, prompt, silent) for _ in range(chance.randint(1, 5)))
    return Group(Prompt(name, "test", "", {}), rollouts, ())


def _any_rollout(chance: random.Random, prompt: Sequence[int], silent: float) -> Rollout:
    length = chance.choice((1, 2, 3, 5, 8, 20))
    ids = [*prompt, *(chance.randrange(1, 40) for _ in range(length))]
    chosen = [True] + [chance.random() < 0.8 for _ in range(length - 1)]
    if chance.random() < silent:
        chosen = [False] * length
    mask = (*[False] * (len(prompt) - 1), *chosen)
    return Rollout(
        tuple(ids[:-1]), tuple(ids[1:]), mask, (0.0,) * len(mask), Reward(0.0, {}), "", "stop", policy_version=0
    )


def any_way(seed: int, num_groups: int) -> How:
    """Layout, budget, chunk, order and checkpointing, drawn from the seed."""
    chance = random.Random(f"way/{seed}")
    return How(
        packing=chance.choice(("padded", "packed", "shared")),
        budget=chance.choice((1, 7, 20, 33, 60, 10_000)),
        chunk=chance.choice((0, 1, 7, 10_000)),
        order=tuple(chance.sample(range(num_groups), num_groups)),
        checkpointing=chance.random() < 0.3,
    )
