"""`GRPO.update(batch)`: the machine-design document's interface.

    with covey.build("qwen2.5-0.5b", environment="machines", algorithm="clamped_advantage") as parts:
        group = rollout(parts.source, "Build a car that drives far.", num_rollouts=64, seed=step)
        batch = pack([group], parts.trainer)
        GRPO().update(batch).backward()

A response counts as one token whose log-probability is the sequence's, which is what the document's formulas are made
of. To train, take `covey train`: it works on tokens, and against the policy that sampled.
"""

import math
import numbers
import sys
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, TypedDict

import torch
from torch import Tensor

from covey.algorithm.aggregation import count_totals
from covey.algorithm.build import build_credit, build_objective
from covey.algorithm.credit.assign import estimate_advantages, snap_ties
from covey.algorithm.credit.scores import scores
from covey.algorithm.loss_inputs import ObjectiveInputs, at_least_float32, clamp_symmetric
from covey.algorithm.settings import AlgorithmConfig
from covey.policy.logprobs import allowed_tokens, reference_logprobs, score_tokens
from covey.policy.reference import Reference
from covey.system.custom import Custom
from covey.system.section import check_bounds
from covey.trainer.batch import make_batch, make_rows
from covey.trainer.trainer import Trainer
from covey.types import Group, Prompt, RunStopped, Sampling


class DocumentBatch(TypedDict):
    """Lists of one length, an entry for each of N responses.

    >>> {"prompts": ["Build a car."] * 2, "responses": ["[...]", "[...]"], "rewards": [3.0, 1.0],
    ...  "logprobs": torch.tensor([-20.0, -25.0], requires_grad=True), "ref_logprobs": [-20.1, -24.0],
    ...  "prompt_ids": [0, 0]}
    """

    prompts: Sequence[str]
    responses: Sequence[str]
    rewards: Sequence[float]
    logprobs: Sequence[float] | Tensor
    """Log-probs of whole responses under the policy, nats: a tensor with gradient to train, a list to inspect it."""
    ref_logprobs: Sequence[float] | Tensor
    """Log-probs of whole responses under the pretrained model."""
    prompt_ids: Sequence[Hashable]
    """Responses with equal ids form a group."""


def clamped_advantage() -> AlgorithmConfig:
    """Return the document's formulas verbatim, as algorithm=clamped_advantage has them."""
    return AlgorithmConfig(
        advantage="group_center",
        advantage_clip=0.2,
        loss="clip",
        loss_options={"eps_low": 0.2, "eps_high": 0.2},
        ratio="sequence",
        ratio_denominator="reference",
        aggregation="seq_mean",
        kl_coef=0.001,
        kl_estimator="k1",
        kl_gradient="naive",
        kl_aggregation="seq_mean_token_sum",
    )


class Samples(Protocol):
    """Source of a run, from which `rollout` samples."""

    @property
    def sampling(self) -> Sampling: ...

    def run(self, prompts: Sequence[Prompt], group_size: int, sampling: Sampling) -> list[Group]: ...


def rollout(source: Samples, prompt: Prompt | str, num_rollouts: int = 64, seed: int = 0) -> Group:
    """Sample and score `num_rollouts` responses to a prompt, by `seed`. Collective.

    A prompt of the environment's own brings what its reward reads; text alone is all that the policy reads, with an
    empty row, which suffices to build machines. RunStopped where no response could be scored.
    """
    if isinstance(prompt, str):
        prompt = Prompt(prompt, "document", prompt, {})
    (group,) = source.run([prompt], num_rollouts, replace(source.sampling, seed=seed))
    failures = [failure for failure in group.failures if failure.is_fault]
    if failures and not group.rollouts:
        raise RunStopped(f"none of {len(failures)} completions could be scored: {failures[0].reason}")
    return group


def pack(groups: Sequence[Group], trainer: Trainer) -> DocumentBatch:
    """Return the scored responses' log-probs, summed over tokens.

    Those of the policy have gradients, those of the reference none. The graph of all responses is held until
    `backward`. Raises ValueError if the trainer has no reference in this process.
    """
    if not isinstance(trainer.reference, Reference):
        raise ValueError("pack needs a reference beside the policy: algorithm=clamped_advantage has one")
    scoring = trainer.forward.scoring
    rows = make_rows(groups)
    batch = make_batch(
        rows,
        packing="shared",
        micro_batch_tokens=sys.maxsize,
        totals=(1, 1, 1),
        device=trainer.policy.device,
        attention=trainer.policy.attention,
    )
    scored = [(group.prompt, one) for group in groups for one in group.rollouts]
    logprobs_N, ref_logprobs_N = torch.zeros(2, len(scored), dtype=torch.float64, device=trainer.policy.device)
    has_tokens = [place for place, (_, one) in enumerate(scored) if one.num_loss_tokens > 0]
    for part in batch.micro_batches:
        places_L = torch.tensor(has_tokens, device=part.row_L.device)[part.row_L]
        kept = allowed_tokens(trainer.policy, part, scoring) if scoring.sampling.filters else None
        found_L = score_tokens(trainer.policy, part, scoring, kept).logprob_L.double()
        logprobs_N = logprobs_N.index_add(0, places_L, found_L)
        reference_L = reference_logprobs(trainer.reference, part, scoring, kept).double()
        ref_logprobs_N = ref_logprobs_N.index_add(0, places_L, reference_L)
    return {
        "prompts": [str(prompt.text) for prompt, _ in scored],
        "responses": [one.text for _, one in scored],
        "rewards": [one.reward.value for _, one in scored],
        "logprobs": logprobs_N,
        "ref_logprobs": ref_logprobs_N.detach(),
        "prompt_ids": [number for number, group in enumerate(groups) for _ in group.rollouts],
    }


SETTINGS_READ = (
    *("advantage", "advantage_options", "advantage_clip", "loss", "loss_options", "ratio", "ratio_denominator"),
    *("log_ratio_clamp", "aggregation", "norm_length", "count_empty"),
    *("kl_coef", "kl_estimator", "kl_gradient", "kl_aggregation", "kl_clamp"),
)
"""Settings of an algorithm that mean something for whole responses."""


@dataclass(frozen=True, slots=True)
class GRPO:
    """Group-relative policy optimisation of whole responses."""

    algorithm: AlgorithmConfig = field(default_factory=clamped_advantage)
    """Another one changes the formulas; its ratio is of whole responses all the same."""

    def __post_init__(self) -> None:
        """Refuse an algorithm of which `update` would leave something out, with ValueError."""
        defaults = vars(AlgorithmConfig())
        for name, value in vars(self.algorithm).items():
            if name not in SETTINGS_READ and value != defaults[name]:
                raise ValueError(f"GRPO.update reads no algorithm.{name}, got {value}: take covey train")
        check_bounds(self.algorithm, "algorithm.")
        objective = build_objective(self.algorithm, norm_length=1)
        if objective.needs_batch_selection or objective.needs_full_kl:
            name = "kl_estimator" if objective.needs_full_kl else "loss"
            value = vars(self.algorithm)[name]
            raise ValueError(f"GRPO.update has log-probs of whole responses alone, got algorithm.{name}={value}")
        estimate = build_credit(self.algorithm).estimate
        if isinstance(estimate, Custom) and estimate.num_inputs == 2:
            raise ValueError(
                "algorithm.advantage must take scores alone in GRPO.update, got a function of two arguments"
            )

    def update(self, batch: DocumentBatch) -> Tensor:
        """Return the loss of a batch, a scalar to be minimised. ValueError for a batch that `check` refuses."""
        advantages_N = self.advantages(batch)
        # A response counts as one token: its log-prob is the sum, which half precision would round by whole nats
        log_probs_N = at_least_float32(_values(batch["logprobs"]))
        column_NT = log_probs_N[:, None]
        inputs = ObjectiveInputs(
            log_probs_NT=column_NT,
            old_log_probs_NT=column_NT.detach(),
            sampler_log_probs_NT=column_NT.detach(),
            advantages=advantages_N.to(log_probs_N),
            mask_NT=torch.ones_like(column_NT, dtype=torch.bool),
            ref_log_probs_NT=_values(batch["ref_logprobs"]).detach().to(log_probs_N)[:, None],
        )
        objective = build_objective(self.algorithm, norm_length=1)
        loss, _ = objective(inputs, count_totals(inputs.mask_NT), self.algorithm.kl_coef)
        return loss

    def advantages(self, batch: DocumentBatch) -> Tensor:
        """Return the advantage of each response, in float64. ValueError for a batch that `check` refuses."""
        check(batch)
        estimator = build_credit(self.algorithm).estimate
        given = scores(_plain(batch["rewards"]), _plain(batch["prompt_ids"]))
        given = replace(given, rewards_N=snap_ties(given.rewards_N, given.groups_N))
        found_N, _ = estimate_advantages(estimator, given)
        return clamp_symmetric(found_N, self.algorithm.advantage_clip)


def check(batch: DocumentBatch) -> None:
    """Check the batch's lists. ValueError for wrong lengths, values or groups."""
    if missing := [name for name in DocumentBatch.__annotations__ if name not in batch]:
        raise ValueError(f"a batch must have {', '.join(DocumentBatch.__annotations__)}; it lacks {', '.join(missing)}")
    lengths = {name: len(batch[name]) for name in DocumentBatch.__annotations__}  # type: ignore[literal-required]
    if len(set(lengths.values())) > 1 or 0 in lengths.values():
        shown = ", ".join(f"{name} {length}" for name, length in lengths.items())
        raise ValueError(f"the lists of a batch must have one length >= 1, got {shown}")
    named: dict[Hashable, str] = {}
    for prompt_id, prompt in zip(_plain(batch["prompt_ids"]), batch["prompts"], strict=True):
        if named.setdefault(prompt_id, prompt) != prompt:
            raise ValueError(f"a group must have one prompt, got two with prompt_id {prompt_id}")
    for name in ("rewards", "logprobs", "ref_logprobs"):
        for index, value in enumerate(_plain(batch[name])):
            if not isinstance(value, numbers.Real) or not math.isfinite(value):
                raise ValueError(f"{name} of a batch must be finite, got {value} for response {index}")


def _values(given: Sequence[float | Tensor] | Tensor) -> Tensor:
    if isinstance(given, Tensor):
        return given
    return torch.stack([torch.as_tensor(one, dtype=torch.float64) for one in given])


def _plain(given: Sequence[Any] | Tensor) -> list[Any]:
    """Return plain numbers in place of tensors, which equal none but themselves."""
    listed = given.tolist() if isinstance(given, Tensor) else given
    return [one.item() if isinstance(one, Tensor) and one.ndim == 0 else one for one in listed]
