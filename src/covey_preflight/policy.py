"""Check the policy: engine against trainer, gradients across layouts. Shapes: L loss tokens of the batch."""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace

import torch
from torch import Tensor, nn

from covey.algorithm.build import build_objective
from covey.algorithm.settings import AlgorithmConfig
from covey.engine.weights import MEAN_SHARE
from covey.policy.logprobs import Scoring, score_tokens
from covey.policy.policy import Policy, inference
from covey.policy.settings import ModelConfig
from covey.policy.sharding import is_shard
from covey.run.build import trainer_settings
from covey.system import collectives
from covey.system.waits.timer import PhaseTimer
from covey.trainer.batch import count, make_batch, make_rows
from covey.trainer.layouts import LAYOUTS, Row
from covey.trainer.settings import OptimizerConfig
from covey.trainer.trainer import Trainer
from covey.types import Batch, Group, Rollout
from covey_preflight.budget import affordable_tokens, shorten_groups, tokens_of, uncertain
from covey_preflight.rounding import explained_error, explained_logprobs, kind_of, square
from covey_preflight.subject import Check, PreflightContext

SAMPLERS_NOTE = "; each sampler compares its own on a probe whenever it takes weights"
"""Note with source=ray: the engine measured here is one in this process."""
GRADIENT_TOLERANCE = {"float64": 1e-9, "float32": 1e-5, "bfloat16": 0.1, "float16": 0.02}
"""Relative error (L2 norms) by precision."""
MAX_ENTRIES = 1 << 24
"""Entries of a gradient that are compared; of a larger one every second, third, ... is."""
MAX_GRADIENT_TOKENS = 512
"""Tokens after which no more groups are added to the batch whose gradient is compared."""
HALF_RANGE = 2.0**-10
"""Advantages in float16 are so much smaller, or the loss scale of a first step would overflow."""
NUM_FORWARDS, FEWER_FORWARDS = 28, 6
"""Forward passes that the gradients of all layouts, or of the run's, are worth: seven or two, with backward."""


def check_logprobs(subject: PreflightContext) -> Check:
    """Check that the trainer finds the engine's log-probs, without dropout."""
    config = subject.config
    if config.engine.name == "fake":
        return Check(True, "engine=fake samples from a script, not from the policy", "")
    batch = whole_batch(subject)
    trainer_L = trainer_logprobs(subject, batch)
    sampler_L = torch.cat([m.sampler_logprob_L for m in batch.micro_batches])
    gap_L = (trainer_L.double() - sampler_L).abs()
    names_L = [m.prompt_ids[row] for m in batch.micro_batches for row in m.row_L.tolist()]
    largest, mean, worst = float(gap_L.max()), float(gap_L.mean()), names_L[int(gap_L.argmax())]
    worst_first = sorted(subject.groups, key=lambda group: group.prompt.id != worst)
    rollouts = [rollout for group in worst_first for rollout in group.rollouts if rollout.num_loss_tokens]
    wrong, limit = explained_logprobs(subject, {"engine": gap_L}, rollouts)
    figure = (
        f"engine and trainer differ by {largest:.2g} nats at most, {mean:.2g} on average of {len(gap_L)} tokens, "
        f"most in prompt {worst}{dropout_note(config.model)}{SAMPLERS_NOTE if config.source == 'ray' else ''}"
    )
    remedy = (
        f"engine={config.engine.name} or the model's attention is not what is trained: model.precision=float32 tells "
        "rounding from a defect, and preflight.logprob_tolerance accepts a known difference"
    )
    return Check(not wrong, figure, allowed_nats(limit), remedy if wrong else "", {"max": largest, "mean": mean})


def allowed_nats(limit: float) -> str:
    return f"{limit:.3g} nats at most, {MEAN_SHARE * limit:.3g} on average"


def trainer_logprobs(subject: PreflightContext, batch: Batch) -> Tensor:
    """Return the trainer's log-prob of every loss token, (L,), without dropout."""
    policy = subject.run.policy
    scoring = Scoring.of(policy, subject.run.source.sampling, subject.config.logprob_chunk)
    with inference(policy.model):
        return torch.cat([score_tokens(policy, m, scoring).logprob_L for m in batch.micro_batches])


def check_gradient(subject: PreflightContext) -> Check:
    """Check that the gradient is the same in every layout."""
    config, policy = subject.config, subject.run.policy
    # Rules over the whole batch have thresholds that rounding can cross; the plain objective takes their place
    plain = AlgorithmConfig() if subject.run.trainer.objective.needs_batch_selection else None
    trainer = probe_trainer(subject, plain)
    groups = first_groups(subject.groups)
    is_long = tokens_of(groups) > affordable_tokens(subject, NUM_FORWARDS)
    if is_long:
        groups = cut_groups(subject, groups, affordable_tokens(subject, FEWER_FORWARDS))
    rows = synthetic_rows(groups, HALF_RANGE if config.model.precision == "float16" else 1.0)
    with without_dropout(policy.model):
        variants = _variants(rows, (config.packing,) if is_long else tuple(LAYOUTS))
        # Row by row; of a large model in halves, which its one whole micro-batch is compared with
        compute_gradient_only(trainer, laid_out(subject, rows, "padded", -(-variants[0][1] // 2) if is_long else 1))
        expected = entries(policy.model)
        size = norm_of(expected)
        errors = {}
        for packing, budget in variants:
            compute_gradient_only(trainer, laid_out(subject, rows, packing, budget))
            pieces = zip(entries(policy.model), expected, strict=True)
            errors[packing, budget] = norm_of([got - wanted for got, wanted in pieces]) / size if size else float("nan")
        # Allow what rounding explains, measured in float64 where the usual tolerance is exceeded
        typed, sampling = config.preflight.gradient_tolerance, trainer_settings(config).sampling
        limit = typed or gradient_tolerance(config.model, policy)
        limit = explained_error(typed, policy, rows, sampling, max(errors.values()), limit)
    return _gradient_finding(config.model, limit, errors, tokens_of(groups), _ways(config.model, config.packing))


def _gradient_finding(
    model: ModelConfig, limit: float, errors: dict[tuple[str, int], float], num_tokens: int, ways: str
) -> Check:
    # A NaN is the worst of all, which max() alone would not see.
    (packing, budget), worst = max(errors.items(), key=lambda found: (math.isnan(found[1]), found[1]))
    figure = (
        f"relative error {worst:.2g} at most over {len(errors)} layouts and splits of {num_tokens:,} tokens, most with "
        f"packing={packing} in micro-batches of {budget} tokens{dropout_note(model)}"
    )
    if math.isnan(worst):
        figure = f"the gradient is 0 or not finite with packing={packing}"
    remedy = f"the model mixes tokens of different rollouts or its arithmetic depends on the shape: {ways}"
    passed = worst <= limit
    values = {f"{packing}/{budget}": error for (packing, budget), error in errors.items()}
    return Check(passed, figure, f"{limit:.3g}", "" if passed else remedy, values)


def _ways(model: ModelConfig, packing: str) -> str:
    """List settings that tell rounding from defects, and that accept the error."""
    ways = {
        "model.kernels=torch": model.kernels != "torch",
        "packing=padded": packing != "padded",
        "model.precision=float32": model.precision in ("bfloat16", "float16"),
        "model.precision=float64": model.precision == "float32",
    }
    untried = " or ".join(way for way, is_open in ways.items() if is_open)
    tells = f"{untried} may be exact and tells rounding from a defect, " if untried else ""
    return f"{tells}preflight.gradient_tolerance accepts it"


def probe_trainer(subject: PreflightContext, algorithm: AlgorithmConfig | None = None) -> Trainer:
    """Build the run's trainer on the same weights, with an empty optimiser."""
    settings = replace(trainer_settings(subject.config), optimizer=OptimizerConfig(name="sgd"))
    teacher = subject.run.trainer.forward.teacher if algorithm is None else None
    if algorithm is not None:
        objective = build_objective(algorithm, norm_length=subject.config.sampling.max_tokens)
        settings = replace(settings, objective=objective, algorithm=algorithm)
    timer = PhaseTimer(watchdog=subject.run.trainer.timer.watchdog)
    return Trainer(subject.run.policy, settings, subject.run.trainer.reference, timer, teacher)


class _Enough(Exception):
    """The gradient is computed; the step ends before any change."""


def compute_gradient_only(trainer: Trainer, batch: Batch) -> None:
    """Run a training step until the gradient is complete."""

    def stop() -> None:
        raise _Enough

    with suppress(_Enough):
        trainer.step(batch, step=0, on_before_update=stop)


@contextmanager
def without_dropout(model: nn.Module) -> Iterator[None]:
    """Disable the adapters' dropout in training mode, which checkpointing needs."""
    layers = [module for module in model.modules() if isinstance(module, nn.Dropout)]
    rates = [layer.p for layer in layers]
    for layer in layers:
        layer.p = 0.0
    try:
        yield
    finally:
        for layer, rate in zip(layers, rates, strict=True):
            layer.p = rate


def synthetic_rows(groups: Sequence[Group], scale: float) -> list[list[Row]]:
    """Build rows with synthetic, nonzero advantages of both signs."""
    generator = torch.Generator().manual_seed(0)

    def draw() -> float:
        size, sign = torch.rand(2, generator=generator).tolist()
        return scale * (0.5 + size) * (1 if sign < 0.5 else -1)

    return make_rows(groups, [[draw() for _ in group.rollouts] for group in groups])


def first_groups(groups: Sequence[Group]) -> list[Group]:
    """Return the first groups, uncertain ones first, at least two if possible."""
    chosen: list[Group] = []
    for group in sorted(groups, key=lambda group: not uncertain(group)):
        num_tokens = sum(len(rollout.input_ids) for other in chosen for rollout in other.rollouts)
        if len(chosen) < 2 or num_tokens < MAX_GRADIENT_TOKENS:
            chosen.append(group)
    return chosen


def cut_groups(
    subject: PreflightContext, groups: Sequence[Group], num_tokens: int, num_rollouts: int = 2
) -> list[Group]:
    """Return `shortened` groups with the trainer's log-probs."""
    found = shorten_groups(groups, num_tokens, num_rollouts, cuts_prompts=True)
    rows = synthetic_rows(found, 1.0)
    batch = laid_out(subject, rows, "padded", subject.config.micro_batch_tokens)
    logprobs = iter(trainer_logprobs(subject, batch).tolist())

    def scored(rollout: Rollout) -> Rollout:
        return replace(rollout, sampler_logprobs=tuple(next(logprobs) if own else 0.0 for own in rollout.loss_mask))

    return [replace(group, rollouts=tuple(map(scored, group.rollouts))) for group in found]


def _variants(rows: Sequence[Sequence[Row]], layouts: Sequence[str]) -> list[tuple[str, int]]:
    flat = [row for group in rows for row in group]
    whole = len(flat) * max(row.num_tokens for row in flat)
    budgets = (whole,) if len(layouts) == 1 else (whole, whole // 3)
    return [(packing, budget) for packing in layouts for budget in budgets]


def whole_batch(subject: PreflightContext) -> Batch:
    """Lay out the sampled groups as the run does."""
    config = subject.config
    return laid_out(subject, synthetic_rows(subject.groups, 1.0), config.packing, config.micro_batch_tokens)


def laid_out(subject: PreflightContext, rows: Sequence[Sequence[Row]], packing: str, budget: int) -> Batch:
    """Lay out rows that all ranks share, with counts times ranks."""
    num_ranks = collectives.world_size()
    num_tokens, num_sequences = count(rows)
    return make_batch(
        rows,
        packing=packing,
        micro_batch_tokens=budget,
        totals=(num_ranks * num_tokens, num_ranks * num_sequences, num_ranks * num_sequences),
        device=subject.run.policy.device,
        attention=subject.run.policy.attention,
    )


def entries(model: nn.Module) -> list[Tensor]:
    """Copy this rank's gradient, in float32 at least, evenly thinned if large."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    stride = -(-sum(p.numel() for p in parameters) // MAX_ENTRIES)
    gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
    return [local(g).flatten()[::stride].to(torch.promote_types(g.dtype, torch.float32), copy=True) for g in gradients]


def local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if is_shard(tensor) else tensor  # type: ignore[attr-defined]


def norm_of(pieces: Sequence[Tensor]) -> float:
    """Return the norm over all ranks. If each holds the whole gradient, all norms grow by the same factor."""
    return float(collectives.all_sum(torch.tensor(sum(map(square, pieces)), dtype=torch.float64)).sqrt())


def gradient_tolerance(model: ModelConfig, policy: Policy) -> float:
    """Return the tolerance of gradients; some norms compute in float32 always."""
    kind = kind_of(model)
    if kind == "float64" and any("RMSNorm" in type(module).__name__ for module in policy.model.modules()):
        kind = "float32"
    return GRADIENT_TOLERANCE[kind]


def dropout_note(model: ModelConfig) -> str:
    return " (with model.lora_dropout off)" if model.lora_dropout > 0 else ""
